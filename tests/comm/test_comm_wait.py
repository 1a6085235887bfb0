"""Waits spin briefly, sleep in growing steps, and end."""

import math

import pytest

from tatami.comm.wait import Waiting, WaitPolicy, wait_policy, wait_until
from tatami.errors import InputError


class CountedClock:
    """Every look at it takes 10 us; notes the sleeps."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.sleeps: list[float] = []

    def now_s(self) -> float:
        self.time_s += 10e-6
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.time_s += duration_s


def test_what_is_done_already_is_not_timed() -> None:
    clock = CountedClock()
    assert wait_until(lambda: True, policy=WaitPolicy(spin_s=1.0), timeout_s=1.0, clock=clock) is None
    assert clock.time_s == 0.0


def test_it_spins_first_and_then_sleeps_in_growing_steps() -> None:
    clock = CountedClock()
    policy = WaitPolicy(spin_s=1e-3, first_sleep_s=200e-6, longest_sleep_s=500e-6, sleep_fraction=0.25)
    assert wait_until(lambda: len(clock.sleeps) == 8, policy=policy, timeout_s=1.0, clock=clock) is None
    # 1000 us of spinning, then a quarter of what was waited until then, and 10 us for each look at the clock.
    assert [round(sleep_s * 1e6) for sleep_s in clock.sleeps] == [250, 315, 396, 498, 500, 500, 500, 500]


def test_it_ends_after_the_timeout_and_does_not_oversleep_it() -> None:
    clock = CountedClock()
    waited_s = wait_until(
        lambda: False, policy=WaitPolicy(spin_s=0.0, first_sleep_s=0.4, longest_sleep_s=0.4), timeout_s=0.5, clock=clock
    )
    assert waited_s is not None
    assert 0.5 <= waited_s < 0.501


def test_auto_spins_only_where_every_rank_has_a_core() -> None:
    roomy = wait_policy(ranks_on_host=2, cores=2, environ={})
    crowded = wait_policy(ranks_on_host=3, cores=2, environ={"TATAMI_WAIT": "auto"})
    assert roomy.spin_s > crowded.spin_s == 0
    assert max(roomy.longest_sleep_s, crowded.longest_sleep_s) <= 1e-3


def test_the_environment_chooses() -> None:
    assert wait_policy(ranks_on_host=9, cores=1, environ={"TATAMI_WAIT": "spin"}).spin_s == math.inf
    assert wait_policy(ranks_on_host=1, cores=9, environ={"TATAMI_WAIT": "sleep"}).spin_s == 0.0
    with pytest.raises(InputError, match="TATAMI_WAIT='doze' is not a way to wait; choose one of: auto, spin, sleep"):
        wait_policy(ranks_on_host=1, cores=1, environ={"TATAMI_WAIT": "doze"})


def test_the_error_says_who_waited_for_whom_in_what_and_what_to_do() -> None:
    receiving = Waiting(operation="recv", rank=2, size=8, peer=5, tag=7)
    assert str(receiving.timeout(30.0)) == (
        "recv from rank 5 (tag 7) on rank 2 of 8 timed out after 30 s: nothing came from rank 5. Is rank 5 alive, and does it "
        "use the same tag? Raise timeout_s if it is only slow or the link is."
    )
    meeting = Waiting(operation="barrier", rank=0, size=4, missing=(1, 3))
    assert "barrier on rank 0 of 4 timed out after 1.5 s: ranks 1, 3 did not join" in str(meeting.timeout(1.5))
