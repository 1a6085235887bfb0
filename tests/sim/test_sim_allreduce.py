"""All-reduces replayed: closed forms on a flat platform, synchronisation counted by hand, golden times on a fat tree."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import pytest
from sim_rig import started

from bench_put import crossover_bytes, gather_schedule
from tatami.collective import AbstractPattern, Explicit, Phase, RankGroup, Role, Schedule, Step, Sync, Via, build, simulate
from tatami.errors import InputError, ScheduleError
from tatami.sim.allreduce import (
    NATIVES,
    AllReduceJob,
    Case,
    Fragment,
    Replayed,
    Software,
    WholeDoubling,
    expand,
    grids_of,
    replay,
)
from tatami.sim.platforms import RDMA, MachineGroup, Tree, Wire, preset
from tatami.sim.processes import Runs

ALPHA_S, BETA_BYTES_PER_S = 2e-5, 1e9
KIB = 1024


def flat(hosts: int, *, slow: int | None = None) -> Tree:
    """Every host on a cable of its own, both ways at full rate; host `slow` on one of a quarter."""
    wire = Wire(bandwidth_bytes_per_s=BETA_BYTES_PER_S, latency_s=ALPHA_S / 2, duplex=True)
    quarter = Wire(bandwidth_bytes_per_s=BETA_BYTES_PER_S / 4, latency_s=ALPHA_S / 2, duplex=True)
    if slow is None:
        return Tree(name="flat", groups=(MachineGroup(name="host{i}", count=hosts, link=wire),), fabric=RDMA)
    groups = tuple(MachineGroup(name=f"host{i}", count=1, link=quarter if i == slow else wire) for i in range(hosts))
    return Tree(name="flat", groups=groups, fabric=RDMA)


def job(schedule: Schedule, *, software: Software | None = None, slow: int | None = None, skip: bool = True) -> AllReduceJob:
    return AllReduceJob(platform=flat(schedule.ranks, slow=slow), schedule=schedule, software=software or Software(), skip=skip)


def replayed(schedule: Schedule, *, software: Software | None = None, slow: int | None = None, skip: bool = True) -> Replayed:
    return replay(job(schedule, software=software, slow=slow, skip=skip))


def put_of(size: int, *, sync: Sync, rounds: int = 1) -> Schedule:
    """Two ranks: rank 0 puts all into rank 1, in as many rounds as parts."""
    cut = size // rounds
    steps = tuple(
        (Step(source=0, target=1, start=index * cut, stop=(index + 1) * cut, reduce=False, via=Via.PUT),)
        for index in range(rounds)
    )
    what = Explicit(role=Role.ALL_GATHER, rounds=steps)
    phase = Phase(groups=(RankGroup(ranks=(0, 1), start=0, stop=size),), what=what, sync=sync)
    return Schedule(algorithm="put", ranks=2, size=size, phases=(phase,), order="none", fixed_order=True)


@dataclass(frozen=True, kw_only=True)
class OneEnd(AbstractPattern):
    """Each member waits for the other, which is not told to send."""

    @property
    def role(self) -> Role:
        return Role.ALL_REDUCE

    @property
    def title(self) -> str:
        return "one end only"

    def num_rounds(self, members: int) -> int:
        return members - 1

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:  # noqa: ARG002 - there is but one
        yield from group.transfer(source=1 - member, target=member, first=0, num_parts=2, reduce=True, via=Via.MESSAGE)


@pytest.mark.parametrize("ranks", [2, 3, 8, 13])
def test_the_ring_takes_its_closed_form(ranks: int) -> None:
    size = 10_000 * ranks
    found = replayed(build("ring", ranks=ranks, size=size))
    hops = 2 * (ranks - 1)
    assert found.total_s == pytest.approx(hops * (ALPHA_S + 4 * size / ranks / BETA_BYTES_PER_S), rel=1e-6)
    assert found.bytes_moved == hops * 4 * size
    assert found.phases[-1][1] == pytest.approx(found.total_s)
    assert found.phases[0][1] == pytest.approx(found.total_s / 2, rel=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "grid", "rounds"),
    [
        *(("halving_doubling", ranks, None, 2 * (ranks - 1).bit_length()) for ranks in (2, 4, 5, 12, 16)),
        *(("torus", 12, (m, n), 2 * (m - 1) + 2 * (n - 1)) for m, n in ((2, 6), (3, 4), (6, 2))),
    ],
)
def test_halving_doubling_and_the_torus_take_their_closed_forms(
    algorithm: str, ranks: int, grid: tuple[int, int] | None, rounds: int
) -> None:
    size = 10_000 * ranks
    found = replayed(build(algorithm, ranks=ranks, size=size, grid=grid))
    transfer_s = 2 * (ranks - 1) / ranks * 4 * size / BETA_BYTES_PER_S
    assert found.total_s == pytest.approx(rounds * ALPHA_S + transfer_s, rel=1e-6)


@pytest.mark.parametrize(
    ("sync", "empties", "rounds"),
    [
        (Sync.PSCW, 1, 1),  # the post
        (Sync.PSCW, 3, 3),
        (Sync.FENCE, 2, 1),  # the group meets before and after
        (Sync.FENCE, 4, 3),
        (Sync.LOCK, 3, 1),  # it meets once; then the flush and the notice
        (Sync.LOCK, 5, 3),  # the source needs no notice: it waits for its flush only
    ],
)
def test_what_synchronises_a_put_is_counted(sync: Sync, empties: int, rounds: int) -> None:
    size = 30_000
    found = replayed(put_of(size, sync=sync, rounds=rounds))
    expected_s = (rounds + empties) * ALPHA_S + 4 * size / BETA_BYTES_PER_S
    assert found.total_s == pytest.approx(expected_s, abs=1e-8)  # an empty message is a byte, of 1e-9 s


@pytest.mark.parametrize("schedule", [build("ring", ranks=12, size=120_000), build("torus", ranks=40, size=200, grid=(2, 20))])
@pytest.mark.parametrize("slow", [None, 4])
def test_leaving_out_rounds_that_repeat_themselves_changes_nothing(schedule: Schedule, slow: int | None) -> None:
    with_all = replayed(schedule, slow=slow, skip=False)
    without = replayed(schedule, slow=slow)
    assert without.total_s == pytest.approx(with_all.total_s, rel=1e-6)
    assert without.bytes_moved == with_all.bytes_moved
    assert [end_s for _, end_s in without.phases] == pytest.approx([end_s for _, end_s in with_all.phases], rel=1e-6)


def test_a_slow_cable_holds_a_ring_back_in_every_round() -> None:
    """Three ranks behind full cables wait for the fourth, behind a quarter, from the second round on."""
    found = replayed(build("ring", ranks=4, size=400_000), slow=2)
    assert found.total_s == pytest.approx(6 * (ALPHA_S + 4e5 / (BETA_BYTES_PER_S / 4)), rel=1e-6)


def test_the_software_of_ranks_takes_its_time() -> None:
    size = 80_000
    software = Software(message_s=1e-4, sum_bytes_per_s=2e9)
    found = replayed(build("ring", ranks=4, size=size), software=software)
    part_bytes = size
    expected_s = 6 * (ALPHA_S + part_bytes / BETA_BYTES_PER_S + 1e-4) + 3 * part_bytes / 2e9
    assert found.total_s == pytest.approx(expected_s, rel=1e-6)


def test_a_rank_begins_no_two_messages_within_its_gap() -> None:
    """A gap that is longer than a message takes its place, a shorter one does not show."""
    schedule = build("ring", ranks=4, size=80_000)
    message_s = ALPHA_S + 8e4 / BETA_BYTES_PER_S
    for gap_s, expected_s in ((message_s / 2, 6 * message_s), (3 * message_s, 5 * 3 * message_s + message_s)):
        for skip in (True, False):
            found = replayed(schedule, software=Software(gap_s=gap_s), skip=skip)
            assert found.total_s == pytest.approx(expected_s, rel=1e-6)


def test_long_messages_between_two_ranks_take_turns_in_part() -> None:
    """Halves of 2 and 4 MB each way, twice: in a pair one waits for the other, in a ring of four nobody does."""
    software = Software(pieces=(Fragment(size_bytes=1e6), Fragment(size_bytes=3e6, beyond_s=4e-4, stagger_s=2e-3)))
    for size_bytes, beyond_s, stagger_s in ((1e6, 0.0, 0.0), (2e6, 2e-4, 1e-3), (6e6, 8e-4, 4e-3)):
        one_s = ALPHA_S + size_bytes / BETA_BYTES_PER_S + beyond_s
        pair = replayed(build("halving_doubling", ranks=2, size=round(2 * size_bytes / 4)), software=software)
        assert pair.total_s == pytest.approx(2 * (one_s + stagger_s), rel=1e-6)
        ring = replayed(build("ring", ranks=4, size=round(4 * size_bytes / 4)), software=software)
        assert ring.total_s == pytest.approx(6 * one_s, rel=1e-6)


@pytest.mark.parametrize("native", sorted(NATIVES))
@pytest.mark.parametrize("size_bytes", [KIB, 64 * KIB, 1024 * KIB])
def test_natives_are_expanded_to_what_delivers(native: str, size_bytes: int) -> None:
    for ranks in (2, 6, 8):
        vectors = [np.arange(size_bytes // 4, dtype=np.int64) * (rank + 1) for rank in range(ranks)]
        for algorithm in ("native", "torus_native"):
            schedule = build(algorithm, ranks=ranks, size=size_bytes // 4, grid=(2, ranks // 2))
            expanded = expand(schedule, rule=NATIVES[native])
            assert all("native" not in phase.title for phase in expanded.phases)
            for vector in simulate(expanded, vectors):
                np.testing.assert_array_equal(vector, sum(vectors))


@pytest.mark.parametrize("ranks", range(2, 20))
def test_doubling_of_the_whole_delivers(ranks: int) -> None:
    phase = Phase(groups=(RankGroup(ranks=tuple(range(ranks)), start=0, stop=3),), what=WholeDoubling())
    schedule = Schedule(algorithm="whole", ranks=ranks, size=3, phases=(phase,), order="tree", fixed_order=True)
    for vector in simulate(schedule, [np.full(3, 2**rank) for rank in range(ranks)]):
        np.testing.assert_array_equal(vector, 2**ranks - 1)


def test_a_short_native_all_reduce_has_the_fewest_rounds() -> None:
    found = replayed(build("native", ranks=16, size=256))
    assert found.total_s == pytest.approx(4 * (ALPHA_S + 1024 / BETA_BYTES_PER_S), rel=1e-6)


def test_every_algorithm_can_be_replayed() -> None:
    """Also with fewer elements than ranks, and several ranks to a machine (loads and stores)."""
    for algorithm in ("torus_put", "torus_accumulate", "accumulate", "shared", "hierarchical", "torus_native"):
        for size in (3, 4096):
            hosts = None if algorithm == "shared" else [f"h{rank // 2}" for rank in range(6)]
            found = replayed(build(algorithm, ranks=6, size=size, hosts=hosts))
            assert found.total_s > ALPHA_S
            assert found.bytes_moved >= 4 * size


def test_put_and_all_gather_cross_where_the_library_takes_to_a_ring() -> None:
    """Below 512 KiB MPICH doubles as the puts do, without their posts; above, its ring has 15 latencies for the puts' 8."""
    sizes = [4 * KIB, 64 * KIB, 256 * KIB, 512 * KIB, 1024 * KIB, 4096 * KIB]
    ways = ("allgather", "put-pscw", "put-fence")
    cases = [(way, size) for way in ways for size in sizes]
    found = started().map(replay, [job(gather_schedule(way, ranks=16, size=size // 4)) for way, size in cases])
    seconds = {case: each.total_s for case, each in zip(cases, found, strict=True)}
    assert crossover_bytes(seconds, way="put-pscw") == 512 * KIB
    assert crossover_bytes(seconds, way="put-fence") is None  # five fences of four rounds each
    assert seconds["allgather", 4 * KIB] == pytest.approx(4 * ALPHA_S + 15 / 16 * 4 * KIB / BETA_BYTES_PER_S, rel=1e-6)
    assert seconds["put-pscw", 4 * KIB] == pytest.approx(8 * ALPHA_S + 15 / 16 * 4 * KIB / BETA_BYTES_PER_S, abs=1e-8)


@pytest.mark.parametrize(
    ("case", "golden_s"),
    [
        (Case(algorithm="native", ranks=64, size_bytes=1_024_000), 0.00029216),
        (Case(algorithm="torus", ranks=48, size_bytes=960_000, grid=(2, 24)), 0.0001974),
        (Case(algorithm="torus_put", ranks=48, size_bytes=960_000, grid=(4, 12), sync=Sync.FENCE), 0.00017790048),
        (Case(algorithm="accumulate", ranks=32, size_bytes=320_000), 6.435098398169333e-05),
    ],
)
def test_golden_times_on_the_fat_tree(case: Case, golden_s: float) -> None:
    found = replay(case.job(preset("oakforest-like", nodes=case.ranks)))
    assert found.total_s == pytest.approx(golden_s, rel=1e-9)


def test_the_same_again_on_one_core_or_two() -> None:
    platform = preset("oakforest-like", nodes=12)
    jobs = [Case(algorithm="torus_put", ranks=12, size_bytes=48_000, grid=grid).job(platform) for grid in grids_of(12)]
    two = started().map(replay, jobs)
    with Runs(cores=1) as own:
        assert own.map(replay, jobs) == two
    assert started().map(replay, jobs) == two


def test_grids_of_processes() -> None:
    assert grids_of(16) == ((2, 8), (4, 4), (8, 2))
    assert grids_of(7) == ()


def test_bad_input() -> None:
    with pytest.raises(ScheduleError, match="for 8 ranks, but flat has 4 hosts"):
        AllReduceJob(platform=flat(4), schedule=build("ring", ranks=8, size=8))
    with pytest.raises(InputError, match=r"no rule 'openmpi'.*mpich, optimal, ring, whole"):
        AllReduceJob(platform=flat(4), schedule=build("ring", ranks=4, size=8), native="openmpi")
    with pytest.raises(InputError, match="whole number of elements of 4 bytes, not of 6 bytes"):
        Case(algorithm="ring", ranks=2, size_bytes=6)
    with pytest.raises(InputError, match="message_s of the software must be a finite number of seconds >= 0, not -1"):
        Software(message_s=-1.0)
    with pytest.raises(InputError, match=r"sum_bytes_per_s of the software must be > 0, not 0"):
        Software(sum_bytes_per_s=0.0)
    with pytest.raises(InputError, match=r"of rising sizes, not of \[2, 1\]"):
        Software(pieces=(Fragment(size_bytes=2), Fragment(size_bytes=1)))
    with pytest.raises(InputError, match=r"more than 0 bytes, not 0"):
        Fragment(size_bytes=0)
    with pytest.raises(InputError, match="no way 'pull' to gather"):
        gather_schedule("pull", ranks=2, size=8)
    with pytest.raises(ScheduleError, match="what fits: 1x8, 2x4, 4x2, 8x1"):
        Case(algorithm="torus", ranks=8, size_bytes=8, grid=(3, 3)).job(flat(8))


def test_a_schedule_that_never_ends_is_reported() -> None:
    """Rank 1 waits for what rank 0 is not told to send: the two ends of a step are not the same schedule's."""
    phase = Phase(groups=(RankGroup(ranks=(0, 1), start=0, stop=4),), what=OneEnd())
    broken = Schedule(algorithm="broken", ranks=2, size=4, phases=(phase,), order="none", fixed_order=True)
    with pytest.raises(ScheduleError, match="broken: rank 0 and 1 others never ended"):
        replayed(broken)
