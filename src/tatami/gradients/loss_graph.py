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
    "AddBackward0", "SubBackward0", "NegBackward0", "RsubBackward1", "ViewBackward0", "ReshapeAliasBackward0", "SumBackward0",
    "UnsafeViewBackward0", "SqueezeBackward0", "UnsqueezeBackward0", "ToCopyBackward0", "CloneBackward0", "AliasBackward0",
    "MeanBackward0", "StackBackward0", "SelectBackward0", "ExpandBackward0",
})  # fmt: skip
_PRODUCTS = frozenset({"MulBackward0", "DivBackward0"})
_BENT = frozenset({
    "SqrtBackward0", "AbsBackward0", "LogBackward0", "Log1PBackward0", "ExpBackward0", "PowBackward0", "ReluBackward0",
    "ClampBackward0", "ClampBackward1", "ClampMinBackward0", "ClampMaxBackward0", "MaximumBackward0", "MinimumBackward0",
    "SigmoidBackward0", "TanhBackward0", "SoftplusBackward0", "LogSigmoidBackward0", "ReciprocalBackward0",
})  # fmt: skip
"""Operations that are not linear in a single number; element-wise ones on samples do not matter."""
_COUPLING = frozenset({
    "LinalgVectorNormBackward0", "NormBackward0", "NormBackward1", "MaxBackward1", "MinBackward1", "AmaxBackward0",
    "AminBackward0", "StdBackward0", "VarBackward0", "LogsumexpBackward0", "ProdBackward0", "MedianBackward0",
})  # fmt: skip
"""Operations that combine many numbers into one."""
_CROSS_ENTROPIES = ("NllLossBackward0", "NllLoss2DBackward0")
_OVER_BATCH = "OverBatchBackward"
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
    waiting, seen = [root for root in roots if root is not None], set[Any]()
    while waiting:
        node = waiting.pop()
        if node in seen or is_output(node) or node.name() == _OVER_BATCH:
            continue
        seen.add(node)
        name = node.name()
        if _elements(node) != 1:
            continue
        below = [other for other, _ in node.next_functions if other is not None]
        single = [other for other in below if _elements(other) == 1]
        if name == "DivBackward0" and samples and single and single[0].name() in ("SumBackward0", "SumBackward1"):
            other = node._saved_other
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
                what = name.rstrip("01").removesuffix("Backward")
                raise InputError(f"the loss takes {what} of numbers of several samples. {_REMEDY}")
        if name in _LINEAR or name in _PRODUCTS:
            waiting += below


def _elements(node: Any) -> int:
    shapes = [each.shape for each in getattr(node, "_input_metadata", None) or ()]
    return math.prod(shapes[0]) if len(shapes) == 1 else 0


def _leads_to_output(nodes: Iterable[Any]) -> bool:
    """Whether the gradient of an output of the network comes through one of these nodes."""
    return leads_to(nodes, is_output, ends_at=_OVER_BATCH)
