"""Table 1 of the paper, and the flop and bytes that follow from it."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.errors import PlanError
from tatami.workload import (
    Block,
    Counts,
    PairSizes,
    Workload,
    backward_counts,
    forward_counts,
    iteration_counts,
    linear_pair,
)

NETTALK = PairSizes(inputs=203, outputs=26)


@pytest.mark.parametrize(("units", "samples"), [(80, 1024), (12, 300), (1, 1)])
def test_table_1_exactly(units: int, samples: int) -> None:
    n, l, area = 203, 26, units * samples  # noqa: E741 - the paper's letters
    assert forward_counts(NETTALK, units=units, samples=samples) == Counts(
        add=(n + l - 1) * area - l * samples, multiply=(n + l) * area, sigmoid=area + l * samples
    )
    assert backward_counts(NETTALK, units=units, samples=samples) == Counts(
        add=(n + l) * area + 2 * l * samples, multiply=(n + 2 * l + 1) * area + 2 * l * samples
    )


def test_the_numbers_of_one_small_tile() -> None:
    pair = PairSizes(inputs=3, outputs=2)
    assert forward_counts(pair, units=2, samples=5) == Counts(add=30, multiply=50, sigmoid=20)
    assert backward_counts(pair, units=2, samples=5) == Counts(add=70, multiply=100)
    assert iteration_counts(pair, units=2, samples=5).flop == 30 + 50 + 70 + 100 + 10 * 20


def test_a_bias_and_an_input_gradient_add_their_operations() -> None:
    plain = iteration_counts(PairSizes(inputs=3, outputs=2), units=2, samples=5)
    bias = iteration_counts(PairSizes(inputs=3, outputs=2, unit_bias=True), units=2, samples=5)
    below = iteration_counts(PairSizes(inputs=3, outputs=2, input_gradient=True), units=2, samples=5)
    assert bias == plain + Counts(add=2 * 10, multiply=0)
    assert below == plain + Counts(add=30, multiply=30)


def test_elements_and_bytes_of_the_paper() -> None:
    workload = Workload.mlp(203, 80, 26, samples=1024)
    assert workload.vertical_elements == 26 * 1024
    assert workload.horizontal_elements == 229 * 80
    assert workload.vertical_bytes == 4 * 26 * 1024
    assert workload.horizontal_bytes == 4 * 229 * 80
    assert workload.vertical_exchanges == 1
    assert workload.flop(width=1.0, height=1.0) == iteration_counts(NETTALK, units=80, samples=1024).flop


@pytest.mark.parametrize(("bias", "below"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_linear_pair_is_a_block_of_table_1(bias: bool, below: bool) -> None:
    block = linear_pair(7, 40, 3, unit_bias=bias, input_gradient=below, name="mlp")
    sizes = PairSizes(inputs=7, outputs=3, unit_bias=bias, input_gradient=below)
    assert (block.units, block.unit_parameters, block.parameters) == (40, 10 + bias, 40 * (10 + bias))
    assert (block.forward_elements, block.backward_elements) == (3, 7 * below)
    assert (block.summed_elements, block.sums) == (3 + 7 * below, 1 + below)
    for units, samples in ((40, 64), (13, 5)):
        assert block.flop(units=units, samples=samples) == iteration_counts(sizes, units=units, samples=samples).flop
    assert block.flop(units=0, samples=2) == 0, "a rank without units takes no part"
    forward = forward_counts(sizes, units=40, samples=64).flop
    assert block.forward_fraction * block.flop(units=40, samples=64) == pytest.approx(forward, rel=1e-12)
    assert (block.name, block.kind, block.unit) == ("mlp", "linear pair", "hidden unit")


def test_blocks_add_up() -> None:
    first = linear_pair(10, 8, 6, unit_bias=True)
    second = linear_pair(6, 4, 3, input_gradient=True)
    workload = Workload(samples=100, blocks=(first, second), replicated_parameters=50, element_bytes=8)
    assert workload.vertical_elements == 100 * (6 + 3 + 6)
    assert workload.vertical_exchanges == 3
    assert workload.horizontal_elements == 17 * 8 + 9 * 4
    assert workload.horizontal_bytes == 8 * (17 * 8 + 9 * 4)
    assert workload.replicated_bytes == 400
    assert workload.units == 8
    assert workload.with_samples(7).samples == 7


@given(width=st.floats(0, 1), height=st.floats(0, 1, exclude_min=True), bias=st.booleans(), below=st.booleans())
def test_flop_are_linear_in_area_and_width(width: float, height: float, bias: bool, below: bool) -> None:
    blocks = (linear_pair(203, 80, 26), linear_pair(26, 5, 2, unit_bias=bias, input_gradient=below))
    workload = Workload(samples=64, blocks=blocks, replicated_flop_per_sample=11)
    linear = width * (workload.flop_per_area * height + workload.flop_per_width)
    assert workload.flop(width=width, height=height) == pytest.approx(linear, abs=1e-3)
    assert workload.flop_per_width > 0


def test_the_work_of_a_tile_is_its_area_where_there_is_one_block() -> None:
    workload = Workload.mlp(203, 80, 26, samples=1024)
    assert workload.tile_work([17], samples=382) == 17 * 382
    assert workload.tile_work([0], samples=382) == 0
    heads = Block(units=6, unit_parameters=1, forward_elements=1, flop_per_unit=20.0)
    hidden = Block(units=60, unit_parameters=1, forward_elements=1, flop_per_unit=3.0)
    both = Workload(samples=10, blocks=(heads, hidden), replicated_flop_per_sample=30)
    # 300 flop of all units of both are 60 units of the block that has most: 5 flop each.
    assert both.tile_work([6, 60], samples=10) == pytest.approx(10 * (300 + 30) / 5)
    assert both.tile_work([0, 10], samples=4) == pytest.approx(4 * (30 + 30) / 5)
    assert Workload(samples=10, replicated_flop_per_sample=30).tile_work([], samples=4) == 4
    assert Workload(samples=10).tile_work([], samples=4) == 4


def test_alike_blocks_are_one_kind_whatever_their_names() -> None:
    one = linear_pair(8, 4, 8, name="h.0.mlp")
    other = replace(one, name="h.1.mlp", kind="something")
    different = replace(one, flop_per_unit=1.0)
    workload = Workload(samples=3, blocks=(one, other, different))
    assert workload.kinds == ((one, 2), (different, 1))
    assert [section.units for section in workload.sections] == [4, 4]
    whole = sum(section.flop(section.units) for section in workload.sections)
    assert 3 * whole == pytest.approx(workload.flop(width=1.0, height=1.0))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="units of a linear pair must be at least 1, not 0"):
        linear_pair(3, 0, 2)
    with pytest.raises(PlanError, match="at least 1 sample, not 0"):
        Workload.mlp(3, 4, 2, samples=0)
    heads = Block(units=6, unit_parameters=8, forward_elements=4, flop_per_unit=100.0, name="attention")
    with pytest.raises(PlanError, match="block 'attention' must have at least 1 unit, not 0"):
        replace(heads, units=0)
    for name in ("flop_per_unit", "flop_per_sample", "forward_elements", "unit_activation_bytes"):
        for value in (-1, float("nan"), float("inf")):
            with pytest.raises(PlanError, match=f"{name} of block 'attention' must be a finite number >= 0, not {value}"):
                replace(heads, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"forward_fraction of block 'attention' must be a share from 0 to 1, not 1\.5"):
        replace(heads, forward_fraction=1.5)
