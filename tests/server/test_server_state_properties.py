"""Under any interleaving of deaths, delays, duplicates and joins: no round in part, none twice, none lost, and an end."""

from collections import Counter

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from server_rig import Push, World

from tatami.server import ASP, BSP, SSP, Backup, Checkpoint, FromServers, Ignore
from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.protocol import Protocol

PROTOCOLS = st.builds(
    lambda servers, replicas, **rest: Protocol(servers=servers, replicas=min(replicas, servers), **rest),
    rounds=st.integers(0, 4),
    workers=st.integers(1, 4),
    servers=st.integers(1, 3),
    replicas=st.integers(1, 2),
    shards=st.integers(1, 3),
    spares=st.integers(0, 2),
    restarts=st.integers(0, 4),
    consistency=st.sampled_from([BSP(), SSP(staleness=0), SSP(staleness=2), ASP(), Backup(workers=1)]),
    recovery=st.sampled_from([FromServers(), Ignore(), Checkpoint(), Checkpoint(every=2), Checkpoint(every="daly")]),
    clips=st.booleans(),
    save_every=st.sampled_from([None, 1, 2]),
)


class ChaosMachine(RuleBasedStateMachine):
    """Hypothesis delivers, repeats, kills and hangs as it likes, then lets everything come to its end."""

    @initialize(protocol=PROTOCOLS)
    def start(self, protocol: Protocol) -> None:
        self.world = World(protocol)
        self.excused: set[str] = set()

    @precondition(lambda self: self.world.pending)
    @rule(data=st.data(), count=st.integers(1, 6))
    def deliver(self, data: st.DataObject, count: int) -> None:
        for _ in range(min(count, len(self.world.pending))):
            self.world.deliver(data.draw(st.integers(0, len(self.world.pending) - 1)))

    @precondition(lambda self: self.world.told)
    @rule(data=st.data())
    def tell_again(self, data: st.DataObject) -> None:
        seen = [event for event in self.world.told if not isinstance(event, (ev.Started, ev.WorkerJoins, ev.WorkerLeaves))]
        if seen:
            self.world.tell(data.draw(st.sampled_from(seen)))

    @precondition(lambda self: self.world.alive)
    @rule(data=st.data(), hangs=st.booleans(), loses=st.booleans())
    def worker_dies(self, data: st.DataObject, hangs: bool, loses: bool) -> None:
        process = data.draw(st.sampled_from(sorted(self.world.alive)))
        if hangs:
            self.world.hang(process)
            return
        self.world.kill(process)
        if loses:
            self.world.pending = [
                item for item in self.world.pending if not (isinstance(item, Push) and item.task.process == process)
            ]

    @precondition(lambda self: len(self.world.servers) > 1)
    @rule(data=st.data())
    def server_dies(self, data: st.DataObject) -> None:
        self.world.kill_server(data.draw(st.sampled_from(sorted(self.world.servers))))

    @rule()
    def somebody_joins(self) -> None:
        self.world.tell(ev.WorkerJoins(at_s=self.world.time_s))

    @rule(worker=st.integers(0, 5))
    def somebody_leaves(self, worker: int) -> None:
        self.world.tell(ev.WorkerLeaves(at_s=self.world.time_s, worker=worker))

    @precondition(lambda self: any(isinstance(item, Push) for item in self.world.pending))
    @rule(data=st.data())
    def loss_is_not_finite(self, data: st.DataObject) -> None:
        push = data.draw(st.sampled_from([item for item in self.world.pending if isinstance(item, Push)]))
        task = push.task
        self.world.pending = [item for item in self.world.pending if not (isinstance(item, Push) and item.task == task)]
        names = {"worker": task.worker, "process": task.process, "round": task.round, "attempt": task.attempt}
        self.world.tell(ev.UpdateRejected(at_s=self.world.time_s, reason="the loss is nan", **names))
        self.excused.add("rejected")

    @rule(bad=st.sets(st.sampled_from(["spare", "server", "disk", "read"])))
    def things_fail(self, bad: set[str]) -> None:
        self.world.fails = lambda what: what in bad

    def teardown(self) -> None:
        if not hasattr(self, "world"):
            return
        world = self.world
        world.drain()
        assert world.end is not None
        if isinstance(world.end, act.Stop):
            return
        ledger = world.result
        assert len(ledger) == world.end.version
        counts = Counter((each.worker, each.round) for commit in ledger for each in commit)
        assert all(count == 1 for count in counts.values()), "an update was applied twice"
        if world.protocol.consistency.lockstep:
            assert [{each.round for each in commit} for commit in ledger] == [{r} for r in range(world.protocol.rounds)]
            assert all([each.worker for each in commit] == sorted(each.worker for each in commit) for commit in ledger)
        self.check_nobody_lost(ledger)

    def check_nobody_lost(self, ledger: list[tuple[act.Contribution, ...]]) -> None:
        """Where updates are never given up, every place that stayed to the end has all its rounds in the parameters."""
        world, protocol = self.world, self.world.protocol
        if "rejected" in self.excused or isinstance(protocol.recovery, Ignore) or isinstance(protocol.consistency, Backup):
            return
        applied = {(each.worker, each.round) for commit in ledger for each in commit}
        for worker in range(protocol.workers):
            if worker in world.coordinator.places:
                assert {round_ for who, round_ in applied if who == worker} == set(range(protocol.rounds))


TestChaos = ChaosMachine.TestCase
TestChaos.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
