"""What is simulated: machines and their parts, sizes, delays, chances, and what is done about a failure."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Literal

from tatami.errors import InputError
from tatami.server.consistency import BSP, AbstractConsistency
from tatami.server.recovery import YEAR_S, AbstractRecovery, FromServers
from tatami.sim.platforms import AbstractPlatform, ClusterPlatform, preset

_MOST_FLOWS = 2000


@dataclass(frozen=True, kw_only=True)
class Checkpoints:
    """Where checkpoints go, and who waits for them. Only where the recovery writes any.

    Attributes:
        size_bytes: that each worker writes, and reads back.
        bandwidth_bytes_per_s: of each worker's own storage, where there is no `store`.
        store: hosts of a store that all share, by index: checkpoints go there over the network, spread evenly. () for a storage
            in each node.
        waits: the next round begins when all are written; else they are written while it begins, as long as they take less.
    """

    size_bytes: float = 8e9
    bandwidth_bytes_per_s: float = 1e9
    store: tuple[int, ...] = ()
    waits: bool = False

    @property
    def local_s(self) -> float:
        """Seconds to write one, or read it, in a node's own storage."""
        return self.size_bytes / self.bandwidth_bytes_per_s


@dataclass(frozen=True, kw_only=True)
class ServerSetup:
    """A run on simulated machines.

    Attributes:
        platform: the machines.
        workers: hosts by index; worker w computes on workers[w], as does the process that takes its place.
        servers: hosts by index; they share the parameters.
        rounds: of the run.
        task_flop: of one worker in one round.
        model_bytes: that a worker pulls, and pushes, in a round.
        recovery: what is done about a dead worker.
        consistency: how far workers may drift apart.
        resume: what a spare does of the dead worker's task: the rest ("continue", as the paper has it), or all ("restart", as a
            real one must).
        push: in lockstep, workers begin to push when all have computed ("together", as the paper's times imply), or each when
            it has ("when-done", as the real runtime does).
        strikes: a worker's life counts while it computes, at so much more that as many die as if it counted always
            ("computing", as in the paper), or always ("anytime").
        deaths: of workers, at given times: (seconds after the start, worker).
        mtbf_s: mean time to a worker's death; None for never.
        server_mtbf_s, link_mtbf_s: the same for a server, and for a worker's own link.
        link_repair_s: until a broken link is back.
        detection_s: between a death and the coordinator's learning of it.
        spawn_s: to start a machine.
        spares: that stand by, started.
        replicas: servers that hold each parameter.
        apply_s: servers take to add up and apply a round.
        checkpoints: where they go.
        spread: servers that one worker's exchange is simulated with, each standing for servers/spread of them; None for all
            where that makes no more than 2,000 transfers, and else one.

    Raises:
        InputError: invalid numbers, or more machines in the parts than the platform has; says which.
    """

    platform: AbstractPlatform
    workers: tuple[int, ...]
    servers: tuple[int, ...]
    rounds: int = 200
    task_flop: float = 100.0
    model_bytes: float = 1e9
    recovery: AbstractRecovery = field(default_factory=FromServers)
    consistency: AbstractConsistency = field(default_factory=BSP)
    resume: Literal["continue", "restart"] = "restart"
    push: Literal["together", "when-done"] = "when-done"
    strikes: Literal["computing", "anytime"] = "anytime"
    deaths: tuple[tuple[float, int], ...] = ()
    mtbf_s: float | None = 3 * YEAR_S
    server_mtbf_s: float | None = None
    link_mtbf_s: float | None = None
    link_repair_s: float = 60.0
    detection_s: float = 0.0
    spawn_s: float = 5.0
    spares: int = 0
    replicas: int = 1
    apply_s: float = 0.0
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    spread: int | None = None

    def __post_init__(self) -> None:
        if isinstance(self.platform, ClusterPlatform):
            self.platform.cluster.plain_speeds("a simulated parameter server")
        num_hosts = len(self.platform.hosts)
        wanted = len(self.workers) + len(self.servers) + len(self.checkpoints.store)
        if wanted > num_hosts:
            raise InputError(
                f"{len(self.workers)} workers, {len(self.servers)} servers and {len(self.checkpoints.store)} hosts of a store "
                f"are {wanted} hosts; the platform {self.platform.name} has only {num_hosts}"
            )
        for name, hosts in (("workers", self.workers), ("servers", self.servers), ("store", self.checkpoints.store)):
            outside = [host for host in hosts if not 0 <= host < num_hosts]
            if outside:
                raise InputError(
                    f"{name}: there is no host {outside[0]} on the platform {self.platform.name}, which has {num_hosts}"
                )
        positive = {f"checkpoints.{name}": getattr(self.checkpoints, name) for name in ("size_bytes", "bandwidth_bytes_per_s")}
        for name in ("task_flop", "model_bytes", "mtbf_s", "server_mtbf_s", "link_mtbf_s"):
            positive[name] = getattr(self, name)
        for name, value in positive.items():
            if value is not None and not 0 < value < math.inf:
                raise InputError(f"{name} must be a finite number > 0, not {value}")
        for name in ("detection_s", "spawn_s", "apply_s", "link_repair_s"):
            if not 0 <= (value := getattr(self, name)) < math.inf:
                raise InputError(f"{name} must be a finite number >= 0, not {value}")
        for at_s, worker in self.deaths:
            if not (at_s >= 0 and 0 <= worker < len(self.workers)):
                raise InputError(f"deaths: worker {worker} at {at_s} s: there are workers 0 to {len(self.workers) - 1}")
        if not self.workers or not self.servers:
            raise InputError("a run needs at least one worker and one server")
        if self.spread is not None and not 1 <= self.spread <= len(self.servers):
            raise InputError(f"spread must be from 1 to the number of servers, {len(self.servers)}, not {self.spread}")

    @property
    def servers_of_one(self) -> int:
        """Servers that one worker's exchange is simulated with."""
        if self.spread is not None:
            return self.spread
        return len(self.servers) if len(self.workers) * len(self.servers) <= _MOST_FLOWS else 1


def paper_setup(*, workers: int = 10_000, rounds: int = 200, recovery: AbstractRecovery | None = None) -> ServerSetup:
    """The system of Li, Tanimura and Nakada, with the choices that give its published times (docs/rehearsal.md)."""
    platform = preset("paper-server-10k", nodes=workers)
    return ServerSetup(
        platform=platform,
        workers=tuple(range(workers)),
        servers=tuple(range(workers, workers + 100)),
        rounds=rounds,
        recovery=FromServers() if recovery is None else recovery,
        resume="continue",
        push="together",
        strikes="computing",
    )
