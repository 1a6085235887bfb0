"""What the operations of an exported program do to the atoms of their operands.

One function for each kind of operation: it takes the node and the axes of its tensor inputs, joins, splits and mixes their
atoms, and returns the axes of its result. What is not listed here mixes everything: it can make a block be missed, never make
a wrong one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from tatami.partition.tracing.axis_factors import (
    Atom,
    Axes,
    Axis,
    all_mixed,
    cut,
    deep_leaves,
    extent,
    mix,
    put_together,
    regroup,
    regrouped,
    unify,
    whole_axis,
)

aten = torch.ops.aten

VIEWS = {aten.view.default, aten.reshape.default, aten._unsafe_view.default}
FILLS = {
    aten.zeros.default, aten.ones.default, aten.full.default, aten.empty.memory_format,
    aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default,
}  # fmt: skip
SPLITS = {aten.split.Tensor, aten.split_with_sizes.default, aten.chunk.default}
TRANSPOSED = {aten.conv_transpose1d.default, aten.conv_transpose2d.input, aten.conv_transpose3d.input}
CONVOLUTIONS = TRANSPOSED | {
    aten.conv1d.default, aten.conv2d.default, aten.conv3d.default,
    aten.conv1d.padding, aten.conv2d.padding, aten.conv3d.padding,
}  # fmt: skip
"""Input, weight, bias, and on place 6 the groups."""
_SAME = {
    aten.contiguous.default, aten.clone.default, aten.detach.default, aten.alias.default, aten.dropout.default,
    aten._to_copy.default, aten.to.dtype, aten.to.dtype_layout, aten.to.device, aten.to.other, aten.type_as.default,
    aten.zeros_like.default, aten.ones_like.default, aten.full_like.default, aten.dropout_.default,
    aten.lift_fresh_copy.default, aten.feature_dropout.default,
}  # fmt: skip
_WHERE = {aten.where.ScalarOther, aten.where.ScalarSelf}
"""Element by element, though torch does not mark them so."""
POOLS = {
    aten.max_pool1d.default, aten.max_pool2d.default, aten.max_pool3d.default, aten.avg_pool1d.default, aten.avg_pool2d.default,
    aten.avg_pool3d.default, aten.adaptive_avg_pool1d.default, aten.adaptive_avg_pool2d.default,
    aten.adaptive_max_pool2d.default, aten.upsample_nearest2d.vec, aten.upsample_bilinear2d.vec, aten.pad.default,
}  # fmt: skip
_REDUCTIONS = {
    aten.mean.dim, aten.amax.default, aten.amin.default, aten.softmax.int, aten.log_softmax.int, aten.cumsum.default,
    aten._softmax.default, aten.logsumexp.default, aten.var.correction, aten.std.correction, aten.argmax.default,
}  # fmt: skip
_KEEPS_SHAPE = {aten.softmax.int, aten.log_softmax.int, aten.cumsum.default, aten._softmax.default}


class Following:
    """The axes of every tensor of a program, and where axes are contracted.

    Attributes:
        axes: of every node that is a tensor; a list of them for a node that is several tensors.
        contracted: the axis that each contracting node sums over.
        attentions: the nodes that are attention.
        unclear: the views of which it could not be told what they do with the axes.
    """

    def __init__(self) -> None:
        self.unclear: list[fx.Node] = []
        self.axes: dict[fx.Node, Any] = {}
        self.contracted: dict[fx.Node, Axis] = {}
        self.attentions: set[fx.Node] = set()

    def of(self, node: Any) -> Axes:
        """The axes of one tensor."""
        axes = self.axes[node]
        assert isinstance(axes, list)
        return axes

    def visit(self, node: fx.Node) -> None:
        """Find the axes of `node`, whose inputs have been visited."""
        self._find(node)
        for seen in (node, *node.all_input_nodes):
            axes = self.axes.get(seen, ())
            for axis in (axis for tensor in (axes if isinstance(axes, tuple) else (axes,)) for axis in tensor or ()):
                for atom in deep_leaves(axis):
                    if (atom.mixed or atom.pieces is not None) and atom.stop is None:
                        atom.stop = node

    def _find(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if node.op in ("placeholder", "get_attr"):
            if isinstance(value, torch.Tensor):
                self.axes[node] = [whole_axis(size) for size in value.shape]
            return
        if node.target is aten._assert_tensor_metadata.default:
            return  # torch.export adds this check, which has no result, wherever code calls `x.to(dtype)`.
        if node.op != "call_function" or isinstance(value, (int, float, bool, torch.SymInt, torch.SymFloat, torch.SymBool)):
            return
        if node.target is operator.getitem:
            source, index = node.args
            inputs = self.axes.get(source)  # type: ignore[arg-type]
            if isinstance(inputs, tuple) and isinstance(index, int):
                self.axes[node] = inputs[index]
            return
        rule = _RULES.get(node.target) or (_elementwise if _is_pointwise(node.target) else None)
        shapes = _shapes(value)
        if rule is not None and shapes is not None:
            found = rule(self, node)
            if _fits(found, shapes):
                self.axes[node] = found
                return
        for operand in node.all_input_nodes:
            self.mix(operand)
        if isinstance(value, (tuple, list)):
            self.axes[node] = tuple(_unknown(each) if isinstance(each, torch.Tensor) else None for each in value)
        elif isinstance(value, torch.Tensor):
            self.axes[node] = _unknown(value)

    def mix(self, node: fx.Node) -> None:
        """All axes of `node`."""
        axes = self.axes.get(node, ())
        for one in axes if isinstance(axes, tuple) else (axes,):
            for axis in one or ():
                mix(axis)


Rule = Callable[[Following, fx.Node], Any]


def _unknown(value: torch.Tensor) -> Axes:
    return [[Atom(size, mixed=True)] for size in value.shape]


def _shapes(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.shape
    if isinstance(value, (tuple, list)) and all(isinstance(each, torch.Tensor) for each in value):
        return [each.shape for each in value]
    return None


def _fits(found: Any, shapes: Any) -> bool:
    """Whether a rule gave each result as many axes as it has."""
    if found is None:
        return False
    if isinstance(found, tuple):
        return len(found) == len(shapes) and all(len(axes) == len(shape) for axes, shape in zip(found, shapes, strict=True))
    return len(found) == len(shapes)


def _is_pointwise(target: Any) -> bool:
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags


def _tensors(following: Following, node: fx.Node) -> list[fx.Node]:
    return [operand for operand in node.all_input_nodes if operand in following.axes]


def _dims(value: Any, num_axes: int) -> list[int]:
    listed = range(num_axes) if value is None or value == [] else value if isinstance(value, (list, tuple)) else [value]
    return [int(dim) % num_axes for dim in listed]


def _argument(node: fx.Node, index: int, name: str, default: Any = None) -> Any:
    return node.args[index] if len(node.args) > index else node.kwargs.get(name, default)


# -- what keeps axes apart ------------------------------------------------------------------------------------------------


def _broadcast(operands: Sequence[Axes], num_axes: int) -> Axes:
    """Operands aligned at the last axis: those that are not of one element are the same."""
    result: Axes = []
    for position in range(num_axes):
        axis: Axis = []
        for axes in operands:
            index = position - (num_axes - len(axes))
            if index >= 0 and axes[index]:
                if axis:
                    unify(axis, axes[index])
                else:
                    axis = axes[index]
        result.append(axis)
    return result


def _elementwise(following: Following, node: fx.Node) -> Axes:
    return _broadcast([following.of(operand) for operand in _tensors(following, node)], node.meta["val"].dim())


def _view(following: Following, node: fx.Node) -> Axes:
    axes, sizes = following.of(node.args[0]), node.meta["val"].shape
    found = regrouped(axes, sizes)
    if found is None:
        following.unclear.append(node)
    return found or all_mixed(axes, sizes)


def _transpose(following: Following, node: fx.Node) -> Axes:
    axes = list(following.of(node.args[0]))
    one, other = (int(dim) % len(axes) for dim in node.args[1:3])  # type: ignore[arg-type]
    axes[one], axes[other] = axes[other], axes[one]
    return axes


def _t(following: Following, node: fx.Node) -> Axes:
    return following.of(node.args[0])[::-1]


def _permute(following: Following, node: fx.Node) -> Axes:
    axes = following.of(node.args[0])
    return [axes[dim] for dim in _dims(node.args[1], len(axes))]


def _unsqueeze(following: Following, node: fx.Node) -> Axes:
    axes = list(following.of(node.args[0]))
    axes.insert(int(node.args[1]) % (len(axes) + 1), [])  # type: ignore[arg-type]
    return axes


def _squeeze(following: Following, node: fx.Node) -> Axes:
    axes = following.of(node.args[0])
    dims = _dims(_argument(node, 1, "dim"), len(axes))
    return [axis for index, axis in enumerate(axes) if not (index in dims and not axis)]


def _expand(following: Following, node: fx.Node) -> Axes:
    shape = node.meta["val"].shape
    axes = following.of(node.args[0])
    aligned: Axes = [[] for _ in range(len(shape) - len(axes))] + axes
    return [axis or whole_axis(size) for axis, size in zip(aligned, shape, strict=True)]


def _repeat_interleave(following: Following, node: fx.Node) -> Axes | None:
    repeats, dim = node.args[1], _argument(node, 2, "dim")
    if not isinstance(repeats, int) or dim is None:
        return None
    axes = list(following.of(node.args[0]))
    axes[dim] = [*axes[dim], *whole_axis(repeats)]
    return axes


def _select(following: Following, node: fx.Node) -> Axes:
    axes = list(following.of(node.args[0]))
    axis = axes.pop(int(_argument(node, 1, "dim")) % len(axes))
    # One of three, of a packed projection that was viewed as 3 x rest: the three are no units.
    mix(axis)
    return axes


def _unbind(following: Following, node: fx.Node) -> tuple[Axes, ...]:
    axes = list(following.of(node.args[0]))
    mix(axes.pop(int(_argument(node, 1, "dim", 0)) % len(axes)))
    return tuple(axes for _ in node.meta["val"])


def _slice(following: Following, node: fx.Node) -> Axes:
    axes = list(following.of(node.args[0]))
    dim = int(_argument(node, 1, "dim", 0)) % len(axes)
    start, stop, step = _argument(node, 2, "start"), _argument(node, 3, "end"), _argument(node, 4, "step", 1)
    size, length = extent(axes[dim]), node.meta["val"].shape[dim]
    if isinstance(size, int) and isinstance(length, int):
        if length == size:
            return axes
        if step == 1 and isinstance(start or 0, int) and (stop is None or isinstance(stop, int)):
            begin = (start or 0) + (size if (start or 0) < 0 else 0)
            axes[dim] = cut(axes[dim], begin, begin + length)
            return axes
    mix(axes[dim])
    axes[dim] = [Atom(length, mixed=True)]
    return axes


def _split(following: Following, node: fx.Node) -> tuple[Axes, ...]:
    axes = following.of(node.args[0])
    dim = int(_argument(node, 2, "dim", 0)) % len(axes)
    result, start = [], 0
    for part in node.meta["val"]:
        size = part.shape[dim]
        pieces = list(axes)
        if isinstance(size, int):
            pieces[dim] = cut(axes[dim], start, start + size)
            start += size
        else:
            mix(axes[dim])
            pieces[dim] = [Atom(size, mixed=True)]
        result.append(pieces)
    return tuple(result)


# -- what contracts axes ------------------------------------------------------------------------------------------------


def _contract(following: Following, node: fx.Node, one: Axis, other: Axis) -> None:
    unify(one, other)
    following.contracted[node] = one


def _linear(following: Following, node: fx.Node) -> Axes | None:
    x, weight = following.of(node.args[0]), following.of(node.args[1])
    if len(weight) != 2:
        return None
    _contract(following, node, x[-1], weight[1])
    bias = _argument(node, 2, "bias")
    if bias is not None:
        unify(weight[0], following.of(bias)[0])
    return [*x[:-1], weight[0]]


def _bilinear(following: Following, node: fx.Node) -> Axes:
    """Weights are (outputs, inputs, inputs). Outputs stay apart; inputs do not, since torch refuses a layer without inputs."""
    one, other, weight = (following.of(operand) for operand in node.args[:3])
    for axis in (one[-1], other[-1], weight[1], weight[2]):
        mix(axis)
    following.contracted[node] = [*weight[1], *weight[2]]
    bias = _argument(node, 3, "bias")
    if bias is not None:
        unify(weight[0], following.of(bias)[0])
    return [*_broadcast([one[:-1], other[:-1]], len(one) - 1), weight[0]]


def _matmul(following: Following, node: fx.Node) -> Axes | None:
    one, other = following.of(node.args[0]), following.of(node.args[1])
    if len(one) < 2 or len(other) < 2:
        return None
    _contract(following, node, one[-1], other[-2])
    batch = _broadcast([one[:-2], other[:-2]], max(len(one), len(other)) - 2)
    return [*batch, one[-2], other[-1]]


def _einsum(following: Following, node: fx.Node) -> Axes | None:
    """The axes of an einsum of two tensors, with every letter once in each."""
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    given, arrow, wanted = equation.partition("->")
    letters = given.split(",")
    if not arrow or "." in equation or len(letters) != 2 or any(len(set(each)) < len(each) for each in letters):
        return None
    one, other = (dict(zip(each, following.of(x), strict=True)) for each, x in zip(letters, operands, strict=True))  # type: ignore[arg-type]
    summed = [letter for letter in one if letter in other and letter not in wanted]
    if set(one.keys() ^ other.keys()) - set(wanted):
        return None
    for letter in set(one) & set(other) & set(wanted):
        unify(one[letter], other[letter])
    if summed:
        for letter in summed:
            unify(one[letter], other[letter])
        following.contracted[node] = [atom for letter in summed for atom in one[letter]]
    return [(one | other)[letter] for letter in wanted]


def _glu(following: Following, node: fx.Node) -> Axes | None:
    axes = list(following.of(node.args[0]))
    dim = int(_argument(node, 1, "dim", -1)) % len(axes)
    size = extent(axes[dim])
    if not isinstance(size, int):
        return None
    values, gates = cut(axes[dim], 0, size // 2), cut(axes[dim], size // 2, size)
    unify(values, gates)
    axes[dim] = values
    return axes


def _addmm(following: Following, node: fx.Node) -> Axes:
    bias, one, other = (following.of(operand) for operand in node.args[:3])
    _contract(following, node, one[1], other[0])
    return _broadcast([bias, [one[0], other[1]]], 2)


def _convolution(following: Following, node: fx.Node) -> Axes | None:
    """Weights are (outputs, inputs of a group, ...); (inputs, outputs of a group, ...) where it is transposed."""
    x, weight = following.of(node.args[0]), following.of(node.args[1])
    shape = node.meta["val"].shape
    groups = _argument(node, 6, "groups", 1)
    if len(x) != len(weight) or (groups != 1 and not isinstance(extent(x[1]), int)):
        return None
    for axis in (*x[2:], *weight[2:]):
        mix(axis)
    transposed = node.target in TRANSPOSED
    outputs, inputs = (weight[1], weight[0]) if transposed else (weight[0], weight[1])
    if groups == 1:
        _contract(following, node, x[1], inputs)
    else:
        own, inside = in_groups(x[1], groups)
        unify(own, in_groups(weight[0], groups)[0])
        mix(inside)  # all that a group takes in goes into each of its outputs
        unify(inside, in_groups(inputs, groups)[1] if transposed else inputs)
        outputs = [*own, *outputs] if transposed else outputs
    bias = _argument(node, 2, "bias")
    if bias is not None:
        unify(outputs, following.of(bias)[0])
    return [x[0], outputs, *([Atom(size, mixed=True)] for size in shape[2:])]


def in_groups(axis: Axis, groups: int) -> Axes:
    """An axis of channels as its groups, and the channels of each."""
    size = extent(axis)
    assert isinstance(size, int)
    return regroup([axis], [groups, size // groups])


def _sum(following: Following, node: fx.Node) -> Axes | None:
    axes = following.of(node.args[0])
    dims = _dims(_argument(node, 1, "dim"), len(axes))
    if len(dims) != 1:
        return _reduce(following, node)
    following.contracted[node] = axes[dims[0]]
    return _left_over(axes, dims, keep=bool(_argument(node, 2, "keepdim", False)))


def _attention(following: Following, node: fx.Node) -> Axes | None:
    """Heads stay apart, and so do queries; keys and the size of a head do not."""
    q, k, v = (list(following.of(operand)) for operand in node.args[:3])
    if not len(q) == len(k) == len(v) == 4:
        return None
    if _argument(node, 7, "enable_gqa", node.kwargs.get("enable_gqa", False)):
        heads, groups = extent(q[1]), extent(k[1])
        assert isinstance(heads, int)
        assert isinstance(groups, int)
        outer = regroup([q[1]], [groups, heads // groups])[0]
        unify(outer, k[1])
        unify(outer, v[1])
    else:
        unify(q[1], k[1])
        unify(q[1], v[1])
    batch = _broadcast([q[:1], k[:1], v[:1]], 1)
    mask = _argument(node, 3, "attn_mask")
    if mask is not None:
        axes = following.of(mask)
        if len(axes) > 4:
            return None
        _broadcast([[*batch, q[1], q[2], k[2]], axes], 4)
    for axis in (q[3], k[2], k[3], v[2], v[3]):
        mix(axis)
    following.attentions.add(node)
    return [*batch, q[1], q[2], v[3]]


# -- what mixes axes ------------------------------------------------------------------------------------------------------


def _left_over(axes: Axes, dims: Sequence[int], *, keep: bool) -> Axes:
    if keep:
        return [[] if index in dims else axis for index, axis in enumerate(axes)]
    return [axis for index, axis in enumerate(axes) if index not in dims]


def _reduce(following: Following, node: fx.Node) -> Axes:
    axes = following.of(node.args[0])
    dims = _dims(_argument(node, 1, "dim"), len(axes))
    for dim in dims:
        mix(axes[dim])
    if node.target in _KEEPS_SHAPE:
        return axes
    return _left_over(axes, dims, keep=len(axes) == node.meta["val"].dim())


def _norm(following: Following, node: fx.Node) -> Axes:
    """Layer norm and RMS norm: over the last axes, which the weights share."""
    axes = following.of(node.args[0])
    for operand in node.args[2:4]:
        if isinstance(operand, fx.Node):
            weight = following.of(operand)
            _broadcast([axes[len(axes) - len(weight) :], weight], len(weight))
    for axis in axes[len(axes) - len(node.args[1]) :]:  # type: ignore[arg-type]
        mix(axis)
    return axes


def _batch_norm(following: Following, node: fx.Node) -> Axes:
    """Every channel by itself; over samples it is made whole by the code that runs the program (`whole_batch_norm`)."""
    axes = following.of(node.args[0])
    for operand in node.args[1:5]:
        if isinstance(operand, fx.Node):
            unify(axes[1], following.of(operand)[0])
    return axes


def _pool(following: Following, node: fx.Node) -> Axes | None:
    """Samples and channels stay apart. Only with both of them in front."""
    axes, shape = following.of(node.args[0]), node.meta["val"].shape
    spatial = _SPATIAL.get(str(node.target).split(".")[1], len(axes) - 2)
    if len(axes) != spatial + 2:
        return None
    if node.target is aten.pad.default and len(node.args[1]) > 2 * spatial:  # type: ignore[arg-type]
        return None
    for axis in axes[2:]:
        mix(axis)
    return [*axes[:2], *([Atom(size, mixed=True)] for size in shape[2:])]


_SPATIAL = {
    "max_pool1d": 1, "avg_pool1d": 1, "adaptive_avg_pool1d": 1, "max_pool3d": 3, "avg_pool3d": 3,
    "max_pool2d": 2, "avg_pool2d": 2, "adaptive_avg_pool2d": 2, "upsample_nearest2d": 2, "upsample_bilinear2d": 2,
}  # fmt: skip


def _embedding(following: Following, node: fx.Node) -> Axes:
    weight, index = following.of(node.args[0]), following.of(node.args[1])
    mix(weight[0])
    return [*index, weight[1]]


def _concatenate(following: Following, node: fx.Node) -> Axes:
    operands = [following.of(operand) for operand in node.args[0]]  # type: ignore[union-attr]
    num_axes = len(operands[0])
    dim = int(_argument(node, 1, "dim", 0)) % num_axes
    others = _broadcast([[axis if index != dim else [] for index, axis in enumerate(axes)] for axes in operands], num_axes)
    lengths = [axes[dim] for axes in operands]
    if all(isinstance(extent(axis), int) for axis in lengths):
        others[dim] = put_together(lengths)
        return others
    for axis in lengths:
        mix(axis)
    others[dim] = [Atom(node.meta["val"].shape[dim], mixed=True)]
    return others


_RULES: dict[Any, Rule] = {
    **dict.fromkeys(VIEWS, _view),
    **dict.fromkeys(_SAME, lambda following, node: following.of(node.args[0])),
    **dict.fromkeys(FILLS, lambda _, node: [whole_axis(size) for size in node.meta["val"].shape]),
    **dict.fromkeys(SPLITS, _split),
    **dict.fromkeys(CONVOLUTIONS, _convolution),
    **dict.fromkeys(POOLS, _pool),
    **dict.fromkeys(_WHERE, _elementwise),
    **dict.fromkeys(_REDUCTIONS, _reduce),
    aten.unflatten.int: _view,
    aten.flatten.using_ints: _view,
    aten.transpose.int: _transpose,
    aten.t.default: _t,
    aten.numpy_T.default: _t,
    aten.permute.default: _permute,
    aten.unsqueeze.default: _unsqueeze,
    aten.squeeze.dim: _squeeze,
    aten.squeeze.dims: _squeeze,
    aten.squeeze.default: _squeeze,
    aten.expand.default: _expand,
    aten.repeat_interleave.self_int: _repeat_interleave,
    aten.select.int: _select,
    aten.unbind.int: _unbind,
    aten.slice.Tensor: _slice,
    aten.linear.default: _linear,
    aten.bilinear.default: _bilinear,
    aten.matmul.default: _matmul,
    aten.mm.default: _matmul,
    aten.bmm.default: _matmul,
    aten.addmm.default: _addmm,
    aten.einsum.default: _einsum,
    aten.glu.default: _glu,
    aten.sum.dim_IntList: _sum,
    aten.scaled_dot_product_attention.default: _attention,
    aten.layer_norm.default: _norm,
    aten.rms_norm.default: _norm,
    aten.batch_norm.default: _batch_norm,
    aten.embedding.default: _embedding,
    aten.cat.default: _concatenate,
}
