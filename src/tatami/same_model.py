"""Whether all ranks have the same network, and making it so: its parameters and buffers."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter

from tatami.comm.agreement import same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError

_LAZY = (UninitializedParameter, UninitializedBuffer)


def broadcast_model(
    model: nn.Module, comm: AbstractCommunicator, *, root: int = 0, only_different: bool = False, where: str = "broadcast_model"
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
    named = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    check_same_tensors(comm, named, where=where)
    for name, tensor in named.items():
        if tensor.layout != torch.strided:
            raise InputError(
                f"{where}: {name} is a {tensor.layout} tensor, and ranks share dense ones only; keep it as {name}.to_dense(), "
                "and call .to_sparse() in forward"
            )
    if only_different:
        told = zip(*comm.allgather_object([_digest(tensor) for tensor in named.values()]), strict=True)
        named = {name: tensor for (name, tensor), digests in zip(named.items(), told, strict=True) if len(set(digests)) > 1}
    for name, tensor in named.items():
        if tensor.is_complex():
            raise InputError(
                f"{where}: {name} is {str(tensor.dtype).removeprefix('torch.')}, and ranks share real numbers only; keep it as "
                f"torch.view_as_real({name}), and call torch.view_as_complex in forward"
            )
        comm.bcast(tensor, root=root)


def check_same_tensors(comm: AbstractCommunicator, tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Whether all ranks have the same tensors, except for their values. Collective.

    Raises:
        InputError: names the first rank that differs from rank 0, and in what; a parameter that has no shape yet.
    """
    same_everywhere(comm, {name: _described(tensor) for name, tensor in tensors.items()}, where=where)
    refuse_lazy(tensors, where=where)


def _digest(tensor: torch.Tensor) -> bytes:
    """Equal for equal bytes."""
    values = tensor.detach().cpu().contiguous().view(-1).view(torch.uint8)
    return hashlib.blake2b(values.numpy().data, digest_size=16).digest()


def refuse_lazy(tensors: Mapping[str, torch.Tensor], *, where: str) -> None:
    """Raise where a parameter of a lazy layer has no shape yet."""
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
