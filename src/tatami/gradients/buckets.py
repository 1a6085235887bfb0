"""Buckets: gradients side by side in vectors that are reduced as one.

Parameters are taken in the order in which their gradients are expected; until that is known, in the reverse order of their
registration, because backward comes to the last layers first. The first bucket is small, so that reducing begins early. After
the gradients a bucket holds one more element for each: 1 where this rank has a gradient. What no rank has stays without one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.overlap import AbstractOverlap, overlap
from tatami.comm.reduction import FLOAT_DTYPES
from tatami.comm.tuning import tuned_bucket_bytes
from tatami.errors import InputError
from tatami.tiling import overlap as planned
from tatami.tiling.traffic import SIZE_DIGITS, size_digits, sizes_of

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = planned.LARGEST_BUCKET_BYTES


def usual_bucket_bytes(comm: AbstractCommunicator, parameters: Sequence[torch.Tensor]) -> int:
    """The largest size of a bucket of several parameters, where no other is given and there is no tuning table. Collective."""
    tuned = tuned_bucket_bytes(comm)
    if tuned is not None or len(set(comm.hosts)) == 1:
        return tuned or BUCKET_BYTES
    return planned.usual_bucket_bytes(size_bytes_of(parameters))


def size_bytes_of(parameters: Sequence[torch.Tensor]) -> int:
    """Bytes of their gradients."""
    return sum(each.numel() * each.element_size() for each in parameters)


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
        has_numbers: the number of samples of every rank travels with the last bucket, which leaves when the pass is over.
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
        has_numbers: bool = False,
    ) -> None:
        self._overlaps: list[AbstractOverlap] = []
        self._vectors: list[tuple[BucketLayout, torch.Tensor, AbstractOverlap, int]] = []
        self._slots: dict[int, tuple[int, torch.Tensor]] = {}
        layouts = lay_buckets(parameters, order=order, bucket_bytes=bucket_bytes)
        for dtype, device in dict.fromkeys((layout.dtype, layout.device) for layout in layouts):
            same = [layout for layout in layouts if (layout.dtype, layout.device) == (dtype, device)]
            sizes = [each.size + (SIZE_DIGITS * comm.size if has_numbers and each is layouts[-1] else 0) for each in same]
            sums = overlap(comm, sizes=sizes, dtype=wire or dtype, device=device, algorithm=algorithm)
            self._overlaps.append(sums)
            for index, (layout, vector) in enumerate(zip(same, sums.vectors, strict=True)):
                for parameter, start in zip(layout.parameters, layout.starts, strict=False):
                    like = parameters[parameter]
                    self._slots[parameter] = len(self._vectors), vector[start : start + like.numel()].view(like.shape)
                self._vectors.append((layout, vector, sums, index))
        self._rank = comm.rank
        self._numbers = self._vectors[-1][1][layouts[-1].size :] if has_numbers and layouts else torch.empty(0)
        self._own, self._digits = -1, self._numbers
        self._waits = len(layouts) - 1 if has_numbers else None
        self._missing = [len(layout.parameters) for layout, *_ in self._vectors]
        self._there: set[int] = set()
        self._begun: set[int] = set()
        self._used: dict[int, bool] = {}

    @property
    def has_begun(self) -> bool:
        """Whether any bucket is under way."""
        return bool(self._begun)

    def put(self, index: int, gradient: torch.Tensor, *, scale: float = 1.0) -> None:
        """This rank's gradient of parameter `index` is `scale` times this. Begins its bucket, and goes on with others."""
        slot = self._slots[index][1]
        if scale == 1.0:
            slot.copy_(gradient)
        else:
            torch.mul(gradient, scale, out=slot)
        self._put([index])

    def _put(self, indices: Sequence[int]) -> None:
        """Gradients of one bucket are in it."""
        number = self._slots[indices[0]][0]
        self._there.update(indices)
        self._missing[number] -= len(indices)
        if not self._missing[number] and number != self._waits:
            self._begin(number)
        for sums in self._overlaps:
            sums.progress()

    def put_rest(self, gradients: Mapping[int, torch.Tensor], *, scale: float) -> None:
        """As `put`, of those of several parameters that are not there yet: a call for each takes longer than small ones do."""
        for layout, vector, *_ in self._vectors:
            rest = [index for index in layout.parameters if index in gradients and index not in self._there]
            if vector.dtype is not layout.dtype:
                for index in rest:
                    self.put(index, gradients[index], scale=scale)  # rounded once
            elif rest:
                slots = [self._slots[index][1] for index in rest]
                torch._foreach_copy_(slots, [gradients[index] for index in rest])
                if scale != 1.0:
                    torch._foreach_mul_([vector[: layout.starts[-1]]] if len(rest) == len(layout.parameters) else slots, scale)
                self._put(rest)

    def begin_rest(self, own: int = 0) -> None:
        """Begin the buckets that have not left in this pass; `numbers` will have `own` of all ranks."""
        if len(self._numbers):
            if own != self._own:
                self._own, self._digits = own, torch.zeros_like(self._numbers)
                start = SIZE_DIGITS * self._rank
                self._digits[start : start + SIZE_DIGITS] = torch.tensor(size_digits(own))
            self._numbers.copy_(self._digits)
        for number in range(len(self._vectors)):
            if number not in self._begun:
                self._begin(number)

    def _begin(self, number: int) -> None:
        layout, vector, sums, index = self._vectors[number]
        # The flags are summed with the gradients. For gradients of 6 and 4 elements `starts` is (0, 6, 10), and elements 10 and
        # 11 are flags: sums of 2 and 1 on two ranks say that the second gradient came from one of them (the other gave zeros),
        # and a sum of 0 that no rank had one, so that `.grad` stays None, as on one machine, and the optimizer leaves the
        # weight alone.
        used = vector[layout.starts[-1] : layout.size].fill_(1.0)
        if self._missing[number]:
            for place, parameter in enumerate(layout.parameters):
                if parameter not in self._there:
                    self._slots[parameter][1].zero_()
                    used[place] = 0.0
        sums.begin(index)
        self._begun.add(number)

    def wait(self) -> None:
        """All buckets hold the sums; the next pass may begin when they were taken."""
        for sums in self._overlaps:
            sums.wait()
        for layout, vector, *_ in self._vectors:
            for parameter, used in zip(layout.parameters, vector[layout.starts[-1] : layout.size].tolist(), strict=True):
                self._used[parameter] = used != 0.0
        self._begun.clear()
        self._there.clear()
        self._missing = [len(layout.parameters) for layout, *_ in self._vectors]

    def take(
        self, indices: Sequence[int], *, into: Sequence[torch.Tensor | None], like: Sequence[torch.Tensor]
    ) -> list[torch.Tensor | None]:
        """The sums for these parameters, each where `into` says or in memory of its own; None where no rank had a gradient."""
        rooms = [
            None if not self._used[index] else torch.empty_like(own, requires_grad=False) if room is None else room
            for index, room, own in zip(indices, into, like, strict=True)
        ]
        filled = [(room, self._slots[index][1]) for index, room in zip(indices, rooms, strict=True) if room is not None]
        if filled:
            torch._foreach_copy_([room for room, _ in filled], [slot for _, slot in filled])
        return rooms

    def numbers(self) -> list[int]:
        """What each rank gave `begin_rest`, where `has_numbers`."""
        return sizes_of(self._numbers.tolist())

    def close(self) -> None:
        self._vectors.clear()
        self._slots.clear()
        for sums in self._overlaps:
            sums.close()
