"""Plans for piles of machines as people have them:  python benchmarks/piles.py [--json]

Six clusters and four networks, of the files in benchmarks/piles. Each of 24 questions is answered by the default planner, with
pipeline stages where `choose` takes them (of networks whose pieces are known), and by what one would do without: the fastest
machine alone, the fastest k, the planners `weighted`, `even` and `srpm`, all in as many micro-batches as memory asks for. Times
are predicted, so the answers are the same on every machine. The statistics of ResNet-50's batch normalization are of the whole
batch, so that it is computed in one micro-batch; each of its questions is asked again with statistics of each micro-batch. With
--out the lines are written to a file too, after one with the command.
"""

from __future__ import annotations

import argparse
import json
import shlex
import sys
import time
import tomllib
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from tatami.cluster import Cluster, read_cluster
from tatami.errors import MemoryLackError
from tatami.tiling import Plan, StagedPlan, choose, plan, plan_stages
from tatami.workload import Workload, gpt_workload

HERE = Path(__file__).parent / "piles"
CLUSTERS = (
    "two-gaming-pcs",
    "four-mixed-gpus",
    "twelve-workstations",
    "sixty-four-cloud-cpus",
    "eight-spot-gpus",
    "cpu-and-gpu",
)
RIVALS = ("weighted", "even", "srpm")
MOST = 1.05
"""Times the best of the rivals: what a plan may take."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """One question's.

    Attributes:
        cluster: the name of its file.
        model: the network's title.
        plan: of the default planner, or with stages; None where both refuse.
        unstaged_s: the predicted time of the default planner's; None where it refuses.
        refusal: what it says then.
        rivals_s: the predicted time of each rival that memory holds.
        cpu_s: of the plan.
    """

    cluster: str
    model: str
    plan: Plan | StagedPlan | None
    unstaged_s: float | None
    refusal: str
    rivals_s: dict[str, float]
    cpu_s: float

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest rival."""
        return min(self.rivals_s.items(), key=lambda pair: pair[1], default=None)

    @property
    def ratio(self) -> float | None:
        """The plan's time over that of the fastest rival."""
        return self.plan.predicted_s / self.best[1] if self.plan is not None and self.best is not None else None

    @property
    def holds(self) -> bool:
        """Whether no rival has a way where the plan has none, or a much faster one."""
        return self.best is None if self.plan is None else self.ratio is None or self.ratio <= MOST

    def record(self) -> dict[str, object]:
        """As a line of JSON."""
        stages = self.plan.layout.stages if isinstance(self.plan, StagedPlan) else ()
        replicas = stages[0].replicas if stages else self.plan.layout.replicas if isinstance(self.plan, Plan) else ()
        return {
            "cluster": self.cluster,
            "model": self.model,
            "planned_s": self.plan.predicted_s if self.plan is not None else None,
            "unstaged_s": self.unstaged_s,
            "replicas": [] if stages else [[*replica.processors] for replica in replicas],
            "stages": [[*stage.processors] for stage in stages],
            "micro_batches": [replica.micro_batches for replica in replicas],
            "rivals_s": self.rivals_s,
            "ratio": self.ratio,
            "holds": self.holds,
            "refusal": self.refusal,
            "cpu_s": self.cpu_s,
        }

    def row(self) -> str:
        """As a row of the table."""
        planned = "refused" if self.plan is None else f"{self.plan.predicted_s:.3g} s"
        without = "refused" if self.unstaged_s is None else f"{self.unstaged_s:.3g} s"
        best = "-" if self.best is None else f"{self.best[1]:.3g} s ({self.best[0]})"
        ratio = "-" if self.ratio is None else f"{self.ratio:.2f}"
        return f"| {self.cluster} | {self.model} | {planned} | {_shape(self.plan)} | {without} | {best} | {ratio} |"


def _shape(found: Plan | StagedPlan | None) -> str:
    """How many processors take part, in how many replicas of how many, or stages, and in how many micro-batches."""
    if found is None:
        return ""
    if isinstance(found, StagedPlan):
        share = found.ranks[0].micro_batches
        return (
            f"{found.layout.num_replicas} x {len(found.layout.stages)} stages; {share} micro-batch{'es' if share > 1 else ''}"
        )
    replicas = found.layout.replicas
    depths = sorted({len(replica.processors) for replica in replicas})
    parts = sorted({replica.micro_batches for replica in replicas})
    each = "" if depths == [1] else f" of {depths[0]}" if len(depths) == 1 else f" of {depths[0]} to {depths[-1]}"
    number = str(parts[0]) if len(parts) == 1 else f"{parts[0]} to {parts[-1]}"
    return (
        f"{len(replicas)} replica{'s' if len(replicas) > 1 else ''}{each}; {number} micro-batch{'es' if number != '1' else ''}"
    )


def workloads() -> dict[str, Workload]:
    """The networks by title."""
    found = {}
    raw = tomllib.loads((HERE / "models.toml").read_text(encoding="utf-8"))
    for model in raw["gpt"].values():
        sizes = {key: value for key, value in model.items() if key != "title"}
        found[model["title"]] = replace(gpt_workload(**sizes), overlaps_sums=True)
    for model in raw["plain"].values():
        norms = [2 * channels + 1 for channels, count in model["batch_norms"] for _ in range(count)]
        found[model["title"]] = Workload(
            samples=model["samples"],
            replicated_parameters=model["parameters"],
            replicated_flop_per_sample=round(model["flop_per_sample"]),
            replicated_activation_bytes=model["activation_bytes"],
            batch_statistics=tuple(norms),
            overlaps_sums=True,
        )
    return found


def questions(clusters: tuple[str, ...] = CLUSTERS) -> Iterator[Answer]:
    """The answers, one after the other."""
    for name in clusters:
        cluster = read_cluster(HERE / f"{name}.toml")
        for title, workload in workloads().items():
            yield answered(cluster, workload, name=name, title=title)
            if workload.batch_statistics:
                local = replace(workload, batch_statistics=())
                yield answered(cluster, local, name=name, title=f"{title}, local statistics")


def answered(cluster: Cluster, workload: Workload, *, name: str, title: str) -> Answer:
    """One question's answer, and what the rivals take."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # who is left out
        began_s = time.process_time()
        unstaged, refusal = _planned("timed", cluster, workload)
        found = choose(unstaged, plan_stages(cluster, workload))
        cpu_s = time.process_time() - began_s
        order = sorted(cluster.processors, key=lambda each: -each.speed)
        rivals = {each: _planned(each, cluster, workload)[0] for each in RIVALS}
        alone = [_planned("weighted", cluster.only([each.name]), workload)[0] for each in cluster.processors]
        rivals["one alone"] = min(filter(None, alone), key=lambda each: each.predicted_s, default=None)
        for count in range(2, cluster.size):
            first = cluster.only([each.name for each in order[:count]])
            rivals[f"fastest {count}"] = _planned("weighted", first, workload)[0]
    times = {each: other.predicted_s for each, other in rivals.items() if other is not None}
    return Answer(
        cluster=name,
        model=title,
        plan=found,
        unstaged_s=unstaged.predicted_s if unstaged is not None else None,
        refusal=refusal,
        rivals_s=times,
        cpu_s=cpu_s,
    )


def _planned(planner: str, cluster: Cluster, workload: Workload) -> tuple[Plan | None, str]:
    try:
        return plan(planner, cluster=cluster, workload=workload), ""
    except MemoryLackError as error:
        return None, str(error)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="a line of JSON for each question in place of the table")
    parser.add_argument("--out", type=Path, help="write these lines to a file as well")
    args = parser.parse_args()
    lines = [json.dumps({"command": shlex.join(["python", *sys.argv])})]
    if not args.json:
        print(
            "| cluster | network | plan | its shape | without stages | fastest rival | plan / rival |\n"
            "|:--|:--|--:|:--|--:|--:|--:|"
        )
    broken = 0
    for answer in questions():
        lines.append(json.dumps(answer.record()))
        print(lines[-1] if args.json else answer.row(), flush=True)
        broken += not answer.holds
    if args.out is not None:
        args.out.write_text("\n".join(lines) + "\n", encoding="utf-8")
    if broken:
        sys.exit(f"{broken} answers are refusals where a rival has a way, or take more than {MOST} times as long")


if __name__ == "__main__":
    main()
