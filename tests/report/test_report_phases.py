"""The picture of a schedule: what each bar shows is what `verify` would say of it."""

import pytest

from tatami.collective import ALGORITHMS, Schedule, build
from tatami.errors import InputError
from tatami.report import draw_schedule

figure = pytest.importorskip("matplotlib.figure", reason="needs the extra 'plot'")
patches = pytest.importorskip("matplotlib.patches", reason="needs the extra 'plot'")


def bars(schedule: Schedule, *, columns: int) -> list[list[tuple[float, float, float, tuple[float, ...]]]]:
    """The coloured rectangles of each panel: (x, y, width, colour)."""
    axes = figure.Figure().subplots(1, len(schedule.phases) + 1)
    draw_schedule(axes, schedule, columns=columns)
    return [
        [(each.get_x(), each.get_y(), each.get_width(), each.get_facecolor()) for each in ax.patches if each.get_fill()]
        for ax in axes
    ]


@pytest.mark.parametrize("algorithm", [name for name in ALGORITHMS if name != "shared"])
def test_it_begins_with_one_contribution_each_and_ends_with_all(algorithm: str) -> None:
    schedule = build(algorithm, ranks=8, size=64, hosts=["a"] * 4 + ["b"] * 4)
    panels = bars(schedule, columns=4)
    first, last = {bar[3] for bar in panels[0]}, {bar[3] for bar in panels[-1]}
    assert [len(panels[0]), len(panels[-1])] == [8, 8]  # every vector of one colour
    assert (len(first), len(last)) == (1, 1)
    assert sum(next(iter(last))) < sum(next(iter(first)))  # darker


def test_after_the_row_a_rank_has_a_quarter_and_after_the_column_it_is_whole() -> None:
    schedule = build("torus", ranks=8, size=64, hosts=["a"] * 4 + ["b"] * 4, across="native")
    _, row, column, last = bars(schedule, columns=4)
    complete = last[0][3]
    parts = [bar for bar in row if bar[3] != row[1][3]]
    assert [bar[2] for bar in parts] == pytest.approx([0.72 / 4] * 8)
    whole = [bar for bar in column if bar[3] == complete]
    assert [bar[:3] for bar in whole] == [bar[:3] for bar in parts]


def test_what_cannot_be_drawn_is_refused() -> None:
    schedule = build("ring", ranks=4, size=8)
    with pytest.raises(InputError, match="ring has 2 phases, so it needs one more axes, not 1"):
        draw_schedule([figure.Figure().subplots()], schedule, columns=4)
    with pytest.raises(InputError, match="2 to 32 ranks, not 64"):
        draw_schedule([], build("ring", ranks=64, size=64), columns=8)
