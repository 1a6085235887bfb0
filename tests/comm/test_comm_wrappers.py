"""Communicators around communicators: counting, and faults on order."""

import pytest
import torch

from tatami.comm import AbstractCommunicator, Recording, run_threads
from tatami.errors import CommTimeoutError, RankDiedError
from tatami.testing.faulty import Fault, FaultKind, Faulty, InjectedFaultError
from tatami.testing.worlds import World


@pytest.mark.ranks(2, 3, 4)
def test_recording_counts_messages_and_bytes_by_peer(world: World) -> None:
    def body(inner: AbstractCommunicator) -> None:
        comm = Recording(inner)
        after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        for elements in (3, 5):
            receiving = comm.irecv(torch.empty(elements), before)
            comm.isend(torch.ones(elements), after).wait()
            receiving.wait()
        part = comm.split(0)
        assert part is not None
        part.allreduce(torch.ones(10, dtype=torch.float64))
        assert comm.allgather_object(comm.rank) == list(range(comm.size))

        assert comm.num_messages("isend") == comm.num_messages("isend", peer=after) == 2
        assert comm.size_bytes("isend", peer=after) == (3 + 5) * 4
        assert comm.num_messages("irecv", peer=before) == 2
        assert comm.size_bytes("irecv") == 0
        assert comm.size_bytes("allreduce") == 80
        assert [call.operation for call in comm.calls[4:]] == ["split", "allreduce", "allgather_object"]
        part.close()

    world(body)


def test_every_operation_goes_through_a_wrapper(world: World) -> None:
    def body(inner: AbstractCommunicator) -> None:
        comm = Recording(inner)
        root = comm.rank == 0
        assert (comm.rank, comm.size, comm.hosts) == (inner.rank, inner.size, inner.hosts)
        comm.timeout_s = 7.0
        assert inner.timeout_s == comm.timeout_s == 7.0
        mine, whole = torch.ones(2), torch.arange(2.0 * comm.size)
        comm.barrier()
        comm.bcast(mine)
        comm.scatter(whole if root else None, mine)
        assert mine.tolist() == [2.0 * comm.rank, 2.0 * comm.rank + 1]
        out = torch.zeros_like(whole)
        comm.gather(mine, out if root else None)
        comm.allgather(mine, out)
        assert torch.equal(out, whole)
        comm.alltoall(whole, out)
        assert out.view(-1, 2).tolist() == [mine.tolist()] * comm.size
        comm.reduce_scatter(whole, mine)
        assert mine.tolist() == [comm.size * 2.0 * comm.rank, comm.size * (2.0 * comm.rank + 1)]
        comm.reduce(mine)
        comm.iallreduce(mine).wait()
        assert comm.bcast_object("hello" if root else None) == "hello"
        assert comm.gather_object(1) == ([1] * comm.size if root else None)
        if comm.size > 1 and root:
            comm.send(torch.ones(1), 1)
            comm.send_object("hi", 1)
        if comm.rank == 1:
            comm.recv(torch.zeros(1), 0)
            assert comm.recv_object(0) == "hi"

    world(body)


@pytest.mark.parametrize("step", [0, 2])
def test_a_fault_that_raises_ends_all_ranks(step: int) -> None:
    begun = [0, 0, 0]

    def body(inner: AbstractCommunicator) -> None:
        comm = Faulty(inner, faults=[Fault(kind=FaultKind.RAISE, rank=1, step=step)])
        for _ in range(5):
            comm.barrier()
            begun[comm.rank] += 1

    with pytest.raises(InjectedFaultError, match=f"rank 1 fails at step {step}, barrier"):
        run_threads(body, size=3)
    assert begun[1] == step
    assert max(begun) <= step


class Slept:
    """A clock that counts what it is asked to sleep."""

    def __init__(self) -> None:
        self.slept_s: list[float] = []

    def now_s(self) -> float:
        return sum(self.slept_s)

    def sleep(self, duration_s: float) -> None:
        self.slept_s.append(duration_s)


@pytest.mark.ranks(2, 3)
def test_a_delay_makes_one_rank_late_and_changes_no_value(world: World) -> None:
    def body(inner: AbstractCommunicator) -> list[float]:
        clock = Slept()
        comm = Faulty(inner, faults=[Fault(kind=FaultKind.DELAY, rank=0, step=1, delay_s=0.1)], clock=clock)
        part = comm.split(0)
        assert part is not None
        assert clock.slept_s == []
        tensor = torch.tensor([comm.rank])
        part.allreduce(tensor)
        assert tensor.item() == sum(range(comm.size))
        part.close()
        return clock.slept_s

    assert world(body) == [[0.1] if rank == 0 else [] for rank in range(world.size)]


@pytest.mark.ranks(2)
def test_a_dropped_message_times_out_where_it_is_missed(world: World) -> None:
    def body(inner: AbstractCommunicator) -> None:
        comm = Faulty(inner, faults=[Fault(kind=FaultKind.DROP, rank=0, step=step) for step in (0, 1)])
        if comm.rank == 0:
            comm.send(torch.ones(1), 1, tag=6)
            comm.isend(torch.ones(1), 1, tag=6).wait()
            comm.send(torch.full((1,), 5.0), 1, tag=8)
        else:
            out = torch.zeros(1)
            comm.recv(out, 0, tag=8)
            assert out.item() == 5.0
            comm.timeout_s = 0.1
            # A thread that has ended is known not to send any more, a process may only be slow.
            with pytest.raises((CommTimeoutError, RankDiedError), match=r"recv from rank 0 \(tag 6\) on rank 1 of 2"):
                comm.recv(out, 0, tag=6)

    world(body)
