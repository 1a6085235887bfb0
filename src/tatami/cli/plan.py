"""`tatami plan`: all planners side by side."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from tatami.cli.options import epilog, optional, takes
from tatami.cli.terminal import show, show_json
from tatami.cluster import Cluster, parse_speeds, read_cluster
from tatami.errors import InputError, shortened
from tatami.planning import compared
from tatami.report import blank, check_path, draw_text, draw_tiling, save
from tatami.tiling import Plan, at_tiles, with_speeds
from tatami.workload import VOCABULARY, Workload, gpt_workload, has_blocks_of, net_workload

_gpt = partial(typer.Option, rich_help_panel="A GPT")
EPILOG = epilog(
    "tatami plan cluster.toml --net 203-80-26 --samples 1024",
    "tatami plan --speeds 0.25,0.31,0.63,1,1 --net 203-80-26 --samples 1024 --json",
    "tatami plan cluster.toml --planner srpm --plot tiling.png",
    "tatami plan cluster.toml --model gpt --layers 12 --width 768 --heads 12 --tokens 1024 --samples 32",
    "A cluster.toml is written by [bold]tatami probe[/], or by hand.",
)


@dataclass(frozen=True, kw_only=True)
class PlanJob:
    """What `tatami plan` can be asked for; the options say what each field is."""

    cluster: Annotated[
        Path | None, typer.Argument(metavar="CLUSTER.TOML", help="The machines and their links.", show_default=False)
    ] = None
    speeds: Annotated[
        str | None, typer.Option(help="Relative speeds, one for each rank, without a file or in place of the file's.")
    ] = None
    net: Annotated[str, typer.Option(help="Sizes of the layers: inputs-hidden-...-outputs.")] = "203-80-26"
    samples: Annotated[int, typer.Option(min=1, help="Samples of a global batch; of a GPT, sequences.")] = 1024
    model: Annotated[str | None, _gpt(metavar="gpt", help="A model, for --net.", show_default=False)] = None
    layers: Annotated[int, _gpt(min=1)] = 12
    width: Annotated[int, _gpt(min=1, help="Of a token's vector.")] = 768
    heads: Annotated[int, _gpt(min=1)] = 12
    kv_heads: Annotated[int | None, _gpt(min=1, help="Of keys and values, where fewer.", show_default=False)] = None
    tokens: Annotated[int, _gpt(min=1, help="Of a sequence.")] = 1024
    vocabulary: Annotated[int, _gpt(min=1, help="Tokens there are.")] = VOCABULARY
    wire: Annotated[str | None, optional(metavar="NAME", help="bfloat16 or float16, if sums are to travel so.")] = None
    planner: Annotated[list[str] | None, optional(metavar="A,B,...", help="Only these planners; may be given again.")] = None
    plot: Annotated[Path | None, optional(help="Draw the best tiling into this file (.png, .pdf or .svg).")] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with a record for each planner.")] = False

    @property
    def workload(self) -> Workload:
        """The network that is laid out.

        Raises:
            InputError: an unknown model, or invalid sizes of its layers.
        """
        if self.model is None:
            return net_workload(self.net, samples=self.samples)
        if self.model != "gpt":
            raise InputError(f"there is no model {self.model!r} here; choose gpt, or give --net the sizes of the layers")
        return gpt_workload(
            layers=self.layers,
            width=self.width,
            heads=self.heads,
            kv_heads=self.kv_heads,
            tokens=self.tokens,
            vocabulary=self.vocabulary,
            samples=self.samples,
        )


@takes(PlanJob)
def plan(job: PlanJob) -> None:
    """Lay a network over machines that are not alike, and compare the planners.

    Nothing is started: the times are predicted, from the speeds and the links, for one iteration over the whole batch.
    """
    if job.plot is not None:
        check_path(job.plot, force=job.force)
    machines = _machines(job.cluster, job.speeds)
    workload = replace(job.workload, wire=job.wire)
    _warn_unprobed(job, machines, workload)
    planners = [name.strip() for each in job.planner for name in each.split(",")] if job.planner else None
    found = compared(planners, cluster=machines, workload=workload)
    plans, best = found.plans, found.best
    if job.plot is not None:
        _draw(best, machines, job.plot, force=job.force)
    if job.as_json:
        show_json([plan_record(each, weighted=found.weighted, machines=machines) for each in plans])
        return
    show(*found.tables, found.advice)
    if len(plans) == 1:
        show("", draw_text(best.tiling, speeds=_speeds(best, machines), width=72))
    if job.plot is not None:
        show(f"{best.planner} is drawn in {job.plot}")


def plan_record(plan: Plan, *, weighted: Plan | None, machines: Cluster) -> dict[str, Any]:
    """What `--json` says of a plan. `columns` are processor names, `samples` a column's, `units` those of its tiles.

    `speeds` are those of the tiles, where they depend on the size.
    """
    columns = plan.tiling.columns
    return {
        "planner": plan.planner,
        "columns": [[tile.processor for tile in column] for column in columns],
        "samples": [column[0].samples.size for column in columns],
        "units": [[tile.units.size for tile in column] for column in columns],
        "t_comm": plan.t_comm,
        "predicted_s": plan.predicted_s,
        "predicted": asdict(plan.predicted),
        "range_s": list(plan.range_s) if plan.range_s is not None else None,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "volume_bytes": plan.volume_bytes,
        "against_weighted": weighted.predicted_s / plan.predicted_s if weighted else None,
        "memory_bytes": dict(plan.memory_bytes),
        "left_out": list(plan.left_out),
        "speeds": _speeds(plan, machines),
    }


def _machines(file: Path | None, speeds: str | None) -> Cluster:
    if file is None and speeds is None:
        raise InputError("which machines? Give a cluster file (`tatami probe` writes one), or --speeds 1,1,0.5,0.25")
    if file is None:
        assert speeds is not None
        return Cluster.from_speeds(parse_speeds(speeds))
    machines = read_cluster(file)
    return machines if speeds is None else with_speeds(machines, parse_speeds(speeds, expected=machines.size))


def _warn_unprobed(job: PlanJob, machines: Cluster, workload: Workload) -> None:
    known = list(machines.sample_flop)
    if known and job.model is None and not any(has_blocks_of(workload, net) for net in known):
        warnings.warn(
            f"the speeds in {job.cluster} were measured with {shortened(', '.join(known))}, and machines compute networks of "
            f"other sizes at other speeds: tatami probe --net {job.net} measures them",
            stacklevel=2,
        )


def _speeds(plan: Plan, machines: Cluster) -> dict[str, float]:
    return at_tiles(machines, plan.layout, workload=plan.workload).speeds


def _draw(plan: Plan, machines: Cluster, path: Path, *, force: bool) -> None:
    figure, ax = blank()
    draw_tiling(ax, plan.tiling, speeds=_speeds(plan, machines))
    ax.set_title(f"{plan.planner}: {plan.tiling.samples} samples x {plan.tiling.units} units")
    save(figure, path, force=force)
