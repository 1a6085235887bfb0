"""What a tiled network returns, whose gradients are weighed by this rank's samples on their way back."""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.errors import InputError, ModelError
from tatami.tiled.phases import IterationPhase, Phases

PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None))


def weighed(output: Any, *, scale: float | None, phases: Phases) -> Any:
    """`output`, in the same structure; its gradients are `scale` times as large, and begin compute 2.

    The mean over the local samples, weighted by local / global and summed over the columns, is the mean over the global batch.

    Args:
        output: tensors (samples_here, ...), or tuples, lists and dicts of them.
        scale: of the gradients; None: not known, and then there is no backward pass.
        phases: the stopwatch.

    Raises:
        ModelError: there are objects in which tensors cannot be found.
    """
    leaves, structure = pytree.tree_flatten(output)
    places = []
    for i, leaf in enumerate(leaves):
        if isinstance(leaf, torch.Tensor):
            if leaf.requires_grad:
                places.append(i)
        elif not isinstance(leaf, PLAIN_VALUES):
            raise ModelError(
                f"the network returns a {type(leaf).__name__}, whose tensors could not be weighed by this rank's samples. "
                "Return tensors, or tuples, lists or dicts of them (or register the class with torch's pytree)"
            )
    if places:
        marked = _BackwardBegins.apply(phases, scale, *(leaves[i] for i in places))  # type: ignore[no-untyped-call]
        for i, tensor in zip(places, marked, strict=True):
            leaves[i] = tensor
    return pytree.tree_unflatten(leaves, structure)


class _BackwardBegins(torch.autograd.Function):
    """Hands outputs on; when their gradients come, starts the clock of compute 2 and weighs them by this rank's samples."""

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
        if torch.is_grad_enabled():  # that is create_graph; said here, before any rank has sent anything
            raise InputError(
                "create_graph=True: gradients of gradients, as for a gradient penalty, do not pass a tiled model; leave "
                "create_graph out, or train this network untiled"
            )
        ctx.phases.enter(IterationPhase.BACKWARD)
        return None, None, *(grad if grad is None or ctx.scale == 1.0 else grad * ctx.scale for grad in grads)
