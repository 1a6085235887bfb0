"""Find the linear-activation-linear pairs of an `nn.Module` without running it.

`torch.fx` follows the data through the forward pass, so that functional activations and any nesting of modules are understood.
A model that fx cannot follow is still searched for pairs inside its `nn.Sequential` containers.
"""

from __future__ import annotations

import contextlib
import itertools
import operator
import re
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx, nn

from tatami.partition.tracing.restore_state import kept
from tatami.partition.tracing.settings import has_hooks
from tatami.runtime.context import StandsIn
from tatami.runtime.rows import ONE_EACH, UnitRuns
from tatami.runtime.tensor_parallel import ReplicaComm, copy_to_replica, sum_over_replica
from tatami.workload import Block, linear_pair

_ELEMENTWISE_MODULES = (
    nn.Sigmoid, nn.Tanh, nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish,
    nn.Softplus, nn.Softsign, nn.Hardtanh, nn.Hardsigmoid, nn.Hardswish, nn.Hardshrink, nn.Softshrink, nn.Tanhshrink,
    nn.LogSigmoid, nn.Threshold, nn.Identity,
)  # fmt: skip
_ELEMENTWISE_FUNCTIONS = {
    torch.sigmoid, torch.tanh, torch.relu, torch.exp, torch.sin, torch.cos, torch.abs, torch.square, torch.erf,
    torch.clamp, F.sigmoid, F.tanh, F.relu, F.relu6, F.leaky_relu, F.elu, F.celu, F.selu, F.gelu, F.silu, F.mish,
    F.softplus, F.softsign, F.hardtanh, F.hardsigmoid, F.hardswish, F.hardshrink, F.softshrink, F.tanhshrink,
    F.logsigmoid, F.threshold,
}  # fmt: skip
_ELEMENTWISE_METHODS = {"sigmoid", "tanh", "relu", "exp", "sin", "cos", "abs", "square", "erf", "clamp", "float", "double"}
_IN_PLACE = re.compile(r"\w*[^_]_")
_SCALAR_ARITHMETIC = {operator.mul, operator.truediv, operator.add, operator.sub, operator.neg, operator.pow}


@dataclass(frozen=True, kw_only=True)
class PairNames:
    """The qualified names of a pair's two linear layers, and of the modules between them: dropout layers, and others."""

    first: str
    second: str
    dropouts: tuple[str, ...] = ()
    others: tuple[str, ...] = ()

    @property
    def between(self) -> set[str]:
        """What sees some of the units where ranks share them: modules between, and containers of one end, as an encoder is."""
        members = {self.first, *self.dropouts, *self.others, self.second}
        around = {name.rsplit(".", count)[0] for name in members for count in range(1, name.count(".") + 1)}
        inside = {name for name in around if not (self.first.startswith(f"{name}.") and self.second.startswith(f"{name}."))}
        return inside | {*self.dropouts, *self.others}


def find_pairs(model: nn.Module) -> tuple[PairNames, ...]:
    """The linear-activation-linear pairs of `model`, in the order of its forward pass. No layer is in two pairs, and nothing
    between has hooks, which are to be called with what is whole.

    They are pairs, or are not called, in training and in evaluation, with gradients and without: the network may branch by it.
    """
    found, calls = _chains(model)
    modes = {module: module.training for module in model.modules()}
    others = set(itertools.product((True, False), repeat=2)) - {(model.training, torch.is_grad_enabled())}
    try:
        for training, has_gradients in others if calls and found else ():
            for module in modes:
                module.training = training
            with torch.set_grad_enabled(has_gradients):
                chains, calls = _chains(model)
            same = {(each.first, each.second) for each in chains}
            found = [
                each
                for each in found
                if (each.first, each.second) in same or (calls is not None and calls.isdisjoint((each.first, each.second)))
            ]
    finally:
        for module, mode in modes.items():
            module.training = mode
    return tuple(_disjoint([pair for pair in found if not any(has_hooks(model.get_submodule(name)) for name in pair.between)]))


def _chains(model: nn.Module) -> tuple[list[PairNames], set[str] | None]:
    """What may be pairs, and the modules that are called; None where torch.fx cannot follow the network."""
    graph = traced(model).graph
    if graph is None:
        return list(_sequential_chains(model)), None
    return list(_graph_chains(model, graph)), {str(node.target) for node in graph.nodes if node.op == "call_module"}


_tracing = threading.Lock()
"""Two traces at a time would each put back what the other one had patched."""


@dataclass(frozen=True, kw_only=True)
class Traced:
    """A forward pass as torch.fx sees it.

    Attributes:
        graph: None where torch.fx cannot follow it.
        written: buffers into which it writes something that is made of its inputs.
    """

    graph: fx.Graph | None
    written: tuple[str, ...] = ()


class _OwnThread(fx.Tracer):
    """Follows the thread that it is made in. torch.fx patches `nn.Module` for all: what other threads call is left as it is."""

    def __init__(self) -> None:
        super().__init__()
        self._thread = threading.get_ident()

    def call_module(self, m: nn.Module, forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if threading.get_ident() != self._thread:
            return forward(*args, **kwargs)
        return super().call_module(m, forward, args, kwargs)

    def getattr(self, attr: str, attr_val: Any, parameter_proxy_cache: dict[str, fx.Proxy]) -> Any:
        if threading.get_ident() != self._thread:
            return attr_val
        return super().getattr(attr, attr_val, parameter_proxy_cache)


def traced(model: nn.Module) -> Traced:
    """The forward pass of `model`, which stays as it is."""
    graph = None
    with kept(model):
        with contextlib.suppress(Exception), _tracing:
            graph = _OwnThread().trace(model)
        held: list[tuple[str, object]] = list(model.named_buffers())
        written = {name for name, value in held if isinstance(value, fx.Proxy)}
    buffers = {name for name, _ in model.named_buffers()}
    for node in graph.nodes if graph is not None else ():
        if node.op == "call_method" and _IN_PLACE.fullmatch(node.target) and isinstance(node.args[0], fx.Node):
            written |= {str(node.args[0].target)} & buffers
    return Traced(graph=graph, written=tuple(sorted(written)))


def pair_cuts(model: nn.Module, names: PairNames) -> dict[str, UnitRuns]:
    """The tensors of a pair, and where its units lie in them."""
    first = model.get_submodule(names.first)
    cuts = {f"{names.first}.weight": ONE_EACH}
    if first.bias is not None:
        cuts[f"{names.first}.bias"] = ONE_EACH
    return {**cuts, f"{names.second}.weight": UnitRuns(axis=1, runs=ONE_EACH.runs)}


def pair_block(model: nn.Module, names: PairNames, *, rows: float = 1.0) -> Block:
    """The facts of a pair.

    Args:
        rows: that go through it for each sample: a sample of a sequence has tokens.
    """
    first, second = model.get_submodule(names.first), model.get_submodule(names.second)
    assert isinstance(first, nn.Linear)
    assert isinstance(second, nn.Linear)
    # Modules are registered in the order in which data goes through them, or nearly always.
    below = itertools.takewhile(lambda item: item[0] != f"{names.first}.weight", model.named_parameters())
    return linear_pair(
        first.in_features,
        first.out_features,
        second.out_features,
        unit_bias=first.bias is not None,
        input_gradient=any(parameter.requires_grad for _, parameter in below),
        rows=rows,
        name=names.first.rpartition(".")[0],
    )


def _graph_chains(model: nn.Module, graph: fx.Graph) -> Iterator[PairNames]:
    """Linear layers whose output goes through element-wise operations alone, with one user each, into another linear layer."""
    calls: dict[str, int] = {}
    for node in graph.nodes:
        if node.op == "call_module":
            calls[str(node.target)] = calls.get(str(node.target), 0) + 1
    # A weight that is also read elsewhere in the forward pass must be whole there.
    tied = _tied_modules(model) | {str(node.target).rpartition(".")[0] for node in graph.nodes if node.op == "get_attr"}
    for node in graph.nodes:
        if not _is_linear(model, node):
            continue
        dropouts: list[str] = []
        others: list[str] = []
        here = node
        while len(here.users) == 1:
            here = next(iter(here.users))
            if _is_linear(model, here):
                names = (str(node.target), str(here.target))
                if all(calls[name] == 1 and name not in tied for name in (*names, *dropouts)):
                    yield PairNames(first=names[0], second=names[1], dropouts=tuple(dropouts), others=tuple(others))
                break
            if here.op == "call_module" and isinstance(model.get_submodule(str(here.target)), nn.Dropout):
                dropouts.append(str(here.target))
            elif not _is_elementwise(model, here):
                break
            elif here.op == "call_module":
                others.append(str(here.target))


def _is_linear(model: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and is_plain_linear(model.get_submodule(str(node.target)))


def is_plain_linear(module: nn.Module) -> bool:
    """A Linear, and nothing but that: neither weight normalisation nor hooks, which would be lost with the layer."""
    return type(module) is nn.Linear and set(module._parameters) == {"weight", "bias"} and not has_hooks(module)


def works_elementwise(replacement: Any) -> bool:
    """Whether a module or a function works element by element, so that it may stand between the layers of a pair."""
    return isinstance(replacement, _ELEMENTWISE_MODULES) or (callable(replacement) and replacement in _ELEMENTWISE_FUNCTIONS)


def _is_elementwise(model: nn.Module, node: fx.Node) -> bool:
    tensor_inputs = len(node.all_input_nodes)
    if tensor_inputs != 1:
        return False
    if node.op == "call_module":
        return isinstance(model.get_submodule(str(node.target)), _ELEMENTWISE_MODULES)
    if node.op == "call_function":
        arguments = (*node.args, *node.kwargs.values())
        scalars = all(isinstance(a, (fx.Node, int, float, bool, type(None), str)) for a in arguments)
        return scalars and (node.target in _ELEMENTWISE_FUNCTIONS or node.target in _SCALAR_ARITHMETIC)
    return node.op == "call_method" and node.target in _ELEMENTWISE_METHODS


def _sequential_chains(model: nn.Module) -> Iterator[PairNames]:
    """Pairs of direct neighbours inside `nn.Sequential` containers: what can be known without following the forward pass."""
    tied = _tied_modules(model)
    for prefix, container in model.named_modules():
        if type(container) is not nn.Sequential:
            continue
        first: str | None = None
        dropouts: list[str] = []
        others: list[str] = []
        for name, child in container.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if is_plain_linear(child):
                if first is not None and not {first, path, *dropouts} & tied:
                    yield PairNames(first=first, second=path, dropouts=tuple(dropouts), others=tuple(others))
                first, dropouts, others = path, [], []
            elif isinstance(child, nn.Dropout):
                dropouts.append(path)
            elif isinstance(child, _ELEMENTWISE_MODULES):
                others.append(path)
            else:
                first, dropouts, others = None, [], []


def _disjoint(chains: list[PairNames]) -> Iterator[PairNames]:
    taken: set[str] = set()
    for names in chains:
        if not {names.first, names.second} & taken:
            taken |= {names.first, names.second}
            yield names


def _tied_modules(model: nn.Module) -> set[str]:
    """Modules that share a parameter with another one, or are reachable under two names."""
    owners: dict[int, set[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        keys = [id(parameter) for parameter in module.parameters(recurse=False)] or [id(module)]
        for key in keys:
            owners.setdefault(key, set()).add(name)
    return {name for names in owners.values() if len(names) > 1 for name in names}


class _TiledLinear(StandsIn):
    def __init__(self, linear: nn.Linear, *, replica: ReplicaComm) -> None:
        self._linear, self._replica = linear, replica

    @property
    def is_plain(self) -> bool:
        """Whether all units are here, so that it computes what the layer itself would."""
        return self._replica.comm is None


class TiledFirst(_TiledLinear):
    """Stands in place of the `forward` of the first Linear of a pair, whose weight was cut: uneven rows of it.

    The weight is (units_here, inputs) of (units, inputs), the bias (units_here,) of (units,), or None.
    """

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., inputs) to (samples_here, ..., units_here)."""
        return F.linear(copy_to_replica(input, self._replica), self._linear.weight, self._linear.bias)


class TiledSecond(_TiledLinear):
    """Stands in place of the `forward` of the second Linear of a pair, whose weight was cut: uneven replicas of it.

    Its output is summed over the replica of ranks. The weight is (outputs, units_here) of (outputs, units), the bias
    (outputs,), the same on every rank, or None.
    """

    def __call__(self, input: torch.Tensor) -> torch.Tensor:
        """(samples_here, ..., units_here) to (samples_here, ..., outputs), the whole sum on every rank of the replica."""
        bias: torch.Tensor | None = self._linear.bias
        if self._replica.comm is None:
            return F.linear(input, self._linear.weight, bias)
        output = sum_over_replica(F.linear(input, self._linear.weight), self._replica)
        return output if bias is None else output + bias.to(output.dtype)  # under autocast they differ
