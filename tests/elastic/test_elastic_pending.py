"""What the report says of a change of the members, from what each of them tells: the times add up, and the worst counts."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tatami.elastic.orders import CarriedOut
from tatami.elastic.pending import PendingChange
from tatami.membership import Regroup
from tatami.membership.copies import Take
from tatami.tiling import Column, Layout, Span

CHANGE = Regroup(
    ticket=7,
    group=2,
    members=("p0", "p2"),
    sections=4,
    finish=(),
    outcome=None,
    newcomers=(),
    source="p0",
    layout=Layout(columns=(Column(width=1.0, processors=("p0", "p2"), heights=(0.5, 0.5)),)),
    mirrors=(),
    takes=(
        Take(dest="p2", source="p0", block=0, units=Span(0, 3)),
        Take(dest="p0", source="p0", block=0, units=Span(3, 8), from_mirror=True),
    ),
    reason="p1 died",
)
DONE = CarriedOut(ticket=7, step=12, settled="none", spent_s=0.25, repair_s=1.0, steps_lost=0)


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
