"""Efficiency: by hand, its rounds in turn, and no figure above what can be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.errors import InputError
from tatami.report import Efficiency, EfficiencyRound, MethodResult, efficiency, run_table

times = st.floats(1e-3, 1e3)


def test_by_hand() -> None:
    """Alone 2 s and 6 s: 2/3 of the work in a second, so 1.5 s together would be perfect."""
    rounds = [EfficiencyRound(iteration_s=s, alone_s=(2.0, 6.0), compute_s=(1.5, 0.9)) for s in (1.5, 3.0, 2.0, 2.0, 2.5)]
    found = efficiency(rounds)
    assert found.gamma == pytest.approx(0.75)
    assert found.spread == pytest.approx((1.0 - 0.5) / 0.75)
    assert found.computing == pytest.approx((1.5 / 2 + 0.9 / 6) / (2.0 * (1 / 2 + 1 / 6)))
    assert (found.rounds, found.problem, found.cell) == (5, None, "75 % ±67 %")


@given(iteration_s=times, alone_s=st.lists(times, min_size=1, max_size=6))
def test_a_machine_that_grows_slower_for_all_changes_nothing(iteration_s: float, alone_s: list[float]) -> None:
    one = EfficiencyRound(iteration_s=iteration_s, alone_s=tuple(alone_s))
    slower = EfficiencyRound(iteration_s=3 * iteration_s, alone_s=tuple(3 * each for each in alone_s))
    assert slower.gamma == pytest.approx(one.gamma)


def test_what_cannot_be_is_not_published() -> None:
    found = efficiency([EfficiencyRound(iteration_s=1.0, alone_s=(1.7,))] * 5)
    assert found.gamma == pytest.approx(1.7)
    assert found.problem is not None
    assert "an efficiency of 1.70 cannot be" in found.problem
    assert found.cell == "-"
    assert run_table([MethodResult(method="even", iteration_s=1.0, samples_per_s=1.0, efficiency=found)]).rows[0][-1] == "-"
    assert efficiency([EfficiencyRound(iteration_s=1.0, alone_s=(1.01,))] * 5).problem is None


def test_few_rounds_are_no_measurement() -> None:
    found = efficiency([EfficiencyRound(iteration_s=2.0, alone_s=(1.0,))] * 4)
    assert (found.cell, found.problem) == ("-", "an efficiency needs at least 5 rounds, not 4")
    assert Efficiency(gamma=0.5, spread=0.0, computing=None, rounds=5).cell == "50 % ±0 %"
    with pytest.raises(InputError, match="needs rounds"):
        efficiency([])
    with pytest.raises(InputError, match="needs times > 0"):
        EfficiencyRound(iteration_s=0.0, alone_s=(1.0,))
    with pytest.raises(InputError, match="1 ranks computed and 2 worked alone"):
        EfficiencyRound(iteration_s=1.0, alone_s=(1.0, 1.0), compute_s=(1.0,))
