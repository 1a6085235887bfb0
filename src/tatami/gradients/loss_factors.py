"""Numbers of a loss that ranks must have in common: by what it multiplies, and takes, what all samples of a rank give.

A class weight that was computed from a rank's own samples looks like any other constant: only ranks together see that each
has another one. So each keeps what the graph of its loss shows (`LossFacts`), and compares it with the others now and then
(`refuse_other_factors`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch

from tatami.errors import InputError
from tatami.gradients.graph_axes import (
    ACROSS_RANKS,
    ends,
    is_over,
    leads_to_output,
    operation_of,
    reduces_samples,
    samples_of,
    shape_of,
)
from tatami.gradients.passes import is_output, leads_to

PRODUCTS = frozenset({"Mul", "Div"})
MATRIX_PRODUCTS = frozenset({"Mm", "Bmm", "Mv", "Cdist", "EuclideanDist"})
WEIGHING = MATRIX_PRODUCTS | {"Addmm", "Baddbmm", "Addcmul", "Addcdiv", "Dot", "Lerp"}
_SAME = 1e-4
"""Relative: machines of different types round differently."""
CONSTANTS = {
    "Mul": ("other", "self"), "Div": ("other", "self"), "Maximum": ("other", "self"), "Minimum": ("other", "self"),
    "Addcmul": ("tensor1", "tensor2"), "Addcdiv": ("tensor1", "tensor2"), "Lerp": ("weight",), "MseLoss": ("target",),
    "Mm": ("mat2", "self"), "Addmm": ("mat2", "mat1"), "Bmm": ("mat2", "self"), "Baddbmm": ("batch2", "batch1"),
    "Mv": ("vec", "self"), "Cdist": ("x1", "x2"), "NllLoss": ("weight",), "NllLoss2D": ("weight",),
    "MultiMarginLoss": ("weight",), "BinaryCrossEntropy": ("weight",), "BinaryCrossEntropyWithLogits": ("weight", "pos_weight"),
    "HuberLoss": ("delta",), "SmoothL1Loss": ("beta",), "Pow": ("exponent",), "Clamp": ("min", "max"), "ClampMin": ("min",),
    "ClampMax": ("max",),
}  # fmt: skip
"""What operations save of the numbers and tensors by which they take what the network gives."""
WEIGHTS = {"Mul": "", "MseLoss": "_saved_target", "SmoothL1Loss": "_saved_target", "HuberLoss": "_saved_target"}
"""Operations whose other operand, or what they save, may be weights or targets that were normalized."""
_CENTERED = 1e-6
"""Sum of numbers from which their mean was taken, as a fraction of their size."""
_DIGESTED = 4096
"""Elements of a tensor that are compared."""
REMEDY = (
    "A rank sees a part of the batch: the loss must be the mean, or the sum, of what its samples give one by one. Take "
    "model.over_batch(...) of the means that such a loss is made of, which gives those of the global batch"
)


class Constant(NamedTuple):
    """What a loss takes all samples of a rank by.

    Attributes:
        what: the operation, with the shape of what it saves.
        number: other ranks have the same, if they take the same.
        of_share: or they have the same in place of this, where it is in proportion to the number of a rank's samples.
    """

    what: str
    number: float
    of_share: float


class LossFacts(NamedTuple):
    """What the graph of a loss shows, and one rank cannot judge by itself.

    Attributes:
        factors: by what each mean over samples is multiplied; a sum counts as so many times the mean. Where the loss is a sum:
            by what each sample is.
        divisors: by what sums over samples are divided.
        has_weights_of_1: samples are multiplied by different weights, without a gradient, that sum to 1, or are 0 or 1 in the
            mean; or have targets that are 0 in the mean.
        constants: what the loss takes all samples by.
        is_judged: whether there was a loss to look at.
    """

    factors: tuple[float, ...] = ()
    divisors: tuple[float, ...] = ()
    has_weights_of_1: bool = False
    constants: tuple[Constant, ...] = ()
    is_judged: bool = False


def refuse_other_factors(every_rank: Sequence[tuple[int, LossFacts]], *, of: str = "rank") -> None:
    """
    Args:
        every_rank: the number of a pass, and what its loss shows; the same on all ranks, which then all raise or none. Those of
            other passes than the first rank's are not compared.
        of: what each of them is the loss of.

    Raises:
        InputError: ranks multiply what their samples give by different numbers, or take it by different constants; names them.
    """
    judged = [(rank, at, facts) for rank, (at, facts) in enumerate(every_rank) if facts.is_judged]
    for rank, at, facts in judged:
        first, number, known = judged[0]
        is_like_it = at == number and len(facts.factors) == len(known.factors)
        for one, other in zip(known.factors, facts.factors, strict=True) if is_like_it else ():
            if not math.isclose(one, other, rel_tol=_SAME):
                raise InputError(
                    f"the loss of {of} {rank} multiplies what its samples give by {other:.4g}, that of {of} {first} by "
                    f"{one:.4g}: a number that it is multiplied by, or divided by, differs between them (a mean that "
                    f"was detached or taken by .item(), how many targets count, a random draw). {REMEDY}"
                )
        is_like_it = at == number and [each.what for each in facts.constants] == [each.what for each in known.constants]
        for mine, yours in zip(known.constants, facts.constants, strict=True) if is_like_it else ():
            pairs = (mine.number, yours.number), (mine.of_share, yours.of_share)
            if not any(math.isclose(*pair, rel_tol=_SAME) for pair in pairs):
                raise InputError(
                    f"the loss of {of} {rank} takes {mine.what} {yours.number:.4g}, that of {of} {first} {mine.number:.4g}, as "
                    "if it were computed from its own samples, so that these losses do not make up the whole one. "
                    f"{REMEDY}; or compute class weights, thresholds and so on from the global batch, before model.local(...)"
                )


def factor_of(node: Any) -> float:
    """By what number, without its sign, a product or quotient multiplies what the network gives; nan if that is not known."""
    value = _multiplier(node)
    # Where it is on another pipeline stage, a stand-in has no value.
    if type(value) is torch.Tensor and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or (not value and operation_of(node) == "Div"):
        return math.nan
    return float(abs(1 / value if operation_of(node) == "Div" else value))


def factor_below(node: Any) -> float:
    """By what all that an operation reduces was multiplied, without the network's own part; nan where that is not one number.

    A mask counts as 1.
    """
    waiting, seen, found = [(node, 1.0)], set[tuple[Any, float]](), set[float]()
    while waiting and len(found) < 2:
        key = node, factor = waiting.pop()
        if key in seen:
            continue
        seen.add(key)
        if is_output(node):
            found.add(factor)
            continue
        if operation_of(node) in PRODUCTS:
            factor *= _uniform(node)
        elif operation_of(node) in WEIGHING | ACROSS_RANKS:
            return math.nan
        waiting += [(below, factor) for below, _ in node.next_functions if below is not None]
    return found.pop() if len(found) == 1 else math.nan


def _uniform(node: Any) -> float:
    """As `factor_of`, also of a tensor whose elements are equal; of one of zeros and ones it is 1."""
    values = _multiplier(node)
    if sum(leads_to_output([below]) for below, _ in node.next_functions if below is not None) > 1:
        return 1.0  # of the network alone
    if type(values) is not torch.Tensor or values.numel() < 2:
        return factor_of(node)
    values = values.detach()
    if bool(((values == 0) | (values == 1)).all()):
        return 1.0
    least, most = float(values.min()), float(values.max())
    if least != most or not least:
        return math.nan
    return abs(1 / least if operation_of(node) == "Div" else least)


def _multiplier(node: Any) -> Any:
    """The other operand of a product or quotient with what the network gives."""
    first = node.next_functions[0][0]
    is_second = first is not None and leads_to_output([first])
    return getattr(node, "_saved_other" if is_second else "_saved_self", None)


def constants_of(name: str, node: Any, *, samples: int) -> Iterator[Constant]:
    """`LossFacts.constants` of an operation."""
    operand, number = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
    dims = len(shape_of(operand, number)) if operand is not None else 0
    along = {axis for axis in range(dims) if is_over(operand, {axis}, number=number)}
    is_of_all = (
        not along and dims > 0 and leads_to([operand], lambda each: reduces_samples(operation_of(each), each), ends_at=ends)
    )
    for saved in CONSTANTS[name] if along or is_of_all else ():
        value: Any = getattr(node, f"_saved_{saved}", None)
        is_tensor = type(value) is torch.Tensor
        if is_tensor and (value.requires_grad or not value.is_floating_point() or value.dim() > dims or not value.numel()):
            continue
        if is_tensor and value.numel() > 1:
            first = dims - value.dim()  # where axes of both are counted from the last one
            varies = {axis + first for axis in range(value.dim()) if value.shape[axis] > 1 and value.stride(axis)}
            if name in MATRIX_PRODUCTS or name in ("Addmm", "Baddbmm"):
                varies = (varies - {dims - 1, dims - 2}) | {dims - 2 if saved in ("self", "mat1", "batch1") else dims - 1}
            if not along & varies:
                digest = _digest(value)
                yield Constant(f"{name} with {saved} of shape {tuple(value.shape)}, a digest of which is", digest, digest)
        elif is_tensor or isinstance(value, int | float):
            own = float(value)
            times = 1 / max(samples, 1) if name == "Div" else samples if name == "Mul" or saved == "weight" else 1.0
            yield Constant(f"{name} with {saved}", own, own * (times or 1.0))


def _digest(values: torch.Tensor) -> float:
    """A number around 30 that tells tensors apart, whatever number all elements are multiplied by."""
    flat = values.detach().reshape(-1)[:: -(-values.numel() // _DIGESTED)].double()
    mixed = torch.dot(flat, torch.arange(len(flat), dtype=torch.float64, device=flat.device).mul(1.7).add(0.3).sin())
    found = 30 + float(mixed / flat.norm().clamp(min=1e-300))
    return found if math.isfinite(found) else 0.0


def are_normalized(node: Any, saved: str) -> bool:
    """Whether a product multiplies samples by weights that were normalized over the samples of this rank, as it seems: they
    differ, and sum to 1 or are 0 or 1 in the mean; or whether targets are 0 in the mean. Masks may do so by chance."""
    weights = getattr(node, saved, None) if saved else _multiplier(node)
    if type(weights) is not torch.Tensor or not weights.dim() or len(weights) not in samples_of(node) - {1}:
        return False
    values = weights.detach().double()
    rows, total = values.reshape(len(values), -1).sum(1), float(values.sum())
    size = _CENTERED * float(values.abs().sum())
    own = max(_SAME * abs(total) / len(rows), size)  # such as a mean that was taken from each sample by itself
    if float(rows.max() - rows.min()) < own or bool((values == values.round()).all()):
        return False
    is_centered = abs(total) < size or float(values.sum(0).abs().max()) < size
    return is_centered or (not saved and any(math.isclose(total, whole, rel_tol=1e-5) for whole in (1.0, values.numel())))
