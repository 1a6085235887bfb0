"""Whether all ranks train on the same global batch. Each cuts its own samples out of it, so nothing else would notice.

Three looks, by what they cost:

- the number of samples in every step: it rides on the messages between replicas, which travel anyway;
- some numbers of the batch now and then (`Watch`): a `DataLoader` with a seed of its own differs from the first pass on, and
  one small message in 64 passes is not felt;
- with `TATAMI_DEBUG=1`, all numbers of the batch, in every pass.

Ranks of one replica compute the same samples, and must hold the same numbers. Ranks of different replicas may hold different
noise: a `DataLoader` that draws augmentations on every rank gives each its own, and no sample is computed in two replicas. So
between replicas it is the order that is compared: where no tensor of the batch is about the same, or class numbers differ, the
samples are others. Debug mode refuses noise, too.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from tatami.comm.agreement import debugging
from tatami.errors import InputError

_NUMBERS = 16
"""So many numbers of a tensor are looked at, spread over it."""
_TOLERANCE = 1e-3
"""Relative; machines that are not alike round differently."""
_SUM_TOLERANCE = 1e-6
_NOISE = 0.3
"""The part of the numbers of a tensor that differs where ranks hold the same samples and mask tokens at random, at the most."""
_REMEDY = (
    "Every rank must be given the same global batches: the same data, in the same order, from the same seed. Or draw them on "
    "one rank (tatami.parallel.MultiNodeLoader)"
)


@dataclass(frozen=True, kw_only=True)
class TensorNumbers:
    """What is compared of one tensor of a batch.

    Attributes:
        form: shape and dtype.
        is_label: whether it has one integer for each sample, which no augmentation changes.
        numbers: some of its elements, or sums over all.
        slack: how far two ranks' numbers may differ, for each.
    """

    form: str
    is_label: bool = False
    numbers: tuple[float, ...]
    slack: tuple[float, ...]

    def differing(self, other: TensorNumbers) -> float:
        """The part of the numbers that differ."""
        if self.form != other.form:
            return 1.0
        pairs = zip(self.numbers, other.numbers, self.slack, strict=True)
        different = sum(not (abs(one - two) <= slack or str(one) == str(two)) for one, two, slack in pairs)
        return different / max(1, len(self.numbers))

    def differs(self, other: TensorNumbers) -> bool:
        return self.differing(other) > 0.0


@dataclass(frozen=True, kw_only=True)
class BatchNumbers:
    """What is compared of one global batch.

    Attributes:
        samples: how many it has.
        tensors: without them, only the number of samples is known.
        autocast: the dtype in which the pass over it is computed; None: that of the weights.
        is_share: whether the tensors hold only the samples that the rank's replica computes, which it has fetched by itself.
    """

    samples: int
    tensors: tuple[TensorNumbers, ...] = ()
    autocast: str | None = None
    is_share: bool = False


def numbers_of(samples: int, tensors: Sequence[torch.Tensor], *, whole: bool) -> BatchNumbers:
    """What to compare of a batch of `tensors` (samples, ...); of all of their elements where `whole`."""
    return BatchNumbers(samples=samples, tensors=tuple(_sums_of(each) if whole else _some_of(each) for each in tensors))


def refuse_other_batches(
    told: Sequence[BatchNumbers], *, replicas: Sequence[Sequence[int]] = (), everywhere: bool, what: str
) -> None:
    """
    Args:
        told: by each rank; the same on all ranks, which then all raise or none.
        replicas: the ranks of each replica.
        everywhere: all ranks must hold the same numbers, not only those of one replica.
        what: was given: "batches", or "data".

    Raises:
        InputError: names the ranks that have another number of samples than rank 0, or other samples than the first rank of
            their replica or of all; or one that computes in another dtype.
    """
    sizes = {rank: each.samples for rank, each in enumerate(told)}
    if len(set(sizes.values())) > 1:
        raise _other_sizes(sizes, what=what)
    dtypes = {rank: each.autocast or "the dtype of the weights" for rank, each in enumerate(told)}
    other = next((rank for rank in dtypes if dtypes[rank] != dtypes[0]), None)
    if other is not None:
        raise InputError(
            f"rank 0 computes in {dtypes[0]}, rank {other} in {dtypes[other]}. All ranks must enter torch.autocast alike"
        )
    groups = [range(len(told))] if everywhere else replicas
    firsts = [members[0] for members in groups if members]
    pairs = [(rank, members[0], _differ) for members in groups for rank in members]
    pairs += [(rank, firsts[0], _are_others) for rank in firsts if not told[rank].is_share]
    strange = {
        rank: first
        for rank, first, differ in pairs
        if told[rank].tensors and told[first].tensors and differ(told[rank].tensors, told[first].tensors)
    }
    if strange:
        lines = [f"rank {rank} has other samples than rank {first}" for rank, first in sorted(strange.items())]
        raise InputError(f"the ranks were given different {what}: {'; '.join(lines)}. {_REMEDY}")


def different_sizes(sizes: Sequence[float], *, replicas: Sequence[Sequence[int]]) -> InputError:
    """What to raise where the batches of the replicas have different `sizes`, which are the same on all ranks."""
    return _other_sizes(
        {rank: int(size) for size, ranks in zip(sizes, replicas, strict=True) for rank in ranks}, what="batches"
    )


class BatchFacts:
    """What a `Watch` compares of the batches that the ranks pass to `TiledModel.local`.

    Args:
        replicas: gives the ranks of each replica.
    """

    def __init__(self, *, replicas: Callable[[], Sequence[Sequence[int]]]) -> None:
        self._replicas = replicas
        self._whole = debugging()
        self._everywhere = False
        self._last = BatchNumbers(samples=0)

    def announce(
        self, samples: int, tensors: Sequence[torch.Tensor], *, everywhere: bool = False, is_share: bool = False
    ) -> None:
        """The batch that the next pass is over; `everywhere`: all ranks hold the same of it; `is_share`: see `BatchNumbers`."""
        self._last = replace(numbers_of(samples, tensors, whole=self._whole), is_share=is_share)
        self._everywhere = everywhere

    def own(self) -> BatchNumbers:
        return replace(self._last, autocast=_autocast())

    def refuse(self, told: Sequence[BatchNumbers]) -> None:
        """See `refuse_other_batches`."""
        everywhere = (self._whole and not self._last.is_share) or self._everywhere
        refuse_other_batches(told, replicas=self._replicas(), everywhere=everywhere, what="batches")


def _autocast() -> str | None:
    kinds = [kind for kind in ("cuda", "cpu") if torch.is_autocast_enabled(kind)]
    return str(torch.get_autocast_dtype(kinds[0])) if kinds else None


def _differ(one: tuple[TensorNumbers, ...], two: tuple[TensorNumbers, ...]) -> bool:
    return len(one) != len(two) or any(a.differs(b) for a, b in zip(one, two, strict=True))


def _are_others(one: tuple[TensorNumbers, ...], two: tuple[TensorNumbers, ...]) -> bool:
    """Whether these are other samples, and not the same ones with other noise."""
    if len(one) != len(two) or any(a.is_label and a.differs(b) for a, b in zip(one, two, strict=True)):
        return True
    return all(a.differing(b) > _NOISE for a, b in zip(one, two, strict=True))


def _other_sizes(sizes: dict[int, int], *, what: str) -> InputError:
    first = sizes[min(sizes)]
    others = [f"rank {rank} has {size}" for rank, size in sorted(sizes.items()) if size != first]
    return InputError(
        f"the ranks were given different {what}: {', '.join(others)} samples, rank {min(sizes)} has {first}. {_REMEDY}"
    )


def _form(tensor: torch.Tensor) -> str:
    return f"{tuple(tensor.shape)} {tensor.dtype}"


def _some_of(tensor: torch.Tensor) -> TensorNumbers:
    """Elements of samples spread over the batch, at another place in each."""
    samples = tensor.detach()[:: max(1, -(-tensor.shape[0] // _NUMBERS))]
    rows = samples.reshape(len(samples), -1) if tensor.numel() else samples.reshape(0, 1)
    each = torch.arange(len(rows), dtype=torch.int64, device=rows.device)
    found = tuple(_real(rows[each, (each * 7919) % max(1, rows.shape[1])]).reshape(-1).tolist())
    tolerance = 0.0 if _is_exact(tensor) else _TOLERANCE
    is_label = _is_exact(tensor) and tensor.dim() == 1
    return TensorNumbers(
        form=_form(tensor), is_label=is_label, numbers=found, slack=tuple(tolerance * abs(number) for number in found)
    )


def _sums_of(tensor: torch.Tensor) -> TensorNumbers:
    """The sum of all elements, and one in which each counts by its place."""
    flat = _real(tensor.detach()).reshape(-1)
    weighed = flat @ torch.linspace(1.0, 2.0, flat.numel(), dtype=flat.dtype, device=flat.device)
    slack = _SUM_TOLERANCE * float(flat.abs().sum()) if not _is_exact(tensor) else 1e-9 * float(flat.abs().sum())
    return TensorNumbers(form=_form(tensor), numbers=(float(flat.sum()), float(weighed)), slack=(slack, slack))


def _real(tensor: torch.Tensor) -> torch.Tensor:
    real = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return real.to("cpu", torch.float64)


def _is_exact(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex())
