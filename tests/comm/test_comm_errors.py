"""What goes wrong is said: arguments that cannot be, ranks that do not come, ranks that die."""

import re
import threading
from collections.abc import Callable
from queue import Queue

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tatami.comm import AbstractCommunicator, run_threads
from tatami.comm.mpi import MpiCommunicator, piece_sizes
from tatami.errors import ClosedError, CommError, CommTimeoutError, InputError, RankDiedError
from tatami.testing.worlds import WORLD_TIMEOUT_S, World

Operation = Callable[[AbstractCommunicator], object]

ONE = torch.zeros(1)

WRONG: dict[str, tuple[Operation, str]] = {
    "no such rank": (lambda comm: comm.send(ONE, 2), r"send: there is no rank 2; this communicator has ranks 0 to 1"),
    "negative rank": (lambda comm: comm.irecv(ONE, -1), r"recv: there is no rank -1"),
    "no such root": (lambda comm: comm.bcast(ONE, root=5), r"bcast: there is no rank 5"),
    "send to itself": (lambda comm: comm.send(ONE, comm.rank), r"send: rank \d would wait for itself"),
    "recv from itself": (lambda comm: comm.recv(ONE, comm.rank), r"recv: rank \d would wait for itself"),
    "object to itself": (lambda comm: comm.send_object(1, comm.rank), r"send: rank \d would wait for itself"),
    "negative tag": (lambda comm: comm.isend(ONE, 1, tag=-1), r"send: tag -1 is not between 0 and 32766"),
    "any tag": (lambda comm: comm.recv_object(1 - comm.rank, tag=-1), r"recv: tag -1 .*comm.next_tag\(source\) is the tag"),
    "large tag": (lambda comm: comm.irecv(ONE, 1, tag=40000), r"recv: tag 40000 is not between"),
    "complex": (lambda comm: comm.allreduce(torch.zeros(1, dtype=torch.complex64)), r"allreduce: torch.complex64 is not moved"),
    "other device": (lambda comm: comm.bcast(torch.zeros(1, device="meta")), r"bcast: a tensor of the device 'meta' has"),
    "sparse": (lambda comm: comm.isend(ONE.to_sparse(), 1), r"send: a torch.sparse_coo tensor .* \.to_dense\(\)"),
    "dtypes differ": (
        lambda comm: comm.allgather(ONE, torch.zeros(2).double()),
        r"tensor is torch.float32 but out is torch.float64",
    ),
    "too few counts": (lambda comm: comm.allgather(ONE, torch.zeros(2), counts=[2]), r"allgather: 1 counts for 2 ranks"),
    "wrong sum": (
        lambda comm: comm.allgather(ONE, torch.zeros(2), counts=[1, 2]),
        r"allgather: the counts add up to 3 but the tensor has 2 elements: \[1, 2\]",
    ),
    "negative count": (
        lambda comm: comm.allgather(ONE, torch.zeros(2), counts=[3, -1]),
        r"allgather: a count is negative: \[3, -1\]",
    ),
    "wrong part": (
        lambda comm: comm.allgather(torch.zeros(5), torch.zeros(4), counts=[2, 2]),
        r"allgather: the part of rank \d has 5 elements, but its count is 2",
    ),
    "parts not equal": (
        lambda comm: comm.alltoall(torch.zeros(3), torch.zeros(3)),
        r"alltoall: 3 elements do not divide into 2 equal parts; give the counts",
    ),
    "own part differs": (
        lambda comm: comm.alltoall(torch.zeros(3), torch.zeros(3), send_counts=[1, 2], recv_counts=[2, 1]),
        r"alltoall: rank \d sends itself \d elements but expects \d",
    ),
    "root without out": (lambda comm: comm.gather(ONE, None, root=comm.rank), r"gather: rank \d is the root and must give"),
    "root without tensor": (
        lambda comm: comm.scatter(None, ONE, root=comm.rank),
        r"scatter: rank \d is the root and must give",
    ),
    "wrong reduce_scatter": (
        lambda comm: comm.reduce_scatter(torch.zeros(4), torch.zeros(3), counts=[2, 2]),
        r"reduce_scatter: the part of rank \d has 3 elements",
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", WRONG)
def test_arguments_are_checked_before_anything_moves(comm: AbstractCommunicator, case: str) -> None:
    operation, message = WRONG[case]
    with pytest.raises(InputError, match=message):
        operation(comm)
    comm.barrier()


@pytest.mark.ranks(1, 2)
def test_a_closed_communicator_refuses(comm: AbstractCommunicator) -> None:
    part = comm.split(0)
    assert part is not None
    part.close()
    with pytest.raises(ClosedError, match=rf"barrier on rank {comm.rank} of {comm.size}: this communicator was closed"):
        part.barrier()
    with pytest.raises(ClosedError, match="send"):
        part.isend(ONE, 0)


@pytest.mark.ranks(2)
def test_a_recv_that_nobody_answers_times_out_and_says_so(comm: AbstractCommunicator) -> None:
    comm.timeout_s = 0.2
    with pytest.raises(CommTimeoutError) as caught:
        comm.recv(torch.zeros(3), 1 - comm.rank, tag=17)
    text = str(caught.value)
    waited = re.match(rf"recv from rank {1 - comm.rank} \(tag 17\) on rank {comm.rank} of 2 timed out after ([\d.]+) s: ", text)
    assert waited is not None
    assert float(waited[1]) >= 0.2
    assert f"nothing came from rank {1 - comm.rank}" in text
    assert "Raise timeout_s" in text
    comm.timeout_s = WORLD_TIMEOUT_S
    comm.barrier()


@pytest.mark.ranks(3)
@pytest.mark.threads_only
def test_a_collective_that_times_out_says_who_did_not_come(comm: AbstractCommunicator) -> None:
    done = torch.zeros(1)
    if comm.rank == 2:
        for peer in (0, 1):
            comm.recv(done, peer)
        return
    request = comm.iallreduce(torch.zeros(1))
    told = comm.isend(done, 1 - comm.rank, tag=1)
    comm.recv(torch.zeros(1), 1 - comm.rank, tag=1)  # both have joined
    told.wait()
    comm.timeout_s = 0.1
    with pytest.raises(CommTimeoutError, match=r"allreduce on rank \d of 3 timed out after [\d.]+ s: rank 2 did not join"):
        request.wait()
    comm.timeout_s = WORLD_TIMEOUT_S
    comm.send(done, 2)


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_a_send_that_nobody_takes_times_out(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        comm.timeout_s = 0.1
        with pytest.raises(CommTimeoutError, match=r"send to rank 1 \(tag 3\) on rank 0 of 2 .* rank 1 did not take it"):
            comm.isend(ONE, 1, tag=3).wait()
        comm.timeout_s = WORLD_TIMEOUT_S
    comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.parametrize(("sent", "room"), [(3, 4), (5, 4), (1 << 18, 3 << 18), (3 << 18, 1 << 18), (3 << 18, (3 << 18) + 1)])
def test_a_message_of_another_size_is_an_error_where_it_arrives(comm: AbstractCommunicator, sent: int, room: int) -> None:
    if comm.rank == 0:
        comm.send(torch.zeros(sent), 1, tag=2)
    else:
        with pytest.raises(CommError, match=r"recv from rank 0 \(tag 2\) on rank 1 of 2"):
            comm.recv(torch.zeros(room), 0, tag=2)
        for size in piece_sizes(4 * sent)[1:] if isinstance(comm, MpiCommunicator) and room < sent else ():
            comm.recv(torch.zeros(size, dtype=torch.uint8), 0, tag=2)  # what else the sender waits for


@given(*[st.integers(0, 1 << 25)] * 2)
def test_the_pieces_of_a_long_message_say_its_size(sent: int, room: int) -> None:
    pieces, rooms = piece_sizes(sent), piece_sizes(room)
    assert sum(pieces) == sent
    assert max(pieces) <= (1 << 20) + 8 * len(pieces) + 16
    assert any(one != other for one, other in zip(pieces, rooms, strict=False)) == (sent != room)


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_ranks_in_different_collectives_are_told(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 0:
            comm.barrier()
        else:
            comm.allreduce(torch.zeros(1))

    with pytest.raises(CommError, match=r"calls (barrier|allreduce) where another rank calls (barrier|allreduce)"):
        world(body)


@pytest.mark.parametrize("size", [2, 3, 6])
def test_when_a_rank_raises_the_waits_of_the_others_end_at_once(size: int) -> None:
    died: list[RankDiedError] = []

    def body(comm: AbstractCommunicator) -> None:
        note = torch.zeros(1)
        if comm.rank == 1:
            for rank in range(size):
                if rank != 1:
                    comm.recv(note, rank)  # it has begun to wait
            raise KeyError("boom")
        waits = comm.iallreduce(torch.zeros(1))
        comm.send(note, 1)
        try:
            waits.wait()
        except RankDiedError as error:
            died.append(error)
            raise

    with pytest.raises(KeyError, match="boom") as caught:
        run_threads(body, size=size, timeout_s=1e6)  # a wait that were not ended would outlast the test
    assert caught.value.__notes__ == [f"on rank 1 of {size} (threads)"]
    assert len(died) == size - 1
    for error in died:
        assert error.rank == 1
        assert "rank 1 died: KeyError: 'boom'" in str(error)


def test_a_rank_that_ends_early_is_named_to_those_who_wait_for_it() -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 0:
            comm.recv(torch.zeros(1), 1)

    with pytest.raises(RankDiedError, match=r"recv from rank 1 \(tag 0\) on rank 0 of 2: rank 1 ended without taking part"):
        run_threads(body, size=2)


def test_what_was_sent_before_the_sender_ended_still_arrives() -> None:
    threads: Queue[threading.Thread] = Queue()

    def body(comm: AbstractCommunicator) -> float:
        tensor = torch.tensor([float(comm.rank)])
        if comm.rank == 1:
            comm.isend(tensor, 0)
            threads.put(threading.current_thread())
        else:
            threads.get().join()
            comm.recv(tensor, 1)
        return tensor.item()

    assert run_threads(body, size=2) == [1.0, 1.0]


def test_abort_ends_all_threads_with_its_reason() -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 1:
            comm.abort("the disk is full")
        comm.barrier()

    with pytest.raises(RankDiedError, match="rank 1 of 3 aborted: the disk is full"):
        run_threads(body, size=3)


def test_a_world_has_at_least_one_rank() -> None:
    with pytest.raises(InputError, match="at least 1 rank, not 0"):
        run_threads(lambda _: None, size=0)
    with pytest.raises(InputError, match="timeout_s must be more than 0 seconds, not -1"):
        run_threads(lambda _: None, size=1, timeout_s=-1)
