"""The form in which tensors move between ranks: what is refused, contiguous bytes, and what backends can reduce."""

from __future__ import annotations

import torch

from tatami.comm.reduction import HALF_DTYPES, Op
from tatami.comm.staging import from_host, is_movable
from tatami.errors import InputError

DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.int32, torch.uint8, torch.bool)
MAX_TAG = 32767 - 1
"""MPI guarantees tags up to 32767; the last one is for the backends' own messages."""


def check_tensor(operation: str, tensor: torch.Tensor) -> None:
    """
    Raises:
        InputError: a device, dtype or layout that is not moved.
    """
    if not is_movable(tensor):
        raise InputError(f"{operation}: a tensor of the device 'meta' has a shape and no values that could be moved")
    if tensor.dtype not in DTYPES:
        names = ", ".join(str(dtype).removeprefix("torch.") for dtype in DTYPES)
        raise InputError(f"{operation}: {tensor.dtype} is not moved between ranks; convert it to one of: {names}")
    if tensor.layout != torch.strided:
        raise InputError(f"{operation}: a {tensor.layout} tensor is not moved between ranks; convert it with .to_dense()")


def check_same_dtype(operation: str, tensor: torch.Tensor, out: torch.Tensor) -> None:
    """
    Raises:
        InputError: as `check_tensor`, or dtypes that differ.
    """
    check_tensor(operation, tensor)
    check_tensor(operation, out)
    if tensor.dtype != out.dtype:
        raise InputError(f"{operation}: tensor is {tensor.dtype} but out is {out.dtype}; they must be the same")


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor: (bytes,) of uint8."""
    return tensor.detach().view(-1).view(torch.uint8)


def is_same(form: torch.Tensor, tensor: torch.Tensor) -> bool:
    """Whether what is written to `form` is in `tensor` already."""
    return form.device == tensor.device and form.data_ptr() == tensor.data_ptr()


def bring_back(form: torch.Tensor, tensor: torch.Tensor) -> None:
    """The values of `form` into the `tensor` it stands for, unless they share their memory."""
    if not is_same(form, tensor):
        values = form.view(torch.bool) if tensor.dtype == torch.bool and form.dtype == torch.uint8 else form
        if values.device == tensor.device:
            tensor.detach().copy_(values)
        else:
            from_host(values, tensor)


def reducible(tensor: torch.Tensor, op: Op) -> tuple[torch.Tensor, Op]:
    """A contiguous form of `tensor` that every backend can reduce: halves as float32, bool as uint8 (where SUM means `or`)."""
    flat = tensor.detach().contiguous()
    if flat.dtype in HALF_DTYPES:
        return flat.float(), op
    if flat.dtype == torch.bool:
        return flat.view(torch.uint8), Op.MAX if op is Op.SUM else op
    return flat, op
