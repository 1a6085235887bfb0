"""How fast ranks talk: latency by small messages, bandwidth by large ones, for every pair of hosts."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from itertools import combinations

import torch

from tatami.clock import Clock, SystemClock
from tatami.cluster import Link
from tatami.comm.base import AbstractCommunicator

SMALL_BYTES = 8
LARGE_BYTES = 4 * 1024 * 1024
_WARM_UPS = 3


def measure_links(
    comm: AbstractCommunicator,
    *,
    small_repeats: int = 101,
    large_repeats: int = 11,
    large_bytes: int = LARGE_BYTES,
    clock: Clock | None = None,
) -> dict[tuple[str, str], Link]:
    """The links between hosts, and between two ranks of one host, one after the other while all others wait. Collective.

    Each is measured between the first ranks of its two hosts (or the first two of one), by round trips: the latency is half
    the median of small ones, the bandwidth what the median of large ones takes longer.

    Args:
        small_repeats, large_repeats: round trips to take the median of.
        large_bytes: size of a large message.
        clock: for tests.

    Returns:
        By pair of host names in sorted order, both the same for a host's own local link; a host with one rank has none.
    """
    clock = clock or SystemClock()
    links = {}
    for hosts, (one, other) in link_ranks(comm.hosts).items():
        small_s = _round_trip_s(comm, one, other, size_bytes=SMALL_BYTES, repeats=small_repeats, clock=clock)
        large_s = _round_trip_s(comm, one, other, size_bytes=large_bytes, repeats=large_repeats, clock=clock)
        # A large message that came no later than a small one says nothing more than that it was no slower.
        transfer_s = max(large_s - small_s, 0.01 * large_s) / 2
        links[hosts] = Link(bandwidth_bytes_per_s=large_bytes / transfer_s, latency_s=small_s / 2)
    return links


def link_ranks(hosts: tuple[str, ...]) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Which two ranks measure the link of which pair of hosts, given the host of every rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    pairs = {(host, host): (members[0], members[1]) for host, members in ranks.items() if len(members) > 1}
    for first, second in combinations(sorted(ranks), 2):
        pairs[first, second] = (ranks[first][0], ranks[second][0])
    return pairs


def _round_trip_s(comm: AbstractCommunicator, one: int, other: int, *, size_bytes: int, repeats: int, clock: Clock) -> float:
    """The median over `repeats` of there and back, the same on every rank. Collective."""
    message = torch.zeros(size_bytes, dtype=torch.uint8, device="cpu")
    seconds = []
    comm.barrier()
    for _ in range(repeats + _WARM_UPS):
        start_s = clock.now_s()
        if comm.rank == one:
            comm.send(message, other)
            comm.recv(message, other)
        elif comm.rank == other:
            comm.recv(message, one)
            comm.send(message, one)
        seconds.append(clock.now_s() - start_s)
    median_s = statistics.median(seconds[_WARM_UPS:])
    return float(comm.bcast_object(median_s, root=one))
