"""Memory: what plans keep, that none keeps more than there is, and what the error says where nothing fits."""

import math
import random
import re
import warnings
from dataclasses import replace
from typing import Any

import pytest

from tatami.cluster import Cluster, Processor
from tatami.errors import ClusterError, InputError, MemoryLackError, PlanError
from tatami.tiling import PLANNERS, Layout, Replica, compare, plan
from tatami.tiling.memory import lacking_bytes, memory_bytes, squeezed
from tatami.tiling.summing import transfer_rates
from tatami.tiling.traffic import gradient_sums
from tatami.workload import Block, Workload, gpt_workload

pytestmark = pytest.mark.filterwarnings("ignore:.*is predicted to take", "ignore:.*leaves out")

MIB = 1024**2
HEADS = Block(
    units=6,
    unit_parameters=1000,
    forward_elements=8,
    backward_elements=8,
    flop_per_unit=1e5,
    unit_activation_bytes=100.0,
    sample_activation_bytes=50.0,
)
HIDDEN = Block(
    units=800, unit_parameters=20, forward_elements=8, backward_elements=8, flop_per_unit=2e3, unit_activation_bytes=2.0
)
WORKLOAD = Workload(
    samples=100,
    blocks=(HEADS, HIDDEN) * 3,
    replicated_parameters=500,
    replicated_flop_per_sample=1000,
    replicated_activation_bytes=10.0,
)
REPLICATED = Workload(samples=100, replicated_parameters=10, replicated_activation_bytes=1000.0, replicated_flop_per_sample=10)
GPT = gpt_workload(layers=4, width=192, heads=6, tokens=64, samples=32, vocabulary=1000)


def cluster_of(speeds: list[float], memories: list[int | None]) -> Cluster:
    return Cluster(
        processors=tuple(
            Processor(name=f"p{index}", speed=speed, memory_bytes=memory)
            for index, (speed, memory) in enumerate(zip(speeds, memories, strict=True))
        )
    )


def test_memory_is_a_text_with_its_unit() -> None:
    processor = Processor(name="p", speed=1.0, memory="8 GiB")
    assert processor == Processor(name="p", speed=1.0, memory_bytes=8 * 1024**3)
    assert replace(processor, speed=2.0).memory_bytes == 8 * 1024**3
    with pytest.raises(ClusterError, match="'p' is given memory twice: '8 GiB' and 5 bytes"):
        Processor(name="p", speed=1.0, memory="8 GiB", memory_bytes=5)
    with pytest.raises(ClusterError, match="the memory of processor 'p' must be > 0 bytes, not 0"):
        Processor(name="p", speed=1.0, memory="0 GiB")
    with pytest.raises(InputError, match="8 apples"):
        Processor(name="p", speed=1.0, memory="8 apples")


def test_what_is_kept_by_hand() -> None:
    """p1 has none of the six heads, p2 no work at all."""
    layout = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1", "p2"), heights=(0.95, 0.05, 0.0)),))
    kept = memory_bytes(layout, workload=WORKLOAD)
    repeated = 500 * 20 + 100 * 10
    assert kept == {
        "p0": repeated + 3 * (6 * (1000 * 20 + 100 * 100) + 100 * 50) + 3 * 760 * (20 * 20 + 100 * 2),
        "p1": repeated + 3 * 40 * (20 * 20 + 100 * 2),
        "p2": 0.0,
    }
    plain = replace(WORKLOAD, state_bytes_per_parameter=8.0)
    assert memory_bytes(layout, workload=plain)["p1"] == 500 * 8 + 100 * 10 + 3 * 40 * (20 * 8 + 100 * 2)
    cluster = cluster_of([1.0] * 3, [500_000, None, 1])
    assert lacking_bytes(layout, cluster=cluster, workload=WORKLOAD) == {"p0": kept["p0"] - 500_000}


def test_of_several_micro_batches_the_activations_of_one_are_in_memory() -> None:
    replica = Replica(width=1.0, processors=("p0",), heights=(1.0,))
    for micro_batches, samples in ((1, 100), (3, 34), (100, 1), (101, 1)):
        kept = memory_bytes(Layout(replicas=(replica.in_micro_batches(micro_batches),)), workload=WORKLOAD)["p0"]
        state_bytes = 20 * (500 + 3 * (6 * 1000 + 800 * 20))
        assert kept == state_bytes + samples * (10 + 3 * (6 * 100 + 50 + 800 * 2))
    workload = replace(REPLICATED, samples=40)
    layout = Layout(replicas=(replica.in_micro_batches(4),))
    found = squeezed(layout, cluster=cluster_of([1.0], [200 + 10_000]), workload=workload)
    assert found is not None
    assert found.replicas == layout.replicas
    assert squeezed(layout, cluster=cluster_of([1.0], [200 + 9_999]), workload=workload) is None


def test_gradients_come_as_activations_go() -> None:
    """In one micro-batch; of several, gradients of those before are there all along. Adam's work space comes after both."""
    layout = Layout(replicas=(Replica(width=1.0, processors=("p0",), heights=(1.0,)),))
    gradient_bytes, kept_bytes = 4 * (500 + 3 * (6 * 1000 + 800 * 20)), 100 * (10 + 3 * (6 * 100 + 50 + 800 * 2))
    lasting_bytes = 4 * gradient_bytes
    for kept, there in ((1.0, 0.5), (0.25, 1.0), (1.5, 0.0)):
        workload = replace(WORKLOAD, backward_moments=((kept, there),))
        assert memory_bytes(layout, workload=workload)["p0"] == lasting_bytes + kept * kept_bytes + there * gradient_bytes
        parts = layout.in_micro_batches(2)
        assert memory_bytes(parts, workload=workload)["p0"] == lasting_bytes + kept * kept_bytes / 2 + gradient_bytes
    workload = replace(WORKLOAD, backward_moments=((0.0, 1.0),), update_bytes_per_parameter=8.0, largest_parameters=400)
    assert memory_bytes(layout, workload=workload)["p0"] == lasting_bytes + gradient_bytes + 3200


@pytest.mark.parametrize("moments", [((1.0, 0.0), (0.0, 1.0)), ((1.25, 0.25), (0.5, 1.0)), ((1.0, 1.0),)])
def test_shares_within_memory_know_when_gradients_come(moments: tuple[tuple[float, float], ...]) -> None:
    workload = replace(WORKLOAD, backward_moments=moments)
    layout = even_layout(("p0", "p1"), ("p2", "p3"))
    kept = memory_bytes(layout, workload=workload)
    fits = cluster_of([1.0] * 4, [math.ceil(kept[f"p{rank}"] * 0.9) if rank == 0 else None for rank in range(4)])
    found = squeezed(layout, cluster=fits, workload=workload)
    assert found is not None
    given = fits.processors[0].memory_bytes
    assert given is not None
    assert 0.9 * given < memory_bytes(found, workload=workload, cluster=fits)["p0"] <= given


def even_layout(*replicas: tuple[str, ...]) -> Layout:
    width = 1 / len(replicas)
    return Layout(
        replicas=tuple(Replica(width=width, processors=names, heights=(1 / len(names),) * len(names)) for names in replicas)
    )


def test_messages_between_replicas_take_memory() -> None:
    """Of gradients in a vector and what comes; or of units: where they lie, what goes out, and what comes in two phases."""
    own_bytes = 4 * 20 * 800
    workload = replace(WORKLOAD, blocks=(HIDDEN,), replicated_parameters=0)

    def more(*replicas: tuple[str, ...], **facts: Any) -> float:
        samples, units = 100 // len(replicas), 800 // len(replicas[0])
        kept = memory_bytes(even_layout(*replicas), workload=replace(workload, **facts))["p0"]
        return kept - units * 400 - samples * (units * 2 + 10)

    assert more(("p0", "p1")) == 0
    assert more(("p0",), ("p1",)) == 2 * own_bytes
    assert more(("p0",), ("p1",), ("p2",), ("p3",)) == 1.75 * own_bytes
    assert more(("p0",), ("p1",), wire="bfloat16") == 2 * own_bytes
    assert more(("p0", "p1"), ("p2", "p3")) == 3 * own_bytes / 2
    assert more(("p0", "p1"), ("p2", "p3"), wire="bfloat16") == 2 * own_bytes / 2
    four = more(("p0", "p1"), ("p2", "p3"), ("p4", "p5"), ("p6", "p7"))
    assert four == (3 * 400 + 2 * 2 * 101) * 80  # of 400 units it sums 101 at the most


def carried_bytes(layout: Layout, *, workload: Workload, cluster: Cluster) -> dict[str, float]:
    """What each processor packs and unpacks of an iteration's messages, message by message, and where all its units lie."""
    tilings = layout.cut_blocks(workload)
    elements = [block.unit_parameters for block in workload.blocks]
    hosts = {each.name: each.name for each in cluster.processors}
    common = {"riders": 0, "element_bytes": 4, "wire": None, "names": list(hosts), "hosts": hosts}
    carried = dict.fromkeys(hosts, 0.0)
    for tiling, each in zip(tilings, elements, strict=True):
        for tile in tiling.tiles:
            carried[tile.processor] += 4 * tile.units.size * each
    sums = gradient_sums(tilings, unit_elements=elements, rates=transfer_rates(cluster), **common)  # type: ignore[arg-type]
    packed = set()
    for message in (message for each in sums for message in each.messages):
        size = 4 * sum(span.size * elements[block] for block, span in message.spans)
        carried[message.dest] += size
        if (message.phase, message.source, message.spans) not in packed:  # what goes to several is packed once
            packed.add((message.phase, message.source, message.spans))
            carried[message.source] += size
    return carried


@pytest.mark.parametrize("alike", [True, False])
def test_what_is_counted_for_messages_is_what_they_take_or_a_little_more(alike: bool) -> None:
    """Random layouts in up to five replicas, of hosts that are alike or of which some copy at a tenth of the pace of others."""
    chance = random.Random(2)
    counted = taken = 0.0
    for _ in range(150):
        names = iter([f"p{number}" for number in range(40)])
        replicas = []
        for _ in range(chance.randint(2, 5)):
            count = chance.randint(2, 5)
            parts = [chance.uniform(0.1, 1.0) for _ in range(count)]
            own = tuple(next(names) for _ in range(count))
            replicas.append(
                Replica(width=chance.uniform(0.3, 1.0), processors=own, heights=tuple(p / sum(parts) for p in parts))
            )
        whole = sum(replica.width for replica in replicas)
        layout = Layout(replicas=tuple(replace(replica, width=replica.width / whole) for replica in replicas))
        paces = {name: 1e9 if alike else chance.choice([1e7, 3e7, 1e8]) for name in layout.processors}
        cluster = Cluster(processors=tuple(Processor(name=n, speed=1.0, copy_bytes_per_s=p) for n, p in paces.items()))
        heads, hidden = replace(HEADS, units=chance.randint(3, 30)), replace(HIDDEN, units=chance.randint(40, 800))
        workload = Workload(samples=100, blocks=(heads, hidden) * chance.randint(1, 3))
        carried = carried_bytes(layout, workload=workload, cluster=cluster)
        kept = memory_bytes(layout, workload=workload, cluster=cluster)
        for replica, samples in zip(layout.replicas, layout.sample_sizes(100), strict=True):
            for index, name in enumerate(replica.processors):
                told = kept[name]
                for block in workload.blocks:
                    size = replica.unit_sizes(block.units)[index]
                    bytes_ = size * (workload.unit_state_bytes(block) + samples * block.unit_activation_bytes)
                    told -= bytes_ + samples * block.sample_activation_bytes * (size > 0)
                assert carried[name] <= told + 1e-6
                counted, taken = counted + told, taken + carried[name]
    assert taken > (0.75 if alike else 0.6) * counted


@pytest.mark.parametrize("name", list(PLANNERS))
def test_memory_that_suffices_changes_nothing(name: str) -> None:
    speeds = [1.0, 0.5, 0.31, 0.9, 0.25]
    free = plan(name, cluster=cluster_of(speeds, [None] * 5), workload=WORKLOAD)
    rich = plan(name, cluster=cluster_of(speeds, [10**9] * 5), workload=WORKLOAD)
    assert rich == free
    assert rich.memory_bytes == memory_bytes(rich.layout, workload=WORKLOAD)


def a_capped_cluster(chance: random.Random, workload: Workload) -> Cluster:
    """Of up to eight processors; some of them hold the whole network and a sample, most do not."""
    alone = Layout(replicas=(Replica(width=1.0, processors=("p",), heights=(1.0,)),))
    whole = memory_bytes(alone, workload=workload.with_samples(1))["p"]
    size = chance.randint(1, 8)
    memories = [round(whole * chance.uniform(0.05, 1.2)) if chance.random() < 0.8 else None for _ in range(size)]
    return cluster_of([chance.uniform(0.1, 1.0) for _ in range(size)], memories)


def test_of_a_hundred_random_clusters_no_plan_exceeds_a_cap() -> None:
    chance = random.Random(1)
    laid = lacking = 0
    for number in range(100):
        workload = (WORKLOAD, GPT, Workload.mlp(50, 300, 20, samples=500))[number % 3]
        cluster = a_capped_cluster(chance, workload)
        name = ("timed", "timed", "srpm", "srpm-merged", "weighted", "even", "grid-rev")[number % 7]
        error = None
        try:
            result = plan(name, cluster=cluster, workload=workload)
        except MemoryLackError as caught:
            error = caught
        if error is not None:
            lacking += 1
            assert min(error.lacking_bytes.values()) > 0
            continue
        laid += 1
        kept = memory_bytes(result.layout, workload=workload, cluster=cluster.only(result.layout.processors))
        assert kept == result.memory_bytes
        for processor in cluster.processors:
            assert kept.get(processor.name, 0.0) <= (processor.memory_bytes or float("inf"))
        for tiling in result.tilings():
            assert sum(tile.area for tile in tiling.tiles) == tiling.samples * tiling.units
        assert result.layout.empty(workload) == frozenset()
    assert laid > 60
    assert lacking > 5


def test_who_has_little_memory_gets_less_and_the_others_share_the_rest_by_speed() -> None:
    layout = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1", "p2"), heights=(1 / 3, 1 / 3, 1 / 3)),))
    workload = Workload(samples=10, blocks=(replace(HIDDEN, unit_activation_bytes=0.0),))
    cluster = cluster_of([1.0, 1.0, 2.0], [100 * 400, None, None])
    found = squeezed(layout, cluster=cluster, workload=workload)
    assert found is not None
    assert found.replicas[0].unit_sizes(800) == pytest.approx((100, 233, 467), abs=8)
    assert found.replicas[0].unit_sizes(800)[0] <= 100


def test_a_replica_that_holds_fewer_samples_is_narrower() -> None:
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(name,), heights=(1.0,)) for name in ("p0", "p1")))
    workload = Workload(
        samples=100, replicated_parameters=10, replicated_activation_bytes=1000.0, replicated_flop_per_sample=10
    )
    cluster = cluster_of([1.0, 1.0], [280 + 20_500, None])
    found = squeezed(layout, cluster=cluster, workload=workload)
    assert found is not None
    assert found.sample_sizes(100) == (20, 80)
    assert squeezed(layout, cluster=cluster_of([1.0, 1.0], [280 + 20_500, 280 + 70_000]), workload=workload) is None


def test_a_gpt_that_no_processor_holds_is_laid_over_four() -> None:
    workload = GPT.with_samples(8)
    alone = Layout(replicas=(Replica(width=1.0, processors=("p",), heights=(1.0,)),))
    one_sample = memory_bytes(alone, workload=GPT.with_samples(1))["p"]
    cluster = cluster_of([1.0, 1.0, 0.5, 0.5], [round(0.9 * one_sample)] * 4)
    with pytest.raises(MemoryLackError, match="with one sample at a time, recomputing all activations: p0 lacks"):
        plan("weighted", cluster=cluster, workload=workload)
    with pytest.warns(UserWarning, match="weighted finds no room"):
        plans = {each.planner: each for each in compare(cluster=cluster, workload=workload)}
    assert "timed" in plans
    assert "weighted" not in plans
    assert max(plans["timed"].memory_bytes.values()) <= 0.9 * one_sample
    assert max(len(replica.processors) for replica in plans["timed"].layout.replicas) > 1


def test_the_error_says_who_lacks_how_much_and_what_would_do() -> None:
    """Three processors of which each has room for ten samples of 1,000 bytes beside the weights, all of them at a time."""
    workload = replace(REPLICATED.with_samples(40), batch_statistics=(8,))
    cluster = cluster_of([1.0, 1.0, 1.0], [280 + 10_000] * 3)
    with pytest.raises(MemoryLackError) as caught:
        plan(cluster=cluster, workload=workload)
    told = str(caught.value)
    assert told.startswith("there is no room for 40 samples of this network: p0 lacks ")
    assert set(caught.value.lacking_bytes) == {"p0", "p1", "p2"}
    assert caught.value.lacking_bytes["p0"] == pytest.approx(14_200 + 40 * 5 / 3 - 10_280)
    assert re.search(r"p0 lacks 3\.89 KiB \(it would keep 13\.9 KiB in 10 KiB\)", told)
    assert told.endswith(
        '. It would hold 30 samples; all would fit in micro-batches with batch_norm="local" (each takes its own statistics, as '
        "in DDP: not exact); all 40 samples would fit with 1 MiB of memory on p0 alone; all 40 samples would fit with 1 more "
        "machine like p0"
    )
    assert plan(cluster=cluster, workload=replace(workload, batch_statistics=())).left_out == ()
    assert plan(cluster=cluster, workload=workload.with_samples(30)).left_out == ()
    with pytest.raises(MemoryLackError):
        plan(cluster=cluster, workload=workload.with_samples(31))
    assert plan(cluster=cluster_of([1.0] * 4, [280 + 10_000] * 4), workload=workload).left_out == ()


def test_what_does_not_fit_at_a_time_is_computed_in_micro_batches_and_no_machines_are_asked_for() -> None:
    workload = REPLICATED.with_samples(40)
    cluster = cluster_of([1.0, 2.0, 1.0], [280 + 10_000] * 3)
    for name in ("timed", "weighted", "even"):
        layout = plan(name, cluster=cluster, workload=workload).layout
        replicas = zip(layout.replicas, layout.sample_sizes(40), strict=True)
        laid = {replica.processors: (samples, replica.micro_batches) for replica, samples in replicas}
        expected = ((14, 2), (13, 2), (13, 2)) if name == "even" else ((10, 1), (20, 2), (10, 1))
        assert laid == dict(zip((("p0",), ("p1",), ("p2",)), expected, strict=True))
    forced = plan(cluster=cluster, workload=workload, micro_batches=5)
    assert [replica.micro_batches for replica in forced.layout.replicas] == [5, 5, 5]
    with pytest.raises(MemoryLackError, match=r"for 40 samples of this network: p1 .*\. It fits in more micro-batches: leave"):
        plan(cluster=cluster, workload=workload, micro_batches=1)
    with pytest.raises(PlanError, match=r"cannot be computed in 2 micro-batches: it has 1 layers \(batch normalization\)"):
        plan(cluster=cluster, workload=replace(workload, batch_statistics=(8,)), micro_batches=2)


def test_a_smaller_state_is_a_remedy_where_that_is_what_does_not_fit() -> None:
    state_bytes = 20 * (500 + 3 * (6 * 1000 + 800 * 20))
    cluster = cluster_of([1.0], [round(0.7 * state_bytes)])
    with pytest.raises(
        MemoryLackError, match=r"one sample at a time: .* fit with an optimizer without moments, such as plain SGD"
    ):
        plan(cluster=cluster, workload=WORKLOAD)
    assert plan(cluster=cluster, workload=replace(WORKLOAD, state_bytes_per_parameter=12.0)).left_out == ()


def test_who_cannot_hold_what_all_repeat_is_left_out_by_name() -> None:
    workload = replace(WORKLOAD, replicated_parameters=10**6)
    cluster = cluster_of([1.0, 1.0, 3.0], [10**9, None, 15 * 10**6])
    with pytest.warns(UserWarning, match=r"timed leaves out p2: not enough memory for what every processor repeats, 19\.1 MiB"):
        result = plan(cluster=cluster, workload=workload)
    assert result.left_out == ("p2",)
    assert set(result.memory_bytes) == {"p0", "p1"}
    tiny = cluster_of([1.0, 1.0], [10**6, 2 * 10**6])
    with pytest.raises(
        MemoryLackError,
        match=r"whatever it computes, and the largest, p1, has 1\.91 MiB\. All 100 samples would fit with 21 MiB",
    ):
        plan(cluster=tiny, workload=workload)


def test_nothing_is_said_where_all_is_well() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan(cluster=cluster_of([1.0, 0.5], [10**9, 10**9]), workload=WORKLOAD)
