"""`tatami watch`: show a run in the terminal while it is running."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console, Group
from rich.live import Live
from rich.table import Table as RichTable
from rich.text import Text

from tatami.cli.options import epilog
from tatami.cli.terminal import is_terminal
from tatami.clock import Clock, SystemClock
from tatami.report.page import GrowingLog, RecordedRun, RunFacts, facts_of, read_run
from tatami.report.palette import PHASES
from tatami.units import format_size

EPILOG = epilog(
    "tatami train -n 4 --retile --log run.jsonl &",
    "tatami watch run.jsonl",
    "It ends with Ctrl-C, or when the run ends. `tatami report` makes a page from the same records.",
)
_LOOK_S = 0.5
_SETTLED_LOOKS = 6
"""Number of looks without a new record after which the run has ended, because a `fit` may be followed by another one."""
_BLOCKS = "▁▂▃▄▅▆▇█"
_LAST = 4
_WIDE, _WIDE_STAGED = 80, 100
"""Widths of a line from which the processes of ranks are also shown, without and with pipeline stages."""
_PHASES = "then milliseconds of an iteration, on average since the tiling began; sums include waits for other ranks"
_TILED = f"share of the work; speed, relative to the fastest rank; {_PHASES}"
_STAGED = f"stage; memory, as planned; {_PHASES}"
_MOST_RANKS = 16


def watch(
    records: Annotated[Path, typer.Argument(metavar="RUN.jsonl", help="Log written by --log or Trainer(records=...).")],
    *,
    once: Annotated[bool, typer.Option("--once", help="Show the current state once and exit.")] = False,
) -> None:
    """Show a run while it is running: losses, the share and the time of each rank, re-tilings and deaths.

    It reads the log that the run writes, on the same machine or in a shared folder, and does not disturb the run. If the output
    is not a terminal, it shows the current state and exits.
    """
    console = Console()
    if once or not is_terminal(sys.stdout):
        console.print(frame(read_run(records), name=records.name, columns=console.width))
        return
    try:
        follow(GrowingLog(records), name=records.name, console=console, clock=SystemClock())
    except KeyboardInterrupt:
        raise typer.Exit from None


def follow(log: GrowingLog, *, name: str, console: Console, clock: Clock) -> None:
    """Show the run until it has ended.

    Args:
        log: the log of the run.
        name: the name shown above the run.
        console: a terminal.
        clock: sleeps between two looks.
    """
    seen, unchanged = 0, 0
    with Live(Text(f"waiting for {name}"), console=console, auto_refresh=False) as live:
        while True:
            run = log.read()
            if run is not None and len(run.records) != seen:
                seen, unchanged = len(run.records), 0
                live.update(frame(run, name=name, columns=console.width), refresh=True)
            elif run is not None and run.records[-1]["event"] in ("end", "error"):
                unchanged += 1
                if unchanged >= _SETTLED_LOOKS:
                    return
            clock.sleep(_LOOK_S)


def frame(run: RecordedRun, *, name: str, columns: int) -> Group:
    """Show the state of a run, `columns` characters wide."""
    facts = facts_of(run)
    parts: list[Text | RichTable] = [Text.assemble((name, "bold"), "  ", _head(run))]
    losses = [row["loss"] for row in facts.losses if row["what"] == "training"]
    if losses:
        parts.append(_curve("loss", losses, columns=columns))
    elif run.records[-1]["event"] not in ("end", "error"):
        parts.append(Text("no loss yet: a Trainer writes it every record_every iterations", style="dim"))
    if facts.rates:
        parts.append(_curve("samples/s", [row["rate"] for row in facts.rates], columns=columns))
    if facts.steps:
        parts += [Text(""), _floor(facts), Text(_STAGED if facts.stages else _TILED, style="dim")]
        parts.append(_ranks(facts, run, columns=columns))
    moves = [(f"iteration {row['iteration']:,}: ", row["reason"]) for row in facts.decisions]
    parts += _section("re-tiled", [f"after {when}{reason.removeprefix(when)}" for when, reason in moves])
    changes = [row for row in run.of("tiling") if re.search(r" (gone|joined)(;|$)", row.get("why", ""))]
    parts += _section("ranks", [f"after iteration {row['iteration']:,}: {row['why']}" for row in changes])
    parts += _section("deaths and repairs", [": ".join(filter(None, list(row.values())[:3])) for row in facts.deaths])
    return Group(*parts)


def sparkline(values: Sequence[float | None], *, columns: int) -> str:
    """Draw values as at most `columns` blocks: each is the last value of its interval, or blank if that is None."""
    count = min(columns, len(values))
    shown = [values[(index + 1) * len(values) // count - 1] for index in range(count)]
    known = [value for value in shown if value is not None and math.isfinite(value)]
    low, high = min(known, default=0.0), max(known, default=0.0)
    step = (high - low) / (len(_BLOCKS) - 1) or 1.0
    return "".join(
        " " if value is None or not math.isfinite(value) else _BLOCKS[round((value - low) / step)] for value in shown
    )


def _head(run: RecordedRun) -> str:
    last = run.records[-1]
    iteration = max((record["iteration"] for record in run.records if "iteration" in record), default=0)
    how = {"end": f"ended ({last.get('stopped', 'done')})", "error": f"ended by {last.get('kind', 'an error')}"}
    epochs = [record["epoch"] for record in run.of("train") if "epoch" in record]
    epoch = f" in epoch {epochs[-1] + 1}" if epochs else ""  # the records count from 0
    return f"iteration {iteration:,}{epoch}  {how.get(last['event'], 'running')}"


def _curve(name: str, values: Sequence[float | None], *, columns: int) -> Text:
    shown = [math.nan if value is None else value for value in (values[0], values[-1])]
    first, last = (f"{value:,.0f}" if 1000 <= abs(value) < 1e15 else f"{value:.4g}" for value in shown)
    room = max(1, columns - 10 - len(first) - len(last) - 4)
    return Text.assemble(f"{name:<10}", (first, "dim"), " ", (sparkline(values, columns=room), "cyan"), " ", (last, "bold"))


def _floor(facts: RunFacts) -> Text:
    step = facts.steps[-1]
    replicas = f"{step['replicas']} replica{'s' if step['replicas'] != 1 else ''}"
    units = f"{step['stages']} stages" if step["stages"] else f"{step['units']:,} units"
    changed = f", tiling {len(facts.steps)}" if len(facts.steps) > 1 else ""
    return Text(f"{step['samples']:,} samples x {units} in {replicas}{changed}", style="bold")


def _ranks(facts: RunFacts, run: RecordedRun, *, columns: int) -> RichTable:
    """Make a table of the ranks of the newest tiling."""
    number = len(facts.steps) - 1
    staged = {each["rank"]: each for each in (facts.stages or {}).get("ranks", ())}
    area = facts.steps[-1]["samples"] * facts.steps[-1]["units"]
    tiles = {row["rank"]: row for row in facts.tiles if row["step"] == number}
    speeds = {row["rank"]: row["speed"] for row in facts.speeds}  # the newest of each
    spent_ms = {(row["rank"], row["phase"]): row["ms"] for row in facts.phases if row["step"] == number}
    events = run.of("processes")
    processes: dict[str, str] = events[-1]["ranks"] if events and columns >= (_WIDE_STAGED if staged else _WIDE) else {}
    table = RichTable(box=None, pad_edge=False, header_style="dim")
    phases = [phase for phase in PHASES if any(row["phase"] == phase for row in facts.phases)] or [*PHASES][:5]
    table.add_column("rank")
    for head in (*(("stage", "memory") if staged else ("share", "speed")), *(PHASES[phase][0] for phase in phases)):
        table.add_column(head if columns >= _WIDE_STAGED else head.replace(" ", "\n"), justify="right")
    if processes:
        table.add_column("process")
    for rank in facts.ranks[:_MOST_RANKS]:
        tile = tiles.get(rank)
        share = 0.0 if tile is None else (tile["x2"] - tile["x1"]) * (tile["y2"] - tile["y1"]) / area
        times = [spent_ms.get((rank, phase)) for phase in phases]
        speed = speeds.get(rank)
        table.add_row(
            rank,
            *(_place(staged.get(rank)) if staged else (f"{100 * share:.1f} %", "-" if speed is None else f"{speed:.2f}")),
            *("-" if time_ms is None else f"{time_ms:.3g}" for time_ms in times),
            *([processes.get(rank, "-")] if processes else []),
            style="dim" if tile is None else "",
        )
    if len(facts.ranks) > _MOST_RANKS:
        table.add_row(f"and {len(facts.ranks) - _MOST_RANKS} more")
    return table


def _place(rank: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the stage that a rank computes, and the memory planned for it."""
    return ("-", "-") if rank is None else (f"{rank['stage']}", format_size(rank["memory_bytes"], digits=3))


def _section(what: str, lines: Sequence[str]) -> list[Text]:
    if not lines:
        return []
    more = f" (of {len(lines)}, the last {_LAST})" if len(lines) > _LAST else ""
    return [Text(""), Text(f"{what}{more}", style="bold"), *(Text(f"  {line}", overflow="ellipsis") for line in lines[-_LAST:])]
