"""Several forward passes in flight at once on the same ranks: micro-batches, and schedules like one forward, one backward."""

from __future__ import annotations

from typing import Self

import torch

from tatami.functions.backward import backward
from tatami.functions.chain import enter


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
