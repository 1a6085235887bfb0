"""Several ranks of a host as one machine of a pipeline: they share the units of its stage.

Links inside of a host are fast enough for the sums inside of blocks, and each of several ranks keeps a part of a stage only. So
the search for stages is made over groups of a host's ranks as well as over ranks. A group is as fast as its ranks are together,
less what the sums between them take; what is found is laid out over the ranks, and priced as such.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tatami.cluster import Cluster, Processor, SpeedTable
from tatami.tiling.alphabeta import AlphaBetaCost, replica_sums_s
from tatami.tiling.compute import replica_flop_times
from tatami.tiling.layout import Layout, Replica
from tatami.tiling.links import SlowestLink
from tatami.tiling.staged_layout import StagedLayout
from tatami.tiling.staged_price import stage_workload
from tatami.workload import Piece, Workload

_MICRO_BATCHES = 8
"""Groups are as fast as they are for micro-batches of a replica that has all samples in so many."""


@dataclass(frozen=True, kw_only=True)
class SharedHosts:
    """A cluster whose machines are groups of ranks.

    Attributes:
        cluster: a processor for each group, which has the name of its first rank.
        members: by that name, the ranks of the group.
        workload: its pieces are joined so that no block of the network is in two.
        firsts: for each of these pieces, the number of its first one in the workload as it was.
        pieces: those of the workload as it was.
    """

    cluster: Cluster
    members: Mapping[str, tuple[Processor, ...]]
    workload: Workload
    firsts: tuple[int, ...]
    pieces: tuple[Piece, ...]

    def layout(self, found: StagedLayout) -> StagedLayout:
        """A layout of the groups as one of the ranks; a stage without blocks is computed by one rank of each group."""
        cuts = tuple(self.firsts[cut] for cut in found.cuts)
        stages = []
        for stage, (first, stop) in zip(found.stages, pairwise((0, *cuts, len(self.pieces))), strict=True):
            is_divided = any(place + span <= stop for place in range(first, stop) for _, span in self.pieces[place].blocks)
            replicas = []
            for replica in stage.replicas:
                ranks = self.members[replica.processors[0]]
                replicas.append(_replica(ranks if is_divided else ranks[:1], like=replica))
            stages.append(Layout(replicas=tuple(replicas)))
        return StagedLayout(stages=tuple(stages), cuts=cuts)


def shared_hosts(cluster: Cluster, workload: Workload, *, cost: AlphaBetaCost) -> Iterator[SharedHosts]:
    """The ranks of every host in groups of two, and in one group; nothing where no host has several, or there are no blocks."""
    hosts: dict[str, list[Processor]] = {}
    for each in cluster.processors:
        hosts.setdefault(each.host, []).append(each)
    most = max(map(len, hosts.values()))
    if most < 2 or not any(piece.blocks for piece in workload.pieces):
        return
    firsts, joined = _joined(workload.pieces)
    for size in sorted({2, most}):
        groups = [
            tuple(sorted(own[start : start + size], key=lambda each: -float(each.speed)))
            for own in hosts.values()
            for start in range(0, len(own), size)
        ]
        if len(groups) < 2:
            continue
        known: dict[tuple[object, ...], Processor] = {}
        fused = []
        for ranks in groups:
            kind = tuple(replace(each, name="", host="h") for each in ranks)
            if kind not in known:
                known[kind] = _fused(ranks, cluster, workload, cost)
            fused.append(replace(known[kind], name=ranks[0].name, host=ranks[0].host))
        yield SharedHosts(
            cluster=replace(cluster, processors=tuple(fused)),
            members={ranks[0].name: ranks for ranks in groups},
            workload=replace(workload, pieces=joined),
            firsts=firsts,
            pieces=workload.pieces,
        )


def _replica(ranks: Sequence[Processor], *, like: Replica) -> Replica:
    total = sum(float(each.speed) for each in ranks)
    heights = tuple(float(each.speed) / total for each in ranks)
    return replace(like, processors=tuple(each.name for each in ranks), heights=heights)


def _joined(pieces: Sequence[Piece]) -> tuple[tuple[int, ...], tuple[Piece, ...]]:
    """Pieces between which no block is divided, unless it is half of the network (a vocabulary): and the first one of each."""
    firsts, stop = [0], 0
    for place, piece in enumerate(pieces):
        if place and place >= stop:
            firsts.append(place)
        stop = max([stop, *(place + span for _, span in piece.blocks if 2 * span <= len(pieces))])
    joined: list[Piece] = []
    for first, last in pairwise((*firsts, len(pieces))):
        own = pieces[first:last]
        sums = {
            name: sum(getattr(piece, name) for piece in own)
            for name in ("flop_per_sample", "parameters", "frozen_bytes", "activation_bytes_per_sample")
        }
        layers = [
            replace(layer, pieces=bisect_right(firsts, place + layer.pieces - 1) - len(joined))
            for place, piece in enumerate(own, start=first)
            for layer in piece.layers
        ]
        shared = tuple(each for piece in own for each in piece.shared)
        most = max(piece.largest for piece in own)
        joined.append(replace(own[0], shared=shared, blocks=(), layers=tuple(layers), largest_parameters=most, **sums))
    return tuple(firsts), tuple(joined)


def _fused(ranks: tuple[Processor, ...], cluster: Cluster, workload: Workload, cost: AlphaBetaCost) -> Processor:
    """These ranks as one, which computes the whole network as fast as they do together."""
    first = ranks[0]
    if len(ranks) == 1:
        return first
    whole = stage_workload(workload, workload.pieces, is_wide=True)
    samples = max(1, workload.samples // _MICRO_BATCHES)
    layout = Layout(replicas=(_replica(ranks, like=Replica(width=1.0, processors=(first.name,), heights=(1.0,))),))
    scale = cost.scale(cluster)
    speeds = {each.name: float(each.speed) * scale for each in ranks}
    flop_s = samples * float(replica_flop_times(layout, speeds=speeds, workload=whole)[0])
    links = SlowestLink(cluster.only(tuple(speeds)))
    (sums_s,) = replica_sums_s(layout, replace(whole, samples=samples), links)
    flop = samples * (sum(piece.flop_per_sample for piece in workload.pieces) + workload.sample_flop)
    speed = flop / (flop_s + sums_s) / scale
    table = first.speed
    # What every rank repeats is in memory several times.
    alone, shared = (
        own.replicated_state_bytes
        + samples * own.replicated_activation_bytes
        + sum(
            block.units * (own.unit_state_bytes(block) + samples * block.unit_activation_bytes) / parts for block in own.blocks
        )
        for own, parts in ((whole, 1), (whole, len(ranks)))
    )
    memory = [each.memory_bytes for each in ranks if each.memory_bytes is not None]
    return replace(
        first,
        speed=SpeedTable([(size, speed * own / float(table)) for size, own in table.points])
        if isinstance(table, SpeedTable)
        else speed,
        memory_bytes=round(min(memory) * alone / max(shared, 1.0)) if memory else None,
        message_s=max(each.message_s for each in ranks),
        copy_bytes_per_s=min(each.copy_bytes_per_s for each in ranks),
        call_s=max(each.call_s for each in ranks),
        step_s=max(each.step_s for each in ranks),
    )
