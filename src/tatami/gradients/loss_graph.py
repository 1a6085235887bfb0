"""Losses that a rank cannot compute of its own samples, as far as the graph of the loss shows it.

The mean over a batch is the weighted mean of the means over its parts; the root of it is not, nor is a mean that divides by
class weights or by the number of targets that count. Such a loss shows in the operations between it and the output of the
network: the last ones, of single numbers, may only add and scale what is reduced, and so may those of what is reduced over the
samples alone. Samples that are multiplied by, or taken from, each other show in the shapes. What a mean or sum is multiplied
by, a number that may come from the samples of a rank by `.item()`, is compared between ranks (`refuse_other_factors`). What no
operation shows, as other weights of samples that depend on each other, is found by `TiledModel.check_loss`, which computes the
loss of parts.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

import torch

from tatami.errors import InputError, warn
from tatami.gradients.graph_axes import (
    CUTTING,
    JOINING,
    TAKING,
    ends,
    is_over,
    is_over_samples,
    leads_to_output,
    operation_of,
    parts_of,
    reduces_samples,
    rolls_parts,
    rows_of,
    samples_of,
    shape_of,
)
from tatami.gradients.loss_factors import (
    CONSTANTS,
    MATRIX_PRODUCTS,
    PRODUCTS,
    REMEDY,
    WEIGHING,
    WEIGHTS,
    Constant,
    LossFacts,
    are_normalized,
    constants_of,
    factor_below,
    factor_of,
)
from tatami.gradients.passes import assumed_axis, has_unclear_axis, is_output, leads_to

_LINEAR = frozenset({
    "Add", "Sub", "Neg", "Rsub", "View", "ReshapeAlias", "Sum", "Nansum", "UnsafeView", "Squeeze", "Unsqueeze", "ToCopy",
    "Clone", "Alias", "Mean", "Stack", "Select", "Expand",
})  # fmt: skip
_PASSING = _LINEAR | frozenset({
    "Where", "Lerp", "Cat", "Index", "NanToNum", "Repeat", "Permute", "Transpose", "T", "Mm", "Bmm", "Mv", "Dot", "Addmm",
    "Slice", "Unbind", "Split", "CopySlices", "AsStrided", "Copy", "NativeDropout", "MaskedFill", "IndexPut", "SelectScatter",
    "Real", "ViewAsReal", "ViewAsComplex", "Diagonal", "Flip",
})  # fmt: skip
"""What else a single number may go through: whatever is linear in it, or does not change it."""
_BENT = frozenset({
    "Sqrt", "Abs", "Log", "Log1P", "Exp", "Pow", "Relu", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Sigmoid",
    "Tanh", "Softplus", "LogSigmoid", "Reciprocal", "Erf", "Sin", "Cos", "Gelu", "Silu", "Elu", "LeakyRelu", "MseLoss",
    "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss",
})  # fmt: skip
"""Operations that are not linear in a single number; element-wise ones on samples do not matter."""
_COUPLING = frozenset({
    "LinalgVectorNorm", "Norm", "Max", "Min", "Amax", "Amin", "Aminmax", "Std", "StdMean", "Var", "VarMean", "Logsumexp",
    "Prod", "Median", "Nanmedian", "Mode", "Kthvalue", "Topk", "Sort", "Cummax", "Cummin", "Cumsum", "Cumprod", "Logcumsumexp",
    "Softmax", "LogSoftmax", "Roll", "Flip", "Gather", "Take", "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "Dist",
    "Pdist", "FftC2C", "FftR2C", "FftC2R", "LinalgSvd", "LinalgQr", "LinalgEigh", "LinalgEig", "LinalgSlogdet", "LinalgDet",
    "LinalgInvEx", "LinalgCholeskyEx", "LinalgSolveEx", "LinalgLstsq",
})  # fmt: skip
"""Operations that combine many numbers into one, or that make each of many depend on the others."""
_CHOOSING_ROWS = frozenset({"Index", "IndexSelect"})
_SUM = 2
"""What torch calls reduction="sum"."""
_CROSS_ENTROPIES = ("NllLoss", "NllLoss2D")
_CHOOSING = ("Index", "MaskedSelect")
_ROWS = "a mean over so many numbers for each row of what the model is given:"


class _Path(NamedTuple):
    """What lies between the loss and a node.

    Attributes:
        divisor: of a single number, by what it is divided; None for several.
        factor: what that number is multiplied by in all, without its sign; nan where that is not known.
        bent: an operation that is not linear.
        is_added: whether that number is a term of the loss as it is; for several numbers, whether the one that they were made
            into is, and they were not joined before.
    """

    divisor: float | None
    factor: float
    bent: str
    is_added: bool = True


def refuse_coupling_loss(roots: Iterable[Any], *, samples: int) -> LossFacts:
    """
    Args:
        roots: the last nodes of losses.
        samples: of this rank, where the loss is their mean; 0 where it is their sum.

    Raises:
        InputError: a loss is no mean of what its samples give; names the operation. The same on all ranks.
    """
    roots = list(roots)
    unclear, facts = _refuse_coupling(roots, samples=samples)
    errors = []
    for number in (-1, 0) if unclear else ():
        try:
            with assumed_axis(unclear, number):
                _, facts = _refuse_coupling(roots, samples=samples)  # those of the first axis are compared
        except InputError as error:
            errors.append(error)
    if len(errors) == 2:  # whichever axis the samples are along, as of the similarities of all samples with all
        raise errors[-1]
    return facts


def _refuse_coupling(roots: Iterable[Any], *, samples: int) -> tuple[set[Any], LossFacts]:
    """As `refuse_coupling_loss`, by the axes of samples that are known; first returns outputs that may have several."""
    waiting, seen = [(root, _Path(1.0, 1.0, "")) for root in roots if root is not None], set[Any]()
    cut: dict[tuple[Any, int], set[range]] = {}
    bends: list[tuple[str, Any]] = []
    is_cut = has_weights_of_1 = False
    factors, divisors, constants = list[float](), list[float](), list[Constant]()
    while waiting:
        node, path = waiting.pop()
        name, bent = operation_of(node), path.bent
        key = (node, path._replace(bent="bent" if bent else ""))
        if key in seen:
            continue
        seen.add(key)
        if ends(node):
            if samples and is_output(node):
                _refuse_counts_inside(node, samples=samples)
            continue
        below = [other for other, _ in node.next_functions if other is not None]
        multiplies = name in PRODUCTS | MATRIX_PRODUCTS and sum(leads_to_output([other]) for other in below) > 1
        if name in _COUPLING and is_over_samples(node) and not rolls_parts(name, node):
            raise _couples(name)
        if bent and reduces_samples(name, node):  # such as the square of a mean, or its part of a difference
            raise _couples(bent)
        if name in _CHOOSING_ROWS and _permutes_samples(node):
            raise _couples(name)
        if name.startswith("CompiledFunction") and leads_to_output(below):
            _say_compiled()
        if _pairs(below) if multiplies and name in MATRIX_PRODUCTS else _is_broadcast_twice(below):
            raise _couples(name)
        if name in TAKING and is_over_samples(node, joined=False):
            rows, samples_here = rows_of(node)
            cut.setdefault((node.next_functions[0], samples_here), set()).add(rows)
        if samples and path.is_added and name in ("Select", "Unbind") and is_over_samples(node, joined=False):
            raise InputError(
                f"the loss adds up what the {samples} samples of this rank give, one by one, and reduction='mean' says that it "
                "is their mean. Divide by their number, len(x), or give reduction='sum'"
            )
        is_cut = is_cut or (name in CUTTING and is_over_samples(node, joined=False))
        bent = bent or (name if multiplies or name in _BENT | _COUPLING else "")
        if bent and len(below) > 1:
            bends.append((bent, node))
        has_weights_of_1 = has_weights_of_1 or (name in WEIGHTS and not multiplies and are_normalized(node, WEIGHTS[name]))
        constants += constants_of(name, node, samples=samples) if name in CONSTANTS else ()
        is_number = path.divisor is not None and math.prod(shape_of(node)) == 1
        waiting += [(other, _further(path, name, node, bent=bent, is_number=is_number)) for other in below]
        if not is_number:
            continue
        _refuse_other_reduction(path, name, node, samples=samples)
        if (_is_sum(node) or _is_mean(name, node)) and is_over_samples(node):
            if samples and not _is_sum(node):
                each = math.prod(shape_of(below[0])) / samples
                constants.append(Constant(_ROWS, each, each))
            number = samples or max(samples_of(node), default=0)
            factor = path.factor * factor_below(node)
            of_mean = factor * number if _is_sum(node) else factor
            factors += [of_mean if samples else of_mean / number] if number and not math.isnan(of_mean) else []
            divisors += [path.divisor] if _is_sum(node) and path.divisor is not None else []
        single = [other for other in below if math.prod(shape_of(other)) == 1]
        chosen = _chosen(below) if samples and _is_mean(name, node) else None
        if chosen is not None and (chosen % samples or not chosen):
            raise InputError(
                f"the loss is a mean over {chosen} elements that a mask chooses, which is no multiple of the {samples} samples "
                f"of this rank. {REMEDY}; or take the sum, with reduction='sum'"
            )
        if name in _CROSS_ENTROPIES:
            if samples and leads_to_output(below):
                _refuse_counts(node)
        elif (_is_bent(name, node) and single) or (name in _COUPLING and not single) or (name in PRODUCTS and len(single) > 1):
            found = [leads_to_output([other]) for other in (single if single else below)]
            if sum(found) > (name in PRODUCTS):
                raise _couples(name)
    for (_, samples_here), parts in cut.items():
        taken = Counter(itertools.chain.from_iterable(parts))
        if len(taken) < samples_here or len(set(taken.values())) > 1:
            raise InputError(
                f"the loss takes {len(taken)} of the {samples_here} samples of this rank by a slice, or some more often than "
                f"others, which differ between ranks. {REMEDY}; or multiply by a mask, and take the sum (reduction='sum')"
            )
    for bent, node in bends if is_cut else ():
        found_parts = [parts_of(*edge) for edge in node.next_functions]
        pairs = itertools.combinations(filter(None, found_parts), 2)
        if any(one.isdisjoint(other) and {of for of, _ in one} & {of for of, _ in other} for one, other in pairs):
            raise _couples(bent)
    unclear = {node for node, _ in seen if has_unclear_axis(node)}
    return unclear, LossFacts(tuple(sorted(factors)), tuple(divisors), has_weights_of_1, tuple(constants), True)


def _further(path: _Path, name: str, node: Any, *, bent: str, is_number: bool) -> _Path:
    """The path to what a node is made of."""
    if not is_number or path.divisor is None or name not in _LINEAR | PRODUCTS:
        return _Path(None, math.nan, bent, path.is_added and name not in JOINING)
    factor = factor_of(node) if name in PRODUCTS else 1.0
    is_divided = name == "Div" and factor > 0
    times = path.factor * factor
    return _Path(path.divisor / factor if is_divided else path.divisor, times, bent, times == 1)


def _refuse_other_reduction(path: _Path, name: str, node: Any, *, samples: int) -> None:
    """Refuse a sum over samples where the loss is said to be their mean, and the other way round.

    Weights that each sample is multiplied by, and a factor such as one over their number, can make one of the other.
    """
    assert path.divisor is not None
    if not path.factor:
        return
    if samples and _is_sum(node) and not _is_multiple(path.divisor, samples) and leads_to_output([node]):
        below = [other for other, _ in node.next_functions]
        adds_means = leads_to(below, lambda other: reduces_samples(operation_of(other), other), ends_at=ends)
        if path.divisor != 1 and not adds_means:
            raise InputError(
                f"the loss divides a sum over samples by {path.divisor:g}, which is no multiple of the {samples} samples of "
                f"this rank, as a mean over those that count does. {REMEDY}"
            )
        if _is_other(path.factor, node, samples=samples) and is_over_samples(node) and not _are_weighted(node, samples=samples):
            times = "" if path.factor == 1 else f", times {path.factor:g},"
            raise InputError(
                f"the loss is or adds a sum over the {samples} samples of this rank{times} and reduction='mean' says that it "
                "is their mean. Divide the sum by their number, as in sum() / len(x), or give reduction='sum'; a mean over "
                "some of them is made of model.over_batch(...)"
            )
    number = max(samples_of(node), default=0) if not samples and _is_mean(name, node) else 0
    if number > 1 and _is_other(path.factor, node) and is_over_samples(node) and not _are_weighted(node):
        raise InputError(
            f"the loss is a mean over the {number} samples of this rank, and reduction='sum' says that it is their sum. "
            "Take the sum, or give reduction='mean'"
        )


def _is_other(factor: float, node: Any, *, samples: int = 0) -> bool:
    """Whether a factor leaves a sum over so many samples a sum, where the loss is to be a mean; or (0) a mean a mean."""
    if not samples:
        return factor == 1
    amounts = samples, math.prod(shape_of(node.next_functions[0][0]))
    is_share = any(math.isclose(factor * each, times, rel_tol=1e-6) for each in amounts for times in (0.5, 1, 2))
    return not is_share and not math.isnan(factor)


def _refuse_counts(node: Any, *, samples: int = 0) -> None:
    """Refuse the mean of a cross-entropy over targets that do not all count the same, or not as many of each sample."""
    # Where it is on another pipeline stage, a stand-in has no value.
    if node._saved_reduction == 1 and type(node._saved_total_weight) is torch.Tensor:
        total, targets = float(node._saved_total_weight), node._saved_target.numel()
        if abs(total - targets) > 1e-3 * targets and not (samples and _is_multiple(total, samples)):
            raise InputError(
                f"the loss is a cross-entropy that divides by {total:g}, the weights of its targets, of which there are "
                f"{targets}: class weights, or targets that are left out (ignore_index). {REMEDY}; or use reduction='sum'"
            )


def _refuse_counts_inside(output: Any, *, samples: int) -> None:
    """The same where the network computes its loss itself, as far as single numbers lead from its output.

    A language model leaves out the last target of each of its samples, which makes no difference between ranks.
    """
    waiting, seen = [output], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or math.prod(shape_of(node)) != 1:
            continue
        seen.add(node)
        if operation_of(node) in _CROSS_ENTROPIES:
            _refuse_counts(node, samples=samples)
        waiting += [other for other, _ in node.next_functions]


def _is_multiple(divisor: float, samples: int) -> bool:
    times = round(divisor / samples)
    return times > 0 and math.isclose(divisor, times * samples, rel_tol=1e-6)


def _are_weighted(node: Any, *, samples: int = 0) -> bool:
    """Whether what an operation reduces was multiplied by weights that are not the network's, or by a number that makes a mean
    of a sum, or the other way round."""

    def is_weighing(other: Any) -> bool:
        operands = [[below] for below, _ in other.next_functions]
        if operation_of(other) in PRODUCTS and not math.isnan(factor := factor_of(other)):
            return not _is_other(factor, node, samples=samples)
        return operation_of(other) in PRODUCTS | WEIGHING and not all(leads_to_output(filter(None, each)) for each in operands)

    return leads_to([node], is_weighing, ends_at=ends)


def _couples(operation: str) -> InputError:
    return InputError(f"the loss takes {operation} of numbers of several samples. {REMEDY}")


@cache
def _say_compiled() -> None:
    warn(
        "the loss, or a part of it, is compiled, and what it does with the samples is not seen: one that is neither the mean "
        "nor the sum of what its samples give one by one would not be refused. Compute one step without torch.compile"
    )


def _is_bent(name: str, node: Any) -> bool:
    """Whether an operation of torch, on a single number, may be other than linear in it."""
    is_own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return name in _BENT or not (is_own or name in _PASSING | PRODUCTS or name.startswith("CompiledFunction"))


def _is_sum(node: Any) -> bool:
    return operation_of(node) in ("Sum", "Nansum", "Dot") or getattr(node, "_saved_reduction", 0) == _SUM


def _is_mean(name: str, node: Any) -> bool:
    return name == "Mean" or getattr(node, "_saved_reduction", 0) == 1


def _permutes_samples(node: Any) -> bool:
    """Whether rows of samples are taken in another order, all of them."""
    operand = node.next_functions[0][0]
    if operation_of(node) == "IndexSelect":
        axis, index = node._saved_dim, node._saved_index
    else:
        axis, index = 0, node._saved_indices[0]
        if any(each is not None for each in node._saved_indices[1:]):
            return False  # an element of each row
    shape = shape_of(operand) if operand is not None else ()
    if index is None or index.dtype in (torch.bool, torch.uint8) or index.dim() != 1 or not shape:
        return False
    order = index.tolist()
    axis %= len(shape)
    return order != sorted(order) and sorted(order) == [*range(shape[axis])] and is_over(operand, {axis})


def _pairs(operands: list[Any]) -> bool:
    """Whether a matrix product of two tensors that come from outputs multiplies samples with each other: not where each product
    is of one sample, which is where the first axis of both has all of them."""
    shapes = [shape_of(each) for each in operands[-2:]]
    samples = (samples_of(operands[-2]) & samples_of(operands[-1])) - {1}
    return any(
        all(number in shape for shape in shapes) and not (len(shapes[0]) > 2 and shapes[0][0] % number == 0)
        for number in samples
    )


def _is_broadcast_twice(operands: list[Any]) -> bool:
    """Whether an element-wise operation takes each sample with each: of shapes (samples, 1) and (1, samples), or of both
    expanded to (samples, samples)."""
    if len(operands) != 2:
        return False
    if len({*map(shape_of, operands)}) == 1:
        shape = shape_of(operands[0])
        equal = [pair for pair in itertools.permutations(range(len(shape)), 2) if shape[pair[0]] == shape[pair[1]] > 1]
        return any(
            is_over(operands[0], {one}) and is_over(operands[1], {other}) and not is_over(operands[0], {other})
            for one, other in equal
        )
    most = max(len(shape_of(each)) for each in operands)
    one, other = sorted(
        ((1,) * (most - len(shape_of(each))) + shape_of(each) for each in operands), key=lambda shape: -shape[0]
    )
    if not one[0] > other[0] == 1 or not any(a == 1 and b == one[0] for a, b in zip(one, other, strict=True)):
        return False
    return one[0] in samples_of(operands[0]) & samples_of(operands[1])


def _chosen(nodes: Iterable[Any]) -> int | None:
    """How many elements a mask chooses along the samples, on the way to an output of the network; None where none does so."""
    found: list[int] = []

    def is_chosen(node: Any) -> bool:
        if operation_of(node) not in _CHOOSING:
            return False
        chooses = (
            node._saved_indices[0] if operation_of(node) == "Index" else node._saved_mask
        )  # along the first axis, not columns
        if chooses is not None and chooses.dtype in (torch.bool, torch.uint8) and leads_to_output([node]):
            found.append(shape_of(node)[0])
        return bool(found)

    leads_to(nodes, is_chosen, ends_at=ends)
    return found[0] if found else None
