"""Tables of planners and of runs: one table, three ways to show it (rich, plain text, Markdown)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import TYPE_CHECKING

from tatami.cluster import Cluster, SpeedTable
from tatami.cluster.speed_table import MEASURED_FROM
from tatami.errors import InputError, MissingExtraError
from tatami.report.measured_rounds import Efficiency
from tatami.tiling import Plan, tile_flop
from tatami.units import format_duration, format_flop, format_speed

if TYPE_CHECKING:
    from rich.table import Table as RichTable

SHOWN = 6
"""So many items of a list are shown; of more, the first two and the last."""


@dataclass(frozen=True, kw_only=True)
class Table:
    """Cells as texts, rows of the same length as `headers`.

    A cell may have several lines. `numbers` are the columns set to the right; `best` is the row to be seen first.
    """

    title: str
    headers: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    numbers: frozenset[int] = frozenset()
    best: int | None = None

    def to_rich(self) -> RichTable:
        """For a terminal.

        Raises:
            MissingExtraError: rich is not installed.
        """
        try:
            from rich import box
            from rich.table import Table as RichTable
            from rich.text import Text
        except ModuleNotFoundError as error:
            raise MissingExtraError("rich", extra="cli") from error
        table = RichTable(
            title=self.title,
            title_justify="left",
            title_style="bold",
            box=box.SIMPLE_HEAD,
            pad_edge=False,
            collapse_padding=True,
        )
        for index, header in enumerate(self.headers):
            # A wrapped line would no longer stand beside the lines it belongs to.
            table.add_column(header, justify="right" if index in self.numbers else "left", no_wrap=True)
        for index, row in enumerate(self.rows):
            # As Text: a processor called "[red]" is a name, not a colour.
            table.add_row(*map(Text, row), style="bold green" if index == self.best else None)
        return table

    def to_text(self, *, gap: int = 2) -> str:
        """Plain, for a log or a pipe; the best row is led by `*`, as a last line says, and `gap` spaces are between columns."""
        lead = ["", *("*" if index == self.best else "" for index in range(len(self.rows)))]
        rows = [self.headers, *self.rows]
        lines = [(mark if first else "", *cells) for mark, row in zip(lead, rows, strict=True) for first, cells in _lines(row)]
        widths = [max(len(line[index]) for line in lines) for index in range(len(self.headers) + 1)]
        aligned = [
            (" " * gap)
            .join(
                cell.rjust(width) if index - 1 in self.numbers else cell.ljust(width)
                for index, (cell, width) in enumerate(zip(line, widths, strict=True))
            )
            .rstrip()
            for line in lines
        ]
        height = sum(1 for _ in _lines(self.headers))
        rule = (" " * gap).join("-" * width if width > 1 else " " * width for width in widths)
        legend = [] if self.best is None else ["* best row"]
        return "\n".join([self.title, "", *aligned[:height], rule, *aligned[height:], *legend])


def table_of(title: str, rows: Sequence[Mapping[str, str]], *, texts: Collection[str], best: int | None = None) -> Table:
    """A table of rows, one or more, that all name their columns in the same order; those but `texts` are numbers."""
    headers = tuple(rows[0])
    numbers = frozenset(index for index, header in enumerate(headers) if header not in texts)
    return Table(title=title, headers=headers, rows=tuple(tuple(row.values()) for row in rows), numbers=numbers, best=best)


@dataclass(frozen=True, kw_only=True)
class MethodResult:
    """What was measured of one method.

    Attributes:
        method: its name; the run that the others are compared with is called "even", or is the first.
        iteration_s: seconds per iteration.
        samples_per_s: samples per second of all ranks together.
        efficiency: gamma, with its spread; None where it was not measured. One that cannot be is left out.
    """

    method: str
    iteration_s: float
    samples_per_s: float
    efficiency: Efficiency | None = None


def sized_table(plan: Plan, *, cluster: Cluster) -> Table | None:
    """The speeds that depend on the size of the tile, and what they are under `plan`; None where none does."""
    flop = tile_flop(plan.layout, workload=plan.workload)
    rows = []
    for name, own in flop.items():
        speed = cluster.by_name[name].speed
        if isinstance(speed, SpeedTable):
            points = [f"{format_flop(size, digits=3)}: {_speed(at)}" for size, at in speed.points]
            size, at_size = format_flop(own, digits=3), _speed(speed.at(own))
            rows.append({"processor": name, "speed by size": _shortened(points), "tile": size, "speed": at_size})
    if not rows:
        return None
    return table_of(f"speeds by the size of the tile, and under {plan.planner}", rows, texts=("processor", "speed by size"))


def _speed(speed: float) -> str:
    return format_speed(speed, digits=3) if speed >= MEASURED_FROM else f"{speed:.3g}"


def run_table(runs: Sequence[MethodResult]) -> Table:
    """Methods side by side: time per iteration, samples/s, against even, efficiency.

    Raises:
        InputError: there is no run.
    """
    if not runs:
        raise InputError("there is no run to compare: measure at least one method")
    base = next((run for run in runs if run.method == "even"), runs[0])
    rows = [
        {
            "method": run.method,
            "per iteration": format_duration(run.iteration_s, digits=3),
            "samples/s": f"{run.samples_per_s:,.0f}",
            f"against {base.method}": f"{base.iteration_s / run.iteration_s:.2f} x",
            "efficiency": "-" if run.efficiency is None else run.efficiency.cell,
        }
        for run in runs
    ]
    best = min(range(len(runs)), key=lambda index: runs[index].iteration_s) if len(runs) > 1 else None
    title = f"{len(runs)} {'way' if len(runs) == 1 else 'ways'} to place the tiles"
    return table_of(title, rows, texts=("method",), best=best)


def _shortened(items: Sequence[str]) -> str:
    return " ".join(items if len(items) <= SHOWN else [*items[:2], "...", items[-1]])


def _lines(row: Sequence[str]) -> list[tuple[bool, tuple[str, ...]]]:
    """A row of cells of several lines as rows of one line each, with whether it is the first."""
    return [(index == 0, cells) for index, cells in enumerate(zip_longest(*(cell.split("\n") for cell in row), fillvalue=""))]
