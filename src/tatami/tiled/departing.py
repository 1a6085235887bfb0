"""Gradients that leave while earlier blocks compute: those of a bucket, when the backward pass is done with its blocks.

Autograd runs first what was made last in the forward pass. So a bucket's parameters go through a node of their own, `_Leaving`,
which is made when the first of the bucket's modules is called: backward comes to it after all that the bucket computes, and
before what earlier blocks compute. There the messages are posted. They are moved on where the rank comes to the next bucket,
or waits for another message; what is left is waited for when the backward pass is done. Nothing that a bucket does before that
waits for another rank, so ranks may come to their buckets in any order, between any other messages.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from tatami.comm.checked import MAX_TAG
from tatami.tiled.blocks import Blocks
from tatami.tiled.horizontal import HorizontalExchange, UnderWay
from tatami.tiled.phases import IterationPhase, Phases
from tatami.tiled.rows import Rows
from tatami.tiling.traffic import departures
from tatami.workload import Workload

_FIRST_TAG = 64
"""Below are the tags of all else that a tiled model sends."""
Slot = tuple[nn.Module, str, nn.Parameter]


@dataclass(frozen=True, kw_only=True, eq=False)
class Departure:
    """Blocks whose gradients leave together.

    Attributes:
        rows: of every block of the network, its parameters; none of a block that is not in the bucket.
        slots: where modules have them.
        callers: the modules in whose calls they are read.
    """

    rows: tuple[tuple[Rows, ...], ...]
    slots: tuple[Slot, ...]
    callers: frozenset[nn.Module]


def leaving_early(workload: Workload, *, module: nn.Module, found: Blocks, bucket_bytes: int | None) -> Workload:
    """`workload` with `bucket_bytes`, where its blocks are those of the network and its weights of one dtype.

    Blocks of which each unit has tensors of its own, such as experts, are several in the network; their sums, and those of
    several dtypes, are described together.
    """
    alike = len(found.blocks) == len(workload.blocks) and len({parameter.dtype for parameter in module.parameters()}) == 1
    return replace(workload, bucket_bytes=bucket_bytes if alike else None)


def buckets_of(
    module: nn.Module, *, found: Blocks, rows: Sequence[Sequence[Rows]], slots: Sequence[Slot], workload: Workload
) -> tuple[Departure, ...]:
    """Of a tiled network, in the order of the backward pass; what is in none leaves at its end.

    Args:
        module: the network.
        found: its blocks, as many as the workload has where gradients leave early.
        rows: of every block, the tensors that hold its units.
        slots: where modules have parameters.
        workload: says which blocks leave together.
    """
    buckets = []
    for numbers in departures(workload)[:-1]:
        own = tuple(
            tuple(each for each in block if isinstance(each.tensor, nn.Parameter)) if number in numbers else ()
            for number, block in enumerate(rows)
        )
        parameters = {id(each.tensor) for block in own for each in block}
        there = tuple(slot for slot in slots if id(slot[2]) in parameters)
        # A module that is followed, or runs as a part, may read the parameters of modules inside of it without calling them.
        names = {found.blocks[number].facts.name for number in numbers if number >= len(found.pairs)}
        callers = {owner for owner, _, _ in there} | {module.get_submodule(name) for name in names}
        buckets.append(Departure(rows=own, slots=there, callers=frozenset(callers)))
    return tuple(buckets)


class Departures:
    """Those of one pass, forward and back.

    Args:
        buckets: in the order of the backward pass.
        exchanges: of each.
        trained: the identities of the parameters that are trained.
        number: of the pass.
        phases: the stopwatch.
        holds: whether the model still lies as it did in the forward pass.
        counts: whether this rank has samples; otherwise its gradients are those of one that stands in, and are left out.

    Attributes:
        stand_ins: of these parameters, by their identity; there during the forward pass.
    """

    def __init__(
        self,
        buckets: Sequence[Departure],
        exchanges: Sequence[HorizontalExchange],
        *,
        trained: Set[int],
        number: int,
        phases: Phases,
        holds: Callable[[], bool],
        counts: bool,
    ) -> None:
        self._buckets, self._exchanges = buckets, exchanges
        self.stand_ins: Mapping[int, torch.Tensor] = {}
        # Each pass has tags of its own, so that what an interrupted one has left behind does not meet a later one.
        needed = 2 * max(1, len(buckets))
        self._first_tag = _FIRST_TAG + needed * (number % ((MAX_TAG - _FIRST_TAG) // needed))
        self._phases, self._holds, self._counts = phases, holds, counts
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
        if index in self._entered or not self._trained[index] or not torch.is_grad_enabled():
            return  # where gradients are off, a later call may need them
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
            torch.zeros_like(parameter)
            if grad is None or not self._counts
            else grad.clone(memory_format=torch.contiguous_format)
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
            if not trained:
                continue
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
