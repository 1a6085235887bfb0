"""Rehearsed runs that lose machines: closed forms of one death, the same numbers for a seed, and what is refused."""

import math
from dataclasses import replace

import pytest

from tatami.cluster import Cluster
from tatami.errors import InputError
from tatami.membership import Held, takes
from tatami.sim.elastic import LossyRun, LossySetup, rehearse_repair, rehearse_restart
from tatami.workload import Workload

WORKLOAD = Workload.mlp(200, 400, 20, samples=512)
CLUSTER = Cluster.from_speeds([1.0] * 4)
SETUP = LossySetup(
    cluster=CLUSTER,
    workload=WORKLOAD,
    iterations=50,
    planner="even",
    halt_s=0.25,
    checkpoint_steps=10,
    checkpoint_s=0.125,
    restart_s=2.0,
)


def iteration_s(*numbers: int) -> float:
    processors = tuple(CLUSTER.processors[number] for number in numbers)
    return SETUP.iteration_s(SETUP.lay(processors), processors)


def moved_s(before: tuple[int, ...], after: tuple[int, ...]) -> float:
    """From the rows that the layouts say, one message at a time on each machine."""
    old, new = (SETUP.lay(tuple(CLUSTER.processors[number] for number in numbers)) for numbers in (before, after))
    names = {CLUSTER.processors[number].name for number in after}
    found, lost = takes(Held(layout=old), Held(layout=new), workload=WORKLOAD, sources=names)
    assert not lost
    busy: dict[str, float] = dict.fromkeys(names, 0.0)
    pairs: dict[tuple[str, str], float] = {}
    for take in found:
        if take.source != take.dest:
            pairs[take.source, take.dest] = pairs.get((take.source, take.dest), 0.0) + take.units.size * 220 * 16
    for (source, dest), size_bytes in pairs.items():
        took_s = CLUSTER.local.latency_s + size_bytes / CLUSTER.local.bandwidth_bytes_per_s
        busy[source] += took_s
        busy[dest] += took_s
    return max(busy.values())


FOUR_S, THREE_S = iteration_s(0, 1, 2, 3), iteration_s(0, 1, 2)
MOVED_S = moved_s((0, 1, 2, 3), (0, 1, 2))


def parts(run: LossyRun) -> float:
    return run.useful_s + run.redone_s + run.stopped_s + run.moved_s + run.saved_s


def test_nothing_dies() -> None:
    repaired, restarted = rehearse_repair(SETUP, seed=0), rehearse_restart(SETUP, seed=0)
    assert repaired.total_s == pytest.approx(50 * FOUR_S, rel=1e-12)
    assert repaired.lost_fraction == pytest.approx(0, abs=1e-12)
    assert restarted.total_s == pytest.approx(50 * FOUR_S + 4 * 0.125, rel=1e-12)


def test_a_death_in_a_step_has_it_redone() -> None:
    setup = replace(SETUP, deaths=((23.5 * FOUR_S, 3),))
    run = rehearse_repair(setup, seed=0)
    assert (run.steps, run.deaths, run.joins, run.ended) == (50, 1, 0, None)
    assert MOVED_S > 0
    assert run.redone_s == pytest.approx(0.5 * FOUR_S)
    assert run.stopped_s == pytest.approx(0.25)
    assert run.moved_s == pytest.approx(MOVED_S)
    assert run.useful_s == pytest.approx(23 * FOUR_S + 27 * THREE_S)
    assert run.total_s == pytest.approx(parts(run))


def test_a_death_after_the_point_has_nothing_redone() -> None:
    setup = replace(SETUP, deaths=((23.5 * FOUR_S, 3),), update_fraction=0.6, halt_s=0.1 * FOUR_S)
    run = rehearse_repair(setup, seed=0)
    assert run.redone_s == 0
    # All halt while they finish the update, which takes longer.
    assert run.useful_s == pytest.approx(24 * FOUR_S + 26 * THREE_S)
    assert run.total_s == pytest.approx(24 * FOUR_S + MOVED_S + 26 * THREE_S)


def test_a_death_restarts_from_the_last_checkpoint() -> None:
    at_s = 2 * (10 * FOUR_S + 0.125) + 3.5 * FOUR_S
    run = rehearse_restart(replace(SETUP, deaths=((at_s, 3),)), seed=0)
    assert run.redone_s == pytest.approx(3.5 * FOUR_S)
    assert run.stopped_s == pytest.approx(2.0)
    assert run.useful_s == pytest.approx(20 * FOUR_S + 30 * THREE_S)
    assert run.saved_s == pytest.approx(4 * 0.125)
    assert run.total_s == pytest.approx(parts(run))


def test_a_machine_that_comes_back_joins_between_two_steps() -> None:
    at_s = 5.5 * FOUR_S
    again_s = at_s + 0.25 + MOVED_S  # all train again, three of them
    setup = replace(SETUP, deaths=((at_s, 3),), back_s=again_s + 7.5 * THREE_S - at_s)
    run = rehearse_repair(setup, seed=0)
    assert (run.deaths, run.joins) == (1, 1)
    assert run.redone_s == pytest.approx(0.5 * FOUR_S)
    assert run.stopped_s == pytest.approx(2 * 0.25)
    assert run.useful_s == pytest.approx(5 * FOUR_S + 8 * THREE_S + 37 * FOUR_S)
    restarted = rehearse_restart(replace(setup, back_s=2.0 + 7.5 * THREE_S), seed=0)
    # 5.5 steps are lost; in the eighth step with three a machine joins, at whose end all write and start again.
    assert restarted.redone_s == pytest.approx(5.5 * FOUR_S)
    assert restarted.useful_s == pytest.approx(8 * THREE_S + 42 * FOUR_S)
    assert restarted.stopped_s == pytest.approx(4.0)
    assert restarted.saved_s == pytest.approx(5 * 0.125)


def test_a_death_while_a_repair_goes_on_begins_it_again() -> None:
    at_s = 5.5 * FOUR_S
    setup = replace(SETUP, cluster=Cluster.from_speeds([1.0] * 6), deaths=((at_s, 5), (at_s + 0.125, 4)))
    run = rehearse_repair(setup, seed=0)
    assert (run.steps, run.deaths, run.ended) == (50, 2, None)
    assert run.stopped_s == pytest.approx(0.125 + 0.25)


def test_units_without_a_second_holder_end_the_run_by_name() -> None:
    cluster = Cluster.from_speeds([1.0] * 2)
    setup = replace(SETUP, cluster=cluster, workload=Workload.mlp(2000, 400, 2, samples=16), iterations=5000)
    assert len(setup.lay(cluster.processors).replicas) == 1
    setup = replace(setup, deaths=((0.01, 1),))
    assert rehearse_repair(setup, seed=0).ended is None  # its neighbour keeps a copy
    run = rehearse_repair(replace(setup, copies=1), seed=0)
    assert run.steps < 5000
    assert run.ended is not None
    assert "units 200 to 399 of block 0, held by p1, are lost" in run.ended


def test_no_machine_is_left() -> None:
    setup = replace(SETUP, deaths=tuple((0.01, number) for number in range(4)))
    assert "no rank is left" in (rehearse_repair(setup, seed=0).ended or "")
    assert rehearse_restart(setup, seed=0).ended == "no machine is left"


def test_lives_are_drawn_and_the_same_for_the_same_seed() -> None:
    setup = replace(SETUP, mtbf_s=60 * FOUR_S, back_s=5 * FOUR_S, halt_s=0.1 * FOUR_S, restart_s=2 * FOUR_S, checkpoint_s=0.0)
    for rehearse in (rehearse_repair, rehearse_restart):
        runs = [rehearse(setup, seed=seed) for seed in range(4)]
        assert runs == [rehearse(setup, seed=seed) for seed in range(4)]
        assert len({run.total_s for run in runs}) == 4
        assert sum(run.deaths for run in runs) > 4
        for run in runs:
            assert run.total_s == pytest.approx(parts(run))
            assert run.lost_s == pytest.approx(run.total_s - run.useful_s)
            assert run.steps == 50 or run.ended


@pytest.mark.parametrize("rehearse", [rehearse_repair, rehearse_restart])
def test_lives_that_are_too_short_end_the_run_and_say_so(rehearse: object) -> None:
    assert callable(rehearse)
    run = rehearse(replace(SETUP, mtbf_s=0.01 * FOUR_S, back_s=0.001 * FOUR_S), seed=1)
    assert run.steps < 50
    assert run.ended
    assert math.isfinite(run.total_s)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"mtbf_s": 0.0}, "mtbf_s must be a finite number > 0"),
        ({"mtbf_s": math.nan}, "mtbf_s must be"),
        ({"back_s": math.inf}, "back_s must be"),
        ({"halt_s": -1.0}, "halt_s must be a finite number >= 0"),
        ({"restart_s": math.nan}, "restart_s must be"),
        ({"checkpoint_steps": 0}, "checkpoint_steps must be at least 1"),
        ({"iterations": 0}, "iterations must be at least 1"),
        ({"copies": 3}, "copies must be 1 or 2, not 3"),
        ({"update_fraction": 1.0}, "update_fraction must be a share"),
        ({"deaths": ((1.0, 4),)}, "machine 4 of 4"),
    ],
)
def test_bad_numbers(wrong: dict[str, object], said: str) -> None:
    with pytest.raises(InputError, match=said):
        replace(SETUP, **wrong)  # type: ignore[arg-type]


def test_more_machines_than_samples_share_them() -> None:
    run = rehearse_repair(replace(SETUP, workload=Workload.mlp(3, 4, 2, samples=2)), seed=0)
    assert (run.steps, run.deaths, run.ended) == (SETUP.iterations, 0, None)
    assert run.total_s == pytest.approx(run.useful_s)
