"""Who holds what, and from whom rows are taken."""

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from tatami.membership import Held, Lost, Mirror, Take, mirrors_of, takes
from tatami.tiling import Layout, Replica, Span, StagedLayout
from tatami.workload import Piece, Workload

WORKLOAD = Workload.mlp(4, 12, 3, samples=10)


def replica(*names: str, width: float = 1.0) -> Replica:
    return Replica(width=width, processors=names, heights=(1 / len(names),) * len(names))


ONE = Layout(replicas=(replica("a", "b", "c"),))
TWO = Layout(replicas=(replica("a", "b", width=0.5), replica("c", width=0.5)))


def test_one_replica_has_mirrors_and_two_need_none() -> None:
    ring = (Mirror(owner="a", keeper="b"), Mirror(owner="b", keeper="c"), Mirror(owner="c", keeper="a"))
    assert mirrors_of(ONE, copies=2) == ring
    assert mirrors_of(ONE, copies=1) == ()
    assert mirrors_of(TWO, copies=2) == ()
    assert mirrors_of(Layout(replicas=(replica("a"),)), copies=2) == ()


def test_rows_of_the_dead_come_from_the_other_replica() -> None:
    after = Held(layout=Layout(replicas=(replica("b", "c"),)))
    found, lost = takes(Held(layout=TWO), after, workload=WORKLOAD, sources={"b", "c"})
    assert lost == ()
    assert set(found) == {
        Take(dest="b", source="c", block=0, units=Span(0, 6)),
        Take(dest="c", source="c", block=0, units=Span(6, 12)),
    }


def test_rows_of_the_dead_come_from_its_mirror() -> None:
    before = Held(layout=ONE, mirrors=mirrors_of(ONE, copies=2))
    after = Held(layout=Layout(replicas=(replica("b", "c"),)))
    found, lost = takes(before, after, workload=WORKLOAD, sources={"b", "c"})
    assert lost == ()
    assert Take(dest="b", source="b", block=0, units=Span(0, 4), from_mirror=True) in found


def test_rows_without_a_holder_are_told_with_those_who_held_them() -> None:
    before = Held(layout=ONE, mirrors=mirrors_of(ONE, copies=2))
    after = Held(layout=Layout(replicas=(replica("c"),)))
    _, lost = takes(before, after, workload=WORKLOAD, sources={"c"})
    assert lost == (Lost(block=0, units=Span(0, 4), held_by=("a", "b")),)


PIECES = replace(
    WORKLOAD,
    pieces=tuple(
        Piece(name=name, flop_per_sample=1.0, parameters=1, blocks=((WORKLOAD.blocks[0], 1),) if name == "mlp" else ())
        for name in ("embedding", "mlp", "head")
    ),
)


def staged(*stages: tuple[tuple[str, ...], ...], cuts: tuple[int, ...]) -> StagedLayout:
    """Each stage is its replicas, one for each replica."""
    return StagedLayout(
        stages=tuple(Layout(replicas=tuple(replica(*each, width=1 / len(stage)) for each in stage)) for stage in stages),
        cuts=cuts,
    )


def test_one_replica_of_stages_has_mirrors_and_two_need_none() -> None:
    one, two = staged((("a",),), (("b", "c"),), cuts=(1,)), staged((("a",), ("b",)), (("c",), ("d",)), cuts=(1,))
    ring = (Mirror(owner="a", keeper="b"), Mirror(owner="b", keeper="c"), Mirror(owner="c", keeper="a"))
    assert mirrors_of(one, copies=2) == ring
    assert mirrors_of(two, copies=2) == ()
    found, lost = takes(Held(layout=one, mirrors=ring), Held(layout=two), workload=PIECES, sources={"a", "c"})
    assert lost == ()
    of_block = [(take.source, take.from_mirror, take.units) for take in found if (take.dest, take.block) == ("d", 0)]
    assert of_block[0] == ("c", True, Span(0, 6))
    assert of_block[1] in (("c", False, Span(6, 12)), ("a", True, Span(6, 12)))


def test_a_stage_that_all_replicas_have_lost_is_told_by_its_pieces() -> None:
    two = staged((("a",), ("b",)), (("c",), ("d",)), cuts=(1,))
    after = Held(layout=Layout(replicas=(replica("a", "b"),)))
    _, lost = takes(Held(layout=two), after, workload=PIECES, sources={"a", "b"})
    assert lost == (
        Lost(block=0, units=Span(0, 12), held_by=("c", "d")),
        Lost(block=2, units=Span(0, 1), held_by=("c", "d")),
        Lost(block=3, units=Span(0, 1), held_by=("c", "d")),
    )


@st.composite
def layouts(draw: st.DrawFn, names: tuple[str, ...]) -> Layout:
    num_replicas = draw(st.integers(1, len(names)))
    replicas = [names[index::num_replicas] for index in range(num_replicas)]
    return Layout(replicas=tuple(replica(*each, width=1 / num_replicas) for each in replicas))


@given(st.data())
def test_every_unit_is_filled_once_from_a_holder_or_told_as_lost(data: st.DataObject) -> None:
    old_names = tuple(data.draw(st.permutations("abcde")))[: data.draw(st.integers(1, 5))]
    new_names = tuple(data.draw(st.permutations("abcdefg")))[: data.draw(st.integers(1, 7))]
    old, new = data.draw(layouts(old_names)), data.draw(layouts(new_names))
    copies = data.draw(st.sampled_from([1, 2]))
    before, after = (
        Held(layout=old, mirrors=mirrors_of(old, copies=copies)),
        Held(layout=new, mirrors=mirrors_of(new, copies=2)),
    )
    sources = set(data.draw(st.lists(st.sampled_from(old_names), unique=True)))
    found, lost = takes(before, after, workload=WORKLOAD, sources=sources)
    (cut_old,), (cut_new,) = old.cut_blocks(WORKLOAD), new.cut_blocks(WORKLOAD)
    lost_units = {unit for each in lost for unit in range(each.units.start, each.units.stop)}
    holds = {(tile.processor, False): tile.units for tile in cut_old.tiles}
    holds |= {(mirror.keeper, True): cut_old.by_processor[mirror.owner].units for mirror in before.mirrors}
    for take in found:
        assert take.source in sources
        assert (holds[take.source, take.from_mirror] & take.units) == take.units
    wanted = {(tile.processor, False): tile.units for tile in cut_new.tiles}
    wanted |= {(mirror.keeper, True): cut_new.by_processor[mirror.owner].units for mirror in after.mirrors}
    for (dest, to_mirror), units in wanted.items():
        taken = [t for t in found if (t.dest, t.to_mirror) == (dest, to_mirror)]
        filled = sorted(unit for take in taken for unit in range(take.units.start, take.units.stop))
        assert filled == [unit for unit in range(units.start, units.stop) if unit not in lost_units]
    alive = {unit for (name, _), units in holds.items() if name in sources for unit in range(units.start, units.stop)}
    assert not alive & lost_units
