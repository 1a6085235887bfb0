"""Spans, tiles, tilings and layouts: whole numbers that cover the floor exactly once."""

import json
from itertools import pairwise, product
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.errors import PlanError
from tatami.tiling import (
    FEW,
    GRAIN,
    Layout,
    OwnedUnits,
    Replica,
    Span,
    Tile,
    Tiling,
    largest_remainder,
    span,
    spans,
    whole_shares,
)
from tatami.workload import Block, Workload

LAYOUT = Layout(
    replicas=(
        Replica(width=0.35, processors=("a", "b", "c"), heights=(0.2, 0.3, 0.5)),
        Replica(width=0.65, processors=("d", "e"), heights=(0.4, 0.6)),
    )
)


@st.composite
def layouts(draw: st.DrawFn) -> Layout:
    shapes = draw(st.lists(st.lists(st.floats(0.01, 9.0), min_size=1, max_size=5), min_size=1, max_size=5))
    replicas = []
    for index, shares in enumerate(shapes):
        names = tuple(f"p{index}.{row}" for row in range(len(shares)))
        width = sum(shares) / sum(map(sum, shapes))
        replicas.append(Replica(width=width, processors=names, heights=tuple(share / sum(shares) for share in shares)))
    return Layout(replicas=tuple(replicas))


def test_spans_meet() -> None:
    assert Span(2, 7) & Span(5, 9) == Span(5, 7)
    assert (Span(2, 4) & Span(5, 9)).size == 0
    assert list(range(10))[Span(2, 4).slice()] == [2, 3]
    assert spans([2, 0, 3]) == (Span(0, 2), Span(2, 2), Span(2, 5))


def test_largest_remainder_by_hand() -> None:
    assert largest_remainder([0.35, 0.65], total=100) == (35, 65)
    assert largest_remainder([1, 1, 1], total=80) == (27, 27, 26)
    assert largest_remainder([0.25, 0.75], total=2) == (1, 1)
    assert largest_remainder([5, 3, 1], total=0) == (0, 0, 0)


@given(shares=st.lists(st.floats(0.001, 1000.0), min_size=1, max_size=20), total=st.integers(0, 10**6))
def test_largest_remainder_sums_up_and_is_less_than_one_off(shares: list[float], total: int) -> None:
    sizes = largest_remainder(shares, total=total)
    assert sum(sizes) == total
    for size, share in zip(sizes, shares, strict=True):
        assert abs(size - total * share / sum(shares)) < 1 + 1e-6


def test_few_units_are_shared_so_that_the_slowest_is_best() -> None:
    assert whole_shares([1.0, 0.5, 0.25], total=6) == (3, 2, 1)
    assert whole_shares([1.0, 1.0, 1.0, 1.0, 0.3], total=5) == (2, 1, 1, 1, 0), "the largest remainder gives one to each"
    assert whole_shares([1.0, 0.01], total=6) == (6, 0)
    assert whole_shares([1.0] * 8, total=6) == (1, 1, 1, 1, 1, 1, 0, 0)
    assert whole_shares([0.0, 1.0, 3.0], total=3) == (0, 1, 2)
    assert whole_shares([1.0, 1.0, 1.0, 1.0, 0.3], total=40) == largest_remainder([1.0, 1.0, 1.0, 1.0, 0.3], total=40)


@given(
    shares=st.lists(st.floats(0.01, 9.0) | st.sampled_from([0.25, 0.5, 1.0]), min_size=1, max_size=4), total=st.integers(0, 12)
)
def test_no_other_sharing_of_few_units_is_faster(shares: list[float], total: int) -> None:
    def slowest(sizes: tuple[int, ...]) -> float:
        return max(size / share for size, share in zip(sizes, shares, strict=True))

    sizes = whole_shares(shares, total=total)
    assert sum(sizes) == total
    assert sizes == whole_shares(list(shares), total=total)
    every = (sizes for sizes in product(range(total + 1), repeat=len(shares)) if sum(sizes) == total)
    if total < FEW * len(shares):
        assert slowest(sizes) <= min(map(slowest, every)) * (1 + 1e-8)


@given(
    replicas=st.lists(
        st.lists(st.floats(0.01, 9.0) | st.sampled_from([0.0, 0.25, 0.5]), max_size=30).map(lambda shares: [*shares, 1.0]),
        min_size=1,
        max_size=8,
    ),
    total=st.integers(0, 60) | st.integers(0, 5000),
)
def test_replicas_are_cut_together_as_one_by_one(replicas: list[list[float]], total: int) -> None:
    with mock.patch.object(span, "_MANY", 0):
        assert span.whole_shares_of(replicas, total=total) == [whole_shares(shares, total=total) for shares in replicas]


@pytest.mark.parametrize("shares", [[], [0.0, 0.0], [1.0, -1.0], [float("nan")], [float("inf"), 1.0]])
def test_shares_that_cannot_be_are_refused(shares: list[float]) -> None:
    with pytest.raises(PlanError, match="shares must be finite numbers >= 0"):
        largest_remainder(shares, total=10)


def test_a_layout_is_cut_to_whole_samples_and_units() -> None:
    tiling = LAYOUT.cut(samples=20, units=10)
    assert tiling.by_processor["c"] == Tile(processor="c", replica=0, samples=Span(0, 7), units=Span(5, 10))
    assert tiling.by_processor["d"] == Tile(processor="d", replica=1, samples=Span(7, 20), units=Span(0, 4))
    assert tiling.by_processor["d"].area == 52
    assert [[tile.processor for tile in replica] for replica in tiling.replicas] == [["a", "b", "c"], ["d", "e"]]


def test_every_unit_has_one_owner_in_every_replica() -> None:
    assert LAYOUT.cut(samples=20, units=10).owned_units == (
        OwnedUnits(units=Span(0, 2), owners=("a", "d")),
        OwnedUnits(units=Span(2, 4), owners=("b", "d")),
        OwnedUnits(units=Span(4, 5), owners=("b", "e")),
        OwnedUnits(units=Span(5, 10), owners=("c", "e")),
    )


@given(layout=layouts(), samples=st.integers(1, 500), units=st.integers(1, 500))
def test_tilings_cover_the_floor_once_and_survive_json(layout: Layout, samples: int, units: int) -> None:
    tiling = layout.cut(samples=samples, units=units)
    assert sum(tile.area for tile in tiling.tiles) == samples * units
    assert Tiling.from_json(tiling.to_json()) == tiling
    assert Tiling.from_json(tiling.to_json().replace('"replica"', '"column"')) == tiling  # files of before
    position = 0
    for group in tiling.owned_units:
        assert group.units.start == position
        position = group.units.stop
        for replica, owner in enumerate(group.owners):
            tile = tiling.by_processor[owner]
            assert tile.replica == replica
            assert tile.units & group.units == group.units
    assert position == units


@given(layout=layouts(), micro_batches=st.integers(1, 9))
def test_layouts_survive_json(layout: Layout, micro_batches: int) -> None:
    layout = Layout(replicas=(layout.replicas[0].in_micro_batches(micro_batches), *layout.replicas[1:]))
    assert Layout.from_json(layout.to_json()) == layout
    assert Layout.from_json(layout.to_json().replace('"replicas"', '"columns"')) == layout  # files of before
    raw = layout.to_dict()
    for replica in raw["replicas"]:
        del replica["micro_batches"]  # as before there were any
    assert [replica.micro_batches for replica in Layout.from_dict(raw).replicas] == [1] * len(layout.replicas)


@pytest.mark.parametrize(
    ("micro_batches", "samples", "sizes"),
    [(1, 7, (7,)), (3, 7, (3, 2, 2)), (3, 6, (2, 2, 2)), (9, 4, (1, 1, 1, 1)), (2, 0, (0,))],
)
def test_micro_batches_are_as_equal_as_possible(micro_batches: int, samples: int, sizes: tuple[int, ...]) -> None:
    replica = Replica(width=1.0, processors=("a",), heights=(1.0,), micro_batches=micro_batches)
    assert replica.micro_batch_sizes(samples) == sizes
    with pytest.raises(PlanError, match=r"micro_batches of replica .* must be at least 1, not 0"):
        replica.in_micro_batches(0)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"samples": 1, "units": 1, "tiles": [{}]}',
        '{"replicas": [{"width": 1}]}',
        '{"replicas": [{"width": "x"}], "samples": "x", "tiles": []}',
    ],
)
def test_what_is_not_the_json_is_refused(text: str) -> None:
    with pytest.raises(PlanError, match="not the JSON of a tiling"):
        Tiling.from_json(text)
    with pytest.raises(PlanError, match="not the JSON of a layout"):
        Layout.from_json(text)


def test_json_of_a_tiling_with_a_hole_is_refused() -> None:
    raw = LAYOUT.cut(samples=20, units=10).to_dict()
    raw["tiles"][1]["units"] = [3, 5]
    with pytest.raises(PlanError, match=r"units of replica 0 must cover 0\.\.10 exactly once"):
        Tiling.from_json(json.dumps(raw))


def tile(name: str, replica: int, samples: tuple[int, int], units: tuple[int, int]) -> Tile:
    return Tile(processor=name, replica=replica, samples=Span(*samples), units=Span(*units))


@pytest.mark.parametrize(
    ("tiles", "match"),
    [
        ((), "0 tiles"),
        ((tile("a", 0, (0, 4), (0, 4)),), "end at 4, not at 6"),
        ((tile("a", 0, (0, 4), (0, 6)), tile("a", 1, (4, 8), (0, 6))), "a has two tiles"),
        ((tile("a", 0, (0, 4), (0, 6)), tile("b", 2, (4, 8), (0, 6))), "without a gap"),
        ((tile("a", -1, (0, 8), (0, 6)),), "without a gap"),
        ((tile("a", 0, (0, 8), (0, 3)), tile("b", 0, (0, 7), (3, 6))), "different samples"),
        ((tile("a", 0, (0, 8), (0, 4)), tile("b", 0, (0, 8), (3, 6))), "exactly once"),
        ((tile("a", 0, (0, 4), (0, 6)), tile("b", 1, (5, 8), (0, 6))), "samples of the replicas"),
    ],
)
def test_tiles_that_do_not_cover_the_floor_are_refused(tiles: tuple[Tile, ...], match: str) -> None:
    with pytest.raises(PlanError, match=match):
        Tiling(samples=8, units=6, tiles=tiles)


def test_layouts_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="one height for each processor"):
        Replica(width=1.0, processors=("a", "b"), heights=(1.0,))
    with pytest.raises(PlanError, match=r"sum to 0\.9"):
        Replica(width=1.0, processors=("a", "b"), heights=(0.5, 0.4))
    with pytest.raises(PlanError, match="share of a must be a finite number >= 0"):
        Replica(width=1.0, processors=("a", "b"), heights=(-0.5, 1.5))
    with pytest.raises(PlanError, match=r"widths of the replicas sum to 0\.5"):
        Layout(replicas=(Replica(width=0.5, processors=("a",), heights=(1.0,)),))
    with pytest.raises(PlanError, match="a lies twice"):
        Layout(replicas=(Replica(width=0.5, processors=("a",), heights=(1.0,)),) * 2)


def test_who_comes_out_empty() -> None:
    layout = Layout(
        replicas=(
            Replica(width=0.001, processors=("a",), heights=(1.0,)),
            Replica(width=0.999, processors=("b", "c"), heights=(0.01, 0.99)),
        )
    )
    assert layout.empty(Workload.mlp(3, 10, 2, samples=10)) == {"a", "b"}
    assert layout.empty(Workload.mlp(3, 1000, 2, samples=1000)) == frozenset()


def test_only_who_has_no_unit_of_any_block_is_empty() -> None:
    replica = Replica(width=1.0, processors=("a", "b", "c"), heights=(0.6, 0.39, 0.01))
    layout = Layout(replicas=(replica,))
    heads = Block(units=4, unit_parameters=8, forward_elements=4, flop_per_unit=100.0)
    units = Block(units=300, unit_parameters=2, forward_elements=4, flop_per_unit=1.0)
    assert layout.empty(Workload(samples=9, blocks=(heads,))) == {"c"}
    assert layout.empty(Workload(samples=9, blocks=(heads, units, heads))) == frozenset()
    assert layout.empty(Workload(samples=9)) == {"b", "c"}, "without blocks a replica has work for one"
    first, second, third = layout.cut_blocks(Workload(samples=9, blocks=(heads, units, heads)))
    assert (first.by_processor["c"].units.size, second.by_processor["c"].units.size) == (0, 3)
    assert first is third, "cut once for all blocks of as many units"


def test_without_blocks_there_is_one_unit() -> None:
    layout = Layout(replicas=tuple(Replica(width=0.5, processors=(name,), heights=(1.0,)) for name in "ab"))
    workload = Workload(samples=10, replicated_parameters=7)
    assert layout.cut_blocks(workload) == ()
    tiling = layout.cut(samples=workload.samples, units=workload.units)
    assert [(tile.samples.size, tile.units.size) for tile in tiling.tiles] == [(5, 1), (5, 1)]
    assert layout.empty(workload) == frozenset()


def test_units_of_large_tiles_are_cut_at_multiples_of_eight() -> None:
    replica = Replica(width=1.0, processors=("a", "b"), heights=(0.4436, 0.5564))
    assert replica.unit_spans(800) == (Span(0, 352), Span(352, 800))
    assert replica.unit_spans(803) == (Span(0, 360), Span(360, 803)), "what is not a multiple is the last one's"
    assert replica.unit_spans(80) == (Span(0, 35), Span(35, 80)), "small tiles are cut to the unit"
    assert Replica(width=1.0, processors=("a",), heights=(1.0,)).unit_spans(803) == (Span(0, 803),)


@given(st.lists(st.floats(min_value=0.01, max_value=1.0), min_size=1, max_size=6), st.integers(1, 5000))
def test_unit_spans_cover_all_units_and_are_less_than_a_grain_off(shares: list[float], units: int) -> None:
    scale = sum(shares)
    replica = Replica(
        width=1.0, processors=tuple(f"p{i}" for i in range(len(shares))), heights=tuple(s / scale for s in shares)
    )
    cut = replica.unit_spans(units)
    assert cut[0].start == 0
    assert cut[-1].stop == units
    assert all(before.stop == after.start for before, after in pairwise(cut))
    off = [abs(span.size - units * height) for span, height in zip(cut, replica.heights, strict=True)]
    if min(span.size for span in cut) >= 72:
        assert all(span.start % GRAIN == 0 for span in cut)
        assert max(off) <= GRAIN
    else:
        assert max(off) <= (1 if any(span.start % GRAIN for span in cut) else GRAIN)


@given(st.lists(st.integers(9, 40), min_size=2, max_size=5), st.integers(1, 40))
def test_cuts_that_are_level_stay_level(grains: list[int], more: int) -> None:
    """Two replicas cut at the same height, one of them more often, exchange whole tiles and no slivers."""
    total = sum(grains) + 8 + more
    heights = [each / total for each in grains]
    coarse = Replica(width=0.5, processors=("a", "b"), heights=(sum(heights), 1 - sum(heights)))
    names = tuple(f"p{i}" for i in range(len(heights) + 1))
    fine = Replica(width=0.5, processors=names, heights=(*heights, 1 - sum(heights)))
    for units in (8 * total, 8 * total + 3):
        assert coarse.unit_spans(units)[1].start in {span.start for span in fine.unit_spans(units)}
