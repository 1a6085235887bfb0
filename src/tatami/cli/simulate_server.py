"""`tatami simulate server`: simulate the time of a round and the cost of a death, under each recovery."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.options import epilog, finite, given, optional, takes
from tatami.cli.server_job import Recovery, recovery_of
from tatami.cli.simulate_options import Cores, PlatformFile, SweepOption, chosen_platform, parse_sweep
from tatami.cli.terminal import show, show_json
from tatami.cluster.cluster import MOST_PROCESSORS
from tatami.errors import InputError
from tatami.inputs import LARGEST_SEED
from tatami.report import Table, blank, check_path, save
from tatami.report.bar import progress_for
from tatami.report.palette import MOSS
from tatami.report.tables import table_of
from tatami.units import parse_duration, parse_size

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from tatami.server.recovery import AbstractRecovery
    from tatami.sim.server import ServerRun, ServerSetup

PAPER = "paper-server-10k"
SERVER_EPILOG = epilog(
    "tatami simulate server --preset paper-server-10k --recovery checkpoint,servers,ignore --runs 10 --rounds 200",
    "tatami simulate server --preset paper-server-10k --recovery servers --sweep mtbf=30d,1y,3y --json",
    "tatami simulate server --preset paper-server-10k --workers 200 --recovery checkpoint --store 1 --sweep every=1,10,100",
)


MOST_RUNS = 100_000
_ROOM = 0.15
"""Space below and above the bars, as a fraction of what they differ by."""


class Resume(StrEnum):
    """The part of a dead worker's task that a spare does."""

    CONTINUE = "continue"
    RESTART = "restart"


_SWEPT: dict[str, tuple[str, Callable[[str], Any]]] = {
    "detection": ("detection_s", parse_duration),
    "every": ("", str),
    "link-mtbf": ("link_mtbf_s", parse_duration),
    "model": ("model_bytes", parse_size),
    "mtbf": ("mtbf_s", parse_duration),
    "replicas": ("replicas", int),
    "resume": ("resume", lambda text: Resume(text).value),
    "rounds": ("rounds", int),
    "server-mtbf": ("server_mtbf_s", parse_duration),
    "spares": ("spares", int),
    "spawn": ("spawn_s", parse_duration),
    "store": ("", int),
    "workers": ("", int),
}
"""Options that can be swept: the field of `ServerSetup` ("" if it is not a field), and the parser of its values."""
_FIELDS = frozenset(name for name, (field, _) in _SWEPT.items() if field)


@dataclass(frozen=True, kw_only=True)
class SimulateServerJob:
    """The options of `tatami simulate server`; their help texts describe the fields."""

    preset: Annotated[str | None, optional(help="Name of a platform: paper-server-10k or oakforest-like.")] = None
    platform: PlatformFile = None
    workers: Annotated[int | None, typer.Option(min=1, help="Number of workers.", show_default="all but the servers")] = None
    servers: Annotated[int, typer.Option(min=1, help="Number of servers; with --platform the last hosts.")] = 1
    recovery: Annotated[str, typer.Option(metavar="A,B,...", help="Recovery policies.")] = "checkpoint,servers,ignore"
    every: Annotated[str, typer.Option(metavar="N|daly", help="Rounds between checkpoints.")] = "1"
    checkpoint_waits: Annotated[
        bool, typer.Option("--checkpoint-waits", help="Begin the next round only when the checkpoint is written.")
    ] = False
    checkpoint: Annotated[str, typer.Option(help="Size of a worker's checkpoint.")] = "8 GB"
    store: Annotated[
        int, typer.Option(min=0, metavar="N", help="Keep all checkpoints on N of the servers' machines, not on each node.")
    ] = 0
    runs: Annotated[int, typer.Option(min=1, max=MOST_RUNS, help="Runs of each recovery, each with its own seed.")] = 10
    rounds: Annotated[int, typer.Option(min=1, help="Number of rounds of each run.")] = 200
    seed: Annotated[int, typer.Option(min=0, max=LARGEST_SEED, help="Random seed of the first run.")] = 0
    resume: Annotated[
        Resume | None, typer.Option(help="A spare continues a task, or restarts it.", show_default="restart; preset: continue")
    ] = None
    task: Annotated[
        float, typer.Option(callback=finite, help="Work of one worker in a round, in the unit of the platform's speeds.")
    ] = 100.0
    model: Annotated[str, typer.Option(help="Bytes that a worker pulls, and pushes, in a round.")] = "1 GB"
    mtbf: Annotated[str, typer.Option(help="Mean time between a worker's failures.")] = "3y"
    server_mtbf: Annotated[str | None, typer.Option(help="Mean time between a server's failures.", show_default="never")] = None
    link_mtbf: Annotated[str | None, typer.Option(help="Mean time between failures of a link.", show_default="never")] = None
    detection: Annotated[str, typer.Option(help="Time from a death until it is detected.")] = "0 s"
    spawn: Annotated[str, typer.Option(help="Time to start a machine.")] = "5 s"
    spares: Annotated[int, typer.Option(min=0, max=MOST_PROCESSORS, help="Spare machines, already started.")] = 0
    replicas: Annotated[int, typer.Option(min=1, help="Number of servers that hold each parameter.")] = 1
    sweep: SweepOption = None
    cores: Cores = None
    plot: Annotated[Path | None, typer.Option(metavar="FILE", help="Draw times, and losses in FILE-per-failure.")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON line for each run, as it ends.")] = False

    def setup(self, swept_to: Mapping[str, Any]) -> ServerSetup:
        """Make the setup to simulate, without the recovery; `swept_to` has the value of the swept option, if any."""
        base = _machines(
            self.preset, self.platform, workers=swept_to.get("workers", self.workers), servers=self.servers, rounds=self.rounds
        )
        swept = {_SWEPT[name][0]: value for name, value in swept_to.items() if name in _FIELDS}
        return _with_store(
            replace(base, **self._fields() | swept),
            swept_to.get("store", self.store),
            waits=self.checkpoint_waits,
            size_bytes=given("--checkpoint", parse_size, self.checkpoint),
        )

    def _fields(self) -> dict[str, Any]:
        """The fields of `ServerSetup` that are options."""
        return {
            "task_flop": self.task,
            "model_bytes": given("--model", parse_size, self.model),
            "mtbf_s": given("--mtbf", parse_duration, self.mtbf),
            "server_mtbf_s": None if self.server_mtbf is None else given("--server-mtbf", parse_duration, self.server_mtbf),
            "link_mtbf_s": None if self.link_mtbf is None else given("--link-mtbf", parse_duration, self.link_mtbf),
            "detection_s": given("--detection", parse_duration, self.detection),
            "spawn_s": given("--spawn", parse_duration, self.spawn),
            "spares": self.spares,
            "replicas": self.replicas,
            **({} if self.resume is None else {"resume": self.resume.value}),
        }


@takes(SimulateServerJob)
def simulate_server(job: SimulateServerJob) -> None:
    """Simulate training on parameter servers, and the cost of workers' deaths under each recovery."""
    from tatami.sim.processes import Runs
    from tatami.sim.server import simulate_server as simulated

    losses = None
    if job.plot is not None:
        check_path(job.plot, force=job.force)
        losses = job.plot.with_name(f"{job.plot.stem}-per-failure{job.plot.suffix}")
        check_path(losses, force=job.force)
    swept = parse_sweep(job.sweep, known=_SWEPT)
    cases: list[tuple[str | None, ServerSetup]] = []
    for value in swept.values:
        swept_to = {} if value is None else {swept.name: swept.read(_SWEPT[swept.name][1], value)}
        base = job.setup(swept_to)
        policies = [_policy(name.strip(), every=swept_to.get("every", job.every)) for name in job.recovery.split(",")]
        cases += [(value, replace(base, recovery=policy)) for policy in policies]
    progress = progress_for()
    progress.start("simulating", total=len(cases) * job.runs, unit="runs")

    def done(case: int, record: ServerRun) -> None:
        progress.advance(1, fields={"recovery": record.recovery})
        if job.as_json:
            counts = {"failures": record.num_failures, "lost_per_failure_s": record.lost_per_failure_s}
            show_json(asdict(record) | counts | ({swept.name: cases[case][0]} if swept.name else {}))

    with Runs(cores=job.cores) as started:
        seeds = range(job.seed, job.seed + job.runs)
        found = simulated([case for _, case in cases], seeds=seeds, runs=started, done=done)
    progress.finish()
    endings = [f", {swept.name} {value}" if value else "" for value, _ in cases]
    labels = [each[0].recovery + ending for each, ending in zip(found, endings, strict=True)]
    if not job.as_json:
        show(_table(labels, found))
    if job.plot is not None and losses is not None:
        for path, draw in ((job.plot, draw_totals), (losses, draw_losses)):
            figure, axes = blank()
            draw(axes, labels, found)
            save(figure, path, force=job.force)


def _policy(name: str, *, every: str) -> AbstractRecovery:
    """Return the recovery policy of this name; `servers` is short for `from-servers`."""
    known = {"servers": Recovery.FROM_SERVERS, **{each.value: each for each in Recovery}}
    if name not in known:
        raise InputError(f"there is no recovery {name!r}; choose one of: checkpoint, servers, ignore")
    return recovery_of(known[name], every=every)


def _machines(preset: str | None, platform: Path | None, *, workers: int | None, servers: int, rounds: int) -> ServerSetup:
    """Choose the hosts of the workers and of the servers."""
    from tatami.sim.server import ServerSetup, paper_setup

    if workers is not None and workers < 1:
        raise InputError(f"a run needs at least 1 worker, not {workers}")
    if servers > MOST_PROCESSORS or (workers or 0) > MOST_PROCESSORS:
        raise InputError(f"a run has at most {MOST_PROCESSORS:,} machines, not {max(servers, workers or 0)}")
    if preset == PAPER and platform is None:
        return paper_setup(workers=10_000 if workers is None else workers, rounds=rounds)
    machines = chosen_platform(preset, platform, nodes=None, latency_s=None)
    num_hosts = len(machines.hosts)
    num_workers = num_hosts - servers if workers is None else workers
    first = max(num_workers, num_hosts - servers)
    return ServerSetup(
        platform=machines, workers=tuple(range(num_workers)), servers=tuple(range(first, first + servers)), rounds=rounds
    )


def _with_store(setup: ServerSetup, num_hosts: int, *, waits: bool, size_bytes: float) -> ServerSetup:
    """Keep checkpoints on each node, or on the last of the servers' machines, which then hold no parameters."""
    if not 0 <= num_hosts < len(setup.servers):
        raise InputError(
            f"of {len(setup.servers)} servers' machines at most {len(setup.servers) - 1} can be a store, not {num_hosts}"
        )
    cut = len(setup.servers) - num_hosts
    where = replace(setup.checkpoints, store=setup.servers[cut:], waits=waits, size_bytes=size_bytes)
    return replace(setup, servers=setup.servers[:cut], checkpoints=where)


def _table(labels: list[str], found: list[list[ServerRun]]) -> Table:
    rows = []
    for label, runs in zip(labels, found, strict=True):
        totals = [run.total_s for run in runs]
        failures = sum(run.num_failures for run in runs)
        lost_s = sum(run.total_s - run.undisturbed_s for run in runs)
        stopped = sum(run.stopped is not None for run in runs)
        rows.append(
            {
                "recovery": label,
                "undisturbed": f"{runs[0].undisturbed_s:,.1f} s",
                "mean": f"{statistics.fmean(totals):,.1f} s",
                "deviation": f"{statistics.pstdev(totals):,.1f} s",
                "failures": f"{failures / len(runs):.2f}",
                "lost per failure": f"{lost_s / failures:+.2f} s" if failures and not stopped else "",
                "lost updates": f"{sum(run.lost_updates for run in runs) / len(runs):.2f}",
                "stopped": str(stopped) if stopped else "",
            }
        )
    return table_of(f"{len(found[0])} runs each", rows, texts=("recovery",))


def draw_totals(ax: Axes, labels: Sequence[str], runs: Sequence[Sequence[ServerRun]]) -> None:
    """Draw a bar for the seconds of every kind of run, with deviations, and a mark where an undisturbed run ends.

    The axis does not begin at 0, because the bars would hardly differ. Like Figs. 12 and 13 of Li, Tanimura and Nakada.
    """
    means, deviations = _bars(ax, labels, [[run.total_s for run in kind] for kind in runs])
    undisturbed = [kind[0].undisturbed_s for kind in runs]
    for place, at_s in enumerate(undisturbed):
        ax.hlines(at_s, place - 0.45, place + 0.45, colors="black", linestyles="dashed", label="_" if place else "undisturbed")
    lows = [mean - deviation for mean, deviation in zip(means, deviations, strict=True)]
    highs = [mean + deviation for mean, deviation in zip(means, deviations, strict=True)]
    low, high = min(*lows, *undisturbed), max(*highs, *undisturbed)
    room = _ROOM * (high - low) or 0.01 * high
    ax.set_ylim(low - room, high + 2 * room)
    ax.ticklabel_format(axis="y", useOffset=False, style="plain")
    ax.set_ylabel("seconds of a run (the axis does not begin at 0)")
    ax.set_title(f"{len(runs[0])} simulated runs of each")
    ax.legend(frameon=False, loc="upper right")


def draw_losses(ax: Axes, labels: Sequence[str], runs: Sequence[Sequence[ServerRun]]) -> None:
    """Draw a bar for every kind of run: the seconds lost by each failure, in runs that have any."""
    losses = [[lost_s for run in kind if (lost_s := run.lost_per_failure_s) is not None] for kind in runs]
    means, deviations = _bars(ax, labels, losses)
    for place, (mean, deviation, kind) in enumerate(zip(means, deviations, runs, strict=True)):
        failures = sum(run.num_failures for run in kind)
        text = f"{mean:+.1f} s" if failures else "no failure"
        at = (place, max(0.0, mean + deviation))
        ax.annotate(text, at, ha="center", va="bottom", xytext=(0, 3), textcoords="offset points")
    ax.axhline(0.0, color="black", linewidth=0.8)
    ax.margins(y=0.2)
    ax.set_ylabel("seconds lost by a failure")
    ax.set_title(f"{sum(run.num_failures for kind in runs for run in kind)} failures in {sum(map(len, runs))} simulated runs")


def _bars(ax: Axes, labels: Sequence[str], values: Sequence[Sequence[float]]) -> tuple[list[float], list[float]]:
    """Draw means with deviations, and return them; 0 where there is no value."""
    means = [statistics.fmean(each) if each else 0.0 for each in values]
    deviations = [statistics.pstdev(each) if each else 0.0 for each in values]
    ax.bar(range(len(labels)), means, yerr=deviations, capsize=4, color=MOSS)
    ax.set_xticks(range(len(labels)), list(labels))
    return means, deviations
