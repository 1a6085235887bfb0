"""What the coordinator orders when a worker dies: three policies, event by event."""

from typing import Any

import pytest

from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.protocol import Protocol
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers, Ignore

TERMS: dict[str, Any] = {"rounds": 2, "workers": 2, "servers": 1, "shards": 1, "spares": 1, "restarts": 0}


def received(worker: int, *, process: int, attempt: int = 0) -> ev.ShardReceived:
    return ev.ShardReceived(at_s=1, worker=worker, process=process, round=0, attempt=attempt, shard=0, server=0)


def begun(recovery: AbstractRecovery) -> Coordinator:
    """In round 0: worker 0 has pushed, worker 1 has not, and process 2 stands by."""
    coordinator = Coordinator(Protocol(recovery=recovery, **TERMS))
    actions = coordinator.handle(ev.Started(at_s=0))
    assert actions[0] == act.StartSpare(process=2)
    if isinstance(recovery, Checkpoint):
        (write,) = (each for each in actions if isinstance(each, act.WriteCheckpoint))
        actions = coordinator.handle(ev.CheckpointWritten(at_s=0, ticket=write.ticket))
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
    tasks = coordinator.handle(ev.ShardApplied(at_s=2, ticket=order.ticket, shard=0, server=0))
    assert [(each.worker, each.process, each.round) for each in tasks if isinstance(each, act.SendTask)] == [
        (0, 0, 1),
        (1, 2, 1),
    ]


def test_checkpoint_takes_everybody_back() -> None:
    coordinator = begun(Checkpoint())
    (read,) = coordinator.handle(ev.ProcessDied(at_s=1, process=1))
    assert read == act.ReadCheckpoint(ticket=2, version=0, attempt=1, servers=(0,))
    tasks = coordinator.handle(ev.CheckpointRead(at_s=2, ticket=2, version=0, clocks=((0, 0), (1, 0))))
    assert [(each.worker, each.process, each.attempt) for each in tasks if isinstance(each, act.SendTask)] == [
        (0, 0, 1),
        (1, 2, 1),
    ]
    assert coordinator.handle(received(0, process=0)) == (), "of the round that was dropped"


def test_a_late_process_is_ended_before_it_is_replaced() -> None:
    first, second = begun(FromServers()).handle(ev.ProcessLate(at_s=3, process=1))
    assert first == act.DeclareDead(process=1)
    assert isinstance(second, act.SendTask)


def test_without_spares_the_batch_is_divided_among_the_others() -> None:
    coordinator = begun(FromServers())
    coordinator.handle(ev.ProcessDied(at_s=1, process=2))
    warning, order = coordinator.handle(ev.ProcessDied(at_s=1, process=1))
    assert warning == act.Warn(message="no spare is left for worker 1: 1 workers share its part from now on")
    assert isinstance(order, act.ApplyShard)
    (task,) = coordinator.handle(ev.ShardApplied(at_s=2, ticket=order.ticket, shard=0, server=0))
    assert isinstance(task, act.SendTask)
    assert task.members == (0,)


def test_the_result_is_fetched_before_the_run_is_over() -> None:
    coordinator = Coordinator(Protocol(**TERMS | {"rounds": 0}))
    fetch = coordinator.handle(ev.Started(at_s=0))[-1]
    assert fetch == act.FetchResult(ticket=1)
    assert coordinator.handle(ev.ResultFetched(at_s=1, ticket=1)) == (act.Finish(version=0),)
    assert coordinator.handle(ev.WorkerJoins(at_s=2)) == ()


def test_an_event_of_another_protocol_is_a_mistake() -> None:
    with pytest.raises(TypeError, match="Event is not an event of this protocol"):
        Coordinator(Protocol(**TERMS)).handle(ev.Event(at_s=0))
