"""Which servers hold what: those that are whole, those that start, and those that are up and still empty."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from tatami.server import actions as act
from tatami.server.actions import Contribution
from tatami.server.run_settings import RunSettings


class Fleet:
    """Keeps the servers of a run.

    Attributes:
        whole: servers that hold all their shards.
        starting: being started, in place of ones that are gone.
        blank: up, and without the state of the run.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self.whole = set(range(settings.servers))
        self.starting: set[int] = set()
        self.blank: set[int] = set()

    def holders(self, shard: int) -> tuple[int, ...]:
        """The servers that hold this shard now, first the one it belongs to."""
        return tuple(server for server in self._settings.holders(shard) if server in self.whole)

    def lose(self, server: int) -> bool:
        """Note that a server is gone; returns whether it was there."""
        known = server in self.whole | self.starting | self.blank
        for group in (self.whole, self.starting, self.blank):
            group.discard(server)
        return known

    def is_ready(self, server: int) -> None:
        """Note that a server is up, unless it was declared dead in the meantime."""
        if server in self.starting:
            self.starting.discard(server)
            self.blank.add(server)

    def filled(self, server: int) -> None:
        """Note that a server holds all its shards, if it is still there."""
        if server in self.blank:
            self.blank.discard(server)
            self.whole.add(server)

    def gone(self) -> tuple[int, ...]:
        return tuple(sorted(set(range(self._settings.servers)) - self.whole - self.starting - self.blank))

    def up(self) -> tuple[int, ...]:
        return tuple(sorted(self.whole | self.blank))

    def lost_shards(self) -> tuple[int, ...]:
        """Shards of which no copy is left."""
        return tuple(shard for shard in range(self._settings.servers) if not self.holders(shard))

    def copies_due(self) -> tuple[tuple[int, int, int], ...]:
        """(shard, from, to): the copies that empty servers need to be whole; none of shards that no server holds."""
        return tuple(
            (shard, self.holders(shard)[0], server)
            for shard, server in self._settings.copies
            if server in self.blank and self.holders(shard)
        )


class Commit:
    """The contributions that are being applied, shard by shard, on all copies.

    Attributes:
        contributions: empty where nothing is under way.
    """

    def __init__(self, settings: RunSettings) -> None:
        self._settings = settings
        self.contributions: tuple[Contribution, ...] = ()
        self._awaited: set[tuple[int, int]] = set()
        self._squared_norms: dict[int, float] = {}

    def sums(self, fleet: Fleet, *, ticket: int) -> Iterator[act.SumShard]:
        self._squared_norms = {}
        for shard, server in self._everywhere(fleet):
            yield act.SumShard(ticket=ticket, shard=shard, server=server, contributions=self.contributions)

    def applies(self, fleet: Fleet, *, ticket: int, version: int, clocks: Mapping[int, int]) -> Iterator[act.ApplyShard]:
        """Args: version: of the parameters afterwards; clocks: of the workers afterwards."""
        norm = sum(norm for _, norm in sorted(self._squared_norms.items())) if self._settings.clip_norm is not None else None
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
        places = [(shard, server) for shard, server in self._settings.copies if server in fleet.whole]
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
