"""Carries out the coordinator's actions on Ray actors, and tells it what happens to them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import ray

from tatami.engine.crew import Crew, Member
from tatami.engine.nodes import Nodes
from tatami.engine.ray_start import MESSAGE_BYTES
from tatami.engine.ray_watch import RayWatch
from tatami.engine.run_loop import AbstractRun
from tatami.errors import CheckpointError, ModelError, NotFiniteError, TrainingError
from tatami.report.server_run import Failure, RunReport
from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.ledger import Ledger, Sink
from tatami.server.optimizers import Vector
from tatami.server.pieces import cut
from tatami.server.run_context import RunContext
from tatami.server.run_control import RunControl
from tatami.server.saving import Terms
from tatami.server.server_process import ServerProcess
from tatami.server.standing import RunPhase
from tatami.server.storage import Published, Storage
from tatami.server.witness import Witness, aftermath
from tatami.server.worker_process import TaskOutcome, WorkerProcess, packed

_START_AGAIN = 6
"""Processes that end before the first round, as their node was dying, are started again elsewhere, so many in all."""


class Runtime(AbstractRun[ev.Event, act.Action], RunControl):
    """One run: it carries out what the coordinator orders, and tells the coordinator what followed."""

    def __init__(
        self, coordinator: Coordinator, *, terms: Terms, context: RunContext, watch: RayWatch, witness: Witness
    ) -> None:
        settings = terms.settings
        super().__init__(
            coordinator.handle,
            clock=context.clock,
            watch=watch,
            nodes=Nodes(now_s=context.clock.now_s),
            heartbeat_s=settings.heartbeat_s,
            pool=context.pool,
            tick_s=0.05,
        )
        self.coordinator = coordinator
        self._settings = settings
        self._terms = terms
        self._context = context
        self._witness = witness
        sinks: list[Sink] = [witness] if context.records is None else [witness, context.records]
        self._ledger = Ledger(recovery=settings.recovery.name, start=coordinator.version, sinks=sinks)
        self._pickled_spec, self._data = ray.put(terms.pickled_spec), ray.put(packed(terms.data))
        self._starts_left = _START_AGAIN
        self._workers = Crew(WorkerProcess, self._crew_terms, on_up=self._worker_up, on_gone=self._worker_gone)
        self._servers = Crew(ServerProcess, self._crew_terms, on_up=self._server_up, on_gone=self._server_gone)
        self._published: Published = {shard: {} for shard in range(settings.servers)}
        self._storage = Storage(
            terms,
            servers=self._servers,
            calls=self._calls,
            published=self._published,
            now_s=self._clock.now_s,
            tell=self._tell,
            at_the_disk=watch.elsewhere,
            warn=self._warn,
        )
        self._met: dict[int, dict[int, Any]] = {}
        self._end: act.Finish | act.Stop | None = None

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> tuple[Vector, RunReport]:
        """Train to the end; gives the parameters `(elements,)`.

        Raises:
            TrainingError: the run cannot go on; a checkpoint was written first where that is possible.
            InputError: what the user's functions give cannot be trained.
        """
        try:
            self._play()
        finally:
            self._published.clear()
        if isinstance(self._end, act.Stop):
            raise self._error(self._end)
        assert self._storage.result is not None
        return self._storage.result, self.report()

    def _begin(self) -> None:
        settings = self._settings
        for server in range(settings.servers):
            self._start_server(server)
        for process in range(settings.workers):
            self._start_worker(process)
        while not self._is_all_up():
            self._turn()
        if settings.replicas > 1:
            self._see_whether_apart()
        self._clock.first_step()
        for writes in (self._ledger, self._witness):
            writes.began(workers=settings.workers, startup_s=self._clock.startup_s)
        for crew in self._crews:
            crew.restart_clocks()
        self._tell(ev.Started(at_s=0.0))

    def _is_all_up(self) -> bool:
        are_ready = all(member.is_ready for crew in self._crews for member in crew.members.values())
        return are_ready and all(server in self._published[shard] for shard, server in self._settings.copies)

    @property
    def _crews(self) -> tuple[Crew[int], ...]:
        return self._workers, self._servers

    def _is_over(self) -> bool:
        return self._end is not None

    def _tell(self, event: ev.Event) -> None:
        before = self.coordinator.version
        super()._tell(event)
        version = self.coordinator.version
        if version > before and self._ledger.reached(version, at_s=self._clock.now_s()) and self._context.on_round is not None:
            with self._watch.elsewhere():
                self._context.on_round(self)

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, action: act.Action) -> None:
        match action:
            case act.SendTask():
                self._send(action)
            case act.StartSpare():
                self._start_worker(action.process)
            case act.StartServer():
                self._start_server(action.server)
            case act.EndProcess():
                self._workers.kill(action.process)
            case act.EndServer():
                self._servers.kill(action.server)
            case act.SumShard():
                if (server := self._servers.get(action.server)) is not None:
                    self._calls.add(server.sum.remote(action), done=partial(self._summed, action))
            case act.ApplyShard():
                self._ledger.applies(action.version, action.contributions)
                if (server := self._servers.get(action.server)) is not None:
                    self._calls.add(server.apply.remote(action), done=partial(self._applied, action))
            case act.CopyShard():
                self._storage.copy(action)
            case act.WriteCheckpoint():
                self._storage.write(action)
            case act.ReadCheckpoint():
                self._storage.read(action)
            case act.FetchResult():
                self._storage.fetch(action)
            case act.Warn():
                self._warn(action.message)
            case act.Finish() | act.Stop():
                self._end = action

    def _send(self, task: act.SendTask) -> None:
        worker = self._workers.get(task.process)
        if worker is None:
            return  # its watch reports that
        pulls = [list(self._published[shard].values()) for shard in range(self._settings.servers)]
        servers = {number: member.actor for number, member in self._servers.members.items()}
        if self._met.get(task.process) != servers:
            worker.meet.remote(servers)  # not with each task: an actor is slow to pack
            self._met[task.process] = servers
        self._calls.add(worker.work.remote(task, pulls), done=partial(self._worked, task))

    def _worked(self, task: act.SendTask, outcome: TaskOutcome) -> None:
        if task.process not in self._workers.members:
            return  # declared dead meanwhile
        at_s = self._clock.now_s()
        self._ledger.worked(worker=task.worker, round=task.round, outcome=outcome)
        if not outcome.pulled:
            self._tell(ev.TaskFailed(at_s=at_s, task=task))
        elif not np.isfinite(outcome.loss):
            self._tell(ev.UpdateRejected(at_s=at_s, task=task, reason=f"its loss is {outcome.loss}"))
        for shard, server in outcome.received:
            self._tell(ev.ShardReceived(at_s=at_s, task=task, shard=shard, server=server))
        num_due = sum(server in task.servers for _, server in self._settings.copies)
        if outcome.pulled and np.isfinite(outcome.loss) and len(outcome.received) < num_due:
            # A server has not answered. If it is dead, that has been told by now or will be; if it was slow, do it again:
            # where the update is whole without that server, the coordinator takes no notice of this.
            self._tell(ev.TaskFailed(at_s=at_s, task=task))

    def _summed(self, order: act.SumShard, squared_norm: float) -> None:
        self._tell(ev.ShardSummed(at_s=self._clock.now_s(), order=order, squared_norm=squared_norm))

    def _applied(self, order: act.ApplyShard, published: list[Any]) -> None:
        if order.server in self._servers.members:
            self._published[order.shard][order.server] = published[0]
        self._tell(ev.ShardApplied(at_s=self._clock.now_s(), order=order))

    def _warn(self, message: str) -> None:
        self._ledger.warn(message, version=self.coordinator.version)

    # -- processes ------------------------------------------------------------------------------------------------

    def _start_worker(self, process: int) -> None:
        self._met.pop(process, None)
        self._workers.start(process, employ=lambda actor: actor.employ.remote(process, self._pickled_spec, self._data))

    def _worker_up(self, process: int, member: Member) -> None:
        assert member.identity is not None
        if member.identity.model != self._terms.facts["model"]:
            raise ModelError(
                f"model_fn gives another model in worker process {process} than here; there: {member.identity.model}; "
                f"here: {self._terms.facts['model']}. It must not depend on chance or on the machine"
            )
        if self.coordinator.phase is not RunPhase.STARTING:
            self._tell(ev.SpareReady(at_s=self._clock.now_s(), process=process))

    def _worker_gone(self, process: int, member: Member, late: bool) -> None:
        if self.coordinator.phase is RunPhase.STARTING:
            self._begin_again(self._workers, process, start=self._start_worker, late=late)
            return
        holder = next((worker for worker, held_by in self.holders().items() if held_by == process), None)
        self._note_failure(f"spare {process}" if holder is None else f"worker {holder}", process, member, late=late)
        self._tell(ev.ProcessDied(at_s=self._clock.now_s(), process=process, late=late))

    def _start_server(self, server: int) -> None:
        terms, settings = self._terms, self._settings
        numbers = self._shards_of(server)
        stretches = cut(len(terms.first), shards=settings.servers)
        first = [terms.first[stretches[shard]] for shard in numbers]
        # What is given by value goes through this process, once for each worker.
        most_bytes = MESSAGE_BYTES // settings.workers
        names = {"clip_norm": settings.clip_norm, "whole_batch": terms.whole_batch, "most_bytes": most_bytes}

        def employ(actor: Any) -> Any:
            employed = actor.employ.remote(numbers, settings.optimizer, *first, **names)
            if terms.snapshots is not None:
                for shard in numbers:
                    actor.load.remote(shard, terms.snapshots[shard], attempt=0, clocks=self.coordinator.clocks)
            return employed

        self._servers.start(server, employ=employ, apart_from=settings.partners(server))

    def _server_up(self, server: int, member: Member) -> None:
        if self.coordinator.phase is not RunPhase.STARTING:
            self._tell(ev.ServerReady(at_s=self._clock.now_s(), server=server))
            return

        def publish(shard: int, published: list[Any]) -> None:
            if self._servers.members.get(server) is member:
                self._published[shard][server] = published[0]

        for shard in self._shards_of(server):
            self._calls.add(member.actor.parameters.remote(shard), done=partial(publish, shard))

    def _shards_of(self, server: int) -> list[int]:
        return [shard for shard, held_by in self._settings.copies if held_by == server]

    def _server_gone(self, server: int, member: Member, late: bool) -> None:
        for published in self._published.values():
            published.pop(server, None)
        if self.coordinator.phase is RunPhase.STARTING:
            self._begin_again(self._servers, server, start=self._start_server, late=late)
            return
        self._note_failure(f"server {server}", server, member, late=late)
        self._tell(ev.ServerDied(at_s=self._clock.now_s(), server=server, late=late))

    def _begin_again(self, crew: Crew[int], number: int, *, start: Callable[[int], None], late: bool) -> None:
        """Start a process again that ended before the first round: nothing has been computed yet that could be lost."""
        limit_s = crew.signs()[number].limit_s if late and not crew.members[number].is_ready else None
        crew.kill(number)
        if limit_s is not None and len(self._crew_terms.nodes.alive()) < 2:
            raise TrainingError(
                f"{'server' if crew is self._servers else 'worker process'} {number} was not up {limit_s:.0f} s after it was "
                "started; is the machine that busy, or does model_fn take so long?"
            )
        if not self._starts_left:
            raise TrainingError(
                f"{_START_AGAIN + 1} processes ended before the first round; is there enough memory, and do the nodes hold?"
            )
        self._starts_left -= 1
        start(number)

    def _note_failure(self, who: str, number: int, member: Member, *, late: bool) -> None:
        now_s = self._clock.now_s()
        self._ledger.failed(
            Failure(
                at_s=now_s,
                who=who,
                process=number,
                how="hung" if late else "died",
                silent_s=now_s - member.seen_s,
                round=self.coordinator.version,
            )
        )

    def _see_whether_apart(self) -> None:
        """Warn where one node holds all copies of a shard although there are other nodes."""
        nodes = {number: member.node for number, member in self._servers.members.items()}
        num_nodes = len(self._crew_terms.nodes.alive())
        if num_nodes < 2:
            return
        for shard in range(self._settings.servers):
            holders = self._settings.holders(shard)
            if len({nodes[server] for server in holders}) == 1:
                names = " and ".join(f"server {server}" for server in holders)
                self._warn(
                    f"all copies of shard {shard} ({names}) are on one of the {num_nodes} nodes; "
                    f"with {self._settings.servers} servers they cannot all be apart: take a multiple of the number of nodes"
                )

    def _error(self, stop: act.Stop) -> Exception:
        stopped = self._stopped(stop.reason)
        if stop.cause is act.Cause.NOT_FINITE:
            worker, round_ = self._ledger.last_not_finite()
            return NotFiniteError(str(stopped), rank=worker, iteration=round_)
        return CheckpointError(str(stopped)) if stop.cause is act.Cause.CHECKPOINT else stopped

    def _stopped(self, reason: str) -> TrainingError:
        left = aftermath(report=self._context.report, directory=self._terms.directory)
        return TrainingError(f"the run stopped after {self.coordinator.version} rounds: {reason}.{left}")
