"""A rank that is killed in an iteration with stages: the others end soon, and those that wait for it say which one it was."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import os, signal, sys
import torch
from torch import nn
import tatami
from tatami.tiling import Replica, Layout, StagedLayout

moment, dying = sys.argv[1], 1
comm = tatami.init(timeout_s=1000)
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3))
x, y = torch.randn(8, 6), torch.randint(0, 3, (8,))

def stage(*names):
    replicas = [Replica(width=1 / len(names), processors=(name,), heights=(1.0,), micro_batches=2) for name in names]
    return Layout(replicas=tuple(replicas))

stages = (stage("p0"), stage("p1"), stage("p2")) if comm.size == 3 else (stage("p0", "p2"), stage("p1", "p3"))
layout = StagedLayout(stages=stages, cuts=(2, 4)[: len(stages) - 1])
model = tatami.tile(network, comm, batch_size=8, sample=x, layout=layout, speeds="equal", reduction="mean", quiet=True)
optimizer = torch.optim.AdamW(model.parameters())

def die(*_):
    if comm.rank == dying and step == 21:
        os.kill(os.getpid(), signal.SIGKILL)

for module in model.module:
    if moment == "forward":
        module.register_forward_pre_hook(die)
for parameter in model.own_parameters():
    if moment == "backward":
        parameter.register_hook(die)
if moment == "update":
    optimizer.register_step_pre_hook(die)
print("begun", flush=True)
for step in range(1000):
    optimizer.zero_grad()
    for x_part, y_part in model.micro_batches(x, y):
        nn.functional.cross_entropy(model(x_part), y_part).backward()
    optimizer.step()
"""


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "PMIX_", "OMPI_", "MPI_"))}


@pytest.mark.parametrize(("moment", "ranks"), [("forward", 3), ("backward", 3), ("update", 3), ("backward", 4)])
def test_the_other_ranks_end(tmp_path: Path, moment: str, ranks: int) -> None:
    """Ranks that nothing watches over: three stages, and two replicas of two."""
    (tmp_path / "script.py").write_text(SCRIPT)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    started = [
        subprocess.Popen(
            [sys.executable, str(tmp_path / "script.py"), moment],
            env={**environ(), **place, "RANK": str(rank), "LOCAL_RANK": str(rank), "OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(ranks)
    ]
    try:
        said = [process.communicate(timeout=800) for process in started]
    finally:
        for process in started:
            process.kill()
    for rank, (process, (out, err)) in enumerate(zip(started, said, strict=True)):
        assert "begun" in out, err
        if rank == 1:
            assert process.returncode == -9, err
        else:
            assert process.returncode > 0
            last = err.splitlines()[-1]
            # Replicas sum gradients in a group of their own, which counts its ranks from 0.
            is_replica = ranks == 4 and rank > 1
            assert ("RankDiedError" if is_replica else "rank 1 has ended") in last, f"rank {rank}: {err}"
