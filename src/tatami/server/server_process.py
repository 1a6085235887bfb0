"""The process of a server, as a Ray actor: a thin shell around its shards. Needs no torch, so it starts quickly."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from tatami.engine.calls import posted
from tatami.engine.processes import Identity, WatchedProcess, identity, tethered
from tatami.server.actions import ApplyShard, Contribution, SumShard
from tatami.server.optimizers import AbstractOptimizer, Vector
from tatami.server.shard import ShardServer


class ServerProcess(WatchedProcess):
    """Holds shards; gives their parameters, or references to them, which workers map without a copy."""

    def __init__(self) -> None:
        self._shards: ShardServer | None = None
        self._most_bytes = 0

    def employ(
        self,
        numbers: Sequence[int],
        optimizer: AbstractOptimizer,
        *first: Vector,
        clip_norm: float | None,
        whole_batch: int | None,
        most_bytes: int,
    ) -> Identity:
        """Serve a run: `first` are the parameters of the shards `numbers`, which are given by value up to `most_bytes`."""
        self._most_bytes = most_bytes
        shards = dict(zip(numbers, first, strict=True))
        self._shards = ShardServer(shards, optimizer=optimizer, clip_norm=clip_norm, whole_batch=whole_batch)
        return identity()

    def dismiss(self) -> None:
        """Let go of the run."""
        self._shards = None

    def stage(self, shard: int, update: Sequence[Vector], contribution: Contribution, attempt: int, samples: int) -> bool:
        # By position: Ray packs every argument on its own, and the name of each as one more.
        # One that comes after the run, from a worker that had been stopped, is refused like any other late one.
        return self._shards is not None and self._shards.stage(
            shard, update, contribution=contribution, attempt=attempt, samples=samples
        )

    def sum(self, order: SumShard) -> float:
        return self._held.sum(order)

    def apply(self, order: ApplyShard) -> list[Any]:
        return self._publish(self._held.apply(order))

    def parameters(self, shard: int) -> list[Any]:
        return self._publish(self._held.parameters(shard))

    def snapshot(self, shard: int) -> dict[str, Vector]:
        return self._held.snapshot(shard)

    def load(
        self, shard: int, snapshot: Mapping[str, Vector], *, attempt: int, clocks: tuple[tuple[int, int], ...]
    ) -> list[Any]:
        return self._publish(self._held.load(shard, snapshot, attempt=attempt, clocks=clocks))

    @property
    def _held(self) -> ShardServer:
        assert self._shards is not None  # the coordinator orders nothing of servers that are not of its run
        return self._shards

    def _publish(self, parameters: Vector) -> list[Any]:
        """In a list, so that Ray hands on a reference and not what it refers to."""
        with tethered():
            return [posted(parameters, size_bytes=parameters.nbytes, most_bytes=self._most_bytes)]
