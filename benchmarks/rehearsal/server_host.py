"""`python -m rehearsal.server_host ADDRESS JOB.json FOUND.json`: on the head of Ray, measures what the job asks for."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from bench_server import Weight, no_loss
from ray_nodes import await_nodes, await_port
from rehearsal.server import FLOAT_BYTES, TINY, ServerJob, server_job_from_dict
from tatami.engine.ray_engine import engine
from tatami.server import Pool, RunContext, RunSettings, train

_TRANSFERS = 5


def measure(address: str, job: ServerJob) -> dict[str, Any]:
    """Transfers of one object alone, and the rounds of all cases."""
    await_port(address)
    with engine(address=address) as ray:
        await_nodes(ray, len(job.cluster.processors))
        pool = Pool()
        return {
            "transfers": _transfers(ray, job),
            "cases": [_case(workers, servers, job=job, pool=pool) for workers, servers in job.cases],
        }


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
    """As the command line says."""
    address, job, found = sys.argv[1:]
    measured = measure(address, server_job_from_dict(json.loads(Path(job).read_text(encoding="utf-8"))))
    Path(found).write_text(json.dumps(measured), encoding="utf-8")


if __name__ == "__main__":
    main()
