"""The protocol of a parameter-server run as a pure state machine: events in, actions out.

No Ray, no torch, no clock: the runtime executes it on real processes, a simulator on simulated ones. It promises, under any
interleaving of deaths, delays, duplicates and joins: an update is applied on all shards or on none, never twice; every round
is applied; and the run ends, provided that what each action asks for happens or its process is reported dead.
"""

from __future__ import annotations

from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.actions import Action, Cause, Contribution
from tatami.server.fleet import Commit, Fleet
from tatami.server.recovery import Remedy
from tatami.server.roster import Place, Roster, Status
from tatami.server.run_settings import RunSettings
from tatami.server.saving import Saved, Saving
from tatami.server.standing import RunPhase, Standing
from tatami.server.upkeep import Upkeep


class Coordinator:
    """Runs the protocol: `handle` each event in the order they are seen, and carry out the actions in their order.

    Args:
        settings: of the run.
        resumed: the checkpoint that the servers were loaded from; None for a new run.
    """

    def __init__(self, settings: RunSettings, *, resumed: Saved | None = None) -> None:
        self.settings = settings
        self._run = Standing(version=0 if resumed is None else resumed.version)
        self._saving = Saving(settings, saved=resumed)
        clocks = {} if resumed is None else dict(resumed.clocks)
        self._roster = Roster(settings, clocks=clocks, slowest=self._saving.clock, do=self._run.do)
        self._fleet = Fleet(settings)
        self._commit = Commit(settings)
        rolls_back = settings.recovery.remedy is Remedy.ROLL_BACK
        self._upkeep = Upkeep(self._run, roster=self._roster, fleet=self._fleet, saving=self._saving, rolls_back=rolls_back)
        self._rejected_in_a_row = 0
        self._opened_s: dict[int, float] = {}

    @property
    def phase(self) -> RunPhase:
        """What the servers do now."""
        return self._run.phase

    @property
    def version(self) -> int:
        """Commits that are applied on all shards. In lockstep that is the number of rounds done."""
        return self._run.version

    @property
    def attempt(self) -> int:
        """Roll-backs so far; a push of an earlier attempt is void."""
        return self._run.attempt

    @property
    def places(self) -> dict[int, Place]:
        """The places of the run, by worker number."""
        return self._roster.places

    @property
    def servers(self) -> frozenset[int]:
        """The servers that hold all their shards."""
        return frozenset(self._fleet.whole)

    @property
    def num_spares(self) -> int:
        """The number of processes that are up and stand by."""
        return len(self._roster.ready)

    @property
    def clocks(self) -> tuple[tuple[int, int], ...]:
        """Rounds done, by worker."""
        return self._roster.clocks

    def handle(self, event: ev.Event) -> tuple[Action, ...]:
        """The actions that answer `event`, in their order; none once the run is over."""
        if self.phase is RunPhase.DONE:
            return ()
        self._run.actions.clear()
        self._run.now_s = event.at_s
        if self._take(event):
            # One event may allow several steps. Each step leaves a phase or opens a round, so the loop ends: at the latest
            # where the run waits for an event from outside.
            while self._step():
                pass
        return tuple(self._run.actions)

    # -- events ---------------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> bool:
        """Note what happened; returns whether anything may follow from it."""
        match event:
            case ev.ShardReceived():
                return self._receive(event)
            case ev.Started():
                self._run.phase = RunPhase.COLLECT
                for _ in range(self.settings.spares):
                    self._roster.start_spare()
            case ev.UpdateRejected():
                self._reject(event)
            case ev.TaskFailed():
                if (place := self._at_work(event)) is not None:
                    self._send(place)
            case ev.ShardSummed() | ev.ShardApplied() | ev.ShardCopied():
                return self._acknowledge(event)
            case ev.CheckpointWritten():
                self._upkeep.written(event)
            case ev.CheckpointRead():
                self._upkeep.was_read(event)
            case ev.ResultFetched():
                if self._run.awaits(RunPhase.FETCH, event.order.ticket):
                    self._run.do(act.Finish())
            case ev.ProcessDied():
                if event.late:
                    self._run.do(act.EndProcess(process=event.process))
                self._lose(event.process)
            case ev.SpareReady():
                self._roster.is_ready(event.process)
            case ev.WorkerJoins():
                self._roster.join()
            case ev.WorkerLeaves():
                self._roster.let_go(event.worker)
            case ev.ServerDied():
                if event.late:
                    self._run.do(act.EndServer(server=event.server))
                self._lose_server(event.server)
            case ev.ServerReady():
                self._fleet.is_ready(event.server)
            case _:
                raise TypeError(f"{type(event).__name__} is not an event of this protocol")
        return True

    def _at_work(self, event: ev.OfTask) -> Place | None:
        """The place whose open task this is about; None if it is a duplicate, late, or from a process declared dead."""
        task = event.task
        place = self.places.get(task.worker)
        if place is None or place.status is not Status.BUSY:
            return None
        return place if (task.process, task.round, task.attempt) == (place.process, place.clock, self.attempt) else None

    def _receive(self, event: ev.ShardReceived) -> bool:
        place = self._at_work(event)
        if place is None:
            return False
        place.received.add((event.shard, event.server))
        self._see_whether_pushed(place)
        return self.phase is RunPhase.COLLECT and self._closes()

    def _see_whether_pushed(self, place: Place) -> None:
        if place.status is not Status.BUSY or place.process is None:
            return
        holders = self._fleet.holders
        if all((shard, server) in place.received for shard in range(self.settings.servers) for server in holders(shard)):
            place.status = Status.PUSHED
            place.pushed_by = place.process

    def _reject(self, event: ev.UpdateRejected) -> None:
        place = self._at_work(event)
        if place is None:
            return
        place.status = Status.OUT
        self._rejected_in_a_row += 1
        task = event.task
        self._roster.warn(f"the update of worker {task.worker} in round {task.round} is not applied: {event.reason}")
        if self._rejected_in_a_row >= len(self.places):
            self._rescue(Cause.NOT_FINITE, f"no worker has a finite loss in round {task.round}; a smaller step may help")

    def _lose(self, process: int) -> None:
        held_a_place = self._roster.lose(process)
        void = self.phase in (RunPhase.READ, RunPhase.RESTART)
        if held_a_place and self.settings.recovery.remedy is Remedy.ROLL_BACK and not void:
            self._run.roll_back = True

    def _acknowledge(self, event: ev.ShardSummed | ev.ShardApplied | ev.ShardCopied) -> bool:
        expected = {ev.ShardSummed: RunPhase.SUM, ev.ShardApplied: RunPhase.APPLY, ev.ShardCopied: RunPhase.COPY}[type(event)]
        order = event.order
        if not self._run.awaits(expected, order.ticket):
            return False
        if isinstance(event, ev.ShardCopied):
            self._upkeep.one_copied(event.order)
            return self._upkeep.is_copied
        # Clipping needs the length of the whole gradient before any shard may be applied: for this there is SUM, a round trip
        # that runs without `clip_norm` do not make. With squared norms of 9 and 16 on two shards, both are clipped by a length
        # of 5.
        norm = event.squared_norm if isinstance(event, ev.ShardSummed) else None
        self._commit.done(order.shard, order.server, squared_norm=norm)
        return not self._commit.is_awaited

    def _lose_server(self, server: int) -> None:
        if self._upkeep.lose_server(server):
            self._commit.lose(server)
            for place in self.places.values():
                self._see_whether_pushed(place)
            self._upkeep.order_again()

    def _rescue(self, cause: Cause, reason: str) -> None:
        """Stop as soon as the state of the last commit is on disk."""
        if self._run.stopping is None:
            self._run.stopping = act.Stop(cause=cause, reason=reason)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Go on by one step, if that is possible without another event."""
        # `handle` calls this until it returns False, because one event may allow several steps. An example with 2 shards: the
        # ShardApplied of shard 1 arrives after that of shard 0. APPLY is over, so the first step counts the commit and goes to
        # COLLECT; the second step opens the next round and sends its tasks; the third finds nothing to do before a push comes.
        # Each step leaves a state that is whole by itself, so that any event may come next, and none has to be kept for later.
        # Vacant places are filled before anything else, since a process can die in every phase: a place that was left vacant
        # through a SUM or an APPLY would have its task sent a whole phase later.
        if self.phase is RunPhase.DONE:
            return False
        is_over = self.phase is RunPhase.STARTING or self._roster.all_done()
        for place in self._roster.staff(is_over=is_over):
            self._send(place)
        match self.phase:
            case RunPhase.COLLECT:
                return self._collect()
            case RunPhase.SUM if not self._commit.is_awaited:
                self._apply()
            case RunPhase.APPLY if not self._commit.is_awaited:
                self._committed()
            case RunPhase.COPY if self._upkeep.is_copied:
                self._upkeep.all_copied()
            case RunPhase.RESTART if not self._fleet.starting:
                self._upkeep.read()
            case _:
                return False
        return True

    def _collect(self) -> bool:
        # The order of these cases is what makes them safe. A rollback comes first, as it makes void what the others would act
        # on. Places are dropped and admitted before the workers are counted; a checkpoint is written before the next round
        # opens; and lost copies wait until all workers are idle: an update that is pushed while a shard is being copied would
        # be in one copy and not in the other.
        all_done = self._roster.all_done()
        if self._run.roll_back and self._run.stopping is None and not all_done:
            self._upkeep.read()
            return False
        for place in () if self.settings.consistency.lockstep else self.places.values():
            if place.status is Status.OUT:
                place.reset(place.clock + 1)
        self._roster.drop_leavers()
        self._roster.admit(slowest=self._slowest())
        if (left := self._roster.num_staying()) < self.settings.min_workers:
            few = f"{left} workers are left, fewer than min_workers={self.settings.min_workers}"
            self._rescue(Cause.TOO_FEW_WORKERS, few)
        all_done = self._roster.all_done()
        due = self._saving.due(slowest=self._slowest(), workers=len(self.places), last=all_done)
        if self._run.stopping is not None or due:
            self._upkeep.write()
            return False
        if all_done:
            self._upkeep.fetch()
            return False
        if self._fleet.blank and self._roster.all_idle():
            self._upkeep.copy()
            return self._upkeep.is_copied
        self._open()
        return self._close()

    def _open(self) -> None:
        """Begin the next round of every worker that may; none while a new server waits until all are done."""
        lockstep = self.settings.consistency.lockstep
        if self._fleet.blank or (lockstep and not self._roster.all_idle()):
            return
        slowest = self._slowest()
        unmanned = self.settings.recovery.remedy is not Remedy.SKIP
        rounds, may_start = self.settings.rounds, self.settings.consistency.may_start
        able = [
            place
            for place in self._roster.in_order()
            if place.can_take_part(rounds=rounds, unmanned=unmanned) and may_start(place.clock, slowest=slowest)
        ]
        taking_part = able if lockstep else [place for place in self._roster.in_order() if not place.leaving]
        members = tuple(place.worker for place in taking_part)
        for place in able:
            if place.status is Status.IDLE:
                place.status = Status.BUSY
                place.members = members
                self._opened_s[place.worker] = self._run.now_s
                if place.process is not None:
                    self._send(place)

    def _closes(self) -> bool:
        """Whether the updates that have arrived are applied now."""
        counts = self._roster.counts
        pushed, waiting, out = counts[Status.PUSHED], counts[Status.BUSY], counts[Status.OUT]
        return pushed > 0 and self.settings.consistency.closes(pushed=pushed, waiting=waiting, out=out)

    def _close(self) -> bool:
        """Apply the updates that are ready; returns whether there were any."""
        counts = self._roster.counts
        if counts[Status.OUT] and not counts[Status.PUSHED] and not counts[Status.BUSY]:
            for place in self.places.values():  # no worker of this round is left: it starts over with the workers that come
                if place.status is Status.OUT:
                    place.reset(place.clock)
            return True
        if not self._closes():
            return False
        # In the order of the workers, not of arrival: float addition is not associative, and only a fixed order gives the same
        # bits in every run. Without lockstep each update is a commit of its own, the oldest first: none waits without end.
        pushed = [place for place in self._roster.in_order() if place.status is Status.PUSHED]
        if not self.settings.consistency.lockstep:
            pushed = [min(pushed, key=lambda place: (place.clock, place.worker))]
        self._commit.contributions = tuple(
            Contribution(worker=place.worker, process=place.pushed_by, round=place.clock)
            for place in pushed
            if place.pushed_by is not None
        )
        if self.settings.clip_norm is not None:
            self._run.do(*self._commit.sums(self._fleet, ticket=self._run.begin(RunPhase.SUM)))
        else:
            self._apply()
        return True

    def _apply(self) -> None:
        ticket = self._run.begin(RunPhase.APPLY)
        clocks, version = self._clocks_afterwards(), self.version + 1
        self._run.do(*self._commit.applies(self._fleet, ticket=ticket, version=version, clocks=clocks))

    def _clocks_afterwards(self) -> dict[int, int]:
        contributions = self._commit.contributions
        if self.settings.consistency.lockstep:
            # All workers are done with the round, also one whose update was dropped: a push of it that is still on its way is
            # refused.
            return dict.fromkeys(self.places, contributions[0].round + 1)
        return dict(self.clocks) | {each.worker: each.round + 1 for each in contributions}

    def _committed(self) -> None:
        self._run.version += 1
        self._rejected_in_a_row = 0
        contributions = self._commit.contributions
        self._saving.round_took(self._run.now_s - self._opened_s[contributions[0].worker])
        concerned = self.places if self.settings.consistency.lockstep else {each.worker for each in contributions}
        for worker, clock in self._clocks_afterwards().items():
            if worker in concerned:
                self.places[worker].reset(clock)
        self._commit.contributions = ()
        self._run.phase = RunPhase.COLLECT

    # -- actions --------------------------------------------------------------------------------------------------

    def _slowest(self) -> int:
        return self._roster.slowest(default=self._saving.clock)

    def _send(self, place: Place) -> None:
        if self._run.roll_back or self.phase in (RunPhase.READ, RunPhase.RESTART):
            return  # tasks begun before are void; the round opens again after reading
        assert place.process is not None
        self._run.do(
            act.SendTask(
                worker=place.worker,
                process=place.process,
                round=place.clock,
                attempt=self.attempt,
                version=self.version,
                members=place.members,
                redone=place.sent,
                servers=tuple(sorted(self._fleet.whole)),
            )
        )
        place.sent = True
