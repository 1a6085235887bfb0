"""How fast ranks talk, for every pair of hosts, and what messages cost the ranks that send and receive them."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations

import torch

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.cluster import Link
from tatami.comm.base import AbstractCommunicator
from tatami.progress import reported

SMALL_BYTES = 8
LARGE_BYTES = 4 * 1024 * 1024
_WARM_UPS = 3
_LONG_S, _FEWEST, _FEW = 6.0, 2, 3
"""A link of 20 Mbit/s takes 1.7 s for large messages both ways: after so long only the fewest exchanges are made. Not earlier,
as a new connection takes up to four messages to find its pace on a slow link: of them some take twice as long as later ones."""
_LEAST_LATENCY = 0.05
"""Smallest fraction of half a round trip that is left for the wire."""


def measure_links(
    comm: AbstractCommunicator,
    *,
    small_repeats: int = 101,
    large_repeats: int = 11,
    large_bytes: int = LARGE_BYTES,
    pairs: Collection[tuple[str, str]] | None = None,
    clock: Clock | None = None,
) -> dict[tuple[str, str], Link]:
    """The links between hosts, and between two ranks of one host, one after the other while all others wait. Collective.

    Each is measured between the first ranks of its two hosts (or the first two of one). The latency is half the median of round
    trips of small messages. The bandwidth is what large ones have that both send each other at the same time, as in a sum of
    gradients: a full-duplex link carries them a little slower than one alone, and a radio link half as fast.

    Args:
        small_repeats, large_repeats: exchanges to take the median of, fewer where they take seconds.
        large_bytes: size of a large message.
        pairs: of hosts, in sorted order; all where None.

    Returns:
        By pair of host names in sorted order, both the same for a host's own local link; a host with one rank has none.
    """
    clock = clock or SystemClock()
    links = {}
    pairs_of_ranks = link_ranks(comm.hosts).items()
    for hosts, (one, other) in reported(pairs_of_ranks, "measuring links", unit="links", is_shown=comm.rank == 0):
        if pairs is not None and hosts not in pairs:
            continue
        latency_s = _exchange_s(comm, one, other, size_bytes=SMALL_BYTES, in_turn=True, repeats=small_repeats, clock=clock) / 2
        large_s = _exchange_s(comm, one, other, size_bytes=large_bytes, in_turn=False, repeats=large_repeats, clock=clock)
        # A large message that came no later than a small one says nothing more than that it was no slower.
        transfer_s = max(large_s - latency_s, 0.01 * large_s)
        links[hosts] = Link(bandwidth_bytes_per_s=large_bytes / transfer_s, latency_s=latency_s)
    return links


def without_messages(
    links: Mapping[tuple[str, str], Link], hosts: tuple[str, ...], messages_s: Sequence[float]
) -> dict[tuple[str, str], Link]:
    """The links without what their two ranks spend on a message: that is the processors', and counted there.

    Args:
        links: as `measure_links` found them.
        hosts: of every rank.
        messages_s: of every rank (`Processor.message_s`).
    """
    ranks = link_ranks(hosts)
    found = {}
    for pair, link in links.items():
        wire_s = link.latency_s - sum(messages_s[rank] for rank in ranks[pair])
        found[pair] = replace(link, latency_s=max(wire_s, _LEAST_LATENCY * link.latency_s))
    return found


def link_ranks(hosts: tuple[str, ...]) -> Mapping[tuple[str, str], tuple[int, int]]:
    """Which two ranks measure the link of which pair of hosts, given the host of every rank."""
    ranks: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        ranks.setdefault(host, []).append(rank)
    pairs = {(host, host): (members[0], members[1]) for host, members in ranks.items() if len(members) > 1}
    for first, second in combinations(sorted(ranks), 2):
        pairs[first, second] = (ranks[first][0], ranks[second][0])
    return pairs


def _exchange_s(
    comm: AbstractCommunicator, one: int, other: int, *, size_bytes: int, in_turn: bool, repeats: int, clock: Clock
) -> float:
    """The median over `repeats` of messages both ways, the same on every rank; of fewer after `_LONG_S`. Collective.

    Of three and fewer the fastest counts: the others may still be those of a new connection.

    Args:
        in_turn: the second message is sent when the first has come, not at the same time.
    """
    sent, received = (torch.zeros(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(2))
    peer = other if comm.rank == one else one
    seconds: list[float] = []
    comm.barrier()
    began_s = clock.now_s()
    while comm.rank in (one, other) and not sent[0] and not received[0]:
        start_s = clock.now_s()
        if comm.rank == one:
            is_long = start_s - began_s > _LONG_S and len(seconds) >= _FEWEST
            sent[0] = is_long or len(seconds) == repeats + _WARM_UPS - 1  # the last one, as the other end learns by it
        if in_turn and comm.rank == other:
            comm.recv(received, peer)
            comm.send(sent, peer)
        else:
            request = comm.irecv(received, peer)
            comm.send(sent, peer)
            request.wait()
        seconds.append(clock.now_s() - start_s)
    warm = sorted(seconds[min(_WARM_UPS, len(seconds) // 2) :])
    typical_s = warm[(len(warm) - 1) // 2 if len(warm) > _FEW else 0] if warm else 0.0
    return float(comm.bcast_object(typical_s, root=one))


_SMALL_BYTES, _LARGE_BYTES = 8, 64 * 1024
_SMALL_BURST, _LARGE_BURST = 16, 8
"""Long messages cost twice as much for a byte as those that are sent at once and buffered, and gradients are long. So many of
them cross 100 Mbit/s while the ranks sleep."""
_TRAVEL_S, _LONGEST_TRAVEL_S = 0.05, 1.0
_SPINS = 1000
_SPIN_S = 0.25
"""More than two periods of a container's quota."""


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """What messages cost one rank.

    Attributes:
        message_s: seconds for each message sent, or received.
        copy_bytes_per_s: of the bytes in it; infinite where that cannot be told from none.
        core_share: what part of a core the rank had.
    """

    message_s: float
    copy_bytes_per_s: float
    core_share: float


def measure_message_costs(
    comm: AbstractCommunicator, *, repeats: int = 7, clock: Clock | None = None, cpu_s: Callable[[], float] = time.thread_time
) -> list[MessageCost]:
    """What a message costs every rank, the same list on all of them: CPU time, over its share of a core. Collective.

    Waiting is left out: messages are posted, some time passes in which they travel, and then they are taken. The first burst of
    each size, which is not counted, shows how long that takes. All ranks do it at once, as they will in a run.

    Args:
        comm: the ranks; one alone has nothing to send.
        repeats: bursts to take the median of.
        clock: of the wall.
        cpu_s: the CPU time of this rank so far.
    """
    clock = clock or SystemClock()
    if comm.size == 1:
        return [MessageCost(message_s=0.0, copy_bytes_per_s=float("inf"), core_share=1.0)]
    comm.barrier()
    share = core_share(clock=clock, cpu_s=cpu_s)
    small_s, large_s = (
        _bursts_s(comm, size_bytes, burst, repeats=repeats, clock=clock, cpu_s=cpu_s)
        for size_bytes, burst in ((_SMALL_BYTES, _SMALL_BURST), (_LARGE_BYTES, _LARGE_BURST))
    )
    byte_s = (large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES) / share
    mine = MessageCost(message_s=small_s / share, copy_bytes_per_s=1 / byte_s if byte_s > 0 else float("inf"), core_share=share)
    return list(comm.allgather_object(mine))


def _bursts_s(
    comm: AbstractCommunicator, size_bytes: int, burst: int, *, repeats: int, clock: Clock, cpu_s: Callable[[], float]
) -> float:
    """CPU seconds of one message, sent or received, of a burst to the next rank and from the one before: the median."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    values = [torch.zeros(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(burst)]
    rooms = [torch.empty(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(burst)]
    travel_s, spent_s = _TRAVEL_S, []
    for _ in range(repeats + 1):
        comm.barrier()
        began_s, start_s = clock.now_s(), cpu_s()
        requests = [comm.irecv(room, before) for room in rooms] + [comm.isend(each, after) for each in values]
        posted_s = cpu_s() - start_s
        clock.sleep(travel_s)
        start_s = cpu_s()
        for request in requests:
            request.wait()
        spent_s.append((posted_s + cpu_s() - start_s) / (2 * burst))
        if len(spent_s) == 1:  # looking for messages that are still on their way would be counted as copying them
            travel_s = min(max(travel_s, clock.now_s() - began_s), _LONGEST_TRAVEL_S)
    return statistics.median(spent_s[1:])


def core_share(*, clock: Clock, cpu_s: Callable[[], float], pace: Pace = NO_PACE) -> float:
    """CPU seconds that a rank gets in a second in which it wants all.

    Args:
        clock: of the wall.
        cpu_s: the CPU time of this rank so far.
        pace: of a rank that is slowed down, see `tatami.clock`.
    """
    start_s, start_cpu_s = clock.now_s(), cpu_s()
    while (spent_s := clock.now_s() - start_s) < _SPIN_S:
        # The loop itself is the measurement: it wants a whole core, and CPU time says how much it got.
        pace.begin()
        for _ in range(_SPINS):
            pass
        pace.end()
    return min(1.0, max(0.01, (cpu_s() - start_cpu_s) / spent_s))
