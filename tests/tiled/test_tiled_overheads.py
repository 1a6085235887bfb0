"""What iterations cost besides flop and bytes, and speeds that depend on the size of a tile: how both are measured."""

import threading
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from drawing import Written, mlp
from hand_clock import HandClock
from tatami.cluster import NETWORK_LINK, Cluster, Link, SpeedTable
from tatami.comm import AbstractCommunicator
from tatami.comm.link_probe import measure_message_costs
from tatami.errors import PlanError
from tatami.measure import speeds
from tatami.measure.speed_curves import SpeedCurve, measure_curves, measure_network_curves, network_passes
from tatami.measure.speeds import AbstractPass
from tatami.model import overheads
from tatami.model.cluster_probe import probe
from tatami.model.overheads import measure_overheads, messages_of, overheads_of, slowest_of, small_model
from tatami.partition.tracing.sample import Sample
from tatami.random_state import torch_state
from tatami.testing.slowdown import Slowdown
from tatami.testing.worlds import World
from tatami.train import measure_sample_flop, measure_speeds, tile
from tatami.workload import Block, Workload
from tiled_rig import Placed, simple_layout

mse: Any = F.mse_loss  # as torch has no type for `backward`
seconds = st.floats(0.0, 1e-2)


@given(call_s=seconds, step_s=seconds, message_s=seconds, few=st.integers(2, 50), more=st.integers(1, 500))
def test_three_times_tell_three_costs(call_s: float, step_s: float, message_s: float, few: int, more: int) -> None:
    messages = [few, few, few + more]
    spent_s = [step_s + blocks * call_s + count * message_s for blocks, count in zip((1, 4, 4), messages, strict=True)]
    found = overheads_of(spent_s, messages=messages)
    assert found.call_s == pytest.approx(call_s, abs=1e-9)
    assert found.message_s == pytest.approx(message_s, abs=1e-9)
    assert found.step_s == pytest.approx(step_s, abs=1e-6)


def test_what_noise_makes_negative_is_nothing() -> None:
    found = overheads_of([3e-3, 2e-3, 1e-3], messages=[8, 8, 20])
    assert (found.call_s, found.message_s, found.step_s) == (0.0, 0.0, 3e-3)
    assert overheads_of([3e-3, 6e-3, 6e-3], messages=[0, 0, 0]).message_s == 0.0


@pytest.mark.parametrize("messages", [[8, 8, 20], [0, 0, 0]])
def test_a_message_takes_no_less_than_one_of_a_burst(messages: list[int]) -> None:
    found = overheads_of([3e-3, 3e-3, 1e-3], messages=messages, least_message_s=1e-4)
    assert found.message_s == 1e-4
    assert found.step_s == pytest.approx(3e-3 - messages[0] * 1e-4)
    assert overheads_of([3e-3, 3e-3, 9e-3], messages=[8, 8, 20], least_message_s=1e-4).message_s == pytest.approx(5e-4)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("is_row", [True, False])
def test_an_iteration_has_the_messages_that_it_is_divided_by(comm: AbstractCommunicator, is_row: bool, blocks: int) -> None:
    size = comm.size
    layout = simple_layout(*([rank] for rank in range(size))) if is_row else simple_layout(list(range(size)))
    apart = Placed(comm, hosts=tuple(f"host-{rank}" for rank in range(size)))
    model = small_model(apart, layout, blocks=blocks)
    x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
    mse(model(x), y).backward()  # the ranks compare their batches in the first pass
    x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
    mse(model(x), y).backward()
    x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
    parts = [each for each in (model.comm, model._replica.comm) if isinstance(each, Placed)]

    def num_messages() -> int:
        return sum(each.num_messages(name) for each in parts for name in ("isend", "irecv"))

    before = num_messages()
    mse(model(x), y).backward()
    counted, sent = messages_of(model), num_messages() - before
    assert counted == sent


@pytest.mark.ranks(1, 2, 3)
def test_it_is_measured_and_all_ranks_are_told(comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of two, where there are more."""
    monkeypatch.setattr(overheads, "_TOGETHER", 2)
    before = torch_state()
    found = measure_overheads(comm, measure_message_costs(comm, repeats=2), repeats=2)
    assert torch.equal(torch_state(), before)
    assert comm.allgather_object(found) == [found] * comm.size
    for each in found:
        # A message is never for nothing, however noisy the machine; of the others, one may look so.
        assert each.message_s > 0 or comm.size == 1
        assert min(each.call_s, each.step_s) >= 0
        assert 0 < each.call_s + each.step_s + each.message_s < 100


class Looks(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Looks at each operation, as the paced lab does."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.losses = 0

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        self.losses += func is torch.ops.aten.mse_loss.default
        return func(*args, **(kwargs or {}))


@pytest.mark.ranks(1, 2)
def test_what_looks_at_operations_does_not_count_as_calls(comm: AbstractCommunicator) -> None:
    x = torch.ones(2)
    with Looks() as looks:
        measure_overheads(comm, measure_message_costs(comm, repeats=1), repeats=1)
        assert looks.losses == 0, "the iterations that are timed are not looked at"
        mse(x, x)
        assert looks.losses == 1, "afterwards it looks again"


def test_the_slowest_link_of_several_measurements_is_their_median() -> None:
    links = [Link(bandwidth_bytes_per_s=each, latency_s=1e-4) for each in (3.1e6, 12e6, 2.7e6, 3e6, 2.9e6, 11e6)]
    assert slowest_of(links) == links[4], "2.7 to 3.1 MB/s are one kind: the slower one of the two in the middle"
    assert slowest_of(links[1:2]) == links[1]


WORKLOAD = Workload.mlp(20, 64, 5, samples=32)
FLOP_PER_S, SAMPLE_FLOP = 1e6, 700.0


def fake_pass(clock: HandClock) -> type:
    class Fake:
        def __init__(self, block: Block, *, samples: int, dtype: object, device: object) -> None:  # noqa: ARG002
            alone = Workload(samples=samples, blocks=(block,))
            self.seconds = (alone.flop(width=1.0, height=1.0) + SAMPLE_FLOP * samples) / FLOP_PER_S

        def run(self) -> None:
            clock.sleep(self.seconds)

    return Fake


@pytest.mark.threads_only
@pytest.mark.ranks(1)
def test_finds_what_each_sample_costs(comm: AbstractCommunicator) -> None:
    clock = HandClock()
    with patch.object(speeds, "BlockPass", fake_pass(clock)):
        found = measure_sample_flop(WORKLOAD, comm, clock=clock)
        assert found == pytest.approx(SAMPLE_FLOP, rel=1e-9)
        told = measure_speeds(replace(WORKLOAD, sample_flop=found), comm, clock=clock)
        assert told[0].flop_per_s == pytest.approx(FLOP_PER_S, rel=0.01), "Table 1's own few flop for each sample aside"


@pytest.mark.threads_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("slower", [-0.1, 0.0, 0.05])
def test_units_whose_time_drowns_in_noise_are_not_taken_for_free(comm: AbstractCommunicator, slower: float) -> None:
    """All units take no longer than an eighth of them, or hardly: a tenth of the time is theirs all the same."""
    clock = HandClock()
    most_flop = WORKLOAD.flop(width=1.0, height=1.0)

    class Fake:
        def __init__(self, block: Block, *, samples: int, dtype: object, device: object) -> None:  # noqa: ARG002
            self.seconds = 1e-3 * (1 + slower * (block.units == WORKLOAD.blocks[0].units))

        def run(self) -> None:
            clock.sleep(self.seconds)

    with patch.object(speeds, "BlockPass", Fake):
        found = measure_sample_flop(WORKLOAD, comm, clock=clock)
        assert found == pytest.approx((9 * 7 / 8 - 1 / 8) * most_flop / WORKLOAD.samples, rel=0.01)
        told = measure_speeds(replace(WORKLOAD, sample_flop=found), comm, clock=clock)
        assert told[0].flop_per_s == pytest.approx(8.75 * most_flop / (1e-3 * (1 + slower)), rel=0.01)


def test_is_the_same_on_all_ranks_and_never_negative(comm: AbstractCommunicator) -> None:
    found = measure_sample_flop(WORKLOAD, comm, repeats=1, repeat_s=1e-4)
    assert found >= 0.0
    assert set(comm.allgather_object(found)) == {found}


def test_plans_reckon_with_it() -> None:
    dear = Workload(samples=100, blocks=WORKLOAD.blocks, sample_flop=SAMPLE_FLOP)
    plain = Workload(samples=100, blocks=WORKLOAD.blocks)
    for width, height in ((1.0, 1.0), (0.25, 0.5), (0.5, 0.0)):
        more = dear.flop(width=width, height=height) - plain.flop(width=width, height=height)
        assert more == pytest.approx(100 * width * SAMPLE_FLOP)
    assert dear.flop_per_width - plain.flop_per_width == pytest.approx(100 * SAMPLE_FLOP)
    with pytest.raises(PlanError, match="sample_flop of a workload must be a finite number >= 0, not -1"):
        Workload(samples=1, blocks=WORKLOAD.blocks, sample_flop=-1)


@pytest.mark.ranks(2)
def test_a_model_knows_what_was_probed_of_its_blocks(comm: AbstractCommunicator) -> None:
    cluster = replace(Cluster.from_speeds([1.0, 1.0]), sample_flop={"20-64-5": SAMPLE_FLOP, "20-32-5": 1.0})
    for units, sample_flop in ((64, SAMPLE_FLOP), (32, 1.0), (16, 0.0)):
        network = nn.Sequential(nn.Linear(20, units), nn.Sigmoid(), nn.Linear(units, 5))
        model = tile(network, comm, speeds=cluster, batch_size=8, quiet=True)
        assert model.workload.sample_flop == sample_flop
        model.close()


CPU = torch.device("cpu")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("frozen", ["nothing", "0.", ""])
def test_a_frozen_pair_is_measured_in_its_size(comm: AbstractCommunicator, frozen: str) -> None:
    network = mlp(20, 64, 5)
    for name, parameter in network.named_parameters():
        parameter.requires_grad_(not name.startswith(frozen))
    network.append(nn.Linear(5, 2).double())
    model = tile(network, comm, batch_size=8, quiet=True)
    (block,) = model.workload.blocks
    computed = speeds.BlockPass(block, samples=3, dtype=torch.float64, device=CPU)
    assert computed._x.shape == (3, 21), "a bias counts as one more input"
    model.close()


class Machine(HandClock):
    """A clock that passes move on: so much for a call, and so much for a sample."""

    def __init__(self, *, call_s: float, sample_s: float) -> None:
        super().__init__(0.0)
        self.call_s, self.sample_s = call_s, sample_s
        self.computed: list[int] = []

    def passes(self, samples: int) -> Sequence[AbstractPass]:
        machine = self

        class Computing(AbstractPass):
            def run(self) -> None:
                machine.computed.append(samples)
                machine.time_s += machine.call_s + samples * machine.sample_s

        return [Computing()]


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("call_s", "sample_s", "options", "sizes"),
    [
        pytest.param(1e-3, 1e-5, {"share": 1000}, [2, 8, 32, 128, 512, 1000], id="up to the share"),
        pytest.param(1e-3, 1e-3, {"share": 1000}, [2, 8, 32], id="until the speed grows no more"),
        pytest.param(0.0, 0.3, {"share": 10}, [2, 8], id="as long as a few iterations"),
        pytest.param(0.0, 3.0, {"share": 1000}, [2], id="as long as there is time"),
        pytest.param(1e-3, 1e-5, {"share": 1000, "sample_bytes": 2**26}, [2, 8], id="as long as there is memory"),
        pytest.param(1e-3, 1e-5, {"share": 2}, [2], id="no more than the share"),
    ],
)
def test_speeds_are_measured_up_to_where_they_grow_no_more(
    world: World, monkeypatch: pytest.MonkeyPatch, call_s: float, sample_s: float, options: dict[str, Any], sizes: list[int]
) -> None:
    monkeypatch.setattr("tatami.measure.speed_curves.memory_here", lambda: 2**32 * world.size)

    def body(comm: AbstractCommunicator) -> list[SpeedCurve]:
        machine = Machine(call_s=call_s, sample_s=sample_s * (1 + comm.rank))
        curves = measure_curves(machine.passes, comm, first=2, device=CPU, clock=machine, **options)
        assert machine.time_s < (60.0 if sample_s > 0.1 else 4.0)
        return curves

    curves = world(body)[0]
    sizes = sizes[:1] if world.size == 1 and sample_s == 0.3 else sizes  # one rank alone is timed for 2 s
    for rank, curve in enumerate(curves):
        assert [samples for samples, _ in curve.times_s] == sizes
        assert [time_s for _, time_s in curve.times_s] == pytest.approx(
            [call_s + samples * sample_s * (1 + rank) for samples in sizes]
        )


@pytest.mark.threads_only
@pytest.mark.ranks(3)
def test_a_rank_whose_speed_grows_goes_on_beyond_its_share_while_others_wait(world: World) -> None:
    """Up to its part of 64 samples in proportion to speeds, which is half. The last rank cannot be timed with more than 16."""

    def body(comm: AbstractCommunicator) -> list[SpeedCurve]:
        machine = Machine(call_s=1e-1, sample_s=(1e-4, 1.0, 1e-4)[comm.rank])

        def passes(samples: int) -> Sequence[AbstractPass]:
            if comm.rank == 2 and samples > 16:
                raise RuntimeError("out of memory")
            return machine.passes(samples)

        most = None if comm.rank == 1 else 64
        return measure_curves(passes, comm, first=1, share=16, whole=most, device=CPU, clock=machine)

    with pytest.warns(UserWarning, match=r"not timed with more samples than its share \(out of memory\)"):
        curves = world(body)[0]
    assert [[samples for samples, _ in curve.times_s] for curve in curves] == [[1, 4, 16, 32], [1, 4], [1, 4, 16]]


def test_a_curve_is_a_table_where_speed_depends_on_the_size_and_calls_may_be_taken_off() -> None:
    curve = SpeedCurve(times_s=((2, 3e-3), (8, 9e-3), (32, 33e-3)), spread=0.0)  # 1 ms, and 1 ms for each sample
    table = curve.speed(sample_flop=100.0)
    assert isinstance(table, SpeedTable)
    assert table.points == ((200.0, 200 / 3e-3), (800.0, 800 / 9e-3), (3200.0, 3200 / 33e-3))
    for calls_s in (1e-3, 5e-3):  # never more than the curve shows
        assert curve.speed(sample_flop=100.0, calls_s=calls_s) == pytest.approx(100 / 1e-3)
    assert not isinstance(curve.speed(sample_flop=100.0, calls_s=1e-3), SpeedTable)


def test_a_sample_is_repeated() -> None:
    mask = torch.ones(3, 3)
    sample = Sample.of({"x": torch.arange(2.0), "mask": mask})
    for count, expected in ((1, [0.0]), (2, [0.0, 1.0]), (5, [0.0, 1.0, 0.0, 1.0, 0.0])):
        batch = sample.of_size(count)
        assert (batch.kwargs["x"].tolist(), batch.samples) == (expected, count)
        assert batch.kwargs["mask"] is mask


def of_two(net: Any, x: torch.Tensor) -> Any:
    """It knows how many samples there are."""
    if len(x) > 2:
        raise ValueError("two samples, please")
    return net.norm(net.layer(x))


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_a_network_that_takes_no_other_number_of_samples_is_measured_with_its_sample(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        model: Any = Written(of_two, layer=nn.Linear(3, 3), norm=nn.BatchNorm1d(3))
        curves = measure_network_curves(model, Sample.of(torch.rand(2, 3)), comm, batch_size=64)
        assert [[samples for samples, _ in curve.times_s] for curve in curves] == [[2]] * 2
        assert model.norm.num_batches_tracked == 0

    with pytest.warns(UserWarning, match=r"does not run on 8 \(two samples, please\)"):
        world(body)


def checkpointed(net: Any, x: torch.Tensor) -> Any:
    """Torch forbids `torch.autograd.grad` through it."""
    return net.last(checkpoint(lambda each: net.layer(each).tanh(), x.clone().requires_grad_(), use_reentrant=True))


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_reentrant_checkpoints_are_measured_and_leave_gradients_as_they_were(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        model: Any = Written(checkpointed, layer=nn.Linear(3, 3), last=nn.Linear(3, 2))
        called: list[torch.Tensor] = []
        for parameter in model.layer.parameters():
            parameter.grad = torch.full_like(parameter, 7.0)
            parameter.register_post_accumulate_grad_hook(called.append)
        curves = measure_network_curves(model, Sample.of(torch.rand(2, 3)), comm, batch_size=16)
        assert all(len(curve.times_s) > 1 for curve in curves)
        assert all(bool((each.grad == 7.0).all()) for each in model.layer.parameters())
        assert [each.grad for each in model.last.parameters()] == [None, None]
        assert not called
        x = torch.rand(4, 3)
        (timed,) = network_passes(model, Sample.of(x))(4)
        timed.run()
        timed.run()
        expected = torch.autograd.grad(model.last(model.layer(x).tanh()).double().sum(), [*model.parameters()])
        for grad, one in zip(vars(timed)["_grads"], expected, strict=True):
            torch.testing.assert_close(grad, 2 * one)

    world(body)


HERE = threading.local()


class Telling(nn.Sequential):
    """It says on each rank with how many samples it was called."""

    def forward(self, x: torch.Tensor) -> Any:
        HERE.samples = len(x)
        return super().forward(x)  # type: ignore[no-untyped-call]


class Paced:
    """Moves a clock on by what a pass takes."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine

    def begin(self) -> None: ...

    def end(self) -> None:
        self.machine.time_s += self.machine.call_s + self.machine.sample_s * HERE.samples


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_tile_plans_with_the_speed_at_the_size_of_the_tile(world: World) -> None:
    """Calls take both ranks as long, samples twice as long on one: with one sample they look nearly as fast as each other."""
    network = Telling(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))

    def body(comm: AbstractCommunicator) -> Cluster:
        machine = Machine(call_s=1e-3, sample_s=1e-4 * (1 + comm.rank))
        sample = torch.rand(2, 4)
        return tile(network, comm, batch_size=512, sample=sample, quiet=True, clock=machine, pace=Paced(machine)).cluster

    fast, slow = (processor.speed for processor in world(body)[0].processors)
    assert isinstance(fast, SpeedTable)
    assert isinstance(slow, SpeedTable)
    assert fast.points[0][1] / slow.points[0][1] == pytest.approx(1.2 / 1.1)
    assert float(slow) == pytest.approx(slow.points[0][1] * 256 * 1.2e-3 / (1e-3 + 256 * 2e-4))
    # At 256 samples each the fast rank is 1.96 times as fast, and so it is timed with its part of 512, which is 340, too.
    assert fast / slow == pytest.approx(340 / (1e-3 + 340 * 1e-4) * (1e-3 + 256 * 2e-4) / 256)


SMALL = Workload.mlp(20, 16, 5, samples=64)


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_get_the_same_cluster(world: World) -> None:
    def body(comm: AbstractCommunicator) -> Cluster:
        before = torch_state()
        cluster = probe(SMALL, comm, repeats=2)
        assert torch.equal(torch_state(), before), "what the program draws next is what it would have drawn"
        assert comm.allgather_object(cluster) == [cluster] * comm.size
        return cluster

    cluster = world(body)[0]
    assert [processor.name for processor in cluster.processors] == [f"p{rank}" for rank in range(world.size)]
    memory = [processor.memory_bytes for processor in cluster.processors]
    assert all(share is not None and share % 2**20 == 0 and share == memory[0] for share in memory)
    assert cluster.links == {}


class Probed(HandClock):
    """A clock, and the CPU time of a thread on it: a pass takes 1 s of both, whatever else this machine does."""

    def __init__(self, factor: float) -> None:
        super().__init__(0.0)
        self.used_s = 0.0
        self._slowdown = Slowdown(factor, clock=self, cpu_s=lambda: self.used_s)

    def begin(self) -> None:
        self._slowdown.begin()

    def end(self) -> None:
        self.time_s += 1.0
        self.used_s += 1.0
        self._slowdown.end()


@pytest.mark.ranks(2)
def test_a_slowed_rank_is_measured_as_slow(world: World) -> None:
    def body(comm: AbstractCommunicator) -> Cluster:
        machine = Probed(1.0 + 19.0 * comm.rank)
        return probe(SMALL, comm, repeats=3, clock=machine, pace=machine, cpu_s=lambda: machine.used_s)

    fast, slow = world(body)[0].processors
    assert slow.speed == pytest.approx(fast.speed / 20, rel=1e-3)  # figures are rounded
    assert (slow.spread, fast.spread) == (0.0, 0.0)
    # However many blocks it has, and whatever it sends, an iteration takes 1 s.
    assert (fast.step_s, slow.step_s) == pytest.approx((1.0, 20.0), rel=1e-3)
    assert [(each.call_s, each.message_s) for each in (fast, slow)] == [(0.0, 0.0)] * 2


@pytest.mark.ranks(2, 3, 4)
def test_between_hosts_it_is_measured_what_messages_cost_and_within_one_nothing_is(world: World) -> None:
    def body(comm: AbstractCommunicator) -> tuple[Cluster, Cluster, Cluster]:
        apart = Placed(comm, hosts=tuple(f"host-{rank}" for rank in range(comm.size)))
        found = []
        for ranks, given in ((apart, None), (comm, None), (apart, [1.0] * comm.size)):
            network = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which of them are worth their messages depends on the machine
                model = tile(network, ranks, batch_size=64, speeds=given or "measure", reduction="mean", quiet=True)
            found.append(model.cluster)
        return found[0], found[1], found[2]

    results = world(body)
    assert all(result == results[0] for result in results)
    apart, together, given = results[0]
    names = tuple(f"host-{rank}" for rank in range(world.size))
    assert tuple(each.host for each in apart.processors) == tuple(each.host for each in given.processors) == names
    assert all(each.message_s > 0 for each in apart.processors)
    assert apart.network != NETWORK_LINK
    assert not together.messages_known
    assert not given.messages_known
    assert given.network == NETWORK_LINK


@pytest.mark.ranks(1)
def test_a_net_that_the_workload_is_not_of_is_refused_before_anything_is_measured(comm: AbstractCommunicator) -> None:
    with pytest.raises(PlanError, match="net='20-17-5' is not what the workload is of"):
        probe(SMALL, comm, net="20-17-5")
    with pytest.raises(PlanError, match="has no hidden layer"):
        probe(SMALL, comm, net="20-17")
