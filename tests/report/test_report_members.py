"""The picture of an elastic run: who was there when, and what was lost."""

import pytest

from tatami.elastic import ElasticReport, MemberChange

pytest.importorskip("matplotlib", reason="matplotlib is not installed")

from matplotlib.patches import Rectangle

from tatami.report import blank, draw_members


def changed(members: tuple[str, ...], *, at_s: float, steps_lost: int = 0) -> MemberChange:
    """One that halts all for 0.25 s, lays out the work in 0.25 s, and does half a second's work again."""
    return MemberChange(
        at_s=at_s,
        reason="p1 died",
        step=3,
        settled="returned" if steps_lost else "redone",
        steps_lost=steps_lost,
        members=members,
        halted_s=0.25,
        laid_s=0.25,
        lost_s=1.0,
        moved_units=4,
    )


def test_each_rank_has_a_bar_from_its_joining_to_its_end_and_what_was_lost_is_a_stripe() -> None:
    changes = (changed(("p0",), at_s=4.0), changed(("p0", "p2"), at_s=6.0, steps_lost=2))
    report = ElasticReport(startup_s=1.0, total_s=10.0, changes=changes, first_members=("p0", "p1"))
    _, ax = blank()
    draw_members(ax, report)
    assert [label.get_text() for label in ax.get_yticklabels()] == ["p0", "p1", "p2"]
    spans = [[(path.get_extents().x0, path.get_extents().x1) for path in bar.get_paths()] for bar in ax.collections]
    assert spans == [[(0.0, 10.0)], [(0.0, 4.0)], [(6.5, 10.0)]]
    stripes = [(stripe.get_x(), stripe.get_x() + stripe.get_width()) for stripe in ax.patches if isinstance(stripe, Rectangle)]
    assert stripes == [(3.5, 4.5), (5.5, 6.5)]
    assert [text.get_text() for text in ax.texts] == ["1 s", "1 s, 2 steps"]
    assert ax.get_title(loc="left") == "2 s of 10 s lost"


def test_an_undisturbed_run_has_bars_alone() -> None:
    _, ax = blank()
    draw_members(ax, ElasticReport(startup_s=1.0, total_s=5.0, changes=(), first_members=("p0", "p1", "p2")))
    assert len(ax.collections) == 3
    assert not ax.patches
