"""`python -m rehearsal.server_host ...`: a host of a lab as a node of Ray, or as the driver of the runs.

node HEAD OWN FOLDER           a node at the address OWN; the head, where that is HEAD; FOLDER is for Ray's files
run HEAD JOB.json FOUND.json   on the head: measures what the job asks for
"""

from __future__ import annotations

import json
import os
import socket
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from rehearsal.server import FLOAT_BYTES, TINY, ServerJob, server_job_from_dict
from tatami.bench.weight import Weight, no_loss
from tatami.engine.ray_engine import engine
from tatami.errors import LabError
from tatami.server import Pool, RunContext, RunSettings, train

PORT = 6379
_PATIENCE_S = 120.0
_APART_S = 6.0
_STORE_BYTES = 1 << 30
_TRANSFERS = 5


def be_node(head: str, own: str, folder: str) -> None:
    """Become a node of Ray; ends with the lab."""
    words = [sys.executable, "-m", "ray.scripts.scripts", "start", "--block", "--disable-usage-stats", "--num-cpus=1"]
    words += [f"--node-ip-address={own}", f"--object-store-memory={_STORE_BYTES}"]
    if own == head:
        words += ["--head", f"--port={PORT}", "--include-dashboard=false", f"--temp-dir={folder}"]
    else:
        _await_port(head)
        # Nodes share a folder, and two that start at the same time take the same names in it.
        time.sleep(_APART_S * int(own.rpartition(".")[2]))
        words.append(f"--address={head}:{PORT}")
    os.execv(sys.executable, words)


def _await_port(head: str) -> None:
    limit_s = time.monotonic() + _PATIENCE_S
    while True:
        try:
            with socket.create_connection((head, PORT), timeout=1.0):
                return
        except OSError as error:
            if time.monotonic() > limit_s:
                raise LabError(f"the head of Ray at {head}:{PORT} did not answer for {_PATIENCE_S:.0f} s") from error
            time.sleep(0.2)


def measure(head: str, job: ServerJob) -> dict[str, Any]:
    """Transfers of one object alone, and the rounds of all cases."""
    _await_port(head)
    with engine(address=f"{head}:{PORT}") as ray:
        _await_nodes(ray, len(job.cluster.processors))
        pool = Pool()
        return {
            "transfers": _transfers(ray, job),
            "cases": [_case(workers, servers, job=job, pool=pool) for workers, servers in job.cases],
        }


def _await_nodes(ray: Any, wanted: int) -> None:
    limit_s = time.monotonic() + _PATIENCE_S
    while (alive := sum(each["Alive"] for each in ray.nodes())) < wanted:
        if time.monotonic() > limit_s:
            raise LabError(f"only {alive} of {wanted} nodes of Ray were up after {_PATIENCE_S:.0f} s")
        time.sleep(0.2)


def _transfers(ray: Any, job: ServerJob) -> list[dict[str, Any]]:
    """From the head to another node."""
    here = ray.get_runtime_context().get_node_id()
    other = next(each["NodeID"] for each in ray.nodes() if each["NodeID"] != here)

    def fetch(references: list[Any]) -> float:
        start_s = time.perf_counter()
        ray.get(references[0])
        return time.perf_counter() - start_s

    there = NodeAffinitySchedulingStrategy(other, soft=False)
    remote = ray.remote(fetch).options(num_cpus=0, scheduling_strategy=there)

    def once(elements: int) -> float:
        seconds: float = ray.get(remote.remote([ray.put(np.zeros(elements, dtype=np.float32))]))
        return seconds

    once(job.elements)  # the connection
    return [
        {"size_bytes": elements * FLOAT_BYTES, "seconds": [once(elements) for _ in range(_TRANSFERS)]}
        for elements in (job.elements // 4, job.elements)
    ]


def _case(workers: int, servers: int, *, job: ServerJob, pool: Pool) -> dict[str, Any]:
    """Seconds of rounds, and on which host each process was, by numbers."""
    tiny_s, _ = _rounds(TINY, workers, servers, job=job, pool=pool)
    round_s, nodes = _rounds(job.elements, workers, servers, job=job, pool=pool)
    numbers = {node: number for number, node in enumerate(sorted(set(nodes.values())))}
    return {
        "workers": [numbers[nodes[f"worker {number}"]] for number in range(workers)],
        "servers": [numbers[nodes[f"server {number}"]] for number in range(servers)],
        "tiny_s": tiny_s,
        "round_s": round_s,
    }


def _rounds(elements: int, workers: int, servers: int, *, job: ServerJob, pool: Pool) -> tuple[list[float], dict[str, str]]:
    """Seconds of each round, and the nodes of the processes by their names."""
    task_s = job.task_s
    nodes: dict[str, str] = {}
    _, report = train(
        lambda: Weight(elements, task_s=task_s),
        no_loss,
        dataset=(torch.zeros(workers, 1), torch.zeros(workers, 1)),
        settings=RunSettings(
            rounds=job.rounds,
            batch_size=workers,
            workers=workers,
            servers=servers,
            spares=0,
            heartbeat_s=60.0,
        ),
        context=RunContext(
            pool=pool,
            on_round=lambda run: nodes.update(run.nodes()),
        ),
    )
    return list(report.round_s[2:]), nodes


def main() -> None:
    """One of the two."""
    role, head, *rest = sys.argv[1:]
    if role == "node":
        be_node(head, *rest)
    job, found = rest
    measured = measure(head, server_job_from_dict(json.loads(Path(job).read_text(encoding="utf-8"))))
    Path(found).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
