"""Who sums how much of the gradients: no processor is done later than with equal parts, and every unit is summed once."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.tiling.summing import summing_shares, transfer_rates

LINK = Link(bandwidth_bytes_per_s=100.0, latency_s=0.0)


def cluster_of(*copied: float) -> Cluster:
    processors = (
        Processor(name=f"p{index}", speed=1.0, host=f"h{index}", copy_bytes_per_s=c) for index, c in enumerate(copied)
    )
    return Cluster(processors=tuple(processors), network=LINK)


def test_a_link_and_a_core_carry_what_the_slower_of_them_does() -> None:
    assert transfer_rates(cluster_of(50.0, 200.0, 1e9)) == {"p0": 25.0, "p1": 100.0, "p2": 100.0}


@pytest.mark.parametrize("copied", [(float("inf"),) * 3, (1e9, 400.0, 300.0), (80.0, 96.0, 100.0)])
def test_processors_that_are_alike_sum_equal_parts(copied: tuple[float, ...]) -> None:
    """Where nothing was measured, where links are slower than all cores, and where the difference may be noise."""
    assert transfer_rates(cluster_of(*copied)) is None


def test_two_columns_send_all_they_have_to_each_other() -> None:
    assert summing_shares([1.0, 1.0], ["p0", "p1"], columns=2, rates={"p0": 1.0, "p1": 9.0}) is None


def test_one_that_hardly_copies_sums_nothing() -> None:
    """It sends what it has, and receives the sums: 1 of all units; the others, who sum a half each, 1.5 of them."""
    rates = {"p0": 1.0, "p1": 30.0, "p2": 30.0}
    assert summing_shares([1.0] * 3, list(rates), columns=3, rates=rates) == pytest.approx({"p0": 0.0, "p1": 0.5, "p2": 0.5})


heights = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(lambda own: [each / sum(own) for each in own])


@given(columns=st.lists(heights, min_size=3, max_size=6), data=st.data())
def test_shares_are_whole_and_no_processor_is_later_than_with_equal_ones(
    columns: list[list[float]], data: st.DataObject
) -> None:
    own = [height for column in columns for height in column]
    names = [f"p{index}" for index in range(len(own))]
    speed = st.floats(0.01, 100.0)
    rates = {name: data.draw(speed, label=name) for name in names}
    shares = summing_shares(own, names, columns=len(columns), rates=rates)
    assert shares is not None
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(height * shares[name] for name, height in zip(names, own, strict=True)) == pytest.approx(1.0)

    def slowest(of: dict[str, float]) -> float:
        passed = (height * (1 + (len(columns) - 2) * of[name]) / rates[name] for name, height in zip(names, own, strict=True))
        return max(passed)

    assert slowest(shares) <= slowest(dict.fromkeys(names, 1 / len(columns))) * (1 + 1e-9)
