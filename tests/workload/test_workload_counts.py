"""Table 1 of the paper, and the flop and bytes that follow from it."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.errors import PlanError
from tatami.workload import Counts, Pair, Workload, backward_counts, forward_counts, iteration_counts

NETTALK = Pair(inputs=203, units=80, outputs=26)


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
    pair = Pair(inputs=3, units=4, outputs=2)
    assert forward_counts(pair, units=2, samples=5) == Counts(add=30, multiply=50, sigmoid=20)
    assert backward_counts(pair, units=2, samples=5) == Counts(add=70, multiply=100)
    assert iteration_counts(pair, units=2, samples=5).flop == 30 + 50 + 70 + 100 + 10 * 20


def test_a_bias_and_an_input_gradient_add_their_operations() -> None:
    plain = iteration_counts(Pair(inputs=3, units=4, outputs=2), units=2, samples=5)
    bias = iteration_counts(Pair(inputs=3, units=4, outputs=2, unit_bias=True), units=2, samples=5)
    below = iteration_counts(Pair(inputs=3, units=4, outputs=2, input_gradient=True), units=2, samples=5)
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


def test_pairs_add_up() -> None:
    first = Pair(inputs=10, units=8, outputs=6, unit_bias=True)
    second = Pair(inputs=6, units=4, outputs=3, input_gradient=True)
    workload = Workload(samples=100, pairs=(first, second), replicated_parameters=50, element_bytes=8)
    assert workload.vertical_elements == 100 * (6 + 3 + 6)
    assert workload.vertical_exchanges == 3
    assert workload.horizontal_elements == 17 * 8 + 9 * 4
    assert workload.horizontal_bytes == 8 * (17 * 8 + 9 * 4)
    assert workload.replicated_bytes == 400
    assert (workload.units, workload.narrowest) == (8, 4)
    assert workload.with_samples(7).samples == 7


@given(width=st.floats(0, 1), height=st.floats(0, 1), bias=st.booleans(), below=st.booleans())
def test_flop_are_linear_in_area_and_width(width: float, height: float, bias: bool, below: bool) -> None:
    pairs = (NETTALK, Pair(inputs=26, units=5, outputs=2, unit_bias=bias, input_gradient=below))
    workload = Workload(samples=64, pairs=pairs, replicated_flop_per_sample=11)
    linear = width * (workload.flop_per_area * height + workload.flop_per_width)
    assert workload.flop(width=width, height=height) == pytest.approx(linear, abs=1e-3)
    assert workload.flop_per_width > 0


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="units of a pair must be at least 1, not 0"):
        Pair(inputs=3, units=0, outputs=2)
    with pytest.raises(PlanError, match="at least 1 sample, not 0"):
        Workload.mlp(3, 4, 2, samples=0)
    with pytest.raises(PlanError, match="at least one pair"):
        Workload(samples=4, pairs=())
