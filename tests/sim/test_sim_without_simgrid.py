"""What the rehearsal decides by itself, on a stage that is a clock and a list."""

import heapq
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster
from tatami.collective import ALGORITHMS, Sync, build
from tatami.server import SSP, Checkpoint, FromServers
from tatami.sim.allreduce import Fragment, Software
from tatami.sim.allreduce.replay import Meeting, part_of
from tatami.sim.allreduce.settling import Settling
from tatami.sim.elastic import LossySetup, MachineEvents
from tatami.sim.platforms import FatTree, MachineGroup, Tree, Wire
from tatami.sim.server import Checkpoints, ServerSetup
from tatami.sim.server.lifetimes import Fates, life_s
from tatami.sim.server.result import Period
from tatami.sim.server.simulate import rounds_of_period
from tatami.sim.server.stage_actions import SimulatedStorage, Skipping
from tatami.sim.stage import Going, Stage
from tatami.sim.tiling import Floor, work_of
from tatami.tiling import plan, traffic_of
from tatami.workload import Workload, net_workload

HOP_S = 1.0
WORK_S = 8.0
PERIOD = Period(rounds=2, duration_s=20.0, bytes_moved=0.0)
WIRE = Wire(bandwidth_bytes_per_s=1e9, latency_s=1e-6)


class BareStage:
    """A clock and what is to happen; every transfer takes `HOP_S`."""

    send_all, soon = Stage.send_all, Stage.soon

    def __init__(self, num_hosts: int = 8) -> None:
        self.now_s = 0.0
        self.speeds_flop_per_s = [1.0] * num_hosts
        self.sent: list[tuple[int, int]] = []
        self._due: list[tuple[float, int, Going]] = []
        self._numbers = count()

    def at(self, at_s: float, then: Callable[[], None]) -> Going:
        going = Going(number=next(self._numbers), then=then)
        heapq.heappush(self._due, (at_s, going.number, going))
        return going

    def after(self, delay_s: float, then: Callable[[], None]) -> Going:
        return self.at(self.now_s + delay_s, then)

    def send(self, source: int, target: int, *, size_bytes: float, then: Callable[[], None]) -> Going:
        assert size_bytes > 0
        self.sent.append((source, target))
        return self.after(HOP_S, then)

    def cancel(self, going: Going) -> None:
        going.ended = True

    def go_to(self, at_s: float) -> None:
        while self._due and self._due[0][0] <= at_s:
            self.now_s, _, going = heapq.heappop(self._due)
            if not going.ended:
                going.ended = True
                going.then()
        self.now_s = at_s


def setup(**changes: Any) -> ServerSetup:
    star = Tree(name="star", groups=(MachineGroup(name="m", count=8, link=WIRE),))
    fields: dict[str, Any] = {"platform": star, "workers": (0, 1, 2), "servers": (6, 7), "task_flop": WORK_S, "mtbf_s": None}
    return ServerSetup(**fields | changes)


def fates(what: ServerSetup, stage: Any, *, seed: int | None = 0, told: list[tuple[object, ...]] | None = None) -> Fates:
    heard = [] if told is None else told
    return Fates(
        what,
        stage,
        seed=seed,
        period=PERIOD,
        strike=lambda kind, number: heard.append((kind, number, stage.now_s)),
        cut=lambda worker: heard.append(("cut", worker, stage.now_s)),
        mend=lambda worker: heard.append(("mend", worker, stage.now_s)),
    )


@pytest.mark.parametrize(("now_s", "rounds"), [(0.0, 4), (12.0, 3), (45.0, 0), (50.0, 99)])
def test_rounds_before_a_death_are_undisturbed(now_s: float, rounds: int) -> None:
    what = setup(deaths=((50.0, 1),))
    assert fates(what, BareStage()).undisturbed_rounds(PERIOD, now_s=now_s, most=99) == rounds
    assert fates(what, BareStage(), seed=None).undisturbed_rounds(PERIOD, now_s=now_s, most=99) == 99


def test_a_life_that_counts_while_computing_lasts_as_many_rounds_as_one_that_counts_always() -> None:
    what = setup(mtbf_s=4e4, strikes="computing")
    found = fates(what, BareStage())
    for worker in range(3):
        found.takes(worker, worker)
        found.takes(worker, worker)  # the same process: the same life
    first_s = min(life_s(4e4, seed=0, kind="worker", number=worker, generation=0) for worker in range(3))
    rounds = math.ceil(first_s / PERIOD.round_s) - 1
    assert rounds > 2
    assert found.undisturbed_rounds(PERIOD, now_s=0.0, most=10**6) == rounds
    found.pass_rounds(2)
    assert found.undisturbed_rounds(PERIOD, now_s=0.0, most=10**6) == rounds - 2


def test_who_takes_a_place_has_another_life_and_what_breaks_off_has_computed_so_long() -> None:
    told: list[tuple[object, ...]] = []
    stage = BareStage()
    found = fates(setup(mtbf_s=400.0, strikes="computing"), stage, told=told)
    found.takes(0, 0)
    found.takes(0, 7)
    lasts_s = life_s(400.0, seed=0, kind="worker", number=0, generation=1) * WORK_S / PERIOD.round_s
    found.computes(0, lasts_s + 1)
    stage.go_to(2.0)
    found.breaks_off(0)
    stage.go_to(lasts_s + 5)
    assert told == []
    found.computes(0, lasts_s)
    stage.go_to(10 * lasts_s)
    assert told == [("worker", 0, pytest.approx(lasts_s + 5 + lasts_s - 2))]


def test_a_link_breaks_is_mended_and_breaks_again_until_the_run_ends() -> None:
    told: list[tuple[Any, ...]] = []
    stage = BareStage()
    found = fates(setup(workers=(0,), link_mtbf_s=100.0, link_repair_s=7.0), stage, told=told)
    first_s, second_s = (life_s(100.0, seed=0, kind="link", number=0, generation=generation) for generation in (0, 1))
    disturbed = []
    for at_s in (first_s, first_s + 7.0, first_s + 7.0 + second_s):
        stage.go_to(at_s)
        disturbed.append(found.disturbed)
    assert disturbed == [True, False, True]
    assert [(what, worker) for what, worker, _ in told] == [("cut", 0), ("mend", 0), ("cut", 0)]
    assert [at_s for *_, at_s in told] == pytest.approx([first_s, first_s + 7.0, first_s + 7.0 + second_s])
    found.end()
    stage.go_to(1e9)
    assert [what for what, *_ in told][3:] == ["mend"]  # and it breaks no more


def test_whole_periods_are_passed_over_where_rounds_are_alike() -> None:
    calm = fates(setup(), BareStage())

    def passed(**changes: Any) -> int:
        return Skipping(setup(**changes), period=PERIOD).rounds(calm, left=9, now_s=0.0)

    assert passed() == 8
    assert passed(consistency=SSP(staleness=1)) == 0
    assert passed(checkpoints=Checkpoints(size_bytes=25e9)) == 0  # still being written when the next is due
    assert passed(checkpoints=Checkpoints(size_bytes=25e9, waits=True)) == 8
    assert passed(checkpoints=Checkpoints(store=(5,))) == 0
    assert Skipping(setup(), period=None).rounds(calm, left=9, now_s=0.0) == 0
    assert rounds_of_period(setup(recovery=FromServers())) == 1
    assert rounds_of_period(setup(recovery=Checkpoint(every=3))) == 3


def test_an_exchange_is_simulated_with_all_servers_where_that_is_few_transfers() -> None:
    big = Tree(name="star", groups=(MachineGroup(name="m", count=2002, link=WIRE),))
    assert setup().servers_of_one == 2
    for workers, spread, servers in ((1000, None, 2), (1001, None, 1), (1001, 2, 2)):
        many = setup(platform=big, workers=tuple(range(workers)), servers=(2000, 2001), spread=spread)
        assert many.servers_of_one == servers


def test_one_checkpoint_is_written_at_a_time_and_read_when_it_is_written() -> None:
    log: list[tuple[str, float]] = []
    stage: Any = BareStage()

    def noted(what: str) -> Callable[[], None]:
        return lambda: log.append((what, stage.now_s))

    storage = SimulatedStorage(setup(), stage)  # 8 GB at 1 GB/s, in the background
    storage.write([0, 1], then=noted("first"))
    storage.write([0, 1], then=noted("second"))
    storage.read([0, 1], then=noted("read"))
    stage.go_to(100.0)
    assert log == [("first", 0.0), ("second", 8.0), ("read", 24.0)]
    SimulatedStorage(setup(checkpoints=Checkpoints(waits=True)), stage).write([0], then=noted("waited"))
    stage.go_to(200.0)
    assert log[-1] == ("waited", 108.0)


def test_a_store_that_all_share_is_written_to_in_turn() -> None:
    stage: Any = BareStage()
    storage = SimulatedStorage(setup(checkpoints=Checkpoints(store=(4, 5), waits=True)), stage)
    done: list[float] = []
    storage.write([0, 1, 2], then=lambda: done.append(stage.now_s))
    stage.go_to(10.0)
    storage.read([0, 1], then=lambda: done.append(stage.now_s))
    stage.go_to(20.0)
    assert stage.sent == [(0, 4), (1, 5), (2, 4), (4, 0), (5, 1)]
    assert done == [HOP_S, 10.0 + HOP_S]


def test_dead_machines_do_not_die_and_come_back_under_another_name() -> None:
    lossy = LossySetup(
        cluster=Cluster.from_speeds([1.0, 1.0]),
        workload=Workload.mlp(8, 8, 8, samples=8),
        iterations=1,
        deaths=((10.0, 0), (12.0, 0), (20.0, 0)),
        back_s=5.0,
    )
    events = MachineEvents(lossy, seed=0)
    found = []
    while events.next_s < math.inf:
        event = events.take()
        found.append((event.at_s, event.dies, event.processor.name))
    assert found == [(10.0, True, "p0"), (15.0, False, "p0+1"), (20.0, True, "p0+1"), (25.0, False, "p0+2")]
    drawn = [MachineEvents(replace(lossy, mtbf_s=50.0, deaths=()), seed=seed).next_s for seed in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 8])
def test_a_barrier_ends_for_all_so_many_hops_after_the_last_has_come(ranks: int) -> None:
    stage: Any = BareStage()
    meeting = Meeting(stage, range(ranks))
    done: dict[int, float] = {}

    def enter(member: int) -> None:
        meeting.enter(member, lambda: done.__setitem__(member, stage.now_s))

    for member in range(ranks):
        stage.at(10.0 if member == ranks - 1 else 0.0, partial(enter, member))
    stage.go_to(100.0)
    assert sorted(done) == list(range(ranks))
    assert min(done.values()) >= 10.0
    assert max(done.values()) == 10.0 + HOP_S * math.ceil(math.log2(ranks))
    assert len(stage.sent) == ranks * math.ceil(math.log2(ranks))


@pytest.mark.parametrize(("late_s", "period_s"), [(0.0, 2.0), (0.5, None)])
def test_rounds_have_settled_when_all_ranks_take_as_long_twice(late_s: float, period_s: float | None) -> None:
    settling = Settling(ranks=2, rounds=7)
    for round_ in range(3):
        for rank, lead_s in enumerate((0.0, 0.25)):
            late = late_s if rank and round_ == 2 else 0.0
            assert settling.note(rank, round_, 2.0 * (round_ + 1) + lead_s + late) is (round_ == 2)
            assert settling.complete(round_) is (rank == 1)
    assert settling.period_s(2) == (None if period_s is None else pytest.approx(period_s))
    assert settling.ends(2)[0] == 6.0
    assert not settling.note(0, 6, 14.0)  # after the last round no rank has to wait


@given(st.sampled_from(sorted(set(ALGORITHMS) - {"native", "torus_native", "shared"})), st.integers(2, 9), st.integers(1, 40))
def test_what_is_sent_is_received_in_every_round(algorithm: str, ranks: int, size: int) -> None:
    grid = (ranks, 1) if algorithm.startswith("torus") else None
    for phase in build(algorithm, ranks=ranks, size=size, grid=grid, sync=Sync.PSCW).phases:
        for number in range(phase.num_rounds):
            parts = [part_of(phase, rank=rank, round=number, element_bytes=4) for rank in range(ranks)]
            for rank, part in enumerate(parts):
                assert part.sends == {peer: other.receives[rank] for peer, other in enumerate(parts) if rank in other.receives}
                assert part.sum_bytes <= sum(part.receives.values())
                assert part.empty == (not (part.sends or part.receives or part.local))


def test_what_messages_take_longer_is_interpolated_and_grows_beyond_the_last_that_was_measured() -> None:
    software = Software(pieces=(Fragment(size_bytes=100, beyond_s=1.0, stagger_s=3.0), Fragment(size_bytes=300, beyond_s=2.0)))
    assert [software.beyond_s(size) for size in (0, 50, 100, 200, 300, 600)] == [0.0, 0.5, 1.0, 1.5, 2.0, 4.0]
    assert [software.stagger_s(size) for size in (50, 200, 600)] == [1.5, 1.5, 0.0]
    assert software.without_stagger().stagger_s(100) == 0.0
    assert Software().beyond_s(1e6) == 0.0


@pytest.mark.parametrize(("nodes", "per_switch", "switches"), [(1, 1, 1), (24, 24, 1), (25, 24, 2), (50, 24, 3)])
def test_a_fat_tree_has_as_many_cables_up_as_ports_down(nodes: int, per_switch: int, switches: int) -> None:
    tree = FatTree(name="t", nodes=nodes, link=WIRE)
    assert (tree.per_switch, tree.switches, len(tree.hosts)) == (per_switch, switches, nodes)
    counts = {part.what.strip(): part.count for part in tree.parts}
    assert counts["cable to a leaf switch"] == nodes
    assert counts["cable to a core switch"] == per_switch * switches
    assert counts["core switch"] == per_switch


@pytest.mark.parametrize("micro_batches", [1, 3])
@pytest.mark.parametrize(("speeds", "layout"), [([1.0], "even"), ([1.0, 1.0], "grid"), ([1.0, 2.0, 3.0], "srpm")])
def test_legs_are_all_of_the_work_and_only_sums_part_them(speeds: list[float], layout: str, micro_batches: int) -> None:
    workload = net_workload("8-16-8-16-4", samples=32)
    cluster = Cluster.from_speeds(speeds)
    laid = plan(layout, cluster=cluster, workload=workload).layout.in_micro_batches(micro_batches)
    tilings, floor = laid.cut_blocks(workload), Floor(laid, workload=workload, cluster=cluster)
    once = traffic_of(tilings, workload=workload, names=list(floor.names.values()), hosts=cluster.host_of)
    for own, planned in zip(floor.traffic.replicas, once.replicas, strict=True):
        assert len(own) == micro_batches * len(planned)
        assert sum(each.schedule.size for each in own) == sum(each.schedule.size for each in planned)
    for rank, legs in floor.legs.items():
        for one, after in pairwise(legs):
            assert one.sums or one.leaves or one.backward != after.backward
        name = floor.names[rank]
        replica = next(each for each in tilings[0].replicas if name in [tile.processor for tile in each])
        work = work_of([each.by_processor[name] for each in tilings], samples=replica[0].samples.size, workload=workload)
        assert sum(leg.flop for leg in legs if not leg.backward) == pytest.approx(work.forward_flop)
        assert sum(leg.flop for leg in legs if leg.backward) == pytest.approx(work.backward_flop)
    if len(speeds) == 1:
        assert [leg.backward for leg in floor.legs[0]] == [False, True] * micro_batches
