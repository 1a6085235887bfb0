"""Loads and stores in a shared window, block by block: a block is read, summed and stored while it is in the cache.

With one thread for each rank numpy is used, whose call costs a quarter of torch's and whose loops are as fast; torch where its
threads share the work, and for bfloat16 and float16, which are summed in float32 and rounded once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import numpy as np
import torch

from tatami.collective import Step, Via
from tatami.comm.reduction import HALF_DTYPES, NUMPY, TORCH, Op

BLOCK_BYTES = 512 * 1024
"""Block size of one vector, for each thread. Two ranks with L2 caches of 512 KiB, at 1, 16 and 64 MiB: 33, 704, 5493 us; with
half of it 41, 799, 5640; without blocks 33, 681, 7280."""

BoundCall = tuple[Any, ...]
"""A function and its arguments."""


def loads_and_stores(
    steps: Sequence[Step], vectors: Mapping[int, torch.Tensor], *, rank: int, op: Op, divisor: int | None
) -> list[Callable[[], object]]:
    """The steps that `rank` issues in one round, as one action, or none.

    Args:
        vectors: (size,) of every rank in the window.
        divisor: what sums are divided by before they are stored; None: not at all.
    """
    calls: list[BoundCall] = []
    for (start, stop), some in groupby(steps, key=lambda step: (step.start, step.stop)):
        same = list(some)
        elements = BLOCK_BYTES * torch.get_num_threads() // vectors[rank].itemsize
        for low in range(start, stop, elements):
            calls += _block(same, vectors, span=slice(low, min(stop, low + elements)), rank=rank, op=op, divisor=divisor)
    if not calls:
        return []
    if len(calls) == 2:  # two ranks, one block: where a microsecond counts
        (first, *a), (second, *b) = calls

        def both() -> None:
            first(*a)
            second(*b)

        return [both]

    def act() -> None:
        for function, *arguments in calls:
            function(*arguments)

    return [act]


def _block(
    steps: Sequence[Step], vectors: Mapping[int, torch.Tensor], *, span: slice, rank: int, op: Op, divisor: int | None
) -> list[BoundCall]:
    mine = vectors[rank][span]
    others = [(step, vectors[step.source if step.target == rank else step.target][span]) for step in steps]
    sums = [other for step, other in others if step.via is Via.LOAD and step.reduce]
    if mine.dtype in HALF_DTYPES and sums:
        return _half_block(mine, sums, [other for step, other in others if step.via is Via.STORE], op=op, divisor=divisor)
    single = torch.get_num_threads() == 1 or mine.nbytes < BLOCK_BYTES
    kit = _numpy_kit(op) if single and mine.dtype not in HALF_DTYPES else _torch_kit(op)
    here = kit.form(mine)
    calls: list[BoundCall] = []
    # A mean is divided once: after the last load has added to this rank's block, and before the first store copies it to the
    # others. Steps list their loads before their stores, so the first store is the place; without stores it is the end.
    pending = divisor if sums else None
    for step, other in others:
        there = kit.form(other)
        if step.via is Via.LOAD:
            calls.append((kit.reduce, here, there, here) if step.reduce else (kit.copy, here, there))
            continue
        if pending is not None:
            calls.append((kit.divide, here, pending, here))
            pending = None
        calls.append((kit.reduce, there, here, there) if step.reduce else (kit.copy, there, here))
    if pending is not None:
        calls.append((kit.divide, here, pending, here))
    return calls


def _half_block(
    mine: torch.Tensor, sums: Sequence[torch.Tensor], stores: Sequence[torch.Tensor], *, op: Op, divisor: int | None
) -> list[BoundCall]:
    """bfloat16 and float16: reduced in float32, rounded once, stored."""
    total = torch.empty(mine.shape, dtype=torch.float32, device=mine.device)
    reduce = _torch_kit(op).reduce
    calls: list[BoundCall] = [(_copy, total, mine)]
    if op is Op.SUM:
        calls += [(_add, total, other) for other in sums]
    else:
        calls += [(reduce, total, other, total) for other in sums]
    if divisor is not None:
        calls.append((_divide, total, divisor, total))
    return [*calls, (_copy, mine, total), *((_copy, other, mine) for other in stores)]


@dataclass(frozen=True, kw_only=True)
class _Kit:
    """Functions of one library, and the form of a tensor they take."""

    form: Callable[[torch.Tensor], Any]
    reduce: Callable[[Any, Any, Any], object]
    copy: Callable[[Any, Any], object]
    divide: Callable[[Any, int, Any], object]


def _numpy_kit(op: Op) -> _Kit:
    return _Kit(form=torch.Tensor.numpy, reduce=NUMPY[op], copy=np.copyto, divide=np.divide)


def _torch_kit(op: Op) -> _Kit:
    function = TORCH[op]

    def reduce(one: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> None:
        function(one, other.to(one.dtype), out=out)

    return _Kit(form=lambda tensor: tensor, reduce=reduce, copy=_copy, divide=_divide)


def _add(total: torch.Tensor, values: torch.Tensor) -> None:
    total.add_(values)


def _copy(target: torch.Tensor, values: torch.Tensor) -> None:
    target.copy_(values)


def _divide(values: torch.Tensor, divisor: int, out: torch.Tensor) -> None:
    torch.div(values, divisor, out=out)
