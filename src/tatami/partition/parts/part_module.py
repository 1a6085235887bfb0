"""A module that is a sum over units, at work with some of them, its own Python as it is.

    f(x) = f_1(x) + ... + f_u(x)      every rank of a replica computes its units' part; the parts are summed

What comes in, and the tensors of the module that are not cut, are whole on every rank, and their gradients are parts: one sum
over the replica for all of them. Results that do not depend on the units (the logits of a router) are handed on by each rank;
what flows back into them counts once.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from tatami.runtime.context import ModuleContext, StandsIn
from tatami.runtime.recomputing import recompute_before_backward, recompute_now
from tatami.runtime.rows import tensor_of
from tatami.runtime.tensor_parallel import ReplicaComm, sum_over_replica

Slot = tuple[dict[str, Any], str]
"""Where a module finds a parameter, under which name: it is looked up in every call, since training puts others there."""


@dataclass(frozen=True, kw_only=True)
class Results:
    """Which leaves of a module's result are parts of a sum over its units; the other ones are whole on every rank."""

    summed: tuple[bool, ...]


class AbstractParts(ABC):
    """How a module runs with some of its units."""

    @abstractmethod
    def with_units(self, module: nn.Module, context: ModuleContext) -> Any:
        """A context in which `module`, whose tensors are cut, computes the units of `context`, or something of none."""

    @abstractmethod
    def own(self) -> frozenset[str]:
        """The names in the module of tensors that are cut, or belong to one unit."""

    def once(self) -> frozenset[str]:
        """The names of tensors that are added to the sum once, such as the bias of the last layer."""
        return frozenset()

    def inputs(self, module: nn.Module, args: Any, kwargs: Any, context: ModuleContext) -> tuple[Any, Any]:  # noqa: ARG002
        """What `module` is called with where it has the units of `context`."""
        return args, kwargs

    def routed(self) -> bool:
        """Whether some of the units here may have no part in a forward pass; they have a gradient of 0 then."""
        return False


@dataclass(eq=False, kw_only=True)
class PartForward(StandsIn):
    """Stands in place of a module's `forward`.

    Attributes:
        parts: how it runs.
        results: what it gives; None: it gives its parts as they are, for the test of the block.
        context: which units are here.
        total: units there are; a rank that has all of them runs the module as the user wrote it.
    """

    module: nn.Module
    parts: AbstractParts
    results: Results | None
    context: ModuleContext
    total: int
    _plain: Any = field(init=False)

    def __post_init__(self) -> None:
        self._plain = self.module.forward

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        replica, lowest = self.context.rank.replica, self.context.units[0]()
        first = lowest.start == 0 and lowest.size > 0  # the one rank of the replica that has unit 0
        if replica.comm is None and sum(units().size for units in self.context.units) == self.total:
            return self._plain(*args, **kwargs)
        leaves, structure = pytree.tree_flatten((args, kwargs))
        slots = _slots(self.module, skip=self.parts.own())
        once = [slot for name, slot in slots.items() if name in self.parts.once()]
        shared = [slot for name, slot in slots.items() if name not in self.parts.once()]
        inputs = [index for index, leaf in enumerate(leaves) if _is_float(leaf)]
        given = [*(leaves[index] for index in inputs), *(owner[name] for owner, name in shared)]
        entered = _Enter.apply(replica, *given) if given else ()  # type: ignore[no-untyped-call]
        any_here = any(units().size for units in self.context.units)
        # A rank without units has a result, to know its shape, which gives no gradient to what is not cut.
        used = [tensor if any_here else tensor.detach() for tensor in entered]
        for index, tensor in zip(inputs, used, strict=False):
            leaves[index] = tensor
        added = [_Once.apply(owner[name], first) for owner, name in once]  # type: ignore[no-untyped-call]
        tensors = [*used[len(inputs) :], *added]
        with _replaced([*shared, *once], tensors), self.parts.with_units(self.module, self.context):
            args, kwargs = pytree.tree_unflatten(leaves, structure)
            args, kwargs = self.parts.inputs(self.module, args, kwargs, self.context)
            result = self._plain(*args, **kwargs)
        if self.results is None:
            return result
        outputs, structure = pytree.tree_flatten(result)
        tied = [tensor for tensor in entered if tensor.requires_grad]
        routed = [tensor_of(self.module, name) for name in sorted(self.parts.own())] if self.parts.routed() else []
        for index, (leaf, summed) in enumerate(zip(outputs, self.results.summed, strict=True)):
            if summed:
                part = leaf if any_here else _Nothing.apply(leaf)  # type: ignore[no-untyped-call]
                part = _Unused.apply(part, *routed) if routed else part  # type: ignore[no-untyped-call]
                # The sum is taken in place: of a copy, because the module may keep its result for its backward pass.
                outputs[index] = sum_over_replica(_Tie.apply(part, *tied), replica)  # type: ignore[no-untyped-call]
            elif _is_float(leaf) and (leaf.requires_grad or tied):
                outputs[index] = _Whole.apply(_Tie.apply(leaf, *tied), first)  # type: ignore[no-untyped-call]
        return pytree.tree_unflatten(outputs, structure)


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _slots(module: nn.Module, *, skip: frozenset[str]) -> dict[str, Slot]:
    """The parameters of `module` that are there, each under its first name, without `skip`."""
    found: dict[str, Slot] = {}
    for path, owner in module.named_modules():
        for leaf, value in owner._parameters.items():
            name = f"{path}.{leaf}" if path else leaf
            if value is not None and name not in skip:
                found[name] = (owner._parameters, leaf)
    return found


@contextmanager
def _replaced(slots: Sequence[Slot], tensors: Sequence[torch.Tensor]) -> Iterator[None]:
    """Other tensors in place of parameters, for one call.

    A module reads its parameters by their names from these dicts, so this is how it can be given others. Only the call inside
    of the `with` sees them: a forward pass runs in one thread, and what was there comes back, also after an error.
    """
    before = [owner[name] for owner, name in slots]
    try:
        for (owner, name), tensor in zip(slots, tensors, strict=True):
            owner[name] = tensor
        yield
    finally:
        for (owner, name), tensor in zip(slots, before, strict=True):
            owner[name] = tensor


class _Enter(torch.autograd.Function):
    """Tensors that all ranks of a replica have whole; backward sums all of their gradients over the replica, in one message."""

    @staticmethod
    def forward(ctx: Any, replica: ReplicaComm, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.replica = replica.now
        ctx.likes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        ctx.device = tensors[0].device
        ctx.set_materialize_grads(False)
        recompute_before_backward(ctx, tensors[0])
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        recompute_now(ctx)
        # What has no part in this rank's units has in another rank's: all sum the same elements.
        asked = [index for index, needed in enumerate(ctx.needs_input_grad[1:]) if needed]
        double = any(ctx.likes[index][1] is torch.float64 for index in asked)
        wire = torch.float64 if double else torch.float32
        whole = []
        for index in asked:
            grad = grads[index]
            if grad is None:
                grad = torch.zeros(ctx.likes[index][0], dtype=wire, device=ctx.device)
            whole.append(grad.to(wire).reshape(-1))
        total = torch.cat(whole)
        ctx.replica.sum_(total)
        result: list[torch.Tensor | None] = [None] * len(grads)
        for index, part in zip(asked, torch.split(total, [each.numel() for each in whole]), strict=True):
            shape, dtype = ctx.likes[index]
            result[index] = part.view(shape).to(dtype)
        return None, *result


class _Tie(torch.autograd.Function):
    """A result that leads back to all that entered, whatever it was computed from: a rank without units sums gradients, too."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *entered: torch.Tensor) -> torch.Tensor:
        ctx.num_entered = len(entered)
        return result.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad, *(None,) * ctx.num_entered


class _Nothing(torch.autograd.Function):
    """Zeros in place of a result; what was added to it once has its gradient all the same."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.zeros_like(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad


class _Unused(torch.autograd.Function):
    """A result, and tensors of which some may have had no part in it: without one, an optimizer would leave them alone."""

    @staticmethod
    def forward(ctx: Any, result: torch.Tensor, *tensors: torch.Tensor) -> torch.Tensor:
        ctx.likes = [(tensor.shape, tensor.dtype) for tensor in tensors]
        return result.view_as(result)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        needed = ctx.needs_input_grad[1:]
        zeros = (
            torch.zeros(shape, dtype=dtype, device=grad.device) if need else None
            for (shape, dtype), need in zip(ctx.likes, needed, strict=True)
        )
        return grad, *zeros


class _Once(torch.autograd.Function):
    """A tensor that one rank of the replica adds; its gradient is that of the whole sum on every rank."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, first: bool) -> torch.Tensor:  # noqa: ARG004
        return tensor.clone() if first else torch.zeros_like(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:  # noqa: ARG004
        return grad, None


class _Whole(torch.autograd.Function):
    """A result that all ranks of the replica have; the sum over the replica takes its gradient from one of them."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, first: bool) -> torch.Tensor:
        ctx.first = first
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return (grad if ctx.first else torch.zeros_like(grad)), None
