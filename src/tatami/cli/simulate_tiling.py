"""`tatami simulate tiling`: simulate tilings and re-tiling on machines that you do not have."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.network_options import NetworkOptions
from tatami.cli.options import epilog, machines_of, optional, takes
from tatami.cli.simulate_losses import LossOptions, draw_losses_to, show_losses, simulate_losses
from tatami.cli.simulate_options import Cores, SweepOption, parse_sweep
from tatami.cli.terminal import show, show_json, width
from tatami.cluster import Cluster
from tatami.cluster.tables import nearest
from tatami.errors import InputError, shortened
from tatami.report import Table, blank, check_path, draw_watched, save
from tatami.report.bar import progress_for
from tatami.report.recommended import listed_machines
from tatami.report.tables import table_of
from tatami.report.words import wrapped
from tatami.retiling import Retiler
from tatami.tiling import DEFAULT_PLANNER, AlphaBetaCost, Layout, StagedLayout
from tatami.tiling.staged import fastest_plan
from tatami.units import format_duration
from tatami.workload import Workload, as_probed

if TYPE_CHECKING:
    from tatami.sim.tiling import Change, StagedJob, TilingJob, TilingRun

TILING_EPILOG = epilog(
    "tatami simulate tiling cluster.toml --net 203-80-26 --samples 1024 --planner srpm,even",
    "tatami simulate tiling --speeds 1,1,0.5,0.25 --slow p0:3@iteration:30 --retile --iterations 80",
    "tatami simulate tiling --speeds 1,1,1,1 --trace drawn:7 --retile --iterations 400 --plot-watch watched.png",
    "tatami simulate tiling cluster.toml --retile --sweep every=5,10,20 --json",
    "tatami simulate tiling cluster.toml --model gpt --samples 32 --stages 4 --retile --slow p0:3@iteration:30",
    "tatami simulate tiling --machines 8,64 --mtbf 6h,1d,7d --back 600s --net 1024-4096-64 --iterations 10000",
)
_SWEPT: dict[str, Callable[[str], Any]] = {"every": int, "iterations": int, "samples": int}


@dataclass(frozen=True, kw_only=True)
class SimulateTilingJob(LossOptions, NetworkOptions):
    """The options of `tatami simulate tiling`; their help texts describe the fields."""

    cluster: Annotated[
        Path | None, typer.Argument(metavar="CLUSTER.TOML", help="The machines and their links.", show_default=False)
    ] = None
    speeds: Annotated[str | None, typer.Option(help="Relative speeds of ranks of one host, instead of a file.")] = None
    planner: Annotated[
        list[str] | None,
        optional(metavar="A,B,...", help=f"Planners to simulate (default {DEFAULT_PLANNER}); may be repeated."),
    ] = None
    iterations: Annotated[int, typer.Option(min=1, help="Number of iterations.")] = 20
    stages: Annotated[int | None, optional(min=1, help="Pipeline stages of a GPT (--model gpt); 1: none.")] = None
    micro_batches: Annotated[int | None, optional(min=1, help="Number of micro-batches in every replica.")] = None
    slow: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME:F@WHEN", help="Slow a processor F-fold from iteration:N, or a time (2s); may be repeated."),
    ] = None
    trace: Annotated[
        str | None,
        optional(
            metavar="FILE|drawn[:SEED]",
            help="Slowdowns from a CSV file (when,processor,slower: iteration:30,p0,2; 1 ends one), or random ones.",
        ),
    ] = None
    retile: Annotated[bool, typer.Option("--retile", help="Re-tile when the speeds of processors change.")] = False
    every: Annotated[int | None, optional(min=1, help="Re-tile by DRPM, with a check every N iterations.")] = None
    sweep: SweepOption = None
    cores: Cores = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw time over iterations (.png, .pdf, .svg).")] = None
    plot_watch: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Draw speeds, alarms, prices and decisions of one run (.png, .pdf, .svg)."),
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each run, as it ends.")] = False

    @property
    def planners(self) -> list[str]:
        return [name.strip() for each in self.planner or [DEFAULT_PLANNER] for name in each.split(",")]


@takes(SimulateTilingJob)
def simulate_tiling(job: SimulateTilingJob) -> None:
    """Simulate the iterations of a tiled network with changing speeds, with or without re-tiling.

    With --mtbf machines die, and may join again, and the time lost by repairs and by restarts from checkpoints is compared.
    """
    if job.mtbf is not None:
        _simulate_losses(job)
        return
    if job.changed:
        raise InputError(f"{job.changed[0]} is for runs whose machines die: also give --mtbf, their mean life")
    from tatami.sim.platforms import ClusterPlatform
    from tatami.sim.processes import Runs
    from tatami.sim.tiling import StagedJob, TilingJob

    for path in (job.plot, job.plot_watch):
        if path is not None:
            check_path(path, force=job.force)
    swept = parse_sweep(job.sweep, known=_SWEPT)
    if not job.retile and (job.every is not None or swept.name == "every"):
        raise InputError("--every is for runs that re-tile: also give --retile")
    machines = machines_of(job.cluster, job.speeds)
    labels: list[str] = []
    jobs: list[TilingJob | StagedJob] = []
    for value in swept.values:
        given = {} if value is None else {swept.name: swept.read(_SWEPT[swept.name], value)}
        workload = _workload(job, machines, samples=given.get("samples", job.samples))
        iterations = given.get("iterations", job.iterations)
        every = given.get("every", job.every)
        retiler = Retiler() if every is None else Retiler(every=every)
        slowed = tuple(_change(text) for text in job.slow or ())
        late = [each.processor for each in slowed if (each.at_iteration or 0) > iterations]
        if late:
            warnings.warn(f"{', '.join(late)}: --slow begins after the last of {iterations} iterations", stacklevel=2)
        for each in slowed:
            if each.processor not in machines.by_name:
                raise InputError(f"--slow: there is no processor {each.processor!r}{nearest(each.processor, machines.by_name)}")
        changes = (*slowed, *_trace(job.trace, machines, iterations=iterations))
        for name in job.planners:
            labels.append(name + (f", {swept.name} {value}" if value else ""))
            layout = _layout(replace(job, every=every), name, cluster=machines, workload=workload)
            common: dict[str, Any] = {
                "platform": ClusterPlatform(cluster=machines), "cluster": machines, "workload": workload,
                "iterations": iterations, "changes": changes,
            }  # fmt: skip
            if isinstance(layout, StagedLayout):
                jobs.append(StagedJob(**common, layout=layout, retiles=job.retile, stages=job.stages))
            else:
                jobs.append(TilingJob(**common, layout=layout, retiler=retiler if job.retile else None))
    if job.plot_watch is not None and (len(jobs) != 1 or not job.retile or job.every is not None or swept.name):
        raise InputError("--plot-watch draws one run that is watched: with --retile, without --every, one planner, no --sweep")
    progress = progress_for()
    progress.start("simulating", total=len(jobs), unit="runs")

    def done(index: int, run: TilingRun) -> None:
        progress.advance(1, fields={"planner": labels[index]})
        if job.as_json:
            show_json(tiling_record(labels[index], run, processors=jobs[index].layout.processors))

    with Runs(cores=job.cores) as started:
        found = started.map(_rehearse, jobs, done=done)
    progress.finish()
    longest_s = max(run.total_s for run in found)
    for each in map(_change, job.slow or ()):
        if (begins_s := each.at_s or 0.0) >= longest_s:
            times = f"begins after {format_duration(begins_s)}, and the run ends after {format_duration(longest_s)}"
            warnings.warn(f"{each.processor}: --slow {times}", stacklevel=2)
    if not job.as_json:
        show(_table(labels, found, title=f"{job.called}, {machines.size} processors"))
        for label, own in zip(labels, jobs, strict=True):
            if len(own.layout.processors) < own.cluster.size:
                show(
                    "",
                    wrapped(f"{label}: {_who_works(own.layout, machines=own.cluster, workload=own.workload)}", width=width()),
                )
        for label, run in zip(labels, found, strict=True):
            for decision in run.decisions:
                show(f"{label}: {decision.reason}")
    if job.plot is not None:
        _draw(labels, found, path=job.plot, force=job.force)
    if job.plot_watch is not None:
        figure, ax = blank(width_in=9.0, height_in=5.5)
        ax.remove()
        above, below = figure.subplots(2, sharex=True, height_ratios=(2, 1))
        run = found[0]
        draw_watched(
            above,
            below,
            names=list(machines.by_name),
            glances=run.glances,
            alarms=run.alarms,
            decisions=run.decisions,
            iterations=len(run.iteration_s),
        )
        save(figure, job.plot_watch, force=job.force)


def _workload(job: SimulateTilingJob, machines: Cluster | None, *, samples: int) -> Workload:
    workload = replace(job.workload(samples=samples), micro_batches=job.micro_batches)
    return workload if machines is None else as_probed(workload, machines)


def _layout(job: SimulateTilingJob, planner: str, *, cluster: Cluster, workload: Workload) -> Layout | StagedLayout:
    """Return the planner's layout; the one with the least predicted time may have stages, as in a run."""
    if planner != DEFAULT_PLANNER and (job.stages or 1) > 1:
        raise InputError(f"--stages are laid out by the least predicted time: leave out --planner {shortened(planner)}")
    if (job.stages or 1) > 1 and not workload.pieces:
        raise InputError("--stages divide the layers of a GPT: give --model gpt with --layers, --width, ...")
    if (job.stages or 1) > 1 and job.every is not None:
        raise InputError("with --stages, --retile checks every iteration: leave out --every")
    if planner != DEFAULT_PLANNER or job.stages == 1 or job.every is not None or job.trace is not None:
        workload = replace(workload, pieces=())
    return fastest_plan(planner, cluster=cluster, workload=workload, stages=job.stages, idle=True).layout


def _who_works(layout: Layout | StagedLayout, *, machines: Cluster, workload: Workload) -> str:
    """Which machines have work, and what an iteration would take if only these were started, which `tatami plan` prices."""
    placed = layout.processors
    who = f"{listed_machines(placed, cluster=machines)} {'has' if len(placed) == 1 else 'have'} work"
    if isinstance(layout, StagedLayout):
        return f"{who}; the others are in the run, too."
    alone = AlphaBetaCost().price(layout, cluster=machines.only(placed), workload=replace(workload, pieces=()))
    return (
        f"{who}; the others are in the run, too, and hear the gradients of weights that every rank has. "
        f"Started without them, an iteration is predicted to take {format_duration(alone.total, digits=4)}."
    )


def _rehearse(job: TilingJob | StagedJob) -> TilingRun:
    from tatami.sim.tiling import StagedJob, rehearse, rehearse_stages

    return rehearse_stages(job) if isinstance(job, StagedJob) else rehearse(job)


def _simulate_losses(job: SimulateTilingJob) -> None:
    if job.plot is not None:
        check_path(job.plot, force=job.force)
    others = {
        "--slow": job.slow,
        "--trace": job.trace,
        "--plot-watch": job.plot_watch,
        "--retile": job.retile,
        "--every": job.every,
        "--sweep": job.sweep,
        "--stages": job.stages,
    }
    if other := [name for name, value in others.items() if value]:
        raise InputError(f"{other[0]} is not simulated together with --mtbf: leave one of them out")
    if len(job.planners) > 1:
        raise InputError(f"with --mtbf give one planner, not {shortened(', '.join(job.planners))!r}")
    if job.machines is not None and (job.cluster is not None or job.speeds is not None):
        raise InputError("which machines? Give --machines, or --speeds, or a cluster file; one of them")
    machines = None if job.machines is not None else machines_of(job.cluster, job.speeds)
    cases = simulate_losses(
        job,
        machines=machines,
        workload=_workload(job, machines, samples=job.samples),
        planner=job.planners[0],
        iterations=job.iterations,
        as_json=job.as_json,
    )
    if not job.as_json:
        show_losses(cases, title=f"{job.called}, {job.iterations:,} iterations, means of {job.runs} runs")
    if job.plot is not None:
        draw_losses_to(job.plot, cases, force=job.force)


def tiling_record(label: str, run: TilingRun, *, processors: Sequence[str]) -> dict[str, Any]:
    """Return the `--json` record of a run; `processors` have work when it begins, the others are in it without."""
    return {
        "planner": label,
        "processors": list(processors),
        "total_s": run.total_s,
        "first_s": run.iteration_s[0],
        "last_s": run.iteration_s[-1],
        "iterations": len(run.iteration_s),
        "bytes_moved": run.bytes_moved,
        "decisions": [
            {"iteration": each.iteration, "kind": each.kind.value, "ratio": each.ratio, "moving_s": move_s}
            for each, move_s in zip(run.decisions, run.move_s, strict=True)
        ],
    }


def _change(text: str) -> Change:
    """Parse p0:3@iteration:30, or p0:3@2s."""
    from tatami.sim.tiling import change_at

    name, colon, rest = text.partition(":")
    factor, at, when = rest.partition("@")
    try:
        if not (colon and at):
            raise ValueError("a part of it is missing")
        return change_at(when, processor=name, slower=float(factor))
    except ValueError as error:
        raise InputError(f"--slow is NAME:FACTOR@iteration:N or NAME:FACTOR@TIME: p0:3@2s; not {text!r} ({error})") from None


def _trace(given: str | None, machines: Cluster, *, iterations: int) -> tuple[Change, ...]:
    """Parse FILE, drawn, or drawn:SEED."""
    from tatami.sim.tiling import draw_trace, read_trace

    if given is None:
        return ()
    kind, _, seed = given.partition(":")
    if kind != "drawn":
        return read_trace(Path(given))
    if seed and not seed.isdigit():
        raise InputError(f"--trace drawn:SEED needs a whole number >= 0, such as drawn:7; not {given!r}")
    return draw_trace(list(machines.by_name), iterations=iterations, seed=int(seed or 0))


def _table(labels: Sequence[str], found: Sequence[TilingRun], *, title: str) -> Table:
    rows = [
        {
            "planner": label,
            "first\niteration": format_duration(run.iteration_s[0], digits=4),
            "last\niteration": format_duration(run.iteration_s[-1], digits=4),
            "iterations": f"{len(run.iteration_s):,}",
            "all": format_duration(run.total_s, digits=4),
            "slowest /\nfastest": f"{run.compute_s[-1][0] / run.compute_s[-1][1]:.2f}",
            "re-mappings": str(sum(decision.remaps for decision in run.decisions)),
        }
        for label, run in zip(labels, found, strict=True)
    ]
    totals = [run.total_s for run in found]
    return table_of(title, rows, texts=("planner",), best=totals.index(min(totals)))


def _draw(labels: Sequence[str], found: Sequence[TilingRun], *, path: Path, force: bool) -> None:
    figure, ax = blank()
    for label, run in zip(labels, found, strict=True):
        ax.step(range(1, len(run.iteration_s) + 1), [1000 * each for each in run.iteration_s], where="mid", label=label)
    ax.set_ylim(bottom=0)
    ax.set_xlabel("iteration")
    ax.set_ylabel("ms")
    ax.grid(alpha=0.25)
    ax.legend(frameon=False)
    save(figure, path, force=force)
