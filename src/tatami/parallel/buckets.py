"""Buckets: gradients side by side in vectors that are reduced as one.

Parameters are taken in the reverse order of their registration, because backward comes to the last layers first; the first
bucket is small, so that reducing begins early. After the gradients a bucket holds one more element for each: 1 where this rank
has used the parameter. What all ranks together have not used keeps the gradient it has, as in a single process.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.comm.overlap import AbstractOverlap, overlap
from tatami.comm.reduction import FLOAT_DTYPES
from tatami.errors import InputError

FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 4 << 20


def check_wire(wire: torch.dtype | None) -> None:
    """Whether gradients can travel as `wire`.

    Raises:
        InputError: it is not a floating dtype, so that gradients would be cut off to whole numbers.
    """
    if wire is not None and wire not in FLOAT_DTYPES:
        raise InputError(f"wire={wire} is not a floating dtype; choose torch.bfloat16 or torch.float16, or leave it out")


@dataclass(frozen=True, kw_only=True)
class BucketSlot:
    """Where the gradient of one parameter lies.

    Attributes:
        parameter: its number in the order of registration.
        start: its first element in the bucket.
        size: elements.
    """

    parameter: int
    start: int
    size: int


@dataclass(frozen=True, kw_only=True)
class BucketLayout:
    """One bucket.

    Attributes:
        places: of its gradients, in the order in which they are expected.
        dtype: of the parameters.
        device: of the parameters.
    """

    places: tuple[BucketSlot, ...]
    dtype: torch.dtype
    device: torch.device

    @property
    def used_start(self) -> int:
        """Where the elements begin that say which parameters were used."""
        return self.places[-1].start + self.places[-1].size

    @property
    def size(self) -> int:
        """Elements of the whole bucket."""
        return self.used_start + len(self.places)


def lay_buckets(
    parameters: Sequence[nn.Parameter], *, bucket_bytes: int = BUCKET_BYTES, first_bytes: int = FIRST_BUCKET_BYTES
) -> list[BucketLayout]:
    """Buckets of at most `bucket_bytes`, the first of `first_bytes`; a larger parameter has one to itself."""
    buckets: list[BucketLayout] = []
    places: list[BucketSlot] = []
    filled = 0
    kind: tuple[torch.dtype, torch.device] | None = None

    def close() -> None:
        nonlocal filled
        if places and kind is not None:
            buckets.append(BucketLayout(places=tuple(places), dtype=kind[0], device=kind[1]))
        places.clear()
        filled = 0

    for index, parameter in reversed(list(enumerate(parameters))):
        limit = (bucket_bytes if buckets else min(first_bytes, bucket_bytes)) // parameter.itemsize
        if kind != (parameter.dtype, parameter.device) or filled + parameter.numel() > limit:
            close()
        kind = (parameter.dtype, parameter.device)
        places.append(BucketSlot(parameter=index, start=filled, size=parameter.numel()))
        filled += parameter.numel()
    close()
    return buckets


class Bucket:
    """A bucket in its vector, during one backward pass after the other."""

    def __init__(self, layout: BucketLayout, vector: torch.Tensor, *, shapes: Sequence[torch.Size]) -> None:
        """`vector` (layout.size,) may be of a narrower dtype than the gradients; `shapes` are those of all parameters."""
        self.layout = layout
        self._used = vector[layout.used_start :]
        self._views = {
            place.parameter: vector[place.start : place.start + place.size].view(shapes[place.parameter])
            for place in layout.places
        }
        self._is_wire = vector.dtype != layout.dtype
        self._stored: set[int] = set()
        self._given: set[int] = set()

    def store(self, index: int, parameter: nn.Parameter) -> bool:
        """The gradient of parameter `index` is there; returns whether that of all are."""
        grad, view = parameter.grad, self._views[index]
        assert grad is not None
        if grad.data_ptr() != view.data_ptr() or grad.dtype != view.dtype:
            view.copy_(grad.detach())
            if not self._is_wire:
                parameter.grad = view
        self._stored.add(index)
        return len(self._stored) == len(self._views)

    def place(self, index: int) -> torch.Tensor | None:
        """Where the gradient of parameter `index` may be computed, whose shape it has; None: it does not fit, or is there."""
        if self._is_wire or index in self._stored or index in self._given:
            return None
        self._given.add(index)
        return self._views[index]

    def has(self, index: int) -> bool:
        """Whether the gradient of parameter `index` is there."""
        return index in self._stored

    def seal(self, parameters: Sequence[nn.Parameter]) -> None:
        """Before the bucket is reduced: fill in what this pass has not used, and say what is used."""
        for index, view in self._views.items():
            if index in self._stored:
                continue
            if parameters[index].grad is None:
                view.zero_()
            else:  # from passes before this one, that were not reduced
                self.store(index, parameters[index])
        self._used.copy_(self._used.new_tensor([float(place.parameter in self._stored) for place in self.layout.places]))
        self._stored.clear()
        self._given.clear()

    def deliver(self, parameters: Sequence[nn.Parameter]) -> None:
        """After the bucket is reduced: its values become the gradients."""
        for place, used in zip(self.layout.places, self._used.tolist(), strict=True):
            if used == 0.0:
                continue
            parameter, view = parameters[place.parameter], self._views[place.parameter]
            if not self._is_wire:
                parameter.grad = view
            elif parameter.grad is None:
                parameter.grad = view.to(parameter.dtype)
            else:
                parameter.grad.copy_(view)


class BucketSet:
    """All buckets, and what reduces them: one vector a bucket, the buckets of each dtype and device together."""

    def __init__(
        self,
        comm: AbstractCommunicator,
        layouts: list[BucketLayout],
        *,
        shapes: list[torch.Size],
        wire: torch.dtype | None,
        algorithm: str | None,
    ) -> None:
        self._overlaps: list[AbstractOverlap] = []
        self._buckets: list[tuple[Bucket, AbstractOverlap, int]] = []
        self._bucket_of: dict[int, int] = {}
        for dtype, device in dict.fromkeys((layout.dtype, layout.device) for layout in layouts):
            same = [layout for layout in layouts if (layout.dtype, layout.device) == (dtype, device)]
            means = overlap(comm, sizes=[each.size for each in same], dtype=wire or dtype, device=device, algorithm=algorithm)
            self._overlaps.append(means)
            for index, (layout, vector) in enumerate(zip(same, means.vectors, strict=True)):
                for place in layout.places:
                    self._bucket_of[place.parameter] = len(self._buckets)
                self._buckets.append((Bucket(layout, vector, shapes=shapes), means, index))
        self._begun: set[int] = set()

    def store(self, index: int, parameter: nn.Parameter, *, parameters: list[nn.Parameter]) -> bool:
        """A gradient is there: begin its bucket if it was the last, and go on with others. False: it was there already."""
        number = self._bucket_of[index]
        bucket = self._buckets[number][0]
        if number in self._begun or bucket.has(index):
            return False
        if bucket.store(index, parameter):
            self._begin(number, parameters)
        for means in self._overlaps:
            means.progress()
        return True

    def place(self, index: int) -> torch.Tensor | None:
        """Where a gradient may be computed, so that `store` need not copy it; once in each pass."""
        number = self._bucket_of[index]
        return None if number in self._begun else self._buckets[number][0].place(index)

    def begin_rest(self, parameters: list[nn.Parameter]) -> None:
        """Begin the buckets of which some parameters are not used in this pass."""
        for number in range(len(self._buckets)):
            if number not in self._begun:
                self._begin(number, parameters)
        self._begun.clear()

    def _begin(self, number: int, parameters: list[nn.Parameter]) -> None:
        bucket, means, index = self._buckets[number]
        bucket.seal(parameters)
        means.begin(index)
        self._begun.add(number)

    def wait(self) -> None:
        for means in self._overlaps:
            means.wait()

    def deliver(self, parameters: list[nn.Parameter]) -> None:
        for bucket, _, _ in self._buckets:
            bucket.deliver(parameters)

    def close(self) -> None:
        self._buckets.clear()
        for means in self._overlaps:
            means.close()
