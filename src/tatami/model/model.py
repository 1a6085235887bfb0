"""The model that `tatami.tile` returns: an ordinary module on every rank, each with its own rectangle of the work."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import compress
from typing import Any, Never

import torch
from torch import nn

from tatami.batch import cut_batch, on_device, samples_of, tensors_of
from tatami.checkpoints.parts import KEY, PartOfWeights, check_units, units_tensor
from tatami.cluster import Cluster
from tatami.comm.agreement import Watch, announce, called_by_all, debugging
from tatami.comm.base import AbstractCommunicator
from tatami.comm.short_sum import ShortSum
from tatami.comm.stall_report import format_ranks
from tatami.errors import CommTimeoutError, InputError, ModelError, PlanError, TatamiError, TrainingError
from tatami.gradients.base import AbstractGradientSums
from tatami.gradients.engine import GradientEngine, PassMoment, notice_backward
from tatami.gradients.loss_factors import refuse_other_factors
from tatami.gradients.outside_reads import OutsideReads
from tatami.gradients.passes import ForwardPass, over_batch, refuse_compiling, refuse_transforms
from tatami.model.deferred import DeferredPasses
from tatami.model.describing import Description, describe
from tatami.model.describing_stages import describe_stages
from tatami.model.installing import install_forwards, settings_of
from tatami.model.loss_check import check_loss
from tatami.model.micro_batches import joined, refuse_changed, samples_given, versions_of
from tatami.model.model_stage import ModelStage, StagedNetwork, refuse_foreign_inputs, refuse_stages
from tatami.model.plain_network import plain_network, refuse_larger, whole_weights
from tatami.model.tied_sums import TiedSums
from tatami.partition.blocks import Blocks, workload_of
from tatami.partition.exactness import BATCH_NORMS, RefusingDraws, refuse_other_reduction
from tatami.partition.tracing.restore_state import copy_of
from tatami.runtime.allocator import trim
from tatami.runtime.context import ModuleContext, RankContext
from tatami.runtime.empty_batch import with_stand_in, without_stand_in
from tatami.runtime.kept_pass import kept_pass
from tatami.runtime.local_draws import LocalDraws
from tatami.runtime.local_statistics import LocalStatistics, SplitStatistics
from tatami.runtime.losses import LossReduction, check_reduction, check_targets_count
from tatami.runtime.norms import WholeNorms, models, register
from tatami.runtime.optimizer_parts import watch_optimizer_states
from tatami.runtime.optimizers import watch_optimizers
from tatami.runtime.overlapped_sums import OverlappedSums, may_overlap
from tatami.runtime.owner_sums import OwnerSums
from tatami.runtime.phases import IterationPhase, Phases
from tatami.runtime.placement import Placement, largest, place
from tatami.runtime.recomputing import Restore, recomputable, watch_checkpoints
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
from tatami.tiling import Layout, Span, StagedLayout, Tile, Tiling, Traffic, spans
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


_ANY_STATE = nullcontext()
_PHASES = {
    PassMoment.BACKWARD: IterationPhase.BACKWARD,
    PassMoment.SUMS: IterationPhase.GRADIENTS,
    PassMoment.END: IterationPhase.UPDATE,
}
_WHOLE_LOOKS, _LOOKED_AT = 4, 16
"""The first looks at whether ranks hold the same weights are at all of them, later ones at so many in turn."""
_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None))


class TiledModel(nn.Module):
    """A network of which this rank computes one tile: its samples of every batch, its units of every tiled pair.

    Use it as any module. What is different: `local` picks this rank's samples out of the global batch, and `loss.backward()`
    leaves the gradient of the loss over the *global* batch in every local `.grad`.

        x, y = model.local(x, y)                 # the global batch in, this rank's samples out
        loss = loss_function(model(x), y)
        loss.backward()
        optimizer.step()

    Made by `tatami.tile`, which hands it a copy of the user's module.

    Attributes:
        module: the network; its tiled layers hold this rank's units, all others are whole on every rank.
        comm: all ranks, on a communicator that only this model sends on.
        stage: the pipeline stage of this rank; None where the network is not divided into stages.
        staged: what it takes to divide the network into stages, or into others; None where that is not known.
        stage_comm: the ranks of this stage, which hold the same weights; `comm` where there are no stages. Layout, tilings and
            traffic are those of this stage.
        cluster: what the ranks run on.
        speeds_known: whether the speeds in `cluster` were measured or given, not assumed.
        names: the processor of every rank.
        layout: who lies where, in fractions.
        tilings: the layout, cut for each block; one in all where the network has none.
        phases: where the time goes.
        link_times: when messages between replicas left and came.
        reduction: what the loss does with the samples: "mean" or "sum"; None: not known, and then there is no backward pass.
        draws: what random layers draw that cannot draw as the plain model does; None where there are none.
        outside: what the loss reads of the weights outside of the forward pass.
        rescue_copy: whether there is room for a Trainer's copy of the last good weights.
        thread: that trains it; ranks may be threads of one process.
        sharding: sums gradients and knows which weights this rank updates, where the optimizer's state is sharded in
            `shard_fractions` of the weights, one for each rank of `stage_comm`; else None.
        norms: of whole gradients and weights. What is computed from one `.grad` by hand, its norm too, is over the units here.
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

    # -- the ordinary use -------------------------------------------------------------------------------------------

    def local(self, *batch: Any) -> Any:
        """This rank's samples of a global batch: one part for one, a tuple for several.

        Announces the batch: the next forward pass is over it. So take one batch at a time, and take it again after a re-tiling.
        The forward pass cannot tell from its input alone that these are samples 8 to 19 of 40, which the weight of the mean
        and random layers depend on; a batch object in place of tensors would tell it, but `loss(model(x), y)` would no
        longer be the loop that it is everywhere else. Input of another size than what was announced is refused.

        Args:
            batch: tensors (samples, ...), or tuples, lists and dicts of them; all ranks must pass the same global batch.

        Returns:
            Views (samples_here, ...), in the same structure; where this rank computes on a device, copies there. A rank that is
            alone gets the batch itself.

        Raises:
            InputError: tensors of different numbers of samples, or what cannot be cut into samples; targets of -100 under a
                mean where there are several replicas.
        """
        whole = batch[0] if len(batch) == 1 else batch
        if self._reduction == "mean" and len(self.layout.replicas) > 1:
            check_targets_count(tensors_of(whole))
        return self.take(whole)

    def take(self, batch: Any, *, everywhere: bool = False) -> Any:
        """As `local`, of one batch.

        Args:
            batch: a tensor (samples, ...), or a tuple, list or dict of them.
            everywhere: when the ranks compare their batches, compare those of all ranks, not only those of one replica: what
                every rank has loaded whole must be the same.
        """
        samples = samples_of(batch)
        span = self.local_span(samples)
        if any(watch.is_due for watch in self._watches):
            self._batch.announce(samples, tensors_of(batch), everywhere=everywhere)
        here = batch if self._is_alone else cut_batch(batch, span, samples=samples)
        return here if self._device.type == "cpu" else on_device(here, self._device)

    def announce_share(self, samples: int, here: Any) -> None:
        """Have the ranks of a replica compare what each has fetched, `here`, of a batch of `samples`, when they next do so."""
        if any(watch.is_due for watch in self._watches):
            self._batch.announce(samples, tensors_of(here), is_share=True)

    def micro_batches(self, *batch: Any) -> Iterator[Any]:
        """This rank's samples of a global batch in micro-batches, one after another, as many as its replica computes.

            for x, y in model.micro_batches(x, y):
                loss = loss_function(model(x), y)
                loss.backward()
            optimizer.step()

        Only the activations of one micro-batch are in memory. Gradients are those of the global batch, and are summed over the
        ranks when the loop ends; so let it end, and call `backward` inside of it. A layout says how many there are
        (`Replica.micro_batches`); where every replica has one, this is `local`.

        Args:
            batch: as of `local`.

        Yields:
            What `local` returns, of some of the samples.

        Raises:
            InputError: as `local`.
        """
        return self.parts(self.local(*batch))

    def parts(self, here: Any) -> Iterator[Any]:
        """As `micro_batches`, of what `local` or `take` returned."""
        rank = self._rank
        samples, mine, widths = rank.samples, rank.mine, rank.widths
        replica = None if rank.index is None else self.layout.replicas[rank.index]
        sizes = (mine.size,) if replica is None else replica.micro_batch_sizes(mine.size)
        self._part_sizes = sizes
        if not self.has_parts:
            yield here
            return
        loop, versions = self._gradients.begin_parts(), self._unseen_versions()
        self._deferred.begin(0 if self.stage is None else self.stage.ahead)
        state, start = self.generator.get_state(), mine.start
        try:
            for number, size in enumerate(sizes):
                if number:
                    self.generator.set_state(state)  # every layer draws for the whole batch, and takes its samples' part
                    refuse_changed([name for name, own in self._unseen_versions().items() if own != versions.get(name, own)])
                span = Span(start, start + size)
                self._part = number
                self.outside.parts.append([])
                self._announce(samples, span, widths)
                here_first = start - mine.start
                yield here if len(sizes) == 1 else cut_batch(here, Span(here_first, here_first + size), samples=mine.size)
                start += size
            self._deferred.end()
            if self.stage is not None:
                self.phases.enter(IterationPhase.BACKWARD)
                self.stage.left.compute_all()
        except GeneratorExit:
            self._deferred.clear()
            self._gradients.leave_parts(loop)
            raise
        finally:
            self._part, self.outside.parts = 0, []
            self._announce(samples, mine, widths)
        self._gradients.finish_parts()
        self._average_statistics()

    def _unseen_versions(self) -> dict[str, Any]:
        """How often each buffer was changed, and fractions in modules, where no sample showed what a forward pass changes."""
        is_seen = self.found.captured is not None or not self.module.training
        return {} if is_seen else versions_of(self.module)

    def local_span(self, samples: int) -> Span:
        """Which samples of a global batch of `samples` are this rank's; announces that the next forward pass is over them."""
        if samples not in self._shares:
            planned = tuple(replica[0].samples.size for replica in self.tiling.replicas)
            widths = planned if samples == self.tiling.samples else self.layout.sample_sizes(samples)
            index = self._rank.index
            self._shares[samples] = Span(0, 0) if index is None else spans(widths)[index], widths
        mine, widths = self._shares[samples]
        self._part_sizes = (mine.size,)
        self._announce(samples, mine, widths)
        if any(watch.is_due for watch in self._watches):
            self._batch.announce(samples, ())
        return mine

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The network on this rank's samples: (samples_here, ...) to (samples_here, ...), in tensors, tuples, lists or dicts.

        Raises:
            InputError: the input has another number of samples than `local` gave this rank; or, now and then and on all ranks,
                the ranks were given different batches, or their optimizers do not step alike.
            ModelError: the network returns objects in which its tensors cannot be found.
            CommTimeoutError: other ranks do not call it.
        """
        try:
            output = self._forward(inputs, named_inputs)
            if not self._gradients.in_parts:
                self._average_statistics()
            return output
        except CommTimeoutError as error:
            replicas = self._replicas() if self.stage is None else self.stage.replicas
            together = next((ranks for ranks in replicas if self.comm.rank in ranks), [])
            error.add_note(
                f"in the forward pass of a tiled model, of which {format_ranks(together)} hold one replica together: all of "
                f"them must call it, also in evaluation, and only rank {self.comm.rank} is known to have. Call it on all, use "
                "tatami.Trainer.evaluate, or evaluate a plain copy on rank 0: `network = model.whole()`, called on all ranks"
            )
            raise
        except TatamiError as error:
            if torch.is_grad_enabled() or self._shares_units or self.stage is not None:  # all ranks are in it
                announce(self.comm, error)
            raise

    def _forward(self, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> Any:
        given = samples_given(inputs, named_inputs)
        if self.comm.size > 1:
            refuse_compiling()
            refuse_transforms()
            refuse_foreign_inputs((inputs, named_inputs), has_stages=self.stage is not None)
            if self._shares_units:
                self._settings.refuse()
            self._check_batch(given)
            captured = self.found.captured
            self._replica.is_silent = given == 0
            runs_without = captured is not None and captured.runs_without_samples
            # Operations of other stages are done on shapes, which some cannot be without a sample.
            self._rank.stands_in = given == 0 and not (runs_without and self.stage is None)
        elif given is not None and given != self._rank.samples and not self._gradients.in_parts:
            self._announce(given, Span(0, given), (given,))
        if not torch.is_grad_enabled():
            with self._drawing():
                return self._run(inputs, named_inputs)
        if not self._part:
            self.outside.num_passes += 1
            trim()
        for watch in self._watches if not self._part else ():
            if watch.is_due:
                with self.phases.during(IterationPhase.GRADIENTS):
                    watch.compare()
            watch.end_pass()
        self.thread = threading.get_ident()
        self.phases.enter(IterationPhase.FORWARD)
        if self.sums_nothing and self._reduction is not None and not self._gradients.in_parts:
            self.outside.adds_terms, self.outside.samples = False, None  # a loop over micro-batches may have gone before
            with recomputable(functools.partial(self._keep, None)):
                output = self._run(inputs, named_inputs)
            if not torch.compiler.is_compiling():
                notice_backward(output, self._on_moment)
            return output
        begun = self._begin_pass()
        inputs, named_inputs = self._gradients.inputs(begun, (inputs, named_inputs))
        with self._drawing() as draws, recomputable(functools.partial(self._keep, draws)):
            output = self._run(inputs, named_inputs)
        captured = self.found.captured
        axes = None if captured is None else captured.result_axes
        output = self._gradients.outputs(begun, output, reduction=self._reduction, axes=axes)
        self._deferred.passed(output)
        return output

    def _begin_pass(self) -> ForwardPass:
        """A forward pass with gradients over the samples of `RankContext` begins."""
        rank = self._rank
        samples, here, index = rank.samples, rank.mine.size, 0 if rank.comm is None else rank.index
        is_mean, in_parts = self._reduction == "mean" and samples > 0, self._gradients.in_parts
        shares = tuple(width / samples for width in rank.widths) if is_mean else (1.0,) * len(rank.widths)
        if in_parts and is_mean and here and index is not None:
            shares, index = (here / samples,), 0  # other replicas have other micro-batches
        in_several = self._reduction is not None and (len(rank.widths) > 1 or in_parts)
        is_judged = in_several and here > 1 and self.has_results
        self.outside.samples, self.outside.batch = None if not is_judged else here if is_mean else 0, samples
        self.outside.warns_of_doubts = rank.speaks and index == 0
        begun = self._gradients.begin(
            samples=samples,
            shares=lambda: shares,
            index=index if here else None,
            adds_terms=self._reduction == "sum" and (len(rank.widths) > 1 or in_parts),
        )
        rank.weight = begun.weight
        return begun

    def _on_moment(self, moment: PassMoment) -> None:
        if moment is not PassMoment.BACKWARD and self._gradients.in_parts:
            return  # sums and the update follow when the loop over micro-batches has ended
        phase = _PHASES[moment]
        if moment is not PassMoment.BACKWARD or self.phases.current is not phase:
            self.phases.enter(phase)

    @property
    def sums_nothing(self) -> bool:
        """Whether this rank's gradients are those of the global batch, so that its backward pass is torch's own."""
        return self._is_alone and (self.stage is None or not self.stage.tied)

    @property
    def has_parts(self) -> bool:
        """Whether any replica computes its samples in several micro-batches."""
        return any(replica.micro_batches > 1 for replica in self.layout.replicas)

    @property
    def reduction(self) -> LossReduction | None:
        """What the loss does with the samples; to be set before a forward pass. The Trainer reads it from its loss."""
        return self._reduction

    @reduction.setter
    def reduction(self, reduction: LossReduction) -> None:
        check_reduction(reduction)
        refuse_other_reduction(self.module, self.found.captured, reduction)
        self._reduction = reduction

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0, *, error_if_nonfinite: bool = False) -> float:
        """Scale all gradients so that their global norm is at most `max_norm`; returns the norm as it was. Collective.

        Every unit and every replicated parameter counts once, however many ranks hold it. `torch.nn.utils.clip_grad_norm_` on
        the model's parameters does the same; this sums in double precision.

        Args:
            max_norm: the largest norm that is left as it is.
            norm_type: which p-norm; `math.inf` for the largest element.
            error_if_nonfinite: raise where the norm is NaN or infinite.

        Raises:
            TrainingError: on all ranks, with `error_if_nonfinite`; the gradients are as they were.
        """
        grads = [parameter.grad for parameter in self._gradients.parameters if parameter.grad is not None]
        norm = self.norm_of(grads, norm_type)
        if error_if_nonfinite and not math.isfinite(norm):
            raise TrainingError(
                f"the norm of order {norm_type:g} of the gradients is {norm}, so they cannot be clipped. Look for bad samples, "
                "or lower the learning rate"
            )
        scale = max_norm / (norm + 1e-6)  # as torch.nn.utils.clip_grad_norm_, also where it is NaN
        if not scale >= 1.0:
            for grad in grads:
                grad.mul_(scale)
        return norm

    def norm_of(self, tensors: Sequence[torch.Tensor], norm_type: float, *, everyone: bool = True) -> float:
        """The norm of all these parameters, or gradients of parameters, over all ranks. Collective.

        Args:
            tensors: this rank's part of them, each of any shape.
            norm_type: which p-norm.
            everyone: whether all ranks ask; otherwise those of stages with trained parameters (`ModelStage.total_norm`).
        """
        tiled = {id(each) for parameter in self.tiled_parameters() for each in (parameter, parameter.grad)}
        split = [id(tensor) in tiled for tensor in tensors]
        is_part = False
        if self.stage is not None:
            names = {id(each): name for name, own in self.module.named_parameters() for each in (own, own.grad)}
            asked = {names[id(tensor)] for tensor in tensors}
            trained = {name for name, own in self.module.named_parameters() if own.requires_grad and own.grad is not None}
            is_part = not trained <= asked
            counted = [self.stage.counts(names[id(tensor)]) for tensor in tensors]
            tensors, split = list(compress(tensors, counted)), list(compress(split, counted))
        if self.sharding is not None:
            owners = {id(each.grad): each for each in self._gradients.parameters}
            split = [id(tensor) in owners for tensor in tensors]
            parts = [self.sharding.part(owners[id(each)], each) if id(each) in owners else each for each in tensors]
            tensors = parts
        norms = self.norms.of(tensors, norm_type, tiled=split)
        norm = torch.linalg.vector_norm(norms, norm_type).item() if tensors else 0.0
        return norm if self.stage is None else self.stage.total_norm(norm, norm_type, is_part=is_part, everyone=everyone)

    def global_loss(self, loss: torch.Tensor | Sequence[torch.Tensor]) -> float:
        """The loss over the global batch, in a loop of your own, where `loss` is over this rank's samples. Collective.

        What schedules and early stopping look at: the loss of a rank's own samples is another one on every rank.

        Args:
            loss: of shape (), over this rank's samples of the last batch; after its backward pass. After a loop over
                `micro_batches`, the loss of each, in their order.

        Returns:
            The mean, or the sum, over all samples; the same on all ranks.

        Raises:
            InputError: on all ranks: the loss has a term of weights that are not whole here; or the model does not know its
                reduction.
        """
        if self._reduction is None:
            raise InputError("say what the loss does with the samples: tatami.tile(..., reduction='mean'), or 'sum'")
        self.outside.refuse("global_loss")
        total = torch.tensor([self.own_share(loss)], dtype=torch.float64, device="cpu")
        if self.comm.size > 1:
            with self.phases.during(IterationPhase.GRADIENTS):
                self.comm.allreduce(total)
        return total.item()

    def over_batch(self, mean: torch.Tensor) -> torch.Tensor:
        """The mean over the global batch, where `mean` is that over this rank's samples. Collective; gradients flow through it.

        For losses that are made of means: their root, their quotients, a balance of experts over the batch. For a loss that is
        a mean (`reduction="mean"`), after `local` and before `backward`.

            loss = model.over_batch(F.mse_loss(model(x), y)).sqrt()

        Args:
            mean: of any shape, the same on all ranks.

        Raises:
            InputError: the loss is a sum, or this batch is computed in micro-batches.
        """
        refuse_stages(self.stage is not None, "model.over_batch")
        if self._checks_loss or self._reduction != "mean" or self.has_parts:  # what is made of it cannot be checked by parts
            raise InputError("model.over_batch is for losses that are a mean over a batch computed in one part")
        samples, here = self._rank.samples, self._rank.mine.size
        share = here / samples if here and self._rank.speaks else 0.0
        return over_batch(mean, share=share, comm=self.comm, waits=partial(self.phases.during, IterationPhase.GRADIENTS))

    def check_loss(self, loss: Callable[..., torch.Tensor], *here: Any, what: str = "check_loss") -> None:
        """Look whether a loss is the mean, or the sum, of what samples give one by one, by computing it of parts. Collective.

            model.check_loss(lambda x, y: F.mse_loss(model(x), y), *model.local(x, y))

        So is its gradient by the output of the network, which runs in evaluation. The Trainer does this with the first batch of
        a `training_step`.

        Args:
            loss: of samples that are given as `here` is; returns a scalar.
            here: what `local` returned.
            what: the name of the loss, for errors.

        Raises:
            InputError: on all ranks: it is not, or the network couples samples of this batch.
        """
        if self._reduction is None or (len(self.layout.replicas) == 1 and not self.has_parts):
            return
        refuse_stages(self.stage is not None, "model.check_loss")
        if any(isinstance(each, BATCH_NORMS) and each.running_mean is None for each in self.module.modules()):
            return  # it normalizes over the batch in evaluation, too, which no part of a batch shows
        # A pass of ranks that share units is made by all of them, so all decide alike whether there are enough samples.
        enough = min(filter(None, self._rank.widths), default=0) > 1
        self._checks_loss = True
        try:
            check_loss(
                self,
                loss,
                here,
                network=self.module,
                samples=self._rank.mine.size,
                is_judged=enough,
                reduction=self._reduction,
                comm=self.comm,
                what=what,
            )
        finally:
            self._checks_loss = False

    def own_share(self, loss: torch.Tensor | Sequence[torch.Tensor]) -> float:
        """What this rank adds to the loss over the global batch, see `global_loss`.

        Args:
            loss: of shape (), or those of the micro-batches.

        Raises:
            InputError: another number of losses than the last batch had micro-batches.
        """
        samples, here = self._rank.samples, self._rank.mine.size
        if not isinstance(loss, torch.Tensor) and len(loss) != len(self._part_sizes):
            raise InputError(f"there are {len(loss)} losses, but the last batch had {len(self._part_sizes)} micro-batches here")
        if not here or not self.speaks_for_replica:
            return 0.0
        if isinstance(loss, torch.Tensor):
            return loss.item() * (here / samples if self._reduction == "mean" else 1.0)
        weights = [size / samples if self._reduction == "mean" else 1.0 for size in self._part_sizes]
        return sum(each.item() * weight for each, weight in zip(loss, weights, strict=True))

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """This rank's part of the weights, as `state_dict` gives it.

        Raises:
            ModelError: these are the weights of the plain network.
        """
        if strict and state_dict and KEY not in state_dict:
            raise whole_weights()
        if self.stage is not None:
            others = super().state_dict()
            state_dict = {**{name: value for name, value in others.items() if isinstance(value, StandIn)}, **state_dict}
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def state_dict(self, *args: Any, destination: Any = None, **options: Any) -> Any:
        """This rank's part of the weights, with the units that it is of: `load_state_dict` refuses another part.

        `torch.save` of it on rank 0 warns where it is not all of the weights. See `whole_state_dict`, `tatami.save_training`.
        """
        if destination is None and not args and self.comm.rank == 0 and any(b - a < n for a, b, n in self._units_here()):
            destination = PartOfWeights()
            destination._metadata = OrderedDict()
        state = super().state_dict(*args, destination=destination, **options)
        for name in [name for name, value in state.items() if isinstance(value, StandIn)]:  # of other stages
            del state[name]
        return state

    @called_by_all("model.whole")
    def whole(self) -> nn.Module | None:
        """A plain network with all of the weights, on the CPU of rank 0; None on other ranks. Collective.

        What a function that makes the network has read from a file, and training has not changed, stays a part of the file.

            network = model.whole()        # on all ranks
            if network is not None:        # on rank 0
                print(accuracy(network.eval(), held_out))

        Raises:
            ModelError: on rank 0: the network that was tiled is gone, so that there is nothing to copy.
        """
        given = self._make_plain
        make = given if not isinstance(given, weakref.ref) else lambda: None if (plain := given()) is None else copy_of(plain)
        return plain_network(self, make, gather=self._gather, comm=self.comm)

    def get_extra_state(self) -> torch.Tensor:
        """The units that are here, for the state dict."""
        return units_tensor(self._units_here())

    def set_extra_state(self, state: Any) -> None:
        """
        Raises:
            CheckpointError: the state dict is of other units.
        """
        check_units(state, self._units_here())

    def _units_here(self) -> list[tuple[int, int, int]]:
        every = [self._units(index) for index in range(len(self.found.blocks))]
        if self.stage is not None:
            index, stages = self.stage.index, len(self.stage.layout.stages)
            every.append((Span(0, 0) if index is None else Span(index, index + 1), stages))
        return [(span.start, span.stop, total) for span, total in every]

    def describe(self) -> Description:
        """What is tiled by what, what is repeated on every rank of a replica, and what could not be followed: print it.

        With pipeline stages also who computes which pieces, what crosses between stages, and how much memory is planned.
        """
        return self._description if self.stage is None else replace(self._description, stages=describe_stages(self.stage))

    def close(self) -> None:
        """Give the model's communicators back; the weights stay. Collective. Passes that need other ranks raise `ClosedError`.

        For programs that make models again and again: MPI has some two thousand communicators, and a model has two to five.
        """
        self._leave()
        self.comm.close()

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

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Called by `copy.deepcopy`, `pickle` and `torch.save`."""
        raise ModelError(
            "a tiled model holds its ranks' communicator and a part of the weights, and cannot be copied or pickled. "
            "tatami.train.save_model writes the whole weights, tatami.train.whole_state_dict gathers them, and "
            "tatami.train.WeightAverage, in place of AveragedModel, is their moving average"
        )

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
        """Lie like this from now on. For `tatami.train.move`, which calls it when the rows have come; sends nothing."""
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

    def _span(self, block: int) -> Span:
        return self._units(block)[0]

    def _units(self, block: int) -> tuple[Span, int]:
        """The units of a block that are here, and how many it has."""
        tiling = self.tilings[block]
        return units_of(tiling, self.name), tiling.units

    def _check_batch(self, given: int | None) -> None:
        """Whether input of so many samples is what `local` gave. Without gradients, any that the replica shares will do."""
        samples, mine = self._rank.samples, self._rank.mine
        if not torch.is_grad_enabled():
            if given and self.tile is None:
                raise InputError(
                    f"the input has {given} samples, but rank {self.comm.rank} was left out of the tiling and holds no units "
                    "to compute them with. Pass what model.local(...) returned for the global batch"
                )
            return
        if samples == 0:
            raise InputError(
                f"rank {self.comm.rank} does not know its samples: call model.local(...) with the global batch before each "
                "forward pass, and again after a re-tiling"
            )
        if given is not None and given != mine.size:
            raise InputError(
                f"the input has {given} samples, but {mine.size} of the {samples} samples of the last batch are rank "
                f"{self.comm.rank}'s. Pass what model.local(...) returned for the global batch; to evaluate other data, call "
                "trainer.evaluate(...), or use a plain copy of the network, model.whole(), both on all ranks"
            )

    def _run(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> Any:
        """The network's own forward pass, over one sample where this rank has none and the network cannot run without."""
        call = self.module if self.stage is None else self._pipelined
        if not self._rank.stands_in:
            return call(*inputs, **named_inputs)
        inputs, named_inputs = with_stand_in((inputs, dict(named_inputs)))
        captured = self.found.captured
        return without_stand_in(call(*inputs, **named_inputs), None if captured is None else captured.result_axes)

    def _pipelined(self, *inputs: Any, **named_inputs: Any) -> Any:
        """This rank's stage of the forward pass, over one micro-batch of this rank's samples after the other."""
        assert self.stage is not None
        rank = self._rank
        samples, mine, widths = rank.samples, rank.mine, rank.widths
        sizes = self.layout.replicas[rank.index or 0].micro_batch_sizes(mine.size)
        if len(sizes) == 1 or rank.stands_in or self._gradients.in_parts or not torch.is_grad_enabled():
            parts = len(self._part_sizes) if self._gradients.in_parts else 1
            return self.stage.run(inputs, named_inputs, micro_batch=self._part, num_micro_batches=parts)
        state, outputs, start = self.generator.get_state(), [], 0
        for number, size in enumerate(sizes):
            if number:
                self.generator.set_state(state)  # every layer draws for the whole batch, and takes its samples' part
            span = Span(start, start + size)
            self._announce(samples, Span(mine.start + span.start, mine.start + span.stop), widths)
            part, named_part = cut_batch((inputs, named_inputs), span, samples=mine.size)
            outputs.append(self.stage.run(part, named_part, micro_batch=number, num_micro_batches=len(sizes)))
            start += size
        self._announce(samples, mine, widths)
        return joined(outputs, None if self.found.captured is None else self.found.captured.result_axes)

    def _computes_once_more(self) -> bool:
        """Whether a layer that runs now is recomputed: with stages not those between whose operations there is a cut."""
        return self._recomputes and (self.stage is None or self.stage.runs_whole)

    def _keep(self, draws: Any, is_reentrant: bool) -> Restore:
        """See `recomputing`: what layers ask for now, in a pass that draws from `draws`.

        Raises:
            ModelError: with pipeline stages, the checkpoint hides from autograd what stages send from inside of it.
        """
        if is_reentrant and self.stage is not None:
            raise ModelError(
                "torch.utils.checkpoint(..., use_reentrant=True) does not work with pipeline stages: give use_reentrant=False, "
                "or let tatami.tile(recompute=True) recompute activations"
            )
        of_stage = nullcontext if self.stage is None else self.stage.keep()
        return kept_pass(self._rank, replica=self._replica, generator=self.generator, draws=draws, of_stage=of_stage)

    def _drawing(self) -> AbstractContextManager[Any]:
        """The ranks of a replica draw alike."""
        is_training = self.training and torch.is_grad_enabled()
        if self.draws is None and is_training and self._is_unseen:
            self._is_unseen = False
            return RefusingDraws()  # type: ignore[no-untyped-call]
        if self.draws is None or self._is_alone:
            return _ANY_STATE
        replica = self._rank.index or 0
        return self.draws.next_pass(replica=replica, part=self._part) if is_training else self.draws.evaluation(replica=replica)


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
