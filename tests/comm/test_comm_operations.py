"""Every operation, on every dtype and number of ranks, gives the values it must."""

import time

import pytest
import torch

from tatami.comm import AbstractCommunicator, Op
from tatami.comm.checked import DTYPES
from tatami.testing.worlds import World

UP_TO_SIX = pytest.mark.ranks(1, 2, 3, 4, 6)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def values(rank: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    """Small whole numbers, exact in every dtype, also when a few ranks' are added; others on every rank."""
    return ((torch.arange(elements) * (rank + 3) + rank) % 7).to(dtype)


def uneven(size: int) -> list[int]:
    """Counts of which the second is zero: 3, 0, 5, 6, ..."""
    return [0 if rank == 1 else rank + 3 for rank in range(size)]


def total(size: int, elements: int, dtype: torch.dtype) -> torch.Tensor:
    given = [values(rank, elements, dtype) for rank in range(size)]
    if dtype == torch.bool:
        return torch.stack(given).any(0)
    return torch.stack(given).sum(0).to(dtype)


@UP_TO_SIX
@every_dtype
def test_messages_go_round_a_ring(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    out = torch.zeros(2, 5, dtype=dtype)
    receiving = comm.irecv(out, before, tag=4)
    sending = comm.isend(values(comm.rank, 10, dtype).view(2, 5), after, tag=4)
    sending.wait()
    receiving.wait()
    assert receiving.test()
    assert sending.test()
    assert torch.equal(out, values(before, 10, dtype).view(2, 5))


@pytest.mark.ranks(2, 3)
def test_tags_keep_messages_apart_and_equal_tags_keep_their_order(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 0:
            requests = [comm.isend(torch.tensor([float(tag), number]), 1, tag=tag) for tag in (5, 6) for number in (0.0, 1.0)]
            for request in requests:
                request.wait()
            comm.send_object("long" * 1000, 1, tag=7)
            comm.send_object("last", 1, tag=5)
        elif comm.rank == 1:
            for tag, number in ((6, 0.0), (5, 0.0)):
                out = torch.empty(2)
                comm.recv(out, 0, tag=tag)
                assert out.tolist() == [tag, number]
            for expected in (5, 6):
                out = torch.empty(2)
                assert comm.next_tag(0) == expected  # and again, as the message stays
                comm.recv(out, 0, tag=comm.next_tag(0))
                assert out.tolist() == [expected, 1.0]
            for expected, value in ((7, "long" * 1000), (5, "last")):
                assert comm.next_tag(0) == expected
                assert comm.recv_object(0, tag=expected) == value

    def often(comm: AbstractCommunicator) -> None:
        for _ in range(10):  # whoever comes first
            body(comm)

    world(often)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("elements", [0, 1, 1_000_000])
def test_blocking_send_and_recv(comm: AbstractCommunicator, elements: int) -> None:
    if comm.rank == 0:
        comm.send(torch.arange(elements, dtype=torch.float32), 1)
    else:
        out = torch.full((elements,), -1.0)
        comm.recv(out, 0)
        assert torch.equal(out, torch.arange(elements, dtype=torch.float32))


@UP_TO_SIX
@every_dtype
def test_bcast(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    root = comm.size - 1
    tensor = values(comm.rank, 7, dtype)
    comm.bcast(tensor, root=root)
    assert torch.equal(tensor, values(root, 7, dtype))


@UP_TO_SIX
@every_dtype
@pytest.mark.parametrize("is_uneven", [False, True])
def test_gather_allgather_and_scatter(comm: AbstractCommunicator, dtype: torch.dtype, is_uneven: bool) -> None:
    root = comm.size // 2
    counts = uneven(comm.size) if is_uneven else [4] * comm.size
    asked = counts if is_uneven else None
    mine = values(comm.rank, counts[comm.rank], dtype)
    whole = torch.cat([values(rank, counts[rank], dtype) for rank in range(comm.size)])

    gathered = torch.zeros_like(whole)
    comm.gather(mine, gathered if comm.rank == root else None, root=root, counts=asked)
    if comm.rank == root:
        assert torch.equal(gathered, whole)

    everywhere = torch.zeros_like(whole)
    comm.allgather(mine, everywhere, counts=asked)
    assert torch.equal(everywhere, whole)

    part = torch.zeros_like(mine)
    comm.scatter(whole if comm.rank == root else None, part, root=root, counts=asked)
    assert torch.equal(part, mine)


@UP_TO_SIX
@every_dtype
@pytest.mark.parametrize("is_uneven", [False, True])
def test_alltoall(comm: AbstractCommunicator, dtype: torch.dtype, is_uneven: bool) -> None:
    def count(sender: int, receiver: int) -> int:
        return (sender + 2 * receiver) % 3 if is_uneven else 2

    ranks = range(comm.size)
    sends, recvs = [count(comm.rank, peer) for peer in ranks], [count(peer, comm.rank) for peer in ranks]
    out = torch.zeros(sum(recvs), dtype=dtype)
    given = torch.cat([values(comm.rank * 10 + peer, sends[peer], dtype) for peer in ranks])
    if is_uneven:
        comm.alltoall(given, out, send_counts=sends, recv_counts=recvs)
    else:
        comm.alltoall(given, out)
    assert torch.equal(out, torch.cat([values(peer * 10 + comm.rank, recvs[peer], dtype) for peer in ranks]))


@UP_TO_SIX
@every_dtype
def test_sums(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    tensor = values(comm.rank, 12, dtype).view(3, 4)
    comm.allreduce(tensor)
    assert torch.equal(tensor, total(comm.size, 12, dtype).view(3, 4))

    root = comm.size - 1
    tensor = values(comm.rank, 12, dtype)
    comm.reduce(tensor, root=root)
    assert torch.equal(tensor, total(comm.size, 12, dtype) if comm.rank == root else values(comm.rank, 12, dtype))

    counts = uneven(comm.size)
    out = torch.zeros(counts[comm.rank], dtype=dtype)
    comm.reduce_scatter(values(comm.rank, sum(counts), dtype), out, counts=counts)
    assert torch.equal(out, torch.split(total(comm.size, sum(counts), dtype), counts)[comm.rank])

    even = torch.zeros(2, dtype=dtype)
    comm.reduce_scatter(values(comm.rank, 2 * comm.size, dtype), even)
    assert torch.equal(even, total(comm.size, 2 * comm.size, dtype)[2 * comm.rank : 2 * comm.rank + 2])


@every_dtype
def test_largest_and_smallest(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    given = torch.stack([values(rank, 9, dtype) for rank in range(comm.size)])
    for op, expected in ((Op.MAX, given.amax(0)), (Op.MIN, given.amin(0))):
        tensor = given[comm.rank].clone()
        comm.allreduce(tensor, op=op)
        assert torch.equal(tensor, expected)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("elements", [1, 1000, 60_000])
def test_an_allreduce_gives_every_rank_the_same_bits(world: World, dtype: torch.dtype, elements: int) -> None:
    def body(comm: AbstractCommunicator) -> bytes:
        generator = torch.Generator().manual_seed(comm.rank)
        tensor = torch.randn(elements, generator=generator, dtype=torch.float64).to(dtype)
        comm.allreduce(tensor)
        exact = sum(
            torch.randn(elements, generator=torch.Generator().manual_seed(rank), dtype=torch.float64).to(dtype).double()
            for rank in range(comm.size)
        )
        tolerance = {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 1e-2}[dtype]
        torch.testing.assert_close(tensor.double(), exact, rtol=tolerance, atol=4 * tolerance)
        return bytes(tensor.view(torch.uint8).tolist())

    assert len(set(world(body))) == 1


def test_bfloat16_sums_are_taken_in_float32(world: World) -> None:
    def body(comm: AbstractCommunicator) -> float:
        # In bfloat16, 256 + 1 is 256 again; in float32 the ones add up first or last to the same.
        tensor = torch.tensor([256.0 if comm.rank == 0 else 1.0], dtype=torch.bfloat16)
        comm.allreduce(tensor)
        return tensor.item()

    expected = torch.tensor(256.0 + world.size - 1).to(torch.bfloat16).item()
    assert world(body) == [expected] * world.size


def test_several_allreduces_at_once(comm: AbstractCommunicator) -> None:
    tensors = [torch.full((5 + number,), float(comm.rank + number)) for number in range(4)]
    requests = [comm.iallreduce(tensor) for tensor in tensors]
    for request in reversed(requests):
        request.wait()
    ranks = sum(range(comm.size))
    for number, tensor in enumerate(tensors):
        assert tensor.tolist() == [ranks + comm.size * number] * (5 + number)


@pytest.mark.parametrize("elements", [8, 1000, 60_000])
def test_what_is_under_way_and_dropped_writes_nowhere_else(comm: AbstractCommunicator, elements: int) -> None:
    """As where an error ends the step that has begun a sum: its memory must not be handed out again too early."""
    for _ in range(40):
        comm.iallreduce(torch.ones(elements))  # dropped at once
        others = torch.zeros(elements)
        comm.barrier()
        assert not others.any()


def test_tensors_that_are_not_contiguous(comm: AbstractCommunicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.bool):
        given = values(comm.rank, 24, dtype).view(4, 6)
        columns = given.clone()[:, ::2]
        comm.allreduce(columns)
        assert torch.equal(columns, total(comm.size, 24, dtype).view(4, 6)[:, ::2])

        turned = given.clone().t()
        comm.bcast(turned)
        assert torch.equal(turned, values(0, 24, dtype).view(4, 6).t())

        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        out = torch.zeros(4, 6, dtype=dtype)
        receiving = comm.irecv(out[:, 1::2], before)
        comm.isend(given[:, 1::2], after).wait()
        receiving.wait()
        assert torch.equal(out[:, 1::2], values(before, 24, dtype).view(4, 6)[:, 1::2])
        assert not out[:, ::2].any()

        everything = torch.zeros(6, 4 * comm.size, dtype=dtype).t()
        comm.allgather(given, everything)
        assert torch.equal(everything, torch.cat([values(rank, 24, dtype).view(4, 6) for rank in range(comm.size)]))


def test_tensors_without_elements(comm: AbstractCommunicator) -> None:
    for shape in ((0,), (3, 0)):
        nothing = torch.empty(shape)
        comm.allreduce(nothing)
        comm.reduce(nothing)
        comm.bcast(nothing)
        comm.allgather(nothing, torch.empty(0))
        comm.alltoall(nothing, torch.empty(0))
        comm.reduce_scatter(nothing, torch.empty(0))
        assert nothing.shape == shape


def test_parameters_that_require_gradients_are_moved_in_place(comm: AbstractCommunicator) -> None:
    parameter = torch.nn.Parameter(torch.full((3, 2), float(comm.rank)))
    comm.bcast(parameter, root=comm.size - 1)
    assert parameter.tolist() == [[comm.size - 1.0] * 2] * 3
    half = torch.nn.Parameter(torch.ones(3, dtype=torch.bfloat16))
    comm.allreduce(half)
    assert half.tolist() == [comm.size] * 3


@UP_TO_SIX
def test_objects(comm: AbstractCommunicator) -> None:
    mine = {"rank": comm.rank, "text": "x" * 100 * comm.rank}
    everyone = [{"rank": rank, "text": "x" * 100 * rank} for rank in range(comm.size)]
    assert comm.allgather_object(mine) == everyone
    root = comm.size - 1
    assert comm.gather_object(mine, root=root) == (everyone if comm.rank == root else None)
    assert comm.bcast_object(mine if comm.rank == root else None, root=root) == everyone[root]
    if comm.size > 1 and comm.rank == 0:
        comm.send_object([1, None, "two"], root, tag=9)
    if comm.size > 1 and comm.rank == root:
        assert comm.recv_object(0, tag=9) == [1, None, "two"]


def test_messages_on_a_duplicate_do_not_meet_those_of_the_original(comm: AbstractCommunicator) -> None:
    other = comm.duplicate()
    assert type(other) is type(comm)
    assert (other.rank, other.size, other.hosts) == (comm.rank, comm.size, comm.hosts)
    if comm.size > 1:
        before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
        here, there = torch.zeros(1), torch.zeros(1)
        # The receives are posted in the order opposite to that of the sends: a tag alone would mix them up.
        requests = [other.irecv(there, before), comm.irecv(here, before)]
        requests += [comm.isend(torch.tensor([1.0]), after), other.isend(torch.tensor([2.0]), after)]
        for request in requests:
            request.wait()
        assert (here.item(), there.item()) == (1.0, 2.0)
    other.close()
    comm.barrier()  # the original is still open


@UP_TO_SIX
def test_split_orders_by_key_and_leaves_out_ranks_without_a_color(comm: AbstractCommunicator) -> None:
    part = comm.split(comm.rank % 2, key=-comm.rank)
    assert part is not None
    members = sorted(range(comm.rank % 2, comm.size, 2), reverse=True)
    assert (part.size, part.rank) == (len(members), members.index(comm.rank))
    assert part.allgather_object(comm.rank) == members

    tensor = torch.tensor([comm.rank])
    part.allreduce(tensor)
    assert tensor.item() == sum(members)

    first = comm.split(None if comm.rank > 0 else 7)
    assert (first is not None) == (comm.rank == 0)
    if first is not None:
        assert first.size == 1
        first.close()
    part.close()


def test_ranks_of_one_host_know_it(comm: AbstractCommunicator) -> None:
    assert len(comm.hosts) == comm.size
    assert len(set(comm.hosts)) == 1
    assert (comm.local_rank, comm.local_size) == (comm.rank, comm.size)
    part = comm.split(comm.rank % 2)
    assert part is not None
    assert part.hosts == comm.hosts[: part.size]
    part.close()


@UP_TO_SIX
def test_nobody_passes_a_barrier_before_the_last_has_come(world: World) -> None:
    def body(comm: AbstractCommunicator) -> tuple[float, float]:
        last = comm.size - 1
        if comm.rank == last:  # when all others are about to wait
            for rank in range(last):
                comm.recv(torch.zeros(1), rank)
        else:
            comm.send(torch.zeros(1), last)
        came_s = time.monotonic()
        comm.barrier()
        return came_s, time.monotonic()

    times = world(body)
    assert max(came_s for came_s, _ in times) <= min(left_s for _, left_s in times)
