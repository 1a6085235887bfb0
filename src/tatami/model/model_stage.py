"""The pipeline stage that a rank of a model computes, and its exchange with the other stages."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tatami.cluster import Cluster
from tatami.comm.agreement import same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import CommTimeoutError, ModelError, PlanError
from tatami.gradients.engine import REPLACED
from tatami.partition.blocks import Blocks
from tatami.partition.pieces import RecordedNetwork
from tatami.runtime.phases import IterationPhase, Phases
from tatami.runtime.vector_sum import wire_dtype
from tatami.stages.channel import Parcel
from tatami.stages.comm_channel import CommChannel
from tatami.stages.late_weights import Accumulated, LeftProducts
from tatami.stages.program import Staging
from tatami.stages.recording import tensors_in
from tatami.stages.running import StageRunner
from tatami.stages.stand_in import StandIn
from tatami.tiling import AlphaBetaCost, Layout, Replica, StagedLayout, StagedPlan
from tatami.tiling.staged_price import price_stages
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class StagedNetwork:
    """A network as stages can share it out, whatever the layout.

    Attributes:
        network: its forward pass, recorded.
        found: its blocks.
        workload: of all of it, with its pieces.
        cost: what plans are priced by; None for the planner's own choice.
        stages: how many there are to be; None: as many as is fastest.
    """

    network: RecordedNetwork
    found: Blocks
    workload: Workload
    cost: AlphaBetaCost | None = None
    stages: int | None = None

    def stage(
        self,
        world: AbstractCommunicator,
        layout: StagedLayout,
        *,
        cluster: Cluster,
        generator: torch.Generator,
        phases: Phases,
        plan: StagedPlan | None,
    ) -> ModelStage:
        """This rank's stage in a layout. Collective.

        Args:
            world: all ranks, on a communicator of the model's own.
            layout: which rank computes what.
            cluster: the processor of every rank.
            generator, phases: as of `ModelStage`.
            plan: by which the layout was chosen; None where it was given.

        Raises:
            PlanError: on all ranks: the layout names processors that no rank runs on, or ranks have recorded other networks.
            ModelError: on all ranks: the network cannot be cut so.
        """
        names = [processor.name for processor in cluster.processors]
        unknown = [name for name in layout.processors if name not in names]
        if unknown:
            raise PlanError(f"the layout names processors that no rank runs on: {unknown}; the ranks run on {names}")
        staging = self.network.staging(layout.cuts)
        # Relative speeds do not say how long a hand-over takes in comparison with a pass.
        hides = (self.cost or AlphaBetaCost()).compares_machines(cluster)
        priced = plan or price_stages(layout, cluster=cluster, workload=self.workload, cost=self.cost, hides=hides)
        operations = [(each.name, each.reach.value) for each in staging.program.operations]
        same_everywhere(world, {"operations": operations}, where="the recorded forward pass", error=PlanError)
        found = ModelStage(
            world,
            names=names,
            layout=layout,
            staging=staging,
            generator=generator,
            phases=phases,
            wire=wire_dtype(self.workload.wire),
            in_flight=priced.in_flight,
            weights_left=priced.weights_left,
            evaluation=self.network.evaluation(staging),
        )
        found.plan = priced
        return found


class ModelStage:
    """One rank's part of a pipeline.

    The ranks of one stage, over all replicas, are a model by themselves: `comm` and `own_layout` are theirs. A rank that the
    layout leaves out is alone, and computes no operation of the network.

    Args:
        world: all ranks.
        names: the processor of every rank.
        layout: which rank computes what.
        staging: the network's forward pass, cut as `layout` says.
        generator: from which random layers draw.
        phases: the stopwatch.
        wire: to what activations and their gradients are rounded on their way.
        in_flight: for each stage, how many micro-batches have gone forward and not yet backward.
        weights_left: for each stage, of how many micro-batches gradients of weights may be left for later.
        evaluation: as of `StageRunner`.

    Attributes:
        index: the stage; None where this rank was left out.
        comm: the ranks of this stage, in the order of their ranks in `world`.
        own_layout: of these ranks.
        plan: what the layout was predicted to take, in time and memory; None where that is not known.
        left: gradients of weights that are still to be computed; all of them before gradients are summed.
    """

    def __init__(
        self,
        world: AbstractCommunicator,
        *,
        names: Sequence[str],
        layout: StagedLayout,
        staging: Staging,
        generator: torch.Generator,
        phases: Phases,
        wire: torch.dtype | None = None,
        in_flight: Sequence[int],
        weights_left: Sequence[int],
        evaluation: Staging | ModelError | None = None,
    ) -> None:
        me = names[world.rank]
        self.world, self.layout, self.staging, self._generator = world, layout, staging, generator
        self.index = layout.stage_of(me)
        if self.index is None:
            self.own_layout = Layout(replicas=(Replica(width=1.0, processors=(me,), heights=(1.0,)),))
        else:
            self.own_layout = layout.stages[self.index]
        rank_of = {name: rank for rank, name in enumerate(names)}
        comm = world.subgroup(sorted(rank_of[name] for name in self.own_layout.processors))
        assert comm is not None
        self.comm, self._trained = comm, world
        self.is_clipped_apart = False  # gradients of other stages alone were clipped since the last norm
        replica = next(number for number, each in enumerate(self.own_layout.replicas) if me in each.processors)
        ranks_of = [[rank_of[name] for name in stage.replicas[replica].processors] for stage in layout.stages]
        # Not a duplicate: that of an elastic run has other ranks after each change, while a stage ends with its group.
        messages = world.subgroup(range(world.size))
        assert messages is not None
        self._messages = messages
        self.left = LeftProducts(0 if self.index is None else weights_left[self.index])
        self._channel = CommChannel(
            self._messages,
            ranks_of=ranks_of,
            wire=wire,
            meanwhile=self.left.compute_one,
            waiting=functools.partial(self._waits, IterationPhase.BUBBLE),
            travelling=functools.partial(self._waits, IterationPhase.HANDOVER),
        )
        self._phases, self._evaluation, self._wire = phases, evaluation, wire
        self._names = tuple(names)
        self._first_names: dict[str, str] = {}
        # A stage that waits for more forward passes than the one in front of it makes before it waits would wait forever.
        self._in_flight = list(accumulate(in_flight, min))
        self._runner: StageRunner | None = None
        self.plan: StagedPlan | None = None

    @cached_property
    def replicas(self) -> list[list[int]]:
        """The ranks of each replica, of all stages."""
        number_of = {name: number for number, name in enumerate(self._names)}
        replicas = zip(*(stage.replicas for stage in self.layout.stages), strict=True)
        return [[number_of[name] for replica in replica for name in replica.processors] for replica in replicas]

    @property
    def is_last(self) -> bool:
        """Whether the network's results, and so the loss, are here."""
        return self.index == len(self.layout.stages) - 1

    @property
    def in_flight(self) -> tuple[int, ...]:
        """How many micro-batches each stage keeps the activations of."""
        return tuple(self._in_flight)

    @property
    def ahead(self) -> int:
        """How many forward passes this stage is ahead of its backward passes, one forward and one backward pass in turn."""
        return 0 if self.index is None else self._in_flight[self.index] - 1

    @cached_property
    def tied(self) -> Mapping[str, tuple[int, ...]]:
        """The parameters of this stage that other stages read, too, and all stages that read them."""
        found: dict[str, list[int]] = {}
        for stage, names in enumerate(self.staging.parameters):
            for name in names:
                found.setdefault(name, []).append(stage)
        own = () if self.index is None else self.staging.parameters[self.index]
        return {name: tuple(found[name]) for name in sorted(own) if len(found[name]) > 1}

    def holder_of(self, name: str) -> int | None:
        """The first rank that has this parameter or buffer of the network; None where every rank has it.

        Raises:
            ModelError: the network had none of this name when it was tiled.
        """
        first = self._first_names.get(name)
        if first is None:
            raise ModelError(f"{name}: {REPLACED}")
        stages = (
            stage
            for stage, (parameters, buffers) in enumerate(zip(self.staging.parameters, self.staging.buffers, strict=True))
            if first in parameters or first in buffers
        )
        stage = next(stages, None)
        return None if stage is None else min(map(self._names.index, self.layout.stages[stage].processors))

    def follow(self, module: nn.Module) -> None:
        """Know the names of the weights of `module`, and which stages have any that are trained. Collective."""
        firsts: dict[int, str] = {}
        named = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
        self._first_names = {name: firsts.setdefault(id(tensor), name) for name, tensor in named}
        trained = {self._first_names[name] for name, parameter in module.named_parameters() if parameter.requires_grad}
        with_trained = [
            self._names.index(name)
            for stage, names in zip(self.layout.stages, self.staging.parameters, strict=True)
            if trained & set(names)
            for name in stage.processors
        ]
        me = self.world.rank
        found = self.world.subgroup(sorted(with_trained) if me in with_trained else [me])
        assert found is not None
        self._trained = found

    def has(self, name: str) -> bool:
        """Whether this rank has a parameter or buffer of the network, which may be shared with other stages."""
        return self.staging.is_on(self.index, name)

    def blocks_of(self, found: Blocks) -> Blocks:
        """The blocks of this stage: those whose modules it runs as a whole, and whose tensors no other stage reads.

        Raises:
            PlanError: on all ranks: several ranks of a replica would share the units of a stage that has no such block.
        """
        of_stage = [found.within(functools.partial(self._holds, stage)) for stage in range(len(self.layout.stages))]
        for number, (stage, own) in enumerate(zip(self.layout.stages, of_stage, strict=True)):
            wide = next((replica.processors for replica in stage.replicas if len(replica.processors) > 1), ())
            if wide and not own.blocks:
                raise PlanError(
                    f"{' and '.join(wide)} are to share the units of stage {number}, and no layer that is wholly inside of it "
                    "can be divided over units. Cut in front of other pieces, or give one processor for the stage and replica"
                )
        return found.within(lambda *_: False) if self.index is None else of_stage[self.index]

    def _holds(self, stage: int, modules: Iterable[str], tensors: Iterable[str]) -> bool:
        firsts = {self._first_names[name] for name in tensors}
        readers = {
            number
            for number, names in enumerate(zip(self.staging.parameters, self.staging.buffers, strict=True))
            if not firsts.isdisjoint(itertools.chain(*names))
        }
        return readers == {stage} and all(self.staging.modules.get(name) == stage for name in modules)

    def install(self, module: nn.Module, *, accumulated: Accumulated) -> None:
        """From now on, `run` runs this stage of `module`; `accumulated`: see `StageRunner`."""
        self._runner = StageRunner(
            module,
            staging=self.staging,
            evaluation=self._evaluation,
            stage=self.index,
            channel=self._channel,
            generator=self._generator,
            on_backward=self._phases.work_on,
            accumulated=accumulated,
            left=self.left,
            # They keep the inputs of all linear layers, which recomputation is to save.
            are_late=not self.own_layout.recomputes,
        )

    def run(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any], *, micro_batch: int, num_micro_batches: int) -> Any:
        """The forward pass over one micro-batch; stand-ins where the results are on another stage."""
        assert self._runner is not None
        self._phases.work_on(micro_batch)
        return self._runner.run(inputs, named_inputs, micro_batch=micro_batch, num_micro_batches=num_micro_batches)

    @property
    def runs_whole(self) -> bool:
        """Whether the layer that runs now is inside of a module that this stage runs as a whole."""
        return self._runner is not None and self._runner.inside is not None

    def keep(self) -> Callable[[], AbstractContextManager[None]]:
        """Brings back, where torch computes a part of the pass that runs now once more, what its layers ask for."""
        assert self._runner is not None
        return functools.partial(self._runner.again, self._runner.current or self._runner.repeated)

    def sum_tied(self, grads: Mapping[str, torch.Tensor | None]) -> dict[str, torch.Tensor | None]:
        """The gradients of `tied`, summed over the stages that read them. Collective among these stages.

        Args:
            grads: of those that are trained, the same on all stages, summed over the replicas; None where a weight had no part
                in the loss here.
        """
        first = len(self.staging.program.values)
        numbers = {name: first + number for number, name in enumerate(self._all_tied)}
        trained = {name: stages for name, stages in self.tied.items() if name in grads}
        for name, stages in trained.items():
            for other in stages:
                if other != self.index:
                    self._channel.send(self._parcel(numbers[name], self.index, other), grads[name])
        sums: dict[str, torch.Tensor | None] = {}
        for name, stages in trained.items():
            total: torch.Tensor | None = None
            for other in stages:  # in the same order on all, so that all have the same bits
                own = other == self.index
                part = grads[name] if own else self._channel.receive(self._parcel(numbers[name], other, self.index))
                if own and part is not None and self._wire is not None and part.dtype.itemsize > self._wire.itemsize:
                    part = part.to(self._wire).to(part.dtype)  # as the other stages receive it
                if part is not None:
                    total = part.clone() if total is None else total.add_(part)
            sums[name] = total
        return sums

    def total_norm(self, own: float, norm_type: float, *, is_part: bool, everyone: bool) -> float:
        """The norm over all stages of what has the norm `own` on this one, and is a part of its parameters or all of them.

        Collective, among all ranks where `everyone`, and otherwise among those whose stages have trained parameters: torch
        does not ask for a norm of no gradients.

        Raises:
            ModelError: the order is not above 0; or several stages ask for parts, or in several calls, which may mean other
                norms, as where each weight is clipped by itself.
            CommTimeoutError: ranks of other stages do not ask.
        """
        if not norm_type > 0:
            raise ModelError(f"with pipeline stages, the order of a norm must be above 0, not {norm_type:g}")
        rows = torch.zeros(2, len(self.layout.stages), dtype=torch.float64, device="cpu")
        if self.index is not None and self.comm.rank == 0:
            rows[:, self.index] = torch.tensor([own, 2 if self.is_clipped_apart else is_part], dtype=torch.float64)
        self.is_clipped_apart = False
        try:
            (self.world if everyone else self._trained).allreduce(rows)
        except CommTimeoutError as error:
            error.add_note(
                "in the norm of gradients or parameters, as for clipping: with pipeline stages it is the norm over all stages, "
                "and the ranks of every stage must ask for it. For parameters that one stage alone has, other ranks do not: "
                "clip all at once (model.parameters()), take the norm of each gradient yourself, or use stages=1"
            )
            raise
        if rows[1].sum() > 1:
            raise ModelError(
                "the norm of some of the parameters was asked for on several pipeline stages, or in several calls; they have "
                "different ones and may mean different norms. Clip all at once (model.parameters()), take the norm of each "
                "gradient yourself, or use stages=1"
            )
        return float(torch.linalg.vector_norm(rows[0], norm_type))

    def counts(self, name: str) -> bool:
        """Whether this stage counts a parameter in sums over all stages: one that several read is counted by the first."""
        return self.tied.get(name, (self.index,))[0] == self.index

    def close(self) -> None:
        """Give the communicators back when everything that was sent has left. Collective.

        In an elastic run no rank waits for that: others may have died, and what they were sent is not needed any more.
        """
        if not self.world.changes:
            self._channel.flush()
        self.comm.close()
        if self._trained is not self.world:
            self._trained.close()
        self._messages.close()

    def _waits(self, phase: IterationPhase) -> AbstractContextManager[None]:
        """The sums of tied weights are gradient sums, also while they wait."""
        return nullcontext() if self._phases.current is IterationPhase.GRADIENTS else self._phases.during(phase)

    @cached_property
    def _all_tied(self) -> list[str]:
        """Names of the tied weights of all stages, in the same order on all ranks."""
        names = [name for stage in self.staging.parameters for name in stage]
        return sorted({name for name in names if names.count(name) > 1})

    @staticmethod
    def _parcel(number: int, source: int | None, target: int | None) -> Parcel:
        assert source is not None
        assert target is not None
        return Parcel(value=number, micro_batch=0, source=source, target=target)


def refuse_foreign_inputs(given: Any, *, has_stages: bool) -> None:
    """
    Args:
        given: the inputs of a forward pass, in any structure.
        has_stages: whether the network has pipeline stages.

    Raises:
        ModelError: a gradient would have to leave the network by an input, which only the ranks of its first stage have; or an
            input is the result of a network with stages, which only the ranks of its last stage have.
    """
    for each in tensors_in(given):
        if has_stages and each.requires_grad and torch.is_grad_enabled():
            raise ModelError(
                "an input of a network with pipeline stages requires a gradient, which the ranks of its first stage alone "
                "would have: it is the result of another layer or network, or requires_grad was set. Give tatami.tile one "
                "network that has the layers in front, too, or stages=1; or pass input.detach()"
            )
        if not has_stages and isinstance(each, StandIn):
            raise ModelError(
                "an input is the result of a network with pipeline stages, which the ranks of its last stage alone have. Give "
                "tatami.tile one network that has both, or stages=1 for the first one, too"
            )


def refuse_stages(is_staged: bool, what: str) -> None:
    """
    Raises:
        ModelError: the model has pipeline stages, with which `what` does not work yet.
    """
    if is_staged:
        raise ModelError(f"{what} does not work with pipeline stages yet. Give tatami.tile stages=1, or leave it out")
