"""Messages of gradient sums: played on whole numbers, every owner ends with the sum of every unit, each part counted once."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Link, Processor
from tatami.errors import PlanError
from tatami.tiling import Layout, Replica, Span, Tiling
from tatami.tiling.gradient_messages import Message, Method, gradient_messages
from tatami.tiling.summing import summing_shares, transfer_rates

METHODS: tuple[Method, ...] = ("direct", "reduce-scatter")


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = draw(st.lists(st.lists(st.integers(1, 9), min_size=1, max_size=4), min_size=1, max_size=5))
    replicas = []
    for index, shares in enumerate(shapes):
        names = tuple(f"p{index}.{row}" for row in range(len(shares)))
        heights = tuple(share / sum(shares) for share in shares)
        replicas.append(Replica(width=1 / len(shapes), processors=names, heights=heights))
    return Layout(replicas=tuple(replicas))


def play(messages: tuple[Message, ...], tilings: tuple[Tiling, ...]) -> dict[tuple[str, int, int], int]:
    """Every owner's value of every (block, unit) after the messages; the owner in replica c begins with 1000 ** c."""
    values = {
        (tile.processor, block, unit): 1000**tile.replica
        for block, tiling in enumerate(tilings)
        for tile in tiling.tiles
        for unit in range(tile.units.start, tile.units.stop)
    }
    for phase in (0, 1):
        before = dict(values)
        for message in messages:
            if message.phase != phase:
                continue
            for block, span in message.spans:
                for unit in range(span.start, span.stop):
                    sent = before[message.source, block, unit]
                    received = (message.dest, block, unit)
                    values[received] = values[received] + sent if phase == 0 else sent
    return values


@pytest.mark.parametrize("method", METHODS)
@given(layout=layouts(), units=st.lists(st.integers(1, 3) | st.integers(1, 40), min_size=1, max_size=3), data=st.data())
def test_every_owner_ends_with_the_sum_of_every_replica_once(
    method: Method, layout: Layout, units: list[int], data: st.DataObject
) -> None:
    tilings = tuple(layout.cut(samples=64, units=count) for count in units)
    part = st.sampled_from([0.0, 0.1, 0.5, 1.0])
    shares = data.draw(st.none() | st.fixed_dictionaries(dict.fromkeys(layout.processors, part)), label="shares")
    messages = gradient_messages(tilings, method=method, shares=shares)
    # In base 1000 every digit counts how often a replica's part came in.
    expected = sum(1000**replica for replica in range(len(layout.replicas)))
    for block, tiling in enumerate(tilings):
        for replica in tiling.replicas:
            # Also where a tile has no unit of a block that others of its replica have.
            owned = [unit for tile in replica for unit in range(tile.units.start, tile.units.stop)]
            assert owned == list(range(units[block]))
        assert all(tiling.by_processor[name].units.size for group in tiling.owned_units for name in group.owners)
    assert set(play(messages, tilings).values()) == {expected}
    edges = [(message.phase, message.source, message.dest) for message in messages]
    assert len(set(edges)) == len(edges)
    assert all(message.spans and all(span.size for _, span in message.spans) for message in messages)
    assert max((message.phase for message in messages), default=0) <= (0 if method == "direct" else 1)


@given(layout=layouts(), units=st.integers(1, 200))
def test_reduce_scatter_carries_no_more_than_the_bandwidth_optimum(layout: Layout, units: int) -> None:
    replicas = len(layout.replicas)
    messages = gradient_messages([layout.cut(samples=8, units=units)], method="reduce-scatter")
    assert sum(span.size for message in messages for _, span in message.spans) == 2 * (replicas - 1) * units
    summed = [0] * replicas
    for message in messages:
        if message.phase == 0:
            summed[int(message.dest[1])] += sum(span.size for _, span in message.spans)
    assert max(summed) - min(summed) <= replicas - 1


@given(shares=st.lists(st.integers(0, 9), min_size=2, max_size=8).filter(any), blocks=st.integers(1, 12))
def test_what_each_sums_comes_to_its_share_over_many_blocks(shares: list[int], blocks: int) -> None:
    """Of six heads in each block, although no owner sums a part of one."""
    names = [f"p{index}" for index in range(len(shares))]
    replicas = tuple(Replica(width=1 / len(names), processors=(name,), heights=(1.0,)) for name in names)
    tilings = [Layout(replicas=replicas).cut(samples=64, units=6)] * blocks
    own = dict(zip(names, map(float, shares), strict=True))
    summed = dict.fromkeys(names, 0.0)
    for message in gradient_messages(tilings, method="reduce-scatter", shares=own):
        if message.phase == 0:
            summed[message.dest] += sum(span.size for _, span in message.spans) / (len(names) - 1)
    for name in names:
        assert summed[name] == pytest.approx(6 * blocks * own[name] / sum(shares), abs=2)
        assert own[name] or not summed[name]


def test_two_replicas_direct() -> None:
    layout = Layout(
        replicas=(
            Replica(width=0.5, processors=("a", "b"), heights=(0.5, 0.5)),
            Replica(width=0.5, processors=("c", "d"), heights=(0.25, 0.75)),
        )
    )
    tilings = (layout.cut(samples=4, units=8), layout.cut(samples=4, units=4))
    assert gradient_messages(tilings, method="direct")[:3] == (
        Message(phase=0, source="a", dest="c", spans=((0, Span(0, 2)), (1, Span(0, 1)))),
        Message(phase=0, source="a", dest="d", spans=((0, Span(2, 4)), (1, Span(1, 2)))),
        Message(phase=0, source="b", dest="d", spans=((0, Span(4, 8)), (1, Span(2, 4)))),
    )


def test_a_tile_without_units_of_a_block_is_sent_nothing_of_it() -> None:
    layout = Layout(
        replicas=(
            Replica(width=0.5, processors=("a", "b", "c"), heights=(0.5, 0.1, 0.4)),
            Replica(width=0.5, processors=("d", "e"), heights=(0.1, 0.9)),
        )
    )
    tilings = (layout.cut(samples=4, units=2), layout.cut(samples=4, units=20))
    assert [tile.units for tile in tilings[0].tiles] == [Span(0, 1), Span(1, 1), Span(1, 2), Span(0, 0), Span(0, 2)]
    messages = gradient_messages(tilings, method="direct")
    spans = {(message.source, message.dest): message.spans for message in messages}
    assert spans["b", "e"] == spans["e", "b"] == ((1, Span(10, 12)),)
    assert spans["a", "d"] == spans["d", "a"] == ((1, Span(0, 2)),)
    assert spans["a", "e"] == spans["e", "a"] == ((0, Span(0, 1)), (1, Span(2, 10)))


def test_one_replica_needs_no_message() -> None:
    layout = Layout(replicas=(Replica(width=1.0, processors=("a", "b"), heights=(0.5, 0.5)),))
    assert gradient_messages([layout.cut(samples=4, units=8)], method="reduce-scatter") == ()


def test_bad_input_is_refused() -> None:
    one = Layout(replicas=(Replica(width=1.0, processors=("a", "b"), heights=(0.5, 0.5)),)).cut(samples=4, units=8)
    other = Layout(replicas=(Replica(width=1.0, processors=("b", "a"), heights=(0.5, 0.5)),)).cut(samples=4, units=8)
    with pytest.raises(PlanError, match="same replicas"):
        gradient_messages([one, other], method="direct")
    with pytest.raises(PlanError, match="at least one tiling"):
        gradient_messages([], method="direct")
    with pytest.raises(PlanError, match="choose direct or reduce-scatter"):
        gradient_messages([one], method="ring")  # type: ignore[arg-type]


LINK = Link(bandwidth_bytes_per_s=100.0, latency_s=0.0)


def cluster_of(*copied: float) -> Cluster:
    processors = (
        Processor(name=f"p{index}", speed=1.0, host=f"h{index}", copy_bytes_per_s=c) for index, c in enumerate(copied)
    )
    return Cluster(processors=tuple(processors), network=LINK)


def test_a_link_and_a_core_carry_what_the_slower_of_them_does() -> None:
    assert transfer_rates(cluster_of(50.0, 200.0, 1e9)) == {"p0": 25.0, "p1": 100.0, "p2": 100.0}


@pytest.mark.parametrize("copied", [(float("inf"),) * 3, (1e9, 400.0, 300.0), (80.0, 96.0, 100.0)])
def test_processors_that_are_alike_sum_equal_parts(copied: tuple[float, ...]) -> None:
    """Where nothing was measured, where links are slower than all cores, and where the difference may be noise."""
    assert transfer_rates(cluster_of(*copied)) is None


def test_two_replicas_send_all_they_have_to_each_other() -> None:
    assert summing_shares([1.0, 1.0], ["p0", "p1"], replicas=2, rates={"p0": 1.0, "p1": 9.0}) is None


def test_one_that_hardly_copies_sums_nothing() -> None:
    """It sends what it has, and receives the sums: 1 of all units; the others, who sum a half each, 1.5 of them."""
    rates = {"p0": 1.0, "p1": 30.0, "p2": 30.0}
    assert summing_shares([1.0] * 3, list(rates), replicas=3, rates=rates) == pytest.approx({"p0": 0.0, "p1": 0.5, "p2": 0.5})


heights = st.lists(st.integers(1, 5), min_size=1, max_size=3).map(lambda own: [each / sum(own) for each in own])


@given(replicas=st.lists(heights, min_size=3, max_size=6), data=st.data())
def test_shares_are_whole_and_no_processor_is_later_than_with_equal_ones(
    replicas: list[list[float]], data: st.DataObject
) -> None:
    own = [height for replica in replicas for height in replica]
    names = [f"p{index}" for index in range(len(own))]
    speed = st.floats(0.01, 100.0)
    rates = {name: data.draw(speed, label=name) for name in names}
    shares = summing_shares(own, names, replicas=len(replicas), rates=rates)
    assert shares is not None
    assert all(0 <= share <= 1 for share in shares.values())
    assert sum(height * shares[name] for name, height in zip(names, own, strict=True)) == pytest.approx(1.0)

    def slowest(of: dict[str, float]) -> float:
        passed = (height * (1 + (len(replicas) - 2) * of[name]) / rates[name] for name, height in zip(names, own, strict=True))
        return max(passed)

    assert slowest(shares) <= slowest(dict.fromkeys(names, 1 / len(replicas))) * (1 + 1e-9)
