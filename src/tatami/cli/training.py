"""Runs a training job on one rank, and shows its outcome."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import torch
from rich.text import Text

from tatami.cli.terminal import show, tell, width
from tatami.cli.training_job import Prepared
from tatami.clock import NO_PACE, Pace
from tatami.comm import AbstractCommunicator
from tatami.datasets import Dataset
from tatami.model.describing_stages import StagesDescription
from tatami.progress import Progress
from tatami.records import Records
from tatami.report import CoursePoint, blank, draw_course, draw_text, save
from tatami.retiling import DecisionKind
from tatami.testing.slowdown import Slowdown
from tatami.tiling import Tiling
from tatami.train import Callback, History, Metric, Trainer, tile
from tatami.units import format_duration

STEADY = 20
"""Number of last iterations whose median time is reported, to exclude the first, slow ones and those before re-mappings."""


@dataclass(frozen=True, kw_only=True)
class TrainingOutcome:
    """The results of a run; the same on every rank except `iteration_s`, which is rank 0's.

    Attributes:
        history: the history of all iterations.
        loss: the loss over all training samples, after the last update.
        accuracy: the accuracies on the test samples, by name.
        tiling: the tiling at the end; with pipeline stages, that of the stage of rank 0.
        stages: which rank computes which pieces; None without pipeline stages.
        speeds: the last known speeds of the processors.
        iteration_s: the median time of the last `STEADY` iterations.
        batch_size: the global batch size.
    """

    history: History
    loss: float
    accuracy: dict[str, float]
    tiling: Tiling
    speeds: dict[str, float]
    iteration_s: float
    batch_size: int
    stages: StagesDescription | None = None

    @property
    def _laid_out(self) -> dict[str, Any]:
        if self.stages is not None:
            return {"stages": self.stages.to_dict()}
        return {
            "replicas": [[tile.processor for tile in replica] for replica in self.tiling.replicas],
            "samples": [replica[0].samples.size for replica in self.tiling.replicas],
            "units": [[tile.units.size for tile in replica] for replica in self.tiling.replicas],
        }

    @property
    def samples_per_s(self) -> float:
        """Samples of the last `STEADY` iterations over their seconds; the last batch of an epoch may be smaller."""
        return sum(self.history.num_samples[-STEADY:]) / sum(self.history.iteration_s[-STEADY:])

    def to_dict(self) -> dict[str, Any]:
        """Return the outcome for JSON."""
        return {
            "loss": self.loss,
            "accuracy": self.accuracy,
            "iterations": len(self.history.losses),
            "stopped": self.history.stopped,
            "seconds": sum(self.history.iteration_s),
            "iteration_s": self.iteration_s,
            "samples_per_s": self.samples_per_s,
            "speeds": self.speeds,
            **self._laid_out,
            "checks": [
                {
                    "iteration": check.decision.iteration,
                    "decision": check.decision.kind.value,
                    "imbalance": check.imbalance,
                    "moved_units": check.moved.num_units if check.moved else 0,
                    "reason": check.decision.reason,
                }
                for check in self.history.checks
            ],
        }


def train(
    prepared: Prepared, comm: AbstractCommunicator, *, progress: Progress | None = None, callbacks: Sequence[Callback] = ()
) -> TrainingOutcome:
    """Train as the job says. Collective.

    Raises:
        NotFiniteError: the loss became NaN or infinite; the last good state was saved next to the output file.
    """
    job = prepared.job
    pace: Pace = NO_PACE
    if prepared.emulation is not None:
        pace = Slowdown(prepared.emulation.factors[comm.rank])
    records = Records()
    if comm.rank == 0 and (job.log or job.tensorboard):
        records = Records(job.log, tensorboard=job.tensorboard, force=job.force, settings=job.record())
    with records:
        model = tile(
            prepared.model,
            comm,
            batch_size=prepared.batch_size,
            sample=prepared.sample,
            speeds=_speeds(prepared),
            planner=prepared.planner,
            wire=job.wire,
            device=job.device,
            quiet=True,
            pace=pace,
            stages=job.stages if prepared.retiler is None or prepared.retiler.knows_stages else 1,
            micro_batches=job.micro_batches,
        )
        if comm.rank == 0 and model.comm.on_devices:
            tell(model.comm.describe())
        trainer = Trainer(
            model,
            optimizer=prepared.make_optimizer,
            loss=prepared.task.loss,
            retile=prepared.retiler,
            records=records,
            progress=progress,
            callbacks=callbacks,
            rescue_dir=job.save.parent if job.save is not None else Path(),
            seed=job.seed,
        )
        if job.load is not None:
            trainer.load(job.load)
        history = trainer.fit(
            (prepared.task.train.x, prepared.task.train.y),
            batch_size=prepared.batch_size,
            epochs=job.epochs,
            iterations=prepared.iterations,
            stop_below=job.stop_below,
        )
        loss = trainer.evaluate((prepared.task.train.x, prepared.task.train.y), batch_size=prepared.batch_size)["loss"]
        accuracy = _accuracy(trainer, prepared.task.test, batch_size=prepared.batch_size)
        if job.save is not None:
            trainer.save(job.save, force=job.force)
    estimated = history.checks[-1].decision.speeds if history.checks else model.cluster.speeds
    return TrainingOutcome(
        history=history,
        loss=loss,
        accuracy=accuracy,
        tiling=model.tiling,
        stages=model.describe().stages,
        speeds=dict(estimated),
        iteration_s=statistics.median(history.iteration_s[-STEADY:]),
        batch_size=prepared.batch_size,
    )


def course(history: History, *, every: int) -> list[CoursePoint]:
    """Return the median time of an iteration in each interval; intervals end at every check, and after `every` iterations."""
    kinds: dict[DecisionKind, Literal["whole", "replica"]] = {
        DecisionKind.WHOLE: "whole",
        DecisionKind.REPLICAS: "replica",
        DecisionKind.SAMPLES: "replica",
    }
    decisions = {check.decision.iteration: check.decision.kind for check in history.checks}
    total = len(history.iteration_s)
    ends = sorted({*decisions, *range(every, total + 1, every), total} - {0})
    return [
        CoursePoint(
            iteration=end,
            iteration_s=statistics.median(history.iteration_s[start:end]),
            remapping=kinds.get(decisions[end]) if end in decisions else None,
        )
        for start, end in pairwise([0, *ends])
    ]


def _speeds(prepared: Prepared) -> Any:
    """Return the speeds for the planner: given ones, measured ones, or equal ones if it would not use them."""
    if prepared.job.method == "drpm":
        return "equal"
    if prepared.machines is not None:
        return prepared.machines
    return "equal" if prepared.planner == "even" else "measure"


def _accuracy(trainer: Trainer, data: Dataset, *, batch_size: int) -> dict[str, float]:
    names = list(data.accuracy(torch.zeros(1, data.outputs), data.y[:1]))

    def metric(name: str) -> Metric:
        return lambda output, target: data.accuracy(output, target)[name]

    values = trainer.evaluate((data.x, data.y), batch_size=batch_size, metrics={name: metric(name) for name in names})
    return {name: values[name] for name in names}


MATS_WIDTH = 72


def tell_emulation(prepared: Prepared) -> None:
    """Print the emulated speeds, and by how much everything is slower than on real machines."""
    emulation = prepared.emulation
    if emulation is None or prepared.machines is None:
        return
    speeds = " ".join(f"{name} {speed:g}" for name, speed in prepared.machines.speeds.items())
    scale = ""
    if emulation.scale > 1:
        scale = f"; the ranks share too few cores, so everything is {emulation.scale:.2f} times slower than on such machines"
    tell(f"emulated speeds: {speeds}{scale}", style="dim")


def show_outcome(prepared: Prepared, outcome: TrainingOutcome) -> None:
    """Print a summary of a run, and its tiles at the end."""
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
        balance = f"slowest / fastest {checks[0].imbalance:.2f} at the start, {checks[-1].imbalance:.2f} at the end"
        moves = sum(check.decision.remaps for check in checks)
        rows.append(("balance", f"{balance}; {moves} re-mappings in {len(checks)} checks"))
    rows += [(name, str(path)) for name, path in (("weights", job.save), ("log", job.log), ("course", job.plot)) if path]
    ranks = f"{prepared.ranks} rank{'s' if prepared.ranks > 1 else ''}"
    show(Text(f"{job.data} {task.net}, {ranks}, {job.method}", style="bold"))
    for name, value in rows:
        show(f"  {name:<9}  {value}")
    if outcome.stages is not None:
        show("", outcome.stages.text(width=width()))
    elif prepared.ranks > 1:
        show("", draw_text(outcome.tiling, speeds=outcome.speeds, width=min(MATS_WIDTH, width())))


def plot_course(outcomes: Sequence[tuple[str, TrainingOutcome]], path: Path, *, every: int, force: bool) -> None:
    """Draw the time per iteration of one or more runs, by name, with their re-mappings."""
    figure, ax = blank()
    for name, outcome in outcomes:
        draw_course(ax, course(outcome.history, every=every), label=name)
    save(figure, path, force=force)
