"""What every module of a network is called with, from one forward pass over a sample batch."""

from __future__ import annotations

import copy
import inspect
import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tatami.errors import InputError
from tatami.tiled.following.counting import ForwardFlop
from tatami.tiled.following.exporting import ModuleCall
from tatami.tiled.following.keeping import Keeping, Kept

_FEWEST = 2
"""torch.export takes a length of 1 for a constant."""
_ALIKE = 1e-3
"""Of the largest element: single precision in another order is off by 1e-6, a sample that sees others by much more."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """A batch of inputs, for following a network.

    Attributes:
        args, kwargs: of the network.
        samples: in the batch.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    samples: int

    @classmethod
    def of(cls, batch: Any) -> Sample:
        """From a tensor (samples, ...), a tuple or list of positional arguments, or a mapping of named ones.

        Raises:
            InputError: no tensor in it, or fewer than two samples.
        """
        if isinstance(batch, Mapping):
            args, kwargs = (), dict(batch)
        else:
            args, kwargs = tuple(batch) if isinstance(batch, (tuple, list)) else (batch,), {}
        lengths = [
            leaf.shape[0] for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor) and leaf.dim()
        ]
        if not lengths or lengths[0] < _FEWEST:
            raise InputError(
                f"a sample batch must have tensors of at least {_FEWEST} samples on their first axis; this one has "
                f"{lengths[0] if lengths else 'no tensor'}"
            )
        return cls(args=args, kwargs=kwargs, samples=lengths[0])

    def part(self, samples: int) -> Sample:
        """The first `samples` of it."""

        def cut(leaf: Any) -> Any:
            shares = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == self.samples
            return leaf[:samples] if shares else leaf

        args, kwargs = pytree.tree_map(cut, (self.args, dict(self.kwargs)))
        return Sample(args=args, kwargs=kwargs, samples=samples)


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a forward pass showed.

    Attributes:
        calls: of each module that was called, by name: its first call; only those that are called in one way.
        draws: the modules that drew random numbers themselves, not by way of others.
        normalizes: the modules that took statistics of the batch by a function, not by way of a layer.
        mixes: whether, in evaluation, the result for a sample depends on the other samples of the batch.
        forward_flop: of one sample, in the whole network.
        flop: the same of each module.
        samples: of the batch that the calls were made with.
        drawing: the functions that drew random numbers.
        readers: of each parameter, by name: the modules that computed something with it.
        last_axis: of modules that give (..., outputs) for (..., inputs): the number of outputs.
        logits: the linear layers whose result the network returns, or takes the cross-entropy of.
        kept: what the pass kept for backward, in its order.
        kept_bytes: the same of one sample, with the results, and what a loss keeps of them.
        ends: of modules: how much was kept when their first call ended.
        result_axes: of each leaf of the network's result: the axis of the samples; None where it has none.
        runs_without_samples: whether the network runs on a batch of no sample as well, in training and in evaluation.
    """

    calls: Mapping[str, ModuleCall]
    draws: frozenset[str]
    normalizes: frozenset[str]
    mixes: bool
    forward_flop: float
    flop: Mapping[str, float] = field(default_factory=dict)
    samples: int = 1
    drawing: frozenset[Any] = frozenset()
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    logits: frozenset[str] = frozenset()
    last_axis: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[Kept] = ()
    kept_bytes: float = 0.0
    ends: Mapping[str, int] = field(default_factory=dict)
    result_axes: Sequence[int | None] | None = None
    runs_without_samples: bool = False

    def kept_between(self, first: str, second: str, *, units: int) -> float | None:
        """Bytes of one sample that were kept from the end of one module to that of another, with `units` on the last axis.

        None where one of them was not called, or not in this order.
        """
        begin, end = self.ends.get(first, math.inf), self.ends.get(second, -1)
        if begin > end:
            return None
        pieces = self.kept[int(begin) : end]
        return sum(each.size_bytes for each in pieces if each.last_axis == units) / self.samples


def capture(model: nn.Module, sample: Sample) -> Captured:
    """Run `model` forward, twice with different numbers of samples, and leave it as it was.

    What differs between the two is the axis of samples, in the inputs of every module.
    """
    most = sample.part(min(sample.samples, 4))
    watch = _Watch(model, most)
    with watch.counted as counted:
        first = _calls(model, most, watch)
    less = most.part(most.samples - 1) if most.samples > _FEWEST else _repeated(most)
    other_watch = _Watch(model, less)
    second = _calls(model, less, other_watch)
    calls = {}
    for name, (args, kwargs) in first.items():
        if name not in second:
            continue
        mine, structure = pytree.tree_flatten((args, kwargs))
        other, other_structure = pytree.tree_flatten(second[name])
        if structure == other_structure:
            axes = tuple(_sample_axis(a, b) for a, b in zip(mine, other, strict=True))
            calls[name] = ModuleCall(args=args, kwargs=kwargs, sample_axes=axes)
    return Captured(
        calls=calls,
        draws=frozenset(watch.draws),
        normalizes=frozenset(watch.normalizes),
        mixes=_mixes_samples(model, most),
        forward_flop=counted.flop / most.samples,
        flop={name: flop / most.samples for name, flop in watch.flop.items()},
        samples=most.samples,
        readers={name: frozenset(watch.readers.get(id(p), ())) for name, p in model.named_parameters(remove_duplicate=False)},
        logits=frozenset(watch.logits),
        drawing=frozenset(watch.drawing),
        last_axis=watch.last_axis,
        kept=tuple(watch.keeping.found.values()),
        kept_bytes=_kept_per_sample((most.samples, watch.kept_bytes), (less.samples, other_watch.kept_bytes)),
        ends=watch.ends,
        result_axes=_result_axes(watch.results, other_watch.results),
        runs_without_samples=_runs_without_samples(model, most),
    )


def _kept_per_sample(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Bytes of one sample; what is kept once, however many samples there are, counts for each: a rank may have a single one."""
    (samples, size_bytes), (other_samples, other_bytes) = one, other
    slope = (size_bytes - other_bytes) / (samples - other_samples)
    return max(size_bytes / samples, slope, size_bytes - slope * (samples - 1))


def _result_axes(one: Sequence[Any], other: Sequence[Any]) -> tuple[int | None, ...] | None:
    return tuple(_sample_axis(a, b) for a, b in zip(one, other, strict=True)) if len(one) == len(other) else None


def _runs_without_samples(model: nn.Module, sample: Sample) -> bool:
    none = sample.part(0)
    with unchanged(model), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for training in (True, False):
            model.train(training)
            try:
                model(*none.args, **none.kwargs)
            except Exception:  # any operation of the user's may fail; then a sample stands in
                return False
    return True


def _mixes_samples(model: nn.Module, sample: Sample) -> bool:
    fewer = sample.part(sample.samples - 1)
    with unchanged(model), torch.no_grad(), _SteadyDraws():
        model.eval()
        whole, part = (pytree.tree_leaves(model(*each.args, **each.kwargs)) for each in (sample, fewer))
    for one, other in zip(whole, part, strict=False):
        if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not one.dim():
            continue
        if one.shape[0] == sample.samples and one.shape[1:] == other.shape[1:] and one.is_floating_point():
            scale = float(other.abs().nan_to_num(posinf=0.0).max()) if other.numel() else 0.0
            if not torch.allclose(one[: fewer.samples], other, rtol=0.0, atol=_ALIKE * max(scale, 1e-30), equal_nan=True):
                return True
    return False


class _SteadyDraws(TorchFunctionMode):
    """What is drawn is always the same number, so that samples that differ differ by what the network makes of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not torch.equal(state, torch.get_rng_state()):
            result.fill_(0.5 if result.is_floating_point() else 0)
        return result


class _Watch(TorchFunctionMode):
    """Who looks beyond single samples: who draws random numbers, and who takes statistics of the batch; and who reads what.

    Whenever a module begins or ends, what was drawn since then belongs to the one that ran.
    """

    def __init__(self, model: nn.Module, sample: Sample) -> None:
        super().__init__()
        inputs = [leaf for leaf in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(leaf, torch.Tensor)]
        self.counted = ForwardFlop()
        self.flop: dict[str, float] = {}
        self._begun: list[float] = []
        self.readers: dict[int, set[str]] = {}
        self.logits: set[str] = set()
        self.drawing: set[Any] = set()
        self.last_axis: dict[str, int] = {}
        self._linear: list[tuple[str, torch.Tensor]] = []
        self._parameters = {id(parameter) for parameter in model.parameters()}
        # A sample may be a view of a whole data set.
        self.keeping = Keeping([*model.parameters(), *model.buffers(), *inputs])
        self.kept_bytes = sum(leaf.numel() * leaf.element_size() for leaf in inputs)
        self.ends: dict[str, int] = {}
        self.results: list[Any] = []
        self.draws: set[str] = set()
        self.normalizes: set[str] = set()
        self._running: list[str] = []
        self._state = torch.get_rng_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.batch_norm, torch.nn.functional.batch_norm) and self._running:
            self.normalizes.add(self._running[-1])
        if func is torch.nn.functional.cross_entropy and args:
            self.returned(args[0])
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(state, torch.get_rng_state()):
            self.drawing.add(func)
        if isinstance(result, torch.Tensor):
            for each in (*args, *(kwargs or {}).values()):
                if id(each) in self._parameters:
                    self.readers.setdefault(id(each), set()).add(self._running[-1] if self._running else "")
        return result

    def computed(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module gave `output`; that of a linear layer is kept until it is known what becomes of it."""
        x = inputs[0] if inputs else None
        self.ends.setdefault(name, len(self.keeping.found))
        if isinstance(output, torch.Tensor) and output.dim():
            if isinstance(module, nn.Linear):
                self._linear.append((name, output))
            if isinstance(x, torch.Tensor) and x.shape[:-1] == output.shape[:-1]:
                self.last_axis[name] = output.shape[-1]

    def returned(self, value: Any) -> None:
        """`value` is a result, or a cross-entropy is taken of it: linear layers that gave it, or a view of it, gave logits."""
        if isinstance(value, torch.Tensor):
            where = value.untyped_storage().data_ptr()
            self.logits |= {name for name, output in self._linear if output.untyped_storage().data_ptr() == where}

    def begin(self, name: str) -> None:
        self._look()
        self._running.append(name)
        self._begun.append(self.counted.flop)

    def end(self) -> None:
        self._look()
        name = self._running.pop()
        self.flop[name] = self.flop.get(name, 0.0) + self.counted.flop - self._begun.pop()

    def _look(self) -> None:
        state = torch.get_rng_state()
        if self._running and not torch.equal(state, self._state):
            self.draws.add(self._running[-1])
        self._state = state


def _repeated(sample: Sample) -> Sample:
    """Three samples of two."""

    def repeat(leaf: Any) -> Any:
        shares = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == sample.samples
        return torch.cat([leaf, leaf[:1]]) if shares else leaf

    args, kwargs = pytree.tree_map(repeat, (sample.args, dict(sample.kwargs)))
    return Sample(args=args, kwargs=kwargs, samples=sample.samples + 1)


def _sample_axis(one: Any, other: Any) -> int | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dim() != other.dim():
        return None
    differ = [axis for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]]
    return differ[0] if len(differ) == 1 else None


def _calls(model: nn.Module, sample: Sample, watch: _Watch) -> dict[str, tuple[tuple[Any, ...], dict[str, Any]]]:
    """The canonical arguments of every module's first call, without those that are called in several ways."""
    found: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    several: set[str] = set()
    with ExitStack() as stack:
        stack.enter_context(unchanged(model))
        for name, module in model.named_modules():

            def remember(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                call = canonical(module, args, kwargs)
                watch.begin(name)
                if name not in found:
                    found[name] = call
                elif _kinds(found[name]) != _kinds(call):
                    several.add(name)

            def ended(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                watch.computed(name, module, args, output)
                watch.end()

            for handle in (module.register_forward_pre_hook(remember, with_kwargs=True), module.register_forward_hook(ended)):
                stack.callback(handle.remove)
        stack.enter_context(torch.enable_grad())
        stack.enter_context(watch)
        stack.enter_context(watch.keeping.watched())
        result = model(*sample.args, **sample.kwargs)
    watch.kept_bytes += watch.keeping.size_bytes
    watch.results = pytree.tree_leaves(result)
    for leaf in watch.results:
        watch.returned(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            watch.kept_bytes += 2 * leaf.numel() * leaf.element_size()  # a loss keeps about as much of it
    return {name: call for name, call in found.items() if name not in several}


def canonical(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call in the one way in which calls are compared: every argument by its name, wherever it has one."""
    try:
        bound = inspect.signature(type(module).forward).bind(module, *args, **kwargs)
    except (TypeError, ValueError):
        return tuple(args), dict(kwargs)
    kinds = {name: parameter.kind for name, parameter in bound.signature.parameters.items()}
    if any(kinds[name] in (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.POSITIONAL_ONLY) for name in bound.arguments):
        return bound.args[1:], dict(bound.kwargs)
    named: dict[str, Any] = {}
    for name, value in list(bound.arguments.items())[1:]:
        named |= dict(sorted(value.items())) if kinds[name] is inspect.Parameter.VAR_KEYWORD else {name: value}
    return (), named


def _kinds(call: tuple[tuple[Any, ...], dict[str, Any]]) -> list[Any]:
    leaves, structure = pytree.tree_flatten(call)
    return [structure, *((leaf.dim(), leaf.dtype) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves)]


@contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """What a forward pass in training changes (running statistics, random state) is put back."""
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    modes = {module: module.training for module in model.modules()}
    with torch.random.fork_rng(devices=[]):
        model.train()
        try:
            yield
        finally:
            for module, mode in modes.items():
                module.training = mode
            with torch.no_grad():
                for name, buffer in model.named_buffers():
                    if name in buffers:
                        buffer.copy_(buffers[name])


def inputs_of(call: ModuleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, cut loose from the pass that they come from."""

    def loose(leaf: Any) -> Any:
        return leaf.detach() if isinstance(leaf, torch.Tensor) else leaf

    args, kwargs = pytree.tree_map(loose, (call.args, copy.copy(dict(call.kwargs))))
    return args, kwargs
