"""The 2D torus, RSAA: reduce-scatter along the row, all-reduce down the column, all-gather along the row.

P = M x N ranks in N rows of M; rank r is member r mod M of row r div M. Ring steps fall from 2(P-1) to 2(M-1) + 2(N-1), and
what goes down a column is M times shorter (Mikami et al. 2018, arXiv 1811.05233).

RSAP, the torus with put, ends with recursive doubling by one-sided puts. That phase computes nothing, so no rank need take part
in receiving: in round i each puts all it holds into its partner's window, at the final address, so that nothing is copied twice
(Tamura, Hanawa: fastest at (M, N) = (2, 128) of 256 processes). A row whose length is not a power of two runs on the circulant
of `halving`.
"""

from __future__ import annotations

from dataclasses import replace

from tatami.collective.accumulate import check_one_sided
from tatami.collective.grid import Grid, rows_of
from tatami.collective.halves import Flat, Halves, nested
from tatami.collective.halving import Doubling
from tatami.collective.ring import RING_HALVES, ring
from tatami.collective.schedule import Schedule
from tatami.collective.step import Sync, Via


def torus(ranks: int, size: int, *, grid: Grid, across: Flat = ring, within: Halves = RING_HALVES) -> Schedule:
    """The 2D torus.

    Order of the sum: the row's, then the column's; with rings both fixed. Which rank comes first differs from part to part.

    Args:
        ranks: P.
        size: elements.
        grid: (M, N): ranks in a row, and rows.
        across: the all-reduce down each column of N ranks, on 1/M of the vector.
        within: the reduce-scatter and all-gather of each row.

    Raises:
        ScheduleError: M x N is not P.
    """
    return nested("torus", within, rows=rows_of(ranks, grid), size=size, across=across)


def torus_put(
    ranks: int, size: int, *, grid: Grid, across: Flat = ring, sync: Sync = Sync.PSCW, scatter: Halves = RING_HALVES
) -> Schedule:
    """The 2D torus whose rows gather by put.

    Order of the sum: as the torus.

    Args:
        ranks: P.
        size: elements.
        grid: (M, N): ranks in a row, and rows.
        across: the all-reduce down each column of N ranks, on 1/M of the vector.
        sync: what orders the puts: FENCE as published, PSCW, or LOCK.
        scatter: whose reduce-scatter the rows use; its gather is not.

    Raises:
        ScheduleError: M x N is not P, or `sync` cannot order puts.
    """
    check_one_sided(sync, algorithm="torus_put")
    halves = replace(scatter, gather=Doubling(via=Via.PUT), gather_sync=sync)
    return nested("torus_put", halves, rows=rows_of(ranks, grid), size=size, across=across)
