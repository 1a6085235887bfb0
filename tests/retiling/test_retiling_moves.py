"""What moves between two tilings: everybody ends with exactly its units, nobody receives what it has."""

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from counting import calls_of
from tatami.errors import PlanError
from tatami.retiling import Move, moves
from tatami.tiling import Layout, Replica, Span, Tiling

SAMPLES = 64


def layout_of(replicas: list[list[str]], weights: dict[str, float]) -> Layout:
    """Replicas of equal width, heights by weight."""
    return Layout(
        replicas=tuple(
            Replica(
                width=1 / len(replicas),
                processors=tuple(names),
                heights=tuple(weights[name] / sum(weights[other] for other in names) for name in names),
            )
            for names in replicas
        )
    )


@st.composite
def tilings(draw: st.DrawFn, *, units: int) -> Tiling:
    """Some of eight processors in some replicas, at any heights (empty tiles among them)."""
    names = draw(st.lists(st.sampled_from([f"p{i}" for i in range(8)]), min_size=1, max_size=8, unique=True))
    cuts = sorted(draw(st.sets(st.integers(1, len(names) - 1), max_size=3))) if len(names) > 1 else []
    replicas = [names[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(names)], strict=True)]
    weights = {name: draw(st.floats(0.01, 1.0)) for name in names}
    return layout_of(replicas, weights).cut(samples=SAMPLES, units=units)


def held(tiling: Tiling) -> dict[str, set[int]]:
    return {tile.processor: set(range(tile.units.start, tile.units.stop)) for tile in tiling.tiles}


@given(data=st.data(), units=st.integers(1, 40))
def test_after_the_moves_everybody_holds_exactly_its_units(data: st.DataObject, units: int) -> None:
    old, new = data.draw(tilings(units=units)), data.draw(tilings(units=units))
    before, wanted = held(old), held(new)
    received: dict[str, list[int]] = {name: [] for name in wanted}
    for move in moves(old, new):
        rows = set(range(move.units.start, move.units.stop))
        assert rows, move
        assert rows <= before[move.source], "the source has what it sends"
        assert not rows & before.get(move.dest, set()), "nobody receives what it has"
        received[move.dest] += sorted(rows)
    for name, rows in wanted.items():
        assert sorted(received[name] + list(before.get(name, set()) & rows)) == sorted(rows), "each row exactly once"


@given(data=st.data(), units=st.integers(1, 40))
def test_moves_between_the_same_two_are_merged(data: st.DataObject, units: int) -> None:
    old, new = data.draw(tilings(units=units)), data.draw(tilings(units=units))
    listed = moves(old, new)
    ends = {(move.source, move.dest, move.units.stop) for move in listed}
    assert not [move for move in listed if (move.source, move.dest, move.units.start) in ends]


@given(data=st.data(), units=st.integers(8, 40))
def test_a_replica_remapping_moves_units_inside_the_replicas_only(data: st.DataObject, units: int) -> None:
    replicas = [["a", "b", "c"], ["d", "e"], ["f"]]
    weights = [{name: data.draw(st.floats(0.05, 1.0)) for name in "abcdef"} for _ in range(2)]
    old, new = (layout_of(replicas, by).cut(samples=SAMPLES, units=units) for by in weights)
    for move in moves(old, new):
        assert old.by_processor[move.source].replica == new.by_processor[move.dest].replica


def test_a_small_cut_moves_between_tensor_parallel_neighbours_by_hand() -> None:
    replicas = [["a", "b", "c"]]
    old = layout_of(replicas, {"a": 4, "b": 4, "c": 4}).cut(samples=SAMPLES, units=12)
    new = layout_of(replicas, {"a": 6, "b": 4, "c": 2}).cut(samples=SAMPLES, units=12)
    assert moves(old, new) == (Move(source="b", dest="a", units=Span(4, 6)), Move(source="c", dest="b", units=Span(8, 10)))


def test_a_newcomer_takes_its_units_from_everybody_alike() -> None:
    names = ["a", "b", "c", "d"]
    old = layout_of([[name] for name in names], dict.fromkeys(names, 1.0)).cut(samples=SAMPLES, units=40)
    new = layout_of([[name] for name in [*names, "e"]], dict.fromkeys([*names, "e"], 1.0)).cut(samples=SAMPLES, units=40)
    sent: Counter[str] = Counter()
    for move in moves(old, new):
        assert move.dest == "e"
        sent[move.source] += move.units.size
    assert sent == Counter(a=10, b=10, c=10, d=10)


def test_tilings_of_different_networks_have_no_moves() -> None:
    layout = layout_of([["a", "b"]], {"a": 1, "b": 1})
    with pytest.raises(PlanError, match="10 units to one of 12"):
        moves(layout.cut(samples=SAMPLES, units=10), layout.cut(samples=SAMPLES, units=12))


@pytest.mark.parametrize("newcomers", [0, 500])
def test_the_work_for_a_thousand_processors_is_a_few_hundred_calls_each(newcomers: int) -> None:
    names = [f"p{i}" for i in range(1000)]
    early = names[newcomers:]

    def cut(replicas: list[list[str]], *, lean: int) -> Tiling:
        weights = {name: 1.0 + (index * lean) % 7 for index, name in enumerate(names)}
        return layout_of(replicas, weights).cut(samples=4096, units=4096)

    old = cut([early[i : i + 25] for i in range(0, len(early), 25)], lean=3)
    new = cut([names[i : i + 40] for i in range(0, 1000, 40)], lean=5)
    assert calls_of(lambda: moves(old, new)) < 500 * len(names)  # 300 where all are new; 0.13 s
    listed = moves(old, new)
    assert sum(move.units.size for move in listed) > 0
    if newcomers:
        assert {move.dest for move in listed} >= set(names[:newcomers])


@settings(max_examples=20)
@given(data=st.data())
def test_the_same_moves_on_every_rank(data: st.DataObject) -> None:
    old, new = data.draw(tilings(units=30)), data.draw(tilings(units=30))
    again = moves(Tiling.from_json(old.to_json()), Tiling.from_json(new.to_json()))
    assert moves(old, new) == again
