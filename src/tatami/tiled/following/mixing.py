"""Whether a rank that sees a part of a batch can compute what one machine computes of it.

It cannot where the result for a sample depends on other samples, where a number for all of them (a loss of the network's own)
is neither the mean nor the sum of what its samples give, and where the network keeps something of its samples for later.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tatami.errors import InputError
from tatami.tiled.following.sample import Sample
from tatami.tiled.following.unchanged import alike, unchanged
from tatami.tiled.losses import CountedMeans

_ALIKE = 1e-3
"""Of the largest element: single precision in another order is off by 1e-6, a sample that sees others by much more."""
_SAME_NUMBER = {torch.float64: 1e-8, torch.float32: 1e-4}
_SAME_HALF = 3e-2
EITHER = frozenset({"mean", "sum"})


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """What a forward pass in training leaves in the modules, by qualified name.

    Attributes:
        attributes: what it changes beside buffers.
        with_gradient: of them, those that lead to the weights: losses and results that are kept to be fetched.
        of_samples: buffers that depend on its samples, and attributes by which the next pass does.
    """

    attributes: frozenset[str] = frozenset()
    with_gradient: tuple[str, ...] = ()
    of_samples: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Whether samples of a batch can be computed apart.

    Attributes:
        reason: why not, in a sentence; empty where they can.
        reductions: of "mean" and "sum": what the numbers that the network gives, or keeps, are of what its samples give.
    """

    reason: str = ""
    reductions: frozenset[str] = EITHER


def mixture_of(
    model: nn.Module, sample: Sample, *, numbers: Collection[int], attributes: Collection[str], training: bool
) -> Mixture:
    """Whether samples of a batch can be computed apart.

    Args:
        model: the network; it is not changed.
        sample: for which this is tried.
        numbers: which leaves of its result are single numbers that it is trained with.
        attributes: of its modules, with which it may be trained as well.
        training: whether both are looked at in training: nothing is drawn or normalized over the batch there.
    """
    name = type(model).__name__
    fewer = sample.part(sample.samples - 1)
    with SteadyDraws():
        whole, part = (_results(model, each, (), training=False) for each in (sample, fewer))
    for one, other in zip(whole, part, strict=False):
        if _is_table(one, other, sample.samples):
            return Mixture(
                reason=f"what {name} gives has the samples of the batch on two axes, of which a rank sees only a part"
            )
        if _differs(one, other, fewer.samples):
            return Mixture(
                reason=f"what {name} gives for a sample depends on the other samples of the batch, of which a rank sees only a "
                "part"
            )
    if not numbers and not attributes:
        return Mixture()
    neither = Mixture(
        reason=f"{name} computes a loss that is neither the mean nor the sum of what its samples give one by one, and a rank "
        "sees only a part of them"
    )
    unknown = Mixture()
    for count in dict.fromkeys((fewer.samples, max(1, sample.samples // 2))):
        try:
            with SteadyDraws(), CountedMeans():
                batches = (sample, sample.part(count), sample.rest(count))
                found = [_results(model, each, attributes, training=training) for each in batches]
        except InputError as error:
            return Mixture(reason=str(error))
        except Exception:  # a single sample is more than some networks can do; half of them may not be
            continue
        if len({len(each) for each in found}) > 1:
            return Mixture()
        results = len(found[0]) - len(attributes)
        checked = [[each[i] for each in found] for i in range(len(found[0])) if i in numbers or i >= results]
        if any(lacks_samples(leaves) for leaves in checked):
            unknown = neither  # a variance of a single sample, say; unless half of them show what it is
            continue
        reductions = EITHER.intersection(*(reductions_of(leaves, count, sample.samples - count) for leaves in checked))
        return Mixture(reductions=reductions) if reductions else neither
    return unknown


def kept_of_samples(model: nn.Module, sample: Sample, changed: Collection[str]) -> tuple[str, ...]:
    """Of what a pass in training changes in the modules: what depends on its samples afterwards.

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
        isinstance(a, torch.Tensor) and not _close(a, b, tolerance=_ALIKE) for a, b in zip(one.result, two.result, strict=False)
    )
    later = differs if is_seen else {name for name in changed if not alike(one.second.get(name), two.second.get(name))}
    return tuple(sorted(later | (differs & buffers)))


class SteadyDraws(TorchFunctionMode):
    """What is drawn is always the same number, so that samples that differ differ by what the network makes of them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        state = torch.get_rng_state()
        result = func(*args, **(kwargs or {}))
        if isinstance(result, torch.Tensor) and not torch.equal(state, torch.get_rng_state()):
            result.fill_(0.5 if result.is_floating_point() else 0)
        return result


@dataclass(frozen=True, kw_only=True)
class _TwoPasses:
    """What modules hold after the first and after the second of two passes, and what the second one gives."""

    first: dict[str, Any]
    second: dict[str, Any]
    result: list[Any]


def _passes(model: nn.Module, one: Sample, other: Sample) -> _TwoPasses:
    with unchanged(model) as state, torch.enable_grad():
        model(*one.args, **one.kwargs)
        first = state.changes()
        result = _detached(pytree.tree_leaves(model(*other.args, **other.kwargs)))
        return _TwoPasses(first=first, second=state.changes(), result=result)


def _results(model: nn.Module, sample: Sample, kept: Iterable[str], *, training: bool) -> list[Any]:
    """The leaves of the result, and what the modules hold then under the names `kept`."""
    with unchanged(model), torch.enable_grad():  # forces are gradients that a forward pass takes
        model.train(training)
        result = pytree.tree_leaves(model(*sample.args, **sample.kwargs))
        return _detached([*result, *(attribute(model, name) for name in kept)])


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


def _differs(one: Any, other: Any, samples: int) -> bool:
    """Whether the first `samples` have other results in a batch of one more."""
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor) or not one.dim() or one.dim() != other.dim():
        return False
    if (one.shape[0], other.shape[0]) != (samples + 1, samples) or one.shape[1:] != other.shape[1:]:
        return False
    return one.is_floating_point() and not _close(one[:samples], other, tolerance=_ALIKE)


def _close(one: torch.Tensor, other: torch.Tensor, *, tolerance: float) -> bool:
    if one.shape != other.shape:
        return False
    if not one.is_floating_point():
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
