"""Differentiable sums over ranks: allreduce, reduce, reduce_scatter: an exchange, and a sum in the order of the ranks."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Never

import torch

from tatami.collective.direct import sends_whole
from tatami.comm.base import AbstractCommunicator
from tatami.functions.collectives import check_order, check_root, collective, one_for_each
from tatami.functions.replay import replayed
from tatami.functions.structure import Structure, flatten, unflatten

_SIGNED = {torch.uint16: torch.int16, torch.uint32: torch.int32, torch.uint64: torch.int64}
"""Torch does not add these; the sum of what has the same bits has the same bits."""


def allreduce(x: Structure, comm: AbstractCommunicator, *extra: Never) -> Structure:
    """The sum over all ranks of `x`, the same bits on every rank. Backward sums the gradients of all ranks.

    A loss that every rank computes alike from it counts once for each rank: see `tatami.functions.share`.

    Raises:
        InputError: something that is not a tensor.
        CommError: shapes or dtypes differ, or ranks disagree otherwise; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("allreduce", comm, extra)

    def run() -> Structure:
        tensors, content = flatten(x, operation="allreduce")
        # As the all-reduce `direct`, whose two phases are exchanges with a backward of their own.
        if comm.size == 1 or sends_whole(comm.size, sum(tensor.nbytes for tensor in tensors), element_bytes=1):
            return _summed("allreduce", comm, dict.fromkeys(range(comm.size), x))
        shapes = [tensor.shape for tensor in tensors]
        pieces = [tensor.reshape(-1).tensor_split(comm.size) for tensor in tensors]
        parts = {rank: [piece[rank] for piece in pieces] for rank in range(comm.size)}
        mine = _summed("allreduce", comm, parts)
        whole = collective("allreduce", comm, dict.fromkeys(range(comm.size), mine), sources=range(comm.size))[0]
        sums = [torch.cat([whole[rank][i] for rank in range(comm.size)]).view(shape) for i, shape in enumerate(shapes)]
        return unflatten(content.spec, iter(sums))

    return replayed("allreduce", run)


def reduce(x: Structure, comm: AbstractCommunicator, *extra: Never, root: int = 0) -> Any:
    """The sum over all ranks of `x`, on `root`. Backward gives the gradient of `root` to all ranks.

    Returns:
        the sum on `root`; a delegate elsewhere, see `send`.

    Raises:
        InputError: an unknown rank, something that is not a tensor.
        CommError: shapes or dtypes differ, or ranks disagree otherwise; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("reduce", comm, extra)
    check_root("reduce", comm, root)

    def run() -> Any:
        everyone = range(comm.size) if comm.rank == root else ()
        parts, delegate = collective("reduce", comm, {root: x}, sources=everyone, root=root, pattern=x, same_shapes=True)
        return _add_up([parts[rank] for rank in everyone]) if comm.rank == root else delegate

    return replayed("reduce", run)


def reduce_scatter(xs: Sequence[Structure], comm: AbstractCommunicator, *extra: Never) -> Structure:
    """The sum over all ranks of part `rank` of their sequences `xs`. Backward gathers the gradients of all parts on all ranks.

    Raises:
        InputError: a number of parts other than that of the ranks, something that is not a tensor.
        CommError: shapes or dtypes differ, or ranks disagree otherwise; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("reduce_scatter", comm, extra)

    def run() -> Structure:
        return _summed("reduce_scatter", comm, dict(enumerate(one_for_each("reduce_scatter", comm, xs))))

    return replayed("reduce_scatter", run)


def _summed(name: str, comm: AbstractCommunicator, parts: dict[int, Structure]) -> Structure:
    """Give each rank its part, and sum what comes."""
    everyone = range(comm.size)
    came = collective(name, comm, parts, sources=everyone, pattern=parts[comm.rank], same_shapes=True)[0]
    return _add_up([came[rank] for rank in everyone])


def _add_up(structures: Sequence[Structure]) -> Structure:
    """Leaf by leaf, in order; floats of fewer bits in float32."""
    columns = [flatten(each, operation="sum")[0] for each in structures]
    spec = flatten(structures[0], operation="sum")[1].spec
    return unflatten(spec, (_sum(column) for column in zip(*columns, strict=True)))


def _sum(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    dtype = tensors[0].dtype
    if dtype in _SIGNED:
        return _sum([tensor.view(_SIGNED[dtype]) for tensor in tensors]).view(dtype)
    short = dtype.is_floating_point and dtype.itemsize < torch.float32.itemsize
    total, *others = [tensor.float() for tensor in tensors] if short else tensors
    for tensor in others:
        total = total + tensor if dtype != torch.bool else total | tensor
    return total.to(dtype)
