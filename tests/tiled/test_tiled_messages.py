"""How often ranks talk.

One tensor-parallel exchange for each pair forward, one backward where the input needs a gradient, and at most one message of
the gradient sums from one neighbour to another in each of its phases."""

from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch

from drawing import mlp
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ClosedError
from tatami.runtime.gradient_exchange import GradientExchange
from tatami.runtime.rows import ONE_EACH, Rows, UnitRuns
from tatami.runtime.vector_sum import VectorSum
from tatami.testing.worlds import World
from tatami.tiling import Layout, Tiling
from tatami.tiling.traffic import sum_algorithm
from tatami.train import move, whole_state_dict
from tiled_rig import assert_close, gradients, simple_layout, some_layouts, tiled, whole_gradients

SECOND = UnitRuns(axis=1, runs=ONE_EACH.runs)


def count(comm: AbstractCommunicator, operation: str, into: list[Any]) -> None:
    """Note the peer and the tag of every call of `operation` of this communicator."""
    original = getattr(comm, operation)

    def noting(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        into.append((*args, kwargs.get("tag", 0)))
        return original(tensor, *args, **kwargs)

    setattr(comm, operation, noting)


two_pairs = partial(mlp, 4, 8, 4, 8, 2, dtype=torch.float32)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("input_gradient", [False, True])
def test_one_tensor_parallel_exchange_a_pair_and_direction(comm: AbstractCommunicator, input_gradient: bool) -> None:
    built = two_pairs()
    model = tiled(built, comm, layout=simple_layout(list(range(comm.size))), batch_size=6)
    replica = model._replica.comm
    assert replica is not None
    sums: list[Any] = []
    sends: list[Any] = []
    count(replica, "allreduce" if comm.size > 2 else "isend", sums)
    count(model.comm, "isend", sends)
    with torch.no_grad():
        model(model.local(torch.rand(6, 4)))
    evaluated = len(sums)
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0)).requires_grad_(input_gradient)
    loss = model(model.local(x)).sum()
    forward = len(sums) - evaluated
    torch.autograd.backward(loss)
    assert (evaluated, forward, len(sums) - forward - evaluated, len(sends)) == (2, 2, 2 if input_gradient else 1, 0)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("kind", ["row", "two replicas", "one left out"])
def test_at_most_one_message_of_gradients_to_each_neighbour_and_phase(world: World, kind: str) -> None:
    layout = {
        "row": simple_layout(*([rank] for rank in range(world.size))),
        "two replicas": simple_layout([0], list(range(1, world.size))),
        "one left out": simple_layout(*([rank] for rank in range(1, world.size))),
    }[kind]
    built = two_pairs()

    def body(comm: AbstractCommunicator) -> list[tuple[int, int]]:
        model = tiled(built, comm, layout=layout, batch_size=6)
        sends: list[tuple[int, int]] = []
        sums: list[Any] = []
        count(model.comm, "isend", sends)
        count(model.comm, "allreduce", sums)
        torch.autograd.backward(model(model.local(torch.ones(6, 4))).sum())
        assert max(Counter(sends).values(), default=0) <= 1
        assert sums == []  # the small replicated gradients ride along
        return sends

    sent = world(body)
    if kind == "two replicas" or (kind == "row" and world.size == 2):
        # Both replicas sum everything, in one phase: each owner hears once from each owner of its units in the other replica.
        assert all(len({tag for _, tag in sends}) == 1 for sends in sent)
        assert [len(sends) for sends in sent] == [world.size - 1] + [1] * (world.size - 1)
    elif kind == "row":
        # Reduce-scatter, then gather: every other rank once in each phase.
        assert [len(sends) for sends in sent] == [2 * (world.size - 1)] * world.size


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("elements", [3, 20_000])
def test_sums_of_whole_numbers_are_exact_however_large_the_replicated_part(comm: AbstractCommunicator, elements: int) -> None:
    names = [f"p{rank}" for rank in range(comm.size)]
    layout: Layout = simple_layout([0], list(range(1, comm.size)))
    tilings: list[Tiling] = [layout.cut(samples=5, units=units) for units in (7, 4)]
    exchange = GradientExchange(comm, tilings=tilings, names=names)
    pairs = []
    for tiling in tilings:
        tile = tiling.by_processor[names[comm.rank]]
        units = torch.arange(tile.units.start, tile.units.stop, dtype=torch.float32)
        # The gradient of unit u is u + 1 in replica 0 and 10 u in replica 1.
        own = units + 1 if tile.replica == 0 else 10 * units
        pairs.append([Rows(own[:, None].repeat(1, 3), ONE_EACH), Rows(own[None, :].repeat(2, 1), SECOND)])
    replica = tilings[0].by_processor[names[comm.rank]].replica
    given = [torch.full((elements,), 2.0 + replica, dtype=torch.float64), torch.full((1, 2), 1.0 + replica)]
    before = [tensor.clone() for tensor in given]
    sums = exchange.sum(pairs, given)
    for pair, tiling in zip(pairs, tilings, strict=True):
        tile = tiling.by_processor[names[comm.rank]]
        expected = 11 * torch.arange(tile.units.start, tile.units.stop, dtype=torch.float32) + 1
        assert torch.equal(pair[0].tensor, expected[:, None].repeat(1, 3))
        assert torch.equal(pair[1].tensor, expected[None, :].repeat(2, 1))
    assert torch.equal(sums[0], torch.full((elements,), 5.0, dtype=torch.float64))
    assert torch.equal(sums[1], torch.full((1, 2), 3.0))
    assert all(torch.equal(one, other) for one, other in zip(given, before, strict=True))


@pytest.mark.ranks(2, 3)
def test_half_precision_is_summed_in_single(comm: AbstractCommunicator) -> None:
    """1 + 2^-9 + 2^-9 + ... is lost in bfloat16 addition by addition, and kept in float32."""
    names = [f"p{rank}" for rank in range(comm.size)]
    tilings = [simple_layout(*([rank] for rank in range(comm.size))).cut(samples=5, units=2)]
    value = 1.0 if comm.rank == 0 else 2**-8
    rows = Rows(torch.full((2, 3), value, dtype=torch.bfloat16), ONE_EACH)
    exchange = GradientExchange(comm, tilings=tilings, names=names)
    (replicated,) = exchange.sum([[rows]], [torch.full((4,), value, dtype=torch.bfloat16)])
    expected = torch.tensor(1.0 + (comm.size - 1) * 2**-8).to(torch.bfloat16)
    assert rows.tensor.dtype is replicated.dtype is torch.bfloat16
    assert torch.equal(rows.tensor, expected.expand(2, 3))
    assert torch.equal(replicated, expected.expand(4))


def test_all_tags_of_the_users_communicator_are_the_users(comm: AbstractCommunicator) -> None:
    """Messages of the user's that are under way while the model trains, moves its rows and gathers its weights."""
    plain = two_pairs().double()
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.autograd.backward(plain(x).square().mean())
    expected = gradients(plain)
    built = two_pairs().double()
    model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=6)
    others = [rank for rank in range(comm.size) if rank != comm.rank]
    given = [(rank, tag, torch.tensor([100.0 * comm.rank + tag])) for rank in others for tag in range(16)]
    requests = [comm.isend(tensor, rank, tag=tag) for rank, tag, tensor in given]
    torch.autograd.backward(model(model.local(x)).square().mean())
    assert_close(whole_gradients(model), expected, what="gradients")
    move(model, some_layouts(comm.size)[0], optimizer=None)
    assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what="weights")
    for rank in others:
        for tag in reversed(range(16)):
            room = torch.empty(1)
            comm.recv(room, rank, tag=tag)
            assert room.item() == 100.0 * rank + tag
    for request in requests:
        request.wait()


def test_a_closed_model_sends_nothing_and_leaves_the_users_communicator_alone(comm: AbstractCommunicator) -> None:
    built = two_pairs()
    model = tiled(built, comm, layout=simple_layout(list(range(comm.size))), batch_size=6)
    x = torch.rand(6, 4, generator=torch.Generator().manual_seed(0))
    model.close()
    model.close()
    if comm.size > 1:
        with pytest.raises(ClosedError):
            model(model.local(x))
    with pytest.raises(ClosedError):
        whole_state_dict(model) if comm.size > 1 else model.comm.barrier()
    assert sum(comm.allgather_object(comm.rank)) == sum(range(comm.size))


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_all_ranks_and_the_same_bits_on_each(
    comm: AbstractCommunicator, size: int, dtype: torch.dtype
) -> None:
    replica = VectorSum(comm)
    for turn in range(3):  # rooms are used again
        vectors = [
            torch.rand(size, generator=torch.Generator().manual_seed(10 * turn + rank), dtype=dtype)
            for rank in range(comm.size)
        ]
        mine = vectors[comm.rank].clone()
        replica.sum_(mine)
        expected = vectors[0].clone()
        for vector in vectors[1:]:
            expected += vector
        if sum_algorithm(comm.hosts) == "native":  # a library adds up in an order of its own, here (0 + 1) + (2 + 3)
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(mine, expected, rtol=comm.size * ulp, atol=0)
        else:
            assert torch.equal(mine, expected)
        assert all(torch.equal(mine, other) for other in comm.allgather_object(mine))
