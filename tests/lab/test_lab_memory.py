"""Hosts of a lab with a limit of memory: they see it, and what wants more is ended by the kernel, there alone."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from lab_rig import CLUSTER_TOML, HELD, HELD_SAMPLES, JOB, NETWORK, base_memory, holding, traces

from tatami.cluster import Cluster, Processor
from tatami.errors import InputError, MemoryLackError
from tatami.lab import Lab, missing
from tatami.tiling import plan
from tatami.workload import Workload

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytest.importorskip("mpi4py")

PATIENCE_S = 800.0
MIB = 1 << 20
SEES = "from tatami.cluster.cores import memory_here; print(memory_here())"
TAKES = "held = bytearray(192 << 20); held[::4096] = b'1' * len(held[::4096])"
"""Writes to every page of it."""


def test_a_host_sees_its_limit_and_what_wants_more_is_ended_there() -> None:
    processors = tuple(
        Processor(name=f"p{i}", speed=1.0, host=f"h{i}", memory=memory) for i, memory in enumerate(("64 MiB", "256 MiB"))
    )
    with Lab(Cluster(processors=processors, network=NETWORK), base_memory="64 MiB") as lab:
        for name, seen in (("h0", 128 * MIB), ("p1", 320 * MIB)):
            told = lab.spawn(name, [sys.executable, "-c", SEES], stdout=subprocess.PIPE).communicate(timeout=PATIENCE_S)[0]
            assert int(told) == seen
        assert lab.starved() == {}
        taking = [lab.spawn(name, [sys.executable, "-c", TAKES]) for name in ("h0", "h1")]
        assert [process.wait(PATIENCE_S) for process in taking] == [-9, 0]
        assert lab.starved() == {
            "h0": "the kernel ended 1 process on h0: more was wanted than the 128 MiB of memory that the host has"
        }
    assert traces(lab.name) == []


def test_a_command_is_told_that_a_host_had_too_little(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML.replace("speed", 'memory = "64 MiB"\nspeed'))
    command = [sys.executable, "-m", "tatami", "lab", "run", "cluster.toml", "--base-memory", "32MiB", "--"]
    script = f'[ $(hostname) != h2 ] || exec {sys.executable} -c "{TAKES}"'
    done = subprocess.run(
        [*command, "bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    assert "lab: the kernel ended 1 process on h2: more was wanted than the 96 MiB of memory" in " ".join(done.stderr.split())


def test_a_network_that_no_host_holds_is_refused_there_ended_there_and_trains_on_four(tmp_path: Path) -> None:
    with pytest.raises(MemoryLackError, match="there is no room for this network, with one sample at a time: p0 lacks "):
        plan(cluster=holding(1), workload=Workload.mlp(*HELD, samples=HELD_SAMPLES))
    with Lab(holding(1), base_memory=base_memory()) as lab:
        assert lab.run([str(JOB), "hold", str(tmp_path)], timeout_s=PATIENCE_S) != 0
        assert list(lab.starved()) == ["h0"]
    assert list(tmp_path.iterdir()) == []
    with Lab(holding(4), base_memory=base_memory()) as lab:
        assert lab.run([str(JOB), "hold", str(tmp_path)], timeout_s=PATIENCE_S) == 0
        assert lab.starved() == {}
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert sum(each["units"] for each in found) == HELD[1]
    assert all(each["losses"] == found[0]["losses"] for each in found)


def test_a_base_that_is_no_size_is_refused() -> None:
    cluster = Cluster(processors=(Processor(name="p0", speed=1.0, host="h0", memory="64 MiB"),), network=NETWORK)
    with pytest.raises(InputError, match="'much' is not a size"):
        Lab(cluster, base_memory="much")
