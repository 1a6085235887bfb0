"""The model that `tatami.tile` returns: an ordinary module on every rank, each with its own rectangle of the work."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Never

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError, TrainingError
from tatami.tiled.batch import cut_batch, samples_of, tensors_of
from tatami.tiled.blocks import Blocks, workload_of
from tatami.tiled.compiling import refuse_compiling
from tatami.tiled.context import ModuleContext, RankContext
from tatami.tiled.cutting import cut_units_of, tensor_of
from tatami.tiled.departing import Bucket, Departures
from tatami.tiled.describing import Description, describe
from tatami.tiled.exactness import BATCH_NORMS
from tatami.tiled.following.running import LocalForward
from tatami.tiled.horizontal import HorizontalSum
from tatami.tiled.local_draws import LocalDraws
from tatami.tiled.losses import LossReduction, check_reduction
from tatami.tiled.norms import WholeNorms
from tatami.tiled.optimizers import watch_optimizers
from tatami.tiled.pair import TiledFirst, TiledSecond
from tatami.tiled.phases import IterationPhase, Phases
from tatami.tiled.placement import Placement, largest, place
from tatami.tiled.registry import register
from tatami.tiled.rows import ONE_EACH, Rows, UnitRuns
from tatami.tiled.same_batch import BatchWatch, different_sizes
from tatami.tiled.scaling import watch_scalers
from tatami.tiled.torch_norms import watch_norms
from tatami.tiled.vertical import ColumnComm
from tatami.tiled.whole_batch import UnitFactor
from tatami.tiled.whole_layers import WholeBatchNorm, WholeDropout
from tatami.tiling import Layout, Span, Tile, Tiling, Traffic, spans, traffic_of
from tatami.tiling.traffic import departures, gradient_sums, riding_elements, size_digits
from tatami.workload import Workload

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
        cluster: what the ranks run on.
        speeds_known: whether the speeds in `cluster` were measured or given, not assumed.
        names: the processor of every rank.
        layout: who lies where, in fractions.
        tilings: the layout, cut for each block; one in all where the network has none.
        phases: where the time goes.
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
    ) -> None:
        super().__init__()
        self.comm = comm
        self.cluster = cluster
        self.speeds_known = speeds_known
        self.names = tuple(processor.name for processor in cluster.processors)
        self._reduction = reduction
        self.phases = phases
        self.generator = generator
        self.draws = draws
        self.found: Blocks = found
        work = workload_of(module, found, samples=batch_size, wire=wire)
        # Blocks of which each unit has tensors of its own are several here and one there; all of them leave at the end.
        alike = len(found.blocks) == len(work.blocks)
        self.workload: Workload = replace(work, bucket_bytes=bucket_bytes if alike else None)
        self._description = describe(module, found, workload=self.workload)
        self._column = ColumnComm(phases, wire=wire)
        several = comm.size > 1 or comm.changes
        self._rank: RankContext = RankContext(column=self._column, comm=comm if several else None, generator=generator)
        self._widths: dict[int, tuple[int, ...]] = {}
        self._watch = BatchWatch(comm, columns=self._columns)
        self._adopt(self._place(layout))
        self._tile(module)
        self.module = module
        rows = [_rows(module, block.cuts) for block in found.blocks]
        self._rows = rows or [[]]
        self._slots = [
            (owner, name, parameter)
            for owner in self.module.modules()
            for name, parameter in owner._parameters.items()
            if parameter is not None
        ]
        self._unique = list(self.module.parameters())
        self._buckets = tuple(map(self._bucket, departures(self.workload)[:-1]))
        self._departing: Departures | None = None
        self._passes = 0
        for number, bucket in enumerate(self._buckets):
            for caller in bucket.callers:
                caller.register_forward_pre_hook(functools.partial(self._enter_bucket, number))
        self.norms = WholeNorms(comm, holders=lambda: self._columns()[0], phases=phases)
        register(self)
        watch_optimizers()
        if several:
            watch_norms()
            watch_scalers()
            for owner in {owner for owner, _, _ in self._slots}:
                owner.register_forward_pre_hook(_refuse_leaves)

    # -- the ordinary use -------------------------------------------------------------------------------------------

    def local(self, *batch: Any) -> Any:
        """This rank's samples of a global batch: one part for one, a tuple for several.

        Announces the batch: the next forward pass is over it. So take one batch at a time, and take it again after a re-tiling.
        The forward pass cannot tell from its input alone that these are samples 8 to 19 of 40, which the weight of the mean
        and random layers depend on; a batch object in the place of tensors would tell it, but `loss(model(x), y)` would no
        longer be the loop that it is everywhere else. Input of another size than what was announced is refused.

        Args:
            batch: tensors (samples, ...), or tuples, lists and dicts of them; all ranks must pass the same global batch.

        Returns:
            Views (samples_here, ...), in the same structure.

        Raises:
            InputError: tensors of different numbers of samples, or what cannot be cut into samples.
        """
        return self.take(batch[0] if len(batch) == 1 else batch)

    def take(self, batch: Any, *, everywhere: bool = False) -> Any:
        """As `local`, of one batch.

        Args:
            batch: a tensor (samples, ...), or a tuple, list or dict of them.
            everywhere: when the ranks compare their batches, compare those of all ranks, not only those of one column: what
                every rank has loaded whole must be the same.
        """
        tensors = tensors_of(batch)
        samples = samples_of(batch)
        span = self.local_span(samples)
        if self.comm.size > 1:
            self._watch.announce(samples, tensors, everywhere=everywhere)
        return cut_batch(batch, span, samples=samples)

    def local_span(self, samples: int) -> Span:
        """Which samples of a global batch of `samples` are this rank's; announces that the next forward pass is over them."""
        widths = self._widths.get(samples)
        if widths is None:
            widths = self._widths[samples] = self._widths_of(samples)
        index = self._rank.index
        self._announce(samples, Span(0, 0) if index is None else spans(widths)[index], widths)
        if self.comm.size > 1:
            self._watch.announce(samples, ())
        return self._rank.mine

    def forward(self, *inputs: Any, **named_inputs: Any) -> Any:
        """The network on this rank's samples: (samples_here, ...) to (samples_here, ...), in tensors, tuples, lists or dicts.

        Raises:
            InputError: the input has another number of samples than `local` gave this rank; or, now and then and on all ranks,
                the ranks were given different batches.
            ModelError: the network returns objects in which its tensors cannot be found.
        """
        if self.comm.size > 1:
            refuse_compiling()
        self._check_batch(inputs, named_inputs)
        if not torch.is_grad_enabled():
            return self.module(*inputs, **named_inputs)
        if self.comm.size > 1:
            if self._watch.is_due:
                with self.phases.during(IterationPhase.HORIZONTAL):
                    self._watch.compare()
            self._watch.end_pass()
        self.phases.enter(IterationPhase.FORWARD)
        alone = self.comm.size == 1 and not self.comm.changes
        if alone:
            output = self.module(*inputs, **named_inputs)
        elif self.draws is not None and self.training:
            with self.draws.next_pass(column=self._rank.index or 0):
                output = self._forward_with_sums(inputs, named_inputs)
        else:
            output = self._forward_with_sums(inputs, named_inputs)
        if alone and self._reduction is not None:
            return output
        samples, mine = self._rank.samples, self._rank.mine
        scale = mine.size / samples if self._reduction == "mean" else {"sum": 1.0}.get(self._reduction or "")
        leaves, structure = pytree.tree_flatten(output)
        places = []
        for i, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor):
                if leaf.requires_grad:
                    places.append(i)
            elif not isinstance(leaf, _PLAIN_VALUES):
                raise ModelError(
                    f"the network returns a {type(leaf).__name__}, whose tensors could not be weighed by this rank's samples. "
                    "Return tensors, or tuples, lists or dicts of them (or register the class with torch's pytree)"
                )
        if places:
            marked = _BackwardBegins.apply(self.phases, scale, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
            for i, tensor in zip(places, marked, strict=True):
                leaves[i] = tensor
        return pytree.tree_unflatten(leaves, structure)

    @property
    def reduction(self) -> LossReduction | None:
        """What the loss does with the samples; to be set before a forward pass. The Trainer reads it from its loss."""
        return self._reduction

    @reduction.setter
    def reduction(self, reduction: LossReduction) -> None:
        check_reduction(reduction)
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
        trained = [parameter for parameter in self._unique if parameter.grad is not None]
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
    def tiling(self) -> Tiling:
        """The tiling of the pair that has most units."""
        return largest(self.tilings)

    @property
    def traffic(self) -> Traffic:
        """What an iteration over a batch of the planned size sends, message by message, as simulator and cost model have it."""
        hosts = dict(zip(self.names, self.comm.hosts, strict=True))
        planned = self.layout.cut_blocks(self.workload) or self.tilings
        found = traffic_of(planned, workload=self.workload, names=self.names, hosts=hosts)
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
        )
        return replace(found, gradients=gradients)

    @property
    def tile(self) -> Tile | None:
        """This rank's `Tile` of `tiling`; None where it was left out."""
        return self.tiling.by_processor.get(self.name)

    @property
    def speaks_for_column(self) -> bool:
        """Whether this rank is the first of its column: sums over samples count each column once."""
        return self.tile is not None and self.tiling.columns[self.tile.column][0].processor == self.name

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

    # -- inside -----------------------------------------------------------------------------------------------------------

    def _adopt(self, placement: Placement) -> None:
        """Lie like this from now on. For `tatami.tiled.move`, which calls it when the rows have come; sends nothing."""
        self.layout = placement.layout
        self.tilings = placement.tilings
        self._widths.clear()
        self._announce(0, Span(0, 0), ())
        self._rank.index = self.tile.column if self.tile is not None else None
        self._rank.speaks = self.speaks_for_column
        self._column.meet(placement.column)
        self._exchange = placement.exchange
        self._leaving = placement.leaving

    def _regroup(self, *, cluster: Cluster) -> None:
        """The ranks of the communicator are others now, on these processors. For `tatami.tiled.relaying`; sends nothing."""
        self.cluster = cluster
        self.names = tuple(processor.name for processor in cluster.processors)
        self._watch = BatchWatch(self.comm, columns=self._columns)

    def _place(self, layout: Layout) -> Placement:
        """See `place`; the model stays as it is. Collective."""
        return place(layout, self.comm, names=self.names, workload=self.workload, blocks=self.found.blocks)

    def _columns(self) -> list[list[int]]:
        """The ranks of each column."""
        return [[self.names.index(tile.processor) for tile in column] for column in self.tiling.columns]

    def _announce(self, samples: int, mine: Span, widths: tuple[int, ...]) -> None:
        self._rank.samples, self._rank.mine, self._rank.widths = samples, mine, widths

    def _tile(self, whole: nn.Module) -> None:
        """Cut the tensors of the blocks, and put what runs with them in the place of what the plain model has."""
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
            )
        for number, part in enumerate(self.found.parts):
            part.install(whole, self._context(self.found.of_part(number)))
        context = self._context(())
        # A layer may be there under several names.
        for name, layer in list(whole.named_modules(remove_duplicate=False)):
            if isinstance(layer, nn.Dropout):
                _replace(whole, name, WholeDropout(layer.p, context=context))
            elif isinstance(layer, BATCH_NORMS) and (self.comm.size > 1 or self.comm.changes):
                _replace(whole, name, WholeBatchNorm(layer, context=context))

    def _context(self, blocks: Iterable[int]) -> ModuleContext:
        return ModuleContext(rank=self._rank, units=tuple(functools.partial(self._span, index) for index in blocks))

    def _span(self, block: int) -> Span:
        return self._units(block)[0]

    def _units(self, block: int) -> tuple[Span, int]:
        """The units of a block that are here, and how many it has."""
        tiling = self.tilings[block]
        tile = tiling.by_processor.get(self.name)
        return Span(0, 0) if tile is None else tile.units, tiling.units

    def _widths_of(self, samples: int) -> tuple[int, ...]:
        """The samples of every column."""
        if samples == self.tiling.samples:
            return tuple(column[0].samples.size for column in self.tiling.columns)
        return self.layout.sample_sizes(samples)

    def _check_batch(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> None:
        """Whether the input is what `local` gave this rank. Without gradients, any samples that the column shares will do."""
        tensors = (value for value in pytree.tree_leaves((inputs, named_inputs)) if isinstance(value, torch.Tensor))
        given = next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)
        if self.comm.size == 1:
            if given is not None:
                self._announce(given, Span(0, given), (given,))
            return
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

    def _forward_with_sums(self, inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> Any:
        """The forward pass over stand-ins of the parameters, whose gradients are summed over the columns on their way back."""
        # A layer reads its parameters as `self.weight`. Were those the parameters themselves, autograd would add this rank's
        # part of each gradient straight to its `.grad`: one by one, where one message to each neighbour is to carry all of
        # them, and on top of earlier backward passes, from whose sums over the columns it could no longer be told apart. So
        # for the length of this call a layer finds a view of its parameter under that name. All views are made by one
        # `HorizontalSum`; autograd leads their gradients back through it, where they meet, are added up over the columns, and
        # go on to the parameters. When the call ends, also by an error, the layers have their parameters again: no optimizer
        # or state dict sees a view.
        trained = tuple(parameter for parameter in self._unique if parameter.requires_grad)
        if not trained:
            return self.module(*inputs, **named_inputs)
        departing = self._departures(trained)
        exchange = functools.partial(self._sum_gradients, trained, self.tilings, self._rank.samples, departing)
        stand_ins = HorizontalSum.apply(exchange, *trained)  # type: ignore[no-untyped-call]
        by_parameter = {id(p): s for p, s in zip(trained, stand_ins, strict=True)}
        if departing is not None:
            departing.stand_ins = by_parameter
        for owner, name, parameter in self._slots:
            # nn.Module refuses a plain tensor as a parameter by setattr; torch.func.functional_call takes this way as well.
            owner._parameters[name] = by_parameter.get(id(parameter), parameter)
        self._departing = departing
        try:
            return self.module(*inputs, **named_inputs)
        finally:
            self._departing = None
            for owner, name, parameter in self._slots:
                owner._parameters[name] = parameter

    def _bucket(self, blocks: Sequence[int]) -> Bucket:
        """The blocks of a network whose gradients leave together."""
        rows = tuple(
            tuple(each for each in own if isinstance(each.tensor, nn.Parameter)) if number in blocks else ()
            for number, own in enumerate(self._rows)
        )
        parameters = {id(each.tensor) for own in rows for each in own}
        slots = tuple(slot for slot in self._slots if id(slot[2]) in parameters)
        # A module that is followed, or runs as a part, may read the parameters of modules inside of it without calling them.
        whole = {self.found.blocks[number].facts.name for number in blocks if number >= len(self.found.pairs)}
        callers = {owner for owner, _, _ in slots} | {self.module.get_submodule(name) for name in whole}
        return Bucket(rows=rows, slots=slots, callers=frozenset(callers))

    def _departures(self, trained: Sequence[nn.Parameter]) -> Departures | None:
        """Of a forward pass that begins; None where all gradients leave at the end."""
        if not self._leaving:
            return None
        self._passes += 1
        return Departures(
            self._buckets,
            self._leaving,
            trained={id(parameter) for parameter in trained},
            number=self._passes,
            phases=self.phases,
            holds=functools.partial(self._lies_like, self.tilings),
        )

    def _enter_bucket(self, number: int, owner: nn.Module, inputs: Any) -> None:  # noqa: ARG002 -- a forward pre-hook
        if self._departing is not None:
            self._departing.enter(number)

    def _lies_like(self, tilings: tuple[Tiling, ...]) -> bool:
        return tilings is self.tilings

    def _sum_gradients(
        self,
        trained: Sequence[nn.Parameter],
        tilings: tuple[Tiling, ...],
        samples: int,
        departing: Departures | None,
        grads: tuple[torch.Tensor | None, ...],
    ) -> tuple[torch.Tensor | None, ...]:
        """Called by autograd when every parameter's gradient from this rank's samples is there; None for those without part."""
        if tilings is not self.tilings:
            raise ModelError(
                "the model was re-tiled between this forward pass and its backward pass; re-tile between two steps"
            )
        self.phases.enter(IterationPhase.HORIZONTAL)
        if self._exchange is not None:
            self._refuse_sparse(trained, grads)
            left = frozenset() if departing is None else departing.trained
            by_parameter = {
                id(p): torch.zeros_like(p) if grad is None else grad.contiguous()
                for p, grad in zip(trained, grads, strict=True)
                if id(p) not in left
            }
            # A parameter without part in the loss has no gradient, which to an optimizer is not the same as one of 0. Where
            # the forward pass depends on the samples, it has part if it had on any rank.
            # Behind them, the number of samples of every column's batch, which each column fills in for itself, in digits.
            mine = size_digits(samples, wire=self.workload.wire)
            digits = [[0] * len(mine) for _ in self.tiling.columns]
            if self.tile is not None:
                digits[self.tile.column] = mine
            told = torch.tensor([*(float(grad is not None) for grad in grads), *(float(d) for own in digits for d in own)])
            tiled = set()
            pairs = []
            for rows_of_block in self.block_rows():
                tiled |= {id(rows.tensor) for rows in rows_of_block}
                pairs.append(
                    [
                        Rows(by_parameter[id(rows.tensor)], rows.runs)
                        for rows in rows_of_block
                        if id(rows.tensor) in by_parameter
                    ]
                )
            replicated = {key: grad for key, grad in by_parameter.items() if key not in tiled}
            begun = self._exchange.begin(pairs, [*replicated.values(), told])
            arrived: dict[int, torch.Tensor] = {}
            late: list[int] = []
            if departing is not None:
                arrived, late = departing.arrive({id(p): grad for p, grad in zip(trained, grads, strict=True)})
            *sums, told = self._exchange.finish(begun)
            self._refuse_late(late)
            numbers = told.tolist()
            used, rest = numbers[: len(grads)], numbers[len(grads) :]
            sizes = [sum(d * 256**i for i, d in enumerate(rest[at : at + len(mine)])) for at in range(0, len(rest), len(mine))]
            if len(set(sizes)) > 1:
                raise different_sizes(sizes, columns=self._columns())
            by_parameter |= {**dict(zip(replicated, sums, strict=True)), **arrived}
            grads = tuple(by_parameter[id(p)] if part else None for p, part in zip(trained, used, strict=True))
        self.phases.enter(IterationPhase.UPDATE)
        return grads

    def _refuse_late(self, late: Sequence[int]) -> None:
        name = next((name for name, own in self.module.named_parameters() if id(own) in late), None)
        if name is not None:
            raise ModelError(
                f"{name} is read before its module is called, so its gradient cannot leave when the backward pass is done with "
                "that module. Give tatami.tile bucket_bytes=None"
            )

    def _refuse_sparse(self, trained: Sequence[nn.Parameter], grads: Sequence[torch.Tensor | None]) -> None:
        for parameter, grad in zip(trained, grads, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                name = next(name for name, own in self.module.named_parameters() if own is parameter)
                raise ModelError(f"the gradient of {name} is sparse, and is not summed over ranks. Set sparse=False")


class _BackwardBegins(torch.autograd.Function):
    """Hands outputs on; when their gradients come, starts the clock of compute 2 and weighs them by this rank's samples.

    The mean over the local samples, weighted by local / global and summed over the columns, is the mean over the global batch.
    """

    # With a `setup_context`, torch would look up the signature of `forward` in every call: some 0.1 ms of a core.
    @staticmethod
    def forward(ctx: Any, phases: Phases, scale: float | None, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.phases, ctx.scale = phases, scale
        ctx.set_materialize_grads(False)
        # Views would forbid what plain outputs allow: to be changed in place.
        return tuple(tensor.detach() for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if ctx.scale is None:
            raise InputError(
                "this model does not know whether the loss takes the mean or the sum over the samples of a batch, on which its "
                "gradient depends. Give tatami.tile reduction='mean' or reduction='sum'; torch's losses take the mean unless "
                "they are told otherwise"
            )
        ctx.phases.enter(IterationPhase.BACKWARD)
        return None, None, *(grad if grad is None or ctx.scale == 1.0 else grad * ctx.scale for grad in grads)


def _refuse_leaves(owner: nn.Module, inputs: Any) -> None:  # noqa: ARG001 -- a forward pre-hook
    """Inside of the forward pass the parameters are stand-ins; a gradient that goes straight to a leaf would miss its sums."""
    if torch.is_grad_enabled() and any(p is not None and p.requires_grad and p.is_leaf for p in owner._parameters.values()):
        raise ModelError(
            f"a {type(owner).__name__} was called outside of its TiledModel's forward pass, where its gradient would not be "
            "summed over the ranks. Call the model that tatami.tile returned; torch.utils.checkpoint recomputes layers outside "
            "too and cannot be used here"
        )


def _replace(root: nn.Module, name: str, module: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(root.get_submodule(parent), child, module)


def _rows(root: nn.Module, cuts: Mapping[str, UnitRuns]) -> list[Rows]:
    """Each tensor once, whatever names it has."""
    tensors = {
        id(tensor): Rows(tensor, runs) for tensor, runs in ((tensor_of(root, name), runs) for name, runs in cuts.items())
    }
    return list(tensors.values())
