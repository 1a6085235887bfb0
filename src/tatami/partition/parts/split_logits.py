"""Logits of which every rank of a replica has some classes, and their cross-entropy without gathering them.

`SplitLogits` is a tensor of the whole shape that holds the part of this rank. Views that leave the last axis alone keep it
split, and `torch.nn.functional.cross_entropy` sums a few numbers a row over the replica in place of all logits: the
logarithm of every rank's sum of exponentials, and the logit of the target. Whatever else is done with it gathers it first,
so every loss is exact, and those that are not a cross-entropy cost a sum of all logits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable
from torch.utils import _pytree as pytree

from tatami.errors import ModelError
from tatami.runtime.context import ModuleContext
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.tiling import Span

aten = torch.ops.aten

_HALVES = (torch.float16, torch.bfloat16)


class SplitLogits(torch.Tensor):
    """(..., classes) of which the classes `span` are here; on ranks of one replica."""

    part: torch.Tensor
    span: Span
    replica: ReplicaComm

    @staticmethod
    def __new__(cls, part: torch.Tensor, span: Span, total: int, replica: ReplicaComm) -> SplitLogits:
        made = torch.Tensor._make_wrapper_subclass(cls, (*part.shape[:-1], total), dtype=part.dtype, device=part.device)
        assert isinstance(made, SplitLogits)
        made.part, made.span, made.replica = part, span, replica
        return made

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"SplitLogits(shape={tuple(self.shape)}, classes {self.span.start} to {self.span.stop - 1} here)"

    def like(self, part: torch.Tensor) -> SplitLogits:
        """The same classes of something else."""
        return SplitLogits(part, self.span, self.shape[-1], self.replica)

    def gathered(self) -> torch.Tensor:
        """All classes, as an ordinary tensor. Collective over the replica."""
        whole = self.part.new_zeros(self.shape)
        whole[..., self.span.slice()] = self.part
        self.replica.sum_(whole, exact=True)
        return whole

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.nn.functional.cross_entropy:
            split = _cross_entropy(*args, **kwargs)
            if split is not None:
                return split
        if func is torch.Tensor.__setitem__:
            raise _changed("an assignment to some of its elements")
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if any(argument.alias_info is not None and argument.alias_info.is_write for argument in func._schema.arguments):
            raise _changed(str(func))
        rule = _RULES.get(func)
        result = rule(func, *args, **kwargs) if rule is not None else None
        if result is not None:
            return result
        whole: dict[int, torch.Tensor] = {}

        def gather(value: Any) -> Any:
            if not isinstance(value, SplitLogits):
                return value
            if id(value) not in whole:
                whole[id(value)] = value.gathered()
            return whole[id(value)]

        args, kwargs = pytree.tree_map(gather, (args, kwargs))
        return func(*args, **kwargs)


def _changed(what: str) -> ModelError:
    return ModelError(
        f"the output of a layer that is split over the vocabulary is changed in place ({what}), which changes only what is "
        "here. Make a new tensor of it, as logits = logits.masked_fill(...) does"
    )


def split_logits(part: torch.Tensor, total: int, context: ModuleContext) -> torch.Tensor:
    """The logits of all `total` classes, of which this rank has `part` (..., classes_here); whole without gradients."""
    replica, span = context.rank.replica.now, context.units[0]()
    if replica.comm is None:  # a rank that was left out has no class, and no sample
        return part if part.shape[-1] == total else torch.nn.functional.pad(part, (0, total - part.shape[-1]))
    if not (torch.is_grad_enabled() and part.requires_grad):
        return SplitLogits(part.detach(), span, total, replica).gathered()
    made: torch.Tensor = _Split.apply(part, total, span, replica)  # type: ignore[no-untyped-call]
    return made


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: torch.Tensor, total: int, span: Span, replica: ReplicaComm) -> torch.Tensor:
        ctx.span = span
        ctx.set_materialize_grads(False)
        return SplitLogits(part.detach(), span, total, replica)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None, None, None]:
        if grad is None:
            return None, None, None, None
        part = grad.part if isinstance(grad, SplitLogits) else grad[..., ctx.span.slice()]
        return part.contiguous(), None, None, None


# -- what keeps logits split ----------------------------------------------------------------------------------------------


def _elementwise(func: Any, *args: Any, **kwargs: Any) -> SplitLogits | None:
    """An operation on each element, with numbers or with logits that are split alike."""
    split = [each for each in args if isinstance(each, SplitLogits)]
    others = [each for each in args if isinstance(each, torch.Tensor) and not isinstance(each, SplitLogits) and each.dim()]
    first = split[0] if split else None
    if first is None or others or any(each.shape != first.shape or each.span != first.span for each in split):
        return None
    return first.like(func(*(each.part if isinstance(each, SplitLogits) else each for each in args), **kwargs))


def _view(_: Any, x: SplitLogits, sizes: Any) -> SplitLogits | None:
    sizes = list(sizes)
    if sizes and sizes[-1] == -1 and _rest(x.numel(), sizes[:-1]) == x.shape[-1]:
        sizes[-1] = x.shape[-1]
    if not x.shape[-1] or not sizes or sizes[-1] != x.shape[-1]:
        return None
    rows = x.numel() // x.shape[-1]
    sizes = [_rest(rows, sizes[:-1]) if size == -1 else size for size in sizes[:-1]]
    return x.like(x.part.reshape([*sizes, x.part.shape[-1]]))


def _rest(elements: int, sizes: list[int]) -> int:
    """The length of the axis that is -1, or would be if it were there."""
    known = 1
    for size in sizes:
        known *= size if size != -1 else 1
    return elements // known if known else 0


def _slice(func: Any, x: SplitLogits, dim: int = 0, start: Any = None, end: Any = None, step: int = 1) -> SplitLogits | None:
    if dim % x.dim() == x.dim() - 1:
        whole = step == 1 and not start and (end is None or end >= x.shape[-1])
        return x.like(func(x.part, 0)) if whole else None
    return x.like(func(x.part, dim, start, end, step))


def _slice_backward(func: Any, grad: torch.Tensor, sizes: Any, dim: int, start: int, end: int, step: int) -> SplitLogits | None:
    if not isinstance(grad, SplitLogits):
        return None
    if dim % grad.dim() == grad.dim() - 1:
        return grad.like(grad.part.clone()) if grad.shape[-1] == sizes[-1] else None
    return grad.like(func(grad.part, [*sizes[:-1], grad.part.shape[-1]], dim, start, end, step))


def _sized(func: Any, x: SplitLogits, *args: Any, **kwargs: Any) -> SplitLogits:
    return x.like(func(x.part, *args, **kwargs))


_RULES: dict[Any, Callable[..., SplitLogits | None]] = {
    **dict.fromkeys(
        (aten.detach.default, aten.alias.default, aten.clone.default, aten._to_copy.default, aten.zeros_like.default,
         aten.ones_like.default, aten.empty_like.default), _sized),
    **dict.fromkeys(
        (aten.mul.Tensor, aten.mul.Scalar, aten.div.Tensor, aten.div.Scalar, aten.add.Tensor, aten.sub.Tensor, aten.neg.default,
         aten.tanh.default, aten.tanh_backward.default), _elementwise),
    **dict.fromkeys((aten.view.default, aten._unsafe_view.default, aten.reshape.default), _view),
    aten.slice.Tensor: _slice,
    aten.slice_backward.default: _slice_backward,
}  # fmt: skip


# -- the cross-entropy ------------------------------------------------------------------------------------------------------


def _cross_entropy(
    input: Any,
    target: Any,
    weight: Any = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> torch.Tensor | None:
    """`torch.nn.functional.cross_entropy` of split logits; None where it is to be computed on gathered ones."""
    plain = weight is None and size_average is None and reduce is None and not label_smoothing
    if not plain or not isinstance(input, SplitLogits) or input.dim() not in (1, 2) or target.is_floating_point():
        return None
    if target.shape != input.shape[:-1] or not isinstance(ignore_index, int):
        return None
    counts = target != ignore_index
    bad = counts & ((target < 0) | (target >= input.shape[-1]))
    if bool(bad.any()):
        raise IndexError(f"Target {int(target[bad].flatten()[0])} is out of bounds.")  # as torch says it
    losses: torch.Tensor = _Losses.apply(input, target, counts)  # type: ignore[no-untyped-call]
    if reduction == "none":
        return losses
    return losses.sum() / counts.sum() if reduction == "mean" else losses.sum()


class _Losses(torch.autograd.Function):
    """(rows, classes) to (rows,): the log of the sum of exponentials less the logit of the target, 0 where none counts."""

    @staticmethod
    def forward(ctx: Any, logits: SplitLogits, target: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        comm = logits.replica.comm
        assert comm is not None
        part = logits.part.float() if logits.dtype in _HALVES else logits.part
        span = logits.span
        here = counts & (target >= span.start) & (target < span.stop)
        place = (target - span.start).clamp(0, max(span.size - 1, 0))
        # One row for each rank, and one for the logit of the target, which one of them has.
        table = part.new_zeros(comm.size + 1, *target.shape)
        if span.size:
            table[comm.rank] = torch.logsumexp(part, -1)
            table[-1] = torch.where(here, part.gather(-1, place.unsqueeze(-1)).squeeze(-1), 0.0)
        else:
            table[comm.rank] = -torch.inf
        logits.replica.sum_(table, exact=True)
        total = torch.logsumexp(table[:-1], 0)
        ctx.save_for_backward(part, total, place, here, counts)
        ctx.logits = logits.detach()
        return torch.where(counts, total - table[-1], 0.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        part, total, place, here, counts = ctx.saved_tensors
        result = torch.exp(part - total.unsqueeze(-1))
        if part.shape[-1]:
            result.scatter_add_(-1, place.unsqueeze(-1), -here.unsqueeze(-1).to(result.dtype))
        result = result * torch.where(counts, grad, 0.0).unsqueeze(-1)
        logits: SplitLogits = ctx.logits
        return logits.like(result.to(logits.dtype)), None, None
