"""What becomes of the section that is open at a change, and how orders come from one thread of a rank to the other; no Ray."""

from __future__ import annotations

import threading

import pytest

from tatami.clock import SystemClock
from tatami.elastic.order_box import OrderBox
from tatami.elastic.orders import HaltAnswer
from tatami.elastic.sections import OpenSection, Sections
from tatami.errors import TrainingError
from tatami.membership import Dismiss, Restart


def told(*, sections: int, finish: tuple[str, ...] = ()) -> Dismiss:
    return Dismiss(ticket=1, members=("p0", "p1"), finish=finish, sections=sections, outcome=[0.5])


class Recorded:
    """A rank whose sections write down what is done with them."""

    def __init__(self) -> None:
        self.did: list[object] = []
        self.sections = Sections("p0", clock=SystemClock())

    def begin(self, *, admits: bool = True) -> None:
        roll_back = lambda: self.did.append("forgotten")  # noqa: E731
        self.sections.begin(OpenSection(commit=self.did.append, roll_back=roll_back, admits=admits))


def test_a_section_that_any_rank_has_passed_is_finished_and_otherwise_done_again() -> None:
    rank = Recorded()
    rank.begin()
    assert rank.sections.settle(told(sections=1, finish=("p0",))) == "finished"
    rank.begin()
    assert rank.sections.settle(told(sections=1)) == "redone"
    assert rank.did == [[0.5], "forgotten"]
    assert (rank.sections.passed, rank.sections.open) == (1, None)


def test_a_change_is_no_step_that_could_be_redone_or_finished() -> None:
    rank = Recorded()
    rank.sections.begin_change(rank.did.append)
    assert rank.sections.settle(told(sections=0)) == "none"
    assert rank.did == []
    rank.sections.begin_change(rank.did.append)
    assert rank.sections.settle(told(sections=1, finish=("p0",))) == "none"
    assert rank.did == [[0.5]]


def test_newcomers_may_begin_between_two_sections_and_where_one_says_so() -> None:
    rank = Recorded()
    assert rank.sections.admits
    rank.begin(admits=False)
    assert not rank.sections.admits


def test_a_rank_that_is_not_where_the_run_takes_it_to_be_says_so() -> None:
    with pytest.raises(TrainingError, match="p0 has passed 0 sections, and the run takes it that all have passed 3"):
        Recorded().sections.settle(told(sections=3))


ANSWER = HaltAnswer(sections=2, outcome=None, ended=False, admits=True, has_checkpoint=False)


def box_of(severed: list[str]) -> OrderBox:
    return OrderBox("p0", where=lambda _: ANSWER, sever=lambda: severed.append("severed"))


def test_a_rank_halts_when_it_parks_and_goes_on_with_the_next_order() -> None:
    severed: list[str] = []
    box, found = box_of(severed), list[object]()
    off = box.off
    script = threading.Thread(target=lambda: found.append(box.park()))
    script.start()
    assert box.halt(1, abort=True) is ANSWER
    assert off.is_set()
    assert severed == ["severed"]
    order = told(sections=2)
    box.hand_in(order, ticket=1)
    script.join(timeout=60)
    assert found == [order]
    assert not box.off.is_set()


def test_the_newest_order_counts() -> None:
    box, found = box_of([]), list[object]()
    waiting = threading.Thread(target=lambda: found.append(box.halt(1, abort=False)))
    waiting.start()
    box.hand_in(told(sections=2), ticket=2)  # wakes the one that waits for ticket 1, or is there before it
    waiting.join(timeout=60)
    assert found == [None]
    box.hand_in(told(sections=9), ticket=1)
    order = box.park()
    assert isinstance(order, Dismiss)
    assert order.sections == 2


def test_an_order_to_begin_again_is_parked_for_and_then_taken() -> None:
    severed: list[str] = []
    box, order = box_of(severed), Restart(ticket=3, group=2, members=("p0",))
    box.hand_in(order, ticket=3)
    assert severed == ["severed"]
    assert box.park() is order
    assert box.restart() is order
    box.hand_in(told(sections=0), ticket=4)
    with pytest.raises(TrainingError, match="p0 expected to begin again, and was told Dismiss"):
        box.restart()
