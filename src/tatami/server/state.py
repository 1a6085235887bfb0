"""The protocol of a parameter-server run as a pure state machine: events in, actions out.

No Ray, no torch, no clock: the runtime executes it on real processes, a simulator on simulated ones. It promises, under any
interleaving of deaths, delays, duplicates and joins: an update is applied on all shards or on none, never twice; every round
is applied; and the run ends, provided that what each action asks for happens or its process is reported dead.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.actions import Action, Cause, Contribution
from tatami.server.place import Place, Status
from tatami.server.protocol import Protocol
from tatami.server.recovery import Remedy
from tatami.server.saving import Saved, Saving
from tatami.server.steps import Phase


class Coordinator:
    """Runs the protocol: `handle` each event in the order they are seen, and carry out the actions in their order.

    Args:
        protocol: the terms of the run.
        resumed: the checkpoint that the servers were loaded from; None for a new run.

    Attributes:
        version: commits that are applied on all shards. In lockstep that is the number of rounds done.
        attempt: roll-backs so far; a push of an earlier attempt is void.
        places: by worker number.
    """

    def __init__(self, protocol: Protocol, *, resumed: Saved | None = None) -> None:
        self.protocol = protocol
        self.phase = Phase.STARTING
        self.version = 0 if resumed is None else resumed.version
        self.attempt = 0
        self._saving = Saving(protocol, saved=resumed)
        clocks = {} if resumed is None else dict(resumed.clocks)
        self.places = {
            worker: Place(worker=worker, process=worker, clock=clocks.get(worker, self._saving.clock))
            for worker in range(protocol.workers)
        }
        self.ready: list[int] = []
        self.starting: set[int] = set()
        self.servers = set(range(protocol.servers))
        self.restarts_left = protocol.restarts
        self._servers_starting: set[int] = set()
        self._next_process = protocol.workers
        self._next_worker = max(self.places) + 1
        self._joins = 0
        self._ticket = 0
        self._awaited: dict[tuple[int, int], act.SumShard | act.ApplyShard] = {}
        self._squared_norms: dict[int, float] = {}
        self._committing: tuple[Contribution, ...] = ()
        self._writing: act.WriteCheckpoint | None = None
        self._stopping: act.Stop | None = None
        self._roll_back = False
        self._rejected_in_a_row = 0
        self._now_s = 0.0
        self._opened_s: dict[int, float] = {}
        self._write_began_s = 0.0
        self._actions: list[Action] = []

    @property
    def clocks(self) -> tuple[tuple[int, int], ...]:
        """Rounds done, by worker."""
        return tuple((worker, place.clock) for worker, place in sorted(self.places.items()))

    def handle(self, event: ev.Event) -> tuple[Action, ...]:
        """What is to be done about `event`, in this order; nothing once the run is over."""
        if self.phase is Phase.DONE:
            return ()
        self._actions = []
        self._now_s = event.at_s
        self._take(event)
        # Each step leaves a phase or opens a round; it ends where the next event must come from outside.
        while self._step():
            pass
        return tuple(self._actions)

    # -- events ---------------------------------------------------------------------------------------------------

    def _take(self, event: ev.Event) -> None:
        match event:
            case ev.Started():
                self.phase = Phase.COLLECT
                for _ in range(self.protocol.spares):
                    self._start_spare()
            case ev.ShardReceived():
                if (place := self._at_work(event)) is not None:
                    place.received.add((event.shard, event.server))
                    self._see_whether_pushed(place)
            case ev.UpdateRejected():
                self._reject(event)
            case ev.TaskFailed():
                if (place := self._at_work(event)) is not None:
                    self._send(place)
            case ev.ShardSummed() | ev.ShardApplied():
                self._acknowledge(event)
            case ev.CheckpointWritten() | ev.CheckpointFailed():
                self._written(event)
            case ev.CheckpointRead() if self.phase is Phase.READ and event.ticket == self._ticket:
                self._return_to(Saved(version=event.version, clocks=event.clocks))
            case ev.ResultFetched() if self.phase is Phase.FETCH and event.ticket == self._ticket:
                self._do(act.Finish(version=self.version))
            case ev.ProcessDied():
                self._lose(event.process)
            case ev.ProcessLate():
                self._do(act.DeclareDead(process=event.process))
                self._lose(event.process)
            case ev.SpareReady() if event.process in self.starting:
                self.starting.discard(event.process)
                self.ready.append(event.process)
            case ev.WorkerJoins():
                self._joins += 1
                self._start_spare()
            case ev.WorkerLeaves():
                self._let_go(event.worker)
            case ev.ServerDied():
                self._lose_server(event.server)
            case ev.ServerLate():
                self._do(act.DeclareServerDead(server=event.server))
                self._lose_server(event.server)
            case ev.ServerReady() if event.server in self._servers_starting:
                self._servers_starting.discard(event.server)
                self.servers.add(event.server)
            case ev.SpareReady() | ev.ServerReady() | ev.ResultFetched() | ev.CheckpointRead():
                pass  # told before, or declared dead meanwhile
            case _:
                raise TypeError(f"{type(event).__name__} is no event of this protocol")

    def _at_work(self, event: ev.OfTask) -> Place | None:
        """The place whose open task this is about; None if it is a duplicate, late, or from somebody declared dead."""
        place = self.places.get(event.worker)
        if place is None or place.status is not Status.BUSY:
            return None
        named = (event.process, event.round, event.attempt)
        return place if named == (place.process, place.clock, self.attempt) else None

    def _see_whether_pushed(self, place: Place) -> None:
        needed = {(shard, server) for shard in range(self.protocol.shards) for server in self._holders(shard)}
        if place.status is Status.BUSY and place.process is not None and needed <= place.received:
            place.status = Status.PUSHED
            place.pushed_by = place.process

    def _reject(self, event: ev.UpdateRejected) -> None:
        place = self._at_work(event)
        if place is None:
            return
        place.status = Status.OUT
        self._rejected_in_a_row += 1
        self._warn(f"the update of worker {event.worker} in round {event.round} is not applied: {event.reason}")
        if self._rejected_in_a_row >= len(self.places):
            self._rescue(Cause.NOT_FINITE, f"no worker has a finite loss in round {event.round}; a smaller step may help")

    def _lose(self, process: int) -> None:
        self.starting.discard(process)
        if process in self.ready:
            self.ready.remove(process)
        for place in self.places.values():
            if place.process == process:
                place.process = None
                remedy = self.protocol.recovery.remedy
                if place.status is Status.BUSY:
                    place.received = set()
                    if remedy is Remedy.SKIP:
                        place.status = Status.OUT
                if remedy is Remedy.ROLL_BACK and self.phase not in (Phase.READ, Phase.RESTART):
                    self._roll_back = True

    def _let_go(self, worker: int) -> None:
        place = self.places.get(worker)
        if place is None or place.leaving:
            self._warn(f"there is no worker {worker} that could leave; there are {sorted(self.places)}")
        elif self._num_staying() <= self.protocol.min_workers:
            self._warn(f"worker {worker} stays: with fewer than min_workers={self.protocol.min_workers} the run would stop")
        else:
            place.leaving = True

    # -- servers --------------------------------------------------------------------------------------------------

    def _holders(self, shard: int) -> tuple[int, ...]:
        return tuple(server for server in self.protocol.holders(shard) if server in self.servers)

    def _lose_server(self, server: int) -> None:
        if server not in self.servers and server not in self._servers_starting:
            return
        self.servers.discard(server)
        self._servers_starting.discard(server)
        lost = [shard for shard in range(self.protocol.shards) if not self._holders(shard)]
        if lost or self.phase is Phase.RESTART:
            self._restart_servers(server)
            return
        self._warn(f"server {server} is gone; its shards live on elsewhere, without another copy from now on")
        self._awaited = {key: order for key, order in self._awaited.items() if order.server != server}
        for place in self.places.values():
            self._see_whether_pushed(place)
        if self.phase is Phase.WRITE:
            self._write()
        elif self.phase is Phase.READ:
            self._read()
        elif self.phase is Phase.FETCH:
            self._fetch()

    def _restart_servers(self, server: int) -> None:
        gone = set(range(self.protocol.servers)) - self.servers - self._servers_starting
        saved = self._saving.saved
        can = self.protocol.recovery.remedy is Remedy.ROLL_BACK and saved is not None and self._stopping is None
        if not can or self.restarts_left < len(gone):
            where = "nothing was saved" if saved is None else f"the last checkpoint is of version {saved.version}"
            reason = f"server {server} is gone, and with it the only copy of its shards; {where}. replicas=2 survives this"
            self._do(act.Stop(cause=Cause.SHARDS_LOST, reason=reason, saved=saved is not None))
            return
        self.phase = Phase.RESTART
        for each in sorted(gone):
            self.restarts_left -= 1
            self._servers_starting.add(each)
            self._do(act.StartServer(server=each))

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _write(self) -> None:
        self.phase = Phase.WRITE
        self._ticket += 1
        self._write_began_s = self._now_s
        self._writing = act.WriteCheckpoint(ticket=self._ticket, version=self.version, clocks=self.clocks)
        self._do(self._writing)

    def _written(self, event: ev.CheckpointWritten | ev.CheckpointFailed) -> None:
        if self.phase is not Phase.WRITE or event.ticket != self._ticket or self._writing is None:
            return
        self.phase = Phase.COLLECT
        self._saving.clock = self._slowest()  # where it failed, too: not at once again, but after the next interval
        if isinstance(event, ev.CheckpointWritten):
            saved = Saved(version=self._writing.version, clocks=self._writing.clocks)
            self._saving.written(saved, took_s=self._now_s - self._write_began_s)
        elif self._stopping is None and self._saving.is_vital:
            self._do(act.Stop(cause=Cause.CHECKPOINT, reason=f"the first checkpoint failed: {event.reason}", saved=False))
        else:
            self._warn(f"no checkpoint was written at version {self.version}: {event.reason}")
        if self._stopping is not None:
            self._do(replace(self._stopping, saved=isinstance(event, ev.CheckpointWritten)))

    def _read(self) -> None:
        assert self._saving.saved is not None  # written before the first round is opened
        self.phase = Phase.READ
        self._roll_back = False
        self._ticket += 1
        self.attempt += 1
        self._do(act.ReadCheckpoint(ticket=self._ticket, version=self._saving.saved.version, attempt=self.attempt))

    def _fetch(self) -> None:
        self.phase = Phase.FETCH
        self._ticket += 1
        self._do(act.FetchResult(ticket=self._ticket))

    def _return_to(self, saved: Saved) -> None:
        clocks = dict(saved.clocks)
        self.version, self._saving.saved = saved.version, saved
        self._saving.clock = saved.slowest
        for worker, place in self.places.items():
            place.reset(clocks.get(worker, saved.slowest))
        self.phase = Phase.COLLECT

    def _rescue(self, cause: Cause, reason: str) -> None:
        """Stop as soon as the state of the last commit is on disk."""
        if self._stopping is None:
            self._stopping = act.Stop(cause=cause, reason=reason, saved=False)

    # -- steps ----------------------------------------------------------------------------------------------------

    def _step(self) -> bool:
        """Go on by one step, if that is possible without another event."""
        if self.phase is Phase.DONE:
            return False
        self._staff()
        match self.phase:
            case Phase.COLLECT:
                return self._collect()
            case Phase.SUM if not self._awaited:
                self._apply(sum(norm for _, norm in sorted(self._squared_norms.items())))
            case Phase.APPLY if not self._awaited:
                self._committed()
            case Phase.RESTART if not self._servers_starting:
                self._read()
            case _:
                return False
        return True

    def _staff(self) -> None:
        """Give vacant places to spares, start new spares, and give up places for which none will come."""
        vacant = [place for _, place in sorted(self.places.items()) if place.is_vacant(rounds=self.protocol.rounds)]
        while vacant and self.ready:
            place = vacant.pop(0)
            place.process = self.ready.pop(0)
            if place.status is Status.BUSY:
                self._send(place)
        if self._all_done() or self.phase is Phase.STARTING:
            return
        wanted = len(vacant) + self._joins + self.protocol.spares
        while len(self.ready) + len(self.starting) < wanted and self.restarts_left > 0:
            self.restarts_left -= 1
            self._start_spare()
        if self.starting or self.ready:
            return
        self._joins = 0
        for place in vacant:
            place.leaving = True
            if place.status is Status.BUSY:
                place.status = Status.OUT
            self._warn(f"no spare is left for worker {place.worker}: {self._num_staying()} workers share its part from now on")

    def _collect(self) -> bool:
        if self._roll_back and self._stopping is None and not self._all_done():
            self._read()
            return False
        for place in () if self.protocol.consistency.lockstep else self.places.values():
            if place.status is Status.OUT:
                place.reset(place.clock + 1)
        self._drop_leavers()
        self._admit()
        if self._num_staying() < self.protocol.min_workers:
            few = f"{self._num_staying()} workers are left, fewer than min_workers={self.protocol.min_workers}"
            self._rescue(Cause.TOO_FEW_WORKERS, few)
        due = self._saving.due(slowest=self._slowest(), workers=len(self.places), last=self._all_done())
        if self._stopping is not None or due:
            self._write()
            return False
        if self._all_done():
            self._fetch()
            return False
        self._open()
        return self._close()

    def _drop_leavers(self) -> None:
        for worker, place in list(self.places.items()):
            if place.leaving and place.status is Status.IDLE:
                if place.process is not None:
                    self._do(act.Retire(worker=worker, process=place.process))
                del self.places[worker]

    def _admit(self) -> None:
        while self._joins and self.ready and self._between_rounds():
            self._joins -= 1
            worker = self._next_worker  # never a number that was somebody else's: updates are told apart by it
            self._next_worker += 1
            self.places[worker] = Place(worker=worker, process=self.ready.pop(0), clock=self._slowest())

    def _open(self) -> None:
        """Begin the next round of everybody who may."""
        lockstep = self.protocol.consistency.lockstep
        if lockstep and not self._between_rounds():
            return
        slowest = self._slowest()
        unmanned = self.protocol.recovery.remedy is not Remedy.SKIP
        rounds, may_start = self.protocol.rounds, self.protocol.consistency.may_start
        able = [
            place
            for _, place in sorted(self.places.items())
            if place.can_take_part(rounds=rounds, unmanned=unmanned) and may_start(place.clock, slowest=slowest)
        ]
        taking_part = able if lockstep else [place for _, place in sorted(self.places.items()) if not place.leaving]
        for place in able:
            if place.status is Status.IDLE:
                place.status = Status.BUSY
                place.members = tuple(member.worker for member in taking_part)
                self._opened_s[place.worker] = self._now_s
                if place.process is not None:
                    self._send(place)

    def _close(self) -> bool:
        """Apply what is ready to be; whether there was anything."""
        by_status = {status: [place for place in self.places.values() if place.status is status] for status in Status}
        pushed, waiting, out = by_status[Status.PUSHED], by_status[Status.BUSY], by_status[Status.OUT]
        if out and not pushed and not waiting:
            for place in out:  # nobody is left of this round: it begins anew with whoever comes
                place.reset(place.clock)
            return True
        if not pushed or not self.protocol.consistency.closes(pushed=len(pushed), waiting=len(waiting), out=len(out)):
            return False
        if not self.protocol.consistency.lockstep:
            pushed = [min(pushed, key=lambda place: (place.clock, place.worker))]
        pushed.sort(key=lambda place: place.worker)
        self._committing = tuple(
            Contribution(worker=place.worker, process=place.pushed_by, round=place.clock)
            for place in pushed
            if place.pushed_by is not None
        )
        if self.protocol.clips:
            self.phase = Phase.SUM
            self._squared_norms = {}
            self._ticket += 1
            self._order(
                act.SumShard(ticket=self._ticket, shard=shard, server=server, contributions=self._committing)
                for shard in range(self.protocol.shards)
                for server in self._holders(shard)
            )
        else:
            self._apply(None)
        return True

    def _apply(self, squared_norm: float | None) -> None:
        self.phase = Phase.APPLY
        self._ticket += 1
        clocks = tuple(sorted(self._clocks_afterwards().items()))
        self._order(
            act.ApplyShard(
                ticket=self._ticket,
                shard=shard,
                server=server,
                version=self.version + 1,
                contributions=self._committing,
                squared_norm=squared_norm,
                clocks=clocks,
            )
            for shard in range(self.protocol.shards)
            for server in self._holders(shard)
        )

    def _order(self, orders: Iterable[act.SumShard | act.ApplyShard]) -> None:
        self._awaited = {}
        for order in orders:
            self._awaited[order.shard, order.server] = order
            self._do(order)

    def _acknowledge(self, event: ev.ShardSummed | ev.ShardApplied) -> None:
        expected = Phase.SUM if isinstance(event, ev.ShardSummed) else Phase.APPLY
        if self.phase is not expected or event.ticket != self._ticket:
            return
        self._awaited.pop((event.shard, event.server), None)
        if isinstance(event, ev.ShardSummed):
            self._squared_norms[event.shard] = event.squared_norm

    def _clocks_afterwards(self) -> dict[int, int]:
        if self.protocol.consistency.lockstep:
            return dict.fromkeys(self.places, self._committing[0].round + 1)
        return dict(self.clocks) | {each.worker: each.round + 1 for each in self._committing}

    def _committed(self) -> None:
        self.version += 1
        self._rejected_in_a_row = 0
        self._saving.round_took(self._now_s - self._opened_s[self._committing[0].worker])
        concerned = self.places if self.protocol.consistency.lockstep else {each.worker for each in self._committing}
        for worker, clock in self._clocks_afterwards().items():
            if worker in concerned:
                self.places[worker].reset(clock)
        self._committing = ()
        self.phase = Phase.COLLECT

    # -- questions ------------------------------------------------------------------------------------------------

    def _between_rounds(self) -> bool:
        return not self.protocol.consistency.lockstep or all(place.status is Status.IDLE for place in self.places.values())

    def _num_staying(self) -> int:
        return sum(not place.leaving for place in self.places.values())

    def _slowest(self) -> int:
        """Rounds done by the slowest who stays; a place that is done holds nobody up."""
        clocks = [place.clock for place in self.places.values() if not place.leaving]
        return min(clocks, default=self._saving.clock)

    def _all_done(self) -> bool:
        return bool(self.places) and all(place.clock >= self.protocol.rounds for place in self.places.values())

    # -- actions --------------------------------------------------------------------------------------------------

    def _do(self, action: Action) -> None:
        if isinstance(action, act.Finish | act.Stop):
            self.phase = Phase.DONE
        self._actions.append(action)

    def _warn(self, message: str) -> None:
        self._do(act.Warn(message=message))

    def _start_spare(self) -> None:
        self.starting.add(self._next_process)
        self._do(act.StartSpare(process=self._next_process))
        self._next_process += 1

    def _send(self, place: Place) -> None:
        if self._roll_back or self.phase in (Phase.READ, Phase.RESTART):
            return  # whatever was begun is void; the round opens again after reading
        assert place.process is not None
        self._do(
            act.SendTask(
                worker=place.worker,
                process=place.process,
                round=place.clock,
                attempt=self.attempt,
                version=self.version,
                members=place.members,
                redone=place.sent,
            )
        )
        place.sent = True
