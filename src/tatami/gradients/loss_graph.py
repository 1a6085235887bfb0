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
from collections.abc import Iterable, Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch

from tatami.errors import InputError, warn
from tatami.gradients.passes import assumed_axis, has_unclear_axis, is_output, leads_to, samples_axis

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
_PRODUCTS = frozenset({"Mul", "Div"})
_BENT = frozenset({
    "Sqrt", "Abs", "Log", "Log1P", "Exp", "Pow", "Relu", "Clamp", "ClampMin", "ClampMax", "Maximum", "Minimum", "Sigmoid",
    "Tanh", "Softplus", "LogSigmoid", "Reciprocal", "Erf", "Sin", "Cos", "Gelu", "Silu", "Elu", "LeakyRelu", "MseLoss",
    "SmoothL1Loss", "HuberLoss", "BinaryCrossEntropy", "BinaryCrossEntropyWithLogits", "SoftMarginLoss",
})  # fmt: skip
"""Operations that are not linear in a single number; element-wise ones on samples do not matter."""
_MATRIX_PRODUCTS = frozenset({"Mm", "Bmm", "Mv", "Cdist", "EuclideanDist"})
_WEIGHING = _MATRIX_PRODUCTS | {"Addmm", "Baddbmm", "Addcmul", "Addcdiv", "Dot", "Lerp"}
_REDUCING = frozenset({"Mean", "Sum", "Nansum"})
_COUPLING = frozenset({
    "LinalgVectorNorm", "Norm", "Max", "Min", "Amax", "Amin", "Aminmax", "Std", "StdMean", "Var", "VarMean", "Logsumexp",
    "Prod", "Median", "Nanmedian", "Mode", "Kthvalue", "Topk", "Sort", "Cummax", "Cummin", "Cumsum", "Cumprod", "Logcumsumexp",
    "Softmax", "LogSoftmax", "Roll", "Flip", "Gather", "Take", "NativeBatchNorm", "CudnnBatchNorm", "NativeLayerNorm", "Dist",
    "Pdist", "FftC2C", "FftR2C", "FftC2R", "LinalgSvd", "LinalgQr", "LinalgEigh", "LinalgEig", "LinalgSlogdet", "LinalgDet",
    "LinalgInvEx", "LinalgCholeskyEx", "LinalgSolveEx", "LinalgLstsq",
})  # fmt: skip
"""Operations that combine many numbers into one, or that make each of many depend on the others."""
_OVER_OTHERS = _REDUCING | {"NllLoss", "LinalgVectorNorm", "Norm", "Logsumexp", "Amax", "Amin"}
"""Operations that may reduce each row to a number."""
_PARTING = frozenset({"Slice", "Split", "SplitWithSizes"})
_TAKING = frozenset({"Slice", "Select"})
_CHOOSING_ROWS = frozenset({"Index", "IndexSelect"})
_SAME = 1e-4
"""Relative: machines of different types round differently."""
_SUM = 2
"""What torch calls reduction="sum"."""
_RESHAPING = frozenset({"View", "UnsafeView", "ReshapeAlias"})
_JOINING = frozenset({"Cat", "Stack"})
_ADDING_ROWS = frozenset({"IndexAdd", "ScatterAdd", "ScatterReduce", "IndexReduce"})
_CROSS_ENTROPIES = ("NllLoss", "NllLoss2D")
_CHOOSING = ("Index", "MaskedSelect")
_ACROSS_RANKS = frozenset({
    "OverBatch", "_Exchanged", "_Broadcast", "_Gather", "_Scatter", "_Reduce", "_Reduce_Scatter", "_AllGather",
    "_AllGatherBase", "_AlltoAll", "_AlltoAllSingle", "_AllReduce",
})  # fmt: skip
"""What takes numbers of other ranks: `over_batch`, `tatami.functions`, `torch.distributed.nn`. Nothing below is judged."""
_CUTTING = frozenset({"Slice", "Split", "SplitWithSizes", "Unbind", "Select"})
_CONSTANTS = {
    "Mul": ("other", "self"), "Div": ("other", "self"), "Maximum": ("other", "self"), "Minimum": ("other", "self"),
    "Addcmul": ("tensor1", "tensor2"), "Addcdiv": ("tensor1", "tensor2"), "Lerp": ("weight",), "MseLoss": ("target",),
    "Mm": ("mat2", "self"), "Addmm": ("mat2", "mat1"), "Bmm": ("mat2", "self"), "Baddbmm": ("batch2", "batch1"),
    "Mv": ("vec", "self"), "Cdist": ("x1", "x2"), "NllLoss": ("weight",), "NllLoss2D": ("weight",),
    "MultiMarginLoss": ("weight",), "BinaryCrossEntropy": ("weight",), "BinaryCrossEntropyWithLogits": ("weight", "pos_weight"),
    "HuberLoss": ("delta",), "SmoothL1Loss": ("beta",), "Pow": ("exponent",), "Clamp": ("min", "max"), "ClampMin": ("min",),
    "ClampMax": ("max",),
}  # fmt: skip
"""What operations save of the numbers and tensors by which they take what the network gives."""
_WEIGHTS = {"Mul": "", "MseLoss": "_saved_target", "SmoothL1Loss": "_saved_target", "HuberLoss": "_saved_target"}
"""Operations whose other operand, or what they save, may be weights or targets that were normalized."""
_CENTERED = 1e-6
"""Sum of numbers from which their mean was taken, as a fraction of their size."""
_ROWS = "a mean over so many numbers for each row of what the model is given:"
_DIGESTED = 4096
"""Elements of a tensor that are compared."""
_REMEDY = (
    "A rank sees a part of the batch: the loss must be the mean, or the sum, of what its samples give one by one. Take "
    "model.over_batch(...) of the means that such a loss is made of, which gives those of the global batch"
)


class _Path(NamedTuple):
    """What lies between the loss and a node.

    Attributes:
        divisor: of a single number, by what it is divided; None for several.
        factor: what that number is multiplied by in all, without its sign; nan where that is not known.
        bent: an operation that is not linear.
        row: for several numbers, the factor of the single one that they were made into; nan where several of them were joined.
    """

    divisor: float | None
    factor: float
    bent: str
    row: float = 1.0


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


def refuse_other_factors(every_rank: Sequence[tuple[int, LossFacts]]) -> None:
    """
    Args:
        every_rank: the number of a pass, and what its loss shows; the same on all ranks, which then all raise or none. Those of
            other passes than the first rank's are not compared.

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
                    f"the loss of rank {rank} multiplies what its samples give by {other:.4g}, that of rank {first} by "
                    f"{one:.4g}: a number that it is multiplied by, or divided by, is another one on each rank (a mean that "
                    f"was detached or taken by .item(), how many targets count, a random draw). {_REMEDY}"
                )
        is_like_it = at == number and [each.what for each in facts.constants] == [each.what for each in known.constants]
        for mine, yours in zip(known.constants, facts.constants, strict=True) if is_like_it else ():
            pairs = (mine.number, yours.number), (mine.of_share, yours.of_share)
            if not any(math.isclose(*pair, rel_tol=_SAME) for pair in pairs):
                raise InputError(
                    f"the loss of rank {rank} takes {mine.what} {yours.number:.4g}, that of rank {first} {mine.number:.4g}, as "
                    "if it were computed from a rank's own samples, so that these losses do not make up the whole one. "
                    f"{_REMEDY}; or compute class weights, thresholds and so on from the global batch, before model.local(...)"
                )


def _refuse_coupling(roots: Iterable[Any], *, samples: int) -> tuple[set[Any], LossFacts]:
    """As `refuse_coupling_loss`, by the axes of samples that are known; first returns outputs that may have several."""
    waiting, seen = [(root, _Path(1.0, 1.0, "")) for root in roots if root is not None], set[Any]()
    cut: dict[tuple[Any, int], set[range]] = {}
    bends: list[tuple[str, Any]] = []
    is_cut = has_weights_of_1 = False
    factors, divisors, constants = list[float](), list[float](), list[Constant]()
    while waiting:
        node, path = waiting.pop()
        name, bent = _operation(node), path.bent
        key = (node, path._replace(bent="bent" if bent else ""))
        if key in seen:
            continue
        seen.add(key)
        if _ends(node):
            if samples and is_output(node):
                _refuse_counts_inside(node, samples=samples)
            continue
        below = [other for other, _ in node.next_functions if other is not None]
        multiplies = name in _PRODUCTS | _MATRIX_PRODUCTS and sum(_leads_to_output([other]) for other in below) > 1
        if name in _COUPLING and _is_over_samples(node) and not _rolls_parts(name, node):
            raise _couples(name)
        if bent and _reduces_samples(name, node):  # such as the square of a mean, or its part of a difference
            raise _couples(bent)
        if name in _CHOOSING_ROWS and _permutes_samples(node):
            raise _couples(name)
        if name.startswith("CompiledFunction") and _leads_to_output(below):
            _say_compiled()
        if _pairs(below) if multiplies and name in _MATRIX_PRODUCTS else _is_broadcast_twice(below):
            raise _couples(name)
        if name in _TAKING and _is_over_samples(node, joined=False):
            rows, samples_here = _rows(node)
            cut.setdefault((node.next_functions[0], samples_here), set()).add(rows)
        row = path.row if path.divisor is None else path.factor
        if samples and row == 1 and name in ("Select", "Unbind") and _is_over_samples(node, joined=False):
            raise InputError(
                f"the loss adds up what the {samples} samples of this rank give, one by one, and reduction='mean' says that it "
                "is their mean. Divide by their number, len(x), or give reduction='sum'"
            )
        is_cut = is_cut or (name in _CUTTING and _is_over_samples(node, joined=False))
        bent = bent or (name if multiplies or name in _BENT | _COUPLING else "")
        if bent and len(below) > 1:
            bends.append((bent, node))
        has_weights_of_1 = has_weights_of_1 or (name in _WEIGHTS and not multiplies and _are_normalized(node, _WEIGHTS[name]))
        constants += _constants(name, node, samples=samples) if name in _CONSTANTS else ()
        is_number = path.divisor is not None and math.prod(_shape(node)) == 1
        waiting += [(other, _further(path, name, node, bent=bent, is_number=is_number)) for other in below]
        if not is_number:
            continue
        _refuse_other_reduction(path, name, node, samples=samples)
        if (_is_sum(node) or _is_mean(name, node)) and _is_over_samples(node):
            if samples and not _is_sum(node):
                each = math.prod(_shape(below[0])) / samples
                constants.append(Constant(_ROWS, each, each))
            number = samples or max(_samples_of(node), default=0)
            factor = path.factor * _factor_below(node)
            of_mean = factor * number if _is_sum(node) else factor
            factors += [of_mean if samples else of_mean / number] if number and not math.isnan(of_mean) else []
            divisors += [path.divisor] if _is_sum(node) and path.divisor is not None else []
        single = [other for other in below if math.prod(_shape(other)) == 1]
        chosen = _chosen(below) if samples and _is_mean(name, node) else None
        if chosen is not None and (chosen % samples or not chosen):
            raise InputError(
                f"the loss is a mean over {chosen} elements that a mask chooses, which is no multiple of the {samples} samples "
                f"of this rank. {_REMEDY}; or take the sum, with reduction='sum'"
            )
        if name in _CROSS_ENTROPIES:
            if samples and _leads_to_output(below):
                _refuse_counts(node)
        elif (_is_bent(name, node) and single) or (name in _COUPLING and not single) or (name in _PRODUCTS and len(single) > 1):
            found = [_leads_to_output([other]) for other in (single if single else below)]
            if sum(found) > (name in _PRODUCTS):
                raise _couples(name)
    for (_, samples_here), parts in cut.items():
        taken = Counter(itertools.chain.from_iterable(parts))
        if len(taken) < samples_here or len(set(taken.values())) > 1:
            raise InputError(
                f"the loss takes {len(taken)} of the {samples_here} samples of this rank by a slice, or some more often than "
                f"others, which differ between ranks. {_REMEDY}; or multiply by a mask, and take the sum (reduction='sum')"
            )
    for bent, node in bends if is_cut else ():
        found_parts = [_parts(*edge) for edge in node.next_functions]
        pairs = itertools.combinations(filter(None, found_parts), 2)
        if any(one.isdisjoint(other) and {of for of, _ in one} & {of for of, _ in other} for one, other in pairs):
            raise _couples(bent)
    unclear = {node for node, _ in seen if has_unclear_axis(node)}
    return unclear, LossFacts(tuple(sorted(factors)), tuple(divisors), has_weights_of_1, tuple(constants), True)


def _further(path: _Path, name: str, node: Any, *, bent: str, is_number: bool) -> _Path:
    """The path to what a node is made of."""
    if not is_number or path.divisor is None or name not in _LINEAR | _PRODUCTS:
        row = path.row if path.divisor is None else path.factor
        return _Path(None, math.nan, bent, math.nan if name in _JOINING else row)
    factor = _factor(node) if name in _PRODUCTS else 1.0
    is_divided = name == "Div" and factor > 0
    return _Path(path.divisor / factor if is_divided else path.divisor, path.factor * factor, bent)


def _factor(node: Any) -> float:
    """By what number, without its sign, a product or quotient multiplies what the network gives; nan if that is not known."""
    value = _multiplier(node)
    # Where it is on another pipeline stage, a stand-in has no value.
    if type(value) is torch.Tensor and value.numel() == 1:
        value = value.item()
    if not isinstance(value, int | float) or (not value and _operation(node) == "Div"):
        return math.nan
    return float(abs(1 / value if _operation(node) == "Div" else value))


def _factor_below(node: Any) -> float:
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
        if _operation(node) in _PRODUCTS:
            factor *= _uniform(node)
        elif _operation(node) in _WEIGHING | _ACROSS_RANKS:
            return math.nan
        waiting += [(below, factor) for below, _ in node.next_functions if below is not None]
    return found.pop() if len(found) == 1 else math.nan


def _uniform(node: Any) -> float:
    """As `_factor`, also of a tensor whose elements are equal; of one of zeros and ones it is 1."""
    values = _multiplier(node)
    if sum(_leads_to_output([below]) for below, _ in node.next_functions if below is not None) > 1:
        return 1.0  # of the network alone
    if type(values) is not torch.Tensor or values.numel() < 2:
        return _factor(node)
    values = values.detach()
    if bool(((values == 0) | (values == 1)).all()):
        return 1.0
    least, most = float(values.min()), float(values.max())
    if least != most or not least:
        return math.nan
    return abs(1 / least if _operation(node) == "Div" else least)


def _multiplier(node: Any) -> Any:
    """The other operand of a product or quotient with what the network gives."""
    first = node.next_functions[0][0]
    is_second = first is not None and _leads_to_output([first])
    return getattr(node, "_saved_other" if is_second else "_saved_self", None)


def _constants(name: str, node: Any, *, samples: int) -> Iterator[Constant]:
    """`LossFacts.constants` of an operation."""
    operand, number = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
    dims = len(_shape(operand, number)) if operand is not None else 0
    along = {axis for axis in range(dims) if _is_over(operand, {axis}, number=number)}
    is_of_all = (
        not along and dims > 0 and leads_to([operand], lambda each: _reduces_samples(_operation(each), each), ends_at=_ends)
    )
    for saved in _CONSTANTS[name] if along or is_of_all else ():
        value: Any = getattr(node, f"_saved_{saved}", None)
        is_tensor = type(value) is torch.Tensor
        if is_tensor and (value.requires_grad or not value.is_floating_point() or value.dim() > dims or not value.numel()):
            continue
        if is_tensor and value.numel() > 1:
            first = dims - value.dim()  # where axes of both are counted from the last one
            varies = {axis + first for axis in range(value.dim()) if value.shape[axis] > 1 and value.stride(axis)}
            if name in _MATRIX_PRODUCTS or name in ("Addmm", "Baddbmm"):
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


def _are_normalized(node: Any, saved: str) -> bool:
    """Whether a product multiplies samples by weights that were normalized over the samples of this rank, as it seems: they
    differ, and sum to 1 or are 0 or 1 in the mean; or whether targets are 0 in the mean. Masks may do so by chance."""
    weights = getattr(node, saved, None) if saved else _multiplier(node)
    if type(weights) is not torch.Tensor or not weights.dim() or len(weights) not in _samples_of(node) - {1}:
        return False
    values = weights.detach().double()
    rows, total = values.reshape(len(values), -1).sum(1), float(values.sum())
    size = _CENTERED * float(values.abs().sum())
    own = max(_SAME * abs(total) / len(rows), size)  # such as a mean that was taken from each sample by itself
    if float(rows.max() - rows.min()) < own or bool((values == values.round()).all()):
        return False
    is_centered = abs(total) < size or float(values.sum(0).abs().max()) < size
    return is_centered or (not saved and any(math.isclose(total, whole, rel_tol=1e-5) for whole in (1.0, values.numel())))


def _refuse_other_reduction(path: _Path, name: str, node: Any, *, samples: int) -> None:
    """Refuse a sum over samples where the loss is said to be their mean, and the other way round.

    Weights that each sample is multiplied by, and a factor such as one over their number, can make one of the other.
    """
    assert path.divisor is not None
    if not path.factor:
        return
    if samples and _is_sum(node) and not _is_multiple(path.divisor, samples) and _leads_to_output([node]):
        below = [other for other, _ in node.next_functions]
        adds_means = leads_to(below, lambda other: _reduces_samples(_operation(other), other), ends_at=_ends)
        if path.divisor != 1 and not adds_means:
            raise InputError(
                f"the loss divides a sum over samples by {path.divisor:g}, which is no multiple of the {samples} samples of "
                f"this rank, as a mean over those that count does. {_REMEDY}"
            )
        if (
            _is_other(path.factor, node, samples=samples)
            and _is_over_samples(node)
            and not _are_weighted(node, samples=samples)
        ):
            times = "" if path.factor == 1 else f", times {path.factor:g},"
            raise InputError(
                f"the loss is or adds a sum over the {samples} samples of this rank{times} and reduction='mean' says that it "
                "is their mean. Divide the sum by their number, as in sum() / len(x), or give reduction='sum'; a mean over "
                "some of them is made of model.over_batch(...)"
            )
    number = max(_samples_of(node), default=0) if not samples and _is_mean(name, node) else 0
    if number > 1 and _is_other(path.factor, node) and _is_over_samples(node) and not _are_weighted(node):
        raise InputError(
            f"the loss is a mean over the {number} samples of this rank, and reduction='sum' says that it is their sum. "
            "Take the sum, or give reduction='mean'"
        )


def _is_other(factor: float, node: Any, *, samples: int = 0) -> bool:
    """Whether a factor leaves a sum over so many samples a sum, where the loss is to be a mean; or (0) a mean a mean."""
    if not samples:
        return factor == 1
    amounts = samples, math.prod(_shape(node.next_functions[0][0]))
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
                f"{targets}: class weights, or targets that are left out (ignore_index). {_REMEDY}; or use reduction='sum'"
            )


def _refuse_counts_inside(output: Any, *, samples: int) -> None:
    """The same where the network computes its loss itself, as far as single numbers lead from its output.

    A language model leaves out the last target of each of its samples, which makes no difference between ranks.
    """
    waiting, seen = [output], set[Any]()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen or math.prod(_shape(node)) != 1:
            continue
        seen.add(node)
        if _operation(node) in _CROSS_ENTROPIES:
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
        if _operation(other) in _PRODUCTS and not math.isnan(factor := _factor(other)):
            return not _is_other(factor, node, samples=samples)
        return _operation(other) in _PRODUCTS | _WEIGHING and not all(_leads_to_output(filter(None, each)) for each in operands)

    return leads_to([node], is_weighing, ends_at=_ends)


def _ends(node: Any) -> bool:
    """Whether what is below is not judged: it is the network, or numbers of other ranks are in what the operation gives."""
    return is_output(node) or _operation(node) in _ACROSS_RANKS


def _operation(node: Any) -> str:
    """Without the number by which autograd tells its variants, as those with a number or an axis, apart."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def _shape(node: Any, number: int | None = None) -> tuple[int, ...]:
    """The shape of what the operation gives; where that is several tensors, of the one of this number, or (0,)."""
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", None) or ()]
    number = 0 if len(shapes) == 1 else number
    return (0,) if number is None or number >= len(shapes) else shapes[number]


def _couples(operation: str) -> InputError:
    return InputError(f"the loss takes {operation} of numbers of several samples. {_REMEDY}")


@cache
def _say_compiled() -> None:
    warn(
        "the loss, or a part of it, is compiled, and what it does with the samples is not seen: one that is neither the mean "
        "nor the sum of what its samples give one by one would not be refused. Compute one step without torch.compile"
    )


def _is_bent(name: str, node: Any) -> bool:
    """Whether an operation of torch, on a single number, may be other than linear in it."""
    is_own = isinstance(node, torch.autograd.function.BackwardCFunction)
    return name in _BENT or not (is_own or name in _PASSING | _PRODUCTS or name.startswith("CompiledFunction"))


def _is_sum(node: Any) -> bool:
    return _operation(node) in ("Sum", "Nansum", "Dot") or getattr(node, "_saved_reduction", 0) == _SUM


def _is_mean(name: str, node: Any) -> bool:
    return name == "Mean" or getattr(node, "_saved_reduction", 0) == 1


def _reduces_samples(name: str, node: Any) -> bool:
    """Whether an operation adds up numbers of several samples."""
    if name in ("Mm", "Mv"):
        one, other = (each if each is not None and _leads_to_output([each]) else None for each, _ in node.next_functions)
        if (one is None) == (other is None):
            return False
        return _is_over(other, {0}) if one is None else _is_over(one, {1})
    return name in _REDUCING | _ADDING_ROWS and _is_over_samples(node)


def _permutes_samples(node: Any) -> bool:
    """Whether rows of samples are taken in another order, all of them."""
    operand = node.next_functions[0][0]
    if _operation(node) == "IndexSelect":
        axis, index = node._saved_dim, node._saved_index
    else:
        axis, index = 0, node._saved_indices[0]
        if any(each is not None for each in node._saved_indices[1:]):
            return False  # an element of each row
    shape = _shape(operand) if operand is not None else ()
    if index is None or index.dtype in (torch.bool, torch.uint8) or index.dim() != 1 or not shape:
        return False
    order = index.tolist()
    axis %= len(shape)
    return order != sorted(order) and sorted(order) == [*range(shape[axis])] and _is_over(operand, {axis})


def _axes(node: Any, *, among: int) -> set[int]:
    """The axes that an operation goes along, of so many; all of them where the graph does not say."""
    name = _operation(node)
    if name.endswith("BatchNorm"):
        return {0} if node._saved_training else set()
    if name == "NativeLayerNorm":
        return set(range(among - len(node._saved_normalized_shape), among))
    if name.startswith("Linalg") and name != "LinalgVectorNorm":
        return set(range(among)[-2:])
    if name == "Pdist":
        return {0}
    given = getattr(node, "_saved_dim", getattr(node, "_saved_dims", None))
    given = (given,) if isinstance(given, int) else given or range(among)
    return {_axis(each, among) for each in given}


def _axis(number: int, among: int) -> int:
    return (number - 2**64 if number >= 2**63 else number) % among  # torch keeps -1 without its sign


def _is_over_samples(node: Any, *, joined: bool = True) -> bool:
    """Whether an operation goes along the samples of an output of the network, or of what was made of it row by row.

    `joined` says whether also along those of several outputs, one after the other: half of them may be all of one output.
    """
    operand, number = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
    if operand is None:
        return False
    axes = _axes(node, among=max(1, len(_shape(operand, number))))
    return _is_over(operand, axes, number=number, joined=joined)


def _is_over(operand: Any, axes: Iterable[int], *, number: int | None = None, joined: bool = True) -> bool:
    """As `_is_over_samples`, of some axes of what an operation takes."""
    if not _shape(operand, number) or 0 in _shape(operand, number):
        return False
    waiting, seen = [(operand, number, frozenset(axes))], set[Any]()
    while waiting:
        node, number, along = waiting.pop()
        if (node, number, along) in seen:
            continue
        seen.add((node, number, along))
        name, shape = _operation(node), _shape(node, number)
        if is_output(node):
            if samples_axis(node) in along:
                return True
            continue
        for below, place in (edge for edge in node.next_functions if edge[0] is not None):
            own = _shape(below, place)
            moved = _moved(name, node, along, own=own) if joined or name not in _JOINING else None
            reduces = name in _OVER_OTHERS and along == {0} and own[:1] == shape[:1] and len(own) > 1
            if moved is not None:
                waiting.append((below, place, moved))
            elif len(own) <= len(shape) and all(a in (1, b) for a, b in zip(own[::-1], shape[::-1], strict=False)):  # broadcast
                first = len(shape) - len(own)
                same = frozenset(axis - first for axis in along if axis >= first and own[axis - first] == shape[axis])
                waiting.append((below, place, same))
            elif reduces and (name == "NllLoss" or 0 not in _axes(node, among=len(own))):
                waiting.append((below, place, along))
    return False


def _moved(name: str, node: Any, axes: frozenset[int], *, own: tuple[int, ...]) -> frozenset[int] | None:
    """Which axes of its operand, of shape `own`, those of a result are; None for what neither turns, drops nor adds any."""
    among, shape = len(own), _shape(node)
    if name == "Cat":
        return axes
    if name == "Stack":
        new = _axis(node._saved_dim, among + 1)
        return frozenset(axis - (axis > new) for axis in axes if axis != new)
    if name in ("T", "Transpose") and among > 1:
        one, other = (0, 1) if name == "T" else (_axis(node._saved_dim0, among), _axis(node._saved_dim1, among))
        return frozenset({one: other, other: one}.get(axis, axis) for axis in axes)
    if name == "Permute":
        return frozenset(_axis(node._saved_dims[axis], among) for axis in axes)
    if name in _PARTING and own != shape:
        return axes - {_axis(node._saved_dim, among)}
    if name in ("Select", "Unbind"):
        dropped = _axis(node._saved_dim, among)
        return frozenset(axis + (axis >= dropped) for axis in axes)
    if name in _RESHAPING and among and shape:
        return frozenset(_reshaped(axes, shape, own))
    if name == "Expand":
        new = len(shape) - among
        return frozenset(axis - new for axis in axes if axis >= new and own[axis - new] == shape[axis])
    if name == "Unsqueeze":
        added = _axis(node._saved_dim, among + 1)
        return frozenset(axis - (axis > added) for axis in axes if axis != added)
    return None


def _reshaped(axes: frozenset[int], shape: tuple[int, ...], own: tuple[int, ...]) -> Iterator[int]:
    """Which axes of `own`, viewed as `shape`, those of that shape go along: of one axis that became several, the first does."""
    mine, theirs = ([axis for axis, size in enumerate(each) if size != 1] for each in (own, shape))
    while mine and theirs:
        here, there = [mine.pop(0)], [theirs.pop(0)]
        while (a := math.prod(own[axis] for axis in here)) != (b := math.prod(shape[axis] for axis in there)):
            if not (mine if a < b else theirs):
                return
            (here if a < b else there).append((mine if a < b else theirs).pop(0))
        if there[0] in axes:
            yield from here if len(there) == 1 else here[:1]


def _rolls_parts(name: str, node: Any) -> bool:
    """Whether a roll of outputs, one after the other, goes by whole outputs: to the same sample of another."""
    return name == "Roll" and all(shift % max(1, min(_samples_of(node), default=1)) == 0 for shift in node._saved_shifts)


def _rows(node: Any) -> tuple[range, int]:
    """Which ones a slice takes along its axis, and of how many."""
    shape = _shape(node.next_functions[0][0])
    (axis,) = _axes(node, among=len(shape))
    if _operation(node) == "Select":
        index = _axis(node._saved_index, shape[axis])
        return range(index, index + 1), shape[axis]
    return range(shape[axis])[node._saved_start : node._saved_end : node._saved_step], shape[axis]


def _parts(node: Any, number: int) -> set[tuple[Any, Any]]:
    """The parts of the samples that a tensor is made of: what is cut, and which part."""
    waiting, seen, found = [(node, number)], set[Any](), set[tuple[Any, Any]]()
    while waiting:
        edge = node, number = waiting.pop()
        if node is None or edge in seen or _ends(node):
            continue
        seen.add(edge)
        name = _operation(node)
        if name in _CUTTING and _is_over_samples(node, joined=False):
            part = _rows(node) if name in _TAKING else number
            found.add((node.next_functions[0], part))
        else:
            waiting += node.next_functions
    return found


def _samples_of(node: Any) -> set[int]:
    """How many samples the outputs have that a node was made of."""
    found = set[int]()

    def is_found(other: Any) -> bool:
        axis, shape = samples_axis(other) if is_output(other) else None, _shape(other)
        if _operation(other) in _JOINING | _RESHAPING and _is_over(other, {0}):
            axis = 0
        if axis is not None and axis < len(shape):
            found.add(shape[axis])
        return False

    leads_to([node], is_found, ends_at=lambda other: _operation(other) in _ACROSS_RANKS)
    return found


def _pairs(operands: list[Any]) -> bool:
    """Whether a matrix product of two tensors that come from outputs multiplies samples with each other: not where each product
    is of one sample, which is where the first axis of both has all of them."""
    shapes = [_shape(each) for each in operands[-2:]]
    samples = (_samples_of(operands[-2]) & _samples_of(operands[-1])) - {1}
    return any(
        all(number in shape for shape in shapes) and not (len(shapes[0]) > 2 and shapes[0][0] % number == 0)
        for number in samples
    )


def _is_broadcast_twice(operands: list[Any]) -> bool:
    """Whether an element-wise operation takes each sample with each: of shapes (samples, 1) and (1, samples), or of both
    expanded to (samples, samples)."""
    if len(operands) != 2:
        return False
    if len({*map(_shape, operands)}) == 1:
        shape = _shape(operands[0])
        equal = [pair for pair in itertools.permutations(range(len(shape)), 2) if shape[pair[0]] == shape[pair[1]] > 1]
        return any(
            _is_over(operands[0], {one}) and _is_over(operands[1], {other}) and not _is_over(operands[0], {other})
            for one, other in equal
        )
    most = max(len(_shape(each)) for each in operands)
    one, other = sorted(((1,) * (most - len(_shape(each))) + _shape(each) for each in operands), key=lambda shape: -shape[0])
    if not one[0] > other[0] == 1 or not any(a == 1 and b == one[0] for a, b in zip(one, other, strict=True)):
        return False
    return one[0] in _samples_of(operands[0]) & _samples_of(operands[1])


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

    leads_to(nodes, is_chosen, ends_at=_ends)
    return found[0] if found else None


def _leads_to_output(nodes: Iterable[Any]) -> bool:
    """Whether the gradient of an output of the network comes through one of these nodes."""
    return leads_to(nodes, is_output, ends_at=lambda node: _operation(node) in _ACROSS_RANKS)
