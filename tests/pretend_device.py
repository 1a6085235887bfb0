"""A device that is not there: tensors that lie on "maia:0" and have their values in host memory.

It shows without a card what a card would show by an error: an operation on tensors of the device and of the CPU together is
refused, a tensor that is made without a device lies on the CPU, and nothing of it can be read by its address. It shows nothing
about speed, streams, CUDA's own arithmetic or NCCL.

Operations are carried out on the values. To autograd, whose devices have threads of their own, it is torch's device "meta".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

DEVICE = torch.device("maia:0")
_META = torch.device("meta")
_DATA: Any = torch.Tensor.data
_BETWEEN = {torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default}
"""What may take tensors of both."""


class PretendTensor(torch.Tensor):
    """A tensor of the device; `held` are its values."""

    held: torch.Tensor
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @staticmethod
    def __new__(cls, held: torch.Tensor, requires_grad: bool = False) -> PretendTensor:
        if isinstance(held, PretendTensor):
            held = held.held
        made = torch.Tensor._make_wrapper_subclass(
            cls, held.size(), strides=held.stride(), storage_offset=held.storage_offset(), dtype=held.dtype, device=_META,
            requires_grad=requires_grad,
        )  # fmt: skip
        made.held = held.detach()
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"PretendTensor({self.held!r})"

    # Properties of the class, and no `__torch_function__`, which is off while autograd runs.
    device: Any = property(lambda _: DEVICE)
    data: Any = property(lambda self: self.detach(), lambda self, other: self._become(other))

    def _become(self, other: torch.Tensor) -> None:
        assert isinstance(other, PretendTensor)
        _DATA.__set__(self, other)
        self.held = other.held

    def data_ptr(self) -> int:
        raise RuntimeError(f"the address of a tensor on {DEVICE}")

    def tolist(self) -> Any:
        return self.held.tolist()

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        return _carry_out(func, args, kwargs or {})


class PretendDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """For the length of a with-block, tensors can be made on `DEVICE`, in this thread."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _carry_out(func, args, kwargs or {})


def _carry_out(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    given = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    here = [leaf for leaf in given if isinstance(leaf, PretendTensor)]
    there = [leaf for leaf in given if not isinstance(leaf, PretendTensor) and leaf.dim()]
    if here and there and func not in _BETWEEN:
        raise RuntimeError(f"{func}: tensors on {DEVICE} and on {there[0].device}")
    asked = kwargs.get("device")
    wanted = bool(here) if asked is None else asked.type == DEVICE.type or (bool(here) and asked.type == "meta")
    if asked is not None and (wanted or here):
        kwargs = {**kwargs, "device": torch.device("cpu")}
    held_args, held_kwargs = pytree.tree_map(
        lambda leaf: leaf.held if isinstance(leaf, PretendTensor) else leaf, (args, kwargs)
    )
    result = func(*held_args, **held_kwargs)
    written = _written(func, args, kwargs)
    if written is not None:
        return written
    if not wanted:
        return result
    return pytree.tree_map(lambda leaf: PretendTensor(leaf) if type(leaf) is torch.Tensor else leaf, result)


def _written(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """The argument that an operation writes to and returns; None where it returns something new."""
    if (
        not func._schema.returns
        or func._schema.returns[0].alias_info is None
        or not func._schema.returns[0].alias_info.is_write
    ):
        return None
    for index, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            return args[index] if index < len(args) else kwargs[argument.name]
    return None
