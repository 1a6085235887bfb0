"""One commit under way: what the servers were ordered to do, and which orders are still open."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tatami.server import actions as act
from tatami.server.actions import Contribution
from tatami.server.fleet import Fleet
from tatami.server.protocol import Protocol


class Commit:
    """The contributions that are being applied, shard by shard, on all copies.

    Attributes:
        contributions: empty where nothing is under way.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.contributions: tuple[Contribution, ...] = ()
        self._awaited: set[tuple[int, int]] = set()
        self._squared_norms: dict[int, float] = {}

    def sums(self, fleet: Fleet, *, ticket: int) -> Iterator[act.SumShard]:
        self._squared_norms = {}
        for shard, server in self._everywhere(fleet):
            yield act.SumShard(ticket=ticket, shard=shard, server=server, contributions=self.contributions)

    def applies(self, fleet: Fleet, *, ticket: int, version: int, clocks: Mapping[int, int]) -> Iterator[act.ApplyShard]:
        """Args: version: of the parameters afterwards; clocks: of the workers afterwards."""
        norm = sum(norm for _, norm in sorted(self._squared_norms.items())) if self._protocol.clips else None
        for shard, server in self._everywhere(fleet):
            yield act.ApplyShard(
                ticket=ticket,
                shard=shard,
                server=server,
                version=version,
                contributions=self.contributions,
                squared_norm=norm,
                clocks=tuple(sorted(clocks.items())),
            )

    def _everywhere(self, fleet: Fleet) -> list[tuple[int, int]]:
        places = [(shard, server) for shard in range(self._protocol.shards) for server in fleet.holders(shard)]
        self._awaited = set(places)
        return places

    def done(self, shard: int, server: int, *, squared_norm: float | None = None) -> None:
        self._awaited.discard((shard, server))
        if squared_norm is not None:
            self._squared_norms[shard] = squared_norm

    def lose(self, server: int) -> None:
        """Nothing is awaited of a server that is gone."""
        self._awaited = {place for place in self._awaited if place[1] != server}

    @property
    def is_awaited(self) -> bool:
        return bool(self._awaited)
