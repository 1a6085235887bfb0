"""Where tiles in two dimensions beat weighted data parallelism, as a picture:  python benchmarks/crossing.py [--out FILE]

A dot is a plan: a network, samples, machines and links. It lies at its two numbers (`tatami plan` prints them), and its colour
says how many times as fast the layout of least predicted time is as data parallelism with batches weighted by speed. A diamond
is a lab that was measured, with its measured ratio, from evaluation.jsonl and rivals_gpt.jsonl in benchmarks/results. Nothing
is run; the picture takes about a minute of a core. Writes docs/pictures/crossing.png, and prints the diamonds.
"""

from __future__ import annotations

import argparse
import itertools
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.colors import LinearSegmentedColormap

from tatami.cluster import Cluster, Link, Processor
from tatami.report import blank, save
from tatami.report.palette import GREY, STRAW_TO_MOSS
from tatami.tiling import plan
from tatami.tiling.advice import Advice, advise
from tatami.workload import Workload, gpt_workload, net_workload

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "benchmarks" / "results"
SPEEDS = (0.25, 0.31, 0.63, 1.0, 1.0, 0.42, 0.67, 0.63)
"""Of the lab's hosts under condition A, which the predicted machines repeat."""
FLOP_PER_S = 20e9
"""Of speed 1: about what a core of the lab does."""
NETS = ("203-800-26", "1024-4096-1024", "512-2048-2048-512")
SAMPLES = tuple(2**power for power in range(8, 18, 2))
MACHINES = (4, 8, 16, 64, 256)
LINKS_BYTES_PER_S = (12.5e6, 125e6, 1.25e9)
LATENCY_S = 50e-6
_CHARACTERS = 96
"""Of the GPTs that were measured."""


@dataclass(frozen=True, kw_only=True)
class Spot:
    """One place in the picture: predicted, or measured in a lab.

    Attributes:
        advice: its two numbers.
        gain: how many times as fast tiles are as weighted data parallelism.
        label: of a lab.
        predicted: of a lab, the gain that is predicted.
    """

    advice: Advice
    gain: float
    label: str = ""
    predicted: float = 0.0


def spot(cluster: Cluster, workload: Workload, *, label: str = "", measured: float | None = None) -> Spot:
    """A plan's numbers and its gain: the predicted one, where none was measured."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that another planner is predicted faster
        weighted, best = (plan(name, cluster=cluster, workload=workload) for name in ("weighted", "timed"))
    predicted = weighted.predicted_s / best.predicted_s
    return Spot(advice=advise(weighted), gain=measured or predicted, label=label, predicted=predicted)


def machines(speeds: Iterable[float], *, bandwidth_bytes_per_s: float, latency_s: float = LATENCY_S) -> Cluster:
    """A host for each speed in flop/s, on one network."""
    processors = tuple(Processor(name=f"p{rank}", speed=speed, host=f"h{rank}") for rank, speed in enumerate(speeds))
    return Cluster(processors=processors, network=Link(bandwidth_bytes_per_s=bandwidth_bytes_per_s, latency_s=latency_s))


def predicted_spots() -> Iterator[Spot]:
    """All settings."""
    for net, samples, num, bandwidth in itertools.product(NETS, SAMPLES, MACHINES, LINKS_BYTES_PER_S):
        if samples >= 4 * num:
            speeds = (FLOP_PER_S * speed for speed in itertools.islice(itertools.cycle(SPEEDS), num))
            yield spot(machines(speeds, bandwidth_bytes_per_s=bandwidth), net_workload(net, samples=samples))


def measured_spots() -> Iterator[Spot]:
    """The labs: perceptrons, whose best tiling in two dimensions was measured beside weighted batches; GPTs beside DDP's."""
    beds: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for record in _lines("evaluation.jsonl"):
        key = tuple(record[name] for name in ("part", "condition", "num", "net", "bandwidth_bytes_per_s"))
        beds.setdefault(key, []).append(record)
    for (_, condition, num, net, bandwidth), records in beds.items():
        (bed,) = [record for record in records if record["record"] == "test bed"]
        times_s = {
            record["contestant"]: (record["iteration_s"], max(record["replicas"]))
            for record in records
            if record["record"] == "iteration" and record.get("replicas") and record["method"] != "even"
        }
        tiled_s = [seconds for seconds, deepest in times_s.values() if deepest > 1]
        if "weighted" not in times_s or not tiled_s:
            continue
        cluster = machines(bed["speeds_flop_per_s"], bandwidth_bytes_per_s=bandwidth, latency_s=bed["latency_s"])
        workload = net_workload(net, samples=bed["samples"])
        label = f"{net}, {bed['samples']:,} samples, N = {num}, {condition}, {8e-6 * bandwidth:,.0f} Mbit/s"
        yield spot(cluster, workload, label=label, measured=times_s["weighted"][0] / min(tiled_s))
    races: dict[tuple[Any, ...], dict[str, dict[str, Any]]] = {}
    for record in _lines("rivals_gpt.jsonl"):
        key = tuple(record[name] for name in ("width", "tokens", "samples", "bandwidth_bytes_per_s"))
        races.setdefault(key, {})[record["contestant"]] = record
    for (width, tokens, samples, bandwidth), race in races.items():
        tatami = race["tatami"]
        shape = {name: tatami[name] for name in ("layers", "width", "heads", "tokens", "samples")}
        cluster = machines(tatami["speeds_flop_per_s"], bandwidth_bytes_per_s=bandwidth)
        label = (
            f"GPT of width {width}, {samples} samples of {tokens} tokens, N = {cluster.size}, {8e-6 * bandwidth:,.0f} Mbit/s"
        )
        gain = race["ddp-weighted"]["iteration_s"] / tatami["iteration_s"]
        yield spot(cluster, gpt_workload(**shape, vocabulary=_CHARACTERS, tied=False), label=label, measured=gain)


def draw(predicted: list[Spot], measured: list[Spot], out: Path) -> None:
    """The picture."""
    figure, ax = blank(width_in=7.5, height_in=5)
    levels = (1.0, 1.3, 2.0, 4.0, 8.0, 16.0)
    colours: dict[str, Any] = {
        "vmin": 0.0,
        "vmax": np.log2(levels[-1]),
        "cmap": LinearSegmentedColormap.from_list("moss", STRAW_TO_MOSS),
    }
    styles: tuple[tuple[list[Spot], dict[str, Any]], ...] = (
        (sorted(predicted, key=lambda each: each.gain), {"s": 28, "edgecolors": GREY, "linewidths": 0.5}),
        (measured, {"s": 60, "marker": "D", "edgecolors": "black", "linewidths": 1.4, "zorder": 3}),
    )
    for spots, style in styles:
        rhos, qs = [each.advice.rho for each in spots], [each.advice.q for each in spots]
        gains = [np.log2(max(each.gain, 1.0)) for each in spots]
        shown = ax.scatter(rhos, qs, c=gains, **(colours | style))
    for near in _neighbours(measured):
        ends = [f"{each.gain:.2f}" for each in (near[0], near[-1])]
        right = max(near, key=lambda each: each.advice.rho)
        ax.annotate(
            " to ".join(ends[: 1 + (len(near) > 1)]) + " x",
            (right.advice.rho, right.advice.q),
            textcoords="offset points",
            xytext=(9, -3),
            fontsize=9,
            bbox={"boxstyle": "round,pad=0.15", "facecolor": "white", "alpha": 0.8, "linewidth": 0},
            zorder=4,
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    (left, last), (low, high) = ax.get_xlim(), ax.get_ylim()
    rho, q = np.meshgrid(np.geomspace(left, last, 200), np.geomspace(low, high, 200))
    rule = (1 + q) / (1 + 2 * q / np.sqrt(rho))
    lines = ax.contour(rho, q, rule, levels=levels[1:], colors="black", linewidths=0.8, linestyles="dashed")
    ax.clabel(lines, fmt=lambda value: f"{value:g} x", fontsize=8)
    bar = figure.colorbar(shown, ax=ax, ticks=np.log2(levels))
    bar.ax.set_yticklabels([f"{level:g} x" for level in levels])
    bar.set_label("times as fast as weighted data parallelism")
    ax.set_xlabel("rho: weights that travel over outputs that travel, times the machines")
    ax.set_ylabel("q: exchange of weights over computing")
    ax.set_title("dots: predicted; diamonds: measured in a lab; dashed: the rule of thumb", fontsize=10)
    save(figure, out, force=True)


def _neighbours(measured: list[Spot]) -> list[list[Spot]]:
    """Those that lie on one another together, from the smallest gain to the largest."""
    found: list[list[Spot]] = []
    for each in sorted(measured, key=lambda spot: spot.gain):
        place = np.log10([each.advice.rho, each.advice.q])
        near = [group for group in found if np.abs(place - np.log10([group[0].advice.rho, group[0].advice.q])).max() < 0.4]
        if near:
            near[0].append(each)
        else:
            found.append([each])
    return found


def _lines(name: str) -> Iterator[dict[str, Any]]:
    yield from map(json.loads, (RESULTS / name).read_text(encoding="utf-8").splitlines())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "pictures" / "crossing.png")
    options = parser.parse_args()
    measured = list(measured_spots())
    for each in measured:
        numbers = f"rho {each.advice.rho:6.2f}, q {each.advice.q:6.3f}"
        print(f"{numbers}: measured {each.gain:.2f} x, predicted {each.predicted:.2f} x: {each.label}")
    draw(list(predicted_spots()), measured, options.out)


if __name__ == "__main__":
    main()
