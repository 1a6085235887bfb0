"""What a rank of a lab measures, on ranks as threads: every case is there, and constants come of it."""

from __future__ import annotations

import json

import pytest

from rehearsal import rank
from rehearsal.calibrated import calibrated
from rehearsal.rank import LabProbe
from rehearsal.setting import RankJob, tilings
from tatami.comm.threads import run_threads
from tatami.workload import net_workload

JOB = RankJob(
    bandwidth_bytes_per_s=125e6,
    speeds=(1.0, 1.0),
    net="8-32-4",
    samples=256,
    rounds=1,
    repeats=1,
    sizes_bytes=(64, 4096),
    algorithms=("ring", "halving_doubling"),
)


def test_a_rank_finds_every_case_and_what_it_takes_to_simulate_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank, "_BLOCK_S", 0.01)
    monkeypatch.setattr(rank, "_ROUNDS", 2)
    monkeypatch.setattr(rank, "_MESSAGES_BYTES", (8, 128 * 1024))
    found, same = run_threads(lambda comm: LabProbe(JOB, comm).run(), size=2)
    assert {(each["way"], each["size_bytes"]) for each in found["messages"]} == {
        (way, size) for way in ("shift", "exchange") for size in (8, 128 * 1024)
    }
    assert [(each["algorithm"], each["size_bytes"]) for each in found["allreduce"]] == [
        (name, size) for size in JOB.sizes_bytes for name in JOB.algorithms
    ]
    assert {each["tiling"] for each in found["tilings"]} == set(tilings(JOB.cluster))
    assert all(each["median_s"] > 0 for what in ("messages", "allreduce", "tilings") for each in found[what])
    assert found["tiles"] == same["tiles"]
    assert [len(tiles) for tiles in found["tiles"]] == [7, 7]
    hosts = {"hosts": ["h0", "h1"], "links": [["h0", "h1", 125e6, 1e-4]]}  # threads are on one host, without links
    found["cluster"] |= hosts
    constants = calibrated(json.loads(json.dumps(found)), workload=net_workload(JOB.net, samples=JOB.samples))
    assert all(processor.speed > 0 for processor in constants.cluster.processors)
    assert [piece.size_bytes for piece in constants.software.pieces] == [128 * 1024]
