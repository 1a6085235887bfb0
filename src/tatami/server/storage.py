"""What moves between servers, disk and driver while no worker computes: checkpoints, copies of shards, and the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import numpy as np

from tatami.engine.calls import Calls, referenced
from tatami.engine.crew import Crew
from tatami.server import actions as act
from tatami.server import checkpoints
from tatami.server import events as ev
from tatami.server.optimizers import Vector
from tatami.server.saving import Saved, Terms

Published = dict[int, dict[int, Any]]
"""By shard and server: the parameters that the server has published last, or a reference to them."""


class Storage:
    """Carries out what the coordinator orders of the state as a whole; each order ends in one event, told to `tell`.

    Where a server goes away meanwhile, an order comes to nothing, and the coordinator gives another: it hears of the death.

    Args:
        at_the_disk: a block around what may take as long as the disk does.

    Attributes:
        result: all parameters `(elements,)`, once they are fetched.
    """

    def __init__(
        self,
        terms: Terms,
        *,
        servers: Crew[int],
        calls: Calls,
        published: Published,
        now_s: Callable[[], float],
        tell: Callable[[ev.Event], None],
        at_the_disk: Callable[[], AbstractContextManager[None]],
        warn: Callable[[str], None],
    ) -> None:
        self.result: Vector | None = None
        self._settings = terms.settings
        self._servers = servers
        self._calls = calls
        self._published = published
        self._directory = terms.directory
        self._facts = terms.facts
        self._now_s = now_s
        self._tell = tell
        self._at_the_disk = at_the_disk
        self._warn = warn

    def write(self, order: act.WriteCheckpoint) -> None:
        def finish(snapshots: list[Mapping[str, Vector]]) -> None:
            problem: str | None = None
            try:
                if self._directory is None:
                    raise OSError("no directory was given")
                with self._at_the_disk():
                    saved = Saved(version=order.version, clocks=order.clocks)
                    checkpoints.write(self._directory, snapshots, saved=saved, terms=self._facts)
            except OSError as error:
                problem = str(error)
            self._tell(ev.CheckpointWritten(at_s=self._now_s(), order=order, problem=problem))

        self._of_all_shards(lambda shard, server: self._servers.get(server).snapshot.remote(shard), done=finish)

    def read(self, order: act.ReadCheckpoint) -> None:
        assert self._directory is not None  # the first checkpoint was written there
        with self._at_the_disk():
            stored = checkpoints.read(self._directory, up_to=order.version)
        for problem in stored.problems:
            self._warn(f"{problem}; version {stored.saved.version} is used")
        saved = stored.saved
        waiting = {(shard, server) for shard, server in self._settings.copies if server in order.servers}

        def take(shard: int, server: int, published: list[Any]) -> None:
            self._published[shard][server] = published[0]
            waiting.discard((shard, server))
            if not waiting:
                self._tell(ev.CheckpointRead(at_s=self._now_s(), order=order, version=saved.version, clocks=saved.clocks))

        names = {"attempt": order.attempt, "clocks": saved.clocks}
        for shard, server in sorted(waiting):
            if (actor := self._servers.get(server)) is not None:
                loaded = actor.load.remote(shard, stored.snapshots[shard], **names)
                self._calls.add(loaded, done=partial(take, shard, server))

    def copy(self, order: act.CopyShard) -> None:
        source, target = self._servers.get(order.source), self._servers.get(order.server)
        if source is None or target is None:
            return

        def done(published: list[Any]) -> None:
            self._published[order.shard][order.server] = published[0]
            self._tell(ev.ShardCopied(at_s=self._now_s(), order=order))

        snapshot = source.snapshot.remote(order.shard)  # goes from server to server, not through here
        loaded = target.load.remote(order.shard, snapshot, attempt=order.attempt, clocks=order.clocks)
        self._calls.add(loaded, done=done)

    def fetch(self, order: act.FetchResult) -> None:
        def finish(parts: list[Vector]) -> None:
            self.result = np.concatenate(parts)
            self._tell(ev.ResultFetched(at_s=self._now_s(), order=order))

        self._of_all_shards(lambda shard, server: referenced(self._published[shard][server]), done=finish)

    def _of_all_shards(self, ask: Callable[[int, int], Any], *, done: Callable[[list[Any]], None]) -> None:
        """Ask one server about each shard; `done` is given the answers in the order of the shards, once all are there."""
        answers: dict[int, Any] = {}

        def take(shard: int, answer: Any) -> None:
            answers[shard] = answer
            if len(answers) == self._settings.servers:
                done([answers[each] for each in sorted(answers)])

        for shard, servers in self._published.items():
            server = next((server for server in servers if server in self._servers.members), None)
            if server is not None:
                self._calls.add(ask(shard, server), done=partial(take, shard))
