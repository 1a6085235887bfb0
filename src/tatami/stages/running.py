"""Running one stage: the network's own forward pass, in which only this stage's operations compute.

Every rank runs the forward pass of the whole network as its author wrote it, Python and all. Operations of this rank's stage
compute. Operations of other stages return stand-ins (`tatami.stages.stand_in`): shapes without values. Where the recorded
program says that a value crosses, the stage that made it sends it, and the stage that reads it receives it in place of the
stand-in. Modules whose operations all belong to another stage are not entered at all: what they return is looked up.

Backward needs no code of its own. What a stage has sent is, from there on, a stand-in whose gradient function waits for the
gradient from the stage that reads the value (`SentParcel`); what it has received has one that sends its gradient back
(`ReceivedParcel`). All stand-ins that follow lead back to these, so that `loss.backward()` on a stage that has no loss does
what its part of the backward pass is. An operation of this stage that would read a stand-in raises: nothing can be wrong
silently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import nn
from torch.autograd import Variable
from torch.nn.modules.dropout import _DropoutNd
from torch.overrides import TorchFunctionMode, _pop_mode_temporarily
from torch.utils import _pytree as pytree

from tatami.errors import InputError, ModelError
from tatami.gradients.parameter_hooks import copy_hooks
from tatami.gradients.passes import leads_to
from tatami.random_state import torch_state
from tatami.stages.autograd_functions import watch_functions
from tatami.stages.channel import AbstractChannel, Parcel
from tatami.stages.handing_over import HandOver, ReceivedParcel, SentParcel, TakeOver, refuse_no_values
from tatami.stages.late_weights import Accumulated, LateWeights, LeftProducts
from tatami.stages.program import ForwardCall, ForwardForm, ForwardOperation, Handover, Reach, Staging
from tatami.stages.recording import call_operation, operation_name, tensors_in
from tatami.stages.stand_in import StandIn, following, form_of, has_stand_in, stand_in_of, without_values

_KEPT = 4096
"""So many results of operations of other stages are kept."""
NO_STAGE = -1
"""The stage of a rank that computes none."""


class StagePart:
    """What one stage has to do with a program.

    Attributes:
        staging: the program, cut.
        sends, takes: the values that it sends and receives, by their numbers.
        called: the modules that are run or left out as a whole.
        elsewhere: those of them all of whose calls belong to other stages.
        skipped: what operations of other stages return, by their number and the form of what they are given: stand-ins.
    """

    def __init__(self, staging: Staging, stage: int) -> None:
        self.staging = staging
        self.sends: dict[int, list[Handover]] = {}
        self.takes: dict[int, Handover] = {}
        for each in staging.handovers:
            if each.source == stage:
                self.sends.setdefault(each.value, []).append(each)
            elif each.target == stage:
                self.takes[each.value] = each
        self.called = {call.module for call, _ in staging.blocks.values()}
        self.elsewhere = self.called - {call.module for call, own in staging.blocks.values() if own in (None, stage)}
        self.skipped: dict[Any, Any] = {}


class StageRunner:
    """Runs the operations of one stage of a network.

    Args:
        module: the network; parameters of other stages may be stand-ins (`release`).
        staging: its program, cut.
        stage: which stage this rank computes; None where it has none, and every result is a stand-in.
        channel: to the ranks of the other stages.
        generator: from which random layers draw. What layers of other stages draw is drawn here as well and thrown away, so
            that the next layer draws what it would on one machine.
        on_backward: called with the number of a micro-batch when its backward pass begins here.
        evaluation: the program of evaluation, cut; None where it is that of training; an error where it cannot be cut so.
        accumulated: where gradients of earlier micro-batches are (`tatami.stages.late_weights`).
        left: takes products of weights for later; to be computed when the last backward pass is done. None: nothing is left.
        are_late: whether gradients of weights may come after that of the stage's input.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        staging: Staging,
        stage: int | None,
        channel: AbstractChannel,
        generator: torch.Generator | None = None,
        on_backward: Callable[[int], None] | None = None,
        accumulated: Accumulated = lambda _: None,
        evaluation: Staging | ModelError | None = None,
        left: LeftProducts | None = None,
        are_late: bool = True,
    ) -> None:
        watch_functions()
        self.on_backward, self.accumulated, self.left = on_backward, accumulated, left or LeftProducts()
        self.module, self.channel, self.generator = module, channel, generator
        self.stage = NO_STAGE if stage is None else stage
        self.training = StagePart(staging, self.stage)
        self.evaluation: StagePart | ModelError = self.training
        if evaluation is not None:
            self.evaluation = StagePart(evaluation, self.stage) if isinstance(evaluation, Staging) else evaluation
        parts = [each for each in (self.training, self.evaluation) if isinstance(each, StagePart)]
        called = set().union(*(each.called for each in parts))
        self.current: _Pass | None = None
        self.repeated: _Pass | None = None
        """The pass of which torch computes a part once more, in the backward pass."""
        self.dropouts = [each for each in module.modules() if isinstance(each, _DropoutNd)]
        self.is_behind = are_late and any(each.target == self.stage for each in staging.handovers)
        """Whether another stage waits for gradients of this one, before those of weights are computed."""
        self.linear = _linear_layers(module, staging, self.stage)
        for layer in self.linear:
            layer.__dict__["forward"] = _late(self, layer, layer.forward)
        for name, child in module.named_modules():
            if name in called:
                child.__dict__["forward"] = _intercepted(self, name, child.forward)

    @property
    def part(self) -> StagePart | ModelError:
        """The stage's part of the program for the network's mode."""
        return self.training if self.module.training else self.evaluation

    @property
    def inside(self) -> _Pass | None:
        """The pass, while a module of it runs as a whole or is computed once more."""
        return self.current if self.current is not None and self.current.is_inside else self.repeated

    @contextmanager
    def again(self, taken: _Pass | None) -> Iterator[None]:
        """While torch computes a part of this pass once more."""
        before, self.repeated = self.repeated, taken
        try:
            yield
        finally:
            self.repeated = before

    def run(self, args: tuple[Any, ...], kwargs: Mapping[str, Any], *, micro_batch: int = 0, num_micro_batches: int = 1) -> Any:
        """The forward pass over one micro-batch; on the last stage its results, on others stand-ins of them.

        Args:
            args, kwargs: of the network, for the samples of this micro-batch.
            micro_batch: its number, among `num_micro_batches`.
        """
        part = self.part
        if isinstance(part, ModelError):
            raise ModelError(
                f"in evaluation the network does other operations than in training, and has no stages: it {part}. Evaluate a "
                "plain copy on rank 0: `network = model.whole()`, called on all ranks; or use one stage"
            )
        if not micro_batch:
            self.left.clear()  # of an iteration that was broken off
        taken = _Pass(self, part, micro_batch=micro_batch, is_last=micro_batch == num_micro_batches - 1)
        self.current = taken
        try:
            with taken:
                out = self.module(*args, **kwargs)
        finally:
            self.current = None
        return taken.end(out)


def release(module: nn.Module, *, staging: Staging, stage: int | None) -> None:
    """Replace the parameters and buffers of `module` that only other stages need by stand-ins."""
    first_names: dict[int, str] = {}
    for name, each in (*module.named_parameters(), *module.named_buffers()):
        first_names.setdefault(id(each), name)
    made: dict[int, torch.Tensor] = {}
    for path, owner in module.named_modules():
        for name, tensor in (*owner._parameters.items(), *owner._buffers.items()):
            if tensor is None or isinstance(tensor, StandIn):
                continue
            full = first_names.get(id(tensor), f"{path}.{name}")
            if staging.is_on(stage, full):
                continue
            if id(tensor) not in made:
                shown = stand_in_of(tensor)
                made[id(tensor)] = shown
                if isinstance(tensor, nn.Parameter):
                    made[id(tensor)] = parameter = nn.Parameter(shown, requires_grad=tensor.requires_grad)
                    copy_hooks(tensor, parameter)  # should it come here later
            (owner._parameters if name in owner._parameters else owner._buffers)[name] = made[id(tensor)]


class _Pass(TorchFunctionMode):
    """One forward pass over one micro-batch."""

    def __init__(self, runner: StageRunner, part: StagePart, *, micro_batch: int, is_last: bool) -> None:
        super().__init__()
        self.runner, self.part, self.micro_batch, self.is_last = runner, part, micro_batch, is_last
        self.next = 0
        """Number of the next operation."""
        self.shown: dict[int, tuple[torch.Tensor, StandIn]] = {}
        """By the identity of a tensor that was sent: the tensor, and the stand-in that operations of later stages see."""
        self.sent: set[int] = set()
        self.taken: dict[int, torch.Tensor] = {}
        """What was received, by the numbers of the values."""
        self.taken_over: list[Any] = []
        """The nodes whose gradients go back to other stages."""
        self.waiting: list[SentParcel | ReceivedParcel] = []
        self.hands: list[StandIn] = []
        """What was sent and has a gradient, as later stages see it."""
        self.anchor = torch.zeros((), device="cpu", requires_grad=True) if torch.is_grad_enabled() else None
        self.late: LateWeights | None = None
        if self.anchor is not None:
            self.late = LateWeights(runner.linear, accumulated=runner.accumulated, are_late=runner.is_behind, left=runner.left)
        self.is_inside = False
        """Whether a module runs, or is left out, as a whole, and its operations are not looked at."""

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operations = self.part.staging.program.operations
        name = operation_name(func)
        planned = operations[self.next] if self.next < len(operations) else None
        if planned is None or planned.module or planned.name != name:
            # Not an operation that makes a tensor (a shape is asked for), or not what was recorded: then it is found below.
            out = call_operation(func, *self._as_seen(args, kwargs))
            if tensors_in(out) and not name.startswith("__get__"):
                raise self._differs(name)
            return iter(out) if name == "__iter__" else out
        out = self._operation(planned, func, args, kwargs)
        return iter(out) if name == "__iter__" else out

    def apply_function(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A function with a gradient of its own is called, which was recorded as one operation."""
        operations = self.part.staging.program.operations
        planned = operations[self.next] if self.next < len(operations) else None
        with _pop_mode_temporarily():
            if planned is None or planned.module or planned.name != name:
                raise self._differs(name)
            return self._operation(planned, run, args, kwargs)

    def call(self, name: str, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A module is called that may be run, or left out, as a whole."""
        found = None if self.is_inside else self.part.staging.blocks.get(self.next)
        if found is None or found[0].module != name:
            return plain(*args, **kwargs)  # inside of one that runs, or another call, whose operations belong to several stages
        call, stage = found
        self.next = call.stop
        with _pop_mode_temporarily():
            self.is_inside = True  # what is called in there may be what is called next, too
            try:
                if stage is None or stage == self.runner.stage:
                    if stage is not None:
                        self._refuse_stand_ins(name, (args, kwargs))
                    out = plain(*args, **kwargs)
                    if call.looks:
                        _refuse_other_forms(call, out, tensors_in((args, kwargs)))
                elif call.looks:
                    out = _formed(call, tensors_in((args, kwargs)))
                else:
                    # What every rank has keeps its values: Python may branch on a mask.
                    out = self._left_out(call.first, lambda args, kwargs: plain(*args, **kwargs), args, kwargs)
            finally:
                self.is_inside = False
            return self._handed_over(out, call.returns, stage, first=call.first)

    def end(self, out: Any) -> Any:
        """What `forward` returns: what was sent to the last stage is a stand-in here, as it is not the whole result; so is what
        came from an earlier stage, which has sent it to the last one as well."""
        if self.runner.stage < self.part.staging.num_stages - 1:
            self.shown |= {id(each): (each, stand_in_of(each.detach())) for each in self.taken.values()}
        out = pytree.tree_map_only(torch.Tensor, self._shown, out)
        leaves, structure = pytree.tree_flatten(out)
        self._lead_back(leaves)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        for i in places if self.anchor is not None else ():
            # Each by itself: what only gives a result that has no part in the loss has no gradient, which is not one of 0.
            leaves[i] = _Begins.apply(self, leaves[i])  # type: ignore[no-untyped-call]
        self.shown.clear()
        self.taken.clear()
        return pytree.tree_unflatten(leaves, structure)

    def _lead_back(self, leaves: list[Any]) -> None:
        """From results that other stages compute, backward leads to all that was sent."""
        if self.anchor is None:
            return
        program = self.part.staging.program
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        trained = [
            i
            for i, number in zip(places, program.returns, strict=False)
            if number is not None
            and program.values[number].requires_grad
            and isinstance(leaves[i], StandIn)
            and not leaves[i].requires_grad
        ]
        made = following([leaves[i] for i in trained], [self.anchor, *self.hands])
        for i, each in zip(trained, made, strict=True):
            leaves[i] = each

    def end_backward(self) -> None:
        """At the end of the backward pass: parcels without a gradient are answered, too."""
        for each in self.waiting:
            each.settle()
        self.waiting.clear()

    def _operation(self, planned: ForwardOperation, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        self.next += 1
        stage = self.part.staging.stage_of(planned.number) if planned.reach is Reach.STAGED else None
        if stage == self.runner.stage:
            self._refuse_stand_ins(planned.line or planned.name, (args, kwargs))
            out = call_operation(func, args, kwargs)
        elif stage is None and not has_stand_in((args, kwargs)):
            out = call_operation(func, args, kwargs)
        else:
            out = self._left_out(planned.number, lambda *seen: call_operation(func, *without_values(seen)), args, kwargs)
        return self._handed_over(out, planned.makes, stage, first=planned.number)

    def _left_out(self, first: int, run: Callable[[Any, Any], Any], args: Any, kwargs: Any) -> Any:
        """What operations of other stages return, from number `first` on: stand-ins, the same in every pass.

        They are not made again in each pass, and autograd knows nothing of them: the results of the whole pass lead back to
        what was sent (`end`), however the stand-ins in between were computed.
        """
        known = self.part.skipped
        # A dropout that is switched on later draws, here as well.
        modes = tuple([layer.training and layer.p > 0 for layer in self.runner.dropouts])
        key = (first, self.runner.module.training, modes, form_of(args), form_of(tuple(kwargs.items())))
        if key in known:
            return known[key]
        generator = self.runner.generator
        before = torch_state(generator)
        with torch.no_grad():
            out = without_values(run(*self._as_seen(args, kwargs)))
        if torch.equal(before, torch_state(generator)):
            if len(known) >= _KEPT:
                known.clear()
            known[key] = out
        return out

    def _handed_over(self, out: Any, numbers: tuple[int | None, ...], stage: int | None, *, first: int) -> Any:
        """Send what later stages read, and receive what this one reads, of what the operations since `first` have made."""
        part, values = self.part, self.part.staging.program.values
        if stage is None or not any(number in part.sends or number in part.takes for number in numbers):
            return out
        leaves, structure = pytree.tree_flatten(out)
        places = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        for i, number in zip(places, numbers, strict=False):
            if number is None:
                continue
            if values[number].made_by < first:  # an argument, returned as it came
                leaves[i] = self.taken.get(number, leaves[i])
            elif number in part.sends and number not in self.sent:
                # Two values may be one tensor: dropout returns what it is given where its probability was set to 0.
                self.sent.add(number)
                self.shown[id(leaves[i])] = leaves[i], self._send(leaves[i], part.sends[number])
            elif number in part.takes:
                self.taken[number] = leaves[i] = self._receive(part.takes[number])
        return pytree.tree_unflatten(leaves, structure)

    def _send(self, tensor: torch.Tensor, handovers: list[Handover]) -> StandIn:
        parcels = [self._parcel(each) for each in handovers]
        has_gradient = self.anchor is not None and tensor.requires_grad
        for parcel in parcels:
            self.runner.channel.send(parcel, tensor if has_gradient else tensor.detach())
        if not has_gradient:
            return stand_in_of(tensor)
        ends = [SentParcel(self.runner.channel, parcel) for parcel in parcels]
        self.waiting += ends
        shown = HandOver.apply(ends, tensor)  # type: ignore[no-untyped-call]
        assert isinstance(shown, StandIn)
        self.hands.append(shown)
        return shown

    def _receive(self, handover: Handover) -> torch.Tensor:
        parcel = self._parcel(handover)
        tensor = self.runner.channel.receive(parcel)
        assert tensor is not None
        if not self.is_last:
            self.runner.channel.expect(replace(parcel, micro_batch=self.micro_batch + 1))
        if self.anchor is None or not tensor.requires_grad:
            return tensor.detach()
        end = ReceivedParcel(self.runner.channel, parcel)
        self.waiting.append(end)
        taken: torch.Tensor = TakeOver.apply(end, tensor.detach(), self.anchor)  # type: ignore[no-untyped-call]
        self.taken_over.append(taken.grad_fn)
        return taken

    def _parcel(self, handover: Handover) -> Parcel:
        return Parcel(value=handover.value, micro_batch=self.micro_batch, source=handover.source, target=handover.target)

    def _shown(self, tensor: torch.Tensor) -> torch.Tensor:
        found = self.shown.get(id(tensor))
        return tensor if found is None else found[1]

    def _as_seen(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Arguments as an operation of another stage sees them."""
        if not self.shown:
            return args, kwargs
        seen: tuple[Any, Any] = pytree.tree_map_only(torch.Tensor, self._shown, (args, kwargs))
        return seen

    def _refuse_stand_ins(self, where: str, given: Any) -> None:
        args, kwargs = given
        if any(isinstance(each, StandIn) for each in args) or has_stand_in(_nested(args, kwargs)):
            raise ModelError(
                f"{where} belongs to stage {self.runner.stage}, and reads a tensor of another stage that was not handed over: "
                "an input is the result of a network with stages (also behind .detach()), which the ranks of its last stage "
                "alone have; or the forward pass did something else than when it was recorded, or goes on with an old name of "
                "what was changed in place. Give tatami.tile one network that has both, write x = f(x) in place of "
                "f(x, inplace=True) or out=x, or use one stage"
            )

    def _differs(self, name: str) -> ModelError:
        operations = self.part.staging.program.operations
        planned = operations[self.next] if self.next < len(operations) else None
        expected = "the end" if planned is None else f"{planned.name} {f'({planned.line})' if planned.line else ''}".strip()
        return ModelError(
            f"the forward pass calls {name} where {expected} was recorded: which operations it does depends on its input. "
            "Networks with stages do the same operations for every batch; use one stage"
        )


class _Begins(torch.autograd.Function):
    """A result of a pass: when its gradient comes, the end of the backward pass is known to come as well."""

    @staticmethod
    def forward(ctx: Any, taken: _Pass, tensor: torch.Tensor) -> torch.Tensor:
        ctx.taken, ctx.is_here = taken, not isinstance(tensor, StandIn)
        return stand_in_of(tensor) if isinstance(tensor, StandIn) else tensor.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        if ctx.is_here:
            refuse_no_values(grad)
        _refuse_some_gradients([node for node, _ in ctx.next_functions], ctx.taken.taken_over)
        if ctx.taken.runner.on_backward is not None:
            ctx.taken.runner.on_backward(ctx.taken.micro_batch)
        Variable._execution_engine.queue_callback(ctx.taken.end_backward)
        return None, grad


def _refuse_some_gradients(begun: list[Any], taken_over: list[Any]) -> None:
    """
    Args:
        begun: the nodes that have made a result of this stage.
        taken_over: those of what came from other stages.

    Raises:
        InputError: the backward pass that runs leaves one of them out, and so the stages in front.
    """
    left = {node for node in taken_over if not torch._C._will_engine_execute_node(node)}
    if left and leads_to(begun, left.__contains__):
        raise InputError(
            "gradients of some tensors only (torch.autograd.grad, or backward(inputs=...)) end at this rank's pipeline stage: "
            "the stages in front would get none. Call loss.backward(), and read parameter.grad"
        )


def _nested(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that may hold tensors inside of them."""
    plain = (torch.Tensor, int, float, bool, str, type(None))
    return [each for each in (*args, *kwargs.values()) if not isinstance(each, plain) or isinstance(each, StandIn)]


def _intercepted(runner: StageRunner, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        if runner.current is not None:
            return runner.current.call(name, plain, args, kwargs)
        # Outside of a pass this is recomputation, in the backward pass, of what was computed here.
        if name in runner.training.elsewhere or has_stand_in((args, kwargs)):
            raise ModelError(
                f"{name} belongs to another stage, or reads a tensor of one, and is called outside of the forward pass, as "
                "torch.utils.checkpoint does. What it computes again must be within one stage: cut elsewhere (layout=), or use "
                "one stage"
            )
        return plain(*args, **kwargs)

    return forward


def _linear_layers(module: nn.Module, staging: Staging, stage: int) -> list[nn.Linear]:
    """Linear layers within the modules that this stage runs as a whole.

    What stands in place of the `forward` of one says by `is_plain` whether it computes the same at the moment.
    """
    paths = tuple(call.module for call, own in staging.blocks.values() if own == stage)
    return [
        each
        for name, each in module.named_modules()
        if type(each) is nn.Linear
        and hasattr(each.__dict__.get("forward", _Plain), "is_plain")
        and any(name == path or name.startswith(f"{path}." if path else "") for path in paths)
    ]


class _Plain:
    """What a layer has by itself."""

    is_plain = True


def _late(runner: StageRunner, layer: nn.Linear, plain: Callable[..., Any]) -> Callable[..., Any]:
    def forward(*args: Any, **kwargs: Any) -> Any:
        taken = runner.inside
        is_plain = getattr(plain, "is_plain", True)
        if taken is None or taken.late is None or not is_plain or len(args) != 1 or kwargs:
            return plain(*args, **kwargs)
        return taken.late.call(layer, args[0])

    return forward


def _formed(call: ForwardCall, given: list[torch.Tensor]) -> Any:
    """Stand-ins of what this call returns on its stage."""

    def shown(form: ForwardForm) -> StandIn:
        like = given[form.like]
        meta = torch.empty(like.shape if form.has_axes else (), dtype=like.dtype, device="meta")
        return StandIn(meta, device=like.device)

    return pytree.tree_map_only(ForwardForm, shown, call.result)


def _refuse_other_forms(call: ForwardCall, out: Any, given: list[torch.Tensor]) -> None:
    found = [(each.shape, each.dtype) for each in tensors_in(out)]
    expected = [(each.shape, each.dtype) for each in tensors_in(_formed(call, given))]
    if found != expected:
        raise ModelError(
            f"{call.module} returns tensors of {found} where other stages expect {expected}: the shape depends on values, "
            "which they do not have. Return tensors of the shape of the input, or use one stage"
        )
