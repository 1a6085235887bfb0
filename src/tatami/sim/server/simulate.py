"""Runs of simulated parameter-server training: many seeds, many setups, on all cores."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from tatami.server.recovery import Checkpoint, FromServers
from tatami.sim.processes import Runs
from tatami.sim.server.result import Period, ServerRun
from tatami.sim.server.server_setup import ServerSetup
from tatami.sim.server.stage_actions import ServerPlay
from tatami.sim.stage import Stage, play


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """One simulation: of an undisturbed period ("period"), of a run without a failure ("undisturbed"), or of a run ("run")."""

    setup: ServerSetup
    what: Literal["period", "undisturbed", "run"] = "run"
    seed: int = 0
    period: Period | None = None
    skips: bool = True


@dataclass(frozen=True, kw_only=True)
class SimulationOutcome:
    """What a simulation found; `run` does not know yet what the run takes undisturbed. The first round began at `opened_s`."""

    run: ServerRun
    opened_s: float
    opened_bytes: float


def simulate_server(
    setups: Sequence[ServerSetup],
    *,
    seeds: Sequence[int],
    runs: Runs,
    skips: bool = True,
    done: Callable[[int, ServerRun], None] | None = None,
) -> list[list[ServerRun]]:
    """Simulate every setup with every seed.

    Args:
        setups: what is simulated; a `Checkpoint(every="daly")` is given the interval for the times that are simulated.
        seeds: of the failures.
        runs: where to; the results do not depend on how many cores it has.
        skips: rounds that nothing disturbs are simulated once.
        done: called for each run as it ends, with the index of its setup.

    Returns:
        For each setup the runs in the order of the seeds.
    """
    settled = [_settle(setup, runs) for setup in setups]
    periods = runs.map(_period, [Simulation(setup=setup, what="period") for setup in settled])
    lasting = runs.map(
        _outcome,
        [
            Simulation(setup=setup, what="undisturbed", period=period, skips=skips)
            for setup, period in zip(settled, periods, strict=True)
        ],
    )
    places = [(index, seed) for index in range(len(settled)) for seed in seeds]
    jobs = [Simulation(setup=settled[index], seed=seed, period=periods[index], skips=skips) for index, seed in places]

    def record(job: int, outcome: SimulationOutcome) -> ServerRun:
        return replace(outcome.run, undisturbed_s=lasting[places[job][0]].run.total_s)

    def ended(job: int, outcome: SimulationOutcome) -> None:
        if done is not None:
            done(places[job][0], record(job, outcome))

    outcomes = runs.map(_outcome, jobs, done=ended)
    records = [record(job, outcome) for job, outcome in enumerate(outcomes)]
    return [records[first : first + len(seeds)] for first in range(0, len(records), max(1, len(seeds)))]


def _settle(setup: ServerSetup, runs: Runs) -> ServerSetup:
    """With a number of rounds between checkpoints."""
    recovery = setup.recovery
    if not isinstance(recovery, Checkpoint) or recovery.every != "daly":
        return setup
    every_round = replace(setup, recovery=replace(recovery, every=1))
    mtbf_s = recovery.mtbf_s if setup.mtbf_s is None else setup.mtbf_s
    with_write, without = runs.map(
        _period,
        [
            Simulation(setup=replace(every_round, checkpoints=replace(setup.checkpoints, waits=True)), what="period"),
            Simulation(setup=replace(setup, recovery=FromServers()), what="period"),
        ],
    )
    write_s = with_write.round_s - without.round_s
    every = replace(recovery, mtbf_s=mtbf_s).interval(write_s=write_s, round_s=without.round_s, workers=len(setup.workers))
    return replace(setup, recovery=replace(recovery, every=every))


def _period(job: Simulation) -> Period:
    """Simulate as many rounds as there are to a checkpoint; one, where that is further than the run goes."""
    wanted = rounds_of_period(job.setup)
    rounds = wanted if wanted <= job.setup.rounds else 1
    found = _outcome(replace(job, setup=replace(job.setup, rounds=rounds)))
    moved = found.run.bytes_moved - found.opened_bytes
    return Period(rounds=rounds, duration_s=found.run.total_s - found.opened_s, bytes_moved=moved)


def _outcome(job: Simulation) -> SimulationOutcome:
    def act(stage: Stage) -> Callable[[], SimulationOutcome]:
        seed = job.seed if job.what == "run" else None
        run = ServerPlay(job.setup, stage, seed=seed, period=job.period, skips=job.skips and job.what != "period")
        run.begin()

        def finish() -> SimulationOutcome:
            assert run.ended_s is not None, "the run came to a standstill"
            found = ServerRun(
                recovery=job.setup.recovery.name,
                seed=job.seed,
                rounds=run.version,
                total_s=run.ended_s,
                undisturbed_s=math.nan,
                failures=tuple(run.failures),
                lost_updates=run.lost_updates,
                bytes_moved=stage.bytes_moved,
                stopped=run.stopped,
            )
            return SimulationOutcome(run=found, opened_s=run.opened_s or 0.0, opened_bytes=run.opened_bytes)

        return finish

    return play(job.setup.platform, act)


def rounds_of_period(setup: ServerSetup) -> int:
    """Rounds from one checkpoint to the next, 1 where there are none."""
    if isinstance(setup.recovery, Checkpoint):
        return setup.recovery.interval(write_s=None, round_s=None, workers=len(setup.workers))
    return 1
