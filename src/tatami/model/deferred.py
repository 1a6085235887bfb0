"""Backward passes of micro-batches that wait for their turn: one forward and one backward pass alternate on each stage.

In a loop over micro-batches, `loss.backward()` on the first of several pipeline stages would wait until the micro-batch has
gone through all stages and back, while this stage has nothing to do. So it returns at once, and the pass is run later: when as
many forward passes as there are stages behind this one have followed, or when the loop ends.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.gradients.passes import leads_to


class DeferredPasses:
    """The deferred passes of one model; nothing is deferred outside of a loop."""

    def __init__(self) -> None:
        self._ahead = 0
        self._waiting: deque[Callable[[], None]] = deque()
        self._outputs: set[Any] = set()

    def begin(self, ahead: int) -> None:
        """A loop begins, in which this many forward passes come before the first backward pass."""
        self.clear()
        self._ahead = ahead

    def passed(self, output: Any) -> None:
        """A forward pass of the loop has returned `output`."""
        if self._ahead:
            self._outputs |= {leaf.grad_fn for leaf in pytree.tree_leaves(output) if isinstance(leaf, torch.Tensor)} - {None}

    def take(self, run: Callable[[], None], roots: Iterable[Any]) -> bool:
        """Whether the backward pass `run` from these nodes is run later, by this object."""
        if not self._ahead or not leads_to(roots, self._outputs.__contains__):
            return False
        self._waiting.append(run)
        if len(self._waiting) > self._ahead:
            self._waiting.popleft()()
        return True

    def end(self) -> None:
        """The loop ends: run what waits."""
        self._ahead = 0
        while self._waiting:
            self._waiting.popleft()()
        self._outputs.clear()

    def clear(self) -> None:
        """The loop was left: forget what waits."""
        self._ahead = 0
        self._waiting.clear()
        self._outputs.clear()
