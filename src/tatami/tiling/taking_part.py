"""Who takes part: the sets of processors worth planning for, and why the others are left out.

There are 2^N sets, and a plan for one takes milliseconds to seconds. So sets are compared by a quick price, the cheapest of a
few regular layouts, and few of them are planned in full. Up to `_EVERY` processors every set is priced. Of more, the search
starts from sets that are good in some way (one processor, one host, hosts with fast links between each other, the first k by
speed, by link, by what messages cost), and adds, drops and swaps single processors from the best of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import combinations, pairwise

from tatami.cluster import Cluster, Link, Processor
from tatami.progress import reported
from tatami.tiling.cost import AbstractCost
from tatami.tiling.layout import Layout
from tatami.tiling.left_out import Reason
from tatami.tiling.memory import can_hold, in_fewest_micro_batches
from tatami.tiling.room import with_room
from tatami.tiling.speeds import at_equal_times
from tatami.tiling.timed import balanced
from tatami.tiling.weighted import data_parallel
from tatami.workload import Workload

_EVERY = 6
_ALL_COUNTS = 32
"""Up to so many processors every prefix of an order is priced; of more, numbers that double, and those around the best."""
_CLOSING = 2
"""How often prefixes close in on the best."""
_STARTS = 2
_FEW = 24
"""Up to so many processors all single moves are tried; of more, the last of every order goes, or the first comes."""
_MANY = 2048
"""With more processors, single ones are not moved and fewer prefixes of an order are priced."""
_DEEPEST = 32
"""Processors in a replica of a quick layout of so many."""
_WORK = 50_000
"""Tiles in all layouts that a local search may price; some microseconds each."""
_MOST_GROUPS = 64
_MOST_LEVELS = 6
"""Different bandwidths, and latencies, by which hosts are grouped."""
_IDEAL = Link(bandwidth_bytes_per_s=1e15, latency_s=0.0)
WORTH_PLANNING = 1.1
"""A set whose quick price is higher by more than this than the best plan is not planned."""
_HALVINGS = 60
"""Steps of a bisection, whose last interval is as small as a float resolves."""
_WORTH = 0.01
"""Fraction of an iteration that a processor must save, if only its speed counted, not to be too slow."""

Chosen = frozenset[int]


class QuickPrices:
    """The price of an iteration over any of a cluster's processors, by rank: that of the cheapest of some layouts.

    Its replicas have as many processors each.

    Args:
        idle: whether processors that do not take part are in the run all the same, so that what they cost counts.
        depths: of replicas that are known to be good, if any.
    """

    def __init__(
        self, cluster: Cluster, *, workload: Workload, cost: AbstractCost, idle: bool, depths: Iterable[int] = ()
    ) -> None:
        self.cluster = cluster
        self.tiles = 0
        """In all layouts that were priced."""
        self.found: dict[Chosen, float] = {}
        self.least = math.inf
        self._workload, self._cost, self._idle = workload, cost, idle
        self._depths = set(depths)

    def of(self, chosen: Chosen) -> float:
        """Infinite where they have no memory for the network, or one would have no work."""
        if chosen not in self.found:
            self.found[chosen] = self._least(chosen)
        return self.found[chosen]

    def _least(self, chosen: Chosen) -> float:
        workload, cost = self._workload, self._cost
        own = self.cluster.only([self.cluster.processors[rank].name for rank in chosen])
        run = self.cluster if self._idle else own
        members = at_equal_times(own, workload=workload).processors
        layouts = list(self._layouts(members))
        self.tiles += len(members) * len(layouts)
        at_least = [cost.at_least(layout, cluster=run, workload=workload) for layout in layouts]
        least, depth = math.inf, 0
        lacking: list[Layout] = []
        for index in sorted(range(len(layouts)), key=at_least.__getitem__):
            layout = layouts[index]
            if at_least[index] >= least:
                break
            if at_least[index] > WORTH_PLANNING * self.least:
                # It is not planned, whatever it costs; those before it may be, with other shares.
                least = min(least, math.inf if lacking else at_least[index])
                break
            if layout.empty(workload):
                continue
            held = in_fewest_micro_batches(layout, cluster=run, workload=workload)
            if held is None:
                lacking.append(layout)
                continue
            price = cost.price(held, cluster=run, workload=workload).total
            if price < least:
                least, depth = price, layout.deepest
        if least == math.inf and lacking:
            # To make room takes much longer than a price, and than to see that there is none.
            able = [each for each in lacking if can_hold(each, cluster=own, workload=workload, ranks=run.size)]
            if able and at_least[layouts.index(able[0])] > WORTH_PLANNING * self.least:
                return at_least[layouts.index(able[0])]  # it is not planned, whatever it costs
            for layout in dict.fromkeys((*able[:1], *(able and [max(able, key=lambda each: each.deepest)]))):
                held = with_room(layout, cluster=run, workload=workload, cost=cost)
                if held is not None and not held.empty(workload):
                    price = cost.price(held, cluster=run, workload=workload).total
                    least, depth = min((least, depth), (price, held.deepest))
        if least < math.inf:
            self._depths.add(depth)
            self.least = min(self.least, least)
        return least

    def _layouts(self, members: Sequence[Processor]) -> Iterator[Layout]:
        yield data_parallel(members)
        if len(members) == 1 or not self._workload.blocks:
            return
        order = sorted(members, key=lambda each: each.speed)
        hosts: dict[str, list[Processor]] = {}
        for each in order:
            hosts.setdefault(each.host, []).append(each)
        orders = [order]
        if 1 < len(hosts) < len(order):
            orders.append([each for own in hosts.values() for each in own])
            layout = balanced(list(hosts.values()), workload=self._workload)
            if layout is not None:
                yield layout
        for replicas in self._numbers(len(members)):
            stops = [round(len(members) * place / replicas) for place in range(replicas + 1)]
            for listed in orders if replicas > 1 else orders[:1]:
                parts = [listed[start:stop] for start, stop in pairwise(stops)]
                layout = balanced(parts, workload=self._workload)
                if layout is not None:
                    yield layout

    def _numbers(self, members: int) -> list[int]:
        """Numbers of replicas: those of depths that double; of many processors only of depths near those best for others."""
        depths = [*(2**power for power in range(1, (members - 1).bit_length())), members]
        if members > _MANY:
            depths = [each for each in depths if each <= _DEEPEST]
        if members > _EVERY and self._depths:
            span = 2 if members <= _ALL_COUNTS else 1
            depths = [each for each in depths if any(best <= span * each and each <= span * best for best in self._depths)]
        return sorted({max(1, round(members / depth)) for depth in depths})


def subsets(quick: QuickPrices, *, workload: Workload) -> list[Chosen]:
    """Sets of processors, by rank, in the order of their quick prices."""
    cluster = quick.cluster
    everyone = frozenset(range(cluster.size))
    quick.of(everyone)
    if cluster.size <= _EVERY:
        for size in range(1, cluster.size):
            for ranks in combinations(range(cluster.size), size):
                quick.of(frozenset(ranks))
    else:
        orders = _orders(cluster, workload=workload)
        for chosen in reported(_groups(cluster), "planning: comparing groups of machines", unit="groups"):
            quick.of(chosen)
        for order in reported(orders, "planning: choosing machines", unit="orders"):
            _prefixes(quick, order)
        for chosen in sorted(_groups(cluster), key=quick.of)[:_STARTS]:
            for order in orders[:1]:
                _prefixes(quick, [rank for rank in order if rank in chosen])
        for chosen in sorted(quick.found, key=quick.of)[: _STARTS if cluster.size <= _MANY else 0]:
            _improve(quick, chosen, orders=orders)
    return sorted((chosen for chosen in quick.found if quick.of(chosen) < math.inf), key=quick.of)


def _orders(cluster: Cluster, *, workload: Workload) -> list[list[int]]:
    """The ranks, the best first: by speed, by host, by memory, by what messages and calls cost, and by links."""
    processors = cluster.processors
    blocks = len(workload.blocks)
    speeds = [float(each.speed) for each in at_equal_times(cluster, workload=workload).processors]
    hosts: dict[str, float] = {}
    for each, speed in zip(processors, speeds, strict=True):
        hosts[each.host] = hosts.get(each.host, 0.0) + speed
    bandwidth, latency = _link_quality(cluster)
    keys: list[Callable[[int], tuple[float, ...]]] = [
        lambda rank: (-speeds[rank],),
        lambda rank: (processors[rank].message_s, -processors[rank].copy_bytes_per_s),
        lambda rank: (processors[rank].step_s + blocks * processors[rank].call_s,),
        lambda rank: (-(processors[rank].memory_bytes or math.inf),),
        lambda rank: (bandwidth[processors[rank].host],),
        lambda rank: (latency[processors[rank].host],),
    ]
    found = []
    for key in keys:
        values = [key(rank) for rank in range(cluster.size)]
        if key is keys[0] or len(set(values)) > 1:
            found.append(sorted(range(cluster.size), key=lambda rank: (values[rank], -speeds[rank], rank)))
    if 1 < len(hosts) < cluster.size:
        by_host = sorted(hosts, key=lambda host: -hosts[host])
        place = {host: index for index, host in enumerate(by_host)}
        found.append(sorted(range(cluster.size), key=lambda rank: (place[processors[rank].host], -speeds[rank], rank)))
    return found


def _link_quality(cluster: Cluster) -> tuple[dict[str, float], dict[str, float]]:
    """By host: seconds that a byte, and a message, takes to the other hosts, on average."""
    links = {each.host: cluster.link_of(each.host) for each in cluster.processors}
    others = max(len(links) - 1, 1)
    byte_s = {host: 1 / link.bandwidth_bytes_per_s for host, link in links.items()}
    latency_s = {host: link.latency_s for host, link in links.items()}
    for pair, link in cluster.links.items():
        if pair[0] != pair[1] and pair[0] in links and pair[1] in links:
            for host in pair:
                byte_s[host] += (1 / link.bandwidth_bytes_per_s - 1 / links[host].bandwidth_bytes_per_s) / others
                latency_s[host] += (link.latency_s - links[host].latency_s) / others
    return byte_s, latency_s


def _groups(cluster: Cluster) -> list[Chosen]:
    """Each host by itself, and hosts between which there are faster links, or shorter ones, than to others; the fastest."""
    ranks: dict[str, list[int]] = {}
    for rank, each in enumerate(cluster.processors):
        ranks.setdefault(each.host, []).append(rank)
    groups = {frozenset(own) for own in ranks.values()}
    links = [*map(cluster.link_of, ranks), *(link for pair, link in cluster.links.items() if pair[0] != pair[1])]
    byte_s = sorted({1 / link.bandwidth_bytes_per_s for link in links})
    latency_s = sorted({link.latency_s for link in links})
    limits = [(most, math.inf) for most in _few(byte_s)] + [(math.inf, most) for most in _few(latency_s)]
    for most_byte_s, most_latency_s in limits:
        for hosts in _components(cluster, list(ranks), most_byte_s=most_byte_s, most_latency_s=most_latency_s):
            groups.add(frozenset(rank for host in hosts for rank in ranks[host]))
    groups.discard(frozenset(range(cluster.size)))
    speed = {chosen: math.fsum(float(cluster.processors[rank].speed) for rank in chosen) for chosen in groups}
    return sorted(groups, key=lambda chosen: (-speed[chosen], sorted(chosen)))[:_MOST_GROUPS]


def _few(amounts: Sequence[float]) -> Sequence[float]:
    """All but the greatest; of many, some."""
    return amounts[: -1 : max(1, len(amounts) // _MOST_LEVELS)]


def _components(cluster: Cluster, hosts: Sequence[str], *, most_byte_s: float, most_latency_s: float) -> Iterator[set[str]]:
    """Hosts that quick links connect, directly or over others."""

    def is_quick(link: Link) -> bool:
        return 1 / link.bandwidth_bytes_per_s <= most_byte_s and link.latency_s <= most_latency_s

    usual = {host: is_quick(cluster.link_of(host)) for host in hosts}
    exceptions: dict[str, dict[str, bool]] = {host: {} for host in hosts}
    for (one, other), link in cluster.links.items():
        if one != other and one in usual and other in usual:
            exceptions[one][other] = exceptions[other][one] = is_quick(link)
    left, usual_left = dict.fromkeys(hosts), {host: None for host in hosts if usual[host]}
    while left:
        first = next(iter(left))
        edge = [first]
        group: set[str] = set()
        while edge:
            host = edge.pop()
            if host not in left:
                continue
            del left[host]
            usual_left.pop(host, None)
            group.add(host)
            # Hosts whose own link is slow are not gone through: of ten thousand, all would be, for each of them.
            known = exceptions[host]
            edge += [each for each, quick in known.items() if quick and each in left]
            if usual[host]:
                edge += [each for each in usual_left if each not in known]
                if not known:
                    usual_left.clear()  # all are on the edge now
        yield group


def _prefixes(quick: QuickPrices, order: Sequence[int]) -> None:
    """Price the first k of an order, for every k or for numbers that double from either end and then close in on the best."""
    size = len(order)
    if size <= _ALL_COUNTS:
        for count in range(1, size + 1):
            quick.of(frozenset(order[:count]))
        return
    doubling = [2**power for power in range(size.bit_length())]
    fewer = doubling[::2]
    if size > _MANY:
        # Where very many have no memory for the network together, neither have nearly as many.
        fewer = [1, size // 32, size // 4] if quick.of(frozenset(order)) < math.inf else []
    counts = sorted({size, *doubling, *(size - gone for gone in fewer if gone < size)})
    prices = {count: quick.of(frozenset(order[:count])) for count in counts}
    for _ in range(_CLOSING):
        best = min(prices, key=lambda count: (prices[count], count))
        counts = sorted(prices)
        at = counts.index(best)
        between = [
            (low + high) // 2
            for low, high in ((counts[max(at - 1, 0)], best), (best, counts[min(at + 1, len(counts) - 1)]))
            if high - low > max(1, size // _ALL_COUNTS)
        ]
        if not between or prices[best] == math.inf:
            return
        for count in between:
            prices[count] = quick.of(frozenset(order[:count]))


def _improve(quick: QuickPrices, chosen: Chosen, *, orders: Sequence[Sequence[int]]) -> None:
    """Drop or add one processor at a time, and swap one for another where neither helps, as long as that is cheaper."""
    limit = quick.tiles + _WORK
    while quick.tiles < limit:
        for swaps in (False, True):
            best = min(_neighbours(chosen, orders, swaps=swaps), key=quick.of, default=chosen)
            if quick.of(best) < quick.of(chosen):
                chosen = best
                break
        else:
            return


def _neighbours(chosen: Chosen, orders: Sequence[Sequence[int]], *, swaps: bool) -> Iterator[Chosen]:
    size = len(orders[0])
    if size <= _FEW:
        inside, outside = sorted(chosen), [rank for rank in range(size) if rank not in chosen]
    else:
        inside = sorted({next(rank for rank in reversed(order) if rank in chosen) for order in orders})
        firsts = (next((rank for rank in order if rank not in chosen), None) for order in orders)
        outside = sorted({rank for rank in firsts if rank is not None})
    if swaps:
        yield from (chosen - {one} | {other} for one in inside for other in outside)
        return
    if len(chosen) > 1:
        yield from (chosen - {rank} for rank in inside)
    yield from (chosen | {rank} for rank in outside)


def reason_for(
    gone: Chosen, *, chosen: Chosen, depth: int, cluster: Cluster, workload: Workload, cost: AbstractCost, idle: bool
) -> Reason:
    """Why processors are left out of those that take part: the first of what would have to be ideal for them to save time.

    Args:
        depth: of the replicas of the others.
    """
    depths = (depth,) if cluster.size > _MANY else ()

    def saves(**ideal: bool) -> bool:
        quick = QuickPrices(_idealized(cluster, **ideal), workload=workload, cost=cost, idle=idle, depths=depths)
        return quick.of(chosen | gone) < (1 - _WORTH) * quick.of(chosen)

    fleet = at_equal_times(cluster, workload=workload).processors
    own, all_ = ([float(fleet[rank].speed) for rank in ranks] for ranks in (chosen, chosen | gone))
    is_worth = math.fsum(own) < (1 - _WORTH) * math.fsum(all_)
    if depth == 1 and is_worth and _whole_s(all_, workload.samples) >= (1 - _WORTH) * _whole_s(own, workload.samples):
        return Reason.SAMPLES
    if not saves(links=True, messages=True, memory=True):
        return Reason.SPEED
    if cluster.memory_known and saves(memory=True):
        return Reason.MEMORY
    costs = any(each.message_s or each.call_s or each.step_s or each.copy_bytes_per_s < math.inf for each in cluster.processors)
    return Reason.MESSAGES if costs and saves(messages=True) else Reason.LINK


def _whole_s(speeds: Sequence[float], samples: int) -> float:
    """When the last of these processors is done with its share of whole samples, in samples over speed."""
    low, high = samples / math.fsum(speeds), (samples + len(speeds)) / math.fsum(speeds)
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(int(middle * speed) for speed in speeds) >= samples else (middle, high)
    return high


def _idealized(cluster: Cluster, *, links: bool = False, messages: bool = False, memory: bool = False) -> Cluster:
    processors = cluster.processors
    if messages:
        processors = tuple(
            replace(each, message_s=0.0, copy_bytes_per_s=math.inf, call_s=0.0, step_s=0.0) for each in processors
        )
    if memory:
        processors = tuple(replace(each, memory_bytes=None) for each in processors)
    if links:
        processors = tuple(replace(each, link=None) for each in processors)
        return replace(cluster, processors=processors, local=_IDEAL, network=_IDEAL, links={})
    return replace(cluster, processors=processors)
