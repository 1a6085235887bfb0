"""Whether a rank that sees a part of a batch can compute what one machine computes of it.

It cannot where the result for a sample depends on other samples, where a number for all of them (a loss of the network's own)
is neither the mean nor the sum of what its samples give, and where the network keeps something of its samples for later.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from tatami.errors import InputError
from tatami.partition.tracing.exporting import line_of_caller
from tatami.partition.tracing.restore_state import alike, unchanged
from tatami.partition.tracing.sample import Sample
from tatami.partition.tracing.saved_activations import Keeping, forward_alone
from tatami.random_state import torch_state
from tatami.runtime.losses import CountedMeans
from tatami.tiling import Span

_ALIKE = 1e-3
"""Tolerance, of the largest element: single precision in another order is off by 1e-6, samples that are coupled by far more."""
_SAME_NUMBER = {torch.float64: 1e-8, torch.float32: 1e-4}
_SAME_HALF, _SAME_GRADIENT = 3e-2, 1e-6
EITHER = frozenset({"mean", "sum"})


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """What a forward pass in training leaves in the modules, by qualified name.

    Attributes:
        buffers: those that it changes, statistics of batch normalization apart.
        attributes: what it changes beside buffers.
        with_gradient: of them, those that lead to the weights: losses and results that are kept to be fetched.
        of_samples: buffers that depend on its samples, and attributes by which the next pass does.
        counting: attributes by which another pass of the same samples has another result, and numbers that it changes again.
    """

    buffers: frozenset[str] = frozenset()
    attributes: frozenset[str] = frozenset()
    with_gradient: tuple[str, ...] = ()
    of_samples: tuple[str, ...] = ()
    counting: frozenset[str] = frozenset()


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Whether samples of a batch can be computed apart.

    Attributes:
        reason: why not, in a sentence; empty where they can.
        reductions: of "mean" and "sum": what the numbers that the network gives, or keeps, are of what its samples give.
        reads: the line at which the program reads a number of several samples, by which it may branch; empty where it does not.
    """

    reason: str = ""
    reductions: frozenset[str] = EITHER
    reads: str = ""


def mixture_of(
    model: nn.Module, sample: Sample, *, most: int, numbers: Collection[int], attributes: Collection[str], training: bool
) -> Mixture:
    """Whether samples of a batch can be computed apart.

    Args:
        model: the network; it is not changed.
        sample: for which this is tried.
        most: samples of the largest batch that is tried, in which those of `sample` are repeated: a network may look at how
            many there are.
        numbers: which leaves of its result are single numbers that it is trained with.
        attributes: of its modules, with which it may be trained as well.
        training: whether both are looked at in training: nothing is drawn or normalized over the batch there.
    """
    passes = _Passes(model, sample, attributes, training=training)
    found = _mixture(passes, type(model).__name__, sample, most=most, numbers=numbers, attributes=attributes)
    return replace(found, reads=passes.reads_of_several())


def _mixture(
    passes: _Passes, name: str, sample: Sample, *, most: int, numbers: Collection[int], attributes: Collection[str]
) -> Mixture:
    whole, part = (passes.results(range(count)) for count in (sample.samples, sample.samples - 1))
    pairs = list(zip(whole, part, strict=False))
    if any(_is_table(one, other, sample.samples) for one, other in pairs):
        return Mixture(reason=f"what {name} gives has the samples of the batch on two axes, of which a rank sees only a part")
    of_samples = [_has_samples(one, other, sample.samples) for one, other in pairs]
    for batch in _other_batches(sample.samples, most=most):
        try:
            found = passes.results(batch)
        except Exception:  # it may take some numbers of samples only
            continue
        for one, other, has_samples in zip(whole, found, of_samples, strict=False):
            if has_samples and other.shape[:1] == (len(batch),) and not _same_samples(one, other, batch):
                return Mixture(
                    reason=f"what {name} gives for a sample depends on the other samples of the batch, or on how many there "
                    "are, of which a rank sees only a part"
                )
    if not numbers and not attributes:
        return Mixture()
    neither = Mixture(
        reason=f"{name} computes a loss that is neither the mean nor the sum of what its samples give one by one, and a rank "
        "sees only a part of them. A balance of experts over the batch is such a loss: take the balance of each sample, or "
        "return its terms and compute it where the loss is, from means over the batch by model.over_batch(...)"
    )
    unknown = Mixture()
    for count in dict.fromkeys((sample.samples - 1, max(1, sample.samples // 2))):
        try:
            found = [passes.of(places) for places in (range(sample.samples), range(count), range(count, sample.samples))]
        except Exception:  # a single sample is more than some networks can do; half of them may not be
            continue
        problem = next((each.problem for each in found if each.problem), "")
        if problem:
            return Mixture(reason=problem)
        if len({len(each.results) for each in found}) > 1:
            return Mixture()
        checked = [[each.results[i] for each in found] for i in range(len(found[0].results)) if i in numbers]
        checked += [[each.kept[i] for each in found] for i in range(len(attributes))]
        if any(lacks_samples(leaves) for leaves in checked):
            unknown = neither  # a variance of a single sample, say; unless half of them show what it is
            continue
        reductions = EITHER.intersection(*(reductions_of(leaves, count, sample.samples - count) for leaves in checked))
        return Mixture(reductions=reductions) if reductions else neither
    return unknown


@dataclass(frozen=True, kw_only=True)
class _Pass:
    """What a forward pass gives.

    Attributes:
        results: the leaves of the result.
        kept: what the modules hold afterwards under the names that were asked for.
        reads: the numbers that the program read from tensors, by its lines.
        problem: why means that leave targets out cannot be taken over all targets; then they are as torch takes them.
    """

    results: list[Any]
    kept: list[Any]
    reads: Mapping[str, Sequence[float]]
    problem: str = ""


class _Passes:
    """Forward passes over parts of a sample batch; what is drawn is always the same.

    What each gives is remembered, except for tensors that are no single numbers: those of some passes are large.
    """

    def __init__(self, model: nn.Module, sample: Sample, attributes: Collection[str], *, training: bool) -> None:
        self._model, self._sample, self._attributes, self._training = model, sample, attributes, training
        self._known: dict[tuple[int, ...], _Pass] = {}

    def results(self, places: Sequence[int]) -> list[Any]:
        """With all tensors."""
        found = self._computed(self._sample.at(places))
        numbers = [None if isinstance(leaf, torch.Tensor) and leaf.dim() else leaf for leaf in found.results]
        self._known[tuple(places)] = replace(found, results=numbers)
        return found.results

    def of(self, places: Sequence[int]) -> _Pass:
        """The pass over the samples at these places."""
        if tuple(places) not in self._known:
            self.results(places)
        return self._known[tuple(places)]

    def reads_of_several(self) -> str:
        """The first line that reads a number of several samples: one that some batch gives, and the whole sample does not."""
        first, *others = self._known.values()
        for each in others:
            for line, values in each.reads.items():
                known = first.reads.get(line, ())
                if not all(any(math.isclose(value, one, rel_tol=_ALIKE, abs_tol=_ALIKE) for one in known) for value in values):
                    return line
        return ""

    def _computed(self, sample: Sample) -> _Pass:
        try:
            with SteadyDraws(), CountedMeans():
                return self._once(sample)
        except InputError as error:
            with SteadyDraws():
                return replace(self._once(sample), problem=str(error))

    def _once(self, sample: Sample) -> _Pass:
        return forward_alone((), lambda keeping: self._watched(sample, keeping))

    def _watched(self, sample: Sample, keeping: Keeping) -> _Pass:
        with unchanged(self._model), torch.enable_grad(), keeping.watched():  # forces are gradients that a forward pass takes
            self._model.train(self._training)
            with _Reads() as reads:
                leaves = pytree.tree_leaves(self._model(*sample.args, **sample.kwargs))
            kept = [attribute(self._model, name) for name in self._attributes]
            return _Pass(results=_detached(leaves), kept=_detached(kept), reads=reads.found)


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the real numbers that a program reads from tensors, as `x.mean().item()` does.

    Integers are left out: the longest of several sequences is read in order to pad them, which changes no result. So are truth
    values: where the batches that are tried give both, what the two branches compute has been compared already.

    Attributes:
        found: by the program's line.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: dict[str, list[float]] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # else torch imports its compiler

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(result, float):
            line = line_of_caller()
            if line:
                self.found.setdefault(line, []).append(result)
        return result


def kept_of_samples(model: nn.Module, sample: Sample, changed: Collection[str]) -> tuple[str, ...]:
    """What a training pass changes in the modules in a way that depends on its samples.

    A buffer is saved, so what it holds must be that of the whole batch. Of anything else it matters only whether later passes
    see it: results that are kept to be looked at are written again by the next pass.
    """
    if not changed:
        return ()
    try:
        other = sample.other(noise=True)
        one, two = (_passes(model, first, other) for first in (sample, other))
    except Exception:  # the network may take some numbers only
        other = sample.other(noise=False)
        one, two = (_passes(model, first, other) for first in (sample, other))
    buffers = {name for name, _ in model.named_buffers()}
    differs = {name for name in changed if not alike(one.first.get(name), two.first.get(name))}
    is_seen = any(
        isinstance(a, torch.Tensor) and not close(a, b, tolerance=_ALIKE)
        for a, b in zip(one.results[1], two.results[1], strict=False)
    )
    later = differs if is_seen else {name for name in changed if not alike(one.second.get(name), two.second.get(name))}
    return tuple(sorted(later | (differs & buffers)))


def counting(model: nn.Module, sample: Sample, attributes: Collection[str]) -> frozenset[str]:
    """Which changed attributes one pass for each micro-batch changes otherwise than one for the batch."""
    if not attributes:
        return frozenset()
    with SteadyDraws():
        passes = _passes(model, sample, sample)
    again = {name for name in attributes if not alike(passes.first.get(name), passes.second.get(name))}
    if all(a is b or not isinstance(a, torch.Tensor) or torch.equal(a, b) for a, b in zip(*passes.results, strict=False)):
        again = {name for name in again if isinstance(passes.second.get(name), int | float)}
    return frozenset(again)


class SteadyDraws(TorchFunctionMode):
    """What is drawn is always the same number, so that samples that differ differ by what the network makes of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch_state()
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not torch.equal(state, torch_state()):
            result.fill_(0.5 if result.is_floating_point() else 0)
        return result


@dataclass(frozen=True, kw_only=True)
class _TwoPasses:
    """What modules hold after the first and after the second of two passes, and what both give."""

    first: dict[str, Any]
    second: dict[str, Any]
    results: tuple[list[Any], list[Any]]


def _passes(model: nn.Module, one: Sample, other: Sample) -> _TwoPasses:
    with unchanged(model) as state, torch.enable_grad():
        before = _detached(pytree.tree_leaves(model(*one.args, **one.kwargs)))
        first = state.changes()
        result = _detached(pytree.tree_leaves(model(*other.args, **other.kwargs)))
        return _TwoPasses(first=first, second=state.changes(), results=(before, result))


def attribute(model: nn.Module, name: str) -> Any:
    """What a module holds, by its qualified name; None where it holds nothing there."""
    owner, _, own = name.rpartition(".")
    return getattr(model.get_submodule(owner), own, None)


def _detached(leaves: Iterable[Any]) -> list[Any]:
    return [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _is_table(one: Any, other: Any, samples: int) -> bool:
    """Whether two axes are as long as there are samples."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or one.dim() != other.dim():
        return False
    return sum((a, b) == (samples, samples - 1) for a, b in zip(one.shape, other.shape, strict=True)) > 1


def _other_batches(samples: int, *, most: int) -> Iterator[list[int]]:
    """The places of samples in batches in which each must have the result that it has in the whole one.

    The first and the last but one; in another order; one sample alone many times, as one that fills an expert; many samples.
    """
    yield list(range(samples - 1))
    yield list(range(1, samples))
    yield list(reversed(range(samples)))
    yield [0] * samples
    if most > samples:
        yield [place % samples for place in range(most)]


def _has_samples(one: Any, other: Any, samples: int) -> bool:
    """Whether a result has the samples on its first axis: of all of them, and of one less."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not one.dim() or one.dim() != other.dim():
        return False
    shapes = (one.shape[0], other.shape[0]) == (samples, samples - 1) and one.shape[1:] == other.shape[1:]
    return shapes and one.is_floating_point()


def _same_samples(one: torch.Tensor, other: Any, batch: Sequence[int]) -> bool:
    expected = one[list(batch)]
    return expected.shape != other.shape or close(expected, other, tolerance=_ALIKE)


def close(one: torch.Tensor, other: torch.Tensor, *, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point() or torch.equal(one, other):
        return torch.equal(one, other)
    scale = float(other.abs().nan_to_num(posinf=0.0).max()) if other.numel() else 0.0
    return torch.allclose(one, other, rtol=0.0, atol=tolerance * max(scale, 1e-30), equal_nan=True)


def lacks_samples(leaves: Sequence[Any]) -> bool:
    """Whether a part gives no number where the whole gives one."""
    if not _are_numbers(leaves):
        return False
    whole, one, other = (float(leaf) for leaf in leaves)
    return not math.isnan(whole) and (math.isnan(one) or math.isnan(other))


def reductions_of(leaves: Sequence[Any], first: int, rest: int) -> frozenset[str]:
    """What the number of a batch, the first of three, is of those of its `first` samples and of the `rest`: mean, sum, both."""
    if not _are_numbers(leaves):
        return EITHER
    whole, one, other = (float(leaf) for leaf in leaves)
    slack = _SAME_NUMBER.get(leaves[0].dtype, _SAME_HALF) * max(abs(whole), abs(one), abs(other))
    off = {"mean": whole - (first * one + rest * other) / (first + rest), "sum": whole - one - other}
    return frozenset(name for name, difference in off.items() if not abs(difference) > slack)


def _are_numbers(leaves: Sequence[Any]) -> bool:
    return all(isinstance(leaf, torch.Tensor) and not leaf.dim() for leaf in leaves)


Judged = tuple[torch.Tensor, Sequence[torch.Tensor]]
"""A loss, and the outputs of the network, detached from it, that it was made of."""


def refuse_other_loss(loss: Callable[[Span], Judged], *, samples: int, reduction: str, what: str, counts: bool = False) -> None:
    """Try what a loss and its gradient do with samples, by those of parts of them.

    Args:
        loss: of some of the samples, and what to differentiate it by.
        samples: how many there are; of fewer than two nothing can be said.
        reduction: what it is said to do: "mean" or "sum".
        counts: whether means that leave targets out are taken over all targets, as the Trainer does.

    Raises:
        InputError: it does something else.
    """
    for first in dict.fromkeys((samples // 2, samples - 1)) if samples > 1 else ():
        try:
            with torch.enable_grad(), SteadyDraws(), CountedMeans() if counts else nullcontext():
                judged = [loss(span) for span in (Span(0, samples), Span(0, first), Span(first, samples))]
                gradients = [_gradients(*each) for each in judged]
        except InputError:  # class weights, by which a mean divides
            raise
        except Exception:  # it may take some numbers of samples only
            continue
        found, rest = [each.detach() for each, _ in judged], samples - first
        if lacks_samples(found):
            continue
        subject = f"the loss ({what})"
        if reduction not in reductions_of(found, first, rest):
            values = [f"{float(each):.6g}" for each in found]
        elif any(
            _differs(whole, parts, (first, rest), is_mean=reduction == "mean")
            for whole, *parts in zip(*gradients, strict=False)
        ):
            subject = f"the gradient of {subject}"
            values = [f"of norm {sum(float(leaf.double().square().sum()) for leaf in each) ** 0.5:.6g}" for each in gradients]
        else:
            continue
        raise InputError(
            f"{subject} is said to be the {reduction} over the samples of a batch, and is not: of {samples} samples it "
            f"is {values[0]}, of the first {first} {values[1]}, and of the others {values[2]}. A rank sees a part of the "
            "batch, so a loss must be the mean or the sum of what its samples give one by one, or be made of means over the "
            "global batch (model.over_batch(...)); targets are left out by ignore_index"
        )


def outputs_to_judge(output: Any) -> tuple[Any, list[torch.Tensor]]:
    """An output of the network, detached, and those of its tensors by which a loss can be differentiated."""
    found: list[torch.Tensor] = []

    def apart(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        leaf = leaf.detach()
        if leaf.is_floating_point():
            found.append(leaf.requires_grad_())
        return leaf

    return pytree.tree_map(apart, output), found


def _gradients(loss: torch.Tensor, outputs: Sequence[torch.Tensor]) -> Sequence[torch.Tensor]:
    if not loss.requires_grad or not outputs:
        return ()
    return torch.autograd.grad(loss, outputs, allow_unused=True, materialize_grads=True)


def _differs(whole: torch.Tensor, parts: Sequence[torch.Tensor], sizes: Sequence[int], *, is_mean: bool) -> bool:
    """Whether the gradient by an output is not made up of those of two parts. A few elements may be at a kink of the loss."""
    scaled = [part.double() * (size / sum(sizes) if is_mean else 1) for part, size in zip(parts, sizes, strict=True)]
    if [each.shape[:1] for each in (whole, *parts)] == [(sum(sizes),), *((size,) for size in sizes)]:
        expected = torch.cat(scaled)
    elif is_mean and whole.shape == parts[0].shape == parts[1].shape:
        expected = scaled[0] + scaled[1]
    else:
        return False
    slack = _SAME_GRADIENT if whole.dtype is torch.float64 else _SAME_HALF
    return bool((whole - expected).norm() > slack * whole.double().norm())
