"""What an iteration sends: the one description that executor, cost model, bounds and simulator read.

Every sum of an iteration is a `PlannedSum`: when it may begin, who takes part, how many elements of how many bytes, and the
schedule that carries it out, message by message.

    forward      of a block: the parts of its outputs, over each replica                  after the block's forward pass
    backward     of a block: the parts of its inputs' gradients, over each replica        after the block's backward pass
    replicated   large gradients of replicated parameters, over all ranks                after the whole backward pass
    gradients    of all units, over their owners in the replicas; small gradients of      after the whole backward pass
                 replicated parameters ride on the same messages
                 where each rank is a replica, all gradients are one vector
    statistics   of the global batch (batch normalization), over all ranks, for      in the forward and in the backward pass of
                 each layer and direction                                            the block that lies before the layer

Sums of gradient norms and what checks exchange are not described here, because no facts of a workload say how many there are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from functools import lru_cache
from itertools import pairwise

from tatami.collective import Explicit, Phase, RankGroup, Role, Schedule, Step, Via, build
from tatami.tiling.gradient_messages import Message, Method, gradient_messages
from tatami.tiling.span import Span, micro_batch_sizes
from tatami.tiling.summing import summing_shares
from tatami.tiling.tiling import Tiling
from tatami.workload import Workload
from tatami.workload.workload import HALF_BYTES

RIDE_ALONG_ELEMENTS = 16_384
"""Replicated gradients up to this size ride on the messages between owners. Larger ones are worth an all-reduce of their own,
which moves at most twice their size for each rank instead of C - 1 times."""
STATISTICS_BYTES = 8
"""Bytes of an element of a sum of batch statistics: squares are summed in double precision, or they would lose digits."""
SIZE_DIGITS = 5
"""Digits of base 256: numbers up to 10^12."""
_MOST_PIECES, _LEAST_MESSAGE_S = 2, 0.5e-3
"""A vector is summed in so many pieces at most, whose messages take so long at least (benchmarks/sums.py): four hosts on 250
Mbit/s sum 1 MiB in 60 ms in one piece and in 53 in two or more, 64 KiB in 5 to 6 ms in any."""
_MOST_DIRECT = 16
"""So many ranks sum directly: in 2 (k - 1) messages for each. More do it by halving and doubling, as many bytes in 2 log2 k."""


class SumKind(Enum):
    """What is summed."""

    FORWARD = "forward"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    REPLICATED = "replicated"
    FORWARD_STATISTICS = "forward statistics"
    BACKWARD_STATISTICS = "backward statistics"

    @property
    def tensor_parallel(self) -> bool:
        """Whether it is over a replica."""
        return self in (SumKind.FORWARD, SumKind.BACKWARD)

    @property
    def meets(self) -> bool:
        """Whether all who take part wait for it in the midst of a pass; gradients are summed at its end."""
        return self not in (SumKind.GRADIENTS, SumKind.REPLICATED)


@dataclass(frozen=True, kw_only=True)
class PlannedSum:
    """One sum of an iteration.

    Attributes:
        kind: what is summed.
        block: it may begin when the forward (or backward) pass of this block of the workload is done; of gradients None, when
            the whole backward pass is.
        processors: who takes part; rank r of the schedule runs on `processors[r]`.
        schedule: how, over `schedule.size` elements.
        element_bytes: of one element as it travels.
        wire: the dtype of half precision to which elements are rounded on their way; None: they travel as they are.
        messages: of gradients: which units of which blocks each message carries; where all gradients are one vector, which
            elements of it, as units of block 0.
        riders: of gradients: the elements of replicated ones, the last of the vector; on messages that say so.
    """

    kind: SumKind
    block: int | None
    processors: tuple[str, ...]
    schedule: Schedule
    element_bytes: int
    wire: str | None = None
    messages: tuple[Message, ...] = ()
    riders: int = 0


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """All sums of an iteration.

    Attributes:
        replicas: the sums of each replica, in the order in which its ranks come to them; none of a replica of one rank.
        gradients: across the replicas, one after the other when the backward pass is done; where they leave in buckets before
            (`tatami.tiling.overlap`), these are not told apart here.
        statistics: over all ranks, those of the forward pass first; a rank comes to them in this order, and in a block after
            the sums over its replica.
    """

    replicas: tuple[tuple[PlannedSum, ...], ...]
    gradients: tuple[PlannedSum, ...]
    statistics: tuple[PlannedSum, ...] = ()

    @property
    def sums(self) -> tuple[PlannedSum, ...]:
        """All sums: those of replicas, of batch statistics, and of gradients."""
        return (*(each for replica in self.replicas for each in replica), *self.statistics, *self.gradients)

    @property
    def size_bytes(self) -> int:
        """The size of all messages together; a native sum counts as bandwidth-optimal."""
        return sum(sent_bytes(each) for each in self.sums)


def traffic_of(
    tilings: Sequence[Tiling],
    *,
    workload: Workload,
    names: Sequence[str],
    hosts: Mapping[str, str],
    rates: Mapping[str, float] | None = None,
    micro_batches: Sequence[int] | None = None,
    recomputes: Sequence[bool] | None = None,
) -> Traffic:
    """What an iteration of `workload` sends that is laid like `tilings`.

    Args:
        tilings: one for each block of the workload; one of one unit where it has none.
        workload: what is laid out.
        names: all processors in the order of the ranks, those without a tile among them.
        hosts: of each processor.
        rates: at which they send and receive, as `transfer_rates` has them; None: all alike.
        micro_batches: in how many each replica computes its samples; None: in one. The sums over a replica are those of each.
        recomputes: whether each replica recomputes activations; None: none does.
    """
    replicas = []
    count = len(tilings[0].replicas)
    settings = zip(tilings[0].replicas, micro_batches or [1] * count, recomputes or [False] * count, strict=True)
    for replica, number, again in settings:
        members = tuple(tile.processor for tile in replica)
        own = [hosts[name] for name in members]
        wire = sum_wire(own, workload.wire)
        element_bytes = _sent_bytes(workload.element_bytes, wire)
        replicas.append(
            tuple(
                PlannedSum(
                    kind=kind,
                    block=block,
                    processors=members,
                    schedule=sum_schedule(own, size=size, element_bytes=element_bytes),
                    element_bytes=element_bytes,
                    wire=wire,
                )
                for samples in micro_batch_sizes(replica[0].samples.size, number=number)
                for kind, block, size in replica_sums(workload, samples=samples, recomputes=again)
                if size and len(members) > 1
            )
        )
    return Traffic(
        replicas=tuple(replicas),
        gradients=gradient_sums(
            tilings,
            unit_elements=[block.unit_parameters for block in workload.blocks],
            riders=riding_elements(workload, replicas=len(replicas)),
            element_bytes=workload.element_bytes,
            wire=workload.wire,
            names=names,
            hosts=hosts,
            rates=rates,
        ),
        statistics=_statistics_sums(workload, names=names, hosts=hosts)
        if sums_statistics(replicas=len(replicas), tiles=len(tilings[0].tiles), ranks=len(names))
        else (),
    )


def sums_statistics(*, replicas: int, tiles: int, ranks: int) -> bool:
    """Whether statistics of the batch are summed; the ranks of a single replica all see the whole batch.

    Ranks without a tile take part as well, because they keep the running statistics.
    """
    return replicas > 1 or tiles < ranks


def _statistics_sums(workload: Workload, *, names: Sequence[str], hosts: Mapping[str, str]) -> tuple[PlannedSum, ...]:
    """Which layer lies in which block is not known, so the layers are spread evenly over the blocks."""
    layers, blocks, places = len(workload.batch_statistics), max(len(workload.blocks), 1), [hosts[name] for name in names]
    forward = [
        PlannedSum(
            kind=SumKind.FORWARD_STATISTICS,
            block=layer * blocks // layers,
            processors=tuple(names),
            schedule=sum_schedule(places, size=elements, element_bytes=STATISTICS_BYTES),
            element_bytes=STATISTICS_BYTES,
        )
        for layer, elements in enumerate(workload.batch_statistics)
    ]
    return (*forward, *(replace(each, kind=SumKind.BACKWARD_STATISTICS) for each in reversed(forward)))


def replica_sums(workload: Workload, *, samples: int, recomputes: bool = False) -> tuple[tuple[SumKind, int, int], ...]:
    """What a replica of so many samples sums in an iteration: (kind, block, elements), in order.

    Where it recomputes activations, the forward sums of a layer's blocks come once more in the backward pass. Each counts there
    with those of its own block.
    """
    forward, backward = [], []
    layers = workload.recomputation.layers if workload.recomputation is not None and recomputes else ()
    repeated = {index for layer in layers for index in layer.blocks}
    for index, block in enumerate(workload.blocks):
        before = _even(block.forward_elements, block.forward_sums, samples)
        forward += [(SumKind.FORWARD, index, size) for size in before]
        sizes = _even(block.backward_elements, block.backward_sums, samples) if block.backward_elements else ()
        sizes = (*before, *sizes) if index in repeated else sizes
        backward.append([(SumKind.BACKWARD, index, size) for size in sizes])
    return (*forward, *(each for sums in reversed(backward) for each in sums))


def _even(elements: int, num_sums: int, samples: int) -> tuple[int, ...]:
    """The elements that each of a block's sums carries, on average where the sums differ."""
    return (round(elements * samples / num_sums),) * num_sums if num_sums else ()


def sum_algorithm(hosts: Sequence[str]) -> str:
    """The algorithm that sums a vector over ranks on these hosts, by its name in `tatami.collective.ALGORITHMS`.

    Two ranks swap what they have. More ranks on one host leave it to their library, which uses their shared memory. Between
    hosts every rank sends to every other; where there are very many, by halving and doubling.
    """
    if len(hosts) == 2:
        return "direct"
    if len(set(hosts)) == 1:
        return "native"
    return "direct" if len(hosts) <= _MOST_DIRECT else "halving_doubling"


def sum_wire(hosts: Sequence[str], wire: str | None) -> str | None:
    """As what elements travel in a sum over ranks on these hosts; what a library sums in its memory stays as it is."""
    return None if sum_algorithm(hosts) == "native" else wire


def sum_schedule(hosts: Sequence[str], *, size: int, element_bytes: int) -> Schedule:
    """How a vector of `size` elements is summed over ranks on these hosts."""
    return _sum_schedule(sum_algorithm(hosts), len(hosts), size, element_bytes)


def sum_schedules(hosts: Sequence[str], *, size: int, element_bytes: int, byte_s: float) -> list[Schedule]:
    """The same in pieces that are summed at once, one after the other.

    In one over fast links, as messages cost time, too, and for two ranks, which need one round.

    Args:
        hosts: of the ranks.
        size, element_bytes: of the vector, as `sum_schedule` has them.
        byte_s: seconds that a byte takes over the slowest link.
    """
    message_s = size * element_bytes / max(1, len(hosts)) * byte_s if len(hosts) > 2 else 0.0
    pieces = max(1, min(_MOST_PIECES, int(message_s / _LEAST_MESSAGE_S)))
    stops = [size * piece // pieces for piece in range(pieces + 1)]
    return [sum_schedule(hosts, size=stop - start, element_bytes=element_bytes) for start, stop in pairwise(stops)]


@lru_cache(maxsize=256)
def _sum_schedule(algorithm: str, ranks: int, size: int, element_bytes: int) -> Schedule:
    return build(algorithm, ranks=ranks, size=size, element_bytes=element_bytes)


def riding_elements(workload: Workload, *, replicas: int) -> int:
    """Elements of replicated gradients, and of what ranks tell each other beside them.

    That is which tensors had part in the loss, and each replica's number of samples, in `size_digits`.
    """
    return workload.replicated_parameters + workload.trained_tensors + replicas * num_digits(workload.wire)


def num_digits(wire: str | None) -> int:
    """In how many elements a replica's number of samples travels: half precision has whole numbers up to 256 only."""
    return 1 if wire is None else SIZE_DIGITS


def size_digits(samples: int, *, count: int = SIZE_DIGITS) -> list[int]:
    """A number of samples in `count` digits, the last of which has whatever is left."""
    return [*(samples >> 8 * place & 255 for place in range(count - 1)), samples >> 8 * (count - 1)]


def sizes_of(digits: Sequence[float], *, count: int = SIZE_DIGITS) -> list[int]:
    """The numbers of samples whose `size_digits` stand one after the other."""
    parts = [digits[start : start + count] for start in range(0, len(digits), count)]
    return [sum(int(digit) << 8 * place for place, digit in enumerate(part)) for part in parts]


def gradient_sums(
    tilings: Sequence[Tiling],
    *,
    unit_elements: Sequence[int],
    riders: int,
    element_bytes: int,
    wire: str | None,
    names: Sequence[str],
    hosts: Mapping[str, str],
    rates: Mapping[str, float] | None = None,
) -> tuple[PlannedSum, ...]:
    """The sums of gradients across replicas; none where there is but one replica of all ranks.

    Args:
        tilings: one for each block; one of one unit where there is none.
        unit_elements: of each block, the elements that travel for each unit.
        riders: elements of replicated gradients, and what else is told.
        element_bytes: of one.
        wire: as what it travels; None: as it is.
        names: all processors in the order of the ranks.
        hosts: of each.
        rates: at which processors send and receive, as `transfer_rates` has them.
    """
    tiling = tilings[0]
    if len(names) == len(tiling.tiles) and len(tiling.replicas) == 1:
        return ()
    whole = is_one_vector(replicas=len(tiling.replicas), tiles=len(tiling.tiles), ranks=len(names), blocks=len(unit_elements))
    rides = whole or riders <= RIDE_ALONG_ELEMENTS
    finest = max(tilings, key=lambda each: each.units)
    heights = [tile.units.size / finest.units for tile in finest.tiles]
    placed = [tile.processor for tile in finest.tiles]
    shares = summing_shares(heights, placed, replicas=len(tiling.replicas), rates=rates)
    found = []
    laid, own, riding = tilings, list(unit_elements), riders if rides else 0
    if whole:
        size = riding + sum(each.units * elements for each, elements in zip(tilings, own, strict=False))
        laid, own, riding = [_one_vector(tiling, max(size, 1))], [min(size, 1)], 0
    messages = _owners_messages(laid, own, shares)
    if riding:
        messages = _with_riders(messages, tiling=tiling, names=names)
    if messages:
        found.append(
            PlannedSum(
                kind=SumKind.GRADIENTS,
                block=None,
                processors=tuple(names),
                schedule=_schedule(messages, tilings=laid, unit_elements=own, riders=riding, names=names),
                element_bytes=_sent_bytes(element_bytes, wire),
                wire=wire,
                messages=messages,
                riders=riding,
            )
        )
    if not rides:
        places = [hosts[name] for name in names]
        apart = sum_wire(places, wire)
        apart_bytes = _sent_bytes(element_bytes, apart)
        large = PlannedSum(
            kind=SumKind.REPLICATED,
            block=None,
            processors=tuple(names),
            schedule=sum_schedule(places, size=riders, element_bytes=apart_bytes),
            element_bytes=apart_bytes,
            wire=apart,
        )
        found.insert(0, large)
    return tuple(found)


def bucket_sum(names: Sequence[str], hosts: Mapping[str, str], *, size: int, workload: Workload) -> PlannedSum:
    """The sum of a bucket of `size` elements, where each of the processors is a replica."""
    element_bytes = workload.wire_bytes
    return PlannedSum(
        kind=SumKind.GRADIENTS,
        block=None,
        processors=tuple(names),
        schedule=sum_schedule([hosts[name] for name in names], size=size, element_bytes=element_bytes),
        element_bytes=element_bytes,
        wire=workload.wire,
    )


def is_one_vector(*, replicas: int, tiles: int, ranks: int, blocks: int) -> bool:
    """Whether all gradients travel as one vector: each rank is a replica, so it has all units, and any element may be a cut.

    Very many ranks that have no block sum by halving and doubling. Where there are blocks, every rank tells each other anyway.
    """
    return replicas == tiles == ranks and (blocks > 0 or ranks <= _MOST_DIRECT)


def _one_vector(tiling: Tiling, size: int) -> Tiling:
    """The same replicas, each of one rank, over `size` elements."""
    return Tiling(samples=tiling.samples, units=size, tiles=tuple(replace(e, units=Span(0, size)) for e in tiling.tiles))


def _sent_bytes(element_bytes: int, wire: str | None) -> int:
    return element_bytes if wire is None else HALF_BYTES


def _owners_messages(
    tilings: Sequence[Tiling], unit_elements: Sequence[int], shares: Mapping[str, float] | None
) -> tuple[Message, ...]:
    """Messages that carry units; blocks of which nothing travels are left out."""
    replicas = len(tilings[0].replicas)
    numbers = [number for number, elements in enumerate(unit_elements) if elements]
    if not numbers or replicas == 1:
        return ()
    # Two replicas: both sum the whole, in one phase. More: each owner sums its part of a group, and gives it back.
    method: Method = "direct" if replicas == 2 else "reduce-scatter"
    found = gradient_messages([tilings[number] for number in numbers], method=method, shares=shares)
    return tuple(
        Message(
            phase=message.phase,
            source=message.source,
            dest=message.dest,
            spans=tuple((numbers[index], span) for index, span in message.spans),
        )
        for message in found
    )


def _with_riders(messages: tuple[Message, ...], *, tiling: Tiling, names: Sequence[str]) -> tuple[Message, ...]:
    """The messages, and who tells whom of its replica's replicated gradients: for each rank, one member of every other replica.

    That member is one that sends to the rank anyway; a rank without a tile hears from the first of each replica.
    """
    replica_of = {tile.processor: tile.replica for tile in tiling.tiles}
    senders: dict[tuple[str, int], str] = {}
    for message in messages:
        if message.phase == 0:
            senders.setdefault((message.dest, replica_of[message.source]), message.source)
    telling = {
        (senders.get((name, index), replica[0].processor), name)
        for name in names
        for index, replica in enumerate(tiling.replicas)
        if replica_of.get(name) != index
    }
    known = {(message.source, message.dest) for message in messages if message.phase == 0}
    alone = [Message(phase=0, source=source, dest=dest, spans=()) for source, dest in sorted(telling - known)]
    return tuple(
        Message(
            phase=each.phase,
            source=each.source,
            dest=each.dest,
            spans=each.spans,
            carries_riders=each.phase == 0 and (each.source, each.dest) in telling,
        )
        for each in (*messages, *alone)
    )


def _schedule(
    messages: Sequence[Message], *, tilings: Sequence[Tiling], unit_elements: Sequence[int], riders: int, names: Sequence[str]
) -> Schedule:
    """The messages as steps on one vector: the units of all blocks, one block after the other, and the riders."""
    starts = [0]
    for tiling, elements in zip(tilings, unit_elements, strict=False):
        starts.append(starts[-1] + tiling.units * elements)
    size = starts[-1] + riders
    rank_of = {name: rank for rank, name in enumerate(names)}
    rounds: list[list[Step]] = [[] for _ in range(1 + max(message.phase for message in messages))]
    for message in messages:
        ranges = [
            (starts[block] + span.start * unit_elements[block], starts[block] + span.stop * unit_elements[block])
            for block, span in message.spans
        ]
        if message.carries_riders and riders:
            ranges.append((starts[-1], size))
        for start, stop in ranges:
            rounds[message.phase].append(
                Step(
                    source=rank_of[message.source],
                    target=rank_of[message.dest],
                    start=start,
                    stop=stop,
                    reduce=message.phase == 0,
                    via=Via.MESSAGE,
                )
            )
    group = RankGroup(ranks=tuple(range(len(names))), start=0, stop=size)
    what = Explicit(role=Role.ALL_REDUCE, rounds=tuple(map(tuple, rounds)), title="gradients between owners")
    return Schedule(
        algorithm="owners",
        ranks=len(names),
        size=size,
        phases=(Phase(groups=(group,), what=what),),
        order="by replica",
        fixed_order=True,
    )


def link_bytes(traffic: Traffic) -> dict[str, dict[str, int]]:
    """What an iteration sends from each processor to each other, by source and target; those of native sums are not known."""
    found: dict[str, dict[str, int]] = {}
    for planned in traffic.sums:
        for phase in planned.schedule.phases:
            for step in (step for number in range(phase.num_rounds) for step in phase.steps(number)):
                source, target = planned.processors[step.source], planned.processors[step.target]
                if source != target:
                    targets = found.setdefault(source, {})
                    targets[target] = targets.get(target, 0) + step.size * planned.element_bytes
    return found


def sent_bytes(planned: PlannedSum) -> int:
    """What all who take part in a sum send together; a native one at least as `tatami.collective.halving_doubling` does."""
    schedule = planned.schedule
    if any(phase.num_rounds == 0 for phase in schedule.phases):
        schedule = build("halving_doubling", ranks=schedule.ranks, size=schedule.size)
    steps = (step for phase in schedule.phases for number in range(phase.num_rounds) for step in phase.steps(number))
    return sum(step.size for step in steps) * planned.element_bytes
