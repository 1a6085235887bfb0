"""Sections and sums of an elastic run that are under way when the group changes."""

import os
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import tatami
from tatami.clock import SystemClock
from tatami.comm import AbstractCommunicator, run_threads
from tatami.elastic.history import PendingChange
from tatami.elastic.order_box import OrderBox
from tatami.elastic.orders import CarriedOut
from tatami.elastic.sections import OpenSection, Sections
from tatami.elastic.steps import Steps, steps
from tatami.engine.ray_start import uninterrupted
from tatami.errors import InputError, TrainingError
from tatami.membership import Dismiss, Halted, Regroup, Restart, Take
from tatami.state.regroup import common_state, load_common_state
from tatami.tiling import Layout, Replica, Span

CHANGE = Regroup(
    ticket=7,
    group=2,
    members=("p0", "p2"),
    sections=4,
    finish=(),
    outcome=None,
    newcomers=(),
    source="p0",
    layout=Layout(replicas=(Replica(width=1.0, processors=("p0", "p2"), heights=(0.5, 0.5)),)),
    mirrors=(),
    takes=(
        Take(dest="p2", source="p0", block=0, units=Span(0, 3)),
        Take(dest="p0", source="p0", block=0, units=Span(3, 8), from_mirror=True),
    ),
    reason="p1 died",
)
DONE = CarriedOut(ticket=7, step=12, settled="none", spent_s=0.25, steps_lost=0)


def test_the_times_of_a_change_add_up_and_the_member_that_lost_most_counts() -> None:
    pending = PendingChange(noticed_s=10.0)
    pending.regroup(CHANGE, now_s=10.5)
    pending.carried_out(replace(DONE, settled="redone", spent_s=0.75))
    pending.carried_out(DONE)
    made = pending.made(now_s=12.0, tiling={"units": 8})
    assert (made.at_s, made.halted_s, made.laid_s, made.lost_s) == (10.0, 0.5, 1.5, 0.75 + 0.5 + 1.5)
    assert (made.step, made.settled, made.steps_lost, made.members) == (12, "redone", 0, ("p0", "p2"))
    assert made.moved_units == 3, "what a member takes from its own mirror is not sent"
    assert str(made) == "p1 died: step 12 is done again, 2 ranks go on after 2.75 s"


def test_a_change_in_whose_middle_another_member_dies_tells_of_both() -> None:
    pending = PendingChange(noticed_s=10.0)
    pending.regroup(CHANGE, now_s=10.5)
    pending.regroup(replace(CHANGE, ticket=8, members=("p2",), reason="p0 died"), now_s=11.0)
    pending.carried_out(DONE)
    pending.carried_out(replace(DONE, ticket=8, settled="redone"))
    made = pending.made(now_s=12.0, tiling=None)
    assert (made.reason, made.members, made.halted_s, made.laid_s) == ("p1 died, p0 died", ("p2",), 1.0, 1.0)


@pytest.mark.parametrize("order", [("finished", "redone"), ("redone", "finished"), ("none", "finished")])
def test_a_step_that_any_member_finished_is_finished(order: tuple[str, str]) -> None:
    pending = PendingChange(noticed_s=0.0)
    pending.regroup(CHANGE, now_s=0.0)
    for settled in order:
        pending.carried_out(replace(DONE, settled=settled))
    assert pending.settled == "finished"


def test_steps_back_to_a_checkpoint_are_those_of_the_member_that_was_furthest() -> None:
    pending = PendingChange(noticed_s=0.0)
    pending.regroup(CHANGE, now_s=0.0)
    for steps_lost in (2, 5, 4):
        pending.carried_out(replace(DONE, settled="returned", steps_lost=steps_lost))
    assert (pending.steps_lost, pending.settled) == (5, "returned")


def test_what_belongs_to_another_change_does_not_count() -> None:
    pending = PendingChange(noticed_s=0.0)
    pending.carried_out(DONE)
    pending.regroup(CHANGE, now_s=1.0)
    pending.carried_out(replace(DONE, ticket=6, settled="finished", spent_s=9.0))
    assert pending == PendingChange(noticed_s=0.0, halted_s=1.0, change=CHANGE, reasons=["p1 died"])


def test_one_rank_goes_on_from_a_checkpoint() -> None:
    pending = PendingChange(noticed_s=0.0)
    reason = "p0, p1 died, the run goes on from its last checkpoint"
    pending.regroup(replace(CHANGE, members=("p2",), reason=reason), now_s=0.0)
    pending.carried_out(replace(DONE, settled="returned", steps_lost=4))
    told = f"{reason}: step 12 comes next and 4 steps are lost, 1 rank goes on after 750 ms"
    assert str(pending.made(now_s=0.5, tiling=None)) == told


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


ANSWER = Halted(member="p0", ticket=1, sections=2)


def box_of(severed: list[str]) -> OrderBox:
    return OrderBox("p0", where=lambda ticket, _: replace(ANSWER, ticket=ticket), sever=lambda: severed.append("severed"))


def test_a_rank_halts_when_it_parks_and_goes_on_with_the_next_order() -> None:
    severed: list[str] = []
    box, found = box_of(severed), list[object]()
    off = box.off
    script = threading.Thread(target=lambda: found.append(box.park()))
    script.start()
    assert box.halt(1, abort=True) == ANSWER
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


def loops(*rates: float, count: Any = 2, carry: Any = None) -> list[Steps]:
    def body(comm: AbstractCommunicator) -> list[Steps]:
        found = []
        for rate in rates:
            model = tatami.tile(nn.Linear(2, 2), comm, batch_size=4, speeds="equal", reduction="mean", quiet=True)
            found.append(steps(model, torch.optim.SGD(model.parameters(), lr=rate), count=count, carry=carry))
        return found

    return run_threads(body, size=1)[0]


def test_settings_that_differ_are_named() -> None:
    alike, same, other = loops(0.1, 0.1, 0.2)
    both = [a + b for a, b in zip(alike.local_settings(), same.local_settings(), strict=True)]
    alike.check_settings(both)
    apart = [a + b for a, b in zip(alike.local_settings(), other.local_settings(), strict=True)]
    for loop, rate in ((alike, 0.1), (other, 0.2)):
        with pytest.raises(InputError, match=rf"different settings; those of p0 are lr={rate}, .*carry="):
            loop.check_settings(apart)


def test_a_newcomer_trains_the_weights_that_the_others_train() -> None:
    old, new = loops(0.1, 0.2)
    next(old.model.parameters()).requires_grad_(False)
    load_common_state(new.model, new.optimizer, common_state(old.model, old.optimizer))
    assert [each.requires_grad for each in new.model.parameters()] == [False, True]
    assert new.optimizer.param_groups[0]["lr"] == 0.1
    old.optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})
    with pytest.raises(InputError, match="a rank that joins has 1 parameter group, and those of the run have 2"):
        load_common_state(new.model, new.optimizer, common_state(old.model, old.optimizer))


def test_leaving_where_ranks_do_not_leave_warns() -> None:
    (loop,) = loops(0.1)
    with pytest.warns(UserWarning, match=r"loop.leave\(\) does nothing here"):
        loop.leave()


def go_through(loop: Steps, *, mistake: str) -> None:
    for step in loop:
        if mistake == "skips":
            continue
        with step:
            loss = loop.model(torch.ones(4, 2)).sum()
            loss.backward()
            if mistake == "steps":
                loop.optimizer.step()
            step.update(loss.item() if mistake == "number" else loss)
            if mistake == "twice":
                step.update(loss)


@pytest.mark.parametrize(
    ("mistake", "told"),
    [
        ("skips", "step 0 was not used in a `with` block"),
        ("steps", r"optimizer.step\(\) was called in step 0, and step.update\(loss\) makes the optimizer's step itself"),
        ("number", r"step.update takes the loss as a tensor, as it was before .item\(\), not"),
        ("twice", "step.update was called twice in step 0"),
    ],
)
def test_a_loop_that_would_train_otherwise_is_refused(mistake: str, told: str) -> None:
    with pytest.raises(InputError, match=told):
        go_through(*loops(0.1), mistake=mistake)


def test_what_steps_cannot_be_made_of_is_refused() -> None:
    with pytest.raises(InputError, match=r"count must be a whole number of at least 0, not 2\.5"):
        loops(0.1, count=2.5)
    with pytest.raises(InputError, match=r"carry\['schedule'\] has no state_dict\(\)"):
        loops(0.1, carry={"schedule": 3})
    (loop,), network = loops(0.1), nn.Linear(2, 2)
    other = torch.optim.SGD(network.parameters(), lr=0.1)
    with pytest.raises(InputError, match=r"the optimizer of tatami\.steps has no parameter of the model"):
        steps(loop.model, other, count=1)
    with pytest.raises(InputError, match=r"takes the model that tatami\.tile returns, not a Linear"):
        steps(network, other, count=1)  # type: ignore[arg-type]


@pytest.fixture
def _is_interruptible() -> Iterator[None]:
    """What runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_is_interruptible")
def test_an_interrupt_waits_for_the_end() -> None:
    ray = pytest.importorskip("ray")
    went_on = []

    def interrupted() -> None:
        with uninterrupted(ray):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert went_on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
