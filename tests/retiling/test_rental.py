"""Rent or buy: never more than twice the oracle's cost, and less where the past says what will come."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.retiling.rental import Rental, expected_rest

PRICE = st.floats(0.01, 100.0)
LOSS = st.one_of(st.floats(0.0, 0.1), st.floats(0.0, 5.0), st.floats(0.0, 500.0))
CHANGE = st.tuples(PRICE, st.lists(LOSS, min_size=1, max_size=40))


def play(changes: list[tuple[float, list[float]]], *, learn: bool = True) -> tuple[float, float]:
    """What the rule and an oracle pay for changes, each with its price and the loss of each of its iterations."""
    account = Rental()
    paid, oracle, lengths = 0.0, 0.0, list[int]()
    for price_s, losses in changes:
        for lasted, loss_s in enumerate(losses):
            if account.due(price_s, rate_s=loss_s, rest=expected_rest(lengths, lasted=lasted) if learn else None):
                account.moved(price_s, rate_s=loss_s)
                paid += price_s
                break
            account.lose(loss_s)
            paid += loss_s
        else:
            account.ended(price_s)
        lengths.append(len(losses))
        oracle += min(math.fsum(losses), price_s)
    return paid, oracle


@settings(max_examples=400, deadline=None)
@given(changes=st.lists(CHANGE, min_size=1, max_size=12))
def test_it_never_costs_more_than_twice_the_oracle(changes: list[tuple[float, list[float]]]) -> None:
    for learn in (False, True):
        paid, oracle = play(changes, learn=learn)
        assert paid <= 2 * oracle * (1 + 1e-9)


@settings(max_examples=200, deadline=None)
@given(change=CHANGE)
def test_a_single_change_costs_at_most_twice_its_own_oracle(change: tuple[float, list[float]]) -> None:
    paid, oracle = play([change])
    assert paid <= 2 * oracle * (1 + 1e-9)


def test_the_bound_is_reached_where_the_change_ends_as_soon_as_the_price_was_paid() -> None:
    paid, oracle = play([(10.0, [1.0] * 11)])
    assert (paid, oracle) == (20.0, 10.0)


def test_the_past_makes_it_better() -> None:
    """Changes that always end before they are worth a move: the bank pays for waiting; then long ones: it moves earlier."""
    short = [(10.0, [1.0] * 12)] * 20
    few = [(10.0, [1.0] * 3)] * 5
    assert play(few + short)[0] < play(few + short, learn=False)[0]
    long = [(10.0, [1.0] * 3)] * 5 + [(10.0, [1.0] * 300)] * 12
    assert play(long)[0] <= play(long, learn=False)[0]


def test_the_expected_rest() -> None:
    assert expected_rest([5, 6], lasted=0) is None
    assert expected_rest([5, 10, 20], lasted=0) == 10
    assert expected_rest([5, 10, 20], lasted=7) == pytest.approx(8)
    assert expected_rest([5, 10, 20], lasted=30) == 30
