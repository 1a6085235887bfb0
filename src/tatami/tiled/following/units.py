"""Which axes of a followed program are axes of units, and which tensors of the module they cut."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from tatami.tiled.following.atoms import Atom, deep_leaves, lies_on, places
from tatami.tiled.following.exporting import FollowedProgram, line_of_node
from tatami.tiled.following.operators import Following
from tatami.tiled.rows import UnitRuns

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
    """

    atom: Atom
    units: int
    tensors: dict[int, UnitRuns]
    exits: tuple[fx.Node, ...]
    whole: frozenset[fx.Node] = frozenset()


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
    """Of weights that no candidate cuts: the line of the user's code that needs all of what their rows give at once."""
    cut = {index for candidate in candidates for index in candidate.tensors}
    own = [node for node in program.graph.graph.nodes if node.op == "placeholder"][: len(program.tensors)]
    found = {}
    for index, node in enumerate(own):
        atoms = deep_leaves(following.axes.get(node, [[]])[0]) if node.meta["val"].dim() > 1 and index not in cut else []
        stop = atoms[0].stop if atoms and all(atom.mixed for atom in atoms) else None
        if stop is not None and line_of_node(stop):
            found[program.tensors[index]] = line_of_node(stop)
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
    for node, axis in following.contracted.items():
        for atom in deep_leaves(axis):
            if node in with_weights:
                exits.setdefault(atom, []).append(node)
            else:
                atom.mixed = True
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
        found.append(UnitAxis(atom=atom, units=atom.size, tensors=tensors, exits=exits_in_order, whole=whole))
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
