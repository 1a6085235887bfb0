"""Losses that a rank cannot compute of its own samples, as far as the graph of the loss shows it.

The mean over a batch is the weighted mean of the means over its parts; the root of it is not, nor is a mean that divides by
class weights or by the number of targets that count. Such a loss shows in the operations between it and the output of the
network: the last ones, of single numbers, may only add and scale what is reduced. What else couples samples, as a contrastive
loss does, is found by `TiledModel.check_loss`, which computes the loss of parts.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from tatami.errors import InputError
from tatami.gradients.passes import is_output, leads_to

_LINEAR = frozenset({
    "Add", "Sub", "Neg", "Rsub", "View", "ReshapeAlias", "Sum", "Nansum", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy",
    "Clone", "Alias", "Mean", "Stack", "Select", "Expand",
})  # fmt: skip
_PRODUCTS = frozenset({"Mul", "Div"})
_BENT = frozenset({
    "Sqrt", "Abs", "Log", "Log1P", "Exp", "Pow", "Relu", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Sigmoid",
    "Tanh", "Softplus", "LogSigmoid", "Reciprocal",
})  # fmt: skip
"""Operations that are not linear in a single number; element-wise ones on samples do not matter."""
_COUPLING = frozenset({
    "LinalgVectorNorm", "Norm", "Max", "Min", "Amax", "Amin", "Aminmax", "Std", "StdMean", "Var", "VarMean", "Logsumexp",
    "Prod", "Median", "Nanmedian", "Mode", "Kthvalue", "Topk", "Sort", "Cummax", "Cummin", "Cumsum", "Cumprod", "Logcumsumexp",
    "Softmax", "LogSoftmax",
})  # fmt: skip
"""Operations that combine many numbers into one, or that make each of many depend on the others."""
_TURNING = frozenset({"T", "Transpose", "Permute", "Flip"})
_CROSS_ENTROPIES = ("NllLoss", "NllLoss2D")
_CHOOSING = ("Index", "MaskedSelect")
_OVER_BATCH = "OverBatch"
_REMEDY = (
    "A rank sees a part of the batch: the loss must be the mean, or the sum, of what its samples give one by one. Take "
    "model.over_batch(...) of the means that such a loss is made of, which gives those of the global batch"
)


def refuse_coupling_loss(roots: Iterable[Any], *, samples: int) -> None:
    """
    Args:
        roots: the last nodes of losses.
        samples: of this rank, where the loss is their mean; 0 where it is their sum.

    Raises:
        InputError: a loss is no mean of what its samples give; names the operation. The same on all ranks.
    """
    waiting, seen = [(root, True) for root in roots if root is not None], set[Any]()
    while waiting:
        node, is_number = waiting.pop()
        name = _operation(node)
        if (node, is_number) in seen or is_output(node) or name == _OVER_BATCH:
            continue
        seen.add((node, is_number))
        below = [other for other, _ in node.next_functions if other is not None]
        if name in _COUPLING and _is_over_samples(node):
            raise _couples(name)
        is_number = is_number and math.prod(_shape(node)) == 1
        waiting += [(other, is_number and name in _LINEAR | _PRODUCTS) for other in below]
        if not is_number:
            continue
        single = [other for other in below if math.prod(_shape(other)) == 1]
        is_mean = name == "Mean" or getattr(node, "_saved_reduction", 0) == 1
        chosen = _chosen(below) if samples and is_mean else None
        if chosen is not None and (chosen % samples or not chosen):
            raise InputError(
                f"the loss is a mean over {chosen} elements that a mask chooses, which is no multiple of the {samples} samples "
                f"of this rank. {_REMEDY}; or take the sum, with reduction='sum'"
            )
        if name == "Div" and samples and single and _operation(single[0]) in ("Sum", "Nansum"):
            other = getattr(node, "_saved_other", None)
            divisor = float(other) if type(other) is torch.Tensor and other.numel() == 1 else 0.0
            if divisor % samples > 1e-6 * divisor and _leads_to_output(below):
                raise InputError(
                    f"the loss divides a sum over samples by {divisor:g}, which is no multiple of the {samples} samples of "
                    f"this rank, as a mean over those that count does. {_REMEDY}"
                )
        elif name in _CROSS_ENTROPIES and node._saved_reduction == 1 and type(node._saved_total_weight) is torch.Tensor:
            # Where it is on another pipeline stage, a stand-in has no value.
            total, targets = float(node._saved_total_weight), node._saved_target.numel()
            if abs(total - targets) > 1e-3 * targets and _leads_to_output(below):
                raise InputError(
                    f"the loss is a cross-entropy that divides by {total:g}, the weights of its targets, of which there are "
                    f"{targets}: class weights, or targets that are left out (ignore_index). {_REMEDY}; or use reduction='sum'"
                )
        elif (name in _BENT and single) or (name in _COUPLING and not single) or (name in _PRODUCTS and len(single) > 1):
            found = [_leads_to_output([other]) for other in (single if single else below)]
            if sum(found) > (name in _PRODUCTS):
                raise _couples(name)


def _operation(node: Any) -> str:
    """Without the number by which autograd tells its variants, as those with a number or an axis, apart."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _shape(node: Any) -> tuple[int, ...]:
    """The shape of what the operation gives; (0,) where that is several tensors."""
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", None) or ()]
    return shapes[0] if len(shapes) == 1 else (0,)


def _couples(operation: str) -> InputError:
    return InputError(f"the loss takes {operation} of numbers of several samples. {_REMEDY}")


def _is_over_samples(node: Any) -> bool:
    """Whether an operation goes along the samples of an output of the network, or of what was made of it element by element."""
    operand = node.next_functions[0][0]
    shape = () if operand is None else _shape(operand)
    axes = getattr(node, "_saved_dim", None)
    axes = (axes,) if isinstance(axes, int) else axes or range(len(shape))
    signed = [axis - 2**64 if axis >= 2**63 else axis for axis in axes]  # torch keeps -1 without its sign
    if not shape or 0 in shape or all(axis % len(shape) for axis in signed):
        return False

    def leaves(other: Any) -> bool:
        return _shape(other) != shape or _operation(other) in _TURNING

    return leads_to([operand], lambda other: is_output(other) and _shape(other) == shape, ends_at=leaves)


def _chosen(nodes: Iterable[Any]) -> int | None:
    """How many elements a mask chooses along the samples, on the way to an output of the network; None where none does so."""
    found: list[int] = []

    def is_chosen(node: Any) -> bool:
        if _operation(node) not in _CHOOSING:
            return False
        chooses = (
            node._saved_indices[0] if _operation(node) == "Index" else node._saved_mask
        )  # along the first axis, not columns
        if chooses is not None and chooses.dtype in (torch.bool, torch.uint8) and _leads_to_output([node]):
            found.append(_shape(node)[0])
        return bool(found)

    leads_to(nodes, is_chosen, ends_at=lambda node: is_output(node) or _operation(node) == _OVER_BATCH)
    return found[0] if found else None


def _leads_to_output(nodes: Iterable[Any]) -> bool:
    """Whether the gradient of an output of the network comes through one of these nodes."""
    return leads_to(nodes, is_output, ends_at=lambda node: _operation(node) == _OVER_BATCH)
