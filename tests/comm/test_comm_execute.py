"""Every algorithm carried out on ranks, against a float64 sum.

Tolerances: a sum of P values in float32 is off by (P - 1) roundings of 2^-24 at most, relative to the sum of magnitudes; we
allow 2 P. bfloat16 and float16 are summed in float32 and rounded once: 2^-8 and 2^-11 of the result."""

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.collective import ALGORITHMS, Sync, build, simulate
from tatami.comm import AbstractCommunicator, AllReduce, AllReduceSpec, Op, Reduction, run_threads, shared_sum
from tatami.comm.execute import Executor
from tatami.comm.shared_sum import loads_and_stores
from tatami.comm.short_sum import ShortSum
from tatami.errors import CommError
from tatami.testing.worlds import World

ONE_SIDED = ("torus_put", "torus_accumulate", "accumulate")
EPSILON = {torch.float32: 2.0**-23, torch.float64: 2.0**-52, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-10}
LARGE = 2**20 + 3


def given_by(rank: int, size: int, *, dtype: torch.dtype = torch.float32, run: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * run + rank)
    if not dtype.is_floating_point:
        low = 0 if dtype == torch.uint8 else -50
        return torch.randint(low, 30, (size,), generator=generator).to(dtype)
    return torch.randn(size, generator=generator, dtype=torch.float64).to(dtype)


def wanted(ranks: int, size: int, *, op: str, dtype: torch.dtype = torch.float32, run: int = 0) -> torch.Tensor:
    everything = torch.stack([given_by(rank, size, dtype=dtype, run=run) for rank in range(ranks)]).double()
    if size == 0:
        return torch.empty(0, dtype=torch.float64)
    return {
        "sum": lambda: everything.sum(0),
        "mean": lambda: everything.mean(0),
        "max": lambda: everything.max(0).values,
        "min": lambda: everything.min(0).values,
    }[op]()


def assert_close(result: torch.Tensor, want: torch.Tensor, *, ranks: int) -> None:
    if not result.dtype.is_floating_point:
        assert torch.equal(result.double(), want)
        return
    epsilon = EPSILON[result.dtype]
    assert torch.allclose(result.double(), want, rtol=2 * epsilon, atol=2 * ranks * max(4.0 * epsilon, 0))


def check(
    comm: AbstractCommunicator, *, size: int, op: str = "sum", dtype: torch.dtype = torch.float32, hosts: Any = None, **how: Any
) -> None:
    with AllReduce(comm, AllReduceSpec(size=size, op=Reduction(op), dtype=dtype, **how), hosts=hosts) as reduce:
        for run in range(2):  # the second run finds what the first one left behind
            reduce.buffer.copy_(given_by(comm.rank, size, dtype=dtype, run=run))
            reduce.run()
            assert_close(reduce.buffer, wanted(comm.size, size, op=op, dtype=dtype, run=run), ranks=comm.size)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_sums_every_size(comm: AbstractCommunicator, algorithm: str) -> None:
    for size in (0, 1, 7, 1001):
        check(comm, size=size, algorithm=algorithm)


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.ranks(2, 3)
def test_sums_more_than_a_million(world: World, algorithm: str) -> None:
    world(lambda comm: check(comm, size=LARGE, algorithm=algorithm))


@pytest.mark.parametrize("algorithm", ALGORITHMS)
@pytest.mark.ranks(1, 2, 3, 4, 5, 6, 7, 8)
@pytest.mark.threads_only
def test_every_operation_on_one_to_eight_ranks(comm: AbstractCommunicator, algorithm: str) -> None:
    for op in ("sum", "mean", "max", "min"):
        check(comm, size=61, op=op, algorithm=algorithm)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8], ids=str
)
@pytest.mark.ranks(3)
def test_every_dtype(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    for algorithm in ALGORITHMS:
        for op in ("sum", "max"):
            check(comm, size=33, op=op, dtype=dtype, algorithm=algorithm)


@pytest.mark.parametrize("sync", [sync for sync in Sync if sync.one_sided], ids=lambda sync: sync.value)
@pytest.mark.parametrize("algorithm", ONE_SIDED)
@pytest.mark.ranks(2, 3, 4)
def test_every_synchronisation_of_puts(comm: AbstractCommunicator, algorithm: str, sync: Sync) -> None:
    for op in ("sum", "mean"):
        check(comm, size=1001, op=op, algorithm=algorithm, sync=sync)


@pytest.mark.parametrize("sync", [sync for sync in Sync if sync.one_sided], ids=lambda sync: sync.value)
@pytest.mark.parametrize("grid", [(1, 4), (2, 2), (4, 1)], ids=lambda grid: "x".join(map(str, grid)))
@pytest.mark.ranks(4)
def test_every_grid(comm: AbstractCommunicator, grid: tuple[int, int], sync: Sync) -> None:
    for algorithm in ("torus", "torus_native", *ONE_SIDED[:2]):
        check(comm, size=103, op="mean", algorithm=algorithm, grid=grid, sync=sync)


@pytest.mark.parametrize("across", ["native", "ring", "halving_doubling", "accumulate", "torus_put"])
@pytest.mark.parametrize("hosts", ["aabb", "abab", "aaab", "abcd"])
@pytest.mark.ranks(4)
def test_hierarchical_over_hosts(comm: AbstractCommunicator, hosts: str, across: str) -> None:
    for op in ("sum", "mean"):
        check(comm, size=103, op=op, algorithm="hierarchical", across=across, hosts=tuple(hosts))


@pytest.mark.parametrize("across", ["torus_put", "accumulate"])
@pytest.mark.parametrize("sync", [Sync.FENCE, Sync.LOCK], ids=lambda sync: sync.value)
@pytest.mark.ranks(4)
def test_fences_and_locks_across_hosts(world: World, across: str, sync: Sync) -> None:
    world(lambda comm: check(comm, size=103, algorithm="hierarchical", across=across, sync=sync, hosts=tuple("aabb")))


@pytest.mark.ranks(2, 3)
def test_not_a_number_passes_through(comm: AbstractCommunicator) -> None:
    for algorithm in ALGORITHMS:
        for op in ("sum", "mean", "max", "min"):
            if algorithm in ("torus_accumulate", "accumulate", "native", "torus_native") and op in ("max", "min"):
                continue  # MPI_MAX and MPI_MIN compare, and say nothing of NaN
            with AllReduce(comm, AllReduceSpec(size=20, op=Reduction(op), algorithm=algorithm)) as reduce:
                reduce.buffer.fill_(1.0)
                if comm.rank == 1:
                    reduce.buffer[7] = torch.nan
                reduce.run()
                assert reduce.buffer.isnan().nonzero().flatten().tolist() == [7], (algorithm, op)


@pytest.mark.ranks(3, 4)
def test_a_fixed_order_gives_the_same_bits_as_the_schedule_says(comm: AbstractCommunicator) -> None:
    vectors = [given_by(rank, 50).numpy() for rank in range(comm.size)]
    for algorithm in ALGORITHMS:
        if "native" in algorithm:
            continue
        with AllReduce(comm, AllReduceSpec(size=50, algorithm=algorithm, fixed_order=True)) as reduce:
            expected = simulate(reduce.schedule, vectors)[comm.rank]
            for _ in range(3):
                reduce.buffer.copy_(given_by(comm.rank, 50))
                reduce.run()
                assert np.array_equal(reduce.buffer.numpy(), expected), algorithm


@pytest.mark.ranks(3)
def test_halves_are_rounded_once(comm: AbstractCommunicator) -> None:
    """1 + 2^-8 + 2^-8 is lost to bfloat16 where every addition rounds, and 1 + 2^-7 where only the sum does."""
    for algorithm in ALGORITHMS:
        with AllReduce(comm, AllReduceSpec(size=9, dtype=torch.bfloat16, algorithm=algorithm)) as reduce:
            reduce.buffer.fill_(1.0 if comm.rank == 0 else 2.0**-8)
            reduce.run()
            assert reduce.buffer.tolist() == [1 + 2.0**-7] * 9, algorithm


@pytest.mark.ranks(3)
def test_floats_travel_as_halves_on_request(comm: AbstractCommunicator) -> None:
    for algorithm in ("ring", "shared", "torus_put", "native"):
        with AllReduce(comm, AllReduceSpec(size=40, algorithm=algorithm, wire=torch.bfloat16)) as reduce:
            assert reduce.buffer.dtype == torch.float32
            reduce.buffer.copy_(given_by(comm.rank, 40))
            reduce.run()
            assert torch.allclose(reduce.buffer.double(), wanted(3, 40, op="sum"), rtol=2.0**-6, atol=2.0**-5)


@settings(max_examples=60, deadline=None)
@given(
    algorithm=st.sampled_from(sorted(ALGORITHMS)),
    size=st.integers(0, 40),
    ranks=st.integers(1, 6),
    sync=st.sampled_from([sync for sync in Sync if sync.one_sided]),
    data=st.data(),
)
def test_ranks_do_what_the_simulation_does(algorithm: str, size: int, ranks: int, sync: Sync, data: st.DataObject) -> None:
    m = data.draw(st.sampled_from([m for m in range(1, ranks + 1) if ranks % m == 0]))
    hosts = None if algorithm == "shared" else data.draw(st.lists(st.sampled_from("abc"), min_size=ranks, max_size=ranks))
    schedule = build(algorithm, ranks=ranks, size=size, grid=(m, ranks // m), hosts=hosts, sync=sync)
    vectors = [np.arange(size) * (rank + 1) + rank for rank in range(ranks)]
    expected = simulate(schedule, vectors)

    def body(comm: AbstractCommunicator) -> list[int]:
        program = Executor(comm).prepare(schedule, dtype=torch.int64, reduction=Reduction.SUM)
        program.vector.copy_(torch.from_numpy(vectors[comm.rank]))
        program.run()
        return program.vector.tolist()

    for result, want in zip(run_threads(body, size=ranks), expected, strict=True):
        assert result == want.tolist()


@pytest.mark.ranks(3)
def test_a_schedule_changed_by_hand_runs(comm: AbstractCommunicator) -> None:
    for algorithm in ("ring", "accumulate", "shared", "torus_put"):
        schedule = build(algorithm, ranks=3, size=10).explicit()
        program = Executor(comm).prepare(schedule, dtype=torch.int64, reduction=Reduction.SUM)
        program.vector.fill_(comm.rank + 1)
        program.run()
        assert program.vector.tolist() == [6] * 10
        program.close()


SIZES = (1, 65, 9000, 65, 2)
"""One of them is larger than the first window."""


def vector(rank: int, size: int, turn: int) -> torch.Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(100 * rank + turn), dtype=torch.float64)


@pytest.mark.parametrize("by_messages", [False, True])
def test_sums_are_exact_and_the_same_bits_everywhere(world: World, by_messages: bool) -> None:
    def body(comm: AbstractCommunicator) -> list[torch.Tensor]:
        sums = ShortSum(comm)
        sums._shares &= not by_messages
        found = []
        for turn, size in enumerate(SIZES * 2):
            sums.room(size)[:] = vector(comm.rank, size, turn).numpy()
            found.append(torch.from_numpy(sums.run(f"sum {size}").copy()))
        sums.close()
        return found

    ran = world(body)
    for turn, size in enumerate(SIZES * 2):
        expected = torch.stack([vector(rank, size, turn) for rank in range(world.size)]).sum(0)
        torch.testing.assert_close(ran[0][turn], expected, rtol=1e-14, atol=1e-14)
        assert all(torch.equal(each[turn], ran[0][turn]) for each in ran)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("by_messages", [False, True])
def test_ranks_at_different_sums_are_refused_by_name(comm: AbstractCommunicator, by_messages: bool) -> None:
    sums = ShortSum(comm)
    sums._shares &= not by_messages
    for label in ("one", "two"):
        sums.room(3)[:] = 0.0
        sums.run(label)
    sums.room(3)[:] = 0.0
    with pytest.raises(CommError, match=r"has come to the sum of (one|two), and (rank [012]|another rank) to"):
        sums.run("one" if comm.rank else "two")


RANKS = 3


@pytest.fixture(params=[1, 2], ids=["numpy", "torch"])
def _threads(request: pytest.FixtureRequest) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(request.param)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("block_bytes", [32, 2**20], ids=["many-blocks", "one-block"])
@pytest.mark.parametrize("op", Op)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16, torch.int64], ids=str)
def test_every_part_is_reduced_and_stored(
    dtype: torch.dtype, op: Op, block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shared_sum, "BLOCK_BYTES", block_bytes)
    size = 200
    generator = torch.Generator().manual_seed(1)
    given = [torch.randint(-40, 40, (size,), generator=generator) for _ in range(RANKS)]  # whole numbers: exact in all dtypes
    vectors = {rank: values.clone().to(dtype) for rank, values in enumerate(given)}
    phase = build("shared", ranks=RANKS, size=size).phases[0]
    for rank in range(RANKS):
        mine = [step for step in phase.steps_of(rank, round=0) if step.issuer == rank]
        for act in loads_and_stores(mine, vectors, rank=rank, op=op, divisor=None):
            act()
    stacked = torch.stack(given)
    want = {Op.SUM: stacked.sum(0), Op.MAX: stacked.max(0).values, Op.MIN: stacked.min(0).values}[op]
    for vector in vectors.values():
        assert torch.equal(vector, want.to(dtype))


@pytest.mark.usefixtures("_threads")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_mean_is_divided_before_it_is_stored(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shared_sum, "BLOCK_BYTES", 32)
    vectors = {rank: torch.full((50,), 3.0 * rank, dtype=dtype) for rank in range(RANKS)}
    phase = build("shared", ranks=RANKS, size=50).phases[0]
    for rank in range(RANKS):
        mine = [step for step in phase.steps_of(rank, round=0) if step.issuer == rank]
        for act in loads_and_stores(mine, vectors, rank=rank, op=Op.SUM, divisor=RANKS):
            act()
    assert all(vector.tolist() == [3.0] * 50 for vector in vectors.values())


def test_nothing_to_do_is_no_action() -> None:
    assert loads_and_stores([], {0: torch.empty(0)}, rank=0, op=Op.SUM, divisor=None) == []
