"""Held-out tilings: enough of them, in range, and judged by the goals."""

from __future__ import annotations

import pytest

from heldout import summary
from rehearsal.goals import ASKED
from rehearsal.heldout import BEDS, bed_from_dict, drawn_layouts, found_by
from tatami.comm.base import AbstractCommunicator
from tatami.testing.worlds import World


def test_there_are_enough_and_they_differ() -> None:
    layouts = [layout for bed in BEDS for layout in drawn_layouts(bed)]
    assert len(layouts) >= 60
    assert len({layout.to_json() for layout in layouts}) == len(layouts)
    assert any(bed.net.count("256") == 10 for bed in BEDS), "a network of ten blocks"
    assert ("203-80-26", 1024) in {(bed.net, bed.samples) for bed in BEDS}
    for bed in BEDS:
        assert bed_from_dict(bed.to_dict()) == bed
        assert sorted(drawn_layouts(bed)[0].processors) == [processor.name for processor in bed.cluster.processors]


def test_the_goals_are_of_the_median_and_the_95th_percentile() -> None:
    errors = [0.01] * 58 + [0.4] * 2
    records = [{"planned_error": error, "simulated_error": -2 * error} for error in errors]
    planned, simulated = summary(records)
    assert planned["got"] == {
        name: pytest.approx(value) for name, value in (*((each, 0.01) for each in ASKED), ("largest", 0.4))
    }
    assert planned["holds"]
    assert simulated["got"]["median"] == pytest.approx(0.02)
    assert simulated["got"]["largest"] == pytest.approx(0.8)
    assert set(ASKED) < set(simulated["got"])


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_ranks_measure_all_tilings_in_turn(world: World) -> None:
    bed = bed_from_dict(
        {**BEDS[0].to_dict(), "speeds": [1.0, 0.5], "net": "8-16-4", "samples": 32, "tilings": 2, "block_s": 0.01}
    )

    def body(comm: AbstractCommunicator) -> None:
        found = found_by(bed, comm)
        assert [len(each["rounds_s"]) for each in found["tilings"]] == [bed.rounds] * 2
        assert found["cluster"].count("speed = ") == 2
        assert 'net = "8-16-4"' in found["cluster"]

    world(body)
