"""`tatami bench functions`: real measurements on two ranks, and what is refused."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from tatami.bench.functions import FunctionsBenchmark
from tatami.errors import InputError


def test_refuses_what_cannot_be() -> None:
    with pytest.raises(InputError, match="between 2 ranks, not 3"):
        FunctionsBenchmark().check(ranks=3)
    with pytest.raises(InputError, match="float32, of 4 bytes each; not 6"):
        FunctionsBenchmark(sizes_bytes=(6,)).check(ranks=2)


def test_measures(tmp_path: object) -> None:
    pytest.importorskip("mpi4py", reason="needs the extra 'mpi'")
    if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")):
        pytest.skip("inside mpiexec no other mpiexec can be started")
    command = [
        sys.executable,
        "-m",
        "tatami",
        "bench",
        "functions",
        "--sizes",
        "8B,64KiB",
        "--rounds",
        "1",
        "--seconds",
        "0.001",
    ]
    ended = subprocess.run([*command, "--json"], capture_output=True, text=True, timeout=800, check=False, cwd=str(tmp_path))
    assert ended.returncode == 0, ended.stderr
    records = [json.loads(line) for line in ended.stdout.splitlines()]
    assert [record.get("size_bytes") for record in records] == [8, 65536, None]
    for record in records[:2]:
        assert min(record[f"{name}_median_s"] for name in ("tatami", "mpi4py", "gloo", "autograd")) > 0
    step = records[2]
    assert step["bound_s"] == pytest.approx(
        step["first_half_median_s"] + step["second_half_median_s"] + step["messages_median_s"]
    )
