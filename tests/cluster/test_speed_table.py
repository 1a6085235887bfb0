"""Speeds that depend on the size of the tile: what they are, how they are written down, and who refuses them."""

import copy
import math
import pickle
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tatami.cluster import Cluster, Processor, SpeedTable, cluster_toml, fastest, read_cluster, speed_at
from tatami.errors import ClusterError
from tatami.lab.plan import plan_lab
from tatami.retiling import Controller, Retiler
from tatami.tiling import plan
from tatami.units import parse_flop
from tatami.workload import Workload

TABLE = SpeedTable([(400.0, 2.0), (100.0, 1.0)])
GPU = Cluster(processors=(Processor(name="gpu", speed=TABLE, host="a"), Processor(name="cpu", speed=1.0, host="b")))


def test_it_is_the_number_at_its_largest_size() -> None:
    assert SpeedTable([(100, 1), (400, 2)]) == TABLE
    assert TABLE != 2.0
    assert float(TABLE) == 2.0
    assert TABLE > 1.5
    assert fastest(SpeedTable([(1.0, 9.0), (100.0, 4.0)])) == 9.0
    assert (speed_at(3.0, 7.0), speed_at(TABLE, 100.0)) == (3.0, 1.0)


def test_time_is_a_straight_line_between_sizes_and_the_speed_stays_outside() -> None:
    # 100 take 100, 400 take 200: 250 take 150.
    assert [TABLE.at(size) for size in (1, 100, 250, 400, math.inf)] == pytest.approx([1.0, 1.0, 250 / 150, 2.0, 2.0])
    assert [TABLE.size_in(time) for time in (50, 100, 150, 200, 300)] == pytest.approx([50, 100, 250, 400, 600])
    assert TABLE.scaled(size=2.0, speed=3.0) == SpeedTable([(200, 3), (800, 6)])


@given(steps=st.lists(st.tuples(st.floats(0.01, 1e3), st.floats(0.0, 1e3)), min_size=2, max_size=10), size=st.floats(1e-3, 1e4))
@example(steps=[(1.0, 0.0), (32.0, 1.5), (28.0, 0.0)], size=47.0)
def test_a_larger_tile_never_takes_less_time(steps: list[tuple[float, float]], size: float) -> None:
    points, work, time = [], 0.0, 0.01
    for more, longer in steps:
        work, time = work + more, time + longer
        points.append((work, work / time))
    table = SpeedTable(points)
    took = size / table.at(size)
    assert size * 1.001 / table.at(size * 1.001) >= took * (1 - 1e-9)
    # Where more work takes no longer, a time that is rounded down is that of the least of it.
    assert table.size_in(took * (1 + 1e-12)) >= size * (1 - 1e-6)
    assert table.at(size) <= table.fastest * (1 + 1e-9)


def test_copies_and_what_other_processes_get_are_equal() -> None:
    for again in (pickle.loads(pickle.dumps(TABLE)), copy.deepcopy(TABLE), copy.copy(TABLE)):
        assert again == TABLE
        assert again.at(250) == TABLE.at(250)


@pytest.mark.parametrize(
    ("points", "problem"),
    [
        ([(1.0, 1.0)], "from 2 to 64 sizes, not 1; one speed for all sizes is a number"),
        ([(float(n), 1.0) for n in range(1, 66)], "not 65"),
        ([(0.0, 1.0), (1.0, 1.0)], "sizes > 0"),
        ([(math.nan, 1.0), (1.0, 1.0)], "sizes > 0"),
        ([(1.0, 0.0), (2.0, 1.0)], "must be > 0, not 0"),
        ([(1.0, 1.0), (1.0, 2.0)], "two speeds for size 1"),
        ([(100.0, 1.0), (200.0, 3.0)], "lets a tile of 200 flop take less time than one of 100: 66.6667 after 100"),
    ],
)
def test_what_cannot_be_is_refused(points: list[tuple[float, float]], problem: str) -> None:
    with pytest.raises(ClusterError, match=problem):
        SpeedTable(points)


def test_a_file_has_them_as_pairs_and_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        '[[processors]]\nname = "g"\nspeed = [["10 Mflop", "1 Tflop/s"], ["1 Gflop", "4 Tflop/s"]]\ncount = 2\nhost = "h"\n'
    )
    cluster = read_cluster(path)
    assert cluster.processors[1].speed == SpeedTable([(1e7, 1e12), (1e9, 4e12)])
    assert cluster.sized == ("g0", "g1")
    path.write_text(cluster_toml(cluster))
    assert read_cluster(path) == cluster
    assert parse_flop("2.5 Gflop") == 2.5e9


@pytest.mark.parametrize(
    ("speed", "problem"),
    [
        ("[[1, 1.0]]", r"processors\[0\].speed: must have from 2 to 64 sizes"),
        ("[1.0, 2.0]", "must be a list of .size, speed.* its item 0 is 1.0"),
        ('[["10 MB", 1.0], [2e9, 2.0]]', "item 0: .*not an amount of computing"),
        ("[[1, -1.0], [2, 1.0]]", "item 0: must be > 0, not -1"),
    ],
)
def test_a_file_with_faults_says_where(tmp_path: Path, speed: str, problem: str) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[[processors]]\nname = "g"\nspeed = {speed}\n')
    with pytest.raises(ClusterError, match=problem):
        read_cluster(path)


def test_who_can_only_use_numbers_refuses_them_by_name() -> None:
    needs = "needs one speed for each processor, but those of gpu depend on the size of the tile"
    with pytest.raises(ClusterError, match=f"a lab.* {needs}"):
        plan_lab(GPU, cores=2)
    work = Workload.mlp(20, 8, 2, samples=64)
    layout = plan("even", cluster=GPU, workload=work).layout
    with pytest.raises(ClusterError, match=f"rule='settling'.* {needs}"):
        Controller(Retiler(every=20), cluster=GPU, workload=work, layout=layout)
    assert Cluster.from_speeds([1.0, 2.0]).plain_speeds("a lab") == (1.0, 2.0)
