"""Find what can be tiled in an `nn.Module`, its linear-activation-linear pairs, and refuse by name what can not be exact.

`torch.fx` follows the data through the forward pass, so that functional activations and any nesting of modules are understood.
A model that fx can not follow is still searched for pairs inside its `nn.Sequential` containers.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import fx, nn

from tatami.errors import ModelError
from tatami.workload import Workload, linear_pair

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
_SCALAR_ARITHMETIC = {operator.mul, operator.truediv, operator.add, operator.sub, operator.neg, operator.pow}
_RANDOM_FUNCTIONS = {
    F.dropout, F.dropout1d, F.dropout2d, F.dropout3d, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu,
    F.gumbel_softmax, torch.dropout, torch.bernoulli, torch.rand_like, torch.randn_like, torch.rand, torch.randn,
}  # fmt: skip
_RANDOM_MODULES = (
    nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, nn.FeatureAlphaDropout, nn.RReLU,
    nn.FractionalMaxPool2d, nn.FractionalMaxPool3d,
)  # fmt: skip
_BATCH_MODULES = (nn.modules.batchnorm._BatchNorm,)


@dataclass(frozen=True, kw_only=True)
class PairNames:
    """The qualified names of a pair's two linear layers, and of the dropout layers between them."""

    first: str
    second: str
    dropouts: tuple[str, ...] = ()


_TRACING = threading.Lock()
"""torch.fx patches `nn.Module` for the whole process while it traces, and ranks may be threads of one process."""


def find_pairs(model: nn.Module) -> tuple[PairNames, ...]:
    """The linear-activation-linear pairs of `model`, in the order of its forward pass. No layer is in two pairs.

    Raises:
        ModelError: there is no pair; or the model holds a layer that a tiled run could not compute exactly (named).
    """
    _refuse_inexact_modules(model)
    try:
        with _TRACING:
            graph = fx.Tracer().trace(model)
    except Exception:
        chains = list(_sequential_chains(model))
    else:
        _refuse_random_functions(graph)
        chains = list(_graph_chains(model, graph))
    pairs = tuple(_disjoint(chains))
    if not pairs:
        raise ModelError(
            f"no Linear-activation-Linear pair was found in {type(model).__name__}. tatami.tile splits the units between two "
            "linear layers with element-wise activations in between; data parallelism alone needs no tiling"
        )
    return pairs


def describe(model: nn.Module, *, samples: int) -> Workload:
    """The workload of one iteration of `model` over a global batch of `samples`.

    Raises:
        ModelError: as `find_pairs`.
    """
    return workload_of(model, find_pairs(model), samples=samples)


def workload_of(model: nn.Module, pairs: tuple[PairNames, ...], *, samples: int) -> Workload:
    """The workload of `model` with the pairs that `find_pairs` found in it."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    tiled = set()
    shapes = []
    element_bytes = 4
    for index, names in enumerate(pairs):
        first, second = model.get_submodule(names.first), model.get_submodule(names.second)
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        tiled |= {f"{names.first}.weight", f"{names.first}.bias", f"{names.second}.weight"}
        shapes.append(
            linear_pair(
                first.in_features,
                first.out_features,
                second.out_features,
                unit_bias=first.bias is not None,
                input_gradient=index > 0 or next(iter(trained), "") != f"{names.first}.weight",
                name=names.first.rpartition(".")[0],
            )
        )
        # Half precision is summed, and therefore travels, in float32.
        element_bytes = max(element_bytes, first.weight.element_size())
    replicated = [parameter for name, parameter in trained.items() if name not in tiled]
    return Workload(
        samples=samples,
        blocks=tuple(shapes),
        replicated_parameters=sum(parameter.numel() for parameter in replicated),
        # 2 flop per weight forward, 4 backward: exact for linear layers, too few where weights are used more than once.
        replicated_flop_per_sample=sum(6 * parameter.numel() for parameter in replicated if parameter.dim() > 1),
        element_bytes=element_bytes,
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
        here = node
        while len(here.users) == 1:
            here = next(iter(here.users))
            if _is_linear(model, here):
                names = (str(node.target), str(here.target))
                if all(calls[name] == 1 and name not in tied for name in (*names, *dropouts)):
                    yield PairNames(first=names[0], second=names[1], dropouts=tuple(dropouts))
                break
            if here.op == "call_module" and isinstance(model.get_submodule(str(here.target)), nn.Dropout):
                dropouts.append(str(here.target))
            elif not _is_elementwise(model, here):
                break


def _is_linear(model: nn.Module, node: fx.Node) -> bool:
    return node.op == "call_module" and _is_plain_linear(model.get_submodule(str(node.target)))


def _is_plain_linear(module: nn.Module) -> bool:
    """A Linear, and nothing but that: neither weight normalisation nor hooks, which would be lost with the layer."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    return type(module) is nn.Linear and set(module._parameters) == {"weight", "bias"} and not any(hooks)


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
        for name, child in container.named_children():
            path = f"{prefix}.{name}" if prefix else name
            if _is_plain_linear(child):
                if first is not None and not {first, path, *dropouts} & tied:
                    yield PairNames(first=first, second=path, dropouts=tuple(dropouts))
                first, dropouts = path, []
            elif isinstance(child, nn.Dropout):
                dropouts.append(path)
            elif not isinstance(child, _ELEMENTWISE_MODULES):
                first, dropouts = None, []


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


def _refuse_inexact_modules(model: nn.Module) -> None:
    for name, module in model.named_modules():
        what = f"layer {name or '(the model itself)'} ({type(module).__name__})"
        if isinstance(module, _RANDOM_MODULES) or (isinstance(module, nn.Dropout) and type(module) is not nn.Dropout):
            raise ModelError(f"{what} draws random numbers that a tiled run can not draw alike; use torch.nn.Dropout")
        if isinstance(module, _BATCH_MODULES):
            raise ModelError(
                f"{what} takes its statistics over the batch, of which a rank sees only a part: the result would not be "
                "that of one machine. Use torch.nn.LayerNorm"
            )
        if isinstance(module, (nn.Embedding, nn.EmbeddingBag)) and module.sparse:
            raise ModelError(f"{what} has sparse gradients, which are not summed over ranks. Set sparse=False")
        dropout = getattr(module, "dropout", 0.0)
        if isinstance(dropout, float) and dropout > 0.0:
            raise ModelError(f"{what} has dropout={dropout} inside, which a tiled run could not draw alike. Set it to 0")


def _refuse_random_functions(graph: fx.Graph) -> None:
    for node in graph.nodes:
        random_method = node.op == "call_method" and str(node.target).rstrip("_") in ("bernoulli", "normal", "uniform")
        if random_method or (node.op == "call_function" and node.target in _RANDOM_FUNCTIONS):
            target = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
            raise ModelError(
                f"the forward pass calls {target} (node {node.name}), whose random numbers a tiled run could not draw alike. "
                "Use a torch.nn.Dropout layer"
            )
