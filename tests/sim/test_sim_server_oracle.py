"""Single failures of each policy against their closed form, and rounds passed over against rounds simulated."""

import statistics
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_rig import started

from tatami.errors import InputError
from tatami.server.consistency import SSP
from tatami.server.recovery import AbstractRecovery, Checkpoint, FromServers, Ignore
from tatami.sim.platforms import RDMA, MachineGroup, Tree, Wire
from tatami.sim.processes import Runs
from tatami.sim.server import Checkpoints, ServerRun, ServerSetup, paper_setup, simulate_server
from tatami.sim.server.lifetimes import life_s

PULL_S = 2e-3 + 10.0
"""1 GB at 100 MB/s, which a worker's link has for itself; so long is a push, too."""
WORK_S = 100.0
ROUND_S = 2 * PULL_S + WORK_S
BOOT_S = 5.0
READ_S = 8.0
ROUNDS = 6


def star(workers: int = 4, *, stores: int = 0) -> Tree:
    """Workers on 100 MB/s, two servers and stores on as much as they like, and nothing that is shared."""
    link = Wire(bandwidth_bytes_per_s=100e6, latency_s=1e-3, duplex=True)
    fast = Wire(bandwidth_bytes_per_s=100e9, latency_s=1e-3, duplex=True)
    groups = [MachineGroup(name="worker{i}", count=workers, link=link), MachineGroup(name="server{i}", count=2, link=fast)]
    if stores:
        groups.append(MachineGroup(name="store", link=Wire(bandwidth_bytes_per_s=200e6, latency_s=1e-3, duplex=True)))
    return Tree(name="star", groups=tuple(groups), fabric=RDMA)


def setup(recovery: AbstractRecovery, *, at_s: float | None = None, workers: int = 4) -> ServerSetup:
    """Six rounds in which nothing breaks but worker 1, at `at_s`."""
    return ServerSetup(
        platform=star(workers),
        workers=tuple(range(workers)),
        servers=(workers, workers + 1),
        rounds=ROUNDS,
        recovery=recovery,
        mtbf_s=None,
        deaths=() if at_s is None else ((at_s, 1),),
        spread=1,
        spawn_s=BOOT_S,
    )


def one(what: ServerSetup, *, skips: bool = True, seed: int = 0) -> ServerRun:
    return simulate_server([what], seeds=[seed], runs=started(), skips=skips)[0][0]


INTO_S = 30.0
"""The worker dies so long after it began to compute, in the third round."""
AT_S = 2 * ROUND_S + PULL_S + INTO_S


@pytest.mark.parametrize("recovery", [FromServers(), Ignore(), Checkpoint()])
def test_undisturbed_rounds_are_pull_compute_push(recovery: AbstractRecovery) -> None:
    run = one(setup(recovery))
    assert run.total_s == pytest.approx(ROUNDS * ROUND_S, rel=1e-9)
    assert run.undisturbed_s == run.total_s
    assert run.bytes_moved == pytest.approx(ROUNDS * 4 * 2e9, rel=1e-9)
    assert (run.rounds, run.failures, run.lost_updates, run.lost_per_failure_s) == (ROUNDS, (), 0, None)


@pytest.mark.parametrize("push", ["together", "when-done"])
@pytest.mark.parametrize("detection_s", [0.0, 2.5])
@pytest.mark.parametrize(("resume", "again_s"), [("continue", 0.0), ("restart", INTO_S)])
def test_from_servers_costs_boot_and_pull_and_what_is_redone(
    push: str, detection_s: float, resume: str, again_s: float
) -> None:
    what = replace(setup(FromServers(), at_s=AT_S), push=push, detection_s=detection_s, resume=resume)  # type: ignore[arg-type]
    run = one(what)
    assert run.total_s - run.undisturbed_s == pytest.approx(detection_s + BOOT_S + PULL_S + again_s, rel=1e-6)
    assert run.lost_updates == 0
    assert [(failure.kind, failure.number, failure.round) for failure in run.failures] == [("worker", 1, 2)]
    assert run.failures[0].at_s == pytest.approx(AT_S, rel=1e-9)


@pytest.mark.parametrize(("detection_s", "lost_s"), [(0.0, 0.0), (50.0, 0.0), (90.0, INTO_S + 90.0 - WORK_S - PULL_S)])
def test_ignore_costs_nothing_but_late_detection_and_an_update(detection_s: float, lost_s: float) -> None:
    run = one(replace(setup(Ignore(), at_s=AT_S), detection_s=detection_s))
    assert run.total_s - run.undisturbed_s == pytest.approx(lost_s, rel=1e-6, abs=1e-6)
    # A spare that is up before the round closes joins the next one; else one more update is missing.
    assert run.lost_updates == (1 if INTO_S + detection_s + BOOT_S <= WORK_S + PULL_S else 2)


@pytest.mark.parametrize("boot_s", [BOOT_S, 20.0])
@pytest.mark.parametrize("detection_s", [0.0, 2.5])
@pytest.mark.parametrize("waits", [False, True])
def test_checkpoint_costs_the_round_so_far_and_reading(boot_s: float, detection_s: float, waits: bool) -> None:
    writing_s = READ_S if waits else 0.0
    at_s = writing_s + 2 * (ROUND_S + writing_s) + PULL_S + INTO_S
    what = replace(
        setup(Checkpoint(), at_s=at_s), spawn_s=boot_s, detection_s=detection_s, checkpoints=Checkpoints(waits=waits)
    )
    run = one(what)
    assert run.undisturbed_s == pytest.approx(ROUNDS * ROUND_S + (ROUNDS + 1) * writing_s, rel=1e-9)
    lost_s = PULL_S + INTO_S + detection_s + max(READ_S, boot_s)
    assert run.total_s - run.undisturbed_s == pytest.approx(lost_s, rel=1e-6)


def test_checkpoints_further_apart_redo_the_rounds_between() -> None:
    run = one(setup(Checkpoint(every=2), at_s=AT_S + ROUND_S))  # in the fourth round; the last checkpoint is after the second
    assert run.total_s - run.undisturbed_s == pytest.approx(ROUND_S + PULL_S + INTO_S + READ_S, rel=1e-6)


def test_a_store_that_all_share_is_slower_the_more_share_it() -> None:
    """8 GB of each of four workers, through 200 MB/s: 160 s to write, which all wait for, and to read."""
    what = replace(
        setup(Checkpoint()), platform=star(stores=1), checkpoints=Checkpoints(store=(6,), waits=True, size_bytes=8e9)
    )
    writing_s = 2e-3 + 4 * 8e9 / 200e6
    run = one(what)
    assert run.total_s == pytest.approx(ROUNDS * ROUND_S + (ROUNDS + 1) * writing_s, rel=1e-6)
    at_s = writing_s + PULL_S + INTO_S
    run = one(replace(what, deaths=((at_s, 1),)))
    # Three read, as the fourth is dead; its spare reads nothing, and pulls like all others.
    assert run.total_s - run.undisturbed_s == pytest.approx(PULL_S + INTO_S + 2e-3 + 3 * 8e9 / 200e6, rel=1e-6)


def test_a_server_with_a_copy_costs_the_copying() -> None:
    """Two servers hold everything twice; one dies while all compute, is started again and made whole between the rounds."""
    what = replace(setup(FromServers()), replicas=2, server_mtbf_s=3000.0, rounds=20, spread=None)
    run = one(what, seed=0)
    assert [(failure.kind, failure.round) for failure in run.failures] == [("server", 13)]
    assert run.undisturbed_s == pytest.approx(20 * (PULL_S + WORK_S + 2e-3 + 20.0), rel=1e-9)  # what is pushed goes to both
    # In that round to one only; then both shards are copied, over 100 GB/s.
    assert run.total_s - run.undisturbed_s == pytest.approx(-10.0 + 2e-3 + 1e9 / 100e9, rel=1e-6)
    assert (run.rounds, run.lost_updates, run.stopped) == (20, 0, None)


def test_a_server_without_a_copy_ends_the_run_and_says_why() -> None:
    run = one(replace(setup(FromServers()), server_mtbf_s=200.0), seed=1)
    assert run.stopped == "shards lost"
    assert run.rounds < ROUNDS


def test_a_link_that_is_mended_in_time_costs_what_stood_still() -> None:
    what = replace(setup(FromServers()), link_mtbf_s=3000.0, link_repair_s=4.0, rounds=30)
    run = one(what, seed=0)
    assert [failure.kind for failure in run.failures] == ["link"] * 4
    # One breaks while its worker pushes, which stands still meanwhile; three while all compute.
    assert run.total_s - run.undisturbed_s == pytest.approx(4.0, rel=1e-6)


def test_a_link_that_is_not_mended_in_time_is_a_death() -> None:
    what = replace(setup(Ignore()), link_mtbf_s=3000.0, link_repair_s=60.0, detection_s=2.0, rounds=30)
    run = one(what, seed=4)
    assert (run.num_failures, run.lost_updates, run.rounds) == (4, 4, 30)


@pytest.mark.parametrize("strikes", ["computing", "anytime"])
@pytest.mark.parametrize("resume", ["continue", "restart"])
@pytest.mark.parametrize("recovery", [FromServers(), Ignore(), Checkpoint(), Checkpoint(every=3)])
def test_passing_undisturbed_rounds_over_changes_nothing(recovery: AbstractRecovery, resume: str, strikes: str) -> None:
    what = replace(setup(recovery), mtbf_s=8000.0, rounds=40, strikes=strikes, resume=resume)  # type: ignore[arg-type]
    skipped, whole = one(what, seed=4), one(what, seed=4, skips=False)
    assert skipped.num_failures >= 2
    assert skipped.total_s == pytest.approx(whole.total_s, rel=1e-12)
    assert [failure.at_s for failure in skipped.failures] == pytest.approx([f.at_s for f in whole.failures], rel=1e-12)
    for name in ("rounds", "lost_updates", "num_failures", "stopped"):
        assert getattr(skipped, name) == getattr(whole, name), name
    assert skipped.bytes_moved == pytest.approx(whole.bytes_moved, rel=1e-9)


def test_workers_that_drift_apart_are_simulated_round_by_round() -> None:
    run = one(replace(setup(FromServers(), at_s=AT_S), consistency=SSP(staleness=2)))
    assert run.rounds == 4 * ROUNDS  # commits: each update is one of its own
    assert run.total_s >= ROUNDS * ROUND_S


PAPER_ROUND_S = 143.3523100721
"""Golden: SimGrid 4.1, LV08. The paper's 200 rounds take about 28,700 s."""


def test_one_round_of_ten_thousand_workers() -> None:
    ((run,),) = simulate_server([replace(paper_setup(rounds=200), mtbf_s=None)], seeds=[0], runs=started())
    assert run.total_s == pytest.approx(200 * PAPER_ROUND_S, rel=1e-9)
    assert run.total_s == pytest.approx(28_668, abs=200 * 0.1)
    assert run.bytes_moved == 200 * 10_000 * 2e9


@cache
def _thirty_runs() -> dict[str, list[ServerRun]]:
    """As many computing hours as 10,000 workers in 200 rounds have: 200 in 10,000. A round takes as long, to the digit."""
    setups = [paper_setup(workers=200, rounds=10_000, recovery=each) for each in (Checkpoint(), FromServers(), Ignore())]
    found = simulate_server(setups, seeds=range(30), runs=started())
    return {runs[0].recovery: runs for runs in found}


def lost_s(runs: list[ServerRun]) -> float:
    return sum(run.total_s - run.undisturbed_s for run in runs) / sum(run.num_failures for run in runs)


def test_a_round_takes_what_the_paper_says() -> None:
    for runs in _thirty_runs().values():
        round_s = runs[0].undisturbed_s / 10_000
        assert round_s == pytest.approx(PAPER_ROUND_S, rel=1e-9)
        assert round_s == pytest.approx(143.34, abs=0.1)


def test_failures_are_as_many_as_the_paper_says() -> None:
    for runs in _thirty_runs().values():
        assert 2.5 <= statistics.fmean(run.num_failures for run in runs) <= 3.6


def test_what_a_failure_costs() -> None:
    runs = _thirty_runs()
    assert lost_s(runs["from-servers"]) == pytest.approx(12.6, abs=2)
    assert -1.0 <= round(lost_s(runs["ignore"]), 6) <= 0.0  # the paper's -0.5, to 0.5
    assert lost_s(runs["checkpoint"]) == pytest.approx(78.1, rel=0.25)


def test_checkpoints_vary_most_and_only_ignoring_loses_updates() -> None:
    runs = _thirty_runs()
    deviations = {name: statistics.pstdev(run.total_s for run in each) for name, each in runs.items()}
    assert max(deviations, key=deviations.__getitem__) == "checkpoint"
    updates = {name: sum(run.lost_updates for run in each) for name, each in runs.items()}
    assert updates == {"checkpoint": 0, "from-servers": 0, "ignore": sum(run.num_failures for run in runs["ignore"])}


def test_one_core_or_two_to_the_last_digit() -> None:
    setup = paper_setup(workers=100, rounds=5000)
    two = simulate_server([setup], seeds=range(4), runs=started())
    with Runs(cores=1) as alone:
        one = simulate_server([setup], seeds=range(4), runs=alone)
    assert one == two
    assert sum(run.num_failures for run in one[0]) > 0


def test_daly_writes_as_often_as_it_pays() -> None:
    """100 workers of a month each: a failure in 7.2 h; writing takes 8 s, so the optimum is 635 s, 4 rounds."""
    base = paper_setup(workers=100, rounds=500)
    waiting = replace(base, mtbf_s=30 * 86400.0, checkpoints=replace(base.checkpoints, waits=True))
    daly, always = (
        simulate_server([replace(waiting, recovery=Checkpoint(every=every))], seeds=range(3), runs=started())[0]
        for every in ("daly", 1)
    )
    assert always[0].undisturbed_s == pytest.approx(500 * PAPER_ROUND_S + 501 * 8, rel=1e-9)
    assert daly[0].undisturbed_s == pytest.approx(500 * PAPER_ROUND_S + (500 / 4 + 1) * 8, rel=1e-9)
    assert statistics.fmean(run.total_s for run in daly) < statistics.fmean(run.total_s for run in always)


@given(seed=st.integers(0, 10**9), number=st.integers(0, 10**6), generation=st.integers(0, 100))
def test_lives_are_positive_and_repeat(seed: int, number: int, generation: int) -> None:
    names = {"seed": seed, "kind": "worker", "number": number, "generation": generation}
    life = life_s(1000.0, **names)  # type: ignore[arg-type]
    assert 0 < life < 40_000
    assert life == life_s(1000.0, **names)  # type: ignore[arg-type]
    assert life_s(2000.0, **names) == 2 * life  # type: ignore[arg-type]


def test_lives_are_exponential() -> None:
    lives = sorted(life_s(1000.0, seed=1, kind="worker", number=number, generation=0) for number in range(20_000))
    assert statistics.fmean(lives) == pytest.approx(1000.0, rel=0.03)
    assert lives[10_000] == pytest.approx(693.1, rel=0.04)
    assert statistics.pstdev(lives) == pytest.approx(1000.0, rel=0.05)
    assert lives != [life_s(1000.0, seed=2, kind="worker", number=number, generation=0) for number in range(20_000)]


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"mtbf_s": -1.0}, "mtbf_s must be a finite number > 0, not -1"),
        ({"detection_s": -0.5}, "detection_s must be a finite number >= 0, not -0.5"),
        ({"servers": tuple(range(101, 10_300))}, "100 workers, 10199 servers .* has only 200"),
        ({"workers": (1000,)}, "workers: there is no host 1000 on the platform"),
        ({"workers": ()}, "at least one worker"),
        ({"spread": 101}, "spread must be from 1 to the number of servers, 100"),
        ({"deaths": ((5.0, 100),)}, "deaths: worker 100 at 5.0 s: there are workers 0 to 99"),
    ],
)
def test_a_setup_that_cannot_be_is_refused(changes: dict[str, object], words: str) -> None:
    with pytest.raises(InputError, match=words):
        replace(paper_setup(workers=100), **changes)  # type: ignore[arg-type]
    assert isinstance(paper_setup(workers=100), ServerSetup)
