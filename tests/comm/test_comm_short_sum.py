"""Sums through shared memory: short vectors, and loads and stores block by block."""

from collections.abc import Iterator

import pytest
import torch

from tatami.collective import build
from tatami.comm import AbstractCommunicator, Op, shared_sum
from tatami.comm.shared_sum import loads_and_stores
from tatami.comm.short_sum import ShortSum
from tatami.errors import CommError
from tatami.testing.worlds import World

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
            sums.room(size).copy_(vector(comm.rank, size, turn))
            found.append(sums.run(f"sum {size}").clone())
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
        sums.room(3).zero_()
        sums.run(label)
    sums.room(3).zero_()
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
