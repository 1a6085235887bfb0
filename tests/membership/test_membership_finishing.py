"""What was decided to be finished is finished, also where those that had passed it die before the others hear of it."""

import os
from collections import Counter

from membership_world import World

from tatami.membership import Abort, Ask, Died, Entered, Halted, Laid, Membership, Regroup, RunStage, Stalled, Unbalanced
from tatami.tiling import Layout, Replica
from tatami.workload import Workload

WORKLOAD = Workload.mlp(3, 8, 2, samples=8)


def replica(names: tuple[str, ...], *heights: float) -> Layout:
    return Layout(replicas=(Replica(width=1.0, processors=names, heights=heights or (1 / len(names),) * len(names)),))


def begun() -> Membership:
    machine = Membership(("p0", "p1"), plan=replica)
    for name in ("p0", "p1"):
        machine.handle(Entered(member=name, group=0, layout=replica(("p0", "p1")), workload=WORKLOAD))
    return machine


def test_a_change_that_only_the_dead_rank_had_carried_out_is_carried_out_by_the_other() -> None:
    machine = begun()
    machine.handle(Stalled(member="p0", group=1, reason="the link broke"))
    machine.handle(Halted(member="p1", ticket=2, sections=1))
    (first,) = machine.handle(Halted(member="p0", ticket=2, sections=0))
    assert isinstance(first, Regroup)
    assert first.finish == ("p0",)
    machine.handle(Died(member="p1"))
    (second,) = machine.handle(Halted(member="p0", ticket=4, sections=0))
    assert isinstance(second, Regroup)
    assert (second.members, second.sections, second.finish) == (("p0",), 1, ("p0",))
    assert any(take.from_mirror for take in second.takes), "what the dead rank held is in the mirror of that change"


def test_a_member_without_a_tile_stays_through_repairs_and_gets_one_again() -> None:
    machine = begun()
    for name in ("p0", "p1"):
        machine.handle(Laid(member=name, ticket=1))
    assert machine.stage is RunStage.RUNNING

    def carried_out(event: Unbalanced | Stalled) -> Regroup:
        (asked,) = machine.handle(event)
        assert isinstance(asked, Ask | Abort)
        for name in machine.members:
            told = machine.handle(Halted(member=name, ticket=asked.ticket, sections=machine.sections))
        (change,) = told
        assert isinstance(change, Regroup)
        for name in change.members:
            machine.handle(Laid(member=name, ticket=change.ticket))
        assert machine.stage is RunStage.RUNNING
        return change

    out = carried_out(Unbalanced(member="p0", layout=replica(("p0",)), because="leave one out"))
    assert (out.members, out.layout) == (("p0", "p1"), replica(("p0",)))
    again = carried_out(Stalled(member="p1", group=machine.group, reason="the link broke"))
    assert (again.members, again.layout) == (("p0", "p1"), replica(("p0",)))
    back = carried_out(Unbalanced(member="p0", layout=replica(("p0", "p1")), because="re-map whole"))
    assert {take.source for take in back.takes} == {"p0"}
    assert {take.dest for take in back.takes} == {"p0", "p1"}


def test_tiles_for_one_that_is_no_member_are_not_laid() -> None:
    machine = begun()
    for name in ("p0", "p1"):
        machine.handle(Laid(member=name, ticket=1))
    assert machine.handle(Unbalanced(member="p0", layout=replica(("p0", "p7")), because="re-map whole")) == ()


def test_other_tiles_are_not_laid_while_the_members_change() -> None:
    machine = begun()
    assert machine.handle(Unbalanced(member="p0", layout=replica(("p0", "p1"), 0.75, 0.25), because="re-map whole")) == ()


RUNS = int(os.environ.get("TATAMI_MEMBERSHIP_CHAOS_RUNS", "400"))
SEED = int(os.environ.get("TATAMI_CHAOS_SEED", "0"))


def test_every_history_ends_with_the_right_rows_or_a_named_stop() -> None:
    ends = Counter(World(SEED * 10_000_000 + run).run() for run in range(RUNS))
    assert ends[None] > RUNS / 3
