"""Which servers hold what: those that are whole, those that start, and those that are up and still empty."""

from __future__ import annotations

from tatami.server.protocol import Protocol


class Fleet:
    """Keeps the servers of a run.

    Attributes:
        whole: servers that hold all their shards.
        starting: being started, in place of ones that are gone.
        blank: up, and without the state of the run.
    """

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self.whole = set(range(protocol.servers))
        self.starting: set[int] = set()
        self.blank: set[int] = set()

    def holders(self, shard: int) -> tuple[int, ...]:
        """The servers that hold this shard now, first the one it belongs to."""
        return tuple(server for server in self._protocol.holders(shard) if server in self.whole)

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
        return tuple(sorted(set(range(self._protocol.servers)) - self.whole - self.starting - self.blank))

    def up(self) -> tuple[int, ...]:
        return tuple(sorted(self.whole | self.blank))

    def lost_shards(self) -> tuple[int, ...]:
        """Shards of which no copy is left."""
        return tuple(shard for shard in range(self._protocol.shards) if not self.holders(shard))

    def copies_due(self) -> tuple[tuple[int, int, int], ...]:
        """(shard, from, to): the copies that empty servers need to be whole; none of shards that no server holds."""
        return tuple(
            (shard, self.holders(shard)[0], server)
            for server in sorted(self.blank)
            for shard in range(self._protocol.shards)
            if server in self._protocol.holders(shard) and self.holders(shard)
        )
