"""What each algorithm's steps are, where its sums begin, and what its builder refuses."""

import pickle
import sys
from collections.abc import Sequence
from itertools import islice

import numpy as np
import pytest

from tatami.collective import (
    ALGORITHMS,
    Role,
    Schedule,
    Sync,
    Via,
    accumulate,
    build,
    choose_grid,
    halving_doubling,
    hierarchical,
    native,
    ring,
    shared,
    simulate,
    torus,
    torus_put,
    verify,
)
from tatami.errors import ScheduleError


def _moves(schedule: Schedule, phase: int, round_: int) -> list[tuple[int, int, int, int]]:
    """(source, target, start, stop), sorted."""
    return sorted((s.source, s.target, s.start, s.stop) for s in schedule.phases[phase].steps(round_))


def test_a_ring_of_three() -> None:
    schedule = ring(3, 7)
    scatter, gather = schedule.phases
    assert (scatter.role, gather.role) == (Role.REDUCE_SCATTER, Role.ALL_GATHER)
    assert (scatter.num_rounds, gather.num_rounds) == (2, 2)
    # parts: 0..2, 2..4, 4..7
    assert _moves(schedule, 0, 0) == [(0, 1, 4, 7), (1, 2, 0, 2), (2, 0, 2, 4)]
    assert _moves(schedule, 0, 1) == [(0, 1, 2, 4), (1, 2, 4, 7), (2, 0, 0, 2)]
    assert _moves(schedule, 1, 0) == [(0, 1, 0, 2), (1, 2, 2, 4), (2, 0, 4, 7)]
    assert [(s.source, s.target) for s in scatter.steps_of(0, round=0)] == [(0, 1), (2, 0)]
    assert schedule.scratch_size(0) == 2
    assert schedule.scratch_size(1) == 3


def test_halving_pairs_powers_of_two_by_xor() -> None:
    schedule = halving_doubling(4, 8)
    assert _moves(schedule, 0, 0) == [(0, 2, 4, 8), (1, 3, 4, 8), (2, 0, 0, 4), (3, 1, 0, 4)]
    assert _moves(schedule, 0, 1) == [(0, 1, 2, 4), (1, 0, 0, 2), (2, 3, 6, 8), (3, 2, 4, 6)]
    assert _moves(schedule, 1, 0) == [(0, 1, 0, 2), (1, 0, 2, 4), (2, 3, 4, 6), (3, 2, 6, 8)]
    assert _moves(schedule, 1, 1) == [(0, 2, 0, 4), (1, 3, 0, 4), (2, 0, 4, 8), (3, 1, 4, 8)]


@pytest.mark.parametrize("ranks", range(2, 18))
def test_halving_is_optimal_for_any_number_of_ranks(ranks: int) -> None:
    schedule = halving_doubling(ranks, 5 * ranks)
    for phase in schedule.phases:
        assert phase.num_rounds == int(np.ceil(np.log2(ranks)))
        for rank in range(ranks):
            steps = [step for round_ in range(phase.num_rounds) for step in phase.steps_of(rank, round=round_)]
            assert sum(step.size for step in steps if step.source == rank) == 5 * (ranks - 1)
            assert sum(step.size for step in steps if step.target == rank) == 5 * (ranks - 1)
            for round_ in range(phase.num_rounds):
                assert len({s.target for s in phase.steps_of(rank, round=round_) if s.source == rank}) == 1


def test_the_torus_steps_fall_as_published() -> None:
    schedule = torus(12, 24, grid=(3, 4))
    assert [(p.role.value, p.num_rounds, len(p.groups), p.groups[0].members) for p in schedule.phases] == [
        ("reduce-scatter", 2, 4, 3),
        ("reduce-scatter", 3, 3, 4),
        ("all-gather", 3, 3, 4),
        ("all-gather", 2, 4, 3),
    ]
    assert schedule.phases[0].groups[1].ranks == (3, 4, 5)
    column = schedule.phases[1].groups[1]
    assert (column.ranks, column.start, column.stop) == ((1, 4, 7, 10), 8, 16)
    assert schedule.average_at(4) == (3, ((8, 16),))


def test_a_torus_of_natives() -> None:
    schedule = build("torus_native", ranks=6, size=9, grid=(2, 3))
    assert [phase.title for phase in schedule.phases] == [
        "native reduce-scatter, 3 groups of 2",
        "native all-reduce, 2 groups of 3",
        "native all-gather, 3 groups of 2",
    ]
    assert all(phase.num_rounds == 0 for phase in schedule.phases)
    assert not schedule.fixed_order


@pytest.mark.parametrize(("row", "rounds"), [(2, 1), (3, 2), (4, 2), (5, 3), (8, 3)])
def test_put_doubles_at_the_final_address(row: int, rounds: int) -> None:
    schedule = torus_put(2 * row, 4 * row, grid=(row, 2), sync=Sync.FENCE)
    last = schedule.phases[-1]
    assert (last.num_rounds, last.sync, schedule.one_sided, schedule.shared) == (rounds, Sync.FENCE, True, False)
    written: set[tuple[int, int]] = set()
    for round_ in range(rounds):
        for step in last.steps(round_):
            assert (step.via, step.reduce, step.issuer) == (Via.PUT, False, step.source)
            places = {(step.target, element) for element in range(step.start, step.stop)}
            assert not places & written  # nothing is put twice
            written |= places


def test_accumulate_is_one_epoch_or_one_for_each_peer() -> None:
    free, ordered = accumulate(4, 8), accumulate(4, 8, fixed_order=True)
    assert (free.phases[0].num_rounds, ordered.phases[0].num_rounds) == (1, 3)
    assert (free.fixed_order, ordered.fixed_order) == (False, True)
    assert all((step.via, step.reduce) == (Via.PUT, True) for step in free.phases[0].steps(0))
    assert len(list(free.phases[0].steps(0))) == 12
    with pytest.raises(ScheduleError, match=r"fixed order under sync='lock'.*'pscw' or 'fence'"):
        accumulate(4, 8, fixed_order=True, sync=Sync.LOCK)


def test_shared_touches_each_part_by_one_rank() -> None:
    schedule = shared(3, 7, hosts=["h"] * 3)
    (phase,) = schedule.phases
    assert (phase.sync, phase.num_rounds, schedule.shared, schedule.one_sided) == (Sync.BARRIER, 1, True, False)
    own = [step for step in phase.steps_of(1, round=0) if step.issuer == 1]
    assert [(s.source, s.target, s.start, s.stop, s.reduce, s.via) for s in own] == [
        (2, 1, 2, 4, True, Via.LOAD),
        (0, 1, 2, 4, True, Via.LOAD),
        (1, 2, 2, 4, False, Via.STORE),
        (1, 0, 2, 4, False, Via.STORE),
    ]
    assert schedule.average_at(0) == (1, ((0, 7),))


def test_hosts_of_unequal_ranks_meet_at_the_union_of_their_cuts() -> None:
    hosts = ("a", "b", "a", "b", "a", "c")
    schedule = hierarchical(6, 12, hosts=hosts, across=native)
    verify(schedule, hosts=hosts)
    scatter, middle, gather = schedule.phases
    assert [group.ranks for group in scatter.groups] == [(0, 2, 4), (1, 3)]  # c has one rank: nothing to do
    assert [(g.ranks, g.start, g.stop) for g in middle.groups] == [
        ((0, 1, 5), 0, 4),
        ((2, 1, 5), 4, 6),
        ((2, 3, 5), 6, 8),
        ((4, 3, 5), 8, 12),
    ]
    assert middle.groups_of(2) == middle.groups[1:3]
    assert schedule.average_at(5) == (2, ((0, 12),))
    assert schedule.average_at(1) == (2, ((0, 6),))
    assert gather.groups == scatter.groups


@pytest.mark.parametrize("algorithm", ["ring", "halving_doubling", "torus", "shared", "hierarchical", "accumulate"])
def test_few_elements_and_few_ranks(algorithm: str) -> None:
    assert build(algorithm, ranks=1, size=5).phases == ()
    assert build(algorithm, ranks=4, size=0).phases == ()
    few = build(algorithm, ranks=4, size=2)
    assert all(step.size > 0 for phase in few.phases for round_ in range(phase.num_rounds) for step in phase.steps(round_))


# -- the order of the sum ---------------------------------------------------------------------------------------------


def _bits(schedule: Schedule, vectors: Sequence[np.ndarray[tuple[int], np.dtype[np.float64]]]) -> list[float]:
    outs = simulate(schedule, list(vectors))
    for out in outs[1:]:
        np.testing.assert_array_equal(out, outs[0])  # the same bits on every rank
    return [float(value) for value in outs[0]]


@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_sums_are_taken_in_the_stated_order(ranks: int) -> None:
    vectors = [np.random.default_rng(rank).normal(size=ranks) * 10.0 ** (rank % 5) for rank in range(ranks)]

    def around(part: int, first: int) -> float:
        total = float(vectors[first % ranks][part])
        for later in range(first + 1, first + ranks):
            total += float(vectors[later % ranks][part])
        return total

    assert _bits(ring(ranks, ranks), vectors) == [around(part, part + 1) for part in range(ranks)]
    from_own = [around(part, part) for part in range(ranks)]
    assert _bits(shared(ranks, ranks), vectors) == from_own
    assert _bits(accumulate(ranks, ranks, fixed_order=True), vectors) == from_own


def test_a_fixed_order_is_given_or_refused() -> None:
    for algorithm in ("ring", "halving_doubling", "torus", "torus_put", "torus_accumulate", "accumulate", "hierarchical"):
        assert build(algorithm, ranks=6, size=12, fixed_order=True).fixed_order
    assert build("shared", ranks=6, size=12, fixed_order=True).order.startswith("part j of k: rank j first")
    with pytest.raises(ScheduleError, match=r"native does not sum in a fixed order .* these can: ring, halving_doubling"):
        build("native", ranks=2, size=4, fixed_order=True)
    with pytest.raises(ScheduleError, match="torus does not sum in a fixed order"):
        build("torus", ranks=4, size=4, grid=(2, 2), across="native", fixed_order=True)
    assert build("native", ranks=1, size=4, fixed_order=True).phases == ()


# -- refusals and choices ---------------------------------------------------------------------------------------------


def test_an_unknown_name_lists_the_choices() -> None:
    with pytest.raises(ScheduleError, match=r"there is no all-reduce 'rnig'; choose one of: native, ring, .*hierarchical"):
        build("rnig", ranks=2, size=4)
    with pytest.raises(ScheduleError, match="no all-reduce for across 'star'; choose one of"):
        build("ring", ranks=2, size=4, across="star")


def test_a_grid_that_does_not_fit_is_refused() -> None:
    for algorithm in ("torus", "torus_native", "torus_put", "torus_accumulate"):
        with pytest.raises(ScheduleError, match=r"4 x 2 has 8 places, but there are 6 ranks; what fits: 1x6, 2x3, 3x2, 6x1"):
            build(algorithm, ranks=6, size=4, grid=(4, 2))
    with pytest.raises(ScheduleError, match="-2 x -3"):
        torus(6, 4, grid=(-2, -3))


def test_what_cannot_be_built_is_refused() -> None:
    for algorithm in ALGORITHMS:
        with pytest.raises(ScheduleError, match="at least one rank"):
            build(algorithm, ranks=0, size=4)
        with pytest.raises(ScheduleError, match="0 or more elements, not -1"):
            build(algorithm, ranks=4, size=-1)
    with pytest.raises(ScheduleError, match="shared needs all ranks on one host, and these are on 2: a, b; use hierarchical"):
        build("shared", ranks=2, size=4, hosts=["a", "b"])
    with pytest.raises(ScheduleError, match="shared needs all ranks on one host"):
        build("hierarchical", ranks=4, size=4, hosts=["a", "a", "b", "b"], across="shared")
    with pytest.raises(ScheduleError, match="3 hosts are named for 2 ranks"):
        build("ring", ranks=2, size=4, hosts=["a"] * 3)
    with pytest.raises(ScheduleError, match="2 hosts are named for 3 ranks"):
        hierarchical(3, 4, hosts=["a", "b"])
    with pytest.raises(ScheduleError, match="sync='barrier' does not synchronise; choose one of 'fence', 'pscw', 'lock'"):
        build("torus_put", ranks=4, size=4, sync=Sync.BARRIER)


@pytest.mark.parametrize(
    ("hosts", "grid"),
    [
        ("aabbcc", (2, 3)),
        ("aaaabbbb", (4, 2)),
        ("aaaaaa", (6, 1)),
        ("aaaabb", (2, 3)),  # hosts of 4 and 2: the longest common row
        ("aaabb", (1, 5)),
        ("abab", (1, 4)),  # placed in turn: no row lies inside a host
        ("abcdef", (2, 3)),  # one rank each: M = 2 as published
        ("abcdefghi", (3, 3)),
        ("abcde", (1, 5)),
        ("ab", (1, 2)),
        ("a", (1, 1)),
    ],
)
def test_the_grid_follows_the_hosts(hosts: str, grid: tuple[int, int]) -> None:
    assert choose_grid(hosts) == grid
    if hosts:
        verify(build("torus", ranks=len(hosts), size=20, hosts=list(hosts)))


def test_a_grid_of_no_ranks_is_refused() -> None:
    with pytest.raises(ScheduleError, match="hosts is empty"):
        choose_grid([])


# -- size -------------------------------------------------------------------------------------------------------------


def test_ten_thousand_ranks_and_a_gigabyte_cost_no_memory() -> None:
    hosts = [f"h{rank // 8}" for rank in range(10_000)]
    for algorithm in set(ALGORITHMS) - {"shared"}:
        schedule = build(algorithm, ranks=10_000, size=10**9, hosts=hosts)
        assert len(pickle.dumps(schedule)) < 500_000
        for phase in schedule.phases:
            if phase.num_rounds:
                assert sum(1 for _ in islice(phase.steps(0), 5)) > 0
    ring_of_all = build("ring", ranks=10_000, size=10**9)
    assert ring_of_all.phases[0].num_rounds == 9_999
    assert [step.size for step in ring_of_all.phases[0].steps_of(7, round=5000)] == [100_000, 100_000]
    assert sys.getsizeof(ring_of_all.phases[0]) < 1000


def test_schedules_are_data() -> None:
    one, other = (build("hierarchical", ranks=6, size=100, hosts=list("aaabbb")) for _ in range(2))
    assert one == other
    assert pickle.loads(pickle.dumps(one)) == one
    assert one.explicit() != one
    assert one.explicit().phases[0].title == one.phases[0].title


def test_simulate_refuses_vectors_that_do_not_fit() -> None:
    with pytest.raises(ScheduleError, match="ring is for 2 ranks, and 1 vectors were given"):
        simulate(ring(2, 3), [np.zeros(3)])
    with pytest.raises(ScheduleError, match=r"over 3 elements, rank 1's vector is \(4,\)"):
        simulate(ring(2, 3), [np.zeros(3), np.zeros(4)])


def test_simulate_leaves_its_input_alone_and_passes_nan_through() -> None:
    vectors = [np.array([1.0, np.nan]), np.array([2.0, 3.0])]
    outs = simulate(native(2, 2), vectors)
    assert vectors[0][0] == 1.0
    for out in outs:
        assert out[0] == 3.0
        assert np.isnan(out[1])


# -- every algorithm on every small world -------------------------------------------------------------------------------


@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 16])
def test_every_algorithm_on_every_grid_is_proved(algorithm: str, ranks: int) -> None:
    hosts = ["h"] * ranks if algorithm == "shared" else [f"h{rank % 3 if rank < 7 else 3}" for rank in range(ranks)]
    grids = [(m, ranks // m) for m in range(1, ranks + 1) if ranks % m == 0] if "torus" in algorithm else [None]
    for grid in grids:
        for size in (0, 1, ranks + 1, 37):
            for across in ("ring", "halving_doubling"):
                schedule = build(algorithm, ranks=ranks, size=size, hosts=hosts, grid=grid, across=across)
                assert (schedule.algorithm, schedule.size) == (algorithm, size)
                verify(schedule, hosts=hosts)
