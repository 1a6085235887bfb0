"""Passes of communication, delegates by hand as in ChainerMN, and the share of a loss that every rank computes alike."""

from __future__ import annotations

from typing import Any, Self

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.functions.backward import backward
from tatami.functions.chain import enter


class _PseudoConnect(torch.autograd.Function):
    @staticmethod
    def forward(delegate: torch.Tensor, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        # Copies: torch refuses to change a view that a function returned in place, as nn.ReLU(inplace=True) does.
        return tuple(x.clone() for x in xs)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[torch.Tensor, ...], output: tuple[torch.Tensor, ...]) -> None:
        ctx.delegate = (inputs[0].shape, inputs[0].dtype, inputs[0].device)
        ctx.mark_non_differentiable(*[x for x in output if not (x.is_floating_point() or x.is_complex())])
        ctx.set_materialize_grads(False)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        shape, dtype, device = ctx.delegate
        return (torch.zeros(shape, dtype=dtype, device=device) if dtype.is_floating_point else None, *grads)


def pseudo_connect(delegate: torch.Tensor | None, *xs: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Copies of `xs`, such that backward through any of them also comes to the operation that returned `delegate`.

    Ranks that end a pass with `loss.backward()` or `tatami.functions.backward()` do not need it.

    Args:
        delegate: what `send`, or `gather` and `reduce` away from the root, returned; of any shape; None for nothing.
        xs: tensors.
    """
    if delegate is None:
        return tuple(x.clone() for x in xs)
    connected: tuple[torch.Tensor, ...] = _PseudoConnect.apply(delegate, *xs)  # type: ignore[no-untyped-call]
    return connected


def share(loss: torch.Tensor, comm: AbstractCommunicator) -> torch.Tensor:
    """This rank's share, `loss / comm.size`, of a scalar that every rank computes alike; all ranks' shares add up to it."""
    return loss / comm.size


class Pass:
    """What is called in its block belongs to one forward pass, which backward visits without touching any other.

        passes = [functions.Pass() for _ in micro_batches]
        for one, x in zip(passes, micro_batches):
            with one:
                functions.send(encoder(x), comm, dest=1)
        for one in passes:
            one.backward()                     # on a rank with a loss: one.backward(loss), or loss.backward()

    Outside of every `Pass`, all that is communicated between two calls of backward is one pass. A message that is sent in
    one pass must be received in one pass, so that both ranks have equally many. The block may be entered again.
    """

    def __init__(self) -> None:
        self._before: list[object] = []

    def __enter__(self) -> Self:
        self._before.append(enter(self))
        return self

    def __exit__(self, *error: object) -> None:
        enter(self._before.pop())

    def backward(
        self, loss: torch.Tensor | None = None, *, retain_graph: bool | None = None, create_graph: bool = False
    ) -> None:
        """`tatami.functions.backward` of this pass alone.

        Args:
            loss: a scalar, of this pass; None on a rank without one.
            retain_graph: as in torch.
            create_graph: as in torch.

        Raises:
            CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
        """
        with self:
            backward(loss, retain_graph=retain_graph, create_graph=create_graph)
