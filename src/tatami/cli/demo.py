"""`tatami demo`: one network over four ranks of unequal speed, laid three ways."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from tatami.cli.options import epilog
from tatami.cli.terminal import show, show_json, tell, width

if TYPE_CHECKING:
    from tatami.cli.training import TrainingOutcome
    from tatami.cli.training_job import Prepared
    from tatami.comm import AbstractCommunicator
    from tatami.doctor import MachineLoad
    from tatami.report import Efficiency

EPILOG = epilog(
    "tatami demo",
    "tatami demo --speeds 1,0.3 --iterations 60",
    "Ranks are slowed by sleeping after each stretch of compute, so one machine plays several. What you see trains for real.",
)
_PICTURES = ("tiling.png", "course.png")
METHODS = ("even", "srpm", "drpm")
MUCH_OFF = 1.25
"""An estimate of a speed that is further off than this explains a bad tiling."""
TOLERANCE = 1e-3
"""Relative, on the final loss: three tilings add up float32 numbers in three orders, over a hundred updates."""


def demo(
    *,
    speeds: Annotated[str, typer.Option(metavar="1,1,0.5", help="Relative speeds of the ranks.")] = "1,1,0.5,0.25",
    net: Annotated[str, typer.Option(metavar="SIZES", help="The network, for digits: 64-...-10.")] = "64-800-10",
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Number of iterations of each of the three runs.")] = 100,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for pictures, if matplotlib is installed.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with a record for each run.")] = False,
) -> None:
    """Watch one network train over ranks of unequal speed, in about a minute.

    First split evenly, then tiled by SRPM, which is told the speeds, then re-tiled while it trains by DRPM, which is told
    nothing. The times stand side by side in the end, and all three end with the same loss.
    """
    from tatami.cli.ranks import on_ranks
    from tatami.cli.train_job import TrainJob
    from tatami.cli.training_job import prepare
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
    on_ranks(partial(_demo_rank, runs, out=out, as_json=as_json), ranks=runs["even"].ranks, backend=None, hosts=None)


def _demo_rank(runs: dict[str, Prepared], comm: AbstractCommunicator, *, out: Path, as_json: bool) -> None:
    from tatami.cli.ranks import log_on_rank_0, progress_of
    from tatami.cli.serial import AloneBetween
    from tatami.cli.training import tell_emulation, train
    from tatami.doctor import LoadWatch
    from tatami.report import efficiency

    log_on_rank_0(comm)
    first = next(iter(runs.values()))
    say = tell if comm.rank == 0 and not as_json else lambda _message: None
    if comm.rank == 0:
        say(f"digits {first.task.net} on {comm.size} ranks, {first.batch_size} samples an iteration")
        tell_emulation(first)
    outcomes, efficiencies = {}, {}
    comm.barrier()  # starting is work, too
    watch, began_s = LoadWatch(), time.process_time()
    for method, prepared in runs.items():
        say(f"\n{_TOLD[method]}")
        alone = AloneBetween(prepared, comm)
        outcomes[method] = train(prepared, comm, progress=progress_of(comm), callbacks=[alone])
        rounds = alone.rounds(outcomes[method].history.iteration_s)
        efficiencies[method] = efficiency(rounds) if rounds else None
    used_s = comm.gather_object(time.process_time() - began_s)
    if used_s is None:
        return
    load = watch.load(own_s=sum(used_s))
    pictures = _draw(runs, outcomes, out)
    if as_json:
        show_json(
            [
                {
                    "method": method,
                    **outcome.to_dict(),
                    **_efficiency_record(efficiencies[method]),
                    "is_machine_busy": load.is_busy if load else None,
                }
                for method, outcome in outcomes.items()
            ]
        )
        return
    _report(runs, outcomes, efficiencies, load)
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
    runs: dict[str, Prepared],
    outcomes: dict[str, TrainingOutcome],
    efficiencies: dict[str, Efficiency | None],
    load: MachineLoad | None,
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
    is_busy = load is not None and load.is_busy
    if (reason := why_slower(outcomes["drpm"], outcomes["even"], told=machines.speeds, is_busy=is_busy)) is not None:
        show("", reason)
    if load is not None and is_busy:
        show("", Text(f"Do not trust these times: meanwhile {load.sentence()}. The losses are right.", style="bold"))
    losses = [outcome.loss for outcome in outcomes.values()]
    apart = (max(losses) - min(losses)) / max(losses)
    same = "the same, up to rounding" if apart <= TOLERANCE else f"NOT the same: {apart:.1e} apart"
    accuracy = next(iter(outcomes["drpm"].accuracy.values()))
    show(
        "",
        f"loss: {', '.join(f'{method} {outcome.loss:.7f}' for method, outcome in outcomes.items())}: {same}",
        f"accuracy: {100 * accuracy:.1f} % of {runs['drpm'].task.test.samples} digits that it had not seen",
    )


def why_slower(drpm: TrainingOutcome, even: TrainingOutcome, *, told: Mapping[str, float], is_busy: bool) -> str | None:
    """Why DRPM ended slower than equal tiles, from what it saw; None where it did not.

    Args:
        drpm, even: how both ended.
        told: the speeds that the ranks play, by name; only ratios count.
        is_busy: whether other programs used the machine.
    """
    if drpm.iteration_s <= even.iteration_s:
        return None
    slower = f"DRPM is {drpm.iteration_s / even.iteration_s:.2f} times as slow as equal tiles here: "
    moves = [check.decision.iteration for check in drpm.history.checks if check.decision.remaps]
    if not moves:
        last = drpm.history.checks[-1].decision.reason if drpm.history.checks else "there were too few iterations for a check"
        return f"{slower}it never moved a tile ({last}), so both are the same but for its checks and for chance."
    off = {name: drpm.speeds[name] / max(drpm.speeds.values()) * max(told.values()) / told[name] for name in told}
    name = max(off, key=lambda each: abs(math.log(off[each])))
    if not 1 / MUCH_OFF <= off[name] <= MUCH_OFF:
        took = "took other programs' work for slowness" if is_busy else "measured iterations too short to tell"
        return f"{slower}it took {name} for {off[name]:.2f} times as fast as it is, beside the fastest; it probably {took}."
    return (
        f"{slower}it knows the speeds by now, and moved tiles last after iteration {moves[-1]}, but with so little computing "
        "the sums between tiles take the time. A larger network shows more: --net 64-3200-10."
    )


def _draw(runs: dict[str, Prepared], outcomes: dict[str, TrainingOutcome], out: Path) -> list[Path]:
    """The tiles and the course of the runs, written over those of an earlier demo; nothing where matplotlib is missing."""
    from tatami.cli.training import plot_course
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
