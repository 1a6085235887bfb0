"""`verify` proves what the builders build, and catches what is broken in any of the usual ways."""

import random
from dataclasses import dataclass, replace

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tatami.collective import (
    ALGORITHMS,
    AbstractPattern,
    Explicit,
    Native,
    Phase,
    RankGroup,
    Role,
    Schedule,
    Step,
    Sync,
    Via,
    build,
    simulate,
    verify,
)
from tatami.errors import ScheduleError

ONE_SIDED = (Sync.FENCE, Sync.PSCW, Sync.LOCK)
ACROSS = (
    "native",
    "ring",
    "direct",
    "halving_doubling",
    "accumulate",
    "torus",
    "torus_native",
    "torus_put",
    "torus_accumulate",
)


@st.composite
def cases(draw: st.DrawFn, *, max_ranks: int = 16) -> tuple[Schedule, tuple[str, ...] | None]:
    """A schedule of any algorithm, and the hosts it was built for."""
    ranks = draw(st.integers(1, max_ranks))
    size = draw(st.one_of(st.sampled_from([0, 1, ranks - 1, ranks, ranks + 1]), st.integers(0, 97)))
    algorithm = draw(st.sampled_from(sorted(ALGORITHMS)))
    m = draw(st.sampled_from([d for d in range(1, ranks + 1) if ranks % d == 0]))
    hosts: tuple[str, ...] | None = None
    if algorithm != "shared":
        hosts = tuple(draw(st.lists(st.sampled_from(["north", "east", "south", "west"]), min_size=ranks, max_size=ranks)))
    schedule = build(
        algorithm,
        ranks=ranks,
        size=size,
        hosts=hosts,
        grid=(m, ranks // m),
        across=draw(st.sampled_from(ACROSS)),
        sync=draw(st.sampled_from(ONE_SIDED)),
    )
    return schedule, hosts


@settings(max_examples=300, deadline=None)
@given(case=cases(), seed=st.integers(0, 2**16))
def test_every_algorithm_delivers_on_paper_and_on_integers(case: tuple[Schedule, tuple[str, ...] | None], seed: int) -> None:
    schedule, hosts = case
    verify(schedule, hosts=hosts)
    vectors = np.random.default_rng(seed).integers(-(2**40), 2**40, size=(schedule.ranks, schedule.size))
    for out in simulate(schedule, list(vectors)):
        np.testing.assert_array_equal(out, vectors.sum(axis=0))
    for out in simulate(schedule, list(vectors), op=np.maximum):
        np.testing.assert_array_equal(out, vectors.max(axis=0))


@settings(max_examples=60, deadline=None)
@given(case=cases(max_ranks=8), average=st.just(3))
def test_the_average_can_be_taken_where_the_schedule_says(case: tuple[Schedule, tuple[str, ...] | None], average: int) -> None:
    schedule, _ = case
    vectors = [np.arange(schedule.size) * average * (rank + 1) for rank in range(schedule.ranks)]
    indices = {schedule.average_at(rank)[0] for rank in range(schedule.ranks)}
    assert len(indices) == 1
    index = indices.pop()
    total = np.sum(vectors, axis=0)
    state = simulate(replace(schedule, phases=schedule.phases[:index]), vectors)
    for rank, vector in enumerate(state):
        for start, stop in schedule.average_at(rank)[1]:
            np.testing.assert_array_equal(vector[start:stop], total[start:stop])
            vector[start:stop] //= average
    state = simulate(replace(schedule, phases=schedule.phases[index:]), state)
    for vector in state:
        np.testing.assert_array_equal(vector, total // average)


# -- broken on purpose ------------------------------------------------------------------------------------------------


def _steps(schedule: Schedule) -> list[tuple[int, int, int]]:
    """(phase, round, position) of every step of an explicit schedule."""
    return [
        (number, round_, position)
        for number, phase in enumerate(schedule.phases)
        if isinstance(phase.what, Explicit)
        for round_, steps in enumerate(phase.what.rounds)
        for position in range(len(steps))
    ]


def _with_round(schedule: Schedule, number: int, round_: int, steps: tuple[Step, ...]) -> Schedule:
    phase = schedule.phases[number]
    assert isinstance(phase.what, Explicit)
    rounds = (*phase.what.rounds[:round_], steps, *phase.what.rounds[round_ + 1 :])
    changed = replace(phase, what=replace(phase.what, rounds=rounds))
    return replace(schedule, phases=(*schedule.phases[:number], changed, *schedule.phases[number + 1 :]))


def _round(schedule: Schedule, number: int, round_: int) -> tuple[Step, ...]:
    what = schedule.phases[number].what
    assert isinstance(what, Explicit)
    return what.rounds[round_]


@settings(max_examples=250, deadline=None)
@given(
    case=cases(max_ranks=9),
    fault=st.sampled_from(["drop", "duplicate", "duplicate later", "shift", "shorten", "turn around"]),
    chance=st.integers(0, 2**32),
)
def test_one_wrong_step_is_caught(case: tuple[Schedule, tuple[str, ...] | None], fault: str, chance: int) -> None:
    schedule = case[0].explicit()
    places = _steps(schedule)
    assume(places)
    verify(schedule)
    number, round_, position = random.Random(chance).choice(places)
    steps = list(_round(schedule, number, round_))
    step = steps[position]
    if fault == "drop":
        del steps[position]
    elif fault == "duplicate":
        steps.append(step)
    elif fault == "shift":
        steps[position] = replace(step, start=step.start + 1, stop=step.stop + 1)
    elif fault == "shorten":
        steps[position] = replace(step, start=step.start + 1)
    elif fault == "turn around":
        steps[position] = replace(step, source=step.target, target=step.source)
    broken = _with_round(schedule, number, round_, tuple(steps))
    if fault == "duplicate later":
        last = len(broken.phases) - 1
        assume(isinstance(broken.phases[last].what, Explicit))
        phase = broken.phases[last]
        extra = Explicit(role=phase.role, rounds=((replace(step, via=_VIA[phase.sync]),),))
        broken = replace(broken, phases=(*broken.phases, replace(phase, what=extra)))
    with pytest.raises(ScheduleError, match=schedule.algorithm):
        verify(broken)


_VIA = {Sync.ARRIVAL: Via.MESSAGE, Sync.BARRIER: Via.LOAD, Sync.FENCE: Via.PUT, Sync.PSCW: Via.PUT, Sync.LOCK: Via.PUT}


@settings(max_examples=60, deadline=None)
@given(
    algorithm=st.sampled_from(["ring", "halving_doubling", "torus", "torus_put", "accumulate", "hierarchical"]),
    ranks=st.integers(3, 9),
    extra=st.integers(0, 20),
    chance=st.integers(0, 2**32),
)
def test_a_wrong_order_is_caught_exactly_when_it_sums_wrong(algorithm: str, ranks: int, extra: int, chance: int) -> None:
    hosts = [f"h{rank // 2}" for rank in range(ranks)]
    schedule = build(algorithm, ranks=ranks, size=3 * ranks + extra, hosts=hosts).explicit()
    rng = random.Random(chance)
    numbers = [n for n, phase in enumerate(schedule.phases) if phase.num_rounds > 1]
    if numbers and rng.random() < 0.7:
        number = rng.choice(numbers)
        what = schedule.phases[number].what
        assert isinstance(what, Explicit)
        rounds = list(what.rounds)
        first = rng.randrange(len(rounds) - 1)
        rounds[first], rounds[first + 1] = rounds[first + 1], rounds[first]
        changed = replace(schedule.phases[number], what=replace(what, rounds=tuple(rounds)))
        broken = replace(schedule, phases=(*schedule.phases[:number], changed, *schedule.phases[number + 1 :]))
    else:
        broken = replace(schedule, phases=schedule.phases[::-1])
    vectors = np.random.default_rng(chance).integers(-(2**40), 2**40, size=(ranks, schedule.size))
    if all((out == vectors.sum(axis=0)).all() for out in simulate(broken, list(vectors))):
        verify(broken)  # some rounds do not depend on each other: three ranks double by two hops of their own part
    else:
        with pytest.raises(ScheduleError):
            verify(broken)


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling"])
def test_rounds_that_depend_on_each_other_must_keep_their_order(algorithm: str) -> None:
    schedule = build(algorithm, ranks=4, size=8).explicit()
    for number, phase in enumerate(schedule.phases):
        what = phase.what
        assert isinstance(what, Explicit)
        backwards = replace(phase, what=replace(what, rounds=what.rounds[::-1]))
        with pytest.raises(ScheduleError):
            verify(replace(schedule, phases=(*schedule.phases[:number], backwards, *schedule.phases[number + 1 :])))
    with pytest.raises(ScheduleError):
        verify(replace(schedule, phases=schedule.phases[::-1]))


# -- each violation in its own words ----------------------------------------------------------------------------------


def _by_hand(
    *rounds: tuple[Step, ...], ranks: int = 2, size: int = 4, sync: Sync = Sync.ARRIVAL, phases: tuple[Phase, ...] = ()
) -> Schedule:
    group = RankGroup(ranks=tuple(range(ranks)), start=0, stop=size)
    phase = Phase(groups=(group,), what=Explicit(role=Role.ALL_REDUCE, rounds=rounds), sync=sync)
    return Schedule(algorithm="by hand", ranks=ranks, size=size, phases=(*phases, phase), order="by hand", fixed_order=True)


def _step(source: int, target: int, *, start: int = 0, stop: int = 4, reduce: bool = True, via: Via = Via.MESSAGE) -> Step:
    return Step(source=source, target=target, start=start, stop=stop, reduce=reduce, via=via)


def test_a_schedule_by_hand_that_is_right_passes() -> None:
    verify(_by_hand((_step(0, 1),), (_step(1, 0, reduce=False),)))


def _native(*ranks: int, role: Role = Role.ALL_REDUCE) -> Phase:
    return Phase(groups=(RankGroup(ranks=ranks, start=0, stop=4),), what=Native(role=role))


_STORES = (_step(0, 2, reduce=False, via=Via.STORE), _step(1, 2, reduce=False, via=Via.STORE))
_SCATTER = _native(0, 1, role=Role.REDUCE_SCATTER)
BROKEN = [
    (
        r"at the end: rank 0 lacks the contribution of rank 1 in elements 0\.\.2",
        _by_hand((_step(0, 1),), (_step(1, 0, start=2, reduce=False),)),
    ),
    (
        r"round 1: the contribution of rank 0 would be counted twice in elements 0\.\.2",
        _by_hand((_step(0, 1),), (_step(0, 1),)),
    ),
    (
        r"round 0: on rank 0, elements 0\.\.2, a race between: .* rank 1 copied to rank 0",
        _by_hand((_step(0, 1), _step(1, 0, reduce=False))),
    ),
    (r"on rank 2, elements 0\.\.1, a race", _by_hand(_STORES, ranks=3, sync=Sync.BARRIER)),
    (r"sync 'arrival' does not synchronise this: .*by put", _by_hand((_step(0, 1, via=Via.PUT),))),
    ("not a range of the 4 elements", _by_hand((_step(0, 1, stop=5),))),
    ("not a range of the 4 elements", _by_hand((_step(0, 1, start=2, stop=2),))),
    ("from a rank to itself", _by_hand((_step(1, 1),))),
    ("there is no rank 7 of 2", _by_hand(phases=(_native(0, 7),))),
    ("two different ranks or more", _by_hand(phases=(_native(1),))),
    (
        r"reads what a native reduce-scatter left undefined: elements 0\.\.4 of rank 0",
        _by_hand((_step(0, 1, reduce=False),), phases=(_SCATTER,)),
    ),
    (r"elements 2\.\.4 of rank 0 are what a native reduce-scatter left undefined", _by_hand(phases=(_SCATTER,))),
]


@pytest.mark.parametrize(("told", "schedule"), BROKEN)
def test_what_is_broken_is_named(told: str, schedule: Schedule) -> None:
    with pytest.raises(ScheduleError, match=told):
        verify(schedule)


def test_messages_are_sent_before_what_comes_is_added() -> None:
    verify(_by_hand((_step(0, 1), _step(1, 0))))
    puts = (_step(0, 1, via=Via.PUT), _step(1, 0, via=Via.PUT))
    with pytest.raises(ScheduleError, match="a race"):
        verify(_by_hand(puts, sync=Sync.FENCE))


def test_stores_before_loads_of_one_rank_are_taken_in_their_order() -> None:
    load, store = _step(1, 0, via=Via.LOAD), _step(0, 1, reduce=False, via=Via.STORE)
    verify(_by_hand((load, store), sync=Sync.BARRIER))
    with pytest.raises(ScheduleError, match="counted twice"):
        verify(_by_hand((store, load), sync=Sync.BARRIER))


def test_a_lock_does_not_hold_a_later_put_back() -> None:
    steps = ((_step(0, 1, via=Via.PUT),), (_step(1, 0, reduce=False, via=Via.PUT),))
    verify(_by_hand(*steps, sync=Sync.PSCW))
    verify(_by_hand(*steps, sync=Sync.FENCE))
    with pytest.raises(ScheduleError, match="under locks this may come on rank 0 before an earlier round is done"):
        verify(_by_hand(*steps, sync=Sync.LOCK))


def test_a_step_between_groups_is_refused() -> None:
    groups = (RankGroup(ranks=(0, 1), start=0, stop=4), RankGroup(ranks=(2, 3), start=0, stop=4))
    phase = Phase(groups=groups, what=Explicit(role=Role.ALL_REDUCE, rounds=((_step(1, 2),),)))
    schedule = Schedule(algorithm="by hand", ranks=4, size=4, phases=(phase,), order="", fixed_order=True)
    with pytest.raises(ScheduleError, match="no group holds both ranks"):
        verify(schedule)
    twice = Phase(groups=(groups[0], replace(groups[0], start=2)), what=Native(role=Role.ALL_REDUCE))
    with pytest.raises(ScheduleError, match="rank 0 is in two groups that share elements"):
        verify(replace(schedule, phases=(twice,)))


def test_loads_between_hosts_are_refused() -> None:
    schedule = build("shared", ranks=2, size=4)
    verify(schedule, hosts=("north", "north"))
    with pytest.raises(ScheduleError, match=r"south and north share no memory for: elements 0\.\.2 of rank 1"):
        verify(schedule, hosts=("north", "south"))
    with pytest.raises(ScheduleError, match="3 hosts are named for the 2 ranks of shared"):
        verify(schedule, hosts=("north",) * 3)


@dataclass(frozen=True, kw_only=True)
class _Deaf(AbstractPattern):
    """Member 0 sends, and member 1 does not know of it."""

    @property
    def role(self) -> Role:
        return Role.ALL_REDUCE

    @property
    def title(self) -> str:
        return "deaf"

    def num_rounds(self, members: int) -> int:
        return members - 1

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> list[Step]:  # type: ignore[override]
        return [_step(0, 1, stop=group.stop)] if member == round == 0 else []


def test_a_send_that_nobody_receives_is_caught() -> None:
    phase = Phase(groups=(RankGroup(ranks=(0, 1), start=0, stop=4),), what=_Deaf())
    schedule = Schedule(algorithm="deaf", ranks=2, size=4, phases=(phase,), order="", fixed_order=True)
    with pytest.raises(ScheduleError, match="rank 0 and rank 1 do not list the same steps"):
        verify(schedule)
