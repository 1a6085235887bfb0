"""What an iteration of a layout with pipeline stages costs, and what each rank does in it.

Micro-batches flow through the stages as `tatami.tiling.pipeline_flow` has it: hand-overs and gradients of weights are hidden
where memory holds the micro-batches that this takes.
Stages sum their gradients over the replicas when their last backward pass is done, the first stage last.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Cluster, Processor, SpeedTable
from tatami.errors import PlanError
from tatami.tiling.alphabeta import AlphaBetaCost, gradient_sums_s, replica_sums_s, statistics_s, sums_s
from tatami.tiling.compute import replica_flop_times, scatter
from tatami.tiling.expected_range import expected_range_s
from tatami.tiling.layout import Layout
from tatami.tiling.links import SlowestLink
from tatami.tiling.memory import memory_bytes, optimizer_shares
from tatami.tiling.pipeline_flow import PipelineFlow
from tatami.tiling.staged_layout import StagedLayout
from tatami.tiling.traffic import sum_algorithm
from tatami.workload import Block, Piece, Recomputation, RecomputedLayer, RepeatedLayer, Workload

PASS_MESSAGES = 80
"""What a micro-batch costs a rank however little it computes, in messages: Python goes through the forward pass of the whole
network, in which other stages' modules are looked up, and a thread looks after what travels. A GPT of 8 layers on four hosts:
7 ms on 0.65 of a core and 14 ms on 0.33, where a message costs 0.09 and 0.17 ms."""
_ROUNDING = 1e-9


@dataclass(frozen=True, kw_only=True)
class StagedRank:
    """An iteration of one rank, in seconds. What it computes, waits for, sends and sums are the whole iteration.

    Attributes:
        processor: its name.
        stage, replica: where it is, from 0.
        first, stop: its pieces, from `first` up to, not including, `stop`.
        samples, micro_batches: of its replica.
        units_fraction: of the units of its stage; 1 where it has the stage to itself.
        pass_s: its pieces in one micro-batch, forward and backward, with the sums inside of a stage of several ranks and what
            messages cost it.
        late_s: of these, what no other stage waits for: gradients of weights.
        again_s: of these, the time of activations that are recomputed.
        compute_s: its pieces in all micro-batches, and what its messages cost it.
        handover_s: of all hand-overs to it and from it, those included that are hidden behind computing.
        exposed_s: what it waits for hand-overs, on their way or because they take longer than computing; and the sums inside of
            a stage of several ranks.
        wait_s: for other stages and replicas: while the pipeline fills and drains, and for slower ones.
        gradients_s: sums of gradients, over the replicas and with stages that have the same weights.
        memory_bytes: what it will keep.
        memory_given_bytes: None where that is not known.
    """

    processor: str
    stage: int
    replica: int
    first: int
    stop: int
    samples: int
    micro_batches: int
    units_fraction: float
    pass_s: float
    late_s: float
    again_s: float
    compute_s: float
    handover_s: float
    exposed_s: float
    wait_s: float
    gradients_s: float
    memory_bytes: float
    memory_given_bytes: int | None

    @property
    def send_s(self) -> float:
        """Communication that is not hidden."""
        return self.exposed_s + self.gradients_s

    @property
    def total_s(self) -> float:
        """The whole iteration."""
        return self.compute_s + self.send_s + self.wait_s


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """A layout with stages, and its price.

    Attributes:
        workload: what was planned.
        layout: who computes which pieces, for which samples, in how many micro-batches.
        iteration_s: predicted.
        range_s: in which 90 % of the iterations are expected, if speeds and links are as the cluster has them.
        in_flight: for each stage, the micro-batches that have gone forward and not yet backward.
        weights_left: for each stage, the micro-batches that have, but for gradients of weights, which are computed while the
            stage would wait, and at the end.
        ranks: what each rank does, stage by stage.
        parts_s: where the time of the slowest replica goes, in words; they sum to `iteration_s`.
        is_measured: whether speeds are flop/s, so that seconds are more than a guess.
        optimizer_shares: where the optimizer is sharded, the share of its stage's weights that each processor updates.
    """

    workload: Workload
    layout: StagedLayout
    iteration_s: float
    range_s: tuple[float, float]
    in_flight: tuple[int, ...]
    weights_left: tuple[int, ...]
    ranks: tuple[StagedRank, ...]
    parts_s: tuple[tuple[str, float], ...]
    is_measured: bool
    optimizer_shares: Mapping[str, float] = field(default_factory=dict)

    @property
    def predicted_s(self) -> float:
        """Predicted seconds of an iteration, as `Plan` calls it."""
        return self.iteration_s

    @property
    def memory_bytes(self) -> dict[str, float]:
        """What each processor will keep."""
        return {rank.processor: rank.memory_bytes for rank in self.ranks}

    @property
    def recomputes(self) -> tuple[str, ...]:
        """The processors that recompute their activations."""
        return self.layout.recomputes

    @property
    def fits(self) -> bool:
        """Whether no rank keeps more than it has."""
        return all(rank.memory_given_bytes is None or rank.memory_bytes <= rank.memory_given_bytes for rank in self.ranks)


def pass_speed(speed: float, samples: float, *, workload: Workload) -> float:
    """The speed of one pass of a stage over so many samples.

    A stage's products have as many rows as those of the whole network over these samples, by which its speed was measured.
    Fewer samples than were measured take as long as the fewest.
    """
    if not isinstance(speed, SpeedTable):
        return speed
    size = samples * (sum(piece.flop_per_sample for piece in workload.pieces) + workload.sample_flop)
    return speed.at(size) * min(1.0, size / speed.points[0][0])


def price_stages(
    layout: StagedLayout, *, cluster: Cluster, workload: Workload, cost: AlphaBetaCost | None = None, hides: bool = True
) -> StagedPlan:
    """The price of a layout with stages, whether memory holds it (`StagedPlan.fits`) or not.

    Ranks that share the units of a stage meet at the sums inside of each of its blocks, so the slowest of each block counts.

    Args:
        layout: its cuts are numbers of `workload.pieces`.
        cluster: has the processors of the layout; those without a place are not in the run.
        workload: what is laid out.
        cost: says how fast a processor of speed 1 is.
        hides: whether stages keep as many micro-batches in flight as hide the hand-overs, where memory holds them; otherwise
            stage i of p keeps p - i.

    Raises:
        PlanError: pieces that are not known, or fewer than the layout has stages; ranks that share a stage without blocks, or
            recompute one without a whole layer.
    """
    edges = (0, *layout.cuts, len(workload.pieces))
    if edges[-1] <= edges[-2]:
        raise PlanError(f"a network of {edges[-1]} pieces cannot be cut in front of pieces {layout.cuts}")
    return _Price(layout, edges, cluster=cluster, workload=workload, cost=cost or AlphaBetaCost()).plan(hides=hides)


def recomputable(layout: StagedLayout, workload: Workload) -> tuple[int, ...]:
    """The stages that have all of a repeated layer, so that their ranks can compute it once more."""
    edges = (0, *layout.cuts, len(workload.pieces))
    return tuple(stage for stage, (first, stop) in enumerate(pairwise(edges)) if _layers(workload.pieces[first:stop]))


def _layers(pieces: Sequence[Piece]) -> list[RepeatedLayer]:
    """The repeated layers that are wholly inside of these pieces."""
    ends = [(place + layer.pieces, layer) for place, piece in enumerate(pieces) for layer in piece.layers]
    return [layer for end, layer in ends if end <= len(pieces)]


def stage_workload(
    workload: Workload, pieces: Sequence[Piece], *, without: frozenset[str] = frozenset(), is_wide: bool = False
) -> Workload:
    """Some pieces as a workload, which is what one stage computes; `without` these shared weights.

    It has blocks where it is for several ranks of a replica (`is_wide`): those all of whose pieces are here.
    """
    shared = [each for piece in pieces for each in piece.shared]
    twice = sum(elements for _, elements in shared) - sum(dict(shared).values())
    left_out = sum(elements for name, elements in dict(shared).items() if name in without)
    part = len(pieces) / len(workload.pieces)
    ends = [(place + span, block) for place, piece in enumerate(pieces) for block, span in piece.blocks if is_wide]
    blocks = tuple(block for end, block in ends if end <= len(pieces))
    layers = _layers(pieces)
    inside = [[index for index, block in enumerate(blocks) if layer.has(block.name)] for layer in layers]
    again = [
        RecomputedLayer(beside_bytes=max(0.0, layer.kept_bytes - sum(map(_block_bytes, own))), blocks=tuple(indices))
        for layer, indices in zip(layers, inside, strict=True)
        for own in [[blocks[index] for index in indices]]
    ]
    split = {
        "parameters": sum(block.parameters for block in blocks),
        "flop_per_sample": sum(block.flop(units=block.units, samples=1) for block in blocks),
        "activation_bytes_per_sample": sum(map(_block_bytes, blocks)),
        "frozen_bytes": sum(block.units * block.unit_frozen_bytes for block in blocks),
    }
    whole = {name: max(0, sum(getattr(piece, name) for piece in pieces) - own) for name, own in split.items()}
    return replace(
        workload,
        blocks=blocks,
        pieces=(),
        micro_batches=None,
        replicated_parameters=max(0, whole["parameters"] - twice - left_out),
        replicated_flop_per_sample=round(whole["flop_per_sample"]),
        replicated_activation_bytes=whole["activation_bytes_per_sample"],
        replicated_frozen_bytes=whole["frozen_bytes"],
        largest_parameters=_largest(pieces, blocks, outside=workload.largest_parameters),
        recomputation=Recomputation(
            kept_bytes=max(0.0, whole["activation_bytes_per_sample"] - sum(layer.beside_bytes for layer in again))
            + sum(layer.input_bytes for layer in layers),
            layers=tuple(again),
            flop_fraction=sum(layer.flop for layer in layers) / max(1.0, sum(piece.flop_per_sample for piece in pieces)),
        )
        if again
        else None,
        backward_moments=((1.0, 1.0),),
        trained_tensors=round(workload.trained_tensors * part),
        batch_statistics=workload.batch_statistics[: math.ceil(len(workload.batch_statistics) * part)],
    )


def _largest(pieces: Sequence[Piece], blocks: Sequence[Block], *, outside: int) -> int:
    """Elements of the largest weight of these pieces that is in none of the blocks; in the whole network that is `outside`."""
    inside = {round(block.units * block.unit_largest) for block in blocks}
    return max((min(piece.largest, outside) if piece.largest in inside else piece.largest for piece in pieces), default=0)


def _block_bytes(block: Block) -> float:
    """What a block leaves behind of one sample, with all its units."""
    return block.units * block.unit_activation_bytes + block.sample_activation_bytes


class _Price:
    def __init__(
        self, layout: StagedLayout, edges: tuple[int, ...], *, cluster: Cluster, workload: Workload, cost: AlphaBetaCost
    ) -> None:
        self.layout, self.edges, self.cluster, self.workload, self.cost = layout, edges, cluster, workload, cost
        self.pieces = [workload.pieces[first:stop] for first, stop in pairwise(edges)]
        self.samples = layout.stages[0].sample_sizes(workload.samples)
        replicas = zip(layout.stages[0].replicas, self.samples, strict=True)
        self.parts = [len(replica.micro_batch_sizes(samples)) for replica, samples in replicas]
        self.names = [[replica.processors[0] for replica in stage.replicas] for stage in layout.stages]
        """The ranks that hand over, of each stage and replica."""
        self.wide = [stage.deepest > 1 for stage in layout.stages]
        self.workloads = [stage_workload(workload, own, is_wide=wide) for own, wide in zip(self.pieces, self.wide, strict=True)]
        self.tied = _tied(self.pieces)
        self.workloads = [
            replace(own, tied_parameters=sum(elements for (_, elements), stages in self.tied.items() if number in stages))
            for number, own in enumerate(self.workloads)
        ]
        self.runs = [cluster.only(stage.processors) for stage in layout.stages]
        for number, (stage, own) in enumerate(zip(layout.stages, self.workloads, strict=True)):
            wide = next((replica.processors for replica in stage.replicas if len(replica.processors) > 1), ())
            if wide and not own.blocks:
                raise PlanError(
                    f"{' and '.join(wide)} are to share the units of stage {number}, and no layer that is wholly inside of it "
                    "can be divided over units. Cut in front of other pieces, or give one processor for the stage and replica"
                )
            if stage.recomputes and own.recomputation is None:
                raise PlanError(
                    f"{stage.recomputes[0]} is to recompute activations, and no repeated layer that can be computed once more "
                    f"is wholly inside of stage {number} (docs/networks.md, Memory): cut in front of other pieces, or leave "
                    "recomputation out"
                )
        self.passes = [
            own.passes(recomputes=bool(stage.recomputes)) for stage, own in zip(layout.stages, self.workloads, strict=True)
        ]
        self.last = len(self.names) - 1
        self.scale = cost.scale(cluster)
        self.noise = 1 + scatter([cluster.by_name[name] for name in layout.processors])

    def plan(self, *, hides: bool) -> StagedPlan:
        replicas = range(self.layout.num_replicas)
        computes = [self._computes_s(replica) for replica in replicas]
        crosses = [[*(self._crosses_s(stage, replica) for stage in range(self.last)), 0.0] for replica in replicas]
        lates = [[self._late_s(stage, replica) for stage in range(self.last + 1)] for replica in replicas]
        agains = [[own_s * (1 - 1 / passes) for own_s, passes in zip(own, self.passes, strict=True)] for own in computes]
        flows = [
            PipelineFlow(_row(own), late_s=_row(late), behind_s=_row(behind), again_s=_row(again), micro_batches=parts)
            for own, late, behind, again, parts in zip(computes, lates, crosses, agains, self.parts, strict=True)
        ]
        in_flight, left = self._kept(flows, hides=hides)
        counts = np.array([in_flight]), np.array([left])
        totals = [float(flow.total_s(*counts)[0]) for flow in flows]
        early = [flow.early_s(counts[1])[0].tolist() for flow in flows]
        taus = [float(flow.tau_s[0]) for flow in flows]
        ends, gradients = self._sums(early, totals)
        steps = [[self.cluster.by_name[name].step_s for name in stage.processors] for stage in self.layout.stages]
        total_s = max(end_s + max(own) for end_s, own in zip(ends, steps, strict=True))
        flying = [min(own + more, max(self.parts)) for own, more in zip(in_flight, left, strict=True)]
        kept = self._kept_bytes(flying)
        shares: dict[str, float] = {}
        if self.workload.sharded_bytes_per_parameter:
            for layout, work, run in zip(self.layout.stages, self._flying(flying), self.runs, strict=True):
                shares.update(optimizer_shares(layout, workload=work, cluster=run))
        ranks = []
        for stage, layout in enumerate(self.layout.stages):
            replica_of = {name: number for number, each in enumerate(layout.replicas) for name in each.processors}
            each = zip(layout.processors, layout.heights.tolist(), steps[stage], gradients[stage], strict=True)
            for name, height, step_s, gradient_s in each:
                replica = replica_of[name]
                own, behind, parts = computes[replica], crosses[replica], self.parts[replica]
                ways_s = behind[stage] + (behind[stage - 1] if stage else 0.0)
                inside_s = parts * self._inside_s(stage, replica)
                compute_s = parts * own[stage] - inside_s + step_s
                left_s = total_s - compute_s - gradient_s
                late_s = (parts - 1) * max(0.0, taus[replica] - max(own))
                exposed_s = min(max(left_s, 0.0), 2 * ways_s + late_s + inside_s)
                ranks.append(
                    StagedRank(
                        processor=name,
                        stage=stage,
                        replica=replica,
                        first=self.edges[stage],
                        stop=self.edges[stage + 1],
                        samples=self.samples[replica],
                        micro_batches=parts,
                        units_fraction=height,
                        pass_s=own[stage],
                        late_s=lates[replica][stage],
                        again_s=agains[replica][stage],
                        compute_s=compute_s,
                        handover_s=2 * parts * ways_s,
                        exposed_s=exposed_s,
                        wait_s=max(left_s - exposed_s, 0.0),
                        gradients_s=gradient_s,
                        memory_bytes=kept[name],
                        memory_given_bytes=self.cluster.by_name[name].memory_bytes,
                    )
                )
        slowest = max(replicas, key=totals.__getitem__)
        longest_s = max(computes[slowest])
        filled_s = max(totals[slowest] - self.parts[slowest] * longest_s, 0.0)
        hand_over_s = min(2 * sum(crosses[slowest]) + (self.parts[slowest] - 1) * (taus[slowest] - longest_s), filled_s)
        flowing = {
            "computing of the slowest stage": self.parts[slowest] * longest_s,
            "filling and draining the pipeline": filled_s - hand_over_s,
            "hand-overs": hand_over_s,
        }
        whose = " of weights that stages share" if self.tied and self.layout.num_replicas == 1 else ""
        flowing[f"updates and gradient sums{whose}"] = total_s - sum(flowing.values())
        return StagedPlan(
            workload=self.workload,
            layout=self.layout,
            iteration_s=total_s,
            range_s=expected_range_s(
                total_s,
                compute_s=max(rank.compute_s for rank in ranks),
                processors=[self.cluster.by_name[rank.processor] for rank in ranks],
            ),
            in_flight=tuple(in_flight),
            weights_left=tuple(left),
            ranks=tuple(ranks),
            parts_s=tuple((words, seconds) for words, seconds in flowing.items() if seconds > _ROUNDING * total_s),
            is_measured=self.cost.compares_machines(self.cluster),
            optimizer_shares=shares,
        )

    def _computes_s(self, replica: int) -> list[float]:
        """One micro-batch on each stage, forward and backward, with what messages cost the processor."""
        call_part = len(self.workload.blocks) / len(self.workload.pieces)
        found = []
        for stage, (names, pieces) in enumerate(zip(self.names, self.pieces, strict=True)):
            if self.wide[stage] and len(self.layout.stages[stage].replicas[replica].processors) > 1:
                found.append(self._shared_s(stage, replica))
                continue
            processor = self.cluster.by_name[names[replica]]
            flop = self.passes[stage] * sum(piece.flop_per_sample for piece in pieces) + self.workload.sample_flop
            compute_s = self._flop_s(processor, flop, replica)
            neighbours = (stage > 0) + (stage < self.last)
            statistic_s = 0.0
            if self.workload.batch_statistics:
                run = self.runs[stage]
                statistic_s = statistics_s(self.layout.stages[stage], self.workloads[stage], SlowestLink(run))
            calls_s = processor.call_s * call_part * len(pieces)
            found.append(compute_s + calls_s + (PASS_MESSAGES + 2 * neighbours) * processor.message_s + statistic_s)
        return found

    def _shared_s(self, stage: int, replica: int) -> float:
        """One micro-batch on a stage of several ranks, with the sums inside of it."""
        layout, own, samples = self.layout.stages[stage], self.workloads[stage], self.samples[replica] / self.parts[replica]
        here = layout.replicas[replica]
        members = [self.cluster.by_name[name] for name in here.processors]
        speeds = {each.name: pass_speed(each.speed, samples, workload=self.workload) * self.scale for each in members}
        alone = Layout(replicas=(here.as_wide_as(1.0),))
        flop_s = samples * float(replica_flop_times(alone, speeds=speeds, workload=own)[0])
        call_part = len(self.workload.blocks) / len(self.workload.pieces) * len(self.pieces[stage])
        calls_s = max(each.call_s * call_part for each in members)
        neighbours = (stage > 0) + (stage < self.last)
        message_s = max(each.message_s for each in members)
        statistic_s = statistics_s(layout, own, SlowestLink(self.runs[stage]))
        inside_s = self._inside_s(stage, replica)
        return self.noise * flop_s + calls_s + (PASS_MESSAGES + 2 * neighbours) * message_s + statistic_s + inside_s

    def _inside_s(self, stage: int, replica: int) -> float:
        """The sums inside of a stage of several ranks, for one micro-batch, and what is passed on to the others of them."""
        here = self.layout.stages[stage].replicas[replica]
        if len(here.processors) == 1:
            return 0.0
        links = SlowestLink(self.runs[stage])
        parts, samples = self.parts[replica], self.samples[replica]
        alone = Layout(replicas=(replace(here, width=1.0, micro_batches=parts),))
        (sums,) = replica_sums_s(alone, replace(self.workloads[stage], samples=samples), links)
        link = links.among(here.processors)
        ways = [self.workload.pieces[self.edges[at]] for at in (stage, stage + 1) if 0 < at <= self.last]
        size_bytes = sum(piece.crossing_bytes_per_sample for piece in ways) * samples / parts
        return sums / parts + (len(here.processors) - 1) * size_bytes / link.bandwidth_bytes_per_s + len(ways) * link.latency_s

    def _flop_s(self, processor: Processor, flop: float, replica: int) -> float:
        """So many flop of each sample of one micro-batch."""
        samples = self.samples[replica] / self.parts[replica]
        return self.noise * samples * flop / (pass_speed(processor.speed, samples, workload=self.workload) * self.scale)

    def _late_s(self, stage: int, replica: int) -> float:
        """The part of a micro-batch's work on a stage that no other stage waits for.

        To leave it for later keeps the inputs of all layers, which recomputation is to save.
        """
        here = self.layout.stages[stage].replicas[replica]
        if not stage or len(here.processors) > 1 or here.recomputes:
            return 0.0
        flop = sum(piece.late_flop_per_sample for piece in self.pieces[stage])
        return self._flop_s(self.cluster.by_name[self.names[stage][replica]], flop, replica)

    def _crosses_s(self, stage: int, replica: int) -> float:
        """One hand-over behind a stage, in one direction."""
        one, other = (self.cluster.by_name[self.names[at][replica]] for at in (stage, stage + 1))
        link = self.cluster.link(one.name, other.name)
        rate = min(link.bandwidth_bytes_per_s, one.copy_bytes_per_s, other.copy_bytes_per_s)
        size_bytes = self.workload.pieces[self.edges[stage + 1]].crossing_bytes_per_sample
        return link.latency_s + size_bytes * self.samples[replica] / self.parts[replica] / rate

    def _kept(self, flows: Sequence[PipelineFlow], *, hides: bool) -> tuple[list[int], list[int]]:
        """Micro-batches in flight on each stage, and those whose weights are left: of the fastest choice that memory holds."""
        left = [flow.weights_left() for flow in flows]
        filled = [flow.filled_in_flight(each) for flow, each in zip(flows, left, strict=True)]
        deep, plain = ([getattr(flow, name) for flow in flows] for name in ("deep_in_flight", "plain_in_flight"))
        none = [np.zeros_like(each) for each in left]
        for choice in ((filled, left), (deep, none)) if hides else ():
            in_flight, kept = (np.concatenate(each).max(axis=0).tolist() for each in choice)
            if self._fits([min(own + more, max(self.parts)) for own, more in zip(in_flight, kept, strict=True)]):
                return in_flight, kept
        return np.concatenate(plain).max(axis=0).tolist(), [0] * len(self.names)

    def _kept_bytes(self, in_flight: Sequence[int]) -> dict[str, float]:
        kept = {}
        for layout, own, run in zip(self.layout.stages, self._flying(in_flight), self.runs, strict=True):
            kept.update(memory_bytes(layout, workload=own, cluster=run))
        return kept

    def _flying(self, in_flight: Sequence[int]) -> list[Workload]:
        """The workload of each stage that keeps what so many micro-batches leave behind; of a layer that is recomputed the
        activations of one, while the backward pass goes through it."""
        found = []
        for layout, own, number in zip(self.layout.stages, self.workloads, in_flight, strict=True):
            again = own.recomputation if layout.recomputes else None
            once = {index for layer in (again.layers if again is not None else ()) for index in layer.blocks}
            found.append(
                replace(
                    own,
                    replicated_activation_bytes=number * own.replicated_activation_bytes,
                    blocks=tuple(
                        replace(
                            block,
                            unit_activation_bytes=(1 if index in once else number) * block.unit_activation_bytes,
                            sample_activation_bytes=(1 if index in once else number) * block.sample_activation_bytes,
                        )
                        for index, block in enumerate(own.blocks)
                    ),
                    recomputation=again and replace(again, kept_bytes=number * again.kept_bytes),
                )
            )
        return found

    def _fits(self, in_flight: Sequence[int]) -> bool:
        given = self.cluster.by_name
        return not self.cluster.memory_known or all(
            kept <= (given[name].memory_bytes or math.inf) for name, kept in self._kept_bytes(in_flight).items()
        )

    def _sums(self, early: Sequence[Sequence[float]], totals: Sequence[float]) -> tuple[list[float], list[list[float]]]:
        """When each stage is done with all its gradient sums, and how long they take each of its ranks.

        Args:
            early: for each replica and stage, how long before the end its gradients are there.
            totals: when each replica ends.
        """
        without = frozenset(name for name, _ in self.tied)
        gradients, ends = [], []
        for stage, (layout, run, pieces) in enumerate(zip(self.layout.stages, self.runs, self.pieces, strict=True)):
            own = stage_workload(self.workload, pieces, without=without, is_wide=self.wide[stage])
            gradients.append(gradient_sums_s(layout, own, SlowestLink(run)))
            ready_s = max(total_s - own_early[stage] for total_s, own_early in zip(totals, early, strict=True))
            ends.append(ready_s + max(gradients[-1]))
        for (_, elements), stages in self.tied.items():
            names = [name for stage in stages for name in self.names[stage]]
            links = SlowestLink(self.cluster.only(names))
            algorithm = sum_algorithm([links.host[name] for name in names])
            sum_s = sums_s(algorithm, names, [(1, elements)], self.workload, links)
            end_s = max(ends[stage] for stage in stages) + sum_s
            for stage in stages:
                ends[stage] = end_s
                gradients[stage] = [own_s + sum_s for own_s in gradients[stage]]
        return ends, gradients


def _tied(stages: Sequence[Sequence[Piece]]) -> dict[tuple[str, int], list[int]]:
    """The weights that several stages hold, with their elements, and these stages."""
    holders: dict[tuple[str, int], set[int]] = {}
    for stage, pieces in enumerate(stages):
        for each in (each for piece in pieces for each in piece.shared):
            holders.setdefault(each, set()).add(stage)
    return {each: sorted(numbers) for each, numbers in holders.items() if len(numbers) > 1}


def _row(times_s: Sequence[float]) -> NDArray[np.float64]:
    return np.array([times_s], dtype=np.float64)
