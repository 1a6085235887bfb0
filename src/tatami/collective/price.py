"""What a schedule costs on a cluster: alpha-beta, round by round, over the cluster's own links.

In a round every rank sends and receives at once, in both directions at full rate. A rank pays each message's latency once for
each peer; its bytes go one after the other. Ranks of one host share its network port: their bytes to other hosts add up, in
and out. A round is as long as its slowest rank, and rounds follow each other. Left out: the additions themselves, and
contention for memory and inside the network.

Loads and stores pay no latency for each peer: their price is the bytes over the local link and the barriers.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from tatami.cluster import Cluster, Link
from tatami.cluster.link import slowest
from tatami.collective.halving import Doubling, Halving, num_doublings
from tatami.collective.pattern import Native
from tatami.collective.schedule import Phase, Schedule
from tatami.collective.step import RankGroup, Role, Step, Sync, Via
from tatami.errors import ScheduleError


@dataclass(frozen=True, kw_only=True)
class PhaseCost:
    """Seconds of one phase.

    Attributes:
        title: the phase's.
        rounds: how many; of a native, those of the algorithm it is priced as.
        latency_s: of messages, on the slowest rank of each round.
        transfer_s: bytes over bandwidth, on the same rank.
        sync_s: fences, barriers, posts and notices of one-sided and shared phases.
    """

    title: str
    rounds: int
    latency_s: float
    transfer_s: float
    sync_s: float

    @property
    def total_s(self) -> float:
        return self.latency_s + self.transfer_s + self.sync_s


@dataclass(frozen=True, kw_only=True)
class ScheduleCost:
    """Seconds of a schedule, by phase."""

    algorithm: str
    phases: tuple[PhaseCost, ...]

    @property
    def total_s(self) -> float:
        return sum(phase.total_s for phase in self.phases)


def price(schedule: Schedule, cluster: Cluster, *, element_bytes: int = 4) -> ScheduleCost:
    """Predicted seconds, by phase.

    Natives are priced as the better of two textbook algorithms: halving and doubling (all of the bandwidth), or, for an
    all-reduce, log2(k) rounds of the whole message (half of the latency), which libraries use on short ones.

    Args:
        schedule: rank r runs on the cluster's processor r.
        cluster: its links.
        element_bytes: of one element, 4 for float32.

    Raises:
        ScheduleError: the cluster has another number of processors than the schedule has ranks.
    """
    if cluster.size != schedule.ranks:
        raise ScheduleError(f"{schedule.algorithm} is for {schedule.ranks} ranks, the cluster has {cluster.size} processors")
    prices = _Prices(cluster, element_bytes=element_bytes)
    return ScheduleCost(algorithm=schedule.algorithm, phases=tuple(prices.phase(phase) for phase in schedule.phases))


class _Prices:
    """A cluster's links, by rank."""

    def __init__(self, cluster: Cluster, *, element_bytes: int) -> None:
        self.cluster = cluster
        self.element_bytes = element_bytes
        self.names = tuple(processor.name for processor in cluster.processors)
        self.hosts = tuple(processor.host for processor in cluster.processors)

    def phase(self, phase: Phase) -> PhaseCost:
        if isinstance(phase.what, Native):
            return self._native(phase)
        latency_s = transfer_s = 0.0
        for round_, times in phase.distinct_rounds():
            alpha_s, beta_s = self._round(phase.steps(round_))
            latency_s += times * alpha_s
            transfer_s += times * beta_s
        return PhaseCost(
            title=phase.title,
            rounds=phase.num_rounds,
            latency_s=latency_s,
            transfer_s=transfer_s,
            sync_s=max((self._sync_s(phase, group) for group in phase.groups), default=0.0),
        )

    def _native(self, phase: Phase) -> PhaseCost:
        halves = {Role.REDUCE_SCATTER: (Halving(),), Role.ALL_GATHER: (Doubling(),), Role.ALL_REDUCE: (Halving(), Doubling())}[
            phase.role
        ]
        costs = [self.phase(Phase(groups=phase.groups, what=half)) for half in halves]
        candidates = [self._sum(phase.title, costs)]
        if phase.role is Role.ALL_REDUCE:
            rounds = max((num_doublings(group.members) for group in phase.groups), default=0)
            whole = [self._round(_everything(phase.groups, distance=1 << round_)) for round_ in range(rounds)]
            candidates.append(
                PhaseCost(
                    title=phase.title,
                    rounds=rounds,
                    latency_s=sum(alpha_s for alpha_s, _ in whole),
                    transfer_s=sum(beta_s for _, beta_s in whole),
                    sync_s=0.0,
                )
            )
        return min(candidates, key=lambda cost: cost.total_s)

    @staticmethod
    def _sum(title: str, costs: list[PhaseCost]) -> PhaseCost:
        return PhaseCost(
            title=title,
            rounds=sum(cost.rounds for cost in costs),
            latency_s=sum(cost.latency_s for cost in costs),
            transfer_s=sum(cost.transfer_s for cost in costs),
            sync_s=sum(cost.sync_s for cost in costs),
        )

    def _round(self, steps: Iterable[Step]) -> tuple[float, float]:
        """(latency, transfer) in seconds of the slowest rank."""
        pair_bytes: dict[tuple[int, int], int] = defaultdict(int)
        memory_s: dict[int, float] = defaultdict(float)
        for step in steps:
            size_bytes = step.size * self.element_bytes
            if step.via.local:
                memory_s[step.issuer] += size_bytes / self._link(step.source, step.target).bandwidth_bytes_per_s
            else:
                pair_bytes[step.source, step.target] += size_bytes
        # Keys (rank or host, is it outward).
        latency_s: dict[tuple[int, bool], float] = defaultdict(float)
        local_s: dict[tuple[int, bool], float] = defaultdict(float)
        port_s: dict[tuple[str, bool], float] = defaultdict(float)
        uses_port: set[int] = set()
        for (source, target), size_bytes in pair_bytes.items():
            link = self._link(source, target)
            remote = self.hosts[source] != self.hosts[target]
            for rank, outward in ((source, True), (target, False)):
                latency_s[rank, outward] += link.latency_s
                if remote:
                    uses_port.add(rank)
                    port_s[self.hosts[rank], outward] += size_bytes / link.bandwidth_bytes_per_s
                else:
                    local_s[rank, outward] += size_bytes / link.bandwidth_bytes_per_s
        slowest = (0.0, 0.0)
        for rank in {rank for rank, _ in latency_s} | memory_s.keys():
            own_s = max(memory_s.get(rank, 0.0), local_s.get((rank, True), 0.0), local_s.get((rank, False), 0.0))
            if rank in uses_port:
                host = self.hosts[rank]
                own_s = max(own_s, port_s.get((host, True), 0.0), port_s.get((host, False), 0.0))
            alpha_s = max(latency_s.get((rank, True), 0.0), latency_s.get((rank, False), 0.0))
            slowest = max(slowest, (alpha_s, own_s), key=sum)
        return slowest

    def _sync_s(self, phase: Phase, group: RankGroup) -> float:
        """Seconds of synchronisation of one group: a barrier of k ranks is log2(k) latencies, a post or a notice is one."""
        if phase.sync is Sync.ARRIVAL:
            return 0.0
        latency_s = self._worst_latency_s(group)
        meeting_s = num_doublings(group.members) * latency_s
        rounds = phase.num_rounds
        return {
            Sync.FENCE: (rounds + 1) * meeting_s,
            Sync.BARRIER: (rounds + 1) * meeting_s,
            Sync.PSCW: rounds * latency_s,
            Sync.LOCK: meeting_s + rounds * latency_s,
        }[phase.sync]

    def _worst_latency_s(self, group: RankGroup) -> float:
        hosts = {self.hosts[rank] for rank in group.ranks}
        exceptions = [link for pair, link in self.cluster.links.items() if set(pair) <= hosts]
        usual = self.cluster.local if len(hosts) == 1 else slowest(map(self.cluster.link_of, hosts))
        # A host's own exception replaces its usual link; between several hosts one exception does not replace them all.
        known = exceptions if len(hosts) == 1 and exceptions else [usual, *exceptions]
        return max(link.latency_s for link in known)

    def _link(self, one: int, other: int) -> Link:
        return self.cluster.link(self.names[one], self.names[other])


def _everything(groups: Iterable[RankGroup], *, distance: int) -> Iterator[Step]:
    """Each member sends its whole range to the member at `distance`."""
    for group in groups:
        for member, rank in enumerate(group.ranks):
            if distance < group.members:
                target = group.ranks[(member + distance) % group.members]
                yield Step(source=rank, target=target, start=group.start, stop=group.stop, reduce=True, via=Via.MESSAGE)
