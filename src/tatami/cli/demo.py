"""`tatami demo`: train one network on four ranks of unequal speed, with three layouts."""

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
    "Ranks are slowed by sleeping after each computation, so one machine emulates several. The training itself is real.",
)
_PICTURES = ("tiling.png", "course.png")
METHODS = ("even", "srpm", "drpm")
MUCH_OFF = 1.25
"""Factor by which an estimated speed must be wrong to explain a bad tiling."""
TOLERANCE = 1e-3
"""Relative tolerance of the final loss: three tilings add float32 numbers in three orders, over a hundred updates."""


def demo(
    *,
    speeds: Annotated[str, typer.Option(metavar="1,1,0.5", help="Relative speeds of the ranks.")] = "1,1,0.5,0.25",
    net: Annotated[str, typer.Option(metavar="SIZES", help="Layer sizes of the network for digits: 64-...-10.")] = "64-800-10",
    iterations: Annotated[int, typer.Option(min=1, metavar="N", help="Iterations of each of the three runs.")] = 100,
    out: Annotated[Path, typer.Option(metavar="DIR", help="Folder for pictures, if matplotlib is installed.")] = Path("demo"),
    as_json: Annotated[bool, typer.Option("--json", help="Print a JSON list with a record for each run.")] = False,
) -> None:
    """Watch one network train on ranks of unequal speed, in about a minute.

    The first run has equal tiles. The second is tiled by SRPM, which knows the speeds. The third is re-tiled during training
    by DRPM, which measures them. At the end the times are compared; all three runs end with the same loss.
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
        say(f"\n{_HEADINGS[method]}")
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


_HEADINGS = {
    "even": "1. Even: every rank gets an equal tile.",
    "srpm": "2. SRPM, which knows the speeds: tiles in proportion to the speeds of the ranks.",
    "drpm": "3. DRPM, which does not know the speeds: it begins with equal tiles, measures, and re-tiles during training.",
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
    if (reason := why_slower(outcomes["drpm"], outcomes["even"], given=machines.speeds, is_busy=is_busy)) is not None:
        show("", reason)
    if load is not None and is_busy:
        show("", Text(f"Do not trust these times: during the runs {load.sentence()}. The losses are correct.", style="bold"))
    losses = [outcome.loss for outcome in outcomes.values()]
    apart = (max(losses) - min(losses)) / max(losses)
    same = "the same, up to rounding" if apart <= TOLERANCE else f"NOT the same: {apart:.1e} apart"
    accuracy = next(iter(outcomes["drpm"].accuracy.values()))
    show(
        "",
        f"loss: {', '.join(f'{method} {outcome.loss:.7f}' for method, outcome in outcomes.items())}: {same}",
        f"accuracy: {100 * accuracy:.1f} % of {runs['drpm'].task.test.samples} held-out digits",
    )


def why_slower(drpm: TrainingOutcome, even: TrainingOutcome, *, given: Mapping[str, float], is_busy: bool) -> str | None:
    """Explain why DRPM ended slower than equal tiles, from its own estimates; None if it did not.

    Args:
        drpm, even: the outcomes of both runs.
        given: the emulated speeds of the ranks, by name; only ratios count.
        is_busy: whether other programs used the machine.
    """
    if drpm.iteration_s <= even.iteration_s:
        return None
    slower = f"DRPM is {drpm.iteration_s / even.iteration_s:.2f} times as slow as equal tiles here: "
    moves = [check.decision.iteration for check in drpm.history.checks if check.decision.remaps]
    if not moves:
        last = drpm.history.checks[-1].decision.reason if drpm.history.checks else "there were too few iterations for a check"
        return f"{slower}it never moved a tile ({last}), so the runs differ only by its checks and by chance."
    off = {name: drpm.speeds[name] / max(drpm.speeds.values()) * max(given.values()) / given[name] for name in given}
    name = max(off, key=lambda each: abs(math.log(off[each])))
    if not 1 / MUCH_OFF <= off[name] <= MUCH_OFF:
        why = "other programs slowed the ranks" if is_busy else "the iterations were too short to measure"
        return f"{slower}it estimated {name} at {off[name]:.2f} times its relative speed, probably because {why}."
    return (
        f"{slower}it knows the speeds, and last moved tiles after iteration {moves[-1]}, but with so little computing "
        "the sums between tiles dominate the time. A larger network shows more: --net 64-3200-10."
    )


def _draw(runs: dict[str, Prepared], outcomes: dict[str, TrainingOutcome], out: Path) -> list[Path]:
    """Draw the tiles and the course of the runs over the pictures of an earlier demo; draw nothing without matplotlib."""
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
    ax.set_title(f"final tiling of DRPM: {tiling.samples} samples x {tiling.units} units")
    tiling_picture, course_picture = (out / name for name in _PICTURES)
    save(figure, tiling_picture, force=True)
    plot_course(list(outcomes.items()), course_picture, every=10, force=True)
    return [tiling_picture, course_picture]
