"""A followed program, rewritten so that a rank runs it with its own units.

    entrance   what every rank of the replica has whole (the block's input, a mask that is learned, the weights of a norm
               inside) is handed over by `copy_to_replica`: its gradient is summed over the replica
    inside     the same operations with local sizes: 6 heads become `units` heads wherever a size is written down
    exit       the operation that sums over the units gives a part of the result; `sum_over_replica` makes it whole, and a bias
               is added afterwards, once

Sizes are inputs of the rewritten program, so a re-tiling needs no new one. Dropout and batch normalization are handed to
`ModuleContext`, which knows the global batch.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tatami.partition.tracing.axis_factors import Axes, Axis, deep_leaves, extent, leaves, places
from tatami.partition.tracing.exporting import FollowedProgram, NotFollowedError
from tatami.partition.tracing.operators import CONVOLUTIONS, FILLS, POOLS, SPLITS, VIEWS, Following, aten, in_groups
from tatami.partition.tracing.units import UnitAxis
from tatami.runtime import batch_operations
from tatami.runtime import context as steps
from tatami.runtime.batch_operations import Factor, NormFacts, UnitFactor
from tatami.runtime.rows import UnitRuns
from tatami.stages.recording import memory_order

_NEW_FILLS = {aten.new_zeros.default, aten.new_ones.default, aten.new_full.default, aten.new_empty.default}
_RECURRENT = {
    **dict.fromkeys((aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input), 5),
    **dict.fromkeys((aten.lstm.data, aten.gru.data, aten.rnn_tanh.data, aten.rnn_relu.data), 6),
}
"""Where the probability of their dropout is among the arguments; whether they train comes next."""
_DROPOUTS = {aten.dropout.default, aten.dropout_.default}
_LOSSES = {
    aten.cross_entropy_loss.default: torch.nn.functional.cross_entropy,
    aten.nll_loss_nd.default: torch.nn.functional.nll_loss,
    aten.nll_loss.default: torch.nn.functional.nll_loss,
}


@dataclass(frozen=True, kw_only=True)
class LocalProgram:
    """A program of one rank, of which all ranks have the same.

    Attributes:
        graph: (context, facts, units here of each candidate, own tensors, leaves of the call) -> leaves of the result.
        facts: what the graph looks up: the shapes of what dropout and batch normalization are applied to.
    """

    graph: fx.GraphModule
    facts: tuple[Any, ...]


def localise(program: FollowedProgram, following: Following, candidates: Sequence[UnitAxis]) -> LocalProgram:
    """The program of one rank. Its own tensors are cut to the units here.

    Raises:
        NotFollowedError: something inside could not be written with local sizes.
    """
    return _Localiser(program, following, candidates).run()


@dataclass(frozen=True, kw_only=True)
class _Sizes:
    """An axis of which a candidate's units are a part, with the node of the units here."""

    total: int
    here: fx.Node


class _Localiser:
    def __init__(self, program: FollowedProgram, following: Following, candidates: Sequence[UnitAxis]) -> None:
        self._program = program
        self._following = following
        self._candidates = candidates
        self._index = {candidate.atom: index for index, candidate in enumerate(candidates)}
        self._exits = {node: index for index, candidate in enumerate(candidates) for node in candidate.exits}
        self._graph = fx.Graph()
        self._context = self._graph.placeholder("context")
        self._look_up = self._graph.placeholder("facts")
        self._facts: list[Any] = []
        self._units = [
            _Sizes(total=candidate.units, here=self._graph.placeholder(f"units_{index}"))
            for index, candidate in enumerate(candidates)
        ]
        self._new: dict[fx.Node, Any] = {}
        self._entered: dict[tuple[fx.Node, int], fx.Node] = {}
        self._samples = _sample_symbol(program)
        self._own = [node for node in program.graph.graph.nodes if node.op == "placeholder"][: len(program.tensors)]

    def run(self) -> LocalProgram:
        for node in self._program.graph.graph.nodes:
            if node.op == "call_function":
                self._new[node] = self._call(node)
            elif node.op == "output":
                self._graph.output(self._mapped(node.args[0]))
            elif node.op == "placeholder":
                self._new[node] = self._graph.placeholder(node.name)
            else:
                raise NotFollowedError(f"its program has a {node.op} ({node.target})")
        self._graph.lint()
        return LocalProgram(graph=fx.GraphModule(torch.nn.Module(), self._graph), facts=tuple(self._facts))

    # -- one operation ------------------------------------------------------------------------------------------------

    def _call(self, node: fx.Node) -> Any:
        outputs = self._blocks(node)
        index = self._exits.get(node)
        around = outputs | ({index} if index is not None else set())
        consumed = set().union(*(self._blocks(operand) for operand in node.all_input_nodes)) if node.all_input_nodes else set()
        if len(around) > 1:
            raise NotFollowedError(f"{node.target} belongs to two blocks")
        if consumed - around and node in self._following.axes:
            raise NotFollowedError(f"{node.target} needs all units of a block at once")
        if index is not None:
            return self._exit(node)
        inside = next(iter(around), None)
        args = [self._mapped(arg, inside) for arg in node.args]
        kwargs = {name: self._mapped(arg, inside) for name, arg in node.kwargs.items()}
        special = self._special(node, args)
        if special is not None:
            return special
        if _draws(node):
            raise NotFollowedError(f"{node.target} draws random numbers that cannot be drawn for the whole batch")
        if inside is not None:
            self._write_local_sizes(node, args)
            if node.target is aten.split.Tensor:
                return self._graph.call_function(aten.split_with_sizes.default, tuple(args), kwargs)
            if node.target is aten.scaled_dot_product_attention.default:
                return self._graph.call_function(steps.attention, tuple(args), kwargs)
            if node.target in VIEWS and (axes := self._left_to_torch(node, args[1])):
                return self._graph.call_function(steps.view, (self._fact(axes), *args[:2]))
            if node.target in CONVOLUTIONS or node.target in POOLS:
                operation = self._fact(node.target)
                return self._graph.call_function(steps.on_channels, (self._context, operation, *args), kwargs)
        # The order in which an attention's result is in memory depends on the device: what was a view may need a copy there.
        target = aten.reshape.default if node.target in VIEWS else node.target
        return self._graph.call_function(target, tuple(args), kwargs)  # type: ignore[arg-type]

    def _exit(self, node: fx.Node) -> fx.Node:
        """A partial result, the sum over the replica, and then the bias."""
        args = [self._mapped(arg) for arg in node.args]
        bias: Any = None
        if node.target is aten.addmm.default:
            if node.kwargs:
                raise NotFollowedError("addmm with factors")
            bias, (one, other) = args[0], args[1:3]
            partial = self._graph.call_function(aten.mm.default, (one, other))
        elif node.target is aten.linear.default:
            bias = args[2] if len(args) > 2 else None
            partial = self._graph.call_function(aten.linear.default, tuple(args[:2]))
        elif node.target in CONVOLUTIONS:
            bias = args[2] if len(args) > 2 else None
            convolution = self._fact(node.target)
            partial = self._graph.call_function(steps.on_channels, (self._context, convolution, *args[:2], None, *args[3:]))
            if bias is not None:
                spatial = len(self._following.of(node.args[0])) - 2
                bias = self._graph.call_function(aten.view.default, (bias, [-1, *[1] * spatial]))
        else:
            partial = self._graph.call_function(node.target, tuple(args))  # type: ignore[arg-type]
        whole = self._graph.call_function(steps.leave, (self._context, partial))
        return whole if bias is None else self._graph.call_function(steps.add_bias, (whole, bias))

    def _special(self, node: fx.Node, args: list[Any]) -> fx.Node | None:
        """Operations that look at the whole batch."""
        if node.target in _DROPOUTS and args[2] and args[1]:
            shape = self._fact(self._shape(self._following.of(node.args[0]), f"dropout ({node.name})"))
            orders = self._fact((memory_order(node.args[0].meta["val"]),))  # type: ignore[union-attr]
            return self._graph.call_function(batch_operations.dropout, (self._context, args[0], args[1], shape, orders))
        if node.target is aten.scaled_dot_product_attention.default:
            values = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), args, strict=False))
            if values.get("dropout_p", node.kwargs.get("dropout_p", 0.0)):
                q, k = (self._following.of(operand) for operand in node.args[:2])
                shape = self._fact(self._shape([*q[:3], k[2]], "the dropout of an attention"))
                kwargs = {name: self._mapped(arg) for name, arg in node.kwargs.items()}
                return self._graph.call_function(batch_operations.attention, (self._context, shape, *args), kwargs)
        if node.target in _LOSSES and not node.kwargs:
            return self._graph.call_function(batch_operations.mean_loss, (self._fact(_LOSSES[node.target]), *args))
        if node.target is aten.batch_norm.default:
            facts = NormFacts(channels=self._axis(self._following.of(node.args[0])[1]), layer=self._layer_of(node))
            return self._graph.call_function(batch_operations.batch_norm, (self._context, self._fact(facts), *args[:8]))
        return None

    def _layer_of(self, node: fx.Node) -> str:
        """The layer that holds the tensors of an operation; empty where it has none of its own."""
        names = dict(zip(self._own, self._program.tensors, strict=False))
        found = {names[operand].rpartition(".")[0] for operand in node.all_input_nodes if operand in names}
        return found.pop() if len(found) == 1 else ""

    def _fact(self, fact: Any) -> fx.Node:
        self._facts.append(fact)
        return self._graph.call_function(operator.getitem, (self._look_up, len(self._facts) - 1))

    def _write_local_sizes(self, node: fx.Node, args: list[Any]) -> None:
        """Change the sizes among the arguments of an operation inside of a block."""
        target = node.target
        if target in VIEWS or target is aten.expand.default:
            args[1] = self._local_sizes(args[1], self._following.of(node), node.meta["val"].shape)
        elif target is aten.unflatten.int:
            first = int(node.args[1]) % len(self._following.of(node.args[0]))  # type: ignore[arg-type]
            last = first + len(args[2])
            args[2] = self._local_sizes(args[2], self._following.of(node)[first:last], node.meta["val"].shape[first:last])
        elif target in FILLS:
            at = 1 if target in _NEW_FILLS else 0
            args[at] = self._local_sizes(args[at], self._following.of(node), node.meta["val"].shape)
        elif target is aten.split.Tensor or target is aten.split_with_sizes.default:
            dim = int(args[2] if len(args) > 2 else 0)
            pieces = zip(self._following.axes[node], node.meta["val"], strict=True)
            # As many pieces as there are of the whole: torch would make one piece of nothing.
            args[1] = [self._local_size(value.shape[dim], axes[dim]) for axes, value in pieces]
        elif target is aten.slice.Tensor:
            self._write_local_range(node, args)
        elif target in CONVOLUTIONS and len(args) > 6 and args[6] != 1:
            args[6] = self._local_size(args[6], in_groups(self._following.of(node.args[0])[1], args[6])[0])
        elif target in SPLITS or target is aten.repeat_interleave.self_int:
            return

    def _write_local_range(self, node: fx.Node, args: list[Any]) -> None:
        """A range of a packed axis begins and ends where the runs of the units do."""
        dim = int(args[1] if len(args) > 1 else 0)
        source, result = self._following.of(node.args[0])[dim], self._following.of(node)[dim]
        if not self._factors_of(source):
            return
        size, length = extent(source), extent(result)
        if size == length:
            return
        factors = self._factors_of(result)
        if not factors or not isinstance(size, int):
            raise NotFollowedError("a range is cut out of the units")
        start = args[2] or 0
        start += size if start < 0 else 0
        args[2] = self._scaled(start, factors)
        args[3] = self._scaled(start + length, factors)

    # -- sizes --------------------------------------------------------------------------------------------------------

    def _local_sizes(self, sizes: Sequence[Any], axes: Axes, shape: Sequence[Any]) -> list[Any]:
        known = [
            static if isinstance(size, int) and size == -1 and isinstance(static, int) else size
            for size, static in zip(sizes, shape, strict=True)
        ]
        return [self._local_size(size, axis) for size, axis in zip(known, axes, strict=True)]

    def _left_to_torch(self, node: fx.Node, sizes: Sequence[Any]) -> tuple[int, ...]:
        """The axes of the tensor that make up the one whose size is -1; empty where there is none, or they are cut through."""
        for size, axis in zip(sizes, self._following.of(node), strict=True):
            if isinstance(size, int) and size == -1:
                wanted = {id(leaf) for leaf in leaves(axis)}
                own = [[id(leaf) for leaf in leaves(each)] for each in self._following.of(node.args[0])]
                found = tuple(index for index, each in enumerate(own) if each and wanted.issuperset(each))
                return found if wanted == {leaf for index in found for leaf in own[index]} else ()
        return ()

    def _local_size(self, size: Any, axis: Axis) -> Any:
        if isinstance(size, int) and size == -1:
            return size
        return self._scaled(size, self._factors_of(axis))

    def _factors_of(self, axis: Axis) -> list[_Sizes]:
        found = [self._units[self._index[leaf]] for leaf in leaves(axis) if leaf in self._index]
        if not found:
            inside = {self._index[leaf] for leaf in deep_leaves(axis) if leaf in self._index}
            found = [self._units[index] for index in inside]
        return found

    def _scaled(self, size: Any, factors: Sequence[_Sizes]) -> Any:
        """`size` with the units here in the context of all."""
        for factor in factors:
            if isinstance(size, int):
                if size % factor.total:
                    raise NotFollowedError(f"a size of {size} is no multiple of its {factor.total} units")
                rest: Any = size // factor.total
            else:
                rest = self._graph.call_function(operator.floordiv, (size, factor.total))
            size = self._graph.call_function(operator.mul, (rest, factor.here)) if rest != 0 else 0
        return size

    def _shape(self, axes: Axes, what: str) -> tuple[tuple[Factor, ...], ...]:
        """A shape as the factors that `batch_operations` needs to make it whole.

        Raises:
            NotFollowedError: the samples share an axis with something of unknown length.
        """
        result = []
        for axis in axes:
            factors = self._axis(axis)
            if len(factors) > 1 and any(factor is None for factor in factors):
                raise NotFollowedError(f"{what} is applied where samples are not on an axis of their own")
            result.append(factors)
        return tuple(result)

    def _axis(self, axis: Axis) -> tuple[Factor, ...]:
        factors: list[Factor] = []
        for leaf in leaves(axis):
            inside = [index for other, index in self._index.items() if places([leaf], other)]
            if inside:
                runs = places([leaf], self._candidates[inside[0]].atom)
                factors.append(UnitFactor(block=inside[0], total=self._units[inside[0]].total, runs=tuple(runs)))
            elif isinstance(leaf.size, int):
                factors.append(leaf.size)
            else:
                factors.append("samples" if str(leaf.size) == self._samples else None)
        return tuple(factors)

    # -- names ----------------------------------------------------------------------------------------------------------

    def _blocks(self, node: fx.Node) -> set[int]:
        axes = self._following.axes.get(node, ())
        tensors = axes if isinstance(axes, tuple) else (axes,)
        atoms = {leaf for tensor in tensors for axis in tensor or () for leaf in deep_leaves(axis)}
        indices = {self._index[atom] for atom in atoms if atom in self._index}
        return {index for index in indices if node not in self._candidates[index].whole}

    def _mapped(self, value: Any, inside: int | None = None) -> Any:
        """The new name of every node in `value`; what comes from outside of the block enters it."""

        def rename(node: fx.Node) -> Any:
            new = self._new[node]
            if inside is None or inside in self._blocks(node):
                return new
            key = (node, inside)
            if key not in self._entered:
                if _is_differentiable(node):
                    new = self._graph.call_function(steps.enter, (self._context, new))
                self._entered[key] = self._units_of(node, new, inside) if node in self._candidates[inside].whole else new
            return self._entered[key]

        return fx.node.map_arg(value, rename)

    def _units_of(self, node: fx.Node, whole: fx.Node, block: int) -> fx.Node:
        """The units here of a tensor that has all of them."""
        candidate = self._candidates[block]
        for number, axis in enumerate(self._following.of(node)):
            runs = places(axis, candidate.atom)
            if runs:
                if sum(inner for _, inner in runs) * candidate.units != extent(axis):
                    raise NotFollowedError(f"{node.name} has the units of a block on a part of an axis")
                units = self._fact(UnitRuns(axis=number, runs=tuple(sorted(runs))))
                whole = self._graph.call_function(steps.units_here, (self._context, whole, units, block))
        return whole


def _draws(node: fx.Node) -> bool:
    """Whether an operation draws random numbers in the mode that was followed."""
    target = node.target
    if target in _RECURRENT:
        dropout, training = node.args[_RECURRENT[target]], node.args[_RECURRENT[target] + 1]
        return bool(dropout and training)
    if target in _DROPOUTS or target is aten.scaled_dot_product_attention.default:
        return False  # of probability 0, or in evaluation
    return isinstance(target, torch._ops.OpOverload) and torch.Tag.nondeterministic_seeded in target.tags


def _is_differentiable(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and (value.is_floating_point() or value.is_complex())


def _sample_symbol(program: FollowedProgram) -> str:
    """The symbol of the number of samples."""
    inputs = [node for node in program.graph.graph.nodes if node.op == "placeholder"][len(program.tensors) :]
    for node, axis in zip(inputs, program.sample_axes, strict=True):
        if axis is not None:
            return str(node.meta["val"].shape[axis])
    return ""
