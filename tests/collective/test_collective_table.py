"""Tuning tables: what they choose, what makes them stale, and what is no table."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.collective import Fingerprint, SizeTimings, TuningTable
from tatami.errors import InputError

HERE = Fingerprint(
    hosts=("node1", "node2"), ranks_per_host=(2, 2), cores=(4, 4), cpus=("A", "B"), library="MPICH 5.0", tatami="0.1.0"
)
TABLE = TuningTable(
    fingerprint=HERE,
    timings=(
        SizeTimings(size_bytes=1024, seconds={"native": 1e-6, "ring": 4e-6}),
        SizeTimings(size_bytes=4096, seconds={"native": 2e-6, "ring": 4e-6, "shared": 3e-6}),
        SizeTimings(size_bytes=1024**2, seconds={"native": 1e-3, "ring": 5e-4, "shared": 6e-4}),
    ),
)
ALL = ("native", "ring", "shared")


def test_the_fastest_of_a_measured_size() -> None:
    assert TABLE.choose(1024, among=ALL) == "native"
    assert TABLE.choose(4096, among=ALL) == "native"
    assert TABLE.choose(1024**2, among=ALL) == "ring"
    assert TABLE.choose(1024**2, among=("native", "shared")) == "shared"
    assert TABLE.choose(1024**2, among=("torus",)) is None
    assert TABLE.choose(1024**2, among=()) is None


def test_beyond_the_ends_the_nearest_size_counts() -> None:
    assert TABLE.choose(1, among=("native", "ring")) == "native"
    assert TABLE.choose(2**40, among=ALL) == "ring"


def test_between_two_sizes_times_are_interpolated_on_logarithms() -> None:
    # native rises by 500 over a factor 256, shared by 200: they meet at 3e-6 s / 2e-6 s = (500 / 200) ** share.
    share = 0.4425
    meeting_bytes = 4096 * 256**share
    assert TABLE.choose(int(meeting_bytes * 0.97), among=("native", "shared")) == "native"
    assert TABLE.choose(int(meeting_bytes * 1.03), among=("native", "shared")) == "shared"


@given(st.integers(1, 2**34), st.sets(st.sampled_from(ALL), min_size=1))
def test_it_chooses_among_what_it_may(size_bytes: int, among: set[str]) -> None:
    assert TABLE.choose(size_bytes, among=sorted(among)) in among


def test_json_both_ways() -> None:
    assert TuningTable.from_json(TABLE.to_json()) == TABLE


def test_what_changed_is_told() -> None:
    now = replace(HERE, library="Open MPI 5", cores=(4, 8))
    assert HERE.differences(now) == ["cores: 4, 4, now 4, 8", "library: MPICH 5.0, now Open MPI 5"]
    assert HERE.differences(HERE) == []


def test_clusters_of_other_hosts_or_ranks_have_other_keys() -> None:
    assert HERE.key == replace(HERE, tatami="9", cpus=("C", "C")).key
    assert HERE.key != replace(HERE, ranks_per_host=(2, 1)).key
    assert HERE.key != replace(HERE, hosts=("node1", "node3")).key


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": 2}, "format 2; this version reads 1"),
        ({"fingerprint": {}}, "KeyError: 'hosts'"),
        ({"timings": [{"size_bytes": 1024, "seconds": {"ring": -1.0}}]}, "finite number > 0, not -1.0"),
        ({"timings": [{"size_bytes": 1024, "seconds": {"ring": "fast"}}]}, "not 'fast'"),
        ({"timings": [{"size_bytes": 0, "seconds": {}}]}, "must be positive and rise"),
        ({"timings": 3}, "TypeError"),
    ],
)
def test_what_is_no_table_is_refused(change: dict[str, object], says: str) -> None:
    record = {**json.loads(TABLE.to_json()), **change}
    with pytest.raises(InputError, match=says):
        TuningTable.from_json(json.dumps(record))


def test_a_cut_file_is_refused() -> None:
    with pytest.raises(InputError, match="not a tuning table: JSONDecodeError"):
        TuningTable.from_json(TABLE.to_json()[:50])
