"""The pictures of docs/stages.md:  python benchmarks/staged_run.py [run timeline storeys]

`run` trains a GPT in four stages in a lab of two fast hosts and two of half their speed on 100 Mbit/s, and keeps its records in
benchmarks/results/staged-run.jsonl; `timeline` draws one iteration of that run, as `tatami report` shows it, and `storeys` the
floor with storeys. `run` needs Linux and root (docs/lab.md), and a machine with nothing else to do.
"""

from __future__ import annotations

import sys
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch

from elsewhere import of_ranks
from tatami.cluster import Cluster, Link, Processor
from tatami.lab import Lab
from tatami.records import Records
from tatami.report import blank, save
from tatami.report.page import facts_of, read_run
from tatami.report.palette import EDGE, PHASES, RUST, STRAW_TO_MOSS

ROOT = Path(__file__).parents[1]
PICTURES, LOG = ROOT / "docs" / "pictures", ROOT / "benchmarks" / "results" / "staged-run.jsonl"
SPEEDS = (1.0, 1.0, 0.5, 0.5)
LAYERS, WIDTH, TOKENS, SAMPLES, CHARACTERS = 8, 192, 64, 16, 96


def cluster() -> Cluster:
    """What the lab is asked for."""
    processors = tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i}") for i, speed in enumerate(SPEEDS))
    return Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=12.5e6, latency_s=50e-6))


def rank() -> None:
    """One rank of the run."""
    import tatami
    from tatami.cli.tasks import CharacterGpt, NextTokenLoss

    torch.set_num_threads(1)
    torch.manual_seed(0)
    comm = tatami.init()
    x = torch.randint(0, CHARACTERS, (SAMPLES, TOKENS + 1))
    model = tatami.tile(
        CharacterGpt(characters=CHARACTERS, layers=LAYERS, width=WIDTH, heads=6, tokens=TOKENS),
        comm,
        batch_size=SAMPLES,
        sample=x[:2, :-1],
        speeds=cluster(),
        stages=4,
        micro_batches=8,
    )
    with Records(LOG if comm.rank == 0 else None, force=True) as records:
        trainer = tatami.Trainer(
            model, optimizer=partial(torch.optim.AdamW, lr=1e-3), loss=NextTokenLoss(), records=records, record_every=5
        )
        trainer.fit((x[:, :-1], x[:, 1:]), batch_size=SAMPLES, iterations=10)
    if comm.rank == 0:
        print(model.describe(), flush=True)


def run() -> None:
    """The run, in a lab."""
    with warnings.catch_warnings(), Lab(cluster()) as lab:
        warnings.filterwarnings("ignore", message="latency is not emulated")
        code = lab.run(
            ["-m", "staged_run", "rank"], environment=of_ranks(preload=("staged_run", "torch.export")), timeout_s=900
        )
    if code:
        sys.exit(code)


def timeline() -> None:
    """One iteration of that run."""
    from matplotlib.patches import Patch

    facts = facts_of(read_run(LOG))
    assert facts.stages is not None
    ranks = sorted(facts.stages["ranks"], key=lambda each: each["stage"])
    row_of = {each["rank"]: row for row, each in enumerate(ranks)}
    figure, ax = blank(width_in=10.0, height_in=3.6)
    ended = max(row["ended"] for row in facts.timeline)
    for each in facts.timeline:
        row, width = row_of[each["rank"]], each["ended"] - each["began"]
        ax.barh(row, width, left=each["began"], height=0.8, color=PHASES[each["phase"]][1], linewidth=0)
        if each["phase"] in ("forward", "backward") and width > 0.011 * ended:
            middle = (each["began"] + each["ended"]) / 2
            ax.text(middle, row, str(each["number"]), ha="center", va="center", fontsize=11, color="black")
    ax.set_yticks(range(len(ranks)), [f"stage {each['stage']}, {each['rank']}" for each in ranks], fontsize=12)
    ax.invert_yaxis()
    ax.set_xlim(0, ended)
    ax.set_xlabel("milliseconds", fontsize=12)
    ax.tick_params(axis="x", labelsize=12)
    ax.spines[["top", "right", "left"]].set_visible(False)
    ax.tick_params(axis="y", length=0)
    shown = [phase for phase in PHASES if any(row["phase"] == phase for row in facts.timeline)]
    handles = [Patch(color=PHASES[phase][1], label=PHASES[phase][0]) for phase in shown]
    figure.legend(handles=handles, loc="outside lower center", ncols=3, frameon=False, fontsize=12)
    save(figure, PICTURES / "stages-timeline.png", force=True)


def storeys() -> None:
    """Three stages of three replicas, seen from above and aside: samples to the right, units to the back, layers up."""
    from matplotlib.patches import Polygon

    widths, names = (0.75, 0.48, 0.36), ("abc", "def", "ghi")
    words = ("embedding, first layers", "middle layers", "last layers, head, loss")
    depth, lean, rise, gap = 0.28, 0.35, 0.06, 0.66
    figure, ax = blank(width_in=9.0, height_in=5.2)

    def corner(x: float, y: float, z: float) -> tuple[float, float]:
        return x + lean * y, depth * y + z

    def face(points: list[tuple[float, float, float]], colour: str, level: float) -> None:
        corners = [corner(*point) for point in points]
        ax.add_patch(Polygon(corners, facecolor=colour, edgecolor=EDGE, linewidth=1.1, zorder=level))

    for stage in range(3):
        z, left, level = stage * gap, 0.0, 2.0 * stage
        for replica, width in enumerate(widths):
            right, colour = left + width - 0.015, STRAW_TO_MOSS[replica]
            face([(left, 0, z), (right, 0, z), (right, 0, z + rise), (left, 0, z + rise)], colour, level)
            face([(right, 0, z), (right, 1, z), (right, 1, z + rise), (right, 0, z + rise)], colour, level)
            face([(left, 0, z + rise), (right, 0, z + rise), (right, 1, z + rise), (left, 1, z + rise)], colour, level)
            x = (left + right) / 2
            place = corner(x, 0.36, z + rise)
            ax.text(*place, names[replica][stage], ha="center", va="center", fontsize=20, color=EDGE, zorder=level + 1)
            if stage < 2:
                start = corner(x, 0.72, z + rise)
                arrow: dict[str, Any] = {"arrowstyle": "<|-|>", "color": RUST, "linewidth": 2.2, "mutation_scale": 17}
                ax.annotate("", xy=(start[0], z + gap - 0.01), xytext=start, arrowprops=arrow, zorder=level + 1)
            left += width
        text = f"stage {stage + 1}\n{words[stage]}"
        ax.text(left + lean + 0.06, z + rise + depth / 2, text, va="center", fontsize=16, color=EDGE)
    left = 0.0
    for replica, width in enumerate(widths):
        ax.text(left + width / 2, -0.05, f"replica {replica + 1}", ha="center", va="top", fontsize=15, color=EDGE)
        left += width
    ax.text(left / 2, -0.2, "samples", ha="center", va="top", fontsize=16, color=EDGE)
    ax.text(0.1, gap + rise - 0.2, "hand-overs", ha="right", va="center", fontsize=16, color=RUST)
    ax.set_xlim(-0.5, 3.15)
    ax.set_ylim(-0.32, 2 * gap + rise + depth + 0.04)
    ax.set_aspect("equal")
    ax.set_axis_off()
    save(figure, PICTURES / "storeys.png", force=True)


MAKERS = {"run": run, "timeline": timeline, "storeys": storeys}

if __name__ == "__main__":
    if sys.argv[1:] == ["rank"]:
        rank()
    else:
        for wanted in sys.argv[1:] or MAKERS:
            MAKERS[wanted]()
