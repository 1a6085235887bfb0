"""Predicted times of plans that the Sailor project measured:  python benchmarks/sailor.py ../shared/data/sailor

OPT-350 over nodes of eight unequal GPUs (SOSP 2025; the data's README says more). A node is one machine here, as fast as its
profile says of eight-way tensor parallelism; a replica's stages are priced by `PipelineTask`, with hand-overs that are hidden
and with such that block, and the measured time of the gradient sum is added. One line of JSON for each plan.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from tatami.tiling.pipeline import PipelineTask

TOKENS, WIDTH, HALF_BYTES = 2048, 1024, 2
SLOW = "RTX-3090"
SLOW_BYTES_PER_S, FAST_BYTES_PER_S = 0.93e9 / 8, 22.9e9 / 8
REPEATED = "N3_D1"
"""This plan has the numbers of another one."""


def predictions(folder: Path) -> Iterator[dict[str, Any]]:
    """One record for each measured plan."""
    for file in sorted(folder.glob("validation/mit/N*/plan_config_*.json")):
        name = file.stem.removeprefix("plan_config_")
        if name == REPEATED:
            continue
        plan = json.loads(file.read_text(encoding="utf-8"))
        (pipeline,) = plan["pipeline_list"]
        found = {
            way: plan["red_grads"]
            + max(_replica_s(folder, plan, pipeline, index, blocking=blocking) for index in range(pipeline["dp"][0]))
            for way, blocking in (("hidden", False), ("blocking", True))
        }
        yield {
            "plan": name,
            "stages": pipeline["num_stages"],
            "replicas": pipeline["dp"][0],
            "measured_s": plan["real"],
            **{f"{way}_s": seconds for way, seconds in found.items()},
            **{f"{way}_error": seconds / plan["real"] - 1 for way, seconds in found.items()},
        }


def _replica_s(folder: Path, plan: dict[str, Any], pipeline: dict[str, Any], index: int, *, blocking: bool) -> float:
    nodes = [stage[index] for stage in pipeline["tmp_per_stage"]]
    names = [node[0][0][0] for node in nodes]
    layers = sum(len(own) for own in pipeline["layers_per_stage"])
    work = []
    for name, (_, shared) in zip(names, nodes, strict=True):
        profile = json.loads((folder / "profiles" / "OPT-350" / name / "profile.json").read_text(encoding="utf-8"))
        by_layer = profile[str(plan["mbs"])][str(shared)]
        work.append([sum(by_layer[str(layer)][:2]) for layer in range(layers)])
    slow = np.array([name == SLOW for name in names])
    stages = len(names)
    task = PipelineTask(
        work_s=np.array(work),
        step_s=np.zeros(stages),
        crossing_bytes=np.full(layers, float(plan["mbs"] * TOKENS * WIDTH * HALF_BYTES)),
        bandwidth_bytes_per_s=np.where(slow[:, None] | slow[None, :], SLOW_BYTES_PER_S, FAST_BYTES_PER_S),
        latency_s=np.zeros((stages, stages)),
        state_bytes=np.zeros(layers),
        activation_bytes=np.zeros(layers),
        memory_bytes=np.full(stages, math.inf),
        micro_batches=plan["gbs"] // (plan["mbs"] * pipeline["dp"][0]),
        blocking=blocking,
    )
    edges = np.cumsum([0, *(len(own) for own in pipeline["layers_per_stage"])])
    return float(task.times_s(np.arange(stages)[None], edges[None])[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, help="the project's data")
    for record in predictions(parser.parse_args().folder):
        print(json.dumps(record))


if __name__ == "__main__":
    main()
