"""`tatami plan`: print the recommended plan, a comparison, and the effect of other links or machines."""

from __future__ import annotations

import warnings
from dataclasses import asdict, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer

from tatami.cli.network_options import NetworkOptions
from tatami.cli.options import epilog, machines_of, optional, takes
from tatami.cli.terminal import show, show_json, width
from tatami.cluster import Cluster, parse_speeds
from tatami.errors import InputError, shortened
from tatami.planning import Answer, PlanComparison, answers, compared, questions
from tatami.report import answer_table, blank, check_path, draw_answers, draw_text, draw_tiling, save
from tatami.report.recommended import guess_words, is_same
from tatami.report.words import wrapped
from tatami.tiling import DEFAULT_PLANNER, PLANNERS, AlphaBetaCost, Plan, StagedPlan, at_tiles, timeline, with_speeds
from tatami.units import format_bandwidth, format_duration
from tatami.workload import Workload, has_blocks_of

_what_if = partial(typer.Option, rich_help_panel="What if", show_default=False)
EPILOG = epilog(
    "tatami plan cluster.toml --net 203-80-26 --samples 1024",
    "tatami plan --speeds 0.25,0.31,0.63,1,1 --net 203-80-26 --samples 1024 --json",
    "tatami plan cluster.toml --planner srpm --plot tiling.png",
    "tatami plan cluster.toml --model gpt --samples 64 --vary network.bandwidth=1Gbit/s,10Gbit/s --add speed=15Tflop/s",
    "tatami plan cluster.toml --model gpt --layers 12 --width 768 --heads 12 --tokens 1024 --samples 32",
    "A cluster.toml is written by [bold]tatami probe[/], or by hand.",
)


@dataclass(frozen=True, kw_only=True)
class PlanJob(NetworkOptions):
    """The options of `tatami plan`; their help texts describe the fields."""

    cluster: Annotated[
        Path | None, typer.Argument(metavar="CLUSTER.TOML", help="The machines and their links.", show_default=False)
    ] = None
    speeds: Annotated[
        str | None,
        typer.Option(
            help="Relative speeds, one for each rank, instead of a file (all are then on one host, with 40 Gbit/s) "
            "or of the speeds in it."
        ),
    ] = None
    planner: Annotated[list[str] | None, optional(metavar="A,B,...", help=f"Use only some of {', '.join(PLANNERS)}.")] = None
    stages: Annotated[int | None, optional(min=1, help="Number of pipeline stages; 1: none.")] = None
    micro_batches: Annotated[int | None, optional(min=1, help="Number of micro-batches in every replica.")] = None
    recompute: Annotated[
        bool | None,
        typer.Option(
            "--recompute/--no-recompute", help="Recompute activations on all machines, or on none.", show_default=False
        ),
    ] = None
    vary: Annotated[
        list[str] | None,
        _what_if(metavar="PATH=A,B,...", help="Vary network.bandwidth, processors.NAME.link, ... or samples; may be repeated."),
    ] = None
    add: Annotated[
        list[str] | None,
        _what_if(metavar="speed=...,memory=...", help="Add a machine, as in a cluster file; may be repeated."),
    ] = None
    leave_out: Annotated[
        list[str] | None, _what_if("--without", metavar="NAME,...", help="Leave out these machines; may be repeated.")
    ] = None
    plot: Annotated[
        Path | None, optional(help="Draw the best tiling, or the effect of the changes, to this file (.png, .pdf, .svg).")
    ] = None
    force: Annotated[bool, typer.Option("--force", help="Overwrite the picture.")] = False
    everything: Annotated[bool, typer.Option("--all", help="Also show the plans of all other planners.")] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a JSON list: a record for each planner and for one machine alone.")
    ] = False


@takes(PlanJob)
def plan(job: PlanJob) -> None:
    """Recommend how to train a network on unequal machines, and show what each machine would do.

    Nothing is started: the times of one iteration over the whole batch are predicted from the speeds and the links.
    """
    if job.plot is not None:
        check_path(job.plot, force=job.force)
    machines = machines_of(job.cluster, None if job.cluster is not None else job.speeds)
    if job.cluster is not None and job.speeds is not None:
        machines = with_speeds(machines, parse_speeds(job.speeds, expected=machines.size))
    workload = job.workload()
    _warn_unprobed(job, machines, workload)
    if job.vary or job.add or job.leave_out:
        _answer(job, machines, workload)
        return
    planners = [name.strip() for each in job.planner for name in each.split(",")] if job.planner else None
    if planners is None and not (job.everything or job.as_json):
        planners = [DEFAULT_PLANNER]
    with warnings.catch_warnings():
        if planners == [DEFAULT_PLANNER]:
            warnings.filterwarnings("ignore", f"{DEFAULT_PLANNER} leaves out")  # the answer names them, with the reason
        found = compared(
            planners,
            cluster=machines,
            workload=workload,
            network=job.called,
            with_stages=not job.planner,
            stages=job.stages,
            micro_batches=job.micro_batches,
            recompute=job.recompute,
        )
    plans = found.plans
    if job.plot is not None:
        if not plans:
            raise InputError("only pipeline stages fit into memory, and a picture shows tiles: leave out --plot")
        _draw(found.best, machines, job.plot, force=job.force)
    if job.as_json:
        records = [plan_record(each, found=found, machines=machines) for each in plans]
        records += [staged_record(found.staged, found=found, machines=machines)] if found.staged else []
        show_json(records + ([alone_record(found.alone)] if found.alone and not job.planner else []))
        return
    everything = job.everything or (job.planner is not None and len(plans) > 1)
    parts = found.report(width=width(), everything=everything)
    show(*[each for part in parts for each in (part, "")][:-1])
    if job.planner and len(plans) == 1 and isinstance(found.recommended, Plan):
        show("", draw_text(found.best.tiling, speeds=_speeds(found.best, machines), width=72))
    _show_host(job, machines)
    if job.plot is not None:
        show(f"drew {found.best.planner} to {job.plot}")


def plan_record(plan: Plan, *, found: PlanComparison, machines: Cluster) -> dict[str, Any]:
    """Return the `--json` record of a plan.

    `recommended` is false of a plan that was asked for, with which nothing was compared.

    `replicas` has processor names; `samples` and `micro_batches` are per replica, `units` per tile.

    `machines` has seconds of an iteration and bytes for each processor that has a tile; `speeds` are those of the tiles, if
    they depend on the size; `same_as` is the first planner with the same plan.
    """
    replicas = plan.tiling.replicas
    weighted, alone = found.weighted, found.alone
    run = machines.only(plan.layout.processors)
    times = timeline(plan.layout, cluster=run, workload=plan.workload, cost=found.cost)
    return {
        "planner": plan.planner,
        "recommended": plan is found.recommended and not found.is_asked,
        "same_as": next(other.planner for other in found.plans if is_same(plan, other)),
        "replicas": [[tile.processor for tile in replica] for replica in replicas],
        "samples": [replica[0].samples.size for replica in replicas],
        "micro_batches": [replica.micro_batches for replica in plan.layout.replicas],
        "recomputes": list(plan.layout.recomputes),
        "units": [[tile.units.size for tile in replica] for replica in replicas],
        "t_comm": plan.t_comm,
        "predicted_s": plan.predicted_s,
        "predicted": asdict(plan.predicted),
        "range_s": plan.range_s,
        "bound_s": plan.bound_s,
        "gap": plan.gap,
        "volume_bytes": plan.volume_bytes,
        "against_weighted": weighted.predicted_s / plan.predicted_s if weighted else None,
        "against_alone": alone.predicted_s / plan.predicted_s if alone else None,
        "memory_bytes": dict(plan.memory_bytes),
        "left_out": list(plan.left_out),
        "speeds": _speeds(plan, machines),
        "machines": [
            {**asdict(time), "host": machines.host_of[time.processor], "memory_bytes": plan.memory_bytes[time.processor]}
            for time in times
        ],
    }


def staged_record(plan: StagedPlan, *, found: PlanComparison, machines: Cluster) -> dict[str, Any]:
    """Return the `--json` record of a plan with pipeline stages: `stages` has the processors of each (one for each replica)
    and its first and last piece; `machines` has the work of each, in seconds of an iteration and bytes."""
    layout, alone, weighted = plan.layout, found.alone, found.weighted
    edges = (0, *layout.cuts, len(plan.workload.pieces))
    return {
        "planner": "stages",
        "recommended": plan is found.recommended and not found.is_asked,
        "stages": [
            {
                "processors": list(stage.processors),
                "first_piece": plan.workload.pieces[first].name,
                "last_piece": plan.workload.pieces[stop - 1].name,
                "in_flight": in_flight,
            }
            for stage, (first, stop), in_flight in zip(layout.stages, pairwise(edges), plan.in_flight, strict=True)
        ],
        "cuts": list(layout.cuts),
        "samples": list({rank.replica: rank.samples for rank in plan.ranks}.values()),
        "micro_batches": list({rank.replica: rank.micro_batches for rank in plan.ranks}.values()),
        "recomputes": list(plan.recomputes),
        "predicted_s": plan.iteration_s,
        "range_s": plan.range_s,
        "parts_s": dict(plan.parts_s),
        "against_weighted": weighted.predicted_s / plan.iteration_s if weighted else None,
        "against_alone": alone.predicted_s / plan.iteration_s if alone else None,
        "memory_bytes": plan.memory_bytes,
        "left_out": [each.name for each in machines.processors if each.name not in plan.memory_bytes],
        "machines": [{**asdict(rank), "host": machines.host_of[rank.processor]} for rank in plan.ranks],
    }


def alone_record(alone: Plan) -> dict[str, Any]:
    """Return the `--json` record of the fastest single machine."""
    (replica,) = alone.layout.replicas
    return {
        "planner": "alone",
        "replicas": [list(replica.processors)],
        "samples": [alone.workload.samples],
        "micro_batches": [replica.micro_batches],
        "predicted_s": alone.predicted_s,
        "predicted": asdict(alone.predicted),
        "range_s": alone.range_s,
        "memory_bytes": dict(alone.memory_bytes),
    }


def _answer(job: PlanJob, machines: Cluster, workload: Workload) -> None:
    """Print one row for each change."""
    if job.planner or job.everything:
        raise InputError("--vary, --add and --without compare recommended plans: leave out --planner and --all")
    asked = questions(machines, workload=workload, vary=job.vary or (), add=job.add or (), leave_out=job.leave_out or ())
    found = answers(asked, stages=job.stages, micro_batches=job.micro_batches, recompute=job.recompute)
    words = [question.words for question in asked]
    if job.plot is not None:
        figure, ax = blank()
        draw_answers(ax, words, found)
        save(figure, job.plot, force=job.force)
    if job.as_json:
        show_json([_answer_record(answer) for answer in found])
        return
    show(answer_table(words, found, clusters=[question.cluster for question in asked]))
    if AlphaBetaCost().scale(machines) != 1.0:
        show("", guess_words(width=width()))
    for assumed in dict.fromkeys(question.assumed for question in asked if question.assumed):
        show("", wrapped(assumed, width=width()))
    _show_host(job, machines)
    if job.plot is not None:
        show(f"picture: {job.plot}")


def _show_host(job: PlanJob, machines: Cluster) -> None:
    """Say where ranks are that were given as speeds alone."""
    if job.cluster is None and machines.size > 1:
        link = f"{format_bandwidth(machines.local.bandwidth_bytes_per_s)} and {format_duration(machines.local.latency_s)}"
        text = f"Given --speeds without a cluster file, all {machines.size} ranks are on one host, with {link} between them."
        show("", wrapped(text, width=width()))


def _answer_record(answer: Answer) -> dict[str, Any]:
    return {
        "question": answer.question.words,
        "assumed": answer.question.assumed,
        "samples": answer.question.workload.samples,
        "predicted_s": None if answer.plan is None else answer.plan.predicted_s,
        "speed_up": answer.speed_up,
        "takes_part": list(answer.takes_part),
    }


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
