"""Algorithms by name."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from tatami.collective.accumulate import accumulate, accumulate_halves
from tatami.collective.direct import direct
from tatami.collective.grid import Grid, choose_grid
from tatami.collective.halves import Flat, Halves
from tatami.collective.halving import halving_doubling
from tatami.collective.hierarchical import hierarchical
from tatami.collective.native import NATIVE_HALVES, native
from tatami.collective.ring import RING_HALVES, ring
from tatami.collective.schedule import Schedule
from tatami.collective.shared import shared
from tatami.collective.step import Sync
from tatami.collective.torus import torus, torus_put
from tatami.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What an all-reduce is built for.

    Attributes:
        ranks: P.
        size: elements.
        hosts: the host of each rank; None: not known (every rank on its own, or, for `shared`, all on one).
        grid: (M, N) of the tori; None: `choose_grid(hosts)`.
        across: the algorithm of columns, or between hosts.
        sync: what synchronises puts.
        fixed_order: refuse what does not sum in a fixed order, and make `accumulate` do so.
        element_bytes: of one element: `direct` sends short vectors whole.
        decided_by: see `direct`.
    """

    ranks: int
    size: int
    hosts: tuple[str, ...] | None = None
    grid: Grid | None = None
    across: str = "ring"
    sync: Sync = Sync.PSCW
    fixed_order: bool = False
    element_bytes: int = 4
    decided_by: int | None = None

    def hosts_or_apart(self) -> tuple[str, ...]:
        return self.hosts or tuple(f"host{rank}" for rank in range(self.ranks))

    def chosen_grid(self) -> Grid:
        return self.grid or choose_grid(self.hosts_or_apart())

    def flat(self) -> Flat:
        """`across` as a builder; its ranks are each on a host of their own, and its own columns, if any, are rings."""
        problem = replace(self, hosts=None, grid=None, across="ring", decided_by=self.size)
        return partial(_across, self.across, problem)


@dataclass(frozen=True, kw_only=True)
class Algorithm:
    """One entry. What an executor must have for it is the schedule's to say: `one_sided`, `shared`."""

    name: str
    summary: str
    build: Callable[[Problem], Schedule]


def _torus_put(problem: Problem, scatter: Halves = RING_HALVES) -> Schedule:
    grid, across = problem.chosen_grid(), problem.flat()
    return torus_put(problem.ranks, problem.size, grid=grid, across=across, sync=problem.sync, scatter=scatter)


ALGORITHMS: dict[str, Algorithm] = {
    entry.name: entry
    for entry in (
        Algorithm(name="native", summary="the library's own", build=lambda p: native(p.ranks, p.size)),
        Algorithm(name="ring", summary="2(P-1) rounds between neighbours", build=lambda p: ring(p.ranks, p.size)),
        Algorithm(
            name="halving_doubling", summary="2 log2(P) rounds, for any P", build=lambda p: halving_doubling(p.ranks, p.size)
        ),
        Algorithm(
            name="direct",
            summary="every rank to every other, in one round or two",
            build=lambda p: direct(p.ranks, p.size, element_bytes=p.element_bytes, decided_by=p.decided_by),
        ),
        Algorithm(
            name="torus",
            summary="2D torus: reduce-scatter by row, all-reduce by column, all-gather by row",
            build=lambda p: torus(p.ranks, p.size, grid=p.chosen_grid(), across=p.flat()),
        ),
        Algorithm(
            name="torus_native",
            summary="2D torus of native collectives",
            build=lambda p: torus(p.ranks, p.size, grid=p.chosen_grid(), across=native, within=NATIVE_HALVES),
        ),
        Algorithm(name="torus_put", summary="2D torus whose rows gather by put", build=_torus_put),
        Algorithm(
            name="torus_accumulate",
            summary="2D torus whose rows scatter by accumulate and gather by put",
            build=lambda p: _torus_put(p, accumulate_halves(sync=p.sync, fixed_order=p.fixed_order)),
        ),
        Algorithm(
            name="accumulate",
            summary="one-sided: accumulate, then put",
            build=lambda p: accumulate(p.ranks, p.size, sync=p.sync, fixed_order=p.fixed_order),
        ),
        Algorithm(
            name="shared",
            summary="one host: straight from the neighbours' memory",
            build=lambda p: shared(p.ranks, p.size, hosts=p.hosts),
        ),
        Algorithm(
            name="hierarchical",
            summary="shared inside hosts, another across them",
            build=lambda p: hierarchical(p.ranks, p.size, hosts=p.hosts_or_apart(), across=p.flat()),
        ),
    )
}


def build(
    algorithm: str,
    *,
    ranks: int,
    size: int,
    hosts: Sequence[str] | None = None,
    grid: Grid | None = None,
    across: str = "ring",
    sync: Sync = Sync.PSCW,
    fixed_order: bool = False,
    element_bytes: int = 4,
) -> Schedule:
    """The schedule of a named algorithm; arguments that it has no use for are not looked at.

    Args:
        algorithm: one of `ALGORITHMS`.
        ranks: P.
        size: elements.
        hosts: the host of each rank; None: each on its own, or, for `shared`, all on one.
        grid: (M, N) of the tori; None: chosen by the hosts.
        across: the algorithm of columns, or between hosts.
        sync: what synchronises puts: FENCE, PSCW or LOCK.
        fixed_order: the same order of summation in every run.
        element_bytes: of one element, 4 for float32.

    Raises:
        ScheduleError: an unknown name; M x N is not P; hosts that do not fit; or a fixed order where the algorithm has none.
    """
    entry = _entry(algorithm, what="all-reduce")
    _entry(across, what="all-reduce for across")
    if hosts is not None and len(hosts) != ranks:
        raise ScheduleError(f"{len(hosts)} hosts are named for {ranks} ranks; name the host of each rank")
    problem = Problem(
        ranks=ranks,
        size=size,
        hosts=None if hosts is None else tuple(hosts),
        grid=grid,
        across=across,
        sync=sync,
        fixed_order=fixed_order,
        element_bytes=element_bytes,
    )
    schedule = replace(entry.build(problem), algorithm=algorithm)
    if fixed_order and schedule.phases and not schedule.fixed_order:
        fixed = ", ".join(name for name in ALGORITHMS if "native" not in name)
        raise ScheduleError(f"{algorithm} does not sum in a fixed order ({schedule.order}); these can: {fixed}")
    return schedule


def _across(algorithm: str, problem: Problem, ranks: int, size: int) -> Schedule:
    hosts = tuple(f"host{rank}" for rank in range(ranks))
    return _entry(algorithm, what="all-reduce for across").build(replace(problem, ranks=ranks, size=size, hosts=hosts))


def _entry(name: str, *, what: str) -> Algorithm:
    if name not in ALGORITHMS:
        raise ScheduleError(f"there is no {what} {name!r}; choose one of: {', '.join(ALGORITHMS)}")
    return ALGORITHMS[name]
