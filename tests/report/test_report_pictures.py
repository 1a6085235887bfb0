"""Pictures: what is drawn where, in which words; never pixels."""

import math
import sys
from pathlib import Path

import pytest

from tatami.cluster import Cluster, Processor
from tatami.elastic import ElasticReport, MemberChange
from tatami.errors import InputError, MissingExtraError, OutputExistsError, PlanError
from tatami.report import CoursePoint, blank, check_path, draw_course, draw_members, draw_tiling, draw_watched, save
from tatami.report.fitting import Box, fit_lettering
from tatami.retiling import Alarm, DecisionKind, Glance
from tatami.tiling import Tiling, plan
from tatami.workload import Workload

pytest.importorskip("matplotlib", reason="matplotlib is not installed (extra `plot`)")
from matplotlib.axes import Axes
from matplotlib.colors import to_rgb
from matplotlib.patches import Rectangle
from test_report_text import TILING

SPEEDS = {"slow": 1.0, "mid": 3.0, "fast": 4.0}


def srpm(speeds: dict[str, float]) -> Tiling:
    cluster = Cluster(processors=tuple(Processor(name=name, speed=speed) for name, speed in speeds.items()))
    return plan("srpm", cluster=cluster, workload=Workload.mlp(203, 800, 26, samples=8192)).tiling


def texts(ax: Axes) -> list[str]:
    return [text.get_text() for text in ax.texts]


def test_mats_lie_where_the_tiles_are() -> None:
    _, ax = blank()
    assert draw_tiling(ax, TILING, speeds=SPEEDS) is ax
    mats = [patch for patch in ax.patches if isinstance(patch, Rectangle)]
    boxes = [(*mat.get_xy(), mat.get_width(), mat.get_height()) for mat in mats]
    assert boxes == [(0, 0, 50, 5), (0, 5, 50, 15), (50, 0, 50, 20)]
    assert ax.get_xlim() == (0, 100)
    assert ax.get_ylim() == (20, 0)  # units count down
    assert texts(ax) == ["slow\n12.5 %", "mid\n37.5 %", "fast\n50 %"]
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("samples (of 100)", "hidden units (of 20)")
    assert list(ax.get_xticks()) == [0, 50, 100]


def test_colour_follows_speed_and_has_its_bar() -> None:
    figure, ax = blank()
    draw_tiling(ax, TILING, speeds=SPEEDS, speed_unit="Gflop/s")
    luminance = [sum(to_rgb(patch.get_facecolor())) for patch in ax.patches]
    assert luminance == sorted(luminance, reverse=True)
    bar = figure.axes[1]
    assert bar.get_ylabel() == "speed (Gflop/s)"
    assert [tick.get_text() for tick in bar.get_yticklabels()] == ["1", "3", "4"]


def test_speeds_that_hardly_differ_have_nearly_one_colour() -> None:
    _, ax = blank()
    draw_tiling(ax, TILING, speeds={"slow": 0.97, "mid": 0.99, "fast": 1.0})
    first, *others = (to_rgb(patch.get_facecolor()) for patch in ax.patches)
    for other in others:
        assert other == pytest.approx(first, abs=0.05)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 40, 100])
@pytest.mark.parametrize("ratio", [1.0, 3.0, 100.0])
def test_labels_stay_inside_their_mats_and_everybody_is_named(count: int, ratio: float) -> None:
    speeds = {f"machine-{index}": ratio ** (index / max(1, count - 1)) for index in range(count)}
    tiling = srpm(speeds)
    figure, ax = blank()
    draw_tiling(ax, tiling, speeds=speeds)
    figure.draw_without_rendering()
    mats = [patch.get_window_extent() for patch in ax.patches]
    labels = [text for text in ax.texts if not hasattr(text, "xyann")]
    for label in labels:
        box = label.get_window_extent()
        assert any(
            mat.x0 - 1 <= box.x0 and box.x1 <= mat.x1 + 1 and mat.y0 - 1 <= box.y0 and box.y1 <= mat.y1 + 1 for mat in mats
        ), label.get_text()
    written = "\n".join(texts(ax))
    abridged = "... " in written
    assert abridged or all(name in written for name in speeds)
    assert not abridged or count >= 40
    frame = figure.bbox
    for text in ax.texts:
        box = text.get_window_extent()
        assert frame.x0 <= box.x0
        assert box.x1 <= frame.x1
        assert frame.y0 <= box.y0
        assert box.y1 <= frame.y1


def test_a_mat_too_small_for_its_name_gets_a_number_explained_below() -> None:
    name = "a-processor-with-a-name-much-longer-than-its-mat-is-high"
    tiling = srpm({name: 2.0, "fast": 100.0})
    _, ax = blank(width_in=6, height_in=3)
    draw_tiling(ax, tiling, speeds={name: 2.0, "fast": 100.0, "idle": 0.01})
    note = texts(ax)[0].split("\n")
    assert name in note[0]
    assert note[-1] == "without work: idle"


def test_missing_speeds_are_named() -> None:
    _, ax = blank()
    with pytest.raises(PlanError, match="missing for mid, fast"):
        draw_tiling(ax, TILING, speeds={"slow": 1.0})


def test_lettering_takes_the_largest_form_that_fits_then_turns_then_counts() -> None:
    boxes = [
        Box(width_pt=200, height_pt=100),
        Box(width_pt=200, height_pt=15),
        Box(width_pt=15, height_pt=200),
        Box(width_pt=12, height_pt=12),
        Box(width_pt=1, height_pt=1),
        Box(width_pt=14, height_pt=12),
    ]
    letters = fit_lettering(boxes, texts=[("node-one", "5 %")] * len(boxes))
    assert [one.text for one in letters] == ["node-one\n5 %", "node-one 5 %", "node-one 5 %", "1", "", "2"]
    assert [one.upright for one in letters] == [False, False, True, False, False, False]
    assert letters[0].size_pt == 11.0
    assert [one.key for one in letters] == [None, None, None, 1, None, 2]


def test_course_marks_whole_and_replica_remappings_at_their_checks() -> None:
    _, ax = blank()
    checks = [
        CoursePoint(iteration=20, iteration_s=0.05, remapping="whole"),
        CoursePoint(iteration=40, iteration_s=0.03, remapping="replica"),
        CoursePoint(iteration=60, iteration_s=0.02),
    ]
    assert draw_course(ax, checks, label="DRPM") is ax
    lines = {str(line.get_label()): (list(line.get_xdata()), list(line.get_ydata())) for line in ax.get_lines()}  # type: ignore[arg-type]
    assert lines == {
        "DRPM": ([0, 20, 40, 60], [0.05, 0.05, 0.03, 0.02]),
        "re-mapping of the whole": ([20], [0.05]),
        "re-mapping within replicas": ([40], [0.03]),
    }
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("iteration", "time per iteration")
    assert ax.yaxis.get_major_formatter()(0.05, 0) == "50 ms"
    assert ax.get_ylim()[0] == 0


def test_a_second_course_shares_the_axes_and_the_legend_of_the_marks() -> None:
    _, ax = blank()
    draw_course(ax, [CoursePoint(iteration=20, iteration_s=0.02, remapping="whole")], label="one")
    draw_course(ax, [CoursePoint(iteration=20, iteration_s=0.2, remapping="whole")], label="two")
    legend = ax.get_legend()
    assert legend is not None
    assert [text.get_text() for text in legend.get_texts()] == ["one", "re-mapping of the whole", "two"]
    runs = [line for line in ax.get_lines() if line.get_drawstyle() == "steps-pre"]
    assert len({str(line.get_linestyle()) for line in runs}) == 2  # told apart without colours
    assert ax.get_ylim()[1] > 0.2


@pytest.mark.parametrize("ending", [".png", ".pdf", ".svg"])
def test_save_writes_and_does_not_overwrite(tmp_path: Path, ending: str) -> None:
    figure, _ = blank()
    path = tmp_path / f"picture{ending}"
    assert save(figure, path) == path
    before = path.read_bytes()
    with pytest.raises(OutputExistsError, match=r"exists already.*--force"):
        save(figure, path)
    assert path.read_bytes() == before
    path.write_text("older")
    save(figure, path, force=True)
    assert path.stat().st_size > 100


def test_a_path_that_cannot_be_a_picture_is_refused_before_drawing(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"\.png, \.pdf, \.svg, not as '\.bmp'"):
        check_path(tmp_path / "mats.bmp")
    with pytest.raises(InputError, match="there is no folder"):
        check_path(tmp_path / "nowhere" / "mats.png")


def test_without_matplotlib_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tatami-torch\[plot\]'"):
        blank()


def test_who_became_slower_is_named_and_each_price_has_its_line() -> None:
    figure, ax = blank()
    ax.remove()
    above, below = figure.subplots(2, sharex=True)
    whole, shift = DecisionKind.WHOLE, DecisionKind.SAMPLES
    glances = (
        Glance(iteration=8, speeds=(2.0, math.nan), loss_s={}, price_s={}),
        Glance(iteration=20, speeds=(1.0, 4.0), loss_s={whole: 0.5, shift: 0.1}, price_s={whole: 2.0, shift: 0.0}),
        Glance(iteration=21, speeds=(1.0, 4.0), loss_s={whole: 1.0}, price_s={whole: 2.0}),
    )
    alarm = Alarm(processor="p0", iteration=20, began=18, before_s=0.5, after_s=1.0, error=0.02)
    draw_watched(above, below, names=["p0", "p1"], glances=glances, alarms=[alarm], decisions=[], iterations=30)
    named = [text.get_text() for text in above.get_legend().get_texts()]
    assert named == ["p0", "alarm: slower", "alarm: faster"]
    (fast,) = [line for line in above.get_lines() if line.get_label() == "p0"]
    assert list(fast.get_ydata()) == [1.0, 0.5, 0.5, 0.5]
    shares = [list(line.get_ydata()) for line in below.get_lines()]
    # What moves no weights is free, and has no line.
    assert [each[1:] for each in shares if len(each) == 3] == [[0.25, 0.5]]
    assert below.get_xlabel() == "iteration"


def test_a_run_in_which_nothing_was_seen_is_drawn_empty() -> None:
    figure, ax = blank()
    ax.remove()
    above, below = figure.subplots(2, sharex=True)
    draw_watched(above, below, names=["p0"], glances=[], alarms=[], decisions=[], iterations=5)
    assert above.get_legend() is None


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
