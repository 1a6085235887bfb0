"""What a rank of a tiled network holds: its place in the layout, the units and sums that follow from it, what ranks compare."""

from __future__ import annotations

import functools
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tatami.cluster import Cluster
from tatami.comm.agreement import Watch, debugging
from tatami.comm.base import AbstractCommunicator
from tatami.comm.short_sum import ShortSum
from tatami.errors import PlanError
from tatami.gradients.base import AbstractGradientSums
from tatami.gradients.engine import GradientEngine, PassMoment
from tatami.gradients.loss_factors import refuse_other_factors
from tatami.gradients.outside_reads import OutsideReads
from tatami.model.deferred import DeferredPasses
from tatami.model.describing import Description, describe
from tatami.model.installing import install_forwards, settings_of
from tatami.model.micro_batches import refuse_changed
from tatami.model.model_stage import ModelStage, StagedNetwork
from tatami.model.plain_network import refuse_larger
from tatami.model.tied_sums import TiedSums
from tatami.partition.blocks import Blocks, workload_of
from tatami.partition.exactness import BATCH_NORMS, refuse_other_reduction
from tatami.runtime.context import ModuleContext, RankContext
from tatami.runtime.local_draws import LocalDraws
from tatami.runtime.local_statistics import LocalStatistics, SplitStatistics
from tatami.runtime.losses import LossReduction
from tatami.runtime.norms import WholeNorms, models, register
from tatami.runtime.optimizer_parts import watch_optimizer_states
from tatami.runtime.optimizers import watch_optimizers
from tatami.runtime.overlapped_sums import OverlappedSums, may_overlap
from tatami.runtime.owner_sums import OwnerSums
from tatami.runtime.phases import IterationPhase, Phases
from tatami.runtime.placement import Placement, largest, place
from tatami.runtime.recomputing import watch_checkpoints
from tatami.runtime.row_messages import pieces_of, units_of
from tatami.runtime.rows import Rows, UnitRuns, cut_units_of, tensor_of
from tatami.runtime.same_batch import BatchFacts
from tatami.runtime.scaling import watch_scalers
from tatami.runtime.sharded_steps import watch_sharded_steps
from tatami.runtime.sharded_sums import ShardedSums
from tatami.runtime.stopwatch import LinkTimes
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.runtime.torch_norms import watch_norms
from tatami.runtime.vector_sum import VectorSum
from tatami.same_steps import optimizers_of, refuse_other_steps, steps_of, watch_steps
from tatami.same_weights import Numbers, numbers_of, refuse_other_weights
from tatami.stages.stand_in import StandIn
from tatami.tiling import Layout, Span, StagedLayout, Tile, Tiling, Traffic
from tatami.tiling.layout_traffic import layout_traffic
from tatami.tiling.recomputing import refuse_recomputation
from tatami.tiling.summing import slowest_byte_s, transfer_rates
from tatami.tiling.traffic import sums_statistics
from tatami.workload import Workload, as_probed


@dataclass(frozen=True, kw_only=True)
class Seat:
    """What a rank of a model computes in one layout of it.

    Attributes:
        stage: of the pipeline; None where the layout has no stages.
        found: the blocks of that stage.
        workload: of the stage.
        description: what is tiled by what.
        placement: where the ranks of the stage lie.
    """

    stage: ModelStage | None
    found: Blocks
    workload: Workload
    description: Description
    placement: Placement


_PHASES = {
    PassMoment.BACKWARD: IterationPhase.BACKWARD,
    PassMoment.SUMS: IterationPhase.GRADIENTS,
    PassMoment.END: IterationPhase.UPDATE,
}
_WHOLE_LOOKS, _LOOKED_AT = 4, 16
"""The first looks at whether ranks hold the same weights are at all of them, later ones at so many in turn."""


class SeatedModel(nn.Module):
    """A network of which this rank holds what its place in a layout gives it. `TiledModel` computes with it, and says what the
    attributes are.
    """

    found: Blocks
    workload: Workload
    stage_comm: AbstractCommunicator

    def __init__(
        self,
        module: nn.Module,
        comm: AbstractCommunicator,
        *,
        found: Blocks,
        layout: Layout,
        cluster: Cluster,
        speeds_known: bool,
        batch_size: int,
        reduction: LossReduction | None,
        phases: Phases,
        generator: torch.Generator,
        draws: LocalDraws | None = None,
        wire: str | None = None,
        local_statistics: bool = False,
        plain: nn.Module | Callable[[], nn.Module] | None,
        gather: Callable[..., Iterator[tuple[str, torch.Tensor]]] | None = None,
        stage: ModelStage | None = None,
        staged: StagedNetwork | None = None,
        shard_fractions: Sequence[float] | None = None,
        recompute: bool | None = None,
        optimizer_moments: int = 2,
        rescue_copy: bool = True,
    ) -> None:
        super().__init__()
        self._plain = tuple(map(weakref.ref, plain.parameters())) if isinstance(plain, nn.Module) else ()
        self._gather = gather  # gathered_weights, whose file imports this one
        self._make_plain = weakref.ref(plain) if isinstance(plain, nn.Module) else plain
        self.comm = comm
        self.staged = staged
        self._device = next(module.parameters()).device
        self.cluster = cluster
        self.speeds_known = speeds_known
        self.names = tuple(processor.name for processor in cluster.processors)
        self._batch_size, self._wire, self._has_local_statistics = batch_size, wire, local_statistics
        self._reduction = reduction
        self.phases = phases
        self.link_times = LinkTimes(phases.clock)
        self.generator = generator
        self._shard_fractions, self._recompute = shard_fractions, recompute
        self._optimizer_moments, self.rescue_copy = optimizer_moments, rescue_copy
        self.draws = draws
        self._deferred = DeferredPasses()
        self._part = 0
        self._part_sizes: tuple[int, ...] = (0,)
        self.thread = threading.get_ident()
        self._checks_loss = False
        refuse_other_reduction(module, found.captured, reduction)
        has_norms = any(isinstance(each, BATCH_NORMS) for each in module.modules())
        self._normalizes = has_norms and not local_statistics
        self._past_engine: GradientEngine | None = None  # which refuses what comes from before a re-tiling
        self._plain_forwards = {each: vars(each).get("forward") for each in module.modules()}
        self._enter(self._seat(module, stage=stage, found=found, layout=layout), module, cuts=True)
        register(self)
        watch_optimizers()
        watch_optimizer_states()
        watch_steps()
        watch_checkpoints()
        if self.sharding is not None:
            watch_sharded_steps()
        if comm.size > 1 or comm.changes:
            watch_norms()
            watch_scalers()

    def _seat(self, module: nn.Module, *, stage: ModelStage | None, found: Blocks, layout: Layout) -> Seat:
        """This rank's place in a layout; the model stays as it is. Collective.

        Args:
            module: the network, whose tensors have their whole shapes; those of other stages are stand-ins.
            stage: of this rank; None where the layout has no stages.
            found: the blocks of the stage.
            layout: of the ranks of the stage.

        Raises:
            PlanError: see `_place`.
        """
        work = workload_of(
            module,
            found,
            samples=self._batch_size,
            wire=self._wire,
            local_statistics=self._has_local_statistics,
            sharded_optimizer=self._shard_fractions is not None,
            optimizer_moments=self._optimizer_moments,
            rescue_copy=self.rescue_copy,
        )
        workload = replace(as_probed(work, self.cluster), recompute=self._recompute)
        return Seat(
            stage=stage,
            found=found,
            workload=workload,
            description=describe(module, found, workload=workload),
            placement=self._place(layout, stage=stage, workload=workload, found=found),
        )

    def _enter(self, seat: Seat, module: nn.Module, *, cuts: bool) -> None:
        """Compute what belongs to `seat` from now on. Collective.

        Args:
            seat: where; what a seat from before held open is closed by `_leave`.
            module: the network; all that this rank holds in that seat is in its tensors.
            cuts: whether the tensors of its blocks are whole yet, and are to be cut.
        """
        comm, stage = self.comm, seat.stage
        self.stage, self.found, self.workload, self._description = stage, seat.found, seat.workload, seat.description
        self.stage_comm = comm if stage is None else stage.comm
        self._replica = ReplicaComm(self.phases, wire=self._wire)
        self._is_alone = self.stage_comm.size == 1 and not comm.changes
        self._is_unseen = self.found.captured is None and not self._is_alone  # what its forward pass draws
        self._rank: RankContext = RankContext(
            replica=self._replica,
            comm=None if self._is_alone else self.stage_comm,
            generator=self.generator,
            sums=None
            if self._is_alone
            else ShortSum(
                self.stage_comm,
                by_messages=None if comm.changes else VectorSum(self.stage_comm).sum_,
                in_memory=not comm.changes,
            ),
            local_statistics=self._has_local_statistics,
            draws_alone=self._is_alone and stage is None,
        )
        self._shares: dict[int, tuple[Span, tuple[int, ...]]] = {}
        self._batch = BatchFacts(replicas=self._replicas if stage is None else lambda: stage.replicas)
        self._num_looks = 0  # the ranks of a stage look at the same elements
        self._watches = self._make_watches()
        self._adopt(seat.placement)
        if cuts:
            for index, block in enumerate(self.found.blocks):
                cut_units_of(module, block.cuts, self._units(index)[0])
        self._install(module)
        if module is not self._modules.get("module"):
            module.register_load_state_dict_pre_hook(_refuse_whole)  # type: ignore[no-untyped-call]
        self.module = module
        self._settings = settings_of(module, self.found)
        self._statistics = self._local_statistics() if self._has_local_statistics and not self._is_alone else None
        rows = [_rows(module, block.cuts) for block in self.found.blocks]
        self._rows = rows or [[]]
        self.outside = OutsideReads(
            module,
            cut={name for block in self.found.blocks for name in block.cuts},
            replicas=self._replicas,
            warns=comm.rank == 0 and not self._is_alone,
            comm=comm,
        )
        self.outside.defer = self._deferred.take
        self._gradients = GradientEngine(
            module,
            sums=self._gradient_sums(module),
            outside=self.outside,
            required=self._required(module, rows),
            keeps_values=self.found.captured is not None and bool(self.found.captured.leaves_behind.with_gradient),
            on_moment=self._on_moment,
            is_here=lambda parameter: not isinstance(parameter, StandIn),
            comm=comm,
        )
        if stage is not None:
            stage.install(module, accumulated=self._gradients.accumulated)
        self._own_forwards = {each: vars(each).get("forward") for each in module.modules()}
        self.norms = WholeNorms(
            self.stage_comm,
            holders=lambda: self._replicas()[0] if self.sharding is None else range(self.stage_comm.size),
            phases=self.phases,
        )

    def _required(self, module: nn.Module, rows: Sequence[Sequence[Rows]]) -> Sequence[torch.Tensor]:
        """The weights that this rank holds for others, whole or in part."""
        if self.stage is not None:
            return [each for each in module.parameters() if not isinstance(each, StandIn)]
        return [] if self._is_alone else [each.tensor for block in rows for each in block]

    def _gradient_sums(self, module: nn.Module) -> AbstractGradientSums | None:
        """What sums the gradients over the replicas and stages; None where the rank is alone."""
        sums: AbstractGradientSums | None = None
        self.sharding: ShardedSums | None = None
        self._overlapped: OverlappedSums | None = None
        if self.stage_comm.size > 1 and self._shard_fractions is not None:
            tied = () if self.stage is None else self.stage.tied
            sums = self.sharding = ShardedSums(
                self.stage_comm,
                shares=self._shard_fractions,
                tied={each for name, each in module.named_parameters() if name in tied},
                wire=self._wire,
                phases=self.phases,
                layout=lambda: self._placement,
                replicas=self._replicas,
                replica=lambda: self._rank.index,
            )
        elif not self._is_alone:
            sums = owners = OwnerSums(
                rows=self._rows,
                wire=self._wire,
                link_times=self.link_times,
                placement=lambda: self._placement,
                replicas=self._replicas,
                replica=lambda: self._rank.index,
            )
            if self.stage is None and may_overlap(self.comm):
                sums = self._overlapped = OverlappedSums(owners, self.comm, link_times=self.link_times, replicas=self._replicas)
        if self.stage is not None and self.stage.tied:
            sums = TiedSums(sums, stage=self.stage, names={each: name for name, each in module.named_parameters()})
        return sums

    def _leave(self) -> None:
        """Close what the present seat holds open, but for the communicator of all ranks. Collective."""
        if self._replica.comm is not None:
            self._replica.comm.close()
        if self._rank.sums is not None:
            self._rank.sums.close()
        if self._overlapped is not None:
            self._overlapped.close()
        if self.stage is not None:
            self.stage.close()
        self.outside.close()

    # -- where this rank lies -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The processor that this rank runs on."""
        return self.names[self.comm.rank]

    @property
    def stage_names(self) -> tuple[str, ...]:
        """The processor of every rank of this rank's stage."""
        return self.names if self.stage is None else _names_of(self.stage, self.names)

    @property
    def has_results(self) -> bool:
        """Whether the network's results are on this rank: not where they are on the last stage and this is another one."""
        return self.stage is None or self.stage.is_last

    @property
    def sums_nothing(self) -> bool:
        """Whether this rank's gradients are those of the global batch, so that its backward pass is torch's own."""
        return self._is_alone and (self.stage is None or not self.stage.tied)

    @property
    def has_parts(self) -> bool:
        """Whether any replica computes its samples in several micro-batches."""
        return any(replica.micro_batches > 1 for replica in self.layout.replicas)

    @property
    def shards_optimizer(self) -> bool:
        """Whether ranks that hold the same weights share out the optimizer's state, also where a stage has one rank."""
        return self._shard_fractions is not None

    @property
    def device(self) -> torch.device:
        """Where this rank's weights lie, and its samples must."""
        return self._device

    @property
    def tiling(self) -> Tiling:
        """The tiling of the pair that has most units."""
        return largest(self.tilings)

    @property
    def traffic(self) -> Traffic:
        """What an iteration over a batch of the planned size sends, message by message, as simulator and cost model have it."""
        names = self.stage_names
        return layout_traffic(
            self.layout,
            workload=self.workload,
            tilings=self.tilings,
            trained=[sum(rows.per_unit for rows in block if rows.tensor.requires_grad) for block in self.block_rows()],
            names=names,
            hosts=dict(zip(names, self.stage_comm.hosts, strict=True)),
            rates=transfer_rates(self.cluster),
        )

    @property
    def tile(self) -> Tile | None:
        """This rank's `Tile` of `tiling`; None where it was left out."""
        return self.tiling.by_processor.get(self.name)

    @property
    def speaks_for_replica(self) -> bool:
        """Whether this rank is the first that has the results of its replica: sums over samples count each replica once."""
        return self._rank.speaks and self.has_results

    @property
    def local_span_size(self) -> tuple[int, int]:
        """How many samples of the last batch are this rank's, and how many the batch has."""
        return self._rank.mine.size, self._rank.samples

    @property
    def local_work(self) -> float:
        """`Workload.tile_work` of what this rank computes of the last batch, and recomputes: samples x units of one pair."""
        if self.tile is None:
            return 0.0
        units: list[int] = []
        for block, tiling in zip(self.found.blocks, self.tilings, strict=False):
            size = tiling.by_processor[self.name].units.size
            if block.begins:
                units.append(size)
            else:
                units[-1] += size
        passes = self.workload.passes(recomputes=self._recomputes)
        return passes * self.workload.tile_work(units, samples=self._rank.mine.size)

    @property
    def whole_layout(self) -> Layout | StagedLayout:
        """The layout of all ranks, with pipeline stages if there are any."""
        return self.layout if self.stage is None else self.stage.layout

    def block_rows(self) -> list[list[Rows]]:
        """For each block, the tensors of this rank that hold its units: parameters, and buffers such as running statistics."""
        return self._rows

    def tiled_parameters(self) -> list[nn.Parameter]:
        """The parameters of which this rank holds some units."""
        return [rows.tensor for block in self.block_rows() for rows in block if isinstance(rows.tensor, nn.Parameter)]

    def own_parameters(self) -> list[nn.Parameter]:
        """The parameters of which this rank holds some units or all: not those of other stages."""
        return self._gradients.parameters

    def parts_of(self, held: Collection[int], *, is_sharded: bool) -> list[tuple[int, int, int]]:
        """The units here, and this rank's shard, as far as parameters with these identities are divided so."""
        if not any(id(parameter) in held for parameter in self.parameters()):
            return []
        has_units = self.stage is not None or any(id(each) in held for each in self.tiled_parameters())
        units = self._units_here() if has_units else []
        return units if self.sharding is None or not is_sharded else [*units, self.sharding.part_here]

    def plain_parameters(self) -> list[nn.Parameter]:
        """Parameters of the network that was given, as far as they are still alive: this model has copies of them."""
        return [parameter for each in self._plain if (parameter := each()) is not None]

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _adopt(self, placement: Placement) -> None:
        """Compute by this placement from now on; sends nothing. `tatami.train.move` calls it when the rows have come."""
        self.layout = placement.layout
        self.tilings = placement.tilings
        self._shares.clear()
        self._announce(0, Span(0, 0), ())
        self._rank.stands_in = False
        tile = self.tile
        self._rank.index = tile.replica if tile is not None else None
        # Without a tile it takes part in batch statistics, which all sum once more or none.
        self._recomputes = bool(self.layout.recomputes) if tile is None else self.layout.replicas[tile.replica].recomputes
        self._rank.speaks = tile is not None and self.tiling.replicas[tile.replica][0].processor == self.name
        self._rank.replicas = len(self.tiling.replicas)
        self._rank.sums_statistics = sums_statistics(
            replicas=self._rank.replicas, tiles=len(self.tiling.tiles), ranks=self.stage_comm.size
        )
        names = [] if tile is None else [each.processor for each in self.tiling.replicas[tile.replica]]
        self._replica.meet(placement.replica, byte_s=slowest_byte_s(self.cluster, names))
        self._placement = placement
        self._shares_units = any(len(replica) > 1 for replica in self.tiling.replicas)
        self.forget_gradients()

    def forget_gradients(self) -> None:
        """An iteration was broken off, and begins again: nothing of its backward passes is left."""
        if (engine := getattr(self, "_gradients", None)) is not None:
            engine.forget()

    def accept_hooks(self) -> None:
        """Take the hooks of the modules as they are now: those that have come are Tatami's own, and change nothing."""
        self._settings = settings_of(self.module, self.found)

    def _regroup(self, *, cluster: Cluster) -> None:
        """The ranks of the communicator are others now, on these processors. For `tatami.state.regroup`; sends nothing."""
        self.cluster = cluster
        self.names = tuple(processor.name for processor in cluster.processors)
        self._watches = self._make_watches()
        self._num_looks = 0  # as that of a rank that has joined: all look at the same elements

    def _place(self, layout: Layout, *, stage: ModelStage | None, workload: Workload, found: Blocks) -> Placement:
        """See `place`; the model stays as it is. Collective.

        Raises:
            PlanError: as `place` and `refuse_recomputation`; micro-batches of a network with batch normalization; replicas of
                several ranks with a sharded optimizer.
        """
        if self._shard_fractions is not None and any(len(replica.processors) > 1 for replica in layout.replicas):
            raise PlanError(
                "the layout has replicas of several ranks, with which sharded_optimizer=True does not work yet. Use a layout "
                "of replicas of one processor, or leave sharded_optimizer out"
            )
        if (self._normalizes or workload.batch_statistics) and any(replica.micro_batches > 1 for replica in layout.replicas):
            raise PlanError(
                "the layout has micro-batches, and batch normalization takes the statistics of the whole batch. Use a layout "
                "with one micro-batch for each replica"
            )
        if found.captured is not None and any(replica.micro_batches > 1 for replica in layout.replicas):
            refuse_changed(sorted(found.captured.leaves_behind.buffers | found.captured.leaves_behind.counting))
        refuse_recomputation(layout, workload=workload)
        cluster = self.cluster if stage is None else self.cluster.only(_names_of(stage, self.names))
        comm = self.comm if stage is None else stage.comm
        return place(layout, comm, cluster=cluster, workload=workload, blocks=found.blocks)

    def _replicas(self) -> list[list[int]]:
        """The ranks of each replica."""
        names = self.stage_names
        return [[names.index(tile.processor) for tile in replica] for replica in self.tiling.replicas]

    def _announce(self, samples: int, mine: Span, widths: tuple[int, ...]) -> None:
        self._rank.samples, self._rank.mine, self._rank.widths = samples, mine, widths

    def _install(self, whole: nn.Module) -> None:
        install_forwards(
            whole,
            self.found,
            context=self._context,
            units=self._units,
            replica=self._replica,
            device=self._device,
            sums_statistics=not self._is_alone,
            recomputes=self._computes_once_more,
        )

    def _make_watches(self) -> list[Watch]:
        """What is compared now and then: among the ranks of a stage, which have the same weights; batches among all ranks."""
        watch = Watch(self.stage_comm, always=debugging())
        watches = [watch] if self.stage is None else [Watch(self.comm, always=debugging()), watch]
        watches[0].add(self._batch.own, self._batch.refuse)
        if not self.comm.changes:  # a rank that has joined has made fewer steps, and looks at other losses than the others
            watch.add(lambda: self.outside.facts, refuse_other_factors)
            # Parameters of other stages, too: a learning rate of one stage alone would be seen by no other rank of it.
            watches[0].add(lambda: steps_of(self.parameters()), refuse_other_steps)
        watch.add(self._weights, self._refuse_other_weights)
        return watches

    def check_same_weights(self) -> None:
        """Look whether ranks that hold the same weights have the same numbers. Collective.

        Raises:
            InputError: on all ranks: they have not; names the weight.
        """
        if self.stage_comm.size > 1:
            self._refuse_other_weights(self.stage_comm.allgather_object(self._weights()))

    def _refuse_other_weights(self, found: Sequence[Mapping[str, Numbers]]) -> None:
        refuse_other_weights(found, ranks=[self.names.index(name) for name in self.stage_names])

    def _weights(self) -> dict[str, Numbers]:
        """A few elements of each parameter, and of those that ranks share, of each piece that the same ranks hold."""
        self._num_looks += 1
        cut = {id(rows.tensor): (rows, index) for index, block in enumerate(self._rows) for rows in block}
        named: list[tuple[str, torch.Tensor]] = []
        parameters = [(name, each) for name, each in self.named_parameters() if not isinstance(each, StandIn)]
        if self._num_looks > _WHOLE_LOOKS:
            parameters = parameters[self._num_looks % -(-len(parameters) // _LOOKED_AT) :: -(-len(parameters) // _LOOKED_AT)]
        for name, parameter in parameters:
            if id(parameter) not in cut:
                named.append((name.removeprefix("module."), parameter))
                continue
            rows, index = cut[id(parameter)]
            named += pieces_of(name.removeprefix("module."), rows, here=self._span(index), tiling=self.tilings[index])
        known = {id(each) for model in models() for each in model.tiled_parameters()} | set(map(id, self.parameters()))
        optimizers = optimizers_of(self._gradients.parameters)
        stepped = [each for optimizer in optimizers for group in optimizer.param_groups for each in group["params"]]
        for number, each in enumerate(stepped):
            # In an elastic run the optimizer also steps this rank's mirrors of other ranks' units.
            if id(each) not in known and not self.comm.changes:
                named.append((f"parameter {number} of an optimizer, which is not the model's,", each))
        return numbers_of(named, look=self._num_looks)

    def _context(
        self, blocks: Iterable[int], *, name: str = "", layer: Callable[[str], nn.Module] | None = None
    ) -> ModuleContext:
        units = tuple(functools.partial(self._span, index) for index in blocks)
        return ModuleContext(rank=self._rank, units=units, name=name, layer=layer)

    def _local_statistics(self) -> LocalStatistics:
        split = {
            name: SplitStatistics(runs=runs, units=functools.partial(self._units, index))
            for index, block in enumerate(self.found.blocks)
            for name, runs in block.cuts.items()
        }
        return LocalStatistics(self.module, rank=self._rank, split=split)

    def _average_statistics(self) -> None:
        if self._statistics is not None and self.module.training:
            self._statistics.average()

    def _units_here(self) -> list[tuple[int, int, int]]:
        every = [self._units(index) for index in range(len(self.found.blocks))]
        if self.stage is not None:
            index, stages = self.stage.index, len(self.stage.layout.stages)
            every.append((Span(0, 0) if index is None else Span(index, index + 1), stages))
        return [(span.start, span.stop, total) for span, total in every]

    def _span(self, block: int) -> Span:
        return self._units(block)[0]

    def _units(self, block: int) -> tuple[Span, int]:
        """The units of a block that are here, and how many it has."""
        tiling = self.tilings[block]
        return units_of(tiling, self.name), tiling.units

    def _on_moment(self, moment: PassMoment) -> None:
        if moment is not PassMoment.BACKWARD and self._gradients.in_parts:
            return  # sums and the update follow when the loop over micro-batches has ended
        phase = _PHASES[moment]
        if moment is not PassMoment.BACKWARD or self.phases.current is not phase:
            self.phases.enter(phase)

    def _computes_once_more(self) -> bool:
        """Whether a layer that runs now is recomputed: with stages not those between whose operations there is a cut."""
        return self._recomputes and (self.stage is None or self.stage.runs_whole)


def _names_of(stage: ModelStage, names: Sequence[str]) -> tuple[str, ...]:
    """Names of the processors that compute this stage, in the order of their ranks."""
    return tuple(name for name in names if name in stage.own_layout.processors)


def _rows(root: nn.Module, cuts: Mapping[str, UnitRuns]) -> list[Rows]:
    """Each tensor once, whatever names it has."""
    tensors = {
        id(tensor): Rows(tensor, runs) for tensor, runs in ((tensor_of(root, name), runs) for name, runs in cuts.items())
    }
    return list(tensors.values())


def _refuse_whole(module: nn.Module, state_dict: Mapping[str, Any], prefix: str, *_: Any) -> None:
    """Called by torch when `model.module`, and not the model, loads weights; plain copies of it take what torch takes."""
    if not prefix and any(getattr(model, "module", None) is module for model in models()):
        refuse_larger(module, state_dict)
