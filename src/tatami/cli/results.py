"""The results of a training run for the terminal: a table, the tiles, a picture."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.text import Text

from tatami.cli.job import Prepared
from tatami.cli.terminal import show, tell, width
from tatami.cli.training import TrainingOutcome, course
from tatami.report import blank, draw_course, draw_text, save
from tatami.units import format_duration

MATS_WIDTH = 72


def tell_emulation(prepared: Prepared) -> None:
    """That ranks are slowed, to what, and how much slower than real machines everything is."""
    emulation = prepared.emulation
    if emulation is None or prepared.machines is None:
        return
    speeds = " ".join(f"{name} {speed:g}" for name, speed in prepared.machines.speeds.items())
    scale = ""
    if emulation.scale > 1:
        scale = f"; the ranks share too few cores, so all of it runs {emulation.scale:.2f} times slower than on such machines"
    tell(f"emulated speeds: {speeds}{scale}", style="dim")


def show_outcome(prepared: Prepared, outcome: TrainingOutcome) -> None:
    """The table of one run, and its tiles at the end."""
    job = prepared.job
    task, history = prepared.task, outcome.history
    what = "training samples" if task.test is task.train else "held out"
    accuracy = ", ".join(f"{name} {100 * value:.1f} %" for name, value in outcome.accuracy.items())
    stopped = {"loss": f"loss below {job.stop_below}", "epochs": "all epochs", "iterations": "all iterations"}
    ended = f"after {len(history.losses)} iterations: {stopped[history.stopped]}"
    rows = [
        ("loss", f"{outcome.loss:.6g} ({task.loss_name}) {ended}"),
        ("accuracy", f"{accuracy} of {task.test.samples} {what}"),
        ("samples/s", f"{outcome.samples_per_s:,.0f}"),
        ("iteration", f"{format_duration(outcome.iteration_s, digits=3)} of {outcome.batch_size} samples"),
    ]
    if checks := history.checks:
        balance = f"slowest / fastest {checks[0].imbalance:.2f} at first, {checks[-1].imbalance:.2f} at last"
        moves = sum(check.decision.remaps for check in checks)
        rows.append(("balance", f"{balance}; {moves} re-mappings in {len(checks)} checks"))
    rows += [(name, str(path)) for name, path in (("weights", job.save), ("log", job.log), ("course", job.plot)) if path]
    ranks = f"{prepared.ranks} rank{'s' if prepared.ranks > 1 else ''}"
    show(Text(f"{job.data} {task.net}, {ranks}, {job.method}", style="bold"))
    for name, value in rows:
        show(f"  {name:<9}  {value}")
    if prepared.ranks > 1:
        show("", draw_text(outcome.tiling, speeds=outcome.speeds, width=min(MATS_WIDTH, width())))


def plot_course(outcomes: Sequence[tuple[str, TrainingOutcome]], path: Path, *, every: int, force: bool) -> None:
    """The time per iteration of one or more runs, by name, with their re-mappings."""
    figure, ax = blank()
    for name, outcome in outcomes:
        draw_course(ax, course(outcome.history, every=every), label=name)
    save(figure, path, force=force)
