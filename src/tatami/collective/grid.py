"""How ranks lie in a grid: (M, N) for a torus, and rows that follow the hosts."""

from __future__ import annotations

from collections.abc import Sequence

from tatami.errors import ScheduleError

Grid = tuple[int, int]
"""(M, N): M ranks in a row, N rows."""


def choose_grid(hosts: Sequence[str]) -> Grid:
    """(M, N) that follows the hosts: the longest rows that lie inside hosts, so that only columns use the network.

    With one rank on every host a row has to cross hosts; then M is 2, or the smallest divisor of P: with one process per node
    M = 2 was fastest, as a larger M means more rounds in the row (Tamura, Hanawa). (1, P), one column, where P is
    prime, and where hosts have several ranks but no common row.

    Args:
        hosts: the host of each rank.

    Raises:
        ScheduleError: no ranks.
    """
    ranks = len(hosts)
    if ranks < 1:
        raise ScheduleError("a grid needs at least one rank: hosts is empty")
    divisors = [m for m in range(1, ranks + 1) if ranks % m == 0]
    if len(set(hosts)) == ranks:
        m = next((m for m in divisors if 1 < m < ranks), 1)
        return m, ranks // m
    # For each rank: one after the last of the ranks that follow it on the same host.
    runs = list(range(1, len(hosts) + 1))
    for rank in range(len(hosts) - 2, -1, -1):
        if hosts[rank] == hosts[rank + 1]:
            runs[rank] = runs[rank + 1]
    m = max(m for m in divisors if all(start + m <= runs[start] for start in range(0, ranks, m)))
    return m, ranks // m


def rows_of(ranks: int, grid: Grid) -> tuple[tuple[int, ...], ...]:
    """The ranks of each of the N rows.

    Raises:
        ScheduleError: M x N is not the number of ranks, or one of them is below 1.
    """
    m, n = grid
    if m < 1 or n < 1 or m * n != ranks:
        fitting = ", ".join(f"{d}x{ranks // d}" for d in range(1, ranks + 1) if ranks % d == 0)
        raise ScheduleError(f"a grid of {m} x {n} has {m * n} places, but there are {ranks} ranks; what fits: {fitting}")
    return tuple(tuple(range(row * m, (row + 1) * m)) for row in range(n))


def rows_by_host(ranks: int, hosts: Sequence[str]) -> tuple[tuple[int, ...], ...]:
    """The ranks of each host, hosts in the order of their first rank.

    Raises:
        ScheduleError: not one host for each rank.
    """
    if len(hosts) != ranks:
        raise ScheduleError(f"{len(hosts)} hosts are named for {ranks} ranks; name the host of each rank")
    rows: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        rows.setdefault(host, []).append(rank)
    return tuple(tuple(row) for row in rows.values())
