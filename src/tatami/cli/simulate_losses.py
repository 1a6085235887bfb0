"""`tatami simulate tiling --mtbf`: compare the time lost by repairs and by restarts from checkpoints when machines die."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import MOST_RANKS, finite, given
from tatami.cli.terminal import show, show_json
from tatami.cluster import Cluster, Processor
from tatami.errors import InputError, shortened
from tatami.report import blank, save
from tatami.report.bar import progress_for
from tatami.report.tables import table_of
from tatami.units import format_duration, parse_duration
from tatami.workload import Workload

if TYPE_CHECKING:
    from pathlib import Path

    from tatami.sim.elastic import LossyRun, LossySetup

_lossy = partial(typer.Option, rich_help_panel="Machines that die and join")
_REPAIR, _RESTART = "repair", "restart"
_HOUR_S = 3600.0


@dataclass(frozen=True, kw_only=True)
class LossOptions:
    """The options of `tatami simulate tiling` for machines that die; their help texts describe the fields."""

    mtbf: Annotated[
        str | None,
        _lossy(metavar="A,B,...", help="Mean time between failures of a machine; simulates deaths.", show_default=False),
    ] = None
    machines: Annotated[
        str | None, _lossy(metavar="N,M,...", help="Numbers of equal machines, instead of --speeds.", show_default=False)
    ] = None
    back: Annotated[str | None, _lossy(help="Time from a machine's death until it joins again.", show_default="never")] = None
    halt: Annotated[str, _lossy(help="Time until all have stopped and formed a new group in a repair.")] = "0.3 s"
    update: Annotated[float, _lossy(callback=finite, help="Fraction of an iteration in which a death repeats no step.")] = 0.0
    copies: Annotated[int, _lossy(help="Number of holders of every unit, 1 or 2.")] = 2
    restart: Annotated[str, _lossy(help="Time from a death until all train again in a restart.")] = "10.4 s"
    checkpoint_every: Annotated[int, _lossy(min=1, help="Iterations between the checkpoints of restarts.")] = 100
    checkpoint: Annotated[str, _lossy(help="Time that all wait for each checkpoint of restarts.")] = "0 s"
    runs: Annotated[int, _lossy(min=1, help="Runs of each case, with seeds from --seed on.")] = 10
    seed: Annotated[int, _lossy(help="Random seed of the first run.")] = 0

    @property
    def changed(self) -> list[str]:
        """The options with a value other than their default."""
        names = [each.name for each in fields(LossOptions) if getattr(self, each.name) != each.default]
        return [f"--{name.replace('_', '-')}" for name in names]


@dataclass(frozen=True, kw_only=True)
class _Case:
    machines: int
    mtbf_s: float
    policy: str
    runs: tuple[LossyRun, ...]

    @property
    def lost_fraction(self) -> float | None:
        """The mean over completed runs; None if there is none."""
        return statistics.fmean(run.lost_fraction for run in self.whole) if self.whole else None

    @property
    def total_s(self) -> float | None:
        """The mean over completed runs; None if there is none."""
        return statistics.fmean(run.total_s for run in self.whole) if self.whole else None

    @property
    def whole(self) -> list[LossyRun]:
        """The runs that completed all their steps; the total time of the others is not known."""
        return [run for run in self.runs if run.ended is None]


def simulate_losses(
    options: LossOptions, *, machines: Cluster | None, workload: Workload, planner: str, iterations: int, as_json: bool
) -> list[_Case]:
    """Simulate each number of machines with each mean life, with repairs and with restarts.

    Args:
        machines: the cluster; None: those of `--machines`.
    """
    from tatami.sim.elastic import rehearse_repair, rehearse_restart

    setups = _setups(options, machines=machines, workload=workload, planner=planner, iterations=iterations)
    progress = progress_for()
    progress.start("simulating", total=2 * len(setups) * options.runs, unit="runs")
    cases: list[_Case] = []
    for setup in setups:
        for policy, rehearse in ((_REPAIR, rehearse_repair), (_RESTART, rehearse_restart)):
            runs = []
            for seed in range(options.seed, options.seed + options.runs):
                runs.append(rehearse(setup, seed=seed))
                progress.advance(1, fields={"machines": str(setup.cluster.size), "after a death": policy})
            assert setup.mtbf_s is not None
            cases.append(_Case(machines=setup.cluster.size, mtbf_s=setup.mtbf_s, policy=policy, runs=tuple(runs)))
            if as_json:
                show_json(losses_record(cases[-1]))
    progress.finish()
    return cases


def losses_record(case: _Case) -> dict[str, Any]:
    """Return the `--json` record of runs that differ only in the seed."""
    return {
        "machines": case.machines,
        "mtbf_s": case.mtbf_s,
        "policy": case.policy,
        "lost_fraction": case.lost_fraction,
        "total_s": case.total_s,
        "runs": [{**asdict(run), "lost_s": run.lost_s, "lost_fraction": run.lost_fraction} for run in case.runs],
    }


def show_losses(cases: Sequence[_Case], *, title: str) -> None:
    """Print the table, and why runs ended early."""
    rows = [
        {
            "machines": f"{case.machines:,}",
            "mean life": format_duration(case.mtbf_s, digits=3),
            "after a death": case.policy,
            "whole run": "" if case.total_s is None else format_duration(case.total_s, digits=4),
            "lost": "" if case.lost_fraction is None else f"{100 * case.lost_fraction:.3g} %",
            "redone": _mean_s(case, "redone_s"),
            "stopped": _mean_s(case, "stopped_s"),
            "rows": _mean_s(case, "moved_s"),
            "deaths": f"{statistics.fmean(run.deaths for run in case.runs):.1f}",
            "ended\nearly": f"{len(case.runs) - len(case.whole)} of {len(case.runs)}",
        }
        for case in cases
    ]
    show(table_of(title, rows, texts=("after a death",)))
    if not any(run.deaths for case in cases for run in case.runs):
        show("no machine died in any of these runs, which are short compared with the mean lives: give more --iterations")
    for case in cases:
        if ended := next((run for run in case.runs if run.ended is not None), None):
            show(
                f"{case.machines:,} machines, {case.policy}, seed {ended.seed} ended after {ended.steps:,} steps: {ended.ended}"
            )


def draw_losses_to(path: Path, cases: Sequence[_Case], *, force: bool) -> None:
    """Draw the fraction of time lost over mean lives, a line for each number of machines and policy; over numbers of machines
    if there is only one mean life."""
    figure, ax = blank()
    points = [case for case in cases if case.lost_fraction is not None]
    policies = list(dict.fromkeys(point.policy for point in points))
    over_machines = len({point.mtbf_s for point in points}) < 2
    kinds = sorted({point.mtbf_s if over_machines else point.machines for point in points})
    for place, kind in enumerate(kinds):
        for policy, style in zip(policies, ("solid", "dashed"), strict=False):
            line = sorted(
                (point.machines if over_machines else point.mtbf_s / _HOUR_S, 100 * (point.lost_fraction or 0.0))
                for point in points
                if point.policy == policy and kind == (point.mtbf_s if over_machines else point.machines)
            )
            label = policy if over_machines else f"{kind:,} machines, {policy}"
            if line:
                ax.plot(*zip(*line, strict=True), color=f"C{place}", linestyle=style, marker="o", label=label)
    ax.set_xscale("log")
    ax.set_ylim(bottom=0)
    ax.set_xlabel("machines" if over_machines else "mean life of a machine, hours")
    ax.set_ylabel("% of the time lost")
    ax.grid(alpha=0.25)
    if points:
        ax.legend(frameon=False)
    save(figure, path, force=force)


def _setups(
    options: LossOptions, *, machines: Cluster | None, workload: Workload, planner: str, iterations: int
) -> list[LossySetup]:
    from tatami.sim.elastic import LossySetup

    assert options.mtbf is not None
    if not 0 <= options.update < 1:
        raise InputError(f"--update must be a fraction of an iteration from 0 to below 1, not {options.update:g}")
    mtbfs_s = [given("--mtbf", parse_duration, text.strip()) for text in options.mtbf.split(",")]
    clusters = [machines] if machines is not None else [_equal(number) for number in _numbers(options.machines or "")]
    first = LossySetup(
        cluster=clusters[0],
        workload=workload,
        iterations=iterations,
        planner=planner,
        back_s=None if options.back is None else given("--back", parse_duration, options.back),
        copies=options.copies,
        halt_s=given("--halt", parse_duration, options.halt),
        update_fraction=options.update,
        checkpoint_steps=options.checkpoint_every,
        checkpoint_s=given("--checkpoint", parse_duration, options.checkpoint),
        restart_s=given("--restart", parse_duration, options.restart),
    )
    setups = [replace(first, cluster=cluster, mtbf_s=mtbf_s) for cluster in clusters for mtbf_s in mtbfs_s]
    for cluster in clusters:
        first.lay(cluster.processors)  # machines without a plan are refused before anything is printed
    return setups


def _equal(number: int) -> Cluster:
    """Make a cluster of `number` machines of speed 1, with one processor each."""
    return Cluster(processors=tuple(Processor(name=f"p{each}", speed=1.0, host=f"h{each}") for each in range(number)))


def _numbers(text: str) -> list[int]:
    found = []
    for each in (part.strip() for part in text.split(",")):
        if not (each.isascii() and each.isdecimal() and len(each) < 9 and 1 <= int(each) <= MOST_RANKS):
            raise InputError(f"--machines is N,M,... with numbers from 1 to {MOST_RANKS:,}: 8,64,512; not {shortened(text)!r}")
        found.append(int(each))
    return found


def _mean_s(case: _Case, name: str) -> str:
    if not case.whole:
        return ""
    return format_duration(statistics.fmean(getattr(run, name) for run in case.whole), digits=3)
