"""Freed memory is the system's again where a plan fills much of a machine's memory."""

import subprocess
import sys

import pytest

FREES = """
import sys
from pathlib import Path
import torch
from torch import nn
import tatami
from tatami.cluster import Cluster, Processor

memory = {"memory": sys.argv[1]} if sys.argv[1:] else {}
cluster = Cluster(processors=(Processor(name="p0", speed=1.0, **memory),))
tatami.tile(nn.Linear(8, 8), tatami.init(), batch_size=4, speeds=cluster, reduction="mean", quiet=True)

def resident_mib():
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 2**20

torch.ones(4 * 2**20)  # its 16 MiB make glibc keep all that is smaller
torch.ones(4 * 2**20)
before = resident_mib()
held = [torch.ones(2**19) for _ in range(40)]  # 2 MiB each
grown = resident_mib() - before
held = held[1::2]
print(grown, resident_mib() - before)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="glibc's malloc is Linux's")
@pytest.mark.parametrize("memory", ["2 KiB", "8 GiB"])
def test_a_rank_whose_memory_a_plan_fills_keeps_no_holes(memory: str) -> None:
    """A linear layer of 8 by 8 takes a good part of 2 KiB, and next to nothing of 8 GiB."""
    done = subprocess.run([sys.executable, "-c", FREES, memory], capture_output=True, text=True, timeout=300, check=True)
    grown, left = map(float, done.stdout.split())
    assert grown > 50
    share = 0.5 if memory == "2 KiB" else 1.0
    assert left == pytest.approx(share * grown, abs=10), "every second of 40 tensors of 2 MiB is gone"
