"""Servers, workers and a disk in a few sets and lists: a coordinator's actions are carried out there, late and in any order."""

from collections.abc import Callable
from dataclasses import dataclass, field

from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.roster import Status
from tatami.server.run_settings import RunSettings

Commit = tuple[act.Contribution, ...]


@dataclass(eq=False)
class ServerModel:
    """One server: the commits in each of its shards, and the pushes that it holds."""

    shards: dict[int, list[Commit]]
    blank: bool = False
    staged: set[tuple[int, int, int, int]] = field(default_factory=set)  # shard, worker, process, round


@dataclass(frozen=True)
class Push:
    """One shard of one update on its way to one server: to `holder`, not to what is started anew in its place."""

    task: act.SendTask
    shard: int
    server: int
    holder: ServerModel


class World:
    """Carries out actions. Their effects on servers come in order; everything that is told to the coordinator comes when the
    test delivers it, and may be told again."""

    def __init__(self, settings: RunSettings) -> None:
        self.settings = settings
        self.coordinator = Coordinator(settings)
        self.alive = set(range(settings.workers))
        self.servers = {server: self._empty(server) for server in range(settings.servers)}
        self.disk: dict[int, tuple[dict[int, list[Commit]], tuple[tuple[int, int], ...]]] = {}
        self.pending: list[ev.Event | Push] = []
        self.told: list[ev.Event] = []
        self.attempt = 0
        self.end: act.Finish | act.Stop | None = None
        self.result: list[Commit] = []
        self.warnings: list[str] = []
        self.sent: list[act.SendTask] = []
        self.copied: list[tuple[int, int, int]] = []
        self.time_s = 0.0
        self.fails: Callable[[str], bool] = lambda _: False
        self.tell(ev.Started(at_s=0.0))

    def _empty(self, server: int) -> ServerModel:
        return ServerModel({shard: [] for shard in range(self.settings.servers) if server in self.settings.holders(shard)})

    def tell(self, event: ev.Event) -> None:
        self.told.append(event)
        for action in self.coordinator.handle(event):
            self.carry_out(action)

    def deliver(self, index: int) -> None:
        self.time_s += 1.0
        item = self.pending.pop(index)
        if isinstance(item, ev.Event):
            self.tell(item)
            return
        task = item.task
        if self.servers.get(item.server) is not item.holder:
            if task.process in self.alive:
                self.tell(ev.TaskFailed(at_s=self.time_s, task=task))
            return
        if task.attempt == self.attempt:
            assert not self.servers[item.server].blank, "a push to a server that has not got its shards"
            self.servers[item.server].staged.add((item.shard, task.worker, task.process, task.round))
        self.tell(ev.ShardReceived(at_s=self.time_s, task=task, shard=item.shard, server=item.server))

    def carry_out(self, action: act.Action) -> None:
        now = self.time_s
        match action:
            case act.SendTask():
                self.sent.append(action)
                if action.process in self.alive:
                    shards = range(self.settings.servers)
                    holders = [(shard, server) for shard in shards for server in self._live(shard) if server in action.servers]
                    self.pending += [Push(action, shard, server, self.servers[server]) for shard, server in holders]
            case act.StartSpare():
                if self.fails("spare"):
                    self.pending.append(ev.ProcessDied(at_s=now, process=action.process))
                else:
                    self.alive.add(action.process)
                    self.pending.append(ev.SpareReady(at_s=now, process=action.process))
            case act.StartServer():
                if self.fails("server"):
                    self.pending.append(ev.ServerDied(at_s=now, server=action.server))
                else:
                    self.servers[action.server] = self._empty(action.server)
                    self.servers[action.server].blank = True
                    self.pending.append(ev.ServerReady(at_s=now, server=action.server))
            case act.EndProcess():
                self.alive.discard(action.process)
            case act.EndServer():
                self.servers.pop(action.server, None)
            case act.SumShard():
                if action.server in self.servers:
                    self._check_staged(action)
                    self.pending.append(ev.ShardSummed(at_s=now, order=action, squared_norm=1.0))
            case act.ApplyShard():
                self._apply(action)
            case act.CopyShard():
                self._copy(action)
            case act.WriteCheckpoint():
                self._write(action)
            case act.ReadCheckpoint():
                self._read(action)
            case act.FetchResult():
                if all(self._whole(shard) for shard in range(self.settings.servers)):
                    self.result = list(self.ledger())
                    self.pending.append(ev.ResultFetched(at_s=now, order=action))
            case act.Warn():
                self.warnings.append(action.message)
            case act.Finish() | act.Stop():
                self.end = action

    def _check_staged(self, action: act.SumShard | act.ApplyShard) -> None:
        for each in action.contributions:
            assert (action.shard, each.worker, each.process, each.round) in self.servers[action.server].staged, (
                f"{each} is to be applied to shard {action.shard}, but server {action.server} has not got it"
            )

    def _apply(self, action: act.ApplyShard) -> None:
        if action.server not in self.servers:
            return
        self._check_staged(action)
        server = self.servers[action.server]
        commits = server.shards[action.shard]
        assert action.version == len(commits) + 1, "a commit twice, or one left out"
        commits.append(action.contributions)
        if self.settings.clip_norm is not None:
            assert action.squared_norm == float(self.settings.servers)
        floors = dict(action.clocks)
        server.staged = {
            (shard, worker, process, round_)
            for shard, worker, process, round_ in server.staged
            if shard != action.shard or round_ >= floors.get(worker, round_ + 1)
        }
        self.pending.append(ev.ShardApplied(at_s=self.time_s, order=action))

    def _copy(self, action: act.CopyShard) -> None:
        """The state of a shard, without any update that is not applied: none may be under way."""
        source, server = self.servers.get(action.source), self.servers.get(action.server)
        if source is None or server is None:
            return
        assert not source.blank, "a copy of nothing"
        at_work = [place.worker for place in self.coordinator.places.values() if place.status is not Status.IDLE]
        assert not at_work, f"the updates of {at_work} would be on one copy only"
        server.shards[action.shard] = list(source.shards[action.shard])
        self.copied.append((action.shard, action.source, action.server))
        server.blank = False
        self.pending.append(ev.ShardCopied(at_s=self.time_s, order=action))

    def _write(self, action: act.WriteCheckpoint) -> None:
        if any(not self._whole(shard) for shard in range(self.settings.servers)):
            return
        if self.fails("disk"):
            self.pending.append(ev.CheckpointWritten(at_s=self.time_s, order=action, problem="the disk is full"))
            return
        state = {shard: list(self.servers[self._whole(shard)[0]].shards[shard]) for shard in range(self.settings.servers)}
        assert {len(commits) for commits in state.values()} == {action.version}, "a checkpoint of a half-applied commit"
        self.disk[action.version] = (state, action.clocks)
        self.pending.append(ev.CheckpointWritten(at_s=self.time_s, order=action))

    def _read(self, action: act.ReadCheckpoint) -> None:
        self.attempt = action.attempt
        if any(not self._live(shard) for shard in range(self.settings.servers)):
            return
        older = [version for version in self.disk if version < action.version]
        version = max(older) if older and self.fails("read") else action.version
        state, clocks = self.disk[version]
        for number in action.servers:
            if (server := self.servers.get(number)) is None:
                continue
            server.staged, server.blank = set(), False
            server.shards = {shard: list(state[shard]) for shard in server.shards}
        self.pending.append(ev.CheckpointRead(at_s=self.time_s, order=action, version=version, clocks=clocks))

    def _live(self, shard: int) -> list[int]:
        return [server for server in self.settings.holders(shard) if server in self.servers]

    def _whole(self, shard: int) -> list[int]:
        return [server for server in self._live(shard) if not self.servers[server].blank]

    def kill(self, process: int) -> None:
        """What it has sent may still arrive, or not; its death is noticed some time."""
        self.alive.discard(process)
        self.pending.append(ev.ProcessDied(at_s=self.time_s, process=process))

    def hang(self, process: int) -> None:
        """It is taken for dead some time, and what it has sent arrives all the same."""
        self.pending.append(ev.ProcessDied(at_s=self.time_s, process=process, late=True))

    def kill_server(self, server: int) -> None:
        del self.servers[server]
        self.pending.append(ev.ServerDied(at_s=self.time_s, server=server))

    def drain(self, *, limit: int = 20_000) -> None:
        """Nothing bad happens any more: the run must end."""
        self.fails = lambda _: False
        for _ in range(limit):
            if self.end is not None:
                return
            assert self.pending, f"nothing is under way, and the run is not over: {self.coordinator.phase}"
            self.deliver(0)
        raise AssertionError(f"not over after {limit} deliveries: {self.coordinator.phase}, {self.coordinator.clocks}")

    def ledger(self) -> list[Commit]:
        """The commits in the parameters: the same ones on all shards and all their copies."""
        histories = [commits for server in self.servers.values() if not server.blank for commits in server.shards.values()]
        assert all(commits == histories[0] for commits in histories), "an update is on some shards only"
        return histories[0]
