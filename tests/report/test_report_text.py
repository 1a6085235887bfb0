"""Tables and drawings in characters."""

import io
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from evaluation import markdown
from tatami.cluster import Cluster
from tatami.errors import InputError, MissingExtraError, PlanError
from tatami.report import Efficiency, MethodResult, draw_text, run_table
from tatami.tiling import Span, Tile, Tiling, plan
from tatami.workload import Workload

TILING = Tiling(
    samples=100,
    units=20,
    tiles=(
        Tile(processor="slow", replica=0, samples=Span(0, 50), units=Span(0, 5)),
        Tile(processor="mid", replica=0, samples=Span(0, 50), units=Span(5, 20)),
        Tile(processor="fast", replica=1, samples=Span(50, 100), units=Span(0, 20)),
    ),
)
DRAWN = """\
┌─────────────────┬────────────────┐
│       slow      │▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│      12.5 %     │▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│                 │▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
├─────────────────┤▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓ fast ▓▓▓▓▓│
│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓ 50 % ▓▓▓▓▓│
│▒▒▒▒▒  mid   ▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│▒▒▒▒▒ 37.5 % ▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
│▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒│▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓▓│
└─────────────────┴────────────────┘
100 samples across, 20 units down;
darker is faster"""
HALF = Efficiency(gamma=0.5, spread=0.04, computing=None, rounds=5)
RUNS = (
    MethodResult(method="even", iteration_s=0.05, samples_per_s=20480, efficiency=HALF),
    MethodResult(method="SRPM", iteration_s=0.025, samples_per_s=40960),
)


def test_a_drawing_is_what_it_was() -> None:
    drawn = draw_text(TILING, speeds={"slow": 1, "mid": 3, "fast": 4}, width=36)
    assert drawn == DRAWN


def test_a_drawing_has_the_order_of_the_speeds() -> None:
    lines = draw_text(TILING, speeds={"fast": 4, "mid": 3, "slow": 1}, width=36).splitlines()
    assert [[name for name in ("fast", "mid", "slow") if name in line] for line in lines if any(map(str.isalpha, line))][
        :3
    ] == [["mid"], ["fast"], ["slow"]]
    assert next(line.index("fast") for line in lines if "fast" in line) < 18, "the replica of the first one is to the left"


def test_columns_may_stand_closer_and_say_the_same() -> None:
    wide, narrow = (run_table(RUNS).to_text(gap=gap).splitlines() for gap in (2, 1))
    assert [line.split() for line in narrow] == [line.split() for line in wide]
    columns = len(run_table(RUNS).headers)
    assert max(map(len, narrow)) == max(map(len, wide)) - columns


def test_speeds_that_hardly_differ_are_drawn_alike() -> None:
    assert draw_text(TILING, speeds={"slow": 0.97, "mid": 0.99, "fast": 1.0}) == draw_text(
        TILING, speeds=dict.fromkeys(("slow", "mid", "fast"), 1.0)
    )


@settings(deadline=None, max_examples=60)
@given(speeds=st.lists(st.floats(0.01, 1.0), min_size=1, max_size=40), width=st.integers(50, 120))
def test_a_drawing_is_as_wide_as_asked_and_names_everybody(speeds: list[float], width: int) -> None:
    cluster = Cluster.from_speeds(speeds)
    tiling = plan("srpm", cluster=cluster, workload=Workload.mlp(203, 10_000, 26, samples=50_000)).tiling
    lines = draw_text(tiling, speeds=cluster.speeds, width=width).splitlines()
    assert all(len(line) <= width for line in lines)
    if lines[0].startswith("┌"):
        assert {len(line) for line in lines if line[0] in "┌│├└"} == {width}
    for name in cluster.speeds:
        assert any(name in line for line in lines)


def test_a_name_too_long_for_its_mat_gets_a_number_explained_below() -> None:
    long = "a-very-long-name.example"
    cluster_speeds = {long: 1.0, "fast": 10.0}
    tiling = Tiling(
        samples=110,
        units=20,
        tiles=(
            Tile(processor=long, replica=0, samples=Span(0, 10), units=Span(0, 20)),
            Tile(processor="fast", replica=1, samples=Span(10, 110), units=Span(0, 20)),
        ),
    )
    lines = draw_text(tiling, speeds=cluster_speeds).splitlines()
    assert lines[-1] == f"1 = {long}, 9.09 %"
    assert any(" 1 " in line for line in lines[:-2])


def test_more_replicas_than_fit_become_bars() -> None:
    cluster = Cluster.from_speeds([1.0] * 40)
    tiling = plan("weighted", cluster=cluster, workload=Workload.mlp(203, 80, 26, samples=4000)).tiling
    lines = draw_text(tiling, speeds=cluster.speeds, width=60).splitlines()
    assert len(lines) == 41
    assert lines[0].startswith("p0  2.5 % ██")
    assert {len(line) for line in lines[:40]} == {60}


def test_idle_processors_are_named_and_bad_input_refused() -> None:
    speeds = {"slow": 1.0, "mid": 3.0, "fast": 4.0}
    assert draw_text(TILING, speeds={**speeds, "idle": 0.1}).splitlines()[-1] == "without work: idle"
    with pytest.raises(PlanError, match="missing for fast"):
        draw_text(TILING, speeds={"slow": 1.0, "mid": 3.0})
    with pytest.raises(InputError, match="at least 24 characters, not 10"):
        draw_text(TILING, speeds=speeds, width=10)


def test_the_run_table_compares_with_even() -> None:
    table = run_table(RUNS)
    assert table.rows == (("even", "50 ms", "20,480", "1.00 x", "50 % ±4 %"), ("SRPM", "25 ms", "40,960", "2.00 x", "-"))
    assert table.best == 1
    assert run_table(RUNS[1:]).headers[3] == "against SRPM"


def test_plain_text_is_aligned() -> None:
    lines = run_table(RUNS).to_text().splitlines()
    assert lines[2:] == [
        "   method  per iteration  samples/s  against even  efficiency",
        "   ------  -------------  ---------  ------------  ----------",
        "   even            50 ms     20,480        1.00 x   50 % ±4 %",
        "*  SRPM            25 ms     40,960        2.00 x           -",
        "* best row",
    ]


def test_markdown_has_one_line_a_row_and_escapes_bars() -> None:
    runs = (RUNS[0], MethodResult(method="a|b", iteration_s=1, samples_per_s=1024))
    assert markdown(run_table(runs)).splitlines() == [
        "| method | per iteration | samples/s | against even | efficiency |",
        "| :-- | --: | --: | --: | --: |",
        "| **even** | **50 ms** | **20,480** | **1.00 x** | **50 % ±4 %** |",
        "| a\\|b | 1 s | 1,024 | 0.05 x | - |",
    ]


def test_rich_shows_names_as_they_are() -> None:
    console = pytest.importorskip("rich.console", reason="rich is not installed (extra `cli`)")
    out = io.StringIO()
    runs = (*RUNS, MethodResult(method="[red]", iteration_s=1, samples_per_s=1))
    console.Console(file=out, width=80).print(run_table(runs).to_rich())
    assert "[red]" in out.getvalue()
    assert "40,960" in out.getvalue()


def test_nothing_to_compare_is_said_and_a_missing_rich_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match="no run to compare"):
        run_table([])
    monkeypatch.setitem(sys.modules, "rich.table", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tatami-torch\[cli\]'"):
        run_table(RUNS).to_rich()
