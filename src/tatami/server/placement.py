"""Which servers hold copies of the same shards, and should be on other nodes."""

from __future__ import annotations

from tatami.server.protocol import Protocol


def partners(protocol: Protocol, server: int) -> tuple[int, ...]:
    """The servers that hold copies of the same shards."""
    together = {other for shard in range(protocol.shards) if server in (held := protocol.holders(shard)) for other in held}
    return tuple(sorted(together - {server}))
