"""Forward passes whose gradients are still to come, and what a forward pass leaves in the graph of autograd."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError

_MARK = "tatami.output"
"""Key in the metadata of the autograd node of an output."""


class ForwardPass:
    """A forward pass with gradients, until they have come back.

    Args:
        samples: number of samples of its global batch, for messages.
        layout: who holds which units during the pass; compared by identity.
        shares: computes, of each replica, the share of the global loss that its own loss has. Asked when it is first needed,
            because ranks may still be exchanging their numbers of samples while the forward pass runs.
        index: number of this rank's replica; None where its gradients do not count.
        weights: of each replica, by which its gradients are multiplied at the parameters; None: `shares`. Others than `shares`
            where a pass with other shares was still open.
        is_part: whether it is of a micro-batch.

    Attributes:
        is_used: whether a backward pass has come through it.
    """

    def __init__(
        self,
        *,
        samples: int,
        layout: object,
        shares: Callable[[], tuple[float, ...]],
        index: int | None,
        weights: tuple[float, ...] | None = None,
        is_part: bool = False,
    ) -> None:
        self.samples, self.layout, self.is_part, self.is_used = samples, layout, is_part, False
        self._shares, self._index, self._weights = shares, index, weights
        self._known: tuple[float, ...] | None = None

    @property
    def shares(self) -> tuple[float, ...]:
        if self._known is None:
            self._known = self._shares()
        return self._known

    @property
    def weights(self) -> tuple[float, ...]:
        return self.shares if self._weights is None else self._weights

    @property
    def is_mixed(self) -> bool:
        """Whether its output is weighed as well."""
        return self._weights is not None and self._weights != self.shares

    @property
    def share(self) -> float:
        """This rank's, of the global loss; 0 where it has no samples."""
        return self.shares[self._index] if self._index is not None and self._index < len(self.shares) else 0.0

    @property
    def weight(self) -> float:
        """This rank's; 0 where it has no samples."""
        return self.share and (self.weights[self._index or 0] or self.share)

    @property
    def quotient(self) -> float:
        """What is left of this rank's share when its weight is taken out."""
        return self.share / self.weight if self.weight else 1.0


class Weighed(torch.autograd.Function):
    """Hands an input on. What `backward()` adds to a leaf below it is weighed, as the gradients of parameters are.

    `torch.autograd.grad(critic(x).sum(), x)` asks for the slope of the critic at each sample, not for that of a loss.
    """

    @staticmethod
    def forward(ctx: Any, weight: float, quotient: float, tensor: torch.Tensor) -> torch.Tensor:
        ctx.weight, ctx.quotient = weight, quotient
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, None, torch.Tensor]:
        is_of_loss = not torch.is_grad_enabled() and leads_to([node for node, _ in ctx.next_functions], _adds_to_leaf)
        scale = ctx.weight if is_of_loss else 1 / ctx.quotient
        return None, None, grad if scale == 1.0 else grad * scale


def _adds_to_leaf(node: Any) -> bool:
    """Whether the running backward pass adds to the gradient of this leaf."""
    try:
        return hasattr(node, "variable") and torch._C._will_engine_execute_node(node)
    except RuntimeError:  # how torch says that torch.autograd.grad asked for it
        return False


class Quotient(torch.autograd.Function):
    """Hands an output on, whose gradients are `scale` times as large."""

    @staticmethod
    def forward(ctx: Any, scale: float, tensor: torch.Tensor) -> torch.Tensor:
        ctx.scale = scale
        return tensor.detach()  # a view could not be changed in place

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor]:
        if torch.is_grad_enabled():
            raise InputError(
                "create_graph=True, while forward passes of batches whose samples are shared out otherwise are open. Call "
                "backward() for each batch by itself, or pass batches of one size"
            )
        return None, grad * ctx.scale


class OverBatch(torch.autograd.Function):
    """The number of the global batch in place of that of this rank's samples: the sum over the ranks, by their shares.

    Gradients take the same sum, for what each rank does with the number counts for the global loss by the rank's share; those
    of parameters are weighed by the share afterwards.
    """

    @staticmethod
    def forward(ctx: Any, own: torch.Tensor, sum_over: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        ctx.sum_over = sum_over
        return sum_over(own)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return OverBatch.apply(grad, ctx.sum_over), None  # type: ignore[no-untyped-call]


def over_batch(
    mean: torch.Tensor,
    *,
    share: float,
    comm: AbstractCommunicator,
    waits: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> torch.Tensor:
    """The mean over the global batch, where `mean` is that over this rank's samples, which are `share` of it. Collective, as is
    its backward pass; `waits` is around both sums."""

    def sum_over(own: torch.Tensor) -> torch.Tensor:
        total = torch.zeros(own.shape, dtype=torch.float64, device="cpu")
        if share:  # the mean of no samples is not a number
            total.add_(own.detach().to(total), alpha=share)
        if comm.size > 1:
            with waits():
                comm.allreduce(total)
        return total.to(own)

    whole: torch.Tensor = OverBatch.apply(mean, sum_over)  # type: ignore[no-untyped-call]
    return whole


def refuse_create_graph() -> None:
    """
    Raises:
        InputError: a graph of this backward pass is kept, and ranks share the units of layers.
    """
    if torch.is_grad_enabled():
        raise InputError(
            "create_graph=True: gradients of gradients, as for a gradient penalty, are exact only where each rank has whole "
            "layers, and here ranks share the units of some. Give replicas of one rank (layout=...), or leave create_graph out"
        )


def refuse_compiling() -> None:
    """
    Raises:
        ModelError: this runs under `torch.compile`.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and to import it takes seconds
        return
    frames: Any = torch._C._dynamo.eval_frame
    if frames.get_eval_frame_callback() is not None:
        raise ModelError(
            "torch.compile follows a tiled model, or DataParallel, into the sums over its ranks, which it cannot compile. Call "
            "it outside of torch.compile, and compile the module inside of DataParallel; on one rank alone it may be compiled"
        )


def refuse_transforms() -> None:
    """
    Raises:
        ModelError: this runs inside of a transform of `torch.func`.
    """
    if torch._C._functorch.peek_interpreter_stack() is not None:
        raise ModelError(
            "a transform of torch.func (grad, vjp, jvp, jacrev, vmap, ...) goes through the forward pass of a TiledModel or "
            "DataParallel, whose sums over the ranks it cannot follow. Use backward() or torch.autograd.grad, or transform "
            "the plain network: model.whole(), or the module of DataParallel"
        )


def mark_output(tensor: torch.Tensor, *, of: object, axes: tuple[int, ...] = (0,)) -> None:
    """Remember that `tensor` is an output, and of what; see `comes_from_output` and `are_made_by`.

    Args:
        tensor: with a gradient function.
        of: what has computed it.
        axes: one of which is that of its samples; none where it has none.
    """
    node: Any = tensor.grad_fn
    node.metadata[_MARK] = weakref.ref(of), axes


def are_made_by(owner: object, roots: Iterable[Any]) -> bool:
    """Whether the graph of these nodes has an output that was marked as one of `owner`."""
    return leads_to(roots, lambda node: is_output(node) and node.metadata[_MARK][0]() is owner)


def is_output(node: Any) -> bool:
    """Whether an autograd node made the output of a model with an engine."""
    return _MARK in node.metadata


def samples_axis(node: Any) -> int | None:
    """The axis of the samples of an output that this node made; None where that is none, or may be one of several."""
    axes: tuple[int, ...] = node.metadata[_MARK][1]
    return axes[0] if len(axes) == 1 else None


def has_unclear_axis(node: Any) -> bool:
    """Whether it made an output of which one of several axes may be that of the samples."""
    return is_output(node) and len(node.metadata[_MARK][1]) > 1


@contextmanager
def assumed_axis(nodes: Iterable[Any], number: int) -> Iterator[None]:
    """Meanwhile, the axis of the samples is the one of this number among those that it may be."""
    marks = [(node, *node.metadata[_MARK]) for node in nodes]
    try:
        for node, owner, axes in marks:
            node.metadata[_MARK] = owner, (axes[number],)
        yield
    finally:
        for node, owner, axes in marks:
            node.metadata[_MARK] = owner, axes


def comes_from_output(tensor: torch.Tensor) -> bool:
    """Whether a tensor was made of an output of a model whose parameters are weighed."""
    return leads_to([tensor.grad_fn], is_output)


def leads_to(
    roots: Iterable[Any], is_wanted: Callable[[Any], bool], *, ends_at: Callable[[Any], bool] = lambda _: False
) -> bool:
    """Whether the graph of autograd has a wanted node at or below `roots`, on a path without nodes at which it ends."""
    nodes, seen = list(roots), set[Any]()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen or ends_at(node):
            continue
        if is_wanted(node):
            return True
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)
    return False


def refuse_mixed(found: ForwardPass, why: str) -> None:
    """
    Args:
        found: a forward pass.
        why: what makes it inexact where it is mixed.

    Raises:
        InputError: it is mixed.
    """
    if found.is_mixed:
        raise InputError(
            f"a forward pass over {found.samples} samples begins before the backward pass of one whose samples are shared "
            f"out otherwise, and {why}. Call backward() for each batch by itself, or pass batches of one size"
        )
