"""Loads and stores block by block, by numpy and by torch, against one sum of everything."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tatami.collective import build
from tatami.comm import loads
from tatami.comm.loads import loads_and_stores
from tatami.comm.reduction import Op

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
    monkeypatch.setattr(loads, "BLOCK_BYTES", block_bytes)
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
    monkeypatch.setattr(loads, "BLOCK_BYTES", 32)
    vectors = {rank: torch.full((50,), 3.0 * rank, dtype=dtype) for rank in range(RANKS)}
    phase = build("shared", ranks=RANKS, size=50).phases[0]
    for rank in range(RANKS):
        mine = [step for step in phase.steps_of(rank, round=0) if step.issuer == rank]
        for act in loads_and_stores(mine, vectors, rank=rank, op=Op.SUM, divisor=RANKS):
            act()
    assert all(vector.tolist() == [3.0] * 50 for vector in vectors.values())


def test_nothing_to_do_is_no_action() -> None:
    assert loads_and_stores([], {0: torch.empty(0)}, rank=0, op=Op.SUM, divisor=None) == []
