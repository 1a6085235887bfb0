"""Along which axes of its operand an operation goes, in the graph of a loss: whether those are the samples of an output.

Outputs know on which of their axes the samples lie (`passes.samples_axis`). From an operation, the walk goes down to them and
turns the axes round by what lies between: views, transpositions, slices, sums. Where shapes do not say, an axis is not one of
samples.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Any

from tatami.gradients.passes import is_output, leads_to, samples_axis

_REDUCING = frozenset({"Mean", "Sum", "Nansum"})
_OVER_OTHERS = _REDUCING | {"NllLoss", "LinalgVectorNorm", "Norm", "Logsumexp", "Amax", "Amin"}
"""Operations that may reduce each row to a number."""
_PARTING = frozenset({"Slice", "Split", "SplitWithSizes"})
TAKING = frozenset({"Slice", "Select"})
_RESHAPING = frozenset({"View", "UnsafeView", "ReshapeAlias"})
JOINING = frozenset({"Cat", "Stack"})
_ADDING_ROWS = frozenset({"IndexAdd", "ScatterAdd", "ScatterReduce", "IndexReduce"})
ACROSS_RANKS = frozenset({
    "OverBatch", "_Exchanged", "_Broadcast", "_Gather", "_Scatter", "_Reduce", "_Reduce_Scatter", "_AllGather",
    "_AllGatherBase", "_AlltoAll", "_AlltoAllSingle", "_AllReduce",
})  # fmt: skip
"""What takes numbers of other ranks: `over_batch`, `tatami.functions`, `torch.distributed.nn`. Nothing below is judged."""
CUTTING = _PARTING | TAKING | {"Unbind"}


def ends(node: Any) -> bool:
    """Whether what is below is not judged: it is the network, or numbers of other ranks are in what the operation gives."""
    return is_output(node) or operation_of(node) in ACROSS_RANKS


def operation_of(node: Any) -> str:
    """Without the number by which autograd tells its variants, as those with a number or an axis, apart."""
    return str(node.name()).rstrip("0123456789").removesuffix("Backward")


def shape_of(node: Any, number: int | None = None) -> tuple[int, ...]:
    """The shape of what the operation gives; where that is several tensors, of the one of this number, or (0,)."""
    shapes = [tuple(each.shape) for each in getattr(node, "_input_metadata", None) or ()]
    number = 0 if len(shapes) == 1 else number
    return (0,) if number is None or number >= len(shapes) else shapes[number]


def reduces_samples(name: str, node: Any) -> bool:
    """Whether an operation adds up numbers of several samples."""
    if name in ("Mm", "Mv"):
        one, other = (each if each is not None and leads_to_output([each]) else None for each, _ in node.next_functions)
        if (one is None) == (other is None):
            return False
        return is_over(other, {0}) if one is None else is_over(one, {1})
    return name in _REDUCING | _ADDING_ROWS and is_over_samples(node)


def _axes(node: Any, *, among: int) -> set[int]:
    """The axes that an operation goes along, of so many; all of them where the graph does not say."""
    name = operation_of(node)
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


def is_over_samples(node: Any, *, joined: bool = True) -> bool:
    """Whether an operation goes along the samples of an output of the network, or of what was made of it row by row.

    `joined` says whether also along those of several outputs, one after the other: half of them may be all of one output.
    """
    operand, number = next((edge for edge in node.next_functions if edge[0] is not None), (None, 0))
    if operand is None:
        return False
    axes = _axes(node, among=max(1, len(shape_of(operand, number))))
    return is_over(operand, axes, number=number, joined=joined)


def is_over(operand: Any, axes: Iterable[int], *, number: int | None = None, joined: bool = True) -> bool:
    """As `is_over_samples`, of some axes of what an operation takes."""
    if not shape_of(operand, number) or 0 in shape_of(operand, number):
        return False
    waiting, seen = [(operand, number, frozenset(axes))], set[Any]()
    while waiting:
        node, number, along = waiting.pop()
        if (node, number, along) in seen:
            continue
        seen.add((node, number, along))
        name, shape = operation_of(node), shape_of(node, number)
        if is_output(node):
            if samples_axis(node) in along:
                return True
            continue
        for below, place in (edge for edge in node.next_functions if edge[0] is not None):
            own = shape_of(below, place)
            moved = _moved(name, node, along, own=own) if joined or name not in JOINING else None
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
    among, shape = len(own), shape_of(node)
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


def rolls_parts(name: str, node: Any) -> bool:
    """Whether a roll of outputs, one after the other, goes by whole outputs: to the same sample of another."""
    return name == "Roll" and all(shift % max(1, min(samples_of(node), default=1)) == 0 for shift in node._saved_shifts)


def rows_of(node: Any) -> tuple[range, int]:
    """Which ones a slice takes along its axis, and of how many."""
    shape = shape_of(node.next_functions[0][0])
    (axis,) = _axes(node, among=len(shape))
    if operation_of(node) == "Select":
        index = _axis(node._saved_index, shape[axis])
        return range(index, index + 1), shape[axis]
    return range(shape[axis])[node._saved_start : node._saved_end : node._saved_step], shape[axis]


def parts_of(node: Any, number: int) -> set[tuple[Any, Any]]:
    """The parts of the samples that a tensor is made of: what is cut, and which part."""
    waiting, seen, found = [(node, number)], set[Any](), set[tuple[Any, Any]]()
    while waiting:
        edge = node, number = waiting.pop()
        if node is None or edge in seen or ends(node):
            continue
        seen.add(edge)
        name = operation_of(node)
        if name in CUTTING and is_over_samples(node, joined=False):
            part = rows_of(node) if name in TAKING else number
            found.add((node.next_functions[0], part))
        else:
            waiting += node.next_functions
    return found


def samples_of(node: Any) -> set[int]:
    """How many samples the outputs have that a node was made of."""
    found = set[int]()

    def is_found(other: Any) -> bool:
        axis, shape = samples_axis(other) if is_output(other) else None, shape_of(other)
        if operation_of(other) in JOINING | _RESHAPING and is_over(other, {0}):
            axis = 0
        if axis is not None and axis < len(shape):
            found.add(shape[axis])
        return False

    leads_to([node], is_found, ends_at=lambda other: operation_of(other) in ACROSS_RANKS)
    return found


def leads_to_output(nodes: Iterable[Any]) -> bool:
    """Whether the gradient of an output of the network comes through one of these nodes."""
    return leads_to(nodes, is_output, ends_at=lambda node: operation_of(node) in ACROSS_RANKS)
