"""What every module of a network is called with, from one forward pass over a sample batch."""

from __future__ import annotations

import copy
import functools
import inspect
import math
import warnings
from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tatami.errors import ModelError
from tatami.partition.tracing.exporting import ModuleCall
from tatami.partition.tracing.flop_counting import PassFlop
from tatami.partition.tracing.layers import KeptByLayer, layer_bytes, repeated_layers
from tatami.partition.tracing.mixing import EITHER, LeftBehind, attribute, counting, kept_of_samples, mixture_of
from tatami.partition.tracing.restore_state import unchanged
from tatami.partition.tracing.sample import FEWEST, Sample
from tatami.partition.tracing.saved_activations import Keeping, Kept, forward_alone
from tatami.random_state import torch_state
from tatami.stages.recording import memory_order
from tatami.workload import corners

USUAL_BATCH = 64
"""Samples of the global batch, where that is not known."""
_PASSING = 2
"""So many tensors pass from layer to layer in the backward pass at the same time."""
_TRIED_FLOP = 1e9
"""Operations of a forward pass over so many samples, to see whether the network looks at how many there are."""


@dataclass(frozen=True, kw_only=True)
class Captured:
    """What a forward pass showed.

    Attributes:
        calls: of each module that was called, by name: its first call; only those that are called in one way.
        draws: the modules that drew random numbers themselves, not by way of others.
        draws_outside: who drew random numbers that are not torch's: Python or NumPy; None where neither.
        normalizes: the modules that took statistics of the batch by a function, not by way of a layer.
        normalized: every call that took statistics of the batch, in their order: the module, and its number of channels.
        mixed, reductions, reads: whether the samples of a batch can be computed apart; see `Mixture`.
        pass_flop: of one sample, in the whole network, as `PassFlop` counts them.
        flop: the same of each module.
        samples: of the batch that the calls were made with.
        drawing: the functions that drew random numbers.
        readers: of each parameter, by name: the modules that computed something with it.
        last_axis: of modules that give (..., outputs) for (..., inputs): the number of outputs.
        logits: the linear layers whose result the network returns, or takes the cross-entropy of.
        kept: what the pass kept for backward, in its order.
        kept_bytes: the same of one sample, with the results, and what a loss keeps of them.
        backward_moments: as `Workload` has them.
        ends: of modules: how much was kept when their first call ended.
        layers: by name, what `recomputed_layers` keep of one sample.
        result_axes: of each leaf of the network's result: the axis of the samples; None where it has none.
        runs_without_samples: whether the network runs on a batch of no sample as well, in training and in evaluation.
        leaves_behind: what the pass left in the modules.
        dropout_orders: of dropout layers: how the axes of what they are called with are in memory, the outermost first.
    """

    calls: Mapping[str, ModuleCall]
    draws: frozenset[str]
    normalizes: frozenset[str]
    normalized: Sequence[tuple[str, int]] = ()
    mixed: str
    reductions: frozenset[str] = EITHER
    reads: str = ""
    draws_outside: str | None = None
    pass_flop: float
    flop: Mapping[str, float] = field(default_factory=dict)
    samples: int = 1
    drawing: frozenset[Any] = frozenset()
    readers: Mapping[str, frozenset[str]] = field(default_factory=dict)
    logits: frozenset[str] = frozenset()
    last_axis: Mapping[str, int] = field(default_factory=dict)
    kept: Sequence[Kept] = ()
    kept_bytes: float = 0.0
    backward_moments: Sequence[tuple[float, float]] = ((1.0, 1.0),)
    ends: Mapping[str, int] = field(default_factory=dict)
    layers: Mapping[str, KeptByLayer] = field(default_factory=dict)
    result_axes: Sequence[int | None] | None = None
    runs_without_samples: bool = False
    leaves_behind: LeftBehind = field(default_factory=LeftBehind)
    dropout_orders: Mapping[str, frozenset[tuple[int, ...]]] = field(default_factory=dict)

    def samples_axis(self, layer: str) -> int | None:
        """The samples' axis of the input of a layer with one input; None where it is not known."""
        call = self.calls.get(layer)
        return call.sample_axes[0] if call is not None and len(call.sample_axes) == 1 else None

    def read_elsewhere(self, inside: str) -> set[str]:
        """The weights of a module that are also read outside of it, such as by a penalty on them."""
        prefix = f"{inside}." if inside else ""
        return {
            name
            for name, readers in self.readers.items()
            if name.startswith(prefix) and any(reader != inside and not reader.startswith(prefix) for reader in readers)
        }

    def kept_between(self, first: str, second: str, *, units: int) -> float | None:
        """Bytes of one sample that were kept from the end of one module to that of another, with `units` on the last axis.

        None where one of them was not called, or not in this order.
        """
        begin, end = self.ends.get(first, math.inf), self.ends.get(second, -1)
        if begin > end:
            return None
        pieces = self.kept[int(begin) : end]
        return sum(each.size_bytes for each in pieces if each.last_axis == units) / self.samples


def capture(model: nn.Module, sample: Sample, *, batch_size: int = USUAL_BATCH) -> Captured:
    """Run `model` forward, twice with different numbers of samples, and leave it as it was.

    What differs between the two is the axis of samples, in the inputs of every module.
    """
    most = sample.part(min(sample.samples, 4))
    try:
        first, watch = _calls(model, most)
    except ModelError:
        raise
    except Exception as error:  # whatever the user's code raises
        given = ", ".join(
            f"{leaf.dtype} {tuple(leaf.shape)}".removeprefix("torch.") if isinstance(leaf, torch.Tensor) else repr(leaf)
            for leaf in pytree.tree_leaves((sample.args, sample.kwargs))
        )
        raise ModelError(
            f"{type(model).__name__} does not run on the sample batch ({given}), in training: {type(error).__name__}: {error}. "
            "sample= is what the network is called with, for a few samples: a tensor, a tuple of arguments or a mapping of "
            "named ones, without targets"
        ) from error
    less = most.part(most.samples - 1) if most.samples > FEWEST else most.with_one_more()
    try:
        second, other_watch = _calls(model, less, values=repeated_layers(model))
    except Exception as error:  # whatever the user's code raises
        raise ModelError(
            f"{type(model).__name__} runs on {most.samples} samples but not on {less.samples}, and a rank sees only a part of "
            f"the batch: {type(error).__name__}: {error}. The first axis must be that of independent samples"
        ) from error
    calls = {}
    for name, (args, kwargs) in first.items():
        if name not in second:
            continue
        mine, structure = pytree.tree_flatten((args, kwargs))
        other, other_structure = pytree.tree_flatten(second[name])
        if structure == other_structure:
            axes = tuple(_sample_axis(a, b) for a, b in zip(mine, other, strict=True))
            calls[name] = ModuleCall(args=args, kwargs=kwargs, sample_axes=axes)
    statistics = [
        f"{name}." if name else ""
        for name, module in model.named_modules()
        if isinstance(module, nn.modules.batchnorm._NormBase)
    ]
    changed = frozenset(name for name in watch.changed if not name.startswith(tuple(statistics)))
    with_gradient = tuple(name for name in watch.changed if name in changed & watch.with_gradient)
    draws_or_normalizes = bool(watch.draws or watch.normalizes or statistics)
    mixture = mixture_of(
        model,
        most,
        most=int(min(batch_size, _TRIED_FLOP / (1 + watch.counted.flop / most.samples))),
        numbers=watch.numbers,
        attributes=with_gradient,
        training=not draws_or_normalizes,
    )
    return Captured(
        calls=calls,
        draws=frozenset(watch.draws),
        normalizes=frozenset(watch.normalizes),
        normalized=tuple(watch.normalized),
        draws_outside=watch.draws_outside and other_watch.draws_outside,
        mixed=mixture.reason,
        reductions=mixture.reductions,
        reads=mixture.reads,
        pass_flop=watch.counted.flop / most.samples,
        flop={name: flop / most.samples for name, flop in watch.flop.items()},
        samples=most.samples,
        readers={name: frozenset(watch.readers.get(id(p), ())) for name, p in model.named_parameters(remove_duplicate=False)},
        logits=frozenset(watch.logits),
        drawing=frozenset(watch.drawing),
        dropout_orders={name: frozenset(orders) for name, orders in watch.orders.items()},
        last_axis=watch.last_axis,
        kept=tuple(watch.keeping.found.values()),
        kept_bytes=_kept_per_sample((most.samples, watch.kept_bytes), (less.samples, other_watch.kept_bytes)),
        backward_moments=_backward_moments(model, watch),
        ends=watch.ends,
        layers=_layers(model, (most.samples, first, watch), (less.samples, second, other_watch))
        if not changed and watch.draws_outside is None
        else {},
        result_axes=_result_axes(watch.results, other_watch.results),
        runs_without_samples=_runs_without_samples(model, most),
        leaves_behind=LeftBehind(
            buffers=changed & dict(model.named_buffers()).keys(),
            attributes=changed - dict(model.named_buffers()).keys(),
            with_gradient=with_gradient,
            of_samples=kept_of_samples(model, most, changed),
            counting=counting(model, most, changed - dict(model.named_buffers()).keys()),
        ),
    )


def _kept_per_sample(one: tuple[int, int], other: tuple[int, int]) -> float:
    """Bytes of one sample; what is kept once, however many samples there are, counts for each: a rank may have a single one."""
    (samples, size_bytes), (other_samples, other_bytes) = one, other
    slope = (size_bytes - other_bytes) / (samples - other_samples)
    return max(size_bytes / samples, slope, size_bytes - slope * (samples - 1))


_Pass = tuple[int, Mapping[str, tuple[tuple[Any, ...], dict[str, Any]]], "_Watch"]


def _layers(model: nn.Module, one: _Pass, other: _Pass) -> dict[str, KeptByLayer]:
    """What the layers that can be computed once more keep of a sample, from two passes over different numbers of samples."""
    passes = []
    for samples, calls, watch in (one, other):
        spans = {name: range(watch.starts[name], watch.ends[name]) for name in repeated_layers(model) if name in calls}
        passes.append((samples, layer_bytes(spans, calls=calls, keeping=watch.keeping)))
    (samples, mine), (other_samples, others) = passes
    return {
        name: KeptByLayer(
            input_bytes=_kept_per_sample((samples, mine[name][0]), (other_samples, others[name][0])),
            own_bytes=_kept_per_sample((samples, mine[name][1]), (other_samples, others[name][1])),
        )
        for name in mine
        if name in others
    }


def _backward_moments(model: nn.Module, watch: _Watch) -> tuple[tuple[float, float], ...]:
    """When memory may be fullest: of what is kept and of all gradients the parts that are there, as `Workload` has them.

    The gradient of a weight is there from where the backward pass comes to it first: where the forward pass read it last, for a
    tied weight is read twice. Of weights whose reading was not seen (recurrent layers) it is there from the beginning.
    """
    pieces = list(watch.keeping.found.values())
    kept = [each.size_bytes for each in pieces]
    always_bytes = watch.kept_bytes - sum(kept)
    gradients: dict[int, int] = {}
    for parameter in model.parameters():
        if parameter.requires_grad:
            position = watch.last_read.get(id(parameter), len(kept))
            gradients[position] = gradients.get(position, 0) + parameter.numel() * parameter.element_size()
    held_bytes = list(accumulate(kept, initial=always_bytes))
    there_bytes = 0
    moments = [(1.0, 0.0)]
    for position in sorted(gradients, reverse=True):
        there_bytes += gradients[position]
        # The gradients of what a layer was given and of what it gave are there for a while; both are about as large as what is
        # kept of them.
        near = pieces[max(0, position - _PASSING) : position + 1]
        passing_bytes = _PASSING * max((each.size_bytes for each in near if each.has_gradient), default=0)
        held = (held_bytes[position] + passing_bytes) / max(1, watch.kept_bytes)
        moments.append((held, there_bytes / sum(gradients.values())))
    return corners([*moments, (0.0, 1.0)])


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


class _Watch(TorchFunctionMode):
    """Who looks beyond single samples: who draws random numbers, and who takes statistics of the batch; and who reads what.

    Whenever a module begins or ends, what was drawn since then belongs to the one that ran.
    """

    def __init__(self, model: nn.Module, inputs: Sequence[torch.Tensor], keeping: Keeping) -> None:
        super().__init__()
        self.counted = PassFlop()
        self.flop: dict[str, float] = {}
        self._begun: list[float] = []
        self.readers: dict[int, set[str]] = {}
        self.last_read: dict[int, int] = {}
        """For each weight, by its identity, the number of pieces of memory that were kept once it had been read last."""
        self.logits: set[str] = set()
        self.drawing: set[Any] = set()
        self.orders: dict[str, set[tuple[int, ...]]] = {
            name: set() for name, module in model.named_modules() if type(module) is nn.Dropout
        }
        self.last_axis: dict[str, int] = {}
        self._linear: list[tuple[str, StorageWeakRef]] = []
        self._parameters = {id(parameter) for parameter in model.parameters()}
        self.keeping = keeping
        self.kept_bytes = sum(leaf.numel() * leaf.element_size() for leaf in inputs)
        self.starts: dict[str, int] = {}
        self.ends: dict[str, int] = {}
        self.results: list[Any] = []
        """The leaves of the network's result, tensors without values."""
        self.numbers: list[int] = []
        """Which of them are single numbers that lead to the weights."""
        self.draws_outside: str | None = None
        self.changed: list[str] = []
        self.with_gradient: set[str] = set()
        self.draws: set[str] = set()
        self.normalizes: set[str] = set()
        self.normalized: list[tuple[str, int]] = []
        self._running: list[str] = []
        self._state = torch_state()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in (torch.batch_norm, torch.nn.functional.batch_norm) and self._running:
            self.normalizes.add(self._running[-1])
            if args and args[0].dim() > 1:
                self.normalized.append((self._running[-1], args[0].shape[1]))
        if func is torch.nn.functional.cross_entropy and args:
            self.returned(args[0])
        state = torch_state()
        result = func(*args, **(kwargs or {}))
        if not torch.equal(state, torch_state()):
            self.drawing.add(func)
        if isinstance(result, torch.Tensor):
            for each in (*args, *(kwargs or {}).values()):
                if id(each) in self._parameters:
                    self.last_read[id(each)] = len(self.keeping.found)
                    self.readers.setdefault(id(each), set()).add(self._running[-1] if self._running else "")
        return result

    def computed(self, name: str, module: nn.Module, inputs: Any, output: Any) -> None:
        """A module gave `output`; where that of a linear layer is in memory is kept until it is known what becomes of it."""
        x = inputs[0] if inputs else None
        self.ends.setdefault(name, len(self.keeping.found))
        if isinstance(output, torch.Tensor) and output.dim():
            if isinstance(module, nn.Linear):
                self._linear.append((name, StorageWeakRef(output.untyped_storage())))  # type: ignore[no-untyped-call]
            if isinstance(x, torch.Tensor) and x.shape[:-1] == output.shape[:-1]:
                self.last_axis[name] = output.shape[-1]

    def returned(self, value: Any) -> None:
        """`value` is a result, or a cross-entropy is taken of it: linear layers that gave it, or a view of it, gave logits."""
        if isinstance(value, torch.Tensor):
            where = value.untyped_storage()._cdata
            self.logits |= {name for name, memory in self._linear if memory.cdata == where}

    def begin(self, name: str) -> None:
        self._look()
        self._running.append(name)
        self.starts.setdefault(name, len(self.keeping.found))
        self._begun.append(self.counted.flop)

    def end(self) -> None:
        self._look()
        name = self._running.pop()
        self.flop[name] = self.flop.get(name, 0.0) + self.counted.flop - self._begun.pop()

    def _look(self) -> None:
        state = torch_state()
        if self._running and not torch.equal(state, self._state):
            self.draws.add(self._running[-1])
        self._state = state


def _has_history(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None


def _sample_axis(one: Any, other: Any) -> int | None:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dim() != other.dim():
        return None
    differ = [axis for axis in range(one.dim()) if one.shape[axis] != other.shape[axis]]
    return differ[0] if len(differ) == 1 else None


_Calls = dict[str, tuple[tuple[Any, ...], dict[str, Any]]]


def _calls(model: nn.Module, sample: Sample, *, values: Collection[str] | None = None) -> tuple[_Calls, _Watch]:
    """The canonical arguments of every module's first call, without those that are called in several ways; and what was seen.

    Args:
        values: the modules whose arguments have values; those of others have shapes alone. None: all have.
    """
    inputs = [leaf for leaf in pytree.tree_leaves((sample.args, sample.kwargs)) if isinstance(leaf, torch.Tensor)]
    outside = [*model.parameters(), *model.buffers(), *inputs]  # a sample may be a view of a whole data set
    return forward_alone(outside, lambda keeping: _watched(model, sample, _Watch(model, inputs, keeping), values))


def _watched(model: nn.Module, sample: Sample, watch: _Watch, values: Collection[str] | None) -> tuple[_Calls, _Watch]:
    found: _Calls = {}
    several: set[str] = set()
    with unchanged(model) as state:
        with ExitStack() as stack:
            for name, module in model.named_modules():

                def remember(module: nn.Module, args: Any, kwargs: Any, name: str = name) -> None:
                    call = canonical(module, args, kwargs)
                    if name in watch.orders:
                        watch.orders[name] |= {memory_order(each) for each in pytree.tree_leaves((args, kwargs))}
                    watch.begin(name)
                    if name not in found:
                        found[name] = call if values is None or name in values else _shapes(call)
                    elif _kinds(found[name]) != _kinds(call):
                        several.add(name)

                def ended(module: nn.Module, args: Any, output: Any, name: str = name) -> None:
                    watch.computed(name, module, args, output)
                    watch.end()

                before = module.register_forward_pre_hook(remember, with_kwargs=True)
                for handle in (before, module.register_forward_hook(ended)):
                    stack.callback(handle.remove)
            for context in (torch.enable_grad(), watch.counted, watch, watch.keeping.watched()):
                stack.enter_context(context)
            result = model(*sample.args, **sample.kwargs)
        watch.draws_outside = state.draws_outside()
        changed = state.changes()
        watch.changed = sorted(changed)
        watch.with_gradient = {name for name in changed if any(map(_has_history, pytree.tree_leaves(attribute(model, name))))}
    watch.kept_bytes += watch.keeping.size_bytes
    leaves = pytree.tree_leaves(result)
    watch.numbers = [i for i, leaf in enumerate(leaves) if _has_history(leaf) and not leaf.dim()]
    watch.results = _shapes(leaves)
    for leaf in leaves:
        watch.returned(leaf)
        if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
            watch.kept_bytes += 2 * leaf.numel() * leaf.element_size()  # a loss keeps about as much of it
    return {name: call for name, call in found.items() if name not in several}, watch


def _shapes(call: Any) -> Any:
    """Tensors without values. Integers keep theirs: a `PackedSequence` does not accept batch sizes that are not on the CPU."""

    def shape(leaf: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(leaf, device="meta") if leaf.is_floating_point() else leaf.detach()

    return pytree.tree_map_only(torch.Tensor, shape, call)


_signature = functools.lru_cache(maxsize=256)(inspect.signature)
"""Remembered: it takes 25 us, in each call of a block."""


def canonical(module: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The same call in the one way in which calls are compared: every argument by its name, wherever it has one."""
    try:
        bound = _signature(type(module).forward).bind(module, *args, **kwargs)
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


def inputs_of(call: ModuleCall) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call, cut loose from the pass that they come from."""
    both = (call.args, copy.copy(dict(call.kwargs)))
    args, kwargs = pytree.tree_map(lambda leaf: leaf.detach() if isinstance(leaf, torch.Tensor) else leaf, both)
    return args, kwargs
