"""How often ranks talk, and how many bytes: exchanges for each pair and phase, and half the bytes where a wire is named."""

import functools
from collections import Counter
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from drawing import mlp
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ClosedError, InputError, PlanError
from tatami.runtime.gradient_exchange import GradientExchange
from tatami.runtime.rows import ONE_EACH, Rows, UnitRuns
from tatami.runtime.vector_sum import VectorSum
from tatami.testing.worlds import World
from tatami.tiling import AlphaBetaCost, Layout, Tiling, time_bound_s, traffic_of, volume_bytes
from tatami.tiling.traffic import size_digits, sizes_of, sum_algorithm
from tatami.train import Trainer, move, tile, whole_state_dict
from tatami.workload import WIRES, Workload, net_workload
from tiled_rig import Placed, assert_close, gradients, hosts_of, simple_layout, some_layouts, tiled, whole_gradients

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
@pytest.mark.usefixtures("_sums_by_messages")
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
        torch.autograd.backward(model(model.local(torch.ones(6, 4))).mean())
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
@pytest.mark.parametrize("byte_s", [0.0, 1e-7, 1e-3])
def test_sums_are_those_of_all_ranks_and_the_same_bits_on_each(
    comm: AbstractCommunicator, size: int, dtype: torch.dtype, byte_s: float
) -> None:
    """Also over slow links, over which they travel in pieces."""
    comm = Placed(comm, hosts=hosts_of(comm.size, "apart")) if byte_s else comm
    replica = VectorSum(comm, byte_s=byte_s)
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


ROUNDING = {"bfloat16": 2.0**-8, "float16": 2.0**-11}
"""Half a unit in the last place, relative."""
on_ranks = pytest.mark.mpi


def drawn(rank: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(rank))


@on_ranks
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("size", [7, 20_000])
def test_a_replica_sums_what_was_rounded(comm: AbstractCommunicator, wire: str, size: int) -> None:
    """Rounded, added up in float32, rounded: to the bit, and so on every rank. What is exact, or a library sums, is not."""
    own = drawn(comm.rank, size)
    replica = VectorSum(Placed(comm, hosts=hosts_of(comm.size, "apart")), wire=wire)
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[wire]
    for exact in (False, True):
        summed = own.clone()
        replica.sum_(summed, exact=exact)
        expected = torch.zeros(size)
        for rank in range(comm.size):
            expected += drawn(rank, size) if exact else drawn(rank, size).to(half).float()
        assert torch.equal(summed, expected if exact else expected.to(half).float())
    if comm.size > 2:
        summed = own.clone()
        VectorSum(Placed(comm, hosts=hosts_of(comm.size, "one")), wire=wire).sum_(summed)
        assert torch.allclose(summed, sum((drawn(rank, size) for rank in range(comm.size)), torch.zeros(size)), atol=1e-5)


@on_ranks
@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wire", WIRES)
@pytest.mark.parametrize("elements", [3, 20_000])
def test_owners_end_with_the_same_bits(comm: AbstractCommunicator, wire: str, elements: int) -> None:
    """Replicas of one rank (C = 2: swapped; more: reduced and given back); replicated gradients that ride, or are too large."""
    names = [f"p{rank}" for rank in range(comm.size)]
    tilings: list[Tiling] = [simple_layout(*([rank] for rank in range(comm.size))).cut(samples=8, units=9)]
    placed = Placed(comm, hosts=hosts_of(comm.size, "apart"))
    exchange = GradientExchange(placed, tilings=tilings, names=names, wire=wire)
    rows = drawn(comm.rank, 9, 5)
    told = torch.zeros(comm.size)
    told[comm.rank] = 200.0 + comm.rank
    replicated, heard = exchange.sum([[Rows(rows, ONE_EACH)]], [drawn(comm.rank, elements), told])
    assert heard.tolist() == [200.0 + rank for rank in range(comm.size)]
    for summed, shape in ((rows, (9, 5)), (replicated, (elements,))):
        assert summed.dtype is torch.float32
        parts = [drawn(rank, *shape) for rank in range(comm.size)]
        bound = sum(part.abs() for part in parts) * 2 * ROUNDING[wire] * 1.01 + 1e-6
        assert bool(((summed - sum(parts)).abs() <= bound).all())
        assert all(torch.equal(summed, other) for other in comm.allgather_object(summed))


@on_ranks
@pytest.mark.ranks(1, 2, 3, 4)
def test_gradients_are_about_those_of_the_plain_run(world: World) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5), nn.LayerNorm(5), nn.Linear(5, 4))
    x = drawn(0, 24, 6)
    torch.autograd.backward(plain(x).square().mean())
    expected = gradients(plain)

    def body(comm: AbstractCommunicator) -> None:
        for layout in some_layouts(comm.size):
            placed = Placed(comm, hosts=hosts_of(comm.size, "apart"))
            model = tiled(plain, placed, layout=layout, batch_size=24, wire="bfloat16")
            torch.autograd.backward(model(model.local(x)).square().mean())
            for name, grad in whole_gradients(model).items():
                wanted = expected[name]
                assert grad is not None
                assert wanted is not None
                assert (grad - wanted).abs().max() <= 0.03 * wanted.abs().max(), name
            last = comm.allgather_object(model.module.get_parameter("4.weight").grad)
            assert all(torch.equal(each, last[0]) for each in last)

    world(body)


@on_ranks
@pytest.mark.ranks(2, 3)
def test_the_loss_and_the_number_of_samples_are_exact(world: World) -> None:
    """bfloat16 cannot tell 301 from 302; the loss is the one of the run that rounds nothing, where nothing was rounded yet."""
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5))
    x, y = drawn(0, 301, 6), drawn(1, 301, 5)

    def body(comm: AbstractCommunicator) -> None:
        row = simple_layout(*([rank] for rank in range(comm.size)))
        placed = Placed(comm, hosts=hosts_of(comm.size, "apart"))
        losses = []
        for wire in (None, "bfloat16"):
            model = tiled(plain, placed, layout=row, batch_size=301, wire=wire)
            trainer = Trainer(model, optimizer=functools.partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss())
            losses.append(trainer.fit((x, y), batch_size=301, iterations=4).losses)
        assert losses[0][0] == losses[1][0]
        assert losses[0][2] == pytest.approx(losses[1][2], rel=1e-3)
        last = comm.size - 1
        with pytest.raises(InputError, match=rf"rank {last} has 302 samples, rank 0 has 301"):  # in the 5th pass, by what rides
            torch.autograd.backward(model(model.local(drawn(0, 301 + (comm.rank == last), 6))).square().mean())

    world(body)


@on_ranks
@pytest.mark.ranks(2, 3)
def test_gradients_of_frozen_parameters_do_not_travel(world: World) -> None:
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 5), nn.Linear(5, 4))

    def body(comm: AbstractCommunicator) -> None:
        row = simple_layout(*([rank] for rank in range(comm.size)))
        sent = []
        for frozen in ((), (0,), (0, 3)):
            for index in range(4):
                built[index].requires_grad_(index not in frozen)
            model = tiled(built, Placed(comm, hosts=hosts_of(comm.size, "apart")), layout=row, batch_size=6)
            assert isinstance(model.comm, Placed)
            model.comm.calls.clear()
            torch.autograd.backward(model(model.local(drawn(0, 6, 6))).square().mean())
            sent.append(sum(comm.allgather_object(model.comm.size_bytes("isend"))))
        # Of 12 units with 7 weights each; then of 24 more replicated weights. Each tensor that is left out is a number less.
        told = 2 * (comm.size - 1) * 2
        assert sent[0] - sent[1] == 4 * (2 * (comm.size - 1) * 12 * 7 + told)
        assert sent[1] - sent[2] == 4 * (2 * (comm.size - 1) * 24 + told)

    world(body)


@given(samples=st.lists(st.integers(0, 2**40 - 1)), dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
def test_numbers_of_samples_survive_every_wire(samples: list[int], dtype: torch.dtype) -> None:
    digits = [digit for each in samples for digit in size_digits(each)]
    assert sizes_of(torch.tensor(digits, dtype=dtype).tolist()) == samples


def test_plans_know_of_the_wire() -> None:
    """Half the bytes in what is described, in its price and in what no tiling can beat."""
    exact = net_workload("20-40-20-40-8", samples=4096)
    halved = replace(exact, wire="bfloat16")
    layout = simple_layout([0, 1], [2, 3])
    cluster = Cluster.from_speeds([1.0] * 4)
    names = [processor.name for processor in cluster.processors]

    def facts(workload: Workload) -> tuple[float, float, float, float]:
        tilings = layout.cut_blocks(workload)
        traffic = traffic_of(tilings, workload=workload, names=names, hosts={name: name for name in names})
        units = sum(each.element_bytes * (each.schedule.size - each.riders) for each in traffic.sums)
        cost = AlphaBetaCost().price(layout, cluster=cluster, workload=workload)
        bound_s = time_bound_s(cluster, workload=workload, cost=AlphaBetaCost())
        return units, volume_bytes(layout, workload=workload, cluster=cluster), cost.tensor_parallel + cost.gradients, bound_s

    one, other = facts(exact), facts(halved)
    assert other[:2] == (one[0] / 2, one[1] / 2)
    assert 0.4 * one[2] < other[2] < 0.7 * one[2]
    assert other[3] <= one[3]


def test_other_wires_are_refused(comm: AbstractCommunicator) -> None:
    with pytest.raises(PlanError, match=r"wire must be bfloat16 or float16, or None: .* not 'int8'"):
        Workload(samples=3, wire="int8")
    with pytest.raises(PlanError, match="not 'float8'"):
        tile(nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1)), comm, batch_size=9, wire="float8")
