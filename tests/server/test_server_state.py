"""What the coordinator orders when a worker dies: three policies, event by event."""

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from server_rig import Push, World

from tatami.server import ASP, BSP, SSP, Backup, Checkpoint, FromServers, Ignore
from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.recovery import AbstractRecovery
from tatami.server.run_settings import RunSettings

TERMS: dict[str, Any] = {"rounds": 2, "workers": 2, "servers": 1, "spares": 1, "restarts": 0}


def received(worker: int, *, process: int, attempt: int = 0) -> ev.ShardReceived:
    task = act.SendTask(
        worker=worker, process=process, round=0, attempt=attempt, version=0, members=(0, 1), redone=False, servers=(0,)
    )
    return ev.ShardReceived(at_s=1, task=task, shard=0, server=0)


def begun(recovery: AbstractRecovery) -> Coordinator:
    """In round 0: worker 0 has pushed, worker 1 has not, and process 2 stands by."""
    coordinator = Coordinator(RunSettings(recovery=recovery, **TERMS))
    actions = coordinator.handle(ev.Started(at_s=0))
    assert actions[0] == act.StartSpare(process=2)
    if isinstance(recovery, Checkpoint):
        (write,) = (each for each in actions if isinstance(each, act.WriteCheckpoint))
        actions = coordinator.handle(ev.CheckpointWritten(at_s=0, order=write))
    sent = [each for each in actions if isinstance(each, act.SendTask)]
    assert [(each.worker, each.process, each.members, each.redone) for each in sent] == [
        (0, 0, (0, 1), False),
        (1, 1, (0, 1), False),
    ]
    coordinator.handle(ev.SpareReady(at_s=0, process=2))
    assert coordinator.handle(received(0, process=0)) == ()
    return coordinator


def test_from_servers_gives_the_task_to_the_spare_and_waits_for_it() -> None:
    coordinator = begun(FromServers())
    (task,) = coordinator.handle(ev.ProcessDied(at_s=1, process=1))
    assert isinstance(task, act.SendTask)
    assert (task.worker, task.process, task.round, task.redone) == (1, 2, 0, True)
    assert coordinator.handle(received(1, process=1)) == (), "the dead one's push, come late"
    (order,) = coordinator.handle(received(1, process=2))
    assert isinstance(order, act.ApplyShard)
    assert [(each.worker, each.process) for each in order.contributions] == [(0, 0), (1, 2)]


def test_ignore_closes_the_round_with_what_it_has() -> None:
    coordinator = begun(Ignore())
    (order,) = coordinator.handle(ev.ProcessDied(at_s=1, process=1))
    assert isinstance(order, act.ApplyShard)
    assert [each.worker for each in order.contributions] == [0]
    tasks = coordinator.handle(ev.ShardApplied(at_s=2, order=order))
    assert [(each.worker, each.process, each.round) for each in tasks if isinstance(each, act.SendTask)] == [
        (0, 0, 1),
        (1, 2, 1),
    ]


def test_checkpoint_takes_everybody_back() -> None:
    coordinator = begun(Checkpoint())
    (read,) = coordinator.handle(ev.ProcessDied(at_s=1, process=1))
    assert isinstance(read, act.ReadCheckpoint)
    assert read == act.ReadCheckpoint(ticket=2, version=0, attempt=1, servers=(0,))
    tasks = coordinator.handle(ev.CheckpointRead(at_s=2, order=read, version=0, clocks=((0, 0), (1, 0))))
    assert [(each.worker, each.process, each.attempt) for each in tasks if isinstance(each, act.SendTask)] == [
        (0, 0, 1),
        (1, 2, 1),
    ]
    assert coordinator.handle(received(0, process=0)) == (), "of the round that was dropped"


def test_a_late_process_is_ended_before_it_is_replaced() -> None:
    first, second = begun(FromServers()).handle(ev.ProcessDied(at_s=3, process=1, late=True))
    assert first == act.EndProcess(process=1)
    assert isinstance(second, act.SendTask)


def test_without_spares_the_batch_is_divided_among_the_others() -> None:
    coordinator = begun(FromServers())
    coordinator.handle(ev.ProcessDied(at_s=1, process=2))
    warning, order = coordinator.handle(ev.ProcessDied(at_s=1, process=1))
    assert warning == act.Warn(message="no spare is left for worker 1: 1 workers share its part from now on")
    assert isinstance(order, act.ApplyShard)
    (task,) = coordinator.handle(ev.ShardApplied(at_s=2, order=order))
    assert isinstance(task, act.SendTask)
    assert task.members == (0,)


def test_the_result_is_fetched_before_the_run_is_over() -> None:
    coordinator = Coordinator(RunSettings(**TERMS | {"rounds": 0}))
    fetch = act.FetchResult(ticket=1)
    assert coordinator.handle(ev.Started(at_s=0))[-1] == fetch
    assert coordinator.handle(ev.ResultFetched(at_s=1, order=fetch)) == (act.Finish(),)
    assert coordinator.handle(ev.WorkerJoins(at_s=2)) == ()


def test_an_event_of_another_protocol_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="Event is not an event of this protocol"):
        Coordinator(RunSettings(**TERMS)).handle(ev.Event(at_s=0))


SETTINGS = st.builds(
    lambda servers, replicas, **rest: RunSettings(servers=servers, replicas=min(replicas, servers), **rest),
    rounds=st.integers(0, 4),
    workers=st.integers(1, 4),
    servers=st.integers(1, 3),
    replicas=st.integers(1, 2),
    spares=st.integers(0, 2),
    restarts=st.integers(0, 4),
    consistency=st.sampled_from([BSP(), SSP(staleness=0), SSP(staleness=2), ASP(), Backup(workers=1)]),
    recovery=st.sampled_from([FromServers(), Ignore(), Checkpoint(), Checkpoint(every=2), Checkpoint(every="daly")]),
    clip_norm=st.sampled_from([None, 1.0]),
    save_every=st.sampled_from([None, 1, 2]),
)


class ChaosMachine(RuleBasedStateMachine):
    """Hypothesis delivers, repeats, kills and hangs as it likes, then lets everything come to its end."""

    @initialize(run=SETTINGS)
    def start(self, run: RunSettings) -> None:
        self.world = World(run)
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
        self.world.tell(ev.UpdateRejected(at_s=self.world.time_s, task=task, reason="the loss is nan"))
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
        assert len(ledger) == world.coordinator.version
        counts = Counter((each.worker, each.round) for commit in ledger for each in commit)
        assert all(count == 1 for count in counts.values()), "an update was applied twice"
        if world.settings.consistency.lockstep:
            assert [{each.round for each in commit} for commit in ledger] == [{r} for r in range(world.settings.rounds)]
            assert all([each.worker for each in commit] == sorted(each.worker for each in commit) for commit in ledger)
        self.check_nobody_lost(ledger)

    def check_nobody_lost(self, ledger: list[tuple[act.Contribution, ...]]) -> None:
        """Where updates are never given up, every place that stayed to the end has all its rounds in the parameters."""
        world, run = self.world, self.world.settings
        if "rejected" in self.excused or isinstance(run.recovery, Ignore) or isinstance(run.consistency, Backup):
            return
        applied = {(each.worker, each.round) for commit in ledger for each in commit}
        for worker in range(run.workers):
            if worker in world.coordinator.places:
                assert {round_ for who, round_ in applied if who == worker} == set(range(run.rounds))


TestChaos = ChaosMachine.TestCase
TestChaos.settings = settings(max_examples=150, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck))
