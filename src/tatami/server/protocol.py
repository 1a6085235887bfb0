"""What is agreed before a run: how many, how long, how strict, and what is done about deaths."""

from __future__ import annotations

from dataclasses import dataclass, field

from tatami.errors import InputError
from tatami.inputs import check_at_least
from tatami.server.consistency import BSP, AbstractConsistency
from tatami.server.recovery import AbstractRecovery, FromServers

DEFAULT_RESTARTS = 8


@dataclass(frozen=True, kw_only=True)
class Protocol:
    """The terms of a parameter-server run.

    Attributes:
        rounds: that every worker does.
        workers: at the start; worker w has place w.
        servers: that share the parameters.
        shards: pieces of the parameters; shard k lies on server k modulo `servers`, and on the `replicas` - 1 after it.
        spares: processes that stand by.
        restarts: further processes that may be started to keep up the number of spares.
        min_workers: with fewer the run stops.
        replicas: on how many servers each shard is kept.
        clips: whether the norm over all shards must be known before any is applied.
        save_every: rounds between checkpoints where the recovery itself needs none; None writes none.

    Raises:
        InputError: invalid numbers.
    """

    rounds: int
    workers: int
    servers: int
    shards: int
    spares: int = 0
    restarts: int = DEFAULT_RESTARTS
    min_workers: int = 1
    replicas: int = 1
    consistency: AbstractConsistency = field(default_factory=BSP)
    recovery: AbstractRecovery = field(default_factory=FromServers)
    clips: bool = False
    save_every: int | None = None

    def __post_init__(self) -> None:
        check_at_least(0, rounds=self.rounds, spares=self.spares, restarts=self.restarts)
        check_at_least(1, workers=self.workers, servers=self.servers, shards=self.shards)
        check_at_least(1, min_workers=self.min_workers, replicas=self.replicas)
        if self.save_every is not None and self.save_every < 1:
            raise InputError(f"save_every must be at least 1 round, not {self.save_every}")
        if self.replicas > self.servers:
            raise InputError(
                f"replicas={self.replicas}, but there are only {self.servers} servers: each copy of a shard needs its own. "
                f"Start {self.replicas} servers or more, or ask for fewer replicas"
            )
        if self.min_workers > self.workers:
            raise InputError(
                f"min_workers={self.min_workers} is more than the {self.workers} workers that there are to begin with"
            )

    def holders(self, shard: int) -> tuple[int, ...]:
        """The servers that keep this shard, first the one it belongs to."""
        return tuple((shard + copy) % self.servers for copy in range(self.replicas))

    def partners(self, server: int) -> tuple[int, ...]:
        """The servers that hold copies of the same shards as this one; they should be on other nodes."""
        together = {other for shard in range(self.shards) if server in (held := self.holders(shard)) for other in held}
        return tuple(sorted(together - {server}))
