"""The numbers of Li, Tanimura and Nakada: what a round takes, what a failure costs under each recovery."""

import statistics
from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st
from sim_rig import started

from tatami.errors import InputError
from tatami.server.recovery import Checkpoint, FromServers, Ignore
from tatami.sim.processes import Runs
from tatami.sim.server import ServerRun, ServerSetup, paper_setup, simulate_server
from tatami.sim.server.lifetimes import life_s

ROUND_S = 143.3523100721
"""Golden: SimGrid 4.1, LV08. The paper's 200 rounds take about 28,700 s."""


def test_one_round_of_ten_thousand_workers() -> None:
    ((run,),) = simulate_server([replace(paper_setup(rounds=200), mtbf_s=None)], seeds=[0], runs=started())
    assert run.total_s == pytest.approx(200 * ROUND_S, rel=1e-9)
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
        assert round_s == pytest.approx(ROUND_S, rel=1e-9)
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
    assert always[0].undisturbed_s == pytest.approx(500 * ROUND_S + 501 * 8, rel=1e-9)
    assert daly[0].undisturbed_s == pytest.approx(500 * ROUND_S + (500 / 4 + 1) * 8, rel=1e-9)
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
