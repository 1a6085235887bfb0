"""The collective functions, once: how a rank calls each of them, and what it is given, of the inputs of all ranks."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from tatami import functions
from tatami.comm import AbstractCommunicator

Tensors = Sequence[torch.Tensor]
Parts = Callable[[torch.Tensor, int], Tensors]
"""A tensor, and a number of ranks -> the part of each."""


class Operation(NamedTuple):
    """What a rank does, and what comes of it; both are given the root, and how a rank's input is divided.

    Attributes:
        call: this rank's outputs of this rank's input; of a rank that is not the root of a gather or a reduction none.
        expected: a rank's outputs of all ranks' inputs, without communication.
    """

    call: Callable[[torch.Tensor, AbstractCommunicator, int, Parts], Tensors]
    expected: Callable[[Tensors, int, int, Parts], Tensors]


def rolled(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """A part for each rank, of one shape."""
    return [torch.roll(x, rank) * (rank + 1) for rank in range(size)]


def cut(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Parts of different sizes, one of them empty if there are many."""
    sizes = [x.shape[0] // size] * size
    sizes[0] += x.shape[0] % size
    if size > 2:
        sizes[0], sizes[1] = sizes[0] + sizes[1], 0
    return list(torch.split(x, sizes))


def _by_all(name: str, x: torch.Tensor, comm: AbstractCommunicator, _root: int, parts: Parts) -> list[torch.Tensor]:
    given = parts(x, comm.size) if name in {"alltoall", "reduce_scatter"} else x
    result = getattr(functions, name)(given, comm)
    return list(result) if isinstance(result, tuple) else [result]


def _from_root(name: str, x: torch.Tensor, comm: AbstractCommunicator, root: int, parts: Parts) -> list[torch.Tensor]:
    given: Any = parts(x, comm.size) if name == "scatter" else x
    return [getattr(functions, name)(given if comm.rank == root else None, comm, root=root)]


def _to_root(name: str, x: torch.Tensor, comm: AbstractCommunicator, root: int, _parts: Parts) -> list[torch.Tensor]:
    result = getattr(functions, name)(x, comm, root=root)
    return [] if comm.rank != root else list(result) if isinstance(result, tuple) else [result]


def _around(x: torch.Tensor, comm: AbstractCommunicator, _root: int, _parts: Parts) -> list[torch.Tensor]:
    if comm.size == 1:
        return [x * 1]
    return [functions.sendrecv(x, comm, dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size, tag=2)]


def _sum(xs: Tensors) -> torch.Tensor:
    return torch.stack(list(xs)).sum(0)


OPERATIONS: dict[str, Operation] = {
    "bcast": Operation(partial(_from_root, "bcast"), lambda xs, _, root, __: [xs[root]]),
    "gather": Operation(partial(_to_root, "gather"), lambda xs, rank, root, _: xs if rank == root else []),
    "scatter": Operation(partial(_from_root, "scatter"), lambda xs, rank, root, parts: [parts(xs[root], len(xs))[rank]]),
    "allgather": Operation(partial(_by_all, "allgather"), lambda xs, *_: xs),
    "alltoall": Operation(partial(_by_all, "alltoall"), lambda xs, rank, _, parts: [parts(x, len(xs))[rank] for x in xs]),
    "allreduce": Operation(partial(_by_all, "allreduce"), lambda xs, *_: [_sum(xs)]),
    "reduce": Operation(partial(_to_root, "reduce"), lambda xs, rank, root, _: [_sum(xs)] if rank == root else []),
    "reduce_scatter": Operation(
        partial(_by_all, "reduce_scatter"), lambda xs, rank, _, parts: [_sum([parts(x, len(xs))[rank] for x in xs])]
    ),
    "sendrecv": Operation(_around, lambda xs, rank, *_: [xs[rank - 1]]),
}
RAGGED = {"bcast", "gather", "scatter", "allgather", "alltoall", "sendrecv"}
"""Those whose inputs may be of another shape on each rank."""
