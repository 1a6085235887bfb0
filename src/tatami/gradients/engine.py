"""The one gradient engine: gradients are weighed and summed over the replicas at the parameters, as in torch's DDP.

Each rank's loss is that of its own samples. With replicas of 3 and 5 of 8 samples and a loss that is a mean, the gradient of
the global loss is 3/8 of what the first replica finds plus 5/8 of what the second finds; for a loss that is a sum it is their
sum. Both are linear, so it does not matter how a gradient came to its parameter: through the output of the network, of which
the user may have made an input of this or another network, through an activation that a hook caught, or through a penalty on
the weight.

    model(x)
        begin, inputs, outputs                       know the share of this replica (`ForwardPass`, passes.py)
    loss.backward()
        the first gradient of an output arrives      _on_output    queues `_finish` at the end of autograd's outermost run
        a parameter's gradient is complete           _on_gradient  puts what `.grad` held aside, so that autograd leaves the
                                                                   gradient of this pass alone in `.grad`; where gradients
                                                                   are only looked at when the pass has ended, `_on_output`
                                                                   does this for all at once (`_set_all_aside`)
        the pass ends                                _finish       weighs, sums over the owners, adds to what was put aside

Who holds what, and how sums travel, is known to the `AbstractGradientSums` of the model (base.py): of a tiled model the owners
of each block exchange the units they share (`tatami.runtime.owner_sums`); where each rank is a replica, as in `DataParallel`
and in tiled models on several hosts (`tatami.runtime.overlapped_sums`), gradients travel in buckets while the backward pass
still computes (bucketed_sums.py), through shared windows within a host and by messages between hosts (`tatami.comm.overlap`).

A hook of a parameter sees the gradient of one backward pass, before it is added to `.grad`. So what is equal on all ranks is
never summed again, whatever the user accumulates, and a parameter without part in the pass keeps what it has. Where
`torch.utils.checkpoint` runs backward passes inside of the backward pass, their parts of a gradient add up in `.grad` first.

Two forward passes with different shares may meet in one backward pass (a batch of 8 and one of 5). The weights at the
parameters are then those of the first one, and the output of the other one is weighed by the quotient (`Quotient`). That is
exact for what passes through the outputs; anything else is refused in such a pass (`refuse_mixed`).

Where a replica computes its samples in micro-batches, one after another, their gradients add up in `.grad`, each weighed in
proportion to the first: those of micro-batches of one size as they are, which saves a pass over all gradients. They are summed
over the replicas once, when the loop over the micro-batches ends (`finish_parts`). Backward passes in
`deferring` add up as well, each weighed by this rank's share times the number of replicas; the next pass sums the means of
`.grad`, in which what was equal on all ranks before stays as it is.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from enum import Enum
from typing import Any, Literal

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge
from torch.utils import _pytree as pytree

from tatami.comm.agreement import announce
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError, TatamiError, TrainingError
from tatami.gradients.base import PASSES, AbstractGradientSums
from tatami.gradients.outside_reads import OutsideReads
from tatami.gradients.parameter_hooks import ParameterHooks
from tatami.gradients.passes import (
    ForwardPass,
    Quotient,
    Weighed,
    comes_from_output,
    mark_output,
    refuse_create_graph,
    refuse_mixed,
)

_engine: Any = torch.autograd.Variable._execution_engine
_internals: Any = torch._C

REPLACED = (
    "a weight that ranks share out, by units or by pipeline stages, was replaced or taken out of the network after "
    "tatami.tile, as weight norm, pruning and LoRA do. Change the network before it is tiled"
)


class PassMoment(Enum):
    """What the engine tells a stopwatch."""

    BACKWARD = "the first gradient arrives"
    SUMS = "the backward pass is over, and sums are waited for"
    END = "gradients are there"


class _Token:
    """Held by the callback that ends a backward pass alone: when autograd drops the callback, the pass was broken off."""


class GradientEngine:
    """The gradient engine of one model.

    Args:
        module: the network.
        sums: sums its gradients over the replicas; None where the rank is alone for good.
        outside: watches what the loss reads outside of the forward pass.
        required: tensors that must stay parameters of the network.
        keeps_values: whether modules keep what a loss may be made of.
        on_moment: called when a backward pass comes to a `PassMoment`.
        is_here: whether this rank has the values of a parameter of the network.
        comm: the ranks, which are told what this one refuses in a backward pass.

    Attributes:
        parameters: of the network, each once.
        in_parts: whether a loop over micro-batches runs.
        is_closed: whether gradients are left to torch.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        sums: AbstractGradientSums | None,
        outside: OutsideReads,
        required: Sequence[torch.Tensor] = (),
        keeps_values: bool = False,
        on_moment: Callable[[PassMoment], None] = lambda _: None,
        is_here: Callable[[nn.Parameter], bool] = lambda _: True,
        comm: AbstractCommunicator,
    ) -> None:
        self._comm = comm
        self._is_here = is_here
        self._module, self._sums, self._outside, self._keeps_values = module, sums, outside, keeps_values
        self._required, self._on_moment = required, on_moment
        self.parameters: list[nn.Parameter] = []
        self._hooks: dict[nn.Parameter, ParameterHooks] = {}
        self._known: list[int] = []
        self._open: weakref.WeakSet[ForwardPass] = weakref.WeakSet()
        self._last: ForwardPass | None = None
        self._pass: ForwardPass | None = None
        self._token: weakref.ref[_Token] | None = None
        self._outermost = -1
        self._is_new = True
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        self._are_paused = False
        self._begun_at = 0
        self.in_parts = self.is_closed = self._is_left = False
        self._was_left = False
        self._loop = 0
        self._part_weight = 0.0
        self._num_begun = 0  # forward passes since the last sum, or loop over micro-batches
        self._defers = self._has_deferred = False
        self._follow_module()

    # -- the forward pass -----------------------------------------------------------------------------------------------

    def begin(
        self, *, samples: int, shares: Callable[[], tuple[float, ...]], index: int | None, adds_terms: bool
    ) -> ForwardPass:
        """A forward pass with gradients begins.

        Args:
            samples: number of samples of the global batch.
            shares: see `ForwardPass`.
            index: number of this rank's replica; None where it has no samples.
            adds_terms: whether the loss is a sum over samples, computed in several parts.
        """
        self._refuse_left()
        if _internals._current_graph_task_id() < 0:
            self._end_pass()
            # Within a loop over micro-batches the network stays what it is; to look takes a millisecond.
            if not (self.in_parts and self._before) and self._identities() != self._known:
                self._follow_module()
            if self._sums is not None and self._sums.are_needed:
                self._sums.begin(self._trained())
        layout = self._layout()
        # Losses of earlier iterations may still be alive, with their graphs; their backward passes are over.
        # Gradients of several open passes meet in one `.grad`, which can be multiplied by one weight only: that of the first
        # pass. An example: replicas have 3 and 5 of 8 samples, and then 2 and 3 of 5, before any backward pass. At the
        # parameters of replica 0 everything is weighed by 3/8, and what comes through the second output by (2/5) / (3/8) =
        # 16/15 before.
        others = [
            each.weights for each in self._open if not (each.is_used or each.is_part or self.in_parts) and each.layout is layout
        ]
        weights = None
        if others:
            known = shares()
            shares, weights = (lambda: known), (None if known in others else others[0])
        found = ForwardPass(samples=samples, layout=layout, shares=shares, index=index, weights=weights, is_part=self.in_parts)
        self._open.add(found)
        self._last = found
        self._num_begun += not self.in_parts
        self._outside.adds_terms = adds_terms
        self._begun_at = self._outside.begin()
        return found

    def inputs(self, found: ForwardPass, inputs: Any) -> Any:
        """Inputs of the network. Those that require gradients get the gradient of the global loss by `backward()`.

        Except for outputs of models with an engine, whose own parameters are weighed.
        """
        args, kwargs = inputs
        if all(isinstance(each, torch.Tensor) and not each.requires_grad for each in (*args, *kwargs.values())):
            return inputs
        leaves, structure = pytree.tree_flatten(inputs)
        for number, leaf in enumerate(leaves):
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                if comes_from_output(leaf):
                    refuse_mixed(found, "the input is made of an output of a tiled model")
                elif found.weight != 1.0 or found.is_mixed:
                    leaves[number] = Weighed.apply(found.weight, found.quotient, leaf)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(leaves, structure)

    def outputs(
        self,
        found: ForwardPass,
        output: Any,
        *,
        reduction: Literal["mean", "sum"] | None,
        axes: Sequence[int | None] | None = None,
    ) -> Any:
        """The network's output, which notices when a backward pass comes to it.

        Args:
            found: the pass.
            output: of the network.
            reduction: what the loss does with the samples.
            axes: the axis of samples of each tensor of `output`, None for one without; guessed where they are not known.
        """
        self._outside.end(self._begun_at)
        leaves: list[Any] = [output]
        structure = None
        if not isinstance(output, torch.Tensor):
            leaves, structure = pytree.tree_flatten(output)
        if found.is_mixed:
            if self._keeps_values:
                refuse_mixed(found, "a module keeps a value for the loss")
            if any(module._forward_hooks for module in self._modules):
                refuse_mixed(found, "a forward hook may catch activations for the loss")
            for leaf in leaves:
                if not isinstance(leaf, (torch.Tensor, bool, int, float, complex, str, bytes, type(None))):
                    refuse_mixed(found, f"the tensors of the {type(leaf).__name__} that it returns cannot be found")
        arrive = functools.partial(_on_output, weakref.ref(self), found, reduction)
        tensors = [(number, leaf) for number, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
        if axes is None or len(axes) != len(tensors):
            found_axes = [_likely_axes(leaf, samples=self._outside.samples) for _, leaf in tensors]
        else:
            found_axes = [() if axis is None else (axis,) for axis in axes]
        for (number, leaf), likely in zip(tensors, found_axes, strict=True):
            if leaf.grad_fn is not None:
                if found.is_mixed:
                    leaves[number] = leaf = Quotient.apply(found.quotient, leaf)  # type: ignore[no-untyped-call]
                leaf.register_hook(arrive)
                mark_output(leaf, of=self._outside, axes=likely)
        return leaves[0] if structure is None else pytree.tree_unflatten(leaves, structure)

    # -- the backward pass ----------------------------------------------------------------------------------------------

    def _on_output(self, found: ForwardPass, reduction: Literal["mean", "sum"] | None, grad: torch.Tensor | None) -> None:
        """A gradient has come to an output of the network."""
        if grad is None:
            return
        if reduction is None:
            raise InputError(
                "this model does not know whether the loss takes the mean or the sum over the samples of a batch, on which its "
                "gradient depends. Give tatami.tile reduction='mean' or reduction='sum'; torch's losses take the mean unless "
                "they are told otherwise"
            )
        if found.layout is not self._layout() or self._is_left:
            raise _retiled()
        if self._sums is not None and self._sums.shares_units:
            refuse_create_graph()
        self._refuse_late(found)
        if self._token is None or self._token() is None:
            self._end_pass()
            # Whether this pass goes to any parameter.
            if any(parameter.requires_grad and self._executes(parameter) for parameter in self.parameters):
                self._queue()
                self._set_all_aside()
        # The weights of this backward pass are those of `found`.
        if self._pass is not None and self._pass is not found and self._pass.weights != found.weights:
            raise InputError(
                "one backward pass comes through forward passes of batches whose samples are shared out otherwise "
                f"({self._pass.samples} and {found.samples} samples), after another backward pass between them. Call "
                "backward() once for each, or pass batches of one size"
            )
        if self._pass is None or (self._pass is not found and not self._pass.weight):
            self._pass = found
        found.is_used = True
        self._on_moment(PassMoment.BACKWARD)

    def _on_gradient(self, parameter: nn.Parameter, grad: torch.Tensor | None) -> torch.Tensor | None:
        """The gradient of a parameter in this pass, or in a pass inside of it, is complete; it goes to `.grad` next."""
        if grad is None:
            return None
        hooks = self._hooks[parameter]
        hooks.are_apart = self.in_parts or self._are_summed
        if not hooks.are_apart:
            return hooks.run(grad) if hooks.users else None
        if self._is_new:
            self._begin_backward(parameter)
        found = self._pass or self._last
        assert found is not None
        if self._defers or self._has_deferred:
            # Already a part of the sum, so that what a rank without samples finds must be 0 even where it is not a number.
            # The pass that sums at last takes the mean over the replicas. Shares of 3/8 and 5/8 become 3/4 and 5/4 here, and
            # half of their sum is 3/8 a + 5/8 b; of a gradient g that was equal on both before, half of the sum is g again.
            scale = found.weight * len(found.weights)
            return grad if scale == 1.0 else grad * scale if scale else torch.zeros_like(grad)
        # Without this, what earlier passes left in `.grad`, the same on all ranks, would be summed again. Example: `.grad` is 4
        # on both of two ranks, and this pass adds weighed parts 1 and 2. The sum of `.grad` would be 11 (5 + 6), and not 7 (4 +
        # 3).
        if parameter not in self._before:
            self._before[parameter] = parameter.grad
            parameter.grad = None
        if self.in_parts:
            if not found.weight:
                return torch.zeros_like(grad)
            self._part_weight = self._part_weight or found.weight
            return grad if found.weight == self._part_weight else grad * (found.weight / self._part_weight)
        if self._sums is not None and grad.layout is torch.strided:
            # A reentrant checkpoint runs backward passes of its own, each with another number of a graph task, and each brings
            # a part of the gradient here. Only one that finds no such part in `.grad`, and is of the outermost task, is whole,
            # and may leave in its bucket at once.
            is_whole = parameter.grad is None and _internals._current_graph_task_id() == self._outermost
            self._sums.put(parameter, grad, found.weight, is_whole=is_whole)
        return None

    def _set_all_aside(self) -> None:
        """As `_on_gradient`, of all parameters, when a pass begins after which all gradients are summed together.

        Hooks are not called in it. Thirty of them take as long as a tenth of the backward pass of a small GPT.
        """
        later = self.in_parts or self._defers or self._has_deferred
        if later or self._sums is None or not self._sums.are_needed or self._sums.takes_early or torch.is_grad_enabled():
            return
        if not all(hooks.is_alone for hooks in self._hooks.values()):
            return
        self._is_new, self._are_paused = False, True
        for hooks in self._hooks.values():
            hooks.pause()
        for parameter in self._trained():
            self._before[parameter] = parameter.grad
            parameter.grad = None

    def accumulated(self, parameter: nn.Parameter) -> tuple[torch.Tensor, float] | None:
        """The gradient of earlier micro-batches, to which the running one may add its own, and the factor that weighs it.

        A product that is added as it is computed is not written to memory, read again and added by autograd. None where
        autograd has to accumulate: in the first micro-batch, and where anything else takes part in the gradient.
        """
        found, hooks = self._pass, self._hooks.get(parameter)
        if not (self.in_parts and parameter in self._before and found is not None and found.weight and self._part_weight):
            return None
        grad = parameter.grad
        if grad is None or hooks is None or hooks.are_joined or self._defers or self._has_deferred or torch.is_grad_enabled():
            return None
        is_plain = grad.layout is torch.strided and grad.dtype is parameter.dtype and not grad.requires_grad
        return (grad, found.weight / self._part_weight) if is_plain else None

    def _begin_backward(self, parameter: nn.Parameter) -> None:
        """The first gradient of a parameter has come."""
        found = self._pass or self._last
        if found is None:
            raise ModelError(
                "a gradient comes to a weight before the first forward pass of its TiledModel or DataParallel, which knows how "
                "it is weighed: backward() of a penalty on weights, or of a layer that was called by itself. Call the model "
                "first, and backward() after that, or once on the sum of all terms"
            )
        self._is_new = False
        self._refuse_late(found)
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True: the gradients of parameters are summed over the replicas, and this sum cannot be "
                "differentiated. Take gradients by the inputs alone (torch.autograd.grad(output, inputs, create_graph=True)), "
                "and call backward() without create_graph"
            )
        if self._token is None or self._token() is None:
            self._executes(parameter)
            self._end_pass()
            self._is_new = False
            self._queue()

    def _refuse_late(self, found: ForwardPass) -> None:
        if found.is_part and not self.in_parts:
            raise InputError(
                "backward() of a micro-batch comes after the loop over model.micro_batches(...), at whose end gradients are "
                "summed. Call it inside of the loop"
            )

    def _queue(self) -> None:
        # Autograd has no callback for a pass that ends by an error, such as one that a user's hook raises: it drops those that
        # it has. `finish` alone holds the token, so that it dies with the callback, and `_on_broken_pass` puts back what was
        # put aside.
        token = _Token()
        self._token = weakref.ref(token, functools.partial(_on_broken_pass, weakref.ref(self)))
        self._outermost = _internals._current_graph_task_id()
        finish = functools.partial(self._finish, token)
        # Once more, at the end: an engine inside of this one (of replicas that are tiled) finishes first.
        _engine.queue_callback(functools.partial(_engine.queue_callback, finish))

    def _executes(self, parameter: nn.Parameter) -> bool:
        try:
            return bool(_internals._will_engine_execute_node(get_gradient_edge(parameter).node))
        except RuntimeError:  # how torch says that the gradient of this leaf was asked for
            if not self._are_summed:
                return True
            raise InputError(
                f"torch.autograd.grad was asked for the gradient of {self._name(parameter)}, and would return this rank's part "
                "of it. Call loss.backward(), which sums over the ranks, and read parameter.grad"
            ) from None

    def _end_pass(self) -> None:
        """Be ready for the next backward pass; where one was broken off, gradients are again what they were before it."""
        self._pass = self._token = None
        self._is_new = True
        if self._are_paused:
            self._are_paused = False
            for hooks in self._hooks.values():
                hooks.resume()
        if not self.in_parts:
            for parameter, before in self._before.items():
                parameter.grad = before
            self._before.clear()

    @contextmanager
    def deferring(self) -> Iterator[None]:
        """Backward passes inside only add to this rank's gradients; the first one after it sums all of them."""
        before, self._defers = self._defers, True
        try:
            yield
        finally:
            self._defers = before

    def begin_parts(self) -> int:
        """A loop over micro-batches begins; returns its number."""
        self._refuse_left()
        self.forget()
        self.in_parts, self._part_weight = True, 0.0
        self._watch_parameters()
        return self._loop

    def finish_parts(self) -> None:
        """The loop over micro-batches has ended: sum what has come. Collective."""
        self.in_parts = False
        self._on_moment(PassMoment.SUMS)
        if self._last is not None:
            self._sum(self._last)
        self._end_pass()
        self._on_moment(PassMoment.END)

    def leave_parts(self, loop: int) -> None:
        """The loop of this number was left before its end."""
        if loop == self._loop and self.in_parts:
            self.forget()
            self._was_left = True

    def _refuse_left(self) -> None:
        if self._was_left:
            self._was_left = False
            raise TrainingError(
                "a loop over model.micro_batches(...) was left before its end, so its gradients were not summed. Let it end"
            )

    def forget(self) -> None:
        """An iteration begins again, whatever has come of the one before."""
        self._loop += 1
        self._num_begun = 0
        self.in_parts = self._was_left = False
        self._end_pass()

    def close(self) -> None:
        """The network is a plain one again."""
        self.is_closed = True
        for hooks in self._hooks.values():
            hooks.close()

    @torch.no_grad()
    def _finish(self, token: _Token) -> None:
        """Called by autograd at the end of the pass."""
        if self._token is not None and self._token() is token:
            try:
                self._finish_pass()
            except TatamiError as error:
                announce(self._comm, error)
                raise

    def _finish_pass(self) -> None:
        self._on_moment(PassMoment.SUMS)
        found = self._pass or self._last
        if found is not None and self._are_summed and not self.in_parts:
            if self._defers:
                self._has_deferred = True
            else:
                self._sum(found)
        if self._pass is None:
            for each in self._open:
                each.is_used = True
        self._end_pass()
        self._on_moment(PassMoment.END)

    def _sum(self, found: ForwardPass) -> None:
        if found.layout is not self._layout():
            raise _retiled()
        # Micro-batches: the first one that counts gives the weight of all, and each later one was multiplied by its own over
        # that. With weights 0.2 and 0.1, `.grad` is a + b / 2 now, and 0.2 times that is 0.2 a + 0.1 b.
        weight = self._part_weight if found.is_part else found.weight
        trained = self._trained()
        if self._has_deferred:
            self._has_deferred, weight = False, 1 / len(found.weights)
            for parameter in trained:
                self._before[parameter] = None
        # Where the rank has no samples, gradients are those of a sample that stands in, and do not count.
        own = [each.grad if weight and each in self._before and each.grad is not None else None for each in trained]
        for parameter, grad in zip(trained, own, strict=True):
            if grad is not None and grad.layout is not torch.strided:
                raise ModelError(
                    f"the gradient of {self._name(parameter)} is {grad.layout}, and ranks sum dense gradients only. Set "
                    "sparse=False"
                )
        own = [grad if grad is None or not grad.requires_grad else grad.detach() for grad in own]
        own = [grad if grad is None or grad.is_contiguous() else grad.contiguous() for grad in own]
        if self._sums is None or not self._sums.are_needed:
            self._deliver(trained, [grad if grad is None or weight == 1.0 else grad * weight for grad in own])
            return
        try:
            # One number travels for two facts that all ranks must agree on: the size of the batch, and how many forward passes
            # led here.
            samples, self._num_begun = PASSES * (self._last or found).samples + self._num_begun % PASSES, 0
            sums = self._sums.finish(trained, own, weight=weight, samples=samples)
        except InputError:  # the same on all ranks: nothing is left of the pass
            self._end_pass()
            raise
        self._deliver(trained, sums)

    def _deliver(self, trained: Sequence[nn.Parameter], sums: Sequence[torch.Tensor | None]) -> None:
        """Add the sums to what the parameters had before the pass, as autograd does, and call the user's hooks."""
        before, self._before = self._before, {}
        for parameter, total in zip(trained, sums, strict=True):
            if parameter in before:
                parameter.grad = before[parameter]
            if total is None:
                continue
            hooks = self._hooks[parameter]
            total = hooks.run(total) if hooks.users else total
            if parameter.grad is None:
                parameter.grad = total
            else:
                parameter.grad.add_(total)
            hooks.run_after(parameter)

    def leave(self) -> None:
        """Leave the parameters as they were, to another engine. Backward passes that come later are refused."""
        self.forget()
        self._is_left = True
        for hooks in self._hooks.values():
            hooks.leave()
        self._hooks.clear()

    def enter(self) -> None:
        """Watch the parameters again, after `leave`."""
        self._is_left = False
        self._follow_module()

    # -- what is known of the network -------------------------------------------------------------------------------------

    @property
    def _are_summed(self) -> bool:
        return self._sums is not None and self._sums.are_needed

    def _layout(self) -> object:
        return None if self._sums is None else self._sums.layout

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters if parameter.requires_grad]

    def _holders(self) -> Iterator[Mapping[str, Any]]:
        for module in self._modules:
            yield module._parameters
            yield module._modules

    def _identities(self) -> list[int]:
        return [id(each) for holder in self._holders() for each in holder.values()]

    def _follow_module(self) -> None:
        """Know the parameters that the network has now."""
        self._modules = list(self._module.modules())
        self._known = self._identities()
        self.parameters = [each for each in self._module.parameters() if self._is_here(each)]
        present = set(map(id, self.parameters))
        if any(isinstance(each, nn.Parameter) and id(each) not in present for each in self._required):
            raise ModelError(REPLACED)
        if self._sums is not None:
            self._watch_parameters()

    def _watch_parameters(self) -> None:
        for parameter in self.parameters:
            if parameter not in self._hooks:
                self._hooks[parameter] = ParameterHooks(parameter, functools.partial(_on_gradient, weakref.ref(self)))

    def _name(self, parameter: nn.Parameter) -> str:
        return next(name for name, own in self._module.named_parameters() if own is parameter)


def notice_backward(output: Any, on_moment: Callable[[PassMoment], None]) -> None:
    """Call `on_moment` when a backward pass comes to `output`, where no engine watches it, and when that pass ends."""
    task = [-1]

    def arrive(_: torch.Tensor) -> None:
        if task[0] != _internals._current_graph_task_id():
            task[0] = _internals._current_graph_task_id()
            on_moment(PassMoment.BACKWARD)
            _engine.queue_callback(functools.partial(on_moment, PassMoment.END))

    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, torch.Tensor) and leaf.grad_fn is not None:
            leaf.register_hook(arrive)  # type: ignore[no-untyped-call]


def _likely_axes(output: torch.Tensor, *, samples: int | None) -> tuple[int, ...]:
    """Axes that may be that of the samples of an output: those as long, or the first, if it is several times as long."""
    if not samples:
        return (0,)
    shape = enumerate(output.shape)
    return tuple(axis for axis, own in shape if own == samples or (not axis and own and own % samples == 0))


def _retiled() -> ModelError:
    return ModelError("the model was re-tiled between this forward pass and its backward pass; re-tile between two steps")


def _on_output(
    engine: weakref.ref[GradientEngine], found: ForwardPass, reduction: Literal["mean", "sum"] | None, grad: torch.Tensor | None
) -> None:
    if (alive := engine()) is None:
        return
    try:
        alive._on_output(found, reduction, grad)
    except TatamiError as error:
        announce(alive._comm, error)
        raise


def _on_broken_pass(engine: weakref.ref[GradientEngine], _: object) -> None:
    """Autograd has dropped the callback that ends a backward pass, because of an error."""
    if (alive := engine()) is not None:
        alive._end_pass()


def _on_gradient(engine: weakref.ref[GradientEngine], parameter: nn.Parameter, grad: torch.Tensor | None) -> Any:
    alive = engine()
    if alive is None or alive.is_closed:
        return NotImplemented
    try:
        return alive._on_gradient(parameter, grad)
    except TatamiError as error:
        announce(alive._comm, error)
        raise
