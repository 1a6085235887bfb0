"""What a user may ask of a run, and change in it, while it goes on."""

from __future__ import annotations

from abc import ABC, abstractmethod

from tatami.engine.crew import Crew, Member
from tatami.engine.silence import RunClock
from tatami.report.server_run import Failure, RunReport, RunStatus
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.ledger import Ledger


class RunControl(ABC):
    """A run, as `on_round` is given it after every commit. Not for other threads."""

    coordinator: Coordinator
    _ledger: Ledger
    _workers: Crew[int]
    _servers: Crew[int]
    _clock: RunClock

    @abstractmethod
    def _tell(self, event: ev.Event) -> None:
        """Hand an event to the coordinator, and carry out what it orders."""

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
            rounds=self.coordinator.settings.rounds,
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
        self._tell(ev.WorkerJoins(at_s=self._clock.now_s()))

    def remove_worker(self, worker: int) -> None:
        """Let a worker go after its round."""
        self._tell(ev.WorkerLeaves(at_s=self._clock.now_s(), worker=worker))

    def _named(self) -> dict[str, Member]:
        names = {process: f"worker {worker}" for worker, process in self.holders().items()}
        workers = {names.get(number, f"spare {number}"): member for number, member in self._workers.members.items()}
        servers = {f"server {number}": member for number, member in self._servers.members.items()}
        return {name: member for name, member in (workers | servers).items() if member.is_ready}
