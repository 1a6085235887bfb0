"""The model that `tatami.tile` returns: an ordinary module on every rank, each with its own rectangle of the work."""

from __future__ import annotations

import functools
import math
import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any, Never

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import CommTimeoutError, InputError, ModelError, TrainingError
from tatami.parallel.same_steps import steps_of, watch_steps
from tatami.tiled.batch import cut_batch, on_device, samples_of, tensors_of
from tatami.tiled.blocks import Blocks, workload_of
from tatami.tiled.carrying import units_of
from tatami.tiled.context import ModuleContext, RankContext
from tatami.tiled.departing import leaving_early
from tatami.tiled.describing import Description, describe
from tatami.tiled.exactness import BATCH_NORMS, RefusingDraws, refuse_compiling, refuse_other_reduction
from tatami.tiled.following.running import LocalForward
from tatami.tiled.gradient_sums import GradientSums
from tatami.tiled.linear_pairs import TiledFirst, TiledSecond
from tatami.tiled.local_draws import LocalDraws
from tatami.tiled.losses import LossReduction, check_reduction, check_targets_count
from tatami.tiled.norms import WholeNorms
from tatami.tiled.optimizers import watch_optimizers
from tatami.tiled.phases import IterationPhase, Phases
from tatami.tiled.placement import Placement, largest, place
from tatami.tiled.registry import register
from tatami.tiled.rows import ONE_EACH, Rows, UnitRuns, cut_units_of, tensor_of
from tatami.tiled.same_batch import BatchWatch
from tatami.tiled.scaling import watch_scalers
from tatami.tiled.standing_in import with_stand_in, without_stand_in
from tatami.tiled.stopwatch import LinkTimes
from tatami.tiled.torch_norms import watch_norms
from tatami.tiled.vertical import ColumnComm
from tatami.tiled.weighing import PLAIN_VALUES, weighed
from tatami.tiled.weights_beside import WeightsBeside
from tatami.tiled.whole_batch import UnitFactor
from tatami.tiled.whole_layers import WholeBatchNorm, WholeDropout
from tatami.tiling import Layout, Span, Tile, Tiling, Traffic, spans, traffic_of
from tatami.tiling.summing import transfer_rates
from tatami.tiling.traffic import gradient_sums, riding_elements
from tatami.workload import Workload, as_probed

_ANY_STATE = nullcontext()


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
        cluster: what the ranks run on.
        speeds_known: whether the speeds in `cluster` were measured or given, not assumed.
        names: the processor of every rank.
        layout: who lies where, in fractions.
        tilings: the layout, cut for each block; one in all where the network has none.
        phases: where the time goes.
        link_times: when messages between columns left and came.
        reduction: what the loss does with the samples: "mean" or "sum"; None: not known, and then there is no backward pass.
        draws: what random layers draw that cannot draw as the plain model does; None where there are none.
        norms: of whole gradients and weights. What is computed from one `.grad` by hand, its norm too, is over the units here.
    """

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
        bucket_bytes: int | None = None,
        plain: nn.Module | None,
    ) -> None:
        super().__init__()
        self._plain = () if plain is None else tuple(map(weakref.ref, plain.parameters()))
        self.comm = comm
        self._device = next(module.parameters()).device
        self.cluster = cluster
        self.speeds_known = speeds_known
        self.names = tuple(processor.name for processor in cluster.processors)
        self._reduction = reduction
        self.phases = phases
        self.link_times = LinkTimes(phases.clock)
        self.generator = generator
        self.draws = draws
        self.found: Blocks = found
        refuse_other_reduction(module, found.captured, reduction)
        work = as_probed(workload_of(module, found, samples=batch_size, wire=wire), cluster)
        self.workload: Workload = leaving_early(work, module=module, found=found, bucket_bytes=bucket_bytes)
        self._description = describe(module, found, workload=self.workload)
        self._column = ColumnComm(phases, wire=wire)
        self._is_alone = comm.size == 1 and not comm.changes
        self._is_unseen = found.captured is None and not self._is_alone  # what its forward pass draws
        self._rank: RankContext = RankContext(column=self._column, comm=None if self._is_alone else comm, generator=generator)
        self._shares: dict[int, tuple[Span, tuple[int, ...]]] = {}
        self._watch = BatchWatch(comm, columns=self._columns)
        self._adopt(self._place(layout))
        self._tile(module)
        self.module = module
        self._keepers = _keepers(module, found)
        self._weighed: dict[tuple[nn.Module, str], Any] = {}
        rows = [_rows(module, block.cuts) for block in found.blocks]
        self._rows = rows or [[]]
        self._sums = GradientSums(
            module,
            found=found,
            rows=self._rows,
            workload=self.workload,
            rank=self._rank,
            phases=phases,
            link_times=self.link_times,
            placement=lambda: self._placement,
            columns=self._columns,
            run=self._run,
        )
        self.norms = WholeNorms(comm, holders=lambda: self._columns()[0], phases=phases)
        register(self)
        watch_optimizers()
        watch_steps()
        if not self._is_alone:
            watch_norms()
            watch_scalers()

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
                mean where there are several columns.
        """
        whole = batch[0] if len(batch) == 1 else batch
        if self._reduction == "mean" and len(self.layout.columns) > 1:
            check_targets_count(tensors_of(whole))
        return self.take(whole)

    def take(self, batch: Any, *, everywhere: bool = False) -> Any:
        """As `local`, of one batch.

        Args:
            batch: a tensor (samples, ...), or a tuple, list or dict of them.
            everywhere: when the ranks compare their batches, compare those of all ranks, not only those of one column: what
                every rank has loaded whole must be the same.
        """
        samples = samples_of(batch)
        span = self.local_span(samples)
        if self.comm.size > 1:
            self._watch.announce(samples, tensors_of(batch), everywhere=everywhere)
        here = batch if self._is_alone else cut_batch(batch, span, samples=samples)
        return here if self._device.type == "cpu" else on_device(here, self._device)

    def local_span(self, samples: int) -> Span:
        """Which samples of a global batch of `samples` are this rank's; announces that the next forward pass is over them."""
        if samples not in self._shares:
            index, widths = self._rank.index, self._widths_of(samples)
            self._shares[samples] = Span(0, 0) if index is None else spans(widths)[index], widths
        mine, widths = self._shares[samples]
        self._announce(samples, mine, widths)
        if self.comm.size > 1:
            self._watch.announce(samples, ())
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
            return self._forward(inputs, named_inputs)
        except CommTimeoutError as error:
            error.add_note("in the forward pass of a tiled model, which all ranks call alike, in evaluation as well")
            raise

    def _forward(self, inputs: tuple[Any, ...], named_inputs: dict[str, Any]) -> Any:
        given = _samples_given(inputs, named_inputs)
        if self.comm.size > 1:
            refuse_compiling()
            self._check_batch(given)
            captured = self.found.captured
            self._column.is_silent = given == 0
            self._rank.stands_in = given == 0 and not (captured is not None and captured.runs_without_samples)
        elif given is not None and given != self._rank.samples:
            self._announce(given, Span(0, given), (given,))
        if not torch.is_grad_enabled():
            with self._drawing():
                return self._run(inputs, named_inputs)
        if self.comm.size > 1:
            if self._watch.is_due:
                with self.phases.during(IterationPhase.HORIZONTAL):
                    # A rank that has joined has made fewer steps.
                    self._watch.compare(() if self.comm.changes else steps_of(self._sums.parameters))
            self._watch.end_pass()
        self.phases.enter(IterationPhase.FORWARD)
        if self._is_alone:
            output = self.module(*inputs, **named_inputs)
            if self._reduction is not None:
                return output
        else:
            with self._drawing():
                output = self._sums.forward(inputs, named_inputs)
        samples, mine = self._rank.samples, self._rank.mine
        scale = mine.size / samples if self._reduction == "mean" else {"sum": 1.0}.get(self._reduction or "")
        for owner, name in self._keepers:
            kept = vars(owner).get(name)
            if kept is not None and kept is not self._weighed.get((owner, name)):  # else it is that of the pass before
                self._weighed[owner, name] = vars(owner)[name] = weighed(kept, scale=scale, phases=self.phases)
        return weighed(output, scale=scale, phases=self.phases)

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
        trained = [parameter for parameter in self._sums.parameters if parameter.grad is not None]
        tiled = {id(parameter) for parameter in self.tiled_parameters()}
        grads = [parameter.grad for parameter in trained if parameter.grad is not None]
        norms = self.norms.of(grads, norm_type, tiled=[id(parameter) in tiled for parameter in trained])
        norm = torch.linalg.vector_norm(norms, norm_type).item() if trained else 0.0
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

    def global_loss(self, loss: torch.Tensor) -> float:
        """The loss over the global batch, in a loop of your own, where `loss` is over this rank's samples. Collective.

        What schedules and early stopping look at: the loss of a rank's own samples is another one on every rank.

        Args:
            loss: of shape (), over this rank's samples of the last batch; after its backward pass.

        Returns:
            The mean, or the sum, over all samples; the same on all ranks.

        Raises:
            InputError: on all ranks: the loss has a term of weights that are not whole here; or the model does not know its
                reduction.
        """
        if self._reduction is None:
            raise InputError("say what the loss does with the samples: tatami.tile(..., reduction='mean'), or 'sum'")
        self.beside.refuse("global_loss", is_sum=self._reduction == "sum")
        samples, here = self._rank.samples, self._rank.mine.size
        share = 1.0 if self._reduction == "sum" else here / samples if samples else 0.0
        total = torch.zeros(1, dtype=torch.float64, device="cpu")
        if here and self._rank.speaks:
            total += loss.item() * share
        if self.comm.size > 1:
            with self.phases.during(IterationPhase.HORIZONTAL):
                self.comm.allreduce(total)
        return total.item()

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """This rank's part of the weights, as `state_dict` gives it.

        Raises:
            ModelError: these are the weights of the plain network.
        """
        if strict and state_dict and not any(name.startswith("module.") for name in state_dict):
            raise ModelError(
                "these are whole weights, and a rank holds its tile: tatami.tiled.load_whole_state_dict(model, weights) takes "
                "them, and tatami.tiled.whole_state_dict(model) gives them"
            )
        return super().load_state_dict(state_dict, strict=strict, assign=assign)

    def describe(self) -> Description:
        """What is tiled by what, what is repeated on every rank of a column, and what could not be followed: print it."""
        return self._description

    def close(self) -> None:
        """Give the model's communicators back; the weights stay. Collective. Passes that need other ranks raise `ClosedError`.

        For programs that make models again and again: MPI has some two thousand communicators, of which a model has two.
        """
        if self._column.comm is not None:
            self._column.comm.close()
        self.comm.close()

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Called by `copy.deepcopy`, `pickle` and `torch.save`."""
        raise ModelError(
            "a tiled model holds its ranks' communicator and a part of the weights, and cannot be copied or pickled. "
            "tatami.tiled.save_model writes the whole weights; tatami.tiled.whole_state_dict gathers them"
        )

    # -- where this rank lies -----------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        """The processor that this rank runs on."""
        return self.names[self.comm.rank]

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
        hosts = dict(zip(self.names, self.comm.hosts, strict=True))
        rates = transfer_rates(self.cluster)
        planned = self.layout.cut_blocks(self.workload) or self.tilings
        found = traffic_of(planned, workload=self.workload, names=self.names, hosts=hosts, rates=rates)
        if len(self.tilings) == len(planned):
            return found
        # A block of the workload is several of the network, such as experts, whose gradients travel each by its own tiling.
        gradients = gradient_sums(
            self.tilings,
            unit_elements=[sum(rows.per_unit for rows in block if rows.tensor.requires_grad) for block in self.block_rows()],
            riders=riding_elements(self.workload, columns=len(self.tiling.columns)),
            element_bytes=self.workload.element_bytes,
            wire=self.workload.wire,
            names=self.names,
            hosts=hosts,
            rates=rates,
        )
        return replace(found, gradients=gradients)

    @property
    def tile(self) -> Tile | None:
        """This rank's `Tile` of `tiling`; None where it was left out."""
        return self.tiling.by_processor.get(self.name)

    @property
    def speaks_for_column(self) -> bool:
        """Whether this rank is the first of its column: sums over samples count each column once."""
        return self._rank.speaks

    @property
    def local_span_size(self) -> tuple[int, int]:
        """How many samples of the last batch are this rank's, and how many the batch has."""
        return self._rank.mine.size, self._rank.samples

    @property
    def local_work(self) -> float:
        """`Workload.tile_work` of what this rank computes of the last batch: samples x units where there is one pair."""
        if self.tile is None:
            return 0.0
        units: list[int] = []
        for block, tiling in zip(self.found.blocks, self.tilings, strict=False):
            size = tiling.by_processor[self.name].units.size
            if block.begins:
                units.append(size)
            else:
                units[-1] += size
        return self.workload.tile_work(units, samples=self._rank.mine.size)

    def block_rows(self) -> list[list[Rows]]:
        """For each block, the tensors of this rank that hold its units: parameters, and buffers such as running statistics."""
        return self._rows

    def tiled_parameters(self) -> list[nn.Parameter]:
        """The parameters of which this rank holds some units."""
        return [rows.tensor for block in self.block_rows() for rows in block if isinstance(rows.tensor, nn.Parameter)]

    def plain_parameters(self) -> list[nn.Parameter]:
        """Those of the network that was given, as far as they still live: this model has copies of them."""
        return [parameter for each in self._plain if (parameter := each()) is not None]

    @property
    def beside(self) -> WeightsBeside:
        """What the loss reads of the weights beside the forward pass."""
        return self._sums.beside

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _adopt(self, placement: Placement) -> None:
        """Lie like this from now on. For `tatami.tiled.move`, which calls it when the rows have come; sends nothing."""
        self.layout = placement.layout
        self.tilings = placement.tilings
        self._shares.clear()
        self._announce(0, Span(0, 0), ())
        self._rank.stands_in = False
        tile = self.tile
        self._rank.index = tile.column if tile is not None else None
        self._rank.speaks = tile is not None and self.tiling.columns[tile.column][0].processor == self.name
        self._column.meet(placement.column)
        self._placement = placement

    def _regroup(self, *, cluster: Cluster) -> None:
        """The ranks of the communicator are others now, on these processors. For `tatami.tiled.relaying`; sends nothing."""
        self.cluster = cluster
        self.names = tuple(processor.name for processor in cluster.processors)
        self._watch = BatchWatch(self.comm, columns=self._columns)

    def _place(self, layout: Layout) -> Placement:
        """See `place`; the model stays as it is. Collective."""
        return place(layout, self.comm, cluster=self.cluster, workload=self.workload, blocks=self.found.blocks)

    def _columns(self) -> list[list[int]]:
        """The ranks of each column."""
        return [[self.names.index(tile.processor) for tile in column] for column in self.tiling.columns]

    def _announce(self, samples: int, mine: Span, widths: tuple[int, ...]) -> None:
        self._rank.samples, self._rank.mine, self._rank.widths = samples, mine, widths

    def _tile(self, whole: nn.Module) -> None:
        """Cut the tensors of the blocks, and put what runs with them in place of what the plain model has."""
        for index, block in enumerate(self.found.blocks):
            cut_units_of(whole, block.cuts, self._units(index)[0])
        for index, names in enumerate(self.found.pairs):
            first, second = whole.get_submodule(names.first), whole.get_submodule(names.second)
            assert isinstance(first, nn.Linear)
            assert isinstance(second, nn.Linear)
            _replace(whole, names.first, TiledFirst(first, column=self._column))
            _replace(whole, names.second, TiledSecond(second, column=self._column))
            units = UnitFactor(block=0, total=self.tilings[index].units, runs=ONE_EACH.runs)
            context = self._context([index])
            for name in names.dropouts:
                layer = whole.get_submodule(name)
                assert isinstance(layer, nn.Dropout)
                _replace(whole, name, WholeDropout(layer.p, context=context, units=units))
        for name, followed in self.found.followed.items():
            module, blocks = whole.get_submodule(name), self.found.of_followed(name)
            units_here = tuple(functools.partial(self._units, index) for index in blocks)
            # An attribute of the instance is found before the class's method; the module keeps its names, hooks and parameters.
            module.__dict__["forward"] = LocalForward(
                module,
                name=name,
                followed=followed,
                context=self._context(blocks),
                units=units_here,
                plainly=self.found.runs_plainly(whole, name),
                device=self._device,
            )
        for number, part in enumerate(self.found.parts):
            part.install(whole, self._context(self.found.of_part(number)))
        context = self._context(())
        # A layer may be there under several names.
        for name, layer in list(whole.named_modules(remove_duplicate=False)):
            if isinstance(layer, nn.Dropout):
                axis = None if self.found.captured is None else self.found.captured.samples_axis(name)
                _replace(whole, name, WholeDropout(layer.p, context=context, samples_axis=axis or 0))
            elif isinstance(layer, BATCH_NORMS) and (self.comm.size > 1 or self.comm.changes):
                _replace(whole, name, WholeBatchNorm(layer, context=context))

    def _context(self, blocks: Iterable[int]) -> ModuleContext:
        return ModuleContext(rank=self._rank, units=tuple(functools.partial(self._span, index) for index in blocks))

    def _span(self, block: int) -> Span:
        return self._units(block)[0]

    def _units(self, block: int) -> tuple[Span, int]:
        """The units of a block that are here, and how many it has."""
        tiling = self.tilings[block]
        return units_of(tiling, self.name), tiling.units

    def _widths_of(self, samples: int) -> tuple[int, ...]:
        """The samples of every column."""
        if samples == self.tiling.samples:
            return tuple(column[0].samples.size for column in self.tiling.columns)
        return self.layout.sample_sizes(samples)

    def _check_batch(self, given: int | None) -> None:
        """Whether input of so many samples is what `local` gave. Without gradients, any that the column shares will do."""
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
                f"{self.comm.rank}'s. Pass what model.local(...) returned for the global batch"
            )

    def _run(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> Any:
        """The network's own forward pass, over one sample where this rank has none and the network cannot run without."""
        if not self._rank.stands_in:
            return self.module(*inputs, **named_inputs)
        inputs, named_inputs = with_stand_in((inputs, dict(named_inputs)))
        captured = self.found.captured
        return without_stand_in(self.module(*inputs, **named_inputs), None if captured is None else captured.result_axes)

    def _drawing(self) -> AbstractContextManager[Any]:
        """The ranks of a column draw alike."""
        is_training = self.training and torch.is_grad_enabled()
        if self.draws is None and is_training and self._is_unseen:
            self._is_unseen = False
            return RefusingDraws()  # type: ignore[no-untyped-call]
        if self.draws is None or self._is_alone:
            return _ANY_STATE
        column = self._rank.index or 0
        return self.draws.next_pass(column=column) if is_training else self.draws.evaluation(column=column)


def _keepers(module: nn.Module, found: Blocks) -> list[tuple[nn.Module, str]]:
    """Modules that keep what a loss may be made of as well, and its names there."""
    names = () if found.captured is None else found.captured.leaves_behind.with_gradient
    return [(module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]) for name in names]


def _samples_given(inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> int | None:
    """The length of the first tensor; None where there is none with an axis. Torch's look into structures takes its time."""
    for value in (*inputs, *named_inputs.values()):
        if not isinstance(value, (torch.Tensor, *PLAIN_VALUES)):
            break
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    tensors = (value for value in pytree.tree_leaves((inputs, dict(named_inputs))) if isinstance(value, torch.Tensor))
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)


def _rows(root: nn.Module, cuts: Mapping[str, UnitRuns]) -> list[Rows]:
    """Each tensor once, whatever names it has."""
    tensors = {
        id(tensor): Rows(tensor, runs) for tensor, runs in ((tensor_of(root, name), runs) for name, runs in cuts.items())
    }
    return list(tensors.values())
