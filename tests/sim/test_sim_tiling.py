"""Tilings replayed: closed forms, speeds that change, and the controller's decisions, which are those of a run in threads."""

from dataclasses import replace

import pytest
import torch
from sim_rig import started
from torch import nn

from hand_clock import HandClock
from rehearsal.fitting_tiles import TimedTile, calibrate
from tatami.cluster import Cluster, Link, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, PlanError
from tatami.retiling import Decision, DecisionKind, Retiler
from tatami.sim.allreduce import Software
from tatami.sim.platforms import ClusterPlatform
from tatami.sim.processes import Runs
from tatami.sim.tiling import Change, Startup, TilingJob, TilingRun, rehearse, work_of
from tatami.sim.tiling.changes import Speeds
from tatami.testing.worlds import World
from tatami.tiling import AlphaBetaCost, Layout, Replica, plan
from tatami.train import IterationPhase, TiledModel, Trainer, tile
from tatami.workload import Block, Recomputation, RecomputedLayer, Workload, linear_pair, net_workload

NETTALK = Workload.mlp(203, 80, 26, samples=1024)
LINK = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4)
MFLOP = 1e6


def cluster_of(speeds: list[float]) -> Cluster:
    """A machine for each, on one network."""
    processors = tuple(Processor(name=f"p{i}", speed=speed, host=f"h{i}") for i, speed in enumerate(speeds))
    return Cluster(processors=processors, local=Link(bandwidth_bytes_per_s=1e12, latency_s=0.0), network=LINK)


def grid(replicas: int, rows: int) -> Layout:
    """Equal tiles, p0, p1, ... down the replicas."""
    return Layout(
        replicas=tuple(
            Replica(
                width=1 / replicas,
                processors=tuple(f"p{replica * rows + row}" for row in range(rows)),
                heights=(1 / rows,) * rows,
            )
            for replica in range(replicas)
        )
    )


def job(planned: list[float], **changed: object) -> TilingJob:
    cluster = cluster_of(planned)
    given: dict[str, object] = {
        "platform": ClusterPlatform(cluster=cluster),
        "cluster": cluster,
        "workload": NETTALK,
        "iterations": 1,
        "flop_per_s": 100 * MFLOP,
    }
    if "layout" not in changed:
        given["layout"] = plan("srpm", cluster=cluster, workload=NETTALK).layout
    return TilingJob(**(given | changed))  # type: ignore[arg-type]


def rehearsed(job: TilingJob) -> TilingRun:
    return rehearse(job)


@pytest.mark.parametrize(
    "workload",
    [
        NETTALK,
        net_workload("20-16-12-8", samples=64, bias=True),
        Workload(samples=6, blocks=(linear_pair(3, 4, 2, input_gradient=True),), replicated_flop_per_sample=7),
    ],
)
def test_the_work_of_a_tile_is_that_of_table_1(workload: Workload) -> None:
    tilings = grid(1, 2).cut_blocks(workload)
    for name in ("p0", "p1"):
        tiles = [tiling.by_processor[name] for tiling in tilings]
        work = work_of(tiles, samples=workload.samples, workload=workload)
        height = tiles[0].units.size / workload.blocks[0].units
        assert work.total_flop == pytest.approx(workload.flop(width=1.0, height=height), rel=1e-12)
        assert min(work.forward_flop, work.backward_flop, work.update_flop) > 0


def test_one_replica_takes_its_closed_form() -> None:
    """Two equal tiles above each other swap the output layer."""
    workload = Workload.mlp(203, 80, 26, samples=1024)
    found = rehearsed(job([1.0, 1.0], layout=grid(1, 2)))
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(grid(1, 2), cluster=cluster_of([1.0, 1.0]), workload=workload)
    assert found.total_s == pytest.approx(cost.total, rel=1e-6)
    assert cost.tensor_parallel == pytest.approx(1e-4 + 1024 * 26 * 4 / 1e8)
    assert found.bytes_moved == 2 * 1024 * 26 * 4


@pytest.mark.parametrize(("layout", "rel"), [(grid(1, 2), 1e-6), (grid(2, 1), 1e-6), (grid(2, 2), 1e-6), (grid(1, 4), 2e-3)])
def test_what_messages_cost_processors_is_priced_as_it_is_simulated(layout: Layout, rel: float) -> None:
    """1 ms for each message sent or received, and bytes that are copied at a tenth of the wire's rate."""
    speeds = [1.0] * len(layout.processors)
    cheap = cluster_of(speeds)
    slow = tuple(replace(each, message_s=1e-3, copy_bytes_per_s=1e7) for each in cheap.processors)
    dear = replace(cheap, processors=slow)
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=dear, workload=NETTALK)
    free = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=cheap, workload=NETTALK)
    assert cost.total > free.total + 2e-3
    found = rehearsed(job(speeds, layout=layout, cluster=dear))
    assert found.total_s == pytest.approx(cost.total, rel=rel)


@pytest.mark.parametrize("idle", [0, 1])
@pytest.mark.parametrize("layout", [grid(1, 2), grid(2, 1), grid(2, 2)])
def test_sums_of_batch_statistics_are_priced_as_they_are_simulated(layout: Layout, idle: int) -> None:
    """Each of five layers costs a sum of all ranks in both directions; in a single replica of all ranks there are none."""
    speeds = [1.0] * (len(layout.processors) + idle)
    cluster = cluster_of(speeds)
    normalized = replace(NETTALK, batch_statistics=(33,) * 5)
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP)
    free, priced = (cost.price(layout, cluster=cluster, workload=each) for each in (NETTALK, normalized))
    is_summed = len(layout.replicas) > 1 or idle
    assert priced.total - free.total == pytest.approx(10 * (1e-4 + (len(speeds) - 1) * 33 * 8 / 1e8) * is_summed, rel=1e-9)
    found = rehearsed(job(speeds, layout=layout, workload=normalized))
    assert found.total_s == pytest.approx(priced.total, rel=0.02 if len(speeds) > 2 else 1e-6)


@pytest.mark.parametrize("layout", [grid(1, 2), grid(2, 1), grid(2, 2)])
def test_half_the_bytes_are_priced_as_they_are_simulated(layout: Layout) -> None:
    cluster = cluster_of([1.0] * len(layout.processors))
    halved = replace(NETTALK, wire="bfloat16")
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=cluster, workload=halved)
    found = rehearsed(job(list(cluster.speeds.values()), layout=layout, workload=halved))
    assert found.total_s == pytest.approx(cost.total, rel=1e-6)
    whole = rehearsed(job(list(cluster.speeds.values()), layout=layout))
    assert found.bytes_moved < 0.52 * whole.bytes_moved


@pytest.mark.parametrize("replicas", [2, 4])
@pytest.mark.parametrize("bandwidth_bytes_per_s", [2e7, 1e8, 1e9])
def test_sums_that_hide_behind_the_backward_pass_are_priced_as_they_are_simulated(
    replicas: int, bandwidth_bytes_per_s: float
) -> None:
    """Longer than the pass, about as long, and much shorter. Prices count the update as a part of the pass."""
    layout, workload = (
        grid(replicas, 1),
        replace(net_workload("400-800" + 4 * "-400-800" + "-400", samples=256), overlaps_sums=True),
    )
    cluster = replace(cluster_of([1.0] * replicas), network=replace(LINK, bandwidth_bytes_per_s=bandwidth_bytes_per_s))
    cost = AlphaBetaCost(flop_per_s=1e10)
    early, after = (
        cost.price(layout, cluster=cluster, workload=each) for each in (workload, replace(workload, overlaps_sums=False))
    )
    assert early.gradients < after.gradients
    placed = job([1.0] * replicas, layout=layout, cluster=cluster, platform=ClusterPlatform(cluster=cluster), flop_per_s=1e10)
    assert rehearsed(replace(placed, workload=workload)).total_s == pytest.approx(early.total, rel=0.03)


@pytest.mark.parametrize("layout", [grid(1, 2), grid(2, 1), grid(2, 2)])
def test_what_is_recomputed_is_priced_as_it_is_simulated(layout: Layout) -> None:
    """The forward pass once more, with its sum over the replica."""
    layers = (RecomputedLayer(beside_bytes=0.0, blocks=(0,)),)
    workload = replace(NETTALK, recomputation=Recomputation(kept_bytes=0.0, layers=layers, flop_fraction=0.3))
    speeds, cost = [1.0] * len(layout.processors), AlphaBetaCost(flop_per_s=100 * MFLOP)
    free, again = (cost.price(each, cluster=cluster_of(speeds), workload=workload) for each in (layout, layout.recomputing()))
    assert again.compute == pytest.approx(1.3 * free.compute)
    assert again.tensor_parallel >= 1.5 * free.tensor_parallel
    found = rehearsed(job(speeds, layout=layout.recomputing(), workload=workload))
    assert found.total_s == pytest.approx(again.total, rel=1e-6)


@pytest.mark.parametrize("layout", [grid(1, 2), grid(2, 1), grid(2, 2)])
def test_what_calls_cost_processors_is_priced_as_it_is_simulated(layout: Layout) -> None:
    """3 ms for each block, and 5 ms for the iteration, on the slowest processor of a replica, which takes longest anyway."""
    speeds = [1.0] * len(layout.processors)
    cheap = cluster_of(speeds)
    dear = replace(cheap, processors=tuple(replace(each, call_s=3e-3, step_s=5e-3) for each in cheap.processors))
    free = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=cheap, workload=NETTALK)
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=dear, workload=NETTALK)
    assert cost.total - free.total == pytest.approx(3e-3 * len(NETTALK.blocks) + 5e-3, rel=1e-9)
    assert rehearsed(job(speeds, layout=layout, cluster=dear)).total_s == pytest.approx(cost.total, rel=1e-6)


@pytest.mark.parametrize("layout", [grid(1, 2), grid(2, 1), grid(2, 2)])
def test_one_without_a_tile_goes_through_the_iteration_as_well(layout: Layout) -> None:
    placed = len(layout.processors)
    speeds = [1.0] * (placed + 1)
    quick = cluster_of(speeds)
    free = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=quick, workload=NETTALK)
    for step_s in (1e-6, 2.0):
        slow = replace(quick, processors=(*quick.processors[:placed], replace(quick.processors[placed], step_s=step_s)))
        cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=slow, workload=NETTALK)
        assert cost.total == pytest.approx(max(free.compute + free.tensor_parallel, step_s) + free.gradients, rel=1e-9)
        found = rehearsed(job(speeds, layout=layout, cluster=slow, platform=ClusterPlatform(cluster=slow)))
        assert found.total_s == pytest.approx(cost.total, rel=0.02)


@pytest.mark.parametrize("layout", [grid(1, 2), grid(2, 1), grid(2, 2)])
def test_waiting_for_noisy_ranks_is_priced_as_it_is_simulated(layout: Layout) -> None:
    """The watcher's clocks have no part in it: each rank computes as long as alone."""
    quiet = cluster_of([1.0] * len(layout.processors))
    noisy = replace(quiet, processors=tuple(replace(each, spread=0.2) for each in quiet.processors))
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=noisy, workload=NETTALK)
    speeds = list(quiet.speeds.values())
    alone, found = (
        rehearsed(job(speeds, layout=layout, cluster=each, platform=ClusterPlatform(cluster=each))) for each in (quiet, noisy)
    )
    assert found.total_s == pytest.approx(cost.total, rel=1e-6)
    assert found.total_s > 1.03 * alone.total_s
    assert found.compute_s[0] == pytest.approx(alone.compute_s[0])


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_replicas_over_several_hosts_sum_directly(ranks: int) -> None:
    """Two give each other all they have; more complete a part each, in two phases of 1/k from everyone to everyone."""
    found = rehearsed(job([1.0] * ranks, layout=grid(1, ranks)))
    vector_bytes = 1024 * 26 * 4
    share = 1.0 if ranks == 2 else 2 * (ranks - 1) / ranks
    phases = 1 if ranks == 2 else 2
    compute_s = found.compute_s[0][0]
    assert found.total_s == pytest.approx(compute_s + phases * 1e-4 + share * vector_bytes / 1e8, rel=1e-3)
    assert found.bytes_moved == pytest.approx(ranks * share * vector_bytes, rel=1e-3)


def test_a_short_replica_sum_is_sent_whole() -> None:
    workload = Workload.mlp(203, 80, 2, samples=64)
    found = rehearsed(job([1.0] * 4, layout=grid(1, 4), workload=workload))
    assert found.bytes_moved == 4 * 3 * 64 * 2 * 4


def test_startups_and_messages_have_their_price() -> None:
    """Each tile 1 Mflop, and 1,000 flop for each of 1,024 samples; each rank sends one message in its replica."""
    plain = rehearsed(job([1.0, 1.0], layout=grid(1, 2)))
    startup = Startup(tile_flop=MFLOP, sample_flop=1000.0)
    dear = rehearsed(job([1.0, 1.0], layout=grid(1, 2), startup=startup, software=Software(message_s=2e-3)))
    assert dear.total_s - plain.total_s == pytest.approx((MFLOP + 1000 * 1024) / (100 * MFLOP) + 2e-3, rel=1e-6)


def test_calibration_finds_speeds_and_startups() -> None:
    truth, startup = (3e9, 1e9, 0.5e9), Startup(tile_flop=2e6, sample_flop=3e4)
    shapes = [(10, 1024), (20, 256), (40, 512), (80, 128), (80, 1024)]

    def seconds(units: int, samples: int, flop_per_s: float, startup: Startup) -> float:
        layout = Layout(replicas=(Replica(width=1.0, processors=("p",), heights=(1.0,)),))
        workload = Workload.mlp(203, units, 26, samples=samples)
        (tiling,) = layout.cut_blocks(workload)
        return work_of(tiling.tiles, samples=samples, workload=workload, startup=startup).total_flop / flop_per_s

    for wanted in (startup, Startup(), Startup(sample_flop=3e4)):
        timings = [
            [TimedTile(units=u, samples=s, seconds=seconds(u, s, flop_per_s, wanted)) for u, s in shapes]
            for flop_per_s in truth
        ]
        found = calibrate(timings, workload=NETTALK)
        assert found.flop_per_s == pytest.approx(truth, rel=1e-6)
        assert found.startup.tile_flop == pytest.approx(wanted.tile_flop, rel=1e-5, abs=1.0)
        assert found.startup.sample_flop == pytest.approx(wanted.sample_flop, rel=1e-5, abs=1.0)
    with pytest.raises(InputError, match="machine 0 needs timings of at least 3 different tiles, not 2"):
        calibrate([[TimedTile(units=1, samples=1, seconds=1.0)] * 2], workload=NETTALK)


def test_a_grid_of_two_by_three_takes_its_closed_form() -> None:
    """Two rounds down the replicas, one message each way across them; 3 rows of 78 units, two replicas."""
    workload = Workload.mlp(203, 78, 26, samples=1200)
    speeds = [1.0] * 6
    found = rehearsed(job(speeds, workload=workload, layout=grid(2, 3)))
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(grid(2, 3), cluster=cluster_of(speeds), workload=workload)
    assert found.total_s == pytest.approx(cost.total, rel=1e-6)
    assert found.compute_s[0] == pytest.approx((cost.compute, cost.compute))


def test_every_sum_over_a_replica_is_a_meeting() -> None:
    """The one head is p0's, and p1 waits for it; both then take as long for the hidden units."""
    head = Block(units=1, unit_parameters=10, forward_elements=4, backward_elements=4, flop_per_unit=3e6)
    hidden = Block(units=800, unit_parameters=10, forward_elements=4, backward_elements=4, flop_per_unit=3e3)
    workload = Workload(samples=80, blocks=(head, hidden) * 2)
    layout = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1"), heights=(0.5, 0.5)),))
    found = rehearsed(job([1.0, 1.0], workload=workload, layout=layout))
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=cluster_of([1.0, 1.0]), workload=workload)
    assert cost.compute == pytest.approx(2 * 80 * (3e6 + 400 * 3e3) / 1e8)
    # The updates, of two operations for each weight, wait for no sum: p0's are all that count of them.
    assert found.total_s == pytest.approx(cost.total, rel=1e-3)
    assert found.compute_s[0] == pytest.approx((cost.compute, 2 * 80 * 400 * 3e3 / 1e8))
    assert found.bytes_moved == 8 * 2 * 80 * 4 * 4, "eight sums over replicas of two"


def test_a_network_without_blocks_sums_all_its_gradients() -> None:
    workload = Workload(samples=64, replicated_parameters=250_000, replicated_flop_per_sample=10**6)
    layout = grid(2, 1)
    found = rehearsed(job([1.0, 1.0], workload=workload, layout=layout))
    cost = AlphaBetaCost(flop_per_s=100 * MFLOP).price(layout, cluster=cluster_of([1.0, 1.0]), workload=workload)
    assert cost.compute == pytest.approx(0.32)
    assert found.total_s == pytest.approx(cost.total, rel=1e-6)
    assert found.bytes_moved == 2 * (10**6 + 2 * 4), "and two replicas' numbers of samples"


def test_a_replica_waits_for_its_slowest() -> None:
    found = rehearsed(job([1.0, 0.25], layout=grid(1, 2)))
    slow, fast = found.compute_s[0]
    assert slow == pytest.approx(4 * fast)
    assert found.total_s > slow


@pytest.mark.parametrize("layout", [grid(2, 2), grid(4, 1)])
def test_leaving_out_iterations_that_repeat_themselves_changes_nothing(layout: Layout) -> None:
    changes = (
        Change(processor="p1", factor=0.5, at_iteration=9),
        Change(processor="p2", factor=0.3, at_s=3.0),
        Change(processor="p1", factor=1.0, at_s=6.05),
    )
    arguments = {"layout": layout, "iterations": 24, "changes": changes, "retiler": Retiler(every=4, window=3)}
    short, whole = (
        rehearsed(job([1.0, 0.8, 1.0, 0.5], **arguments)),
        rehearsed(job([1.0, 0.8, 1.0, 0.5], skip=False, **arguments)),
    )
    assert short.num_simulated < whole.num_simulated == 24
    assert short.iteration_s == pytest.approx(whole.iteration_s, rel=1e-6)
    assert short.total_s == pytest.approx(whole.total_s, rel=1e-6)
    assert [each.kind for each in short.decisions] == [each.kind for each in whole.decisions]
    assert short.tilings == whole.tilings
    assert short.bytes_moved == pytest.approx(whole.bytes_moved, rel=1e-6)


def test_work_goes_on_at_the_speed_of_the_time() -> None:
    changes = (Change(processor="a", factor=0.5, at_s=2.0), Change(processor="a", factor=2.0, at_s=4.0))
    speeds = Speeds({"a": 10.0, "b": 10.0}, changes=changes)
    assert speeds.finish_s("a", work_flop=10, begin_s=0.5) == pytest.approx(1.5)
    assert speeds.finish_s("a", work_flop=20, begin_s=1.0) == pytest.approx(4.0)
    assert speeds.finish_s("a", work_flop=60, begin_s=1.0) == pytest.approx(6.0)
    assert speeds.finish_s("a", work_flop=20, begin_s=9.0) == pytest.approx(10.0)
    assert speeds.finish_s("b", work_flop=60, begin_s=1.0) == pytest.approx(7.0)


def test_moving_is_paid_for() -> None:
    """To two replicas, where both need all units: 40 go each way, (203 + 26) x 4 bytes each, threefold with Adam."""
    for copies in (0, 2):
        found = rehearsed(
            job(
                [1.0, 1.0],
                speeds=(3.0, 1.0),
                layout=grid(1, 2),
                iterations=8,
                retiler=Retiler(every=4, window=2),
                known_speeds=False,
                state_copies=copies,
            )
        )
        assert [decision.remaps for decision in found.decisions] == [True, False]
        moved_bytes = 40 * 229 * 4 * (1 + copies)
        assert found.move_s[0] == pytest.approx(1e-4 + moved_bytes / 1e8)
        assert found.move_s[1] == 0.0
        assert {tile.processor: tile.area for tile in found.tilings[0].tiles} == {"p0": 768 * 80, "p1": 256 * 80}
        assert found.iteration_s[-1] < found.iteration_s[0] * 0.6


# -- the same decisions as in threads -------------------------------------------------------------------------------------

SAMPLES, UNITS, EVERY, CHECKS = 256, 128, 4, 8
SPEEDS = (1.0, 1.0, 0.5, 0.25)


class Machine(HandClock):
    """A rank's clock and pace: backward takes the flop of its tile over its speed, and nothing else takes time."""

    def __init__(self, flop_per_s: float) -> None:
        super().__init__(0.0)
        self.flop_per_s = flop_per_s
        self.model: TiledModel | None = None

    def begin(self) -> None:
        pass

    def end(self) -> None:
        model = self.model
        if model is not None and model.phases.current is IterationPhase.BACKWARD and model.tile is not None:
            tiles = [tiling.by_processor[model.name] for tiling in model.tilings]
            self.sleep(work_of(tiles, samples=tiles[0].samples.size, workload=model.workload).total_flop / self.flop_per_s)


@pytest.mark.threads_only
@pytest.mark.ranks(4)
@pytest.mark.parametrize("planner", ["srpm", "even"])
def test_the_decisions_are_those_of_a_run_in_threads(world: World, planner: str) -> None:
    """Nothing is known of the speeds at first; after eight checks rank 1 becomes slower by three; eight more follow."""
    torch.manual_seed(0)
    built = nn.Sequential(nn.Linear(3, UNITS), nn.Tanh(), nn.Linear(UNITS, 2)).double()
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)
    y = torch.rand(SAMPLES, 2, generator=generator, dtype=torch.float64)
    retiler = Retiler(every=EVERY, window=3)

    def body(comm: AbstractCommunicator) -> tuple[list[Decision], Cluster, Workload, Layout]:
        machine = Machine(SPEEDS[comm.rank] * MFLOP)
        model = tile(built, comm, batch_size=SAMPLES, speeds="equal", planner=planner, quiet=True, clock=machine, pace=machine)
        machine.model = model
        first = (model.cluster, model.workload, model.layout)
        trainer = Trainer(
            model, optimizer=lambda parameters: torch.optim.SGD(parameters, lr=0.1), loss=nn.MSELoss(), retile=retiler
        )
        checks = trainer.fit((x, y), batch_size=SAMPLES, iterations=CHECKS * EVERY).checks
        if comm.rank == 1:
            machine.flop_per_s /= 3
        checks += trainer.fit((x, y), batch_size=SAMPLES, iterations=CHECKS * EVERY).checks
        return [check.decision for check in checks], *first

    real, cluster, workload, layout = world(body)[0]
    simulated = rehearsed(
        TilingJob(
            platform=ClusterPlatform(cluster=cluster),
            cluster=cluster,
            workload=workload,
            layout=layout,
            iterations=2 * CHECKS * EVERY,
            speeds=SPEEDS,
            flop_per_s=MFLOP,
            changes=(Change(processor="p1", factor=1 / 3, at_iteration=CHECKS * EVERY + 1),),
            retiler=retiler,
            known_speeds=False,
        )
    ).decisions
    assert len(real) == len(simulated) == 2 * CHECKS
    assert [each.kind for each in simulated] == [each.kind for each in real]
    assert sum(each.remaps for each in simulated) >= 2
    for one, other in zip(simulated, real, strict=True):
        assert isinstance(one.layout, Layout)
        assert isinstance(other.layout, Layout)
        assert one.layout.cut_blocks(workload) == other.layout.cut_blocks(workload)
        assert one.reason.split("; speeds")[0].split(", but")[0] == other.reason.split("; speeds")[0].split(", but")[0]
        assert one.ratio == pytest.approx(other.ratio, rel=1e-6)


@pytest.mark.parametrize("rule", ["settling", "published"])
def test_drpm_settles_and_settles_again(rule: str) -> None:
    """Condition A of the paper: five processors, of which nothing is known; then the fastest becomes a quarter as fast."""
    speeds = (0.25, 0.31, 0.63, 1.0, 1.0)
    retiler = Retiler(rule="settling") if rule == "settling" else Retiler.published()
    layout = plan("even", cluster=cluster_of([1.0] * 5), workload=NETTALK).layout
    found = rehearsed(
        job(
            [1.0] * 5,
            speeds=speeds,
            layout=layout,
            iterations=200,
            retiler=retiler,
            known_speeds=False,
            flop_per_s=10 * MFLOP,
            changes=(Change(processor="p4", factor=0.25, at_iteration=101),),
        )
    )
    assert found.decisions[0].kind is DecisionKind.WHOLE
    assert found.decisions[5].remaps
    assert found.iteration_s[99] < 0.7 * found.iteration_s[0]
    assert found.iteration_s[100] > 1.5 * found.iteration_s[99]
    assert found.iteration_s[199] < 0.8 * found.iteration_s[100]
    assert found.num_simulated < 80


def slowed(*, factor: float, start: int, stop: int, iterations: int) -> TilingRun:
    """Four equal processors, the last of which has `factor` of its speed from iteration `start` until `stop`."""
    return rehearsed(
        job(
            [1.0, 1.0, 1.0, 1.0],
            layout=grid(2, 2),
            iterations=iterations,
            retiler=Retiler(),
            known_speeds=True,
            flop_per_s=10 * MFLOP,
            changes=(
                Change(processor="p3", factor=factor, at_iteration=start),
                Change(processor="p3", factor=1.0, at_iteration=stop),
            ),
        )
    )


def test_what_slows_down_is_noticed_in_three_iterations_and_given_less_until_it_is_as_fast_again() -> None:
    found = slowed(factor=0.25, start=61, stop=111, iterations=160)
    moved = [decision for decision in found.decisions if decision.remaps]
    assert 62 <= moved[0].iteration <= 65
    assert all(decision.iteration > 60 for decision in found.decisions)
    assert "p3 takes" in moved[0].reason
    assert found.iteration_s[60] > 2 * found.iteration_s[59]
    assert found.iteration_s[105] < 0.6 * found.iteration_s[60]
    assert found.iteration_s[159] < 0.9 * found.iteration_s[105]
    assert found.iteration_s[159] == pytest.approx(found.iteration_s[59], rel=0.1)


def test_a_rank_that_all_but_stops_is_left_out_in_the_simulation_and_taken_in_again() -> None:
    found = slowed(factor=0.002, start=41, stop=101, iterations=200)
    without = [decision for decision in found.decisions if decision.remaps and "p3" not in decision.layout.processors]
    assert without
    assert "p3" in found.decisions[-1].layout.processors
    assert found.iteration_s[199] == pytest.approx(found.iteration_s[39], rel=0.1)


def test_a_thousand_processors() -> None:
    """2 replicas of 512; every fourth processor is half as fast, which is known, and has half as much."""
    rows = [0.5 if row % 4 == 0 else 1.0 for row in range(512)]
    heights = tuple(each / sum(rows) for each in rows)
    replicas = tuple(
        Replica(width=1 / 2, processors=tuple(f"p{replica * 512 + row}" for row in range(512)), heights=heights)
        for replica in range(2)
    )
    workload = Workload.mlp(64, 8960, 4, samples=4096)
    found = rehearsed(job(rows * 2, workload=workload, layout=Layout(replicas=replicas), iterations=2, flop_per_s=10 * MFLOP))
    slowest, fastest = found.compute_s[0]
    assert slowest == pytest.approx(fastest, rel=0.02)
    assert slowest == pytest.approx(workload.flop(width=1 / 2, height=20 / 8960) / (10 * MFLOP), rel=0.02)
    assert slowest < found.iteration_s[-1] < 1.2 * slowest


def test_two_hundred_processors() -> None:
    """Every fourth is half as fast, which nobody knew; then one becomes less than half as fast."""
    speeds = tuple(1.0 if index % 4 else 0.5 for index in range(200))
    found = rehearsed(
        job(
            [1.0] * 200,
            speeds=speeds,
            workload=Workload.mlp(64, 4000, 16, samples=2000),
            layout=grid(2, 100),
            iterations=40,
            retiler=Retiler(every=10, window=3),
            flop_per_s=10 * MFLOP,
            changes=(Change(processor="p7", factor=0.45, at_iteration=21),),
        )
    )
    assert [decision.kind for decision in found.decisions] == [
        DecisionKind.REPLICAS,
        DecisionKind.KEEP,
        DecisionKind.REPLICAS,
        DecisionKind.KEEP,
    ]
    assert found.iteration_s[19] < 0.65 * found.iteration_s[0]
    assert found.iteration_s[20] > 1.5 * found.iteration_s[19]
    assert found.iteration_s[39] < 1.05 * found.iteration_s[19]
    assert found.num_simulated < 16


def test_the_same_again_on_one_core_or_two() -> None:
    jobs = [job([1.0, 0.5, 0.7], iterations=5, flop_per_s=flop * MFLOP) for flop in (1.0, 3.0)]
    two = started().map(rehearse, jobs)
    with Runs(cores=1) as own:
        assert own.map(rehearse, jobs) == two


def test_golden_times() -> None:
    found = rehearsed(job([0.25, 0.31, 0.63, 1.0, 1.0], iterations=3))
    assert found.iteration_s == pytest.approx((0.2534418,) * 3, rel=1e-9)


def test_bad_input() -> None:
    with pytest.raises(InputError, match=r"p0's speed needs a finite factor > 0, not 0"):
        Change(processor="p0", factor=0, at_s=1.0)
    with pytest.raises(InputError, match="either at_s or at_iteration"):
        Change(processor="p0", factor=0.5)
    with pytest.raises(InputError, match="at >= 0 s, or at iteration >= 1"):
        Change(processor="p0", factor=0.5, at_s=-1.0)
    with pytest.raises(PlanError, match="there is no processor 'p9' in the cluster, which has p0, p1"):
        job([1.0, 1.0], changes=(Change(processor="p9", factor=0.5, at_s=1.0),))
    with pytest.raises(PlanError, match="has 2 hosts for 3 processors"):
        job([1.0, 1.0, 1.0], platform=ClusterPlatform(cluster=cluster_of([1.0, 1.0])))
    with pytest.raises(PlanError, match="at least 1 iteration, not 0"):
        job([1.0], iterations=0)
    with pytest.raises(PlanError, match="3 true speeds are given for 2 processors"):
        job([1.0, 1.0], speeds=(1.0, 1.0, 1.0))
