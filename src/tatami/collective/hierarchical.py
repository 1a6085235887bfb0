"""Hierarchical: a shared window inside each host, any other all-reduce across hosts on 1/M of the vector for each rank.

Only the column uses the network, and every rank of a host works at it, so that the host's link is full from the start.
Hosts may have different numbers of ranks: see `halves.nested`.
"""

from __future__ import annotations

from collections.abc import Sequence

from tatami.collective.grid import rows_by_host
from tatami.collective.halves import Flat, nested
from tatami.collective.ring import ring
from tatami.collective.schedule import Schedule
from tatami.collective.shared import SHARED_HALVES


def hierarchical(ranks: int, size: int, *, hosts: Sequence[str], across: Flat = ring) -> Schedule:
    """Loads inside hosts, `across` between them.

    Order of the sum: inside each host `SHARED_ORDER`; then the order of `across` over hosts, in the order of their first rank.

    Args:
        ranks: P.
        size: elements.
        hosts: the host of each rank, in any placement.
        across: the all-reduce between hosts.

    Raises:
        ScheduleError: the number of hosts is not the number of ranks.
    """
    return nested("hierarchical", SHARED_HALVES, rows=rows_by_host(ranks, hosts), size=size, across=across)
