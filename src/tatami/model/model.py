"""The model that `tatami.tile` returns: an ordinary module on every rank, each with its own rectangle of the work."""

from __future__ import annotations

import functools
import math
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from itertools import compress
from typing import Any, Never

import torch
from torch import nn

from tatami.batch import cut_batch, on_device, samples_of, tensors_of
from tatami.checkpoints.parts import KEY, PartOfWeights, check_units, units_tensor
from tatami.comm.agreement import announce, called_by_all
from tatami.comm.stall_report import format_ranks
from tatami.errors import CommTimeoutError, InputError, ModelError, TatamiError, TrainingError
from tatami.gradients.engine import notice_backward
from tatami.gradients.passes import ForwardPass, over_batch, refuse_compiling, refuse_transforms
from tatami.model.describing import Description
from tatami.model.describing_stages import describe_stages
from tatami.model.loss_check import check_loss
from tatami.model.micro_batches import joined, refuse_changed, samples_given, versions_of
from tatami.model.model_stage import refuse_foreign_inputs, refuse_stages
from tatami.model.plain_network import plain_network, whole_weights
from tatami.model.seated_model import SeatedModel
from tatami.partition.exactness import BATCH_NORMS, RefusingDraws, refuse_other_reduction
from tatami.partition.tracing.restore_state import copy_of
from tatami.runtime.allocator import trim
from tatami.runtime.empty_batch import with_stand_in, without_stand_in
from tatami.runtime.kept_pass import kept_pass
from tatami.runtime.losses import LossReduction, check_reduction, check_targets_count
from tatami.runtime.phases import IterationPhase
from tatami.runtime.recomputing import Restore, recomputable
from tatami.stages.stand_in import StandIn
from tatami.tiling import Span, spans

_ANY_STATE = nullcontext()


class TiledModel(SeatedModel):
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

    def __reduce_ex__(self, protocol: Any) -> Never:
        """Called by `copy.deepcopy`, `pickle` and `torch.save`."""
        raise ModelError(
            "a tiled model holds its ranks' communicator and a part of the weights, and cannot be copied or pickled. "
            "tatami.train.save_model writes the whole weights, tatami.train.whole_state_dict gathers them, and "
            "tatami.train.WeightAverage, in place of AveragedModel, is their moving average"
        )

    # -- inside -----------------------------------------------------------------------------------------------------------

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
