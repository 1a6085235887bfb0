"""Buckets: gradients side by side in vectors that are reduced as one.

Parameters are taken in the order in which their gradients are expected; until that is known, in the reverse order of their
registration, because backward comes to the last layers first. The first bucket is small, so that reducing begins early. After
the gradients a bucket holds one more element for each: 1 where this rank has a gradient. What no rank has stays without one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.overlap import AbstractOverlap, overlap
from tatami.comm.reduction import FLOAT_DTYPES
from tatami.comm.tuning import tuned_bucket_bytes
from tatami.errors import InputError
from tatami.tiling import overlap as planned

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = planned.LARGEST_BUCKET_BYTES


def usual_bucket_bytes(comm: AbstractCommunicator, parameters: Sequence[torch.Tensor]) -> int:
    """The largest size of a bucket of several parameters, where no other is given and there is no tuning table. Collective."""
    tuned = tuned_bucket_bytes(comm)
    if tuned is not None or len(set(comm.hosts)) == 1:
        return tuned or BUCKET_BYTES
    return planned.usual_bucket_bytes(sum(each.numel() * each.element_size() for each in parameters))


def check_wire(wire: torch.dtype | None) -> None:
    """Whether gradients can travel as `wire`.

    Raises:
        InputError: it is not a floating dtype, so that gradients would be cut off to whole numbers.
    """
    if wire is not None and wire not in FLOAT_DTYPES:
        raise InputError(f"wire={wire} is not a floating dtype; choose torch.bfloat16 or torch.float16, or leave it out")


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """One bucket.

    Attributes:
        parameters: numbers of those whose gradients it has, in the order in which they are expected.
        starts: first element of each gradient, and of the elements that say which of them are there.
        dtype: of the parameters.
        device: of the parameters.
    """

    parameters: tuple[int, ...]
    starts: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def size(self) -> int:
        """Elements of the whole bucket."""
        return self.starts[-1] + len(self.parameters)


def lay_buckets(
    parameters: Sequence[torch.Tensor],
    *,
    order: Sequence[int] | None = None,
    bucket_bytes: int = BUCKET_BYTES,
    first_bytes: int = FIRST_BUCKET_BYTES,
) -> list[BucketLayout]:
    """Buckets of at most `bucket_bytes`, the first of `first_bytes`; a larger parameter has one to itself.

    Args:
        parameters: all of them.
        order: their numbers, as gradients are expected; None: the last one first.
        bucket_bytes, first_bytes: sizes.
    """
    numbers = list(reversed(range(len(parameters)))) if order is None else order
    by_kind: dict[tuple[torch.dtype, torch.device], list[int]] = {}
    for index in numbers:
        by_kind.setdefault((parameters[index].dtype, parameters[index].device), []).append(index)
    buckets: list[BucketLayout] = []
    for (dtype, device), same in by_kind.items():
        groups: list[list[int]] = [[]]
        filled = 0
        for index in same:
            is_first = not buckets and len(groups) == 1
            limit = (min(first_bytes, bucket_bytes) if is_first else bucket_bytes) // dtype.itemsize
            if groups[-1] and filled + parameters[index].numel() > limit:
                groups.append([])
                filled = 0
            groups[-1].append(index)
            filled += parameters[index].numel()
        for group in groups:
            starts = tuple(accumulate((parameters[index].numel() for index in group), initial=0))
            buckets.append(BucketLayout(parameters=tuple(group), starts=starts, dtype=dtype, device=device))
    return buckets


class BucketSet:
    """All buckets, and what reduces them: one vector a bucket, the buckets of each dtype and device together.

    Args:
        comm: the ranks.
        parameters: whose gradients are reduced.
        order: see `lay_buckets`.
        bucket_bytes: see `lay_buckets`.
        wire: the dtype in which gradients travel; None: their own.
        algorithm: see `overlap`.
    """

    def __init__(
        self,
        comm: AbstractCommunicator,
        parameters: Sequence[torch.Tensor],
        *,
        order: Sequence[int] | None = None,
        bucket_bytes: int,
        wire: torch.dtype | None,
        algorithm: str | None,
    ) -> None:
        self._overlaps: list[AbstractOverlap] = []
        self._vectors: list[tuple[BucketLayout, torch.Tensor, AbstractOverlap, int]] = []
        self._slots: dict[int, tuple[int, torch.Tensor]] = {}
        layouts = lay_buckets(parameters, order=order, bucket_bytes=bucket_bytes)
        for dtype, device in dict.fromkeys((layout.dtype, layout.device) for layout in layouts):
            same = [layout for layout in layouts if (layout.dtype, layout.device) == (dtype, device)]
            means = overlap(comm, sizes=[each.size for each in same], dtype=wire or dtype, device=device, algorithm=algorithm)
            self._overlaps.append(means)
            for index, (layout, vector) in enumerate(zip(same, means.vectors, strict=True)):
                for parameter, start in zip(layout.parameters, layout.starts, strict=False):
                    like = parameters[parameter]
                    self._slots[parameter] = len(self._vectors), vector[start : start + like.numel()].view(like.shape)
                self._vectors.append((layout, vector, means, index))
        self._missing = [len(layout.parameters) for layout, *_ in self._vectors]
        self._there: set[int] = set()
        self._begun: set[int] = set()
        self._used: dict[int, bool] = {}

    @property
    def has_begun(self) -> bool:
        """Whether any bucket is under way."""
        return bool(self._begun)

    def has(self, index: int) -> bool:
        """Whether the gradient of parameter `index` is there."""
        return index in self._there

    def put(self, index: int, gradient: torch.Tensor, *, scale: float = 1.0) -> None:
        """This rank's gradient of parameter `index` is `scale` times this. Begins its bucket, and goes on with others."""
        number, slot = self._slots[index]
        if scale == 1.0:
            slot.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=slot)
        self._there.add(index)
        self._missing[number] -= 1
        if not self._missing[number]:
            self._begin(number)
        for means in self._overlaps:
            means.progress()

    def begin_rest(self) -> None:
        """Begin the buckets of which some gradients are not there in this pass."""
        for number in range(len(self._vectors)):
            if number not in self._begun:
                self._begin(number)

    def _begin(self, number: int) -> None:
        layout, vector, means, index = self._vectors[number]
        has = [parameter in self._there for parameter in layout.parameters]
        for parameter, is_there in zip(layout.parameters, has, strict=True):
            if not is_there:
                self._slots[parameter][1].zero_()
        used = vector[layout.starts[-1] :]
        used.copy_(used.new_tensor([float(each) for each in has]))
        means.begin(index)
        self._begun.add(number)

    def wait(self) -> None:
        """All buckets hold the means; the next pass may begin when they were taken."""
        for means in self._overlaps:
            means.wait()
        for layout, vector, *_ in self._vectors:
            for parameter, used in zip(layout.parameters, vector[layout.starts[-1] :].tolist(), strict=True):
                self._used[parameter] = used != 0.0
        self._begun.clear()
        self._there.clear()
        self._missing = [len(layout.parameters) for layout, *_ in self._vectors]

    def take(self, index: int, *, into: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
        """The mean for parameter `index`, in `into` or in memory of its own; None where no rank had a gradient."""
        if not self._used[index]:
            return None
        slot = self._slots[index][1]
        return slot.to(dtype, copy=True) if into is None else into.copy_(slot)

    def close(self) -> None:
        self._vectors.clear()
        self._slots.clear()
        for means in self._overlaps:
            means.close()
