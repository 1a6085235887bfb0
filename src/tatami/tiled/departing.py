"""Gradients that leave while earlier blocks compute: those of a bucket, when the backward pass is done with its blocks.

Autograd runs first what was made last in the forward pass. So a bucket's parameters go through a node of their own, `_Leaving`,
which is made when the first of the bucket's modules is called: backward comes to it after all that the bucket computes, and
before what earlier blocks compute. There the messages are posted. Whoever waits for a sum over the column, or comes to the
next bucket, moves them on; what is left is waited for when the backward pass is done.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tatami.comm.checked import MAX_TAG
from tatami.tiled.horizontal import HorizontalExchange, UnderWay
from tatami.tiled.phases import IterationPhase, Phases
from tatami.tiled.rows import Rows

_FIRST_TAG = 64
"""Below are the tags of all else that a tiled model sends."""
Slot = tuple[nn.Module, str, nn.Parameter]


@dataclass(frozen=True, kw_only=True, eq=False)
class Bucket:
    """Blocks whose gradients leave together.

    Attributes:
        rows: of every block of the network, its parameters; none of a block that is not in the bucket.
        slots: where modules have them.
        callers: the modules in whose calls they are read.
    """

    rows: tuple[tuple[Rows, ...], ...]
    slots: tuple[Slot, ...]
    callers: frozenset[nn.Module]


class Departures:
    """Those of one pass, forward and back.

    Args:
        buckets: in the order of the backward pass.
        exchanges: of each.
        trained: the identities of the parameters that are trained.
        number: of the pass.
        phases: the stopwatch.
        holds: whether the model still lies as it did in the forward pass.

    Attributes:
        stand_ins: of these parameters, by their identity; given before the forward pass.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        exchanges: Sequence[HorizontalExchange],
        *,
        trained: Set[int],
        number: int,
        phases: Phases,
        holds: Callable[[], bool],
    ) -> None:
        self._buckets, self._exchanges = buckets, exchanges
        self.stand_ins: Mapping[int, torch.Tensor] = {}
        # Each pass has tags of its own, so that what an interrupted one has left behind does not meet a later one.
        needed = 2 * max(1, len(buckets))
        self._first_tag = _FIRST_TAG + needed * (number % ((MAX_TAG - _FIRST_TAG) // needed))
        self._phases, self._holds = phases, holds
        self._rows = [[[each for each in block if id(each.tensor) in trained] for block in bucket.rows] for bucket in buckets]
        self._trained = [[each.tensor for block in rows for each in block] for rows in self._rows]
        self._entered: set[int] = set()
        self._left: dict[int, tuple[torch.Tensor | None, ...]] = {}
        self._begun: dict[int, tuple[UnderWay, list[list[Rows]]]] = {}

    @property
    def trained(self) -> frozenset[int]:
        """The identities of all parameters that are in a bucket."""
        return frozenset(id(parameter) for each in self._trained for parameter in each)

    def enter(self, index: int) -> None:
        """A module is called that reads parameters of bucket `index`."""
        if index in self._entered or not self._trained[index]:
            return
        self._entered.add(index)
        given = [self.stand_ins[id(parameter)] for parameter in self._trained[index]]
        leave = functools.partial(self._leave, index)
        leaving = _Leaving.apply(leave, *given)  # type: ignore[no-untyped-call]
        by_parameter = {id(parameter): each for parameter, each in zip(self._trained[index], leaving, strict=True)}
        for owner, name, parameter in self._buckets[index].slots:
            if id(parameter) in by_parameter:
                owner._parameters[name] = by_parameter[id(parameter)]

    def _leave(self, index: int, grads: tuple[torch.Tensor | None, ...]) -> None:
        """Backward is done with the bucket."""
        sparse = any(grad is not None and grad.layout is not torch.strided for grad in grads)
        if sparse or not self._holds() or index in self._begun:
            return  # what is wrong is told at the end of the pass
        with self._phases.during(IterationPhase.HORIZONTAL):
            for other, (under_way, _) in self._begun.items():
                self._exchanges[other].progress(under_way)
            self._left[index] = grads
            self._begin(index, grads)

    def _begin(self, index: int, grads: Sequence[torch.Tensor | None]) -> None:
        # Copies: what comes back out of an addition may be the gradient of another tensor, too, which is still needed.
        own = iter(
            torch.zeros_like(parameter) if grad is None else grad.clone(memory_format=torch.contiguous_format)
            for parameter, grad in zip(self._trained[index], grads, strict=True)
        )
        rows = [[Rows(next(own), each.runs) for each in block] for block in self._rows[index]]
        self._begun[index] = (self._exchanges[index].begin(rows, (), tag=self._first_tag + 2 * index), rows)

    def arrive(self, grads: Mapping[int, torch.Tensor | None]) -> tuple[dict[int, torch.Tensor], list[int]]:
        """Wait for the sums of all buckets.

        Args:
            grads: that came to the end of the pass, by their parameters' identity.

        Returns:
            The sums, and the parameters that had a part in the loss beside their bucket, which has not left with it.
        """
        late = []
        for index, trained in enumerate(self._trained):
            came = [grads[id(parameter)] for parameter in trained]
            if index not in self._begun:
                self._begin(index, came)
            else:
                each = zip(trained, came, self._left[index], strict=True)
                late += [id(parameter) for parameter, grad, left in each if grad is not left]
        found: dict[int, torch.Tensor] = {}
        for index, (under_way, rows) in sorted(self._begun.items()):
            self._exchanges[index].finish(under_way)
            sums = (each.tensor for block in rows for each in block)
            found |= {id(parameter): total for parameter, total in zip(self._trained[index], sums, strict=True)}
        self._begun.clear()
        self._left.clear()
        return found, late


class _Leaving(torch.autograd.Function):
    """Hands a bucket's parameters on to its modules; backward sends their gradients off, and hands them on."""

    # With a `setup_context`, torch would look up the signature of `forward` in every call: some 0.1 ms of a core.
    @staticmethod
    def forward(
        ctx: Any, leave: Callable[[tuple[torch.Tensor | None, ...]], None], *stand_ins: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        ctx.leave = leave
        ctx.set_materialize_grads(False)
        return tuple(each.view_as(each) for each in stand_ins)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        ctx.leave(grads)
        return None, *grads
