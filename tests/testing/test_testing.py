"""Slowed ranks, and worlds of ranks."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hand_clock import HandClock
from tatami.errors import ClusterError, InputError
from tatami.runtime.phases import IterationPhase, Phases
from tatami.testing.slowdown import FULLEST, Slowdown, emulated_factors


class Machine(HandClock):
    """A clock, and the CPU time of a thread on it."""

    def __init__(self, *, oversleeps_s: float = 0.0) -> None:
        super().__init__(0.0)
        self.used_s = 0.0
        self.slept: list[float] = []
        self.oversleeps_s = oversleeps_s

    def cpu_s(self) -> float:
        return self.used_s

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)
        self.time_s += duration_s + self.oversleeps_s

    def compute(self, seconds: float, *, without_core_s: float = 0.0) -> None:
        self.used_s += seconds
        self.time_s += seconds + without_core_s


def slowdown_on(machine: Machine, factor: float) -> Slowdown:
    return Slowdown(factor, clock=machine, cpu_s=machine.cpu_s)


def test_the_factor_changes_during_a_run_and_one_means_full_speed() -> None:
    machine = Machine()
    slowdown = slowdown_on(machine, 1.0)
    slowdown.begin()
    machine.compute(0.25)
    slowdown.end()
    assert machine.slept == []
    slowdown.factor = 4
    slowdown.begin()
    machine.compute(0.25)
    slowdown.end()
    assert machine.slept == [0.75]


def test_time_without_a_core_is_not_slowed_again() -> None:
    machine = Machine()
    slowdown = slowdown_on(machine, 3.0)
    slowdown.begin()
    machine.compute(1.0, without_core_s=0.5)
    slowdown.end()
    assert machine.slept == [1.5]
    assert machine.time_s == 3.0
    slowdown.begin()
    machine.compute(1.0, without_core_s=7.0)
    slowdown.end()
    assert machine.slept == [1.5]


@pytest.mark.parametrize(
    ("oversleeps_s", "compute_s", "slept"), [(0.125, 0.5, [0.5, 0.375, 0.375]), (0.25, 0.125, [0.125, 0.0, 0.125, 0.0])]
)
def test_later_sleeps_make_up_for_one_that_took_too_long(oversleeps_s: float, compute_s: float, slept: list[float]) -> None:
    machine = Machine(oversleeps_s=oversleeps_s)
    slowdown = slowdown_on(machine, 2.0)
    for _ in slept:
        slowdown.begin()
        machine.compute(compute_s)
        slowdown.end()
    assert machine.slept == [each for each in slept if each]
    assert machine.time_s == pytest.approx(len(slept) * 2 * compute_s + oversleeps_s)


def test_polling_between_two_stretches_is_no_compute() -> None:
    machine = Machine()
    phases = Phases(clock=machine, pace=slowdown_on(machine, 2.0))
    phases.enter(IterationPhase.FORWARD)
    machine.compute(1.0)
    phases.enter(IterationPhase.TENSOR_PARALLEL)
    machine.compute(5.0)  # a wait that spins
    phases.enter(IterationPhase.BACKWARD)
    machine.compute(2.0)
    phases.enter(IterationPhase.UPDATE)
    times = phases.finish_iteration()
    assert machine.slept == [1.0, 2.0]
    assert (times.forward_s, times.tensor_parallel_s, times.backward_s, times.update_s) == (2.0, 5.0, 4.0, 0.0)


@pytest.mark.parametrize("factor", [0.5, 0.0, -1.0, math.nan, math.inf])
def test_a_factor_that_cannot_be_is_refused(factor: float) -> None:
    with pytest.raises(InputError, match="finite number >= 1"):
        Slowdown(factor)
    slowdown = Slowdown(2.0)
    with pytest.raises(InputError, match="finite number >= 1"):
        slowdown.factor = factor
    assert slowdown.factor == 2.0


def test_ranks_with_a_core_each_are_slowed_to_the_fastest() -> None:
    emulation = emulated_factors([1.0, 2.0, 4.0], cores=4)
    assert emulation.factors == (4.0, 2.0, 1.0)
    assert emulation.scale == 1.0


def test_ranks_that_outnumber_the_cores_are_all_slowed_by_one_scale() -> None:
    emulation = emulated_factors([1.0, 1.0, 0.5, 0.25], cores=2)
    assert emulation.scale == pytest.approx(2.75 / (2 * FULLEST))
    assert emulation.factors == pytest.approx([emulation.scale * slower for slower in (1, 1, 2, 4)])


@given(speeds=st.lists(st.floats(min_value=0.01, max_value=100.0), min_size=1, max_size=20), cores=st.integers(1, 16))
def test_factors_keep_the_ratios_and_fit_the_cores(speeds: list[float], cores: int) -> None:
    emulation = emulated_factors(speeds, cores=cores)
    products = [speed * factor for speed, factor in zip(speeds, emulation.factors, strict=True)]
    assert products == pytest.approx([products[0]] * len(speeds))
    assert min(emulation.factors) == pytest.approx(emulation.scale)
    assert emulation.scale >= 1
    if len(speeds) > cores:
        assert sum(1 / factor for factor in emulation.factors) <= FULLEST * cores * (1 + 1e-9)


def test_speeds_and_cores_that_cannot_be_are_refused() -> None:
    with pytest.raises(ClusterError, match=r"speeds\[1\]: must be > 0, not 0"):
        emulated_factors([1.0, 0.0], cores=2)
    with pytest.raises(InputError, match="cores must be at least 1, not 0"):
        emulated_factors([1.0], cores=0)


TESTS = """
import pytest

@pytest.mark.ranks(2)
def test_rank_1_fails_alone(world):
    rank = world(lambda comm: comm.rank)[0]
    from tatami.comm.detect import init
    assert init(backend="mpi").rank == 0, "only here"

@pytest.mark.ranks(2)
def test_all_fail(world):
    def body(comm):
        assert comm.rank == 0, "told by rank 0"
    world(body)
"""


def test_what_fails_on_another_rank_alone_is_told_by_rank_0(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    (tmp_path / "test_ranks.py").write_text(TESTS)
    environ = {name: value for name, value in os.environ.items() if not name.startswith(("PMI_", "PMIX_", "OMPI_", "MPI_"))}
    ended = subprocess.run(
        [Path(sys.executable).with_name("mpiexec"), "-n", "2", sys.executable, "-m", "pytest", "-q", "-m", "mpi", "--world=mpi",
         "-p", "tatami.testing.worlds", "-p", "no:cacheprovider", "test_ranks.py"],
        cwd=tmp_path, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ended.returncode != 0, ended.stdout
    assert "1 failed, 1 passed" in ended.stdout, ended.stdout + ended.stderr  # as rank 0 sees it
    assert ended.stdout.count("test_rank_1_fails_alone[n2] failed on rank 1 of 2 and not on rank 0:") == 1, ended.stdout
    assert "only here" in ended.stdout
    assert "test_all_fail[n2] failed on rank" not in ended.stdout
