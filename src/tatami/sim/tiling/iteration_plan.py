"""A tiling as what each processor computes and sends in one iteration: the same for every iteration until it is re-tiled.

What is sent is `tatami.tiling.traffic_of`'s to say, which the ranks of a run read as well.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from tatami.cluster import Cluster, Processor, SpeedTable
from tatami.collective import Schedule
from tatami.sim.allreduce import NATIVES, expand
from tatami.sim.tiling.work import NO_STARTUP, Startup, Work, work_of
from tatami.tiling import Layout, PlannedSum, SumKind, traffic_of
from tatami.tiling.compute import calls_s, scatter
from tatami.tiling.overlap import late_share
from tatami.tiling.span import micro_batch_sizes
from tatami.tiling.sum_price import sum_size
from tatami.tiling.summing import transfer_rates
from tatami.tiling.traffic import bucket_sum
from tatami.workload import Workload

_NATIVE = NATIVES["mpich"]
"""What the library of a run does where the sum is left to it."""


@dataclass(frozen=True, kw_only=True)
class FloorSum:
    """A planned sum, ready to be replayed.

    Attributes:
        ranks: on the cluster, of each of the schedule's ranks.
        schedule: without native phases.
        processors: of each of its ranks.
    """

    planned: PlannedSum
    ranks: tuple[int, ...]
    schedule: Schedule
    processors: tuple[Processor, ...]

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Which of the schedule's ranks each rank is."""
        return {rank: place for place, rank in enumerate(self.ranks)}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What a rank computes, and the sums over its replica that follow.

    Attributes:
        flop: of this processor.
        backward: whether it is part of compute 2.
        sums: one after the other, each with everyone of the replica; none where the rank is alone.
        leaves: sums of gradients that begin then, while the rank goes on.
    """

    flop: float
    backward: bool
    sums: tuple[FloorSum, ...]
    leaves: tuple[FloorSum, ...] = ()


class Floor:
    """One tiling, ready to be replayed.

    Attributes:
        names: the processor of each rank that takes part; one without a tile does where gradients are summed, or where it was
            measured what an iteration costs it however little it computes.
        legs: of each such rank, forward block by block and backward the other way round: every sum over a replica is a meeting.
        update_flop: compute 3 of each such rank.
        works: of each rank that has a tile, as the controller counts them.
        gradients: the sums across replicas.
        across: those of them that begin when the backward pass is done, one after the other.
        waits: for the slowest of noisy ranks, as a part of what each computes; that of `AlphaBetaCost`.
    """

    def __init__(
        self,
        layout: Layout,
        *,
        workload: Workload,
        cluster: Cluster,
        speeds: Mapping[str, float] | None = None,
        startup: Startup = NO_STARTUP,
        buckets: int = 1,
    ) -> None:
        """Prepare a layout.

        Args:
            layout: who has which tiles.
            workload: what is laid out.
            cluster: rank r runs on its processor r.
            speeds: flop/s by name. Where one depends on the size of the tile, flop are counted at that of its largest size.
            startup: what each tile costs beyond its area.
            buckets: in how many gradients leave while the backward pass computes, where each rank is a replica; 1: after it.
        """
        tiling = layout.cut(samples=workload.samples, units=workload.units)
        again, numbers = ([getattr(each, name) for each in layout.replicas] for name in ("recomputes", "micro_batches"))
        self.tilings = tilings = layout.cut_blocks(workload)
        names = [processor.name for processor in cluster.processors]
        hosts = cluster.host_of
        self.traffic = traffic_of(
            tilings or (tiling,),
            workload=workload,
            names=names,
            hosts=hosts,
            rates=transfer_rates(cluster),
            micro_batches=numbers,
            recomputes=again,
        )
        self._cluster = cluster
        self._rank_of = cluster.rank_of
        self._schedules: dict[int, Schedule] = {}
        self.gradients = tuple(map(self._ready, self.traffic.gradients))
        self.across = self.gradients
        placed = {tile.processor for tile in tiling.tiles}
        self.names = {
            rank: each.name
            for rank, each in enumerate(cluster.processors)
            if each.name in placed or self.gradients or self.traffic.statistics or each.step_s
        }
        statistics = [self._ready(each) for each in self.traffic.statistics]
        self.legs: dict[int, tuple[Leg, ...]] = {
            rank: _idle_legs(
                cluster.by_name[name], speed=(speeds or {}).get(name, 1.0), blocks=max(len(tilings), 1), statistics=statistics
            )
            for rank, name in self.names.items()
        }
        self.update_flop: dict[int, float] = dict.fromkeys(self.names, 0.0)
        self.works: dict[int, float] = {}
        self.waits = scatter([each for each in cluster.processors if each.name in placed])
        for replica, sums, number, recomputing in zip(tiling.replicas, self.traffic.replicas, numbers, again, strict=True):
            samples = replica[0].samples.size
            sizes = micro_batch_sizes(samples, number=number)
            ready = [self._ready(each) for each in sums]
            each_time = len(ready) // len(sizes)
            for name in (tile.processor for tile in replica):
                tiles = [each.by_processor[name] for each in tilings]
                speed = (speeds or {}).get(name, 1.0)
                spent_s = calls_s(cluster.by_name[name], blocks=len(tiles), micro_batches=len(sizes))
                own = _with_calls(startup, spent_s, blocks=len(tiles), speed=speed)
                work = work_of(tiles, samples=samples, workload=workload, startup=own)
                work = _at_its_size(work, speed=speed, micro_batches=len(sizes))
                passes = workload.passes(recomputes=recomputing)
                work = work.repeated(passes)
                rank = self._rank_of[name]
                self.legs[rank] = tuple(
                    leg
                    for index, size in enumerate(sizes)
                    for leg in _legs(
                        work.part(size / samples if samples else 1.0),
                        [*ready[index * each_time : (index + 1) * each_time], *statistics],
                    )
                )
                self.update_flop[rank] = work.update_flop
                self.works[rank] = passes * workload.tile_work([tile.units.size for tile in tiles], samples=samples)
        if buckets > 1:
            elements = sum(each.planned.schedule.size for each in self.gradients)
            cuts = [elements * index // buckets for index in range(buckets + 1)]
            self.gradients = tuple(
                self._ready(bucket_sum(names, hosts, size=stop - start, workload=workload)) for start, stop in pairwise(cuts)
            )
            self.across = ()
            early = min(buckets - 1, int((1 - late_share(workload)) * buckets))
            messages = _messages_of(self.gradients[0].planned)
            for rank, legs in self.legs.items():
                flop = messages * cluster.processors[rank].message_s * float((speeds or {}).get(self.names[rank], 1.0))
                self.legs[rank] = _with_buckets(legs, self.gradients, early=early, handling_flop=flop)

    def _ready(self, planned: PlannedSum) -> FloorSum:
        # Alike sums share one schedule: what it has looked up of its groups is looked up once.
        key = id(planned.schedule)
        if key not in self._schedules:
            self._schedules[key] = expand(planned.schedule, rule=_NATIVE, element_bytes=planned.element_bytes)
        return FloorSum(
            planned=planned,
            ranks=tuple(self._rank_of[name] for name in planned.processors),
            schedule=self._schedules[key],
            processors=tuple(self._cluster.by_name[name] for name in planned.processors),
        )


def _messages_of(planned: PlannedSum) -> int:
    """How many messages each rank of a sum sends and receives."""
    schedule = planned.schedule
    size = sum_size(schedule.algorithm, members=schedule.ranks, size=schedule.size, element_bytes=planned.element_bytes)
    return 2 * size.messages


def _with_buckets(legs: Sequence[Leg], buckets: Sequence[FloorSum], *, early: int, handling_flop: float) -> tuple[Leg, ...]:
    """The legs of a rank, its last backward pass cut so that each of the `early` buckets leaves after its part of the flop.

    Wires hide behind computing, and messages do not: the rank computes nothing while it handles those of the early buckets.
    """
    first = max((index + 1 for index, leg in enumerate(legs) if not leg.backward), default=0)
    each = sum(leg.flop for leg in legs[first:]) / len(buckets)
    result, waiting, until, handled = list(legs[:first]), list(buckets), each, 0.0
    for leg in legs[first:]:
        left = leg.flop
        while len(waiting) > len(buckets) - early and until <= left:
            result.append(Leg(flop=until + handled, backward=True, sums=(), leaves=(waiting.pop(0),)))
            left, until, handled = left - until, each, handling_flop
        result.append(replace(leg, flop=left + handled))
        until, handled = until - left, 0.0
    return (*result, Leg(flop=0.0, backward=True, sums=(), leaves=tuple(waiting)))


def _with_calls(startup: Startup, seconds: float, *, blocks: int, speed: float) -> Startup:
    """With the calls of an iteration shared out among the blocks, as flop at this speed."""
    each = seconds / max(blocks, 1)
    return replace(startup, tile_flop=startup.tile_flop + each * float(speed)) if each else startup


def _idle_legs(processor: Processor, *, speed: float, blocks: int, statistics: Sequence[FloorSum]) -> tuple[Leg, ...]:
    """What an iteration costs a processor without a tile, before it takes part in the gradient sums."""
    flop = processor.step_s * float(speed)
    if statistics:
        work = Work(forward=(flop, *[0.0] * (blocks - 1)), backward=(0.0,) * blocks, update_flop=0.0)
        return _legs(work, statistics)
    return (Leg(flop=flop, backward=False, sums=()),) if flop else ()


def _at_its_size(work: Work, *, speed: float, micro_batches: int) -> Work:
    """As much work as takes as long at the speed for large tiles as this one does at that of its micro-batches' size."""
    if not isinstance(speed, SpeedTable) or not work.total_flop:
        return work
    more = float(speed) / speed.at(work.total_flop / micro_batches)
    return Work(
        forward=tuple(more * flop for flop in work.forward),
        backward=tuple(more * flop for flop in work.backward),
        update_flop=more * work.update_flop,
    )


def _legs(work: Work, sums: Sequence[FloorSum]) -> tuple[Leg, ...]:
    """The legs of one rank; computations without a sum between them become one leg."""
    kinds = {False: (SumKind.FORWARD, SumKind.FORWARD_STATISTICS), True: (SumKind.BACKWARD, SumKind.BACKWARD_STATISTICS)}

    def of(backward: bool, block: int) -> tuple[FloorSum, ...]:
        return tuple(each for each in sums if each.planned.kind in kinds[backward] and each.planned.block == block)

    legs = [Leg(flop=flop, backward=False, sums=of(False, block)) for block, flop in enumerate(work.forward)]
    for block, flop in reversed(list(enumerate(work.backward))):
        legs.append(Leg(flop=flop, backward=True, sums=of(True, block)))
    result: list[Leg] = []
    for leg in legs:
        last = result[-1] if result else None
        if last is not None and last.backward == leg.backward and not last.sums:
            result[-1] = replace(leg, flop=last.flop + leg.flop)
        else:
            result.append(leg)
    return tuple(result)
