"""Which axes of a followed program are axes of units, and which tensors of the module they cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tatami.partition.tracing.axis_factors import Atom, deep_leaves, lies_on, parts_of, places, unify
from tatami.partition.tracing.exporting import FollowedProgram, line_of_node
from tatami.partition.tracing.operators import Following
from tatami.runtime.rows import UnitRuns

_MUCH_LARGER = 4
"""An axis that begins first gives way to one whose tensors have more elements than so many times its own: the hidden units of
a perceptron come before the few of a low-rank adapter on it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnitAxis:
    """An axis of units that was found in a program.

    Attributes:
        atom: the axis, as the following knows it.
        units: its length.
        tensors: by index among the program's own tensors: where the units lie.
        exits: the nodes that sum over the units.
        whole: nodes that have all units on every rank, because they come from outside or go there: the position bias of an
            attention that is handed from layer to layer. What uses them takes its own units out of them.
        joined: whether parts of one weight have units of their own, of which each unit here has some (`_join_parts`).
    """

    atom: Atom
    units: int
    tensors: dict[int, UnitRuns]
    exits: tuple[fx.Node, ...]
    whole: frozenset[fx.Node] = frozenset()
    joined: bool = False


def follow(program: FollowedProgram) -> Following:
    """The axes of all tensors of `program`."""
    following = Following()
    for node in program.graph.graph.nodes:
        following.visit(node)
    return following


def unclear_axes(program: FollowedProgram, following: Following) -> frozenset[tuple[int, int]]:
    """Axes of the inputs, as (leaf, axis), whose lengths must be known for views of them to be understood.

    What `x.view(-1, 64)` does to (samples, a, b, c) cannot be told as long as a, b and c may be anything.
    """
    views = [value for node in following.unclear for value in (node, *node.all_input_nodes) if value in following.axes]
    needed = {symbol for value in views for size in value.meta["val"].shape for symbol in _symbols(size)}
    inputs = [node for node in program.graph.graph.nodes if node.op == "placeholder"][len(program.tensors) :]
    return frozenset(
        (leaf, axis)
        for leaf, node, sample_axis in zip(program.given, inputs, program.sample_axes, strict=True)
        for axis, size in enumerate(node.meta["val"].shape)
        if axis != sample_axis and needed & _symbols(size)
    )


def _symbols(size: Any) -> set[str]:
    return {str(symbol) for symbol in size.node.expr.free_symbols} if isinstance(size, torch.SymInt) else set()


def find_stops(program: FollowedProgram, following: Following, candidates: Collection[UnitAxis]) -> dict[str, str]:
    """Why no candidate cuts a weight, where that can be told, by the weight's name.

    Mostly a line of the user's code needs all of what its rows give at once, or all of a part of it. Where no part is needed
    whole, it is the line that cuts it into parts, or puts them together with others. Or the layer that sums over the rows is
    cut along another axis, which has more weights.
    """
    cut = {index for candidate in candidates for index in candidate.tensors}
    order = {node: index for index, node in enumerate(program.graph.graph.nodes)}
    own = [node for node in order if node.op == "placeholder"][: len(program.tensors)]
    whole_of: dict[Atom, Atom] = {}
    for atom in (atom for node in order for axis in _all_axes(following, node) for atom in deep_leaves(axis)):
        for inner in (inner for _, piece in atom.pieces or () for inner in deep_leaves([piece])):
            whole_of.setdefault(inner, atom)
    found = {}
    for index, node in enumerate(own):
        if node.meta["val"].dim() < 2 or index in cut or not following.axes.get(node, [[]])[0]:
            continue
        parts = parts_of(following.axes[node][0])
        ends = [atom for part in parts if all(atom.mixed for atom in part) for atom in part[:1]]
        ends += [whole_of[atom] for part in parts for atom in part if atom in whole_of]
        # What was needed whole before this weight was used, the input that its result is added to, says nothing of the weight.
        first = min(map(order.__getitem__, node.users), default=0)
        lines = (line_of_node(atom.stop) for atom in ends if atom.stop is not None and order[atom.stop] >= first)
        if line := next(filter(None, lines), ""):
            found[program.tensors[index]] = f"needed whole at {line}"
        for other in sorted(cut):
            inputs = following.axes.get(own[other], [])[1:]
            if any(lies_on(inputs, atom) and not atom.mixed for rows in parts for atom in rows):
                said = f"what sums over its {node.meta['val'].shape[0]} outputs is split along an axis with more weights"
                found.setdefault(program.tensors[index], said)
    return found


def find_units(program: FollowedProgram, following: Following, *, taken: Collection[str] = ()) -> list[UnitAxis]:
    """Disjoint axes of units, in the order of the program; of two that share a tensor the one that begins first.

    An axis is one of units if some tensor's rows produce it, some operation sums over it, and nothing mixes it. Where several
    axes end in the same sum (a head and its part of a group), the one that most tensors share is it.

    Args:
        taken: names of tensors that belong to other blocks already.
    """
    nodes = list(program.graph.graph.nodes)
    order = {node: index for index, node in enumerate(nodes)}
    own = [node for node in nodes if node.op == "placeholder"][: len(program.tensors)]
    outside = [node for node in nodes if node.op == "placeholder"][len(program.tensors) :]
    outputs = next(node for node in nodes if node.op == "output").all_input_nodes
    exits: dict[Atom, list[fx.Node]] = {}
    with_weights = _sums_with_weights(program, following)
    for node in following.contracted.keys() - with_weights:
        for atom in deep_leaves(following.contracted[node]):
            atom.mixed = True
    joined = _join_parts(following, own)
    for node, axis in following.contracted.items():
        for atom in dict.fromkeys(deep_leaves(axis) if node in with_weights else ()):
            exits.setdefault(atom, []).append(node)
    found = []
    for atom, ends in exits.items():
        if atom.mixed or not isinstance(atom.size, int) or atom.size < 2 or atom.pieces is not None:
            continue
        whole = _whole(following, atom, [*outside, *outputs])
        if whole & set(ends):
            continue
        tensors = _tensors(following, [node if node not in whole else None for node in own], atom)
        if tensors is None or len(tensors) < 2 or any(program.tensors[index] in taken for index in tensors):
            continue
        exits_in_order = tuple(sorted(ends, key=order.__getitem__))
        found.append(
            UnitAxis(atom=atom, units=atom.size, tensors=tensors, exits=exits_in_order, whole=whole, joined=atom in joined)
        )
    found.sort(key=lambda each: (order[each.exits[0]], -len(each.tensors), -each.units))
    sizes = [node.meta["val"].numel() for node in own]
    chosen: list[UnitAxis] = []
    used: set[int] = set()
    for candidate in found:
        rivals = [each for each in found if each.tensors.keys() & candidate.tensors.keys()]
        most = max(sum(sizes[index] for index in each.tensors) for each in rivals)
        if used & candidate.tensors.keys() or most > _MUCH_LARGER * sum(sizes[index] for index in candidate.tensors):
            continue
        used |= candidate.tensors.keys()
        chosen.append(candidate)
    return chosen


def _join_parts(following: Following, own: Sequence[fx.Node]) -> set[Atom]:
    """Where one layer computes parts with units of their own, make them one axis of units; returns these axes.

    A layer that gives queries, keys and values of 4 heads and 64 hidden units could be split by heads, or by hidden units, only
    if its weight were two. So a unit is a head with 16 hidden units. Where 4 did not divide 64, or a part is needed whole (keys
    that all heads share), nothing is joined.
    """
    joined = []
    for node in own:
        axes = following.axes.get(node, ())
        parts = parts_of(axes[0]) if len(axes) > 1 else []  # a norm of what was put together has parts, too, but computes none
        firsts = [next((atom for atom in part if not atom.mixed), None) for part in parts]
        sizes = {atom: atom.size for atom in firsts if atom is not None and isinstance(atom.size, int) and atom.pieces is None}
        if len(sizes) < 2 or len(sizes) < len(set(firsts)):
            continue
        least = min(sizes, key=sizes.__getitem__)
        if not any(size % sizes[least] for size in sizes.values()):
            for atom in sizes:
                unify([least], [atom])
            joined.append(least)
    return {atom.root for atom in joined}


def _sums_with_weights(program: FollowedProgram, following: Following) -> set[fx.Node]:
    """The contractions in which one operand comes from the module's own tensors alone.

    A sum over what two results share (queries times keys) could be split as well, but what would travel is its result.
    """
    nodes = list(program.graph.graph.nodes)
    outside = set([node for node in nodes if node.op == "placeholder"][len(program.tensors) :])
    for node in nodes:
        if outside & set(node.all_input_nodes):
            outside.add(node)
    return {
        node
        for node in following.contracted
        if len(node.all_input_nodes) > 1 and any(operand not in outside for operand in node.all_input_nodes[:3])
    }


def _whole(following: Following, atom: Atom, ends: Sequence[fx.Node]) -> frozenset[fx.Node]:
    """The nodes with the axis that lie outside, and those that they are made of."""
    whole: set[fx.Node] = set()
    todo = list(ends)
    while todo:
        node = todo.pop()
        if node not in whole and lies_on(_all_axes(following, node), atom):
            whole.add(node)
            todo += node.all_input_nodes
    return frozenset(whole)


def _tensors(following: Following, own: Sequence[fx.Node | None], atom: Atom) -> dict[int, UnitRuns] | None:
    """Where the units lie in the module's own tensors; None where they are only a part of an axis, or on two axes."""
    result: dict[int, UnitRuns] = {}
    for index, node in enumerate(own):
        if node is None:
            continue
        for number, axis in enumerate(following.axes.get(node, ())):
            runs = places(axis, atom)
            if not runs:
                continue
            length = node.meta["val"].shape[number]
            if index in result or sum(inner for _, inner in runs) * atom.size != length:
                return None
            result[index] = UnitRuns(axis=number, runs=tuple(sorted(runs)))
    return result


def _all_axes(following: Following, node: fx.Node) -> list[list[Atom]]:
    axes = following.axes.get(node, ())
    return [axis for tensor in (axes if isinstance(axes, tuple) else (axes,)) for axis in tensor or ()]
