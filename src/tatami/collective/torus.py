"""The 2D torus, RSAA: reduce-scatter along the row, all-reduce down the column, all-gather along the row.

P = M x N ranks in N rows of M; rank r is member r mod M of row r div M. Ring steps fall from 2(P-1) to 2(M-1) + 2(N-1), and
what goes down a column is M times shorter (Mikami et al. 2018, arXiv 1811.05233).
"""

from __future__ import annotations

from tatami.collective.grid import Grid, rows_of
from tatami.collective.halves import Flat, Halves, nested
from tatami.collective.ring import RING_HALVES, ring
from tatami.collective.schedule import Schedule


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
