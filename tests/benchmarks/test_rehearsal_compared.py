"""The simulator held against measurements: its test bed, its constants from a probe, and what is said of the errors."""

from __future__ import annotations

from math import fsum
from typing import Any

import pytest

import simulated
from rehearsal.calibrated import Calibrated, calibrated
from rehearsal.setting import NET, SAMPLES, RankJob, job_from_dict, tilings
from simgrid_here import needs_simgrid
from tatami.sim.processes import Runs
from tatami.sim.tiling import Startup, TimedTile
from tatami.sim.tiling.calibrate import flop_of
from tatami.workload import net_workload

JOB = RankJob(bandwidth_bytes_per_s=125e6)
RATES = (3e10, 2e10, 1e10, 0.5e10)
STARTUP = Startup(sample_flop=4e4)
WORKLOAD = net_workload(NET, samples=SAMPLES)
LATENCY_S, MIB = 1e-4, 1024**2


def found() -> dict[str, Any]:
    """What ranks would write that are as fast as `RATES`, on links that are as good as asked."""

    def seconds(units: int, samples: int, flop_per_s: float) -> float:
        tile = TimedTile(units=units, samples=samples, seconds=1.0)
        return (flop_of(tile, workload=WORKLOAD) + STARTUP.sample_flop * samples) / flop_per_s

    shapes = [(100, 4096), (400, 8192), (800, 1024), (800, 8192)]
    names = [processor.host for processor in JOB.cluster.processors]
    pairs = [(one, other) for index, one in enumerate(names) for other in names[index + 1 :]]
    wire_s = LATENCY_S + MIB / JOB.bandwidth_bytes_per_s
    messages = [("shift", 8, 4e-4), ("exchange", 8, 3e-4), ("shift", MIB, wire_s + 1e-3), ("exchange", MIB, wire_s + 6e-3)]
    layouts = tilings(JOB.cluster)
    return {
        "job": JOB.to_dict(),
        "machine": {},
        "cluster": {"hosts": names, "links": [[*pair, JOB.bandwidth_bytes_per_s, LATENCY_S] for pair in pairs]},
        "tiles": [[(units, samples, seconds(units, samples, rate)) for units, samples in shapes] for rate in RATES],
        "messages": [{"way": way, "size_bytes": size_bytes, "median_s": s} for way, size_bytes, s in messages],
        "sums_bytes_per_s": [4e9, 3e9, 2e9, 1e9],
        "tilings": [{"tiling": name, "layout": layout.to_dict(), "median_s": 1.0} for name, layout in layouts.items()],
        "allreduce": [{"algorithm": "ring", "size_bytes": 4 * MIB, "mean_s": 0.1}],
    }


def test_there_are_eleven_tilings_and_all_areas_are_as_asked() -> None:
    layouts = tilings(JOB.cluster)
    assert len(layouts) == 11
    assert len({layout.to_json() for layout in layouts.values()}) == 11
    speeds = JOB.cluster.speeds
    for name, layout in layouts.items():
        areas = {
            processor: column.width * height
            for column in layout.columns
            for processor, height in zip(column.processors, column.heights, strict=True)
        }
        wanted = dict.fromkeys(speeds, 1.0) if name.startswith("even") else speeds
        assert areas == pytest.approx({processor: each / fsum(wanted.values()) for processor, each in wanted.items()})


def test_a_job_comes_back_from_json() -> None:
    assert job_from_dict({**JOB.to_dict(), "speeds": list(JOB.speeds), "sizes_bytes": list(JOB.sizes_bytes)}) == JOB


def test_constants_are_those_of_the_probe() -> None:
    constants: Calibrated = calibrated(found(), workload=WORKLOAD)
    assert [processor.speed for processor in constants.cluster.processors] == pytest.approx(RATES, rel=1e-6)
    assert constants.startup.sample_flop == pytest.approx(STARTUP.sample_flop, rel=1e-5)
    assert constants.software.gap_s == constants.busy.message_s == 4e-4
    assert constants.software.message_s == constants.busy.gap_s == 0.0
    (piece,) = constants.software.pieces
    assert (piece.size_bytes, piece.beyond_s, piece.stagger_s) == pytest.approx((MIB, 1e-3, 5e-3))
    assert constants.software.sum_bytes_per_s == 1e9


@needs_simgrid
def test_every_case_is_compared_and_the_errors_are_summed_up() -> None:
    with Runs(cores=1) as runs:
        records = list(simulated.compare(found(), runs))
    assert [each["what"] for each in records] == ["tiling"] * 11 + ["allreduce"]
    ring = records[-1]
    beyond_s = 1e-3  # of messages of 1 MiB
    adding_s = 3 * MIB / 1e9
    gap_s = 4e-4  # after the last message of the run before
    assert ring["simulated_s"] == pytest.approx(6 * (LATENCY_S + MIB / 125e6 + beyond_s) + adding_s + gap_s, rel=1e-3)
    assert ring["error"] == pytest.approx(ring["simulated_s"] / 0.1 - 1)
    *_, all_together = simulated.summary(records)
    assert all_together["cases"] == 12
    assert all_together["got"]["largest"] == max(abs(each["error"]) for each in records)
    assert all_together["holds"] is False
