"""`tatami demo`: one network over four ranks of unequal speed, laid three ways."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from tatami.cli.terminal import show, show_json, tell, width

if TYPE_CHECKING:
    from tatami.cli.job import Prepared
    from tatami.cli.training import TrainingOutcome
    from tatami.comm import AbstractCommunicator
    from tatami.report import Efficiency

EPILOG = """
[bold]Examples[/]

tatami demo

tatami demo --speeds 1,0.3 --iterations 60

Ranks are slowed by sleeping after each stretch of compute, so one machine plays several. What you see trains for real.
"""
_PICTURES = ("tiling.png", "course.png")
METHODS = ("even", "srpm", "drpm")
TOLERANCE = 1e-3
"""Relative, on the final loss: three tilings add up float32 numbers in three orders, over a hundred updates."""


def demo(
    *,
    speeds: Annotated[str, typer.Option(metavar="1,1,0.5", help="Of the ranks, relative.")] = "1,1,0.5,0.25",
    net: Annotated[str, typer.Option(metavar="SIZES", help="The network, for digits: 64-...-10.")] = "64-800-10",
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Of each of the three runs.")] = 100,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Where pictures go, if matplotlib is installed.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with a record for each run.")] = False,
) -> None:
    """Watch one network train over ranks of unequal speed, in about a minute.

    First split evenly, then tiled by SRPM, which is told the speeds, then re-tiled while it trains by DRPM, which is told
    nothing. The times stand side by side in the end, and all three end with the same loss.
    """
    from tatami.cli.job import prepare
    from tatami.cli.ranks import on_ranks
    from tatami.cli.train_job import TrainJob
    from tatami.outputs import check_folder, check_output

    check_folder(out)
    for name in _PICTURES:
        check_output(out / name, force=True)

    runs = {
        method: prepare(
            TrainJob(
                speeds=speeds,
                emulate=True,
                method=method,
                net=net,
                iterations=iterations,
                lr=0.01,
                loss="cross-entropy",
                shifts=True,
            )
        )
        for method in METHODS
    }
    ranks = runs["even"].ranks

    def body(comm: AbstractCommunicator) -> None:
        _demo_rank(runs, comm, out=out, as_json=as_json)

    on_ranks(body, ranks=ranks, backend=None, hosts=None)


def _demo_rank(runs: dict[str, Prepared], comm: AbstractCommunicator, *, out: Path, as_json: bool) -> None:
    from tatami.cli.ranks import log_on_rank_0, progress_of
    from tatami.cli.results import tell_emulation
    from tatami.cli.serial import AloneBetween
    from tatami.cli.training import train
    from tatami.report import efficiency

    log_on_rank_0(comm)
    first = next(iter(runs.values()))
    say = tell if comm.rank == 0 and not as_json else lambda _message: None
    if comm.rank == 0:
        say(f"digits {first.net} on {comm.size} ranks, {first.batch_size} samples an iteration")
        tell_emulation(first)
    outcomes, efficiencies = {}, {}
    for method, prepared in runs.items():
        say(f"\n{_TOLD[method]}")
        alone = AloneBetween(prepared, comm)
        outcomes[method] = train(prepared, comm, progress=progress_of(comm), callbacks=[alone])
        rounds = alone.rounds(outcomes[method].history.iteration_s)
        efficiencies[method] = efficiency(rounds) if rounds else None
    if comm.rank != 0:
        return
    pictures = _draw(runs, outcomes, out)
    if as_json:
        show_json(
            [
                {"method": method, **outcome.to_dict(), **_efficiency_record(efficiencies[method])}
                for method, outcome in outcomes.items()
            ]
        )
        return
    _report(runs, outcomes, efficiencies)
    for path in pictures:
        show(f"picture: {path}")


_TOLD = {
    "even": "1. Evenly: every rank gets an equal tile.",
    "srpm": "2. SRPM, which knows the speeds: tiles as large as the ranks are fast.",
    "drpm": "3. DRPM, which knows no speeds: it begins evenly, measures, and re-tiles while it trains.",
}


def _efficiency_record(found: Efficiency | None) -> dict[str, Any]:
    if found is None or found.problem:
        return {"efficiency": None, "efficiency_problem": None if found is None else found.problem}
    return {"efficiency": found.gamma, "efficiency_spread": found.spread}


def _report(
    runs: dict[str, Prepared], outcomes: dict[str, TrainingOutcome], efficiencies: dict[str, Efficiency | None]
) -> None:
    from tatami.report import MethodResult, draw_text, run_table

    machines = runs["even"].machines
    assert machines is not None
    across = min(72, width())
    for method, outcome in outcomes.items():
        show("", f"{method}, at the end:", draw_text(outcome.tiling, speeds=machines.speeds, width=across))
    show(
        "",
        run_table(
            [
                MethodResult(
                    method=method,
                    iteration_s=outcome.iteration_s,
                    samples_per_s=outcome.samples_per_s,
                    efficiency=efficiencies[method],
                )
                for method, outcome in outcomes.items()
            ]
        ),
    )
    for method, found in efficiencies.items():
        if found is not None and found.problem:
            show(f"{method}: {found.problem}")
    losses = [outcome.loss for outcome in outcomes.values()]
    apart = (max(losses) - min(losses)) / max(losses)
    same = "the same, up to rounding" if apart <= TOLERANCE else f"NOT the same: {apart:.1e} apart"
    accuracy = next(iter(outcomes["drpm"].accuracy.values()))
    show(
        "",
        f"loss: {', '.join(f'{method} {outcome.loss:.7f}' for method, outcome in outcomes.items())}: {same}",
        f"accuracy: {100 * accuracy:.1f} % of {runs['drpm'].test.samples} digits that it had not seen",
    )


def _draw(runs: dict[str, Prepared], outcomes: dict[str, TrainingOutcome], out: Path) -> list[Path]:
    """The tiles and the course of the runs, written over those of an earlier demo; nothing where matplotlib is missing."""
    from tatami.cli.results import plot_course
    from tatami.errors import MissingExtraError
    from tatami.report import blank, draw_tiling, save

    machines = runs["drpm"].machines
    assert machines is not None
    try:
        figure, ax = blank()
    except MissingExtraError:
        return []
    out.mkdir(parents=True, exist_ok=True)
    tiling = outcomes["drpm"].tiling
    draw_tiling(ax, tiling, speeds=machines.speeds)
    ax.set_title(f"as DRPM left it: {tiling.samples} samples x {tiling.units} units")
    tiling_picture, course_picture = (out / name for name in _PICTURES)
    save(figure, tiling_picture, force=True)
    plot_course(list(outcomes.items()), course_picture, every=10, force=True)
    return [tiling_picture, course_picture]
