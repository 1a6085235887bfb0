"""The table and the picture of the grid: where each contestant wins, and by how much."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import MappingProxyType

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from racing.cells import BANDWIDTHS, BASE, CONTESTANTS, SPEEDS, Cell, Record, grid_cell, read
from racing.networks import SIZES
from tatami.report import save
from tatami.report.palette import EDGE, GREY, MOSS, RUST, STRAW_TO_MOSS, ink_on

NAMES: Mapping[str, str] = MappingProxyType(
    {
        "tatami": "Tatami",
        "data-parallel": "tatami.DataParallel",
        "ddp": "DDP",
        "ddp-weighted": "weighted DDP",
        "ddp-weighted-float16": "weighted DDP, float16",
        "fsdp": "FSDP2",
        "pipelining": "pipelining",
    }
)
_SHORT = MappingProxyType(
    {
        "data-parallel": "tatami DP",
        "ddp": "equal DDP",
        "ddp-weighted": "DDP",
        "ddp-weighted-float16": "DDP 16 bit",
        "fsdp": "FSDP2",
        "pipelining": "pipelining",
    }
)
NETWORKS: Mapping[str, str] = MappingProxyType(
    {"gpt": "GPT", "llama": "Llama-like", "resnet": "ResNet-18", "vit": "ViT", "perceptron": "203-80-26"}
)
LINKS: Mapping[float, str] = MappingProxyType({12.5e6: "100 Mbit/s", 125e6: "1 Gbit/s", 1.25e9: "10 Gbit/s"})
_EVEN = 0.03
"""What is within this of 1 is neither won nor lost."""
_FARTHEST = math.log2(4.0)
"""Where colours end."""
Found = dict[str, Record]


def grid(records: Sequence[Record]) -> dict[tuple[str, int, float], Found]:
    """The lines of the newest run of each cell of the grid, by network, hosts and link; none where it is not measured."""
    found = {}
    for network in SIZES:
        for hosts in SPEEDS:
            for bandwidth in BANDWIDTHS:
                own = [each for each in records if _is_grid(grid_cell(network, hosts, bandwidth), each)]
                newest = max((each["began"] for each in own), default="")
                found[network, hosts, bandwidth] = {each["contestant"]: each for each in own if each["began"] == newest}
    return found


def _is_grid(cell: Cell, record: Record) -> bool:
    values = cell.to_dict()
    return all(record[name] == values[name] for name in values if name not in ("rounds", "repeats", "dilation"))


def rates(found: Found) -> dict[str, float]:
    """Iterations per second of the hosts."""
    return {name: 1 / each["iteration_s"] for name, each in found.items() if "iteration_s" in each}


def table(records: Sequence[Record]) -> str:
    """Markdown: a row for each cell, a column for each contestant, and why some could not take part."""
    header = ["network", "hosts", "links", *NAMES.values(), "weighted DDP's iteration", "largest spread"]
    lines = [f"| {' | '.join(header)} |", f"|:--|--:|--:|{'--:|' * (len(header) - 3)}"]
    notes: list[str] = []
    for (network, hosts, bandwidth), found in grid(records).items():
        own = rates(found)
        base, best = own.get(BASE), max(own.values(), default=0.0)
        cells = [NETWORKS[network], str(hosts), LINKS[bandwidth]]
        for name in NAMES:
            if name in own and base is not None:
                words = f"{own[name] / base:.2f}"
                cells.append(f"**{words}**" if own[name] == best else words)
            elif name in found and "cannot" in found[name]:
                reason = found[name]["cannot"]
                if reason not in notes:
                    notes.append(reason)
                cells.append(f"- ({notes.index(reason) + 1})")
            else:
                cells.append("not measured yet")
        spreads = [each["spread"] for each in found.values() if "spread" in each]
        cells.append("" if base is None else f"{1e3 / base:.3g} ms")
        cells.append(f"{100 * max(spreads):.0f} %" if spreads else "")
        lines.append(f"| {' | '.join(cells)} |")
    told = [f"{number}. {reason}" for number, reason in enumerate(notes, 1)]
    return "\n".join([*lines, *([""] if told else []), *told])


def write_report(records_file: Path) -> list[Path]:
    """Writes the table and the picture beside the records; returns their files."""
    records = read(records_file)
    measured = [each for each in records if "iteration_s" in each]
    commits = sorted({each["commit"] for each in measured})
    text = "\n\n".join(
        [
            "# Rivals in the same processes",
            "Iterations per second over those of DistributedDataParallel with weighted batches, medians of rounds in turn in "
            "the same processes of a paced lab (docs/lab.md); the best of each row in bold. Hosts have speeds "
            + "; ".join(f"{', '.join(f'{each:g}' for each in speeds)} ({hosts})" for hosts, speeds in SPEEDS.items())
            + f" of 45 Gflop/s. `python benchmarks/rivals.py`, commit {', '.join(commits) or '-'}.",
            table(records),
        ]
    )
    page = records_file.with_suffix(".md")
    page.write_text(text + "\n", encoding="utf-8")
    return [page, save(draw(records), records_file.with_suffix(".png"), force=True)]


def draw(records: Sequence[Record]) -> Figure:
    """A panel for each network, a tile for each number of hosts and link: Tatami over the best of all others."""
    figure = Figure(figsize=(11.0, 7.6), layout="constrained")
    panels: list[Axes] = list(figure.subplots(2, 3).flat)
    cells = grid(records)
    for place, (ax, network) in enumerate(zip(panels, SIZES, strict=False)):
        for row, hosts in enumerate(SPEEDS):
            for column, bandwidth in enumerate(BANDWIDTHS):
                _tile(ax, row, column, rates(cells[network, hosts, bandwidth]))
        ax.set_title(NETWORKS[network], fontsize=17)
        ax.set_xlim(0, len(BANDWIDTHS))
        ax.set_ylim(len(SPEEDS), 0)
        ax.set_xticks([each + 0.5 for each in range(len(BANDWIDTHS))], list(LINKS.values()), fontsize=13)
        rows = [f"{hosts} hosts" for hosts in SPEEDS] if place % 3 == 0 else [""] * len(SPEEDS)
        ax.set_yticks([each + 0.5 for each in range(len(SPEEDS))], rows, fontsize=13)
        ax.tick_params(length=0)
        ax.spines[:].set_visible(False)
    for ax in panels[len(SIZES) :]:
        _key(ax)
    return figure


def _tile(ax: Axes, row: int, column: int, own: Mapping[str, float]) -> None:
    others = {name: rate for name, rate in own.items() if name in _SHORT}
    if "tatami" not in own or not others:
        ax.add_patch(Rectangle((column, row), 1, 1, facecolor="white", edgecolor=GREY, linewidth=0.5))
        return
    rival = max(others, key=others.__getitem__)
    gain = own["tatami"] / others[rival]
    colour = _colour(gain)
    ax.add_patch(Rectangle((column, row), 1, 1, facecolor=colour, edgecolor="white", linewidth=3))
    ink = ink_on(colour)
    ax.text(column + 0.5, row + 0.42, f"{gain:.2f} x", ha="center", va="center", fontsize=17, color=ink)
    ax.text(column + 0.5, row + 0.76, _SHORT[rival], ha="center", va="center", fontsize=11, color=ink)


def _colour(gain: float) -> str:
    """Moss where Tatami is ahead, rust where it is behind, straw between."""
    if abs(gain - 1) <= _EVEN:
        return STRAW_TO_MOSS[0]
    far = min(1.0, 0.25 + 0.75 * abs(math.log2(gain)) / _FARTHEST)
    ends = [[int(colour[place : place + 2], 16) for place in (1, 3, 5)] for colour in ("#ffffff", MOSS if gain > 1 else RUST)]
    return "#" + "".join(f"{round(one + far * (other - one)):02x}" for one, other in zip(*ends, strict=True))


def _key(ax: Axes) -> None:
    ax.set_axis_off()
    ax.set_xlim(0, 1)
    ax.set_ylim(1, 0)
    examples = ((2.5, "Tatami is ahead"), (1.0, f"even, within {100 * _EVEN:.0f} %"), (0.8, "Tatami is behind"))
    for place, (gain, words) in enumerate(examples):
        top = 0.02 + 0.16 * place
        ax.add_patch(Rectangle((0.05, top), 0.14, 0.12, facecolor=_colour(gain), edgecolor=GREY, linewidth=0.5))
        ax.text(0.25, top + 0.06, words, va="center", fontsize=14, color=EDGE)
    told = (
        "Iterations of Tatami over those\nof the best of all others in the\nsame processes, and which it is.\n"
        "DDP is the one with weighted\nbatches; tatami DP is\ntatami.DataParallel"
    )
    ax.text(0.05, 0.81, told, va="center", fontsize=14, color=EDGE)


assert (set(NAMES), set(LINKS), set(NETWORKS)) == (set(CONTESTANTS), set(BANDWIDTHS), set(SIZES))
