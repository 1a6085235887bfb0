"""Making one network equal on all ranks: its weights, its gradients, its running statistics."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tatami.comm.allreduce import AUTO, all_reduce
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, NotFiniteError

_LAZY = (UninitializedParameter, UninitializedBuffer)


def broadcast_model(model: nn.Module, comm: AbstractCommunicator, *, root: int = 0) -> None:
    """Parameters and buffers of `root` become everyone's. Collective.

    Raises:
        InputError: the networks differ in more than values (says where); a lazy layer that has no shape yet.
    """
    named = [*model.named_parameters(), *model.named_buffers()]
    check_same_tensors(comm, [name for name, _ in named], [tensor for _, tensor in named])
    for _, tensor in named:
        comm.bcast(tensor, root=root)


def average_gradients(model: nn.Module, comm: AbstractCommunicator, *, algorithm: str = AUTO) -> None:
    """Every gradient becomes the mean over the ranks, in place. Collective.

    A rank without a gradient that another has counts with zeros; what no rank has stays None. Equal weights: where ranks have
    different numbers of samples, `DataParallel` and `MultiNodeOptimizer` weigh them.

    Raises:
        InputError: a gradient that is not dense.
    """
    parameters = sorted(model.parameters(), key=lambda each: str(each.dtype))
    for _, group in groupby(parameters, key=lambda each: each.dtype):
        same = list(group)
        for each in same:
            if each.grad is not None and each.grad.layout != torch.strided:
                raise InputError(f"a gradient is {each.grad.layout}; ranks average dense gradients only")
        has = torch.tensor([each.grad is not None for each in same], dtype=same[0].dtype)
        flat = [torch.zeros(each.numel(), dtype=each.dtype) if each.grad is None else each.grad.flatten() for each in same]
        vector = torch.cat([*flat, has])
        all_reduce(vector, comm, algorithm=algorithm)
        *sums, counts = torch.split(vector, [*(each.numel() for each in same), len(same)])
        for each, values, count in zip(same, sums, counts.tolist(), strict=True):
            if count:
                each.grad = (values / comm.size).view_as(each)


def average_buffers(model: nn.Module, comm: AbstractCommunicator) -> None:
    """Floating-point buffers (the running statistics of batch norm) become the mean over the ranks. Collective.

    Others, counters say, are left alone. Call it before validation: each rank has seen other samples.
    """
    for buffer in model.buffers():
        if buffer.is_floating_point():
            comm.allreduce(buffer)
            buffer.div_(comm.size)


def check_same_tensors(comm: AbstractCommunicator, names: Sequence[str], tensors: Sequence[torch.Tensor]) -> None:
    """Whether all ranks have the same tensors, but for their values. Collective.

    Raises:
        InputError: names the first rank that differs from rank 0, and in what; a parameter that has no shape yet.
    """
    mine = [
        f"{name}, which has no shape yet"
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer)
        else _described(name, tensor)
        for name, tensor in zip(names, tensors, strict=True)
    ]
    given = comm.allgather_object(mine)
    for rank, theirs in enumerate(given):
        if theirs != given[0]:
            pairs = zip([*given[0], "nothing more"], [*theirs, "nothing more"], strict=False)
            first, other = next((one, two) for one, two in pairs if one != two)
            raise InputError(f"the networks differ: rank 0 has {first}, rank {rank} has {other}")
    for name, tensor in zip(names, tensors, strict=True):
        if isinstance(tensor, _LAZY):
            raise InputError(f"{name} belongs to a lazy layer and has no shape yet; run one forward pass on all ranks first")


def check_finite(comm: AbstractCommunicator, names: Sequence[str], parameters: Sequence[nn.Parameter], *, step: int) -> None:
    """Whether every rank's gradients are finite, asked before they are averaged. Collective.

    Raises:
        NotFiniteError: on all ranks; names the first rank and parameter.
    """
    pairs = zip(names, parameters, strict=True)
    bad = next((name for name, each in pairs if each.grad is not None and not bool(each.grad.isfinite().all())), None)
    for rank, name in enumerate(comm.allgather_object(bad)):
        if name is not None:
            raise NotFiniteError(
                f"the gradient of {name} on rank {rank} of {comm.size} is not finite in step {step}: the weights would diverge "
                "on all ranks. Look for bad samples there, lower the learning rate, or clip gradients",
                rank=rank,
                iteration=step,
            )


def _described(name: str, tensor: torch.Tensor) -> str:
    if isinstance(tensor, _LAZY):
        return f"{name}, which has no shape yet"
    return f"{name} {tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}"
