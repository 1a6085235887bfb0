"""Where a run takes place, and what a user may ask of it, and change in it, while it goes on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from tatami.clock import Clock, SystemClock
from tatami.records import Records
from tatami.report.server_run import Failure, RunReport, RunStatus
from tatami.server import events as ev
from tatami.server.protocol import Protocol
from tatami.server.run_settings import PhaseHook

if TYPE_CHECKING:
    from tatami.engine.crew import Crew, Member, Pool
    from tatami.server.coordinator import Coordinator
    from tatami.server.ledger import Ledger


class RunControl:
    """A run, as `on_round` is given it after every commit. Not for other threads.

    Args:
        coordinator: decides.
        protocol: sends what it orders.
        ledger: counts rounds and failures.
        workers, servers: the processes.
        now_s: seconds since the start of the run.
        tell: takes an event to the coordinator, and carries out what it orders.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        protocol: Protocol,
        ledger: Ledger,
        workers: Crew,
        servers: Crew,
        now_s: Callable[[], float],
        tell: Callable[[ev.Event], None],
    ) -> None:
        self.coordinator = coordinator
        self.protocol = protocol
        self._ledger = ledger
        self._workers = workers
        self._servers = servers
        self._now_s = now_s
        self._tell = tell

    @property
    def version(self) -> int:
        """Commits that are applied: in lockstep, rounds that are done."""
        return self.coordinator.version

    @property
    def failures(self) -> tuple[Failure, ...]:
        """The failures that were noticed so far."""
        return tuple(self._ledger.failures)

    def pids(self) -> dict[str, int]:
        """Process ids by name: "worker 0", "spare 4", "server 1"."""
        return {name: member.pid for name, member in self._named().items()}

    def nodes(self) -> dict[str, str]:
        """Ray's nodes, by the same names."""
        return {name: member.node for name, member in self._named().items()}

    def holders(self) -> dict[int, int]:
        """The process that each worker is at present."""
        return {worker: place.process for worker, place in self.coordinator.places.items() if place.process is not None}

    def status(self) -> RunStatus:
        """Numbers of the run so far, as a table shows them."""
        report = self.report()
        recent = report.reached_s[-20:]
        span_s = recent[-1] - recent[0] if len(recent) > 1 else 0.0
        return RunStatus(
            round=min((clock for _, clock in self.coordinator.clocks), default=0),
            rounds=self.protocol.rounds,
            commits_per_s=(len(recent) - 1) / span_s if span_s > 0 else 0.0,
            workers=len(self.holders()),
            spares=self.coordinator.num_spares,
            servers=len(self.coordinator.servers),
            deaths=len(report.failures),
            lost_s=sum(failure.lost_s or 0.0 for failure in report.failures),
            loss=report.losses[-1] if report.losses else None,
        )

    def report(self) -> RunReport:
        """What has happened so far."""
        return self._ledger.report(workers=len(self.coordinator.places))

    def add_worker(self) -> None:
        """Have one worker more, from the round after its process is up."""
        self._tell(ev.WorkerJoins(at_s=self._now_s()))

    def remove_worker(self, worker: int) -> None:
        """Let a worker go after its round."""
        self._tell(ev.WorkerLeaves(at_s=self._now_s(), worker=worker))

    def _named(self) -> dict[str, Member]:
        names = {process: f"worker {worker}" for worker, process in self.holders().items()}
        workers = {names.get(number, f"spare {number}"): member for number, member in self._workers.members.items()}
        servers = {f"server {number}": member for number, member in self._servers.members.items()}
        return {name: member for name, member in (workers | servers).items() if member.is_ready}


@dataclass(frozen=True, kw_only=True)
class RunContext:
    """The surroundings of one call of `train` or `resume`; none of it changes what is computed.

    Attributes:
        address: of a Ray cluster; None runs on this machine.
        report: a file that is told what happened, however the run ends.
        records: written for every round and failure.
        on_round: called here after every commit; may add and remove workers.
        on_phase: called in the workers at each phase of a task: for tests of failures.
        pool: of processes from an earlier run on the same Ray; those that live are kept in it again.
        clock: of the run's process.
    """

    address: str | None = None
    report: Path | str | None = None
    records: Records | None = None
    on_round: Callable[[RunControl], None] | None = None
    on_phase: PhaseHook | None = None
    pool: Pool | None = None
    clock: Clock = field(default_factory=SystemClock)
