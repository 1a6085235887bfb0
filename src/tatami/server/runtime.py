"""Carries out the coordinator's actions on Ray actors, and tells it what happens to them."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import ray
from ray.exceptions import ObjectLostError, RayActorError, RayTaskError

from tatami.clock import Clock
from tatami.errors import CheckpointError, InputError, ModelError, NotFiniteError, TrainingError
from tatami.server import actions as act
from tatami.server import checkpoints
from tatami.server import events as ev
from tatami.server.actors import Job, Outcome, ServerProcess, WorkerProcess
from tatami.server.learner import cut
from tatami.server.optimizers import AbstractOptimizer, Vector
from tatami.server.processes import is_running, kill
from tatami.server.report import Failure, RunReport, with_costs
from tatami.server.saving import Saved
from tatami.server.state import Coordinator
from tatami.server.steps import Phase

_TICK_S = 0.05
_END_S = 2.0
"""Processes that do not end within it, as they hang, are killed."""
BOOT_TIMEOUT_S = 60.0

Handler = Callable[[Any], None]


@dataclass(kw_only=True)
class Member:
    """A process of the run: its actor, and when it last gave a sign of life."""

    actor: Any
    pid: int = 0
    node: str = ""
    seen_s: float = 0.0
    ready: bool = False


@dataclass(frozen=True, kw_only=True)
class Terms:
    """What the servers and the disk must know.

    Attributes:
        first: all parameters at the start, (elements,).
        snapshots: of each shard, where the run goes on from a checkpoint.
        facts: kept in each checkpoint, to tell whether it is of this run.
    """

    first: Vector
    signature: str
    optimizer: AbstractOptimizer
    clip_norm: float | None
    whole_batch: int | None
    directory: Path | None
    heartbeat_s: float
    facts: Mapping[str, Any]
    snapshots: tuple[dict[str, Vector], ...] | None = None


class Runtime:
    """One run. `control` methods may be called from `on_round`."""

    def __init__(
        self,
        coordinator: Coordinator,
        *,
        job: Job,
        pickled_job: bytes,
        data: Any,
        terms: Terms,
        clock: Clock,
        on_round: Callable[[Runtime], None] | None = None,
    ) -> None:
        self.coordinator = coordinator
        self.protocol = job.protocol
        self._terms = terms
        self._clock = clock
        self._on_round = on_round
        self._pickled_job, self._data = ray.put(pickled_job), ray.put(data)
        self._workers: dict[int, Member] = {}
        self._servers: dict[int, Member] = {}
        self._pending: dict[Any, tuple[Handler, Handler]] = {}
        self._published: dict[int, dict[int, Any]] = {shard: {} for shard in range(self.protocol.shards)}
        self._results: dict[tuple[int, int], Outcome] = {}
        self._losses: dict[int, float] = {}
        self._reached: list[float] = []
        self._failures: list[Failure] = []
        self._warnings: list[str] = []
        self._result: Vector | None = None
        self._end: act.Finish | act.Stop | None = None
        self._began_s = clock.now_s()
        self._zero_s = self._began_s
        self._stretches = cut(len(terms.first), shards=self.protocol.shards)

    # -- control --------------------------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Commits that are applied: in lockstep, rounds that are done."""
        return self.coordinator.version

    @property
    def failures(self) -> tuple[Failure, ...]:
        """Those that were noticed so far."""
        return tuple(self._failures)

    def pids(self) -> dict[str, int]:
        """Process ids by name: "worker 0", "spare 4", "server 1"."""
        names = {process: f"worker {worker}" for worker, process in self._holders().items()}
        workers = {names.get(number, f"spare {number}"): each.pid for number, each in self._workers.items() if each.ready}
        return workers | {f"server {number}": each.pid for number, each in self._servers.items() if each.ready}

    def add_worker(self) -> None:
        """Have one worker more, from the round after its process is up."""
        self._tell(ev.WorkerJoins(at_s=self._now_s()))

    def remove_worker(self, worker: int) -> None:
        """Let a worker go after its round."""
        self._tell(ev.WorkerLeaves(at_s=self._now_s(), worker=worker))

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> tuple[Vector, RunReport]:
        """Train to the end; gives the parameters `(elements,)`.

        Raises:
            TrainingError: the run cannot go on; a checkpoint was written first where that is possible.
            InputError: what the user's functions give cannot be trained.
        """
        try:
            self._start()
            while self._end is None:
                self._wait()
        finally:
            self._end_all()
        if isinstance(self._end, act.Stop):
            raise self._error(self._end)
        assert self._result is not None
        return self._result, self._report()

    def _start(self) -> None:
        for server in range(self.protocol.servers):
            self._start_server(server)
        for process in range(self.protocol.workers):
            self._start_worker(process)
        limit_s = self._now_s() + BOOT_TIMEOUT_S
        while not all(member.ready for member in [*self._servers.values(), *self._workers.values()]):
            if len(self._workers) < self.protocol.workers or len(self._servers) < self.protocol.servers:
                raise TrainingError("a process ended before the first round; is there enough memory?")
            if self._now_s() > limit_s:
                raise TrainingError(f"the processes were not up after {BOOT_TIMEOUT_S:.0f} s; does Ray have room for them?")
            self._wait()
        for shard in range(self.protocol.shards):
            for server in self.protocol.holders(shard):
                self._published[shard][server] = ray.get(self._servers[server].actor.parameters.remote(shard))[0]
        self._zero_s = self._clock.now_s()
        self._reached.append(0.0)
        for member in [*self._servers.values(), *self._workers.values()]:
            member.seen_s = 0.0
        self._tell(ev.Started(at_s=0.0))

    def _wait(self) -> None:
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=_TICK_S)
        if ready:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for reference in ready:
            done, failed = self._pending.pop(reference, (None, None))
            if done is None or failed is None or self._end is not None:
                continue
            try:
                value = ray.get(reference)
            except (RayActorError, ObjectLostError) as error:
                failed(error)
            except RayTaskError as error:
                raise self._users_error(error) from error
            else:
                done(value)
        self._look_for_silence()

    def _tell(self, event: ev.Event) -> None:
        before = self.coordinator.version
        for action in self.coordinator.handle(event):
            self._carry_out(action)
        if self.coordinator.version > before and len(self._reached) <= self.coordinator.version - self._start_version:
            self._reached.append(self._now_s())
            if self._on_round is not None:
                self._on_round(self)

    def _now_s(self) -> float:
        return self._clock.now_s() - self._zero_s

    @property
    def _start_version(self) -> int:
        return int(self._terms.facts.get("start", 0))

    def _holders(self) -> dict[int, int]:
        return {worker: place.process for worker, place in self.coordinator.places.items() if place.process is not None}

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.SendTask():
                self._send(action)
            case act.StartSpare():
                self._start_worker(action.process)
            case act.StartServer():
                self._start_server(action.server)
            case act.DeclareDead() | act.Retire():
                self._kill(self._workers.pop(action.process, None))
            case act.DeclareServerDead():
                self._kill(self._servers.pop(action.server, None))
            case act.SumShard():
                self._call(self._servers.get(action.server), "sum", action, done=partial(self._summed, action))
            case act.ApplyShard():
                self._note_loss(action)
                self._call(self._servers.get(action.server), "apply", action, done=partial(self._applied, action))
            case act.WriteCheckpoint():
                self._write(action)
            case act.ReadCheckpoint():
                self._read(action)
            case act.FetchResult():
                self._fetch(action)
            case act.Warn():
                self._warn(action.message)
            case act.Finish() | act.Stop():
                self._end = action

    def _call(self, member: Member | None, method: str, *arguments: Any, done: Handler, **named: Any) -> None:
        """Call an actor; nothing follows where it is gone, since its watch tells of that."""
        if member is not None:
            reference = getattr(member.actor, method).remote(*arguments, **named)
            self._pending[reference] = (done, lambda _: None)

    def _send(self, task: act.SendTask) -> None:
        pulls = [list(self._published[shard].values()) for shard in range(self.protocol.shards)]
        servers = {number: member.actor for number, member in self._servers.items()}
        self._call(self._workers.get(task.process), "work", task, pulls, servers, done=partial(self._worked, task))

    def _worked(self, task: act.SendTask, outcome: Outcome) -> None:
        now_s = self._now_s()
        names = {"worker": task.worker, "process": task.process, "round": task.round, "attempt": task.attempt}
        if task.process not in self._workers:
            return  # declared dead meanwhile
        if not outcome.pulled:
            self._tell(ev.TaskFailed(at_s=now_s, **names))
        elif not np.isfinite(outcome.loss):
            self._tell(ev.UpdateRejected(at_s=now_s, reason=f"its loss is {outcome.loss}", **names))
        self._results[task.worker, task.round] = outcome
        for shard, server in outcome.received:
            self._tell(ev.ShardReceived(at_s=now_s, shard=shard, server=server, **names))

    def _note_loss(self, order: act.ApplyShard) -> None:
        parts = [self._results[each.worker, each.round] for each in order.contributions]
        samples = sum(part.samples for part in parts)
        self._losses[order.version] = sum(part.loss * part.samples for part in parts) / max(1, samples)

    def _summed(self, order: act.SumShard, squared_norm: float) -> None:
        where = {"ticket": order.ticket, "shard": order.shard, "server": order.server}
        self._tell(ev.ShardSummed(at_s=self._now_s(), squared_norm=squared_norm, **where))

    def _applied(self, order: act.ApplyShard, published: list[Any]) -> None:
        self._published[order.shard][order.server] = published[0]
        self._tell(ev.ShardApplied(at_s=self._now_s(), ticket=order.ticket, shard=order.shard, server=order.server))

    def _gather(self, method: str, finish: Callable[[list[Any]], None]) -> None:
        """Ask one holder of each shard; `finish` is called with all answers, or never where one is gone."""
        answers: dict[int, Any] = {}

        def take(shard: int, answer: Any) -> None:
            answers[shard] = answer
            if len(answers) == self.protocol.shards:
                finish([answers[shard] for shard in sorted(answers)])

        for shard in range(self.protocol.shards):
            server = next((number for number in self.protocol.holders(shard) if number in self._servers), None)
            if server is not None:
                self._call(self._servers[server], method, shard, done=partial(take, shard))

    def _write(self, order: act.WriteCheckpoint) -> None:
        def finish(snapshots: list[dict[str, Vector]]) -> None:
            if self._terms.directory is None:
                self._tell(ev.CheckpointFailed(at_s=self._now_s(), ticket=order.ticket, reason="no directory was given"))
                return
            saved = Saved(version=order.version, clocks=order.clocks)
            try:
                checkpoints.write(self._terms.directory, snapshots, saved=saved, terms=self._terms.facts)
            except OSError as error:
                self._tell(ev.CheckpointFailed(at_s=self._now_s(), ticket=order.ticket, reason=str(error)))
            else:
                self._tell(ev.CheckpointWritten(at_s=self._now_s(), ticket=order.ticket))

        self._gather("snapshot", finish)

    def _read(self, order: act.ReadCheckpoint) -> None:
        assert self._terms.directory is not None  # the first checkpoint was written there
        stored = checkpoints.read(self._terms.directory, up_to=order.version)
        for problem in stored.problems:
            self._warn(f"{problem}; version {stored.saved.version} is used")
        waiting = {(shard, server) for shard in range(self.protocol.shards) for server in self._live(shard)}

        def take(shard: int, server: int, published: list[Any]) -> None:
            self._published[shard][server] = published[0]
            waiting.discard((shard, server))
            if not waiting:
                saved = stored.saved
                self._tell(
                    ev.CheckpointRead(at_s=self._now_s(), ticket=order.ticket, version=saved.version, clocks=saved.clocks)
                )

        for shard, server in sorted(waiting):
            self._call(
                self._servers[server],
                "load",
                shard,
                stored.snapshots[shard],
                attempt=order.attempt,
                clocks=stored.saved.clocks,
                done=partial(take, shard, server),
            )

    def _fetch(self, order: act.FetchResult) -> None:
        parts = []
        for shard in range(self.protocol.shards):
            for reference in self._published[shard].values():
                with suppress(RayActorError, ObjectLostError):
                    parts.append(np.array(ray.get(reference)))
                    break
        if len(parts) == self.protocol.shards:
            self._result = np.concatenate(parts)
            self._tell(ev.ResultFetched(at_s=self._now_s(), ticket=order.ticket))

    def _live(self, shard: int) -> list[int]:
        return [server for server in self.protocol.holders(shard) if server in self._servers]

    def _warn(self, message: str) -> None:
        self._warnings.append(message)
        warnings.warn(message, stacklevel=2)

    # -- processes ------------------------------------------------------------------------------------------------

    def _start_worker(self, process: int) -> None:
        kind = _actor(WorkerProcess)
        self._workers[process] = Member(actor=kind.remote(process, self._pickled_job, self._data), seen_s=self._now_s())
        self._boot(self._workers, process)

    def _start_server(self, server: int) -> None:
        kind = _actor(ServerProcess)
        terms = self._terms
        numbers = [shard for shard in range(self.protocol.shards) if server in self.protocol.holders(shard)]
        first = [terms.first[self._stretches[shard]] for shard in numbers]
        actor = kind.remote(numbers, terms.optimizer, terms.clip_norm, terms.whole_batch, *first)
        self._servers[server] = Member(actor=actor, seen_s=self._now_s())
        if terms.snapshots is not None:
            clocks = self.coordinator.clocks
            for shard in numbers:
                actor.load.remote(shard, terms.snapshots[shard], attempt=0, clocks=clocks)
        self._boot(self._servers, server)

    def _boot(self, group: dict[int, Member], number: int) -> None:
        member = group[number]

        def up(description: tuple[int, str, str]) -> None:
            member.pid, member.node, model = description
            member.ready, member.seen_s = True, self._now_s()
            self._watch(group, number)
            if group is self._servers:
                if self.coordinator.phase is not Phase.STARTING:
                    self._tell(ev.ServerReady(at_s=self._now_s(), server=number))
                return
            if model != self._terms.signature:
                raise ModelError(
                    f"model_fn gives another model in worker process {number} than here; there: {model}; "
                    f"here: {self._terms.signature}. It must not depend on chance or on the machine"
                )
            if self.coordinator.phase is not Phase.STARTING:
                self._tell(ev.SpareReady(at_s=self._now_s(), process=number))

        self._pending[member.actor.describe.remote()] = (up, lambda _: self._gone(group, number, late=False))

    def _watch(self, group: dict[int, Member], number: int) -> None:
        """Keep one call pending: it fails within milliseconds of a death, and its delay tells of a process that hangs."""
        member = group[number]
        pulse = member.actor.watch.options(concurrency_group="pulse").remote(self._terms.heartbeat_s / 4)

        def alive(_: Any) -> None:
            member.seen_s = self._now_s()
            if group.get(number) is member:
                self._watch(group, number)

        def dead(_: Any) -> None:
            if group.get(number) is member:
                self._gone(group, number, late=False)

        self._pending[pulse] = (alive, dead)

    def _look_for_silence(self) -> None:
        for group in (self._workers, self._servers):
            for number, member in list(group.items()):
                limit_s = self._terms.heartbeat_s if member.ready else BOOT_TIMEOUT_S
                if self._end is None and self._now_s() - member.seen_s > limit_s and group.get(number) is member:
                    self._gone(group, number, late=True)

    def _gone(self, group: dict[int, Member], number: int, *, late: bool) -> None:
        now_s = self._now_s()
        is_server = group is self._servers
        member = group[number] if late else group.pop(number)
        holder = next((worker for worker, process in self._holders().items() if process == number), None)
        who = f"server {number}" if is_server else f"spare {number}" if holder is None else f"worker {holder}"
        if self.coordinator.phase is not Phase.STARTING:
            self._failures.append(
                Failure(
                    at_s=now_s,
                    who=who,
                    process=number,
                    how="hung" if late else "died",
                    silent_s=now_s - member.seen_s,
                    round=self.coordinator.version,
                )
            )
        if is_server:
            for published in self._published.values():
                published.pop(number, None)
            self._tell(ev.ServerLate(at_s=now_s, server=number) if late else ev.ServerDied(at_s=now_s, server=number))
        else:
            self._tell(ev.ProcessLate(at_s=now_s, process=number) if late else ev.ProcessDied(at_s=now_s, process=number))

    def _kill(self, member: Member | None) -> None:
        """A stopped process hears nothing but SIGKILL, so Ray's own way comes second."""
        if member is None:
            return
        if member.pid and member.node == ray.get_runtime_context().get_node_id():
            kill(member.pid)
        with suppress(RayActorError, ValueError):
            ray.kill(member.actor, no_restart=True)

    def _end_all(self) -> None:
        members = [*self._workers.values(), *self._servers.values()]
        for member in members:
            with suppress(RayActorError, ValueError):
                ray.kill(member.actor, no_restart=True)
        self._workers, self._servers, self._pending, self._published = {}, {}, {}, {}
        limit_s = time.monotonic() + _END_S
        while any(is_running(member.pid) for member in members) and time.monotonic() < limit_s:
            time.sleep(0.01)
        for member in members:
            if is_running(member.pid):
                self._kill(member)

    # -- results --------------------------------------------------------------------------------------------------

    def _report(self) -> RunReport:
        start = self._start_version
        return with_costs(
            RunReport(
                recovery=self.protocol.recovery.name,
                start=start,
                reached_s=tuple(self._reached),
                losses=tuple(self._losses[version] for version in sorted(self._losses) if version > start),
                failures=tuple(self._failures),
                warnings=tuple(self._warnings),
                workers=len(self.coordinator.places),
                startup_s=self._zero_s - self._began_s,
            )
        )

    def _error(self, stop: act.Stop) -> Exception:
        saved = f" The state of version {self.version} is saved in {self._terms.directory}." if stop.saved else ""
        message = f"the run stopped after {self.version} rounds: {stop.reason}.{saved}"
        if stop.cause is act.Cause.NOT_FINITE:
            bad = [key for key, outcome in self._results.items() if not np.isfinite(outcome.loss)]
            worker, round_ = max(bad, key=lambda key: key[1])
            return NotFiniteError(message, rank=worker, iteration=round_)
        if stop.cause is act.Cause.CHECKPOINT:
            return CheckpointError(message)
        return TrainingError(message)

    def _users_error(self, error: RayTaskError) -> Exception:
        cause = error.cause
        if isinstance(cause, InputError):
            return type(cause)(str(cause))
        return TrainingError(f"a worker failed: {type(cause).__name__}: {cause}")


def _actor(process: type) -> Any:
    """Placed wherever there is room; the pulse beats beside the work."""
    remote: Any = ray.remote
    return remote(num_cpus=0, concurrency_groups={"pulse": 1})(process)
