"""All gradients of a network, reduced over the ranks bucket by bucket."""

from __future__ import annotations

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.comm.overlap import AbstractOverlap, overlap
from tatami.parallel.buckets import Bucket, BucketLayout


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
