"""What one server holds: its shards, their optimizer state, and updates that are not applied yet."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from tatami.server.actions import ApplyShard, Contribution, SumShard
from tatami.server.optimizers import AbstractOptimizer, Vector
from tatami.server.pieces import walk

PARAMETERS = "parameters"
COUNT = "count"

_CHUNK = 131_072
"""Elements that are summed and stepped in one go: they stay in a core's caches, and memory is read in long stretches."""


@dataclass(kw_only=True)
class Shard:
    """A stretch of the parameters: `(elements,)`, with as much for each vector of the optimizer."""

    parameters: Vector
    state: dict[str, Vector]
    count: int = 0
    staged: dict[Contribution, tuple[Sequence[Vector], int]] = field(default_factory=dict)


class ShardServer:
    """Stages updates, and applies them when it is ordered to; an update that is late or comes twice changes nothing.

    Args:
        shards: the first parameters of each shard, by its number.
        clip_norm: the longest gradient over all shards; None for no clipping.
        whole_batch: samples by which an update that is applied alone is divided; None divides by those that arrived.
    """

    def __init__(
        self,
        shards: Mapping[int, Vector],
        *,
        optimizer: AbstractOptimizer,
        clip_norm: float | None = None,
        whole_batch: int | None = None,
    ) -> None:
        self._optimizer = optimizer
        self._clip_norm = clip_norm
        self._whole_batch = whole_batch
        self._attempt = 0
        self._floors: dict[int, int] = {}
        self._shards = {
            number: Shard(parameters=values.copy(), state={name: np.zeros_like(values) for name in optimizer.slots})
            for number, values in shards.items()
        }

    def stage(self, shard: int, update: Sequence[Vector], *, contribution: Contribution, attempt: int, samples: int) -> bool:
        """Keep an update until it is ordered; whether it is taken. An update that came before takes its own place again.

        Args:
            update: vectors that together are as long as the shard.
            contribution: how orders name it.
        """
        if attempt != self._attempt or contribution.round < self._floors.get(contribution.worker, 0):
            return False
        self._shards[shard].staged[contribution] = (update, samples)
        return True

    def sum(self, order: SumShard) -> float:
        """Squared norm of the summed gradient of the order's contributions on its shard."""
        norm = 0.0
        for _, gradient in self._gradient(order):
            wide = gradient.astype(np.float64)
            norm += float(np.dot(wide, wide))
        return norm

    def apply(self, order: ApplyShard) -> Vector:
        """Take one step with the sum of the contributions, in their order; gives the parameters `(elements,)` after it."""
        held, squared_norm = self._shards[order.shard], order.squared_norm
        held.count += 1
        clips = self._clip_norm is not None and squared_norm is not None and squared_norm > self._clip_norm**2
        for part, gradient in self._gradient(order):
            if clips and self._clip_norm is not None and squared_norm is not None:
                gradient *= gradient.dtype.type(self._clip_norm / np.sqrt(squared_norm))
            state = {name: vector[part] for name, vector in held.state.items()}
            self._optimizer.step(held.parameters[part], gradient, state=state, count=held.count)
        self._floors.update(order.clocks)
        held.staged = {key: value for key, value in held.staged.items() if key.round >= self._floors.get(key.worker, 0)}
        return held.parameters

    def parameters(self, shard: int) -> Vector:
        return self._shards[shard].parameters

    def snapshot(self, shard: int) -> dict[str, Vector]:
        """All that a checkpoint must hold of a shard."""
        held = self._shards[shard]
        return {PARAMETERS: held.parameters, COUNT: np.array([held.count]), **held.state}

    def load(self, shard: int, snapshot: Mapping[str, Vector], *, attempt: int, clocks: tuple[tuple[int, int], ...]) -> Vector:
        """Return to a snapshot; updates staged before are dropped, and tasks begun before will be refused."""
        held = self._shards[shard]
        held.parameters = snapshot[PARAMETERS].copy()
        held.count = int(snapshot[COUNT][0])
        held.state = {name: snapshot[name].copy() for name in self._optimizer.slots}
        held.staged = {}
        self._attempt = attempt
        self._floors = dict(clocks)
        return held.parameters

    def _gradient(self, order: SumShard | ApplyShard) -> Iterator[tuple[slice, Vector]]:
        """The mean over the samples that arrived, summed in the order of the contributions: the same bits every time.

        Yields:
            A stretch of the shard, and the gradient `(elements here,)` there, which holds until the next is asked for.
        """
        held = self._shards[order.shard]
        updates = [held.staged[each] for each in order.contributions]
        counts = [samples for _, samples in updates]
        total = max(1, self._whole_batch or sum(counts))
        kind = held.parameters.dtype.type
        sum_, scratch = np.empty(_CHUNK, dtype=kind), np.empty(_CHUNK, dtype=kind)
        walks = [walk(update, step=_CHUNK) for update, _ in updates]
        # Those that weigh the same are weighted once, after they are summed, in half the time.
        common = kind(counts[0] / total) if len(set(counts)) == 1 else None
        for start in range(0, len(held.parameters), _CHUNK):
            stop = min(start + _CHUNK, len(held.parameters))
            gradient = sum_[: stop - start]
            for number, (samples, steps) in enumerate(zip(counts, walks, strict=True)):
                weight = kind(samples / total) if common is None else None
                _add(next(steps), weight=weight, to=gradient, scratch=scratch, is_first=number == 0)
            if common is not None:
                gradient *= common
            yield slice(start, stop), gradient


def _add(views: Sequence[Vector], *, weight: np.floating[Any] | None, to: Vector, scratch: Vector, is_first: bool) -> None:
    """Add the views, laid one after the other and weighted, to the vector `to`; the first takes the place of what is there."""
    filled = 0
    for view in views:
        place = slice(filled, filled + len(view))
        filled += len(view)
        weighted = view if weight is None else np.multiply(view, weight, out=scratch[place])
        if is_first:
            np.copyto(to[place], weighted)
        else:
            to[place] += weighted
