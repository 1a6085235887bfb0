"""Which processes are declared hung: none whose signs of life only wait to be read, whatever takes long in between."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.engine.silence import Listening, Sign, look, silent

LIMIT_S = 2.0
TICK_S = 0.05


@dataclass
class Group:
    """Processes that send a sign of life every quarter of a second until they hang, and a clock that a test sets."""

    hang_s: dict[int, float]
    clock_s: float = 0.0
    handler_s: float = 2.5
    listening: Listening = field(default_factory=lambda: Listening(0.0, longest_step_s=2 * TICK_S))
    heard: dict[int, float] = field(default_factory=dict)
    told: list[int] = field(default_factory=list)
    told_at_s: list[float] = field(default_factory=list)
    silent_s: list[float] = field(default_factory=list)
    seen_s: dict[int, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.heard = dict.fromkeys(self.hang_s, 0.0)
        self.seen_s = dict.fromkeys(self.hang_s, 0.0)
        self._read_s = 0.0

    def signs(self) -> Mapping[int, Sign]:
        return {number: Sign(heard_s=heard_s, limit_s=LIMIT_S) for number, heard_s in self.heard.items()}

    def late(self, number: int) -> None:
        """To kill a process takes a long time."""
        del self.heard[number]
        self.told.append(number)
        self.told_at_s.append(self.clock_s)
        self.silent_s.append(self.clock_s - self.seen_s[number])
        self.clock_s += self.handler_s

    def read(self) -> bool:
        """A process that has not hung by then has sent something since it was read last."""
        for number in self.heard:
            if self.hang_s[number] > self._read_s:
                self.heard[number] = self.listening.heard_s
                self.seen_s[number] = self.clock_s
        self._read_s = self.clock_s
        return True

    def run(self, *, until_s: float, steps_s: list[float]) -> None:
        """Go round as the runtime does: wait, read, look."""
        turn = 0
        while self.clock_s < until_s:
            self.clock_s += steps_s[turn % len(steps_s)]
            turn += 1
            self.read()
            self.listening.advance(self.clock_s)
            look([self], now_s=self.listening.now_s, read=self.read)


NEVER = float("inf")


def test_a_slow_handler_makes_no_other_process_late() -> None:
    """Two hang at the same time; the first is killed for 2.5 s, in which the sound ones are not heard."""
    group = Group({0: 1.0, 1: NEVER, 2: 1.0, 3: NEVER})
    group.run(until_s=60.0, steps_s=[TICK_S])
    assert group.told == [0, 2]


def test_one_that_was_heard_of_meanwhile_is_not_late() -> None:
    group = Group({0: 0.0, 1: 0.0})
    for turn in range(30):
        group.clock_s = turn * 2 * TICK_S
        group.listening.advance(group.clock_s)
    group.hang_s[1] = NEVER  # it was late as well at this moment, but its sign of life had only not been read
    look([group], now_s=group.listening.now_s, read=group.read)
    assert group.told == [0]


def test_silence_is_noticed_soon() -> None:
    group = Group({0: 1.0, 1: NEVER})
    group.run(until_s=10.0, steps_s=[TICK_S])
    assert group.told == [0]
    assert 1.0 + LIMIT_S < group.told_at_s[0] + TICK_S < 1.0 + LIMIT_S + 4 * TICK_S


def test_silence_is_noticed_though_every_round_takes_long() -> None:
    """As under ASP, where the others go on: each turn of the loop has a handler of a second."""
    group = Group({0: 1.0, 1: NEVER})
    group.run(until_s=60.0, steps_s=[1.0])
    assert group.told == [0]


@given(
    st.lists(st.floats(0.01, 30.0), min_size=1, max_size=6), st.lists(st.floats(0.0, 20.0), max_size=3), st.floats(0.0, 10.0)
)
def test_however_long_anything_takes_only_those_that_hang_are_told_of(
    steps_s: list[float], hang_s: list[float], handler_s: float
) -> None:
    """The driver is stopped, without a core, or in slow handlers, for as long as may be."""
    sound = dict.fromkeys(range(10, 13), NEVER)
    group = Group(dict(enumerate(hang_s)) | sound, handler_s=handler_s)
    group.heard = dict.fromkeys(group.heard, group.listening.heard_s)
    group.run(until_s=100 * max(steps_s), steps_s=steps_s)
    assert all(silent_s >= LIMIT_S for silent_s in group.silent_s)
    assert set(group.told) <= set(range(len(hang_s)))
    assert set(group.heard) >= set(sound)


def test_each_process_has_its_own_limit_to_start() -> None:
    """However many there are, and whenever the others came up."""
    pytest.importorskip("ray")
    from tatami.engine.crew import BOOT_TIMEOUT_S, Crew, CrewTerms, Member
    from tatami.engine.processes import Identity

    unused: Any = None
    listening = Listening(0.0, longest_step_s=1.0)
    terms = CrewTerms(calls=unused, nodes=unused, now_s=lambda: 0.0, listening=listening, heartbeat_s=LIMIT_S, pool=None)
    crew = Crew(type(None), terms, on_up=unused, on_gone=unused)
    for number in range(100):
        crew.members[number] = Member(actor=None, seen_s=0.0, heard_s=18.0 * number)
    crew.members[0].identity = Identity(pid=1, node="", machine="")
    assert silent(crew.signs(), now_s=18.0) == (0,), "the heartbeat is of those that are up"
    crew.members[0].heard_s = 18.0 * 50
    assert silent(crew.signs(), now_s=18.0 * 50) == tuple(range(1, 51 - int(BOOT_TIMEOUT_S / 18.0) - 1))


def test_the_moment_is_the_same_for_all() -> None:
    signs = {number: Sign(heard_s=float(number), limit_s=1.5) for number in range(5)}
    assert silent(signs, now_s=4.0) == (0, 1, 2)


def test_what_is_over_is_looked_at_no_further() -> None:
    group = Group({0: 0.0, 1: 0.0})
    look([group], now_s=100.0, read=lambda: not group.told)
    assert group.told == [0]
