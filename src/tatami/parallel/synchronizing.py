"""Making one network equal on all ranks: its weights, its gradients, its running statistics."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from itertools import groupby

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tatami.comm.agreement import debugging, problems_of, same_everywhere
from tatami.comm.allreduce import AUTO, tuned_allreduce
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, NotFiniteError

_LAZY = (UninitializedParameter, UninitializedBuffer)


def broadcast_model(
    model: nn.Module,
    comm: AbstractCommunicator,
    *,
    root: int = 0,
    only_different: bool = False,
    where: str = "broadcast_model",
) -> None:
    """Parameters and buffers of `root` become all ranks'. Collective.

    Args:
        model: the same network on all ranks.
        comm: the ranks.
        root: whose values count.
        only_different: send, and write to, only tensors whose bytes differ between ranks: what all have read from one file is
            not sent, and where it is a part of the file that was mapped it stays so.
        where: the operation that needs it, for messages.

    Raises:
        InputError: the networks differ in more than values (says where); a lazy layer that has no shape yet.
    """
    check_same_tensors(comm, {**dict(model.named_parameters()), **dict(model.named_buffers())}, where=where)
    tensors = [*model.parameters(), *model.buffers()]
    if only_different:
        told = zip(*comm.allgather_object([_digest(tensor) for tensor in tensors]), strict=True)
        tensors = [tensor for tensor, digests in zip(tensors, told, strict=True) if len(set(digests)) > 1]
    for tensor in tensors:
        comm.bcast(tensor, root=root)


def _digest(tensor: torch.Tensor) -> bytes:
    """Equal for equal bytes."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).digest()


def average_gradients(model: nn.Module, comm: AbstractCommunicator, *, algorithm: str = AUTO) -> None:
    """Every gradient becomes the mean over the ranks, in place. Collective.

    A rank without a gradient that another has counts with zeros; what no rank has stays None. Equal weights: where ranks have
    different numbers of samples, `DataParallel` and `MultiNodeOptimizer` weigh them.

    Raises:
        InputError: a gradient that is not dense; a lazy layer that has no shape yet.
        NotFiniteError: in debug mode (see `tatami.functions.debug`), a gradient that is NaN or infinite; says where.
    """
    named = dict(model.named_parameters())
    _refuse_lazy(named, where="average_gradients")
    if debugging():
        check_finite(comm, list(named), list(named.values()))
    parameters = sorted(named.values(), key=lambda each: str(each.dtype))
    for _, group in groupby(parameters, key=lambda each: each.dtype):
        same = list(group)
        for each in same:
            if each.grad is not None and each.grad.layout != torch.strided:
                raise InputError(f"a gradient is {each.grad.layout}; ranks average dense gradients only")
        has = torch.tensor([each.grad is not None for each in same], dtype=same[0].dtype, device=same[0].device)
        flat = [each.new_zeros(each.numel()) if each.grad is None else each.grad.flatten() for each in same]
        vector = torch.cat([*flat, has])
        tuned_allreduce(vector, comm, algorithm=algorithm)
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


def check_same_tensors(comm: AbstractCommunicator, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Whether all ranks have the same tensors, except for their values. Collective.

    Raises:
        InputError: names the first rank that differs from rank 0, and in what; a parameter that has no shape yet.
    """
    same_everywhere(comm, tensor_facts(tensors), where=where)
    _refuse_lazy(tensors, where=where)


def tensor_facts(tensors: Mapping[str, torch.Tensor]) -> dict[str, str]:
    """What ranks compare of their parameters and buffers: shape, dtype, and whether a parameter is trained."""
    return {name: _described(tensor) for name, tensor in tensors.items()}


def check_finite(
    comm: AbstractCommunicator, names: Sequence[str], parameters: Sequence[nn.Parameter], *, step: int | None = None
) -> None:
    """Whether every rank's gradients are finite, asked before they are averaged. Collective.

    Raises:
        NotFiniteError: on all ranks; names the first rank and parameter.
    """
    pairs = zip(names, parameters, strict=True)
    bad = next((name for name, each in pairs if each.grad is not None and not is_finite(each.grad)), None)
    refuse_not_finite(comm, bad, step=step)


def is_finite(gradient: torch.Tensor) -> bool:
    """Whether all of its values are."""
    return bool(gradient.isfinite().all())


def refuse_not_finite(comm: AbstractCommunicator, name: str | None, *, step: int | None) -> None:
    """Raise where a rank has a gradient that is not finite, that of parameter `name`. Collective.

    Raises:
        NotFiniteError: on all ranks; names the first rank and its parameter.
    """
    for rank, bad in problems_of(comm, name).items():
        when = "" if step is None else f" in step {step}"
        raise NotFiniteError(
            f"the gradient of {bad} on rank {rank} of {comm.size} is not finite{when}: the weights would diverge on all "
            "ranks. Look for bad samples there, lower the learning rate, or clip gradients",
            rank=rank,
            iteration=step,
        )


def _refuse_lazy(tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    for name, tensor in tensors.items():
        if isinstance(tensor, _LAZY):
            raise InputError(
                f"{where}: {name} belongs to a lazy layer and has no shape yet; run one forward pass on all ranks first"
            )


def _described(tensor: torch.Tensor) -> str:
    if isinstance(tensor, _LAZY):
        return "without a shape"
    frozen = " frozen" if isinstance(tensor, nn.Parameter) and not tensor.requires_grad else ""
    return f"{tuple(tensor.shape)} {str(tensor.dtype).removeprefix('torch.')}{frozen}"
