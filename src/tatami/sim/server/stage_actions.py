"""The coordinator's actions, carried out on a stage; their results are told to it as events, and nothing is decided here."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.recovery import Remedy
from tatami.server.run_settings import RunSettings
from tatami.server.saving import Saved
from tatami.sim.server.lifetimes import Fates
from tatami.sim.server.result import Period, SimulatedFailure
from tatami.sim.server.server_setup import ServerSetup
from tatami.sim.server.tasks import SimulatedTasks
from tatami.sim.stage import Stage

_ENDLESS = 10**9


class ServerPlay:
    """One run on a stage.

    Args:
        seed: of the failures; None for a run without any.
        period: what undisturbed rounds take; None where that is not known yet.
        skips: undisturbed rounds are passed over; else each is simulated.
        watch: called with every action of the coordinator that is carried out one by one.

    Attributes:
        lost_updates: updates of workers that are missing in rounds that were applied.
        opened_s: when the first round was opened; `opened_bytes` had moved by then.
        ended_s: when all was applied, or the run stopped.
    """

    def __init__(
        self,
        setup: ServerSetup,
        stage: Stage,
        *,
        seed: int | None,
        period: Period | None,
        skips: bool = True,
        watch: Callable[[act.Action], None] | None = None,
    ) -> None:
        self.setup = setup
        self._stage = stage
        self._fates = Fates(
            setup,
            stage,
            seed=seed,
            period=period,
            strike=self._strike,
            cut=self._cut,
            mend=lambda worker: self._tasks.mend(worker),
        )
        self._storage = SimulatedStorage(setup, stage)
        self._skipping = Skipping(setup, period=period if skips else None)
        self._whole = setup.server_mtbf_s is not None or setup.replicas > 1
        num_servers = len(setup.servers) if self._whole else 1
        self._coordinator = Coordinator(
            RunSettings(
                rounds=setup.rounds,
                workers=len(setup.workers),
                servers=num_servers,
                spares=setup.spares,
                restarts=_ENDLESS,
                replicas=setup.replicas,
                consistency=setup.consistency,
                recovery=setup.recovery,
            )
        )
        self._events: deque[ev.Event] = deque()
        self._telling = False
        self._booting = 0
        self._applying = 0
        self._dead: set[int] = set()
        self._servers_up = set(range(len(setup.servers)))
        self._tasks = SimulatedTasks(
            setup,
            stage,
            self._fates,
            settings=self._coordinator.settings,
            places=lambda: self._coordinator.places,
            dead=self._dead,
            servers_up=self._servers_up,
            tell=self._tell,
        )
        self._saved = Saved(version=0, clocks=())
        self._clocks: dict[int, tuple[tuple[int, int], ...]] = {}
        self.failures: list[SimulatedFailure] = []
        self.lost_updates = 0
        self.opened_s: float | None = None
        self.opened_bytes = 0.0
        self.ended_s: float | None = None
        self.stopped: str | None = None
        self._watch = watch

    @property
    def version(self) -> int:
        """Rounds that are applied."""
        return self._coordinator.version

    def begin(self) -> None:
        self._tell(ev.Started(at_s=self._stage.now_s))

    # -- between the coordinator and the stage --------------------------------------------------------------------

    def _tell(self, *events: ev.Event) -> None:
        """Tell the coordinator, and carry out what it orders; events that follow at once are told in turn."""
        self._events.extend(events)
        if self._telling:
            return
        self._telling = True
        while self._events:
            event = self._events.popleft()
            actions = self._coordinator.handle(event)
            if not (actions and self._skips(actions)):
                for action in actions:
                    if self._watch is not None:
                        self._watch(action)
                    self._carry_out(action, first=isinstance(event, ev.Started))
        self._telling = False

    def _carry_out(self, action: act.Action, *, first: bool) -> None:
        now_s = self._stage.now_s
        match action:
            case act.SendTask():
                self._note_opening()
                self._tasks.begin(action)
            case act.SumShard():
                self._tell(ev.ShardSummed(at_s=now_s, order=action, squared_norm=0.0))
            case act.ApplyShard():
                if self._applying != action.version:
                    self._applying = action.version
                    self.lost_updates += len(self.setup.workers) - len(action.contributions)
                self._later(self.setup.apply_s, lambda: ev.ShardApplied(at_s=self._stage.now_s, order=action))
            case act.StartSpare():
                self._start_spare(action.process, stands_by=first)
            case act.StartServer():
                self._start_server(action.server)
            case act.CopyShard():
                self._copy(action)
            case act.WriteCheckpoint():
                self._clocks[action.version] = action.clocks
                self._storage.write(self._writers(), then=lambda: self._written(action))
            case act.ReadCheckpoint():
                self._tasks.drop_all()
                self._storage.read(self._writers(), then=lambda: self._read(action))
            case act.FetchResult():
                self._tell(ev.ResultFetched(at_s=now_s, order=action))
            case act.Finish():
                self._end(None)
            case act.Stop():
                self._tasks.drop_all()
                self._end(action.cause.value)
            case act.EndProcess() | act.EndServer() | act.Warn():
                pass  # These end processes or tell the user; a simulated process that has no task costs nothing.

    def _later(self, delay_s: float, event: Callable[[], ev.Event]) -> None:
        self._stage.soon(delay_s, lambda: self._tell(event()))

    def _end(self, reason: str | None) -> None:
        self.ended_s, self.stopped = self._stage.now_s, reason
        self._fates.end()

    def _note_opening(self) -> None:
        if self.opened_s is None:
            self.opened_s, self.opened_bytes = self._stage.now_s, self._stage.bytes_moved

    # -- failures -------------------------------------------------------------------------------------------------

    def _strike(self, kind: str, number: int) -> None:
        failure = SimulatedFailure(at_s=self._stage.now_s, kind=kind, number=number, round=self._coordinator.version)  # type: ignore[arg-type]
        self.failures.append(failure)
        if kind == "server":
            self._lose_server(number)
        else:
            self._lose_worker(number, detected_s=self.setup.detection_s, late=False)

    def _lose_worker(self, worker: int, *, detected_s: float, late: bool) -> None:
        place = self._coordinator.places[worker]
        process = place.process
        if process is None or process in self._dead:
            return
        self._dead.add(process)
        self._tasks.break_off(worker)

        def tell() -> None:
            self._tell(ev.ProcessDied(at_s=self._stage.now_s, process=process, late=late))
            self._tasks.push()

        self._stage.soon(detected_s, tell)

    def _lose_server(self, server: int) -> None:
        self._servers_up.discard(server)
        self._tasks.lose_server(server)
        self._later(self.setup.detection_s, lambda: ev.ServerDied(at_s=self._stage.now_s, server=server))

    def _cut(self, worker: int) -> None:
        """A worker's link breaks: its transfers stand still; if that lasts until its heartbeat is missed, it counts as dead."""
        self.failures.append(
            SimulatedFailure(at_s=self._stage.now_s, kind="link", number=worker, round=self._coordinator.version)
        )
        self._tasks.cut(worker)
        if 0 < self.setup.detection_s < self.setup.link_repair_s:
            self._stage.after(self.setup.detection_s, lambda: self._lose_worker(worker, detected_s=0.0, late=True))

    # -- machines that start --------------------------------------------------------------------------------------

    def _start_spare(self, process: int, *, stands_by: bool) -> None:
        if stands_by:
            self._tell(ev.SpareReady(at_s=self._stage.now_s, process=process))
        else:
            self._boot(lambda: ev.SpareReady(at_s=self._stage.now_s, process=process))

    def _start_server(self, server: int) -> None:
        def ready() -> ev.Event:
            self._fates.server_starts(server)
            return ev.ServerReady(at_s=self._stage.now_s, server=server)

        self._boot(ready)

    def _boot(self, ready: Callable[[], ev.Event]) -> None:
        self._booting += 1

        def up() -> ev.Event:
            self._booting -= 1
            return ready()

        self._later(self.setup.spawn_s, up)

    def _copy(self, order: act.CopyShard) -> None:
        self._servers_up.add(order.server)
        hosts = self.setup.servers
        self._stage.send(
            hosts[order.source],
            hosts[order.server],
            size_bytes=self.setup.model_bytes / self._coordinator.settings.servers,
            then=lambda: self._tell(ev.ShardCopied(at_s=self._stage.now_s, order=order)),
        )

    # -- checkpoints ----------------------------------------------------------------------------------------------

    def _writers(self) -> list[int]:
        """Hosts of the workers that are up."""
        places = self._coordinator.places.values()
        return [self.setup.workers[place.worker] for place in places if place.process is not None]

    def _written(self, order: act.WriteCheckpoint) -> None:
        self._saved = Saved(version=order.version, clocks=order.clocks)
        self._tell(ev.CheckpointWritten(at_s=self._stage.now_s, order=order))

    def _read(self, order: act.ReadCheckpoint) -> None:
        self._servers_up.update(order.servers)
        clocks = self._clocks.get(order.version, self._saved.clocks)
        self._tell(ev.CheckpointRead(at_s=self._stage.now_s, order=order, version=order.version, clocks=clocks))

    # -- rounds that nothing disturbs -----------------------------------------------------------------------------

    def _skips(self, actions: Sequence[act.Action]) -> bool:
        """Whether these actions open rounds that nothing will disturb, and are passed over."""
        settings, version = self._coordinator.settings, self._coordinator.version
        orders = [each for each in actions if isinstance(each, act.SendTask)]
        all_begin = len(orders) == settings.workers == len(actions) == len(self._coordinator.places)
        all_are_up = not self._booting and not self._dead.intersection(order.process for order in orders)
        all_are_up = all_are_up and len(self._servers_up) == len(self.setup.servers) and not self._fates.disturbed
        if not all_begin or not all_are_up or self._tasks:
            return False
        for order in orders:
            self._fates.takes(order.worker, order.process)
        rolls_back = settings.recovery.remedy is Remedy.ROLL_BACK
        if rolls_back and self._saved.version != version:
            return False
        rounds = self._skipping.rounds(self._fates, left=settings.rounds - version, now_s=self._stage.now_s)
        period = self._skipping.period
        if not rounds or period is None:
            return False
        self._note_opening()
        self._fates.pass_rounds(rounds)
        self._stage.bytes_moved += period.bytes_moved * (rounds // period.rounds)
        self._stage.after(period.duration_s * (rounds // period.rounds), lambda: self._resume(version + rounds))
        return True

    def _resume(self, version: int) -> None:
        """Go on like a run that begins with this version, in which every process has the number of its place again."""
        clocks = tuple((worker, version) for worker in range(len(self.setup.workers)))
        self._saved = Saved(version=version, clocks=clocks)
        self._clocks = {version: clocks}
        self._dead.clear()
        self._coordinator = Coordinator(self._coordinator.settings, resumed=self._saved)
        self._fates.renumber()
        self._tell(ev.Started(at_s=self._stage.now_s))


class Skipping:
    """Says how many rounds may be passed over; none where `period` is None."""

    def __init__(self, setup: ServerSetup, *, period: Period | None) -> None:
        # Writing in the background must be over before the next is due, or periods would not be alike.
        keeps_up = period is None or setup.checkpoints.waits or setup.checkpoints.local_s < period.duration_s
        usable = setup.consistency.lockstep and keeps_up and (setup.checkpoints.waits or not setup.checkpoints.store)
        self.period = period if usable else None

    def rounds(self, fates: Fates, *, left: int, now_s: float) -> int:
        """Whole periods of rounds before the next failure and the end of the run."""
        if self.period is None:
            return 0
        undisturbed = fates.undisturbed_rounds(self.period, now_s=now_s, most=left)
        return undisturbed - undisturbed % self.period.rounds


class SimulatedStorage:
    """Times writing and reading; one checkpoint at a time is written."""

    def __init__(self, setup: ServerSetup, stage: Stage) -> None:
        self._where = setup.checkpoints
        self._stage = stage
        self._writing = False
        self._waiting: list[Callable[[], None]] = []

    def write(self, hosts: Sequence[int], *, then: Callable[[], None]) -> None:
        """Write one on every host. `then` when the run may go on: when all is written, or begun where no worker waits."""
        if self._writing:
            self._waiting.append(lambda: self.write(hosts, then=then))
            return
        self._writing = True

        def written() -> None:
            self._writing = False
            waiting, self._waiting = self._waiting, []
            if self._where.waits:
                then()
            for each in waiting:
                each()

        self._move(hosts, reads=False, then=written)
        if not self._where.waits:
            then()

    def read(self, hosts: Sequence[int], *, then: Callable[[], None]) -> None:
        """Read the last checkpoint back on every host, once it is written."""
        if self._writing:
            self._waiting.append(lambda: self.read(hosts, then=then))
            return
        self._move(hosts, reads=True, then=then)

    def _move(self, hosts: Sequence[int], *, reads: bool, then: Callable[[], None]) -> None:
        store = self._where.store
        if not store or not hosts:
            self._stage.after(self._where.local_s if hosts else 0.0, then)
            return
        pairs = [(host, store[index % len(store)]) for index, host in enumerate(hosts)]
        ways = [(keeper, host) if reads else (host, keeper) for host, keeper in pairs]
        self._stage.send_all([(*way, self._where.size_bytes) for way in ways], then)
