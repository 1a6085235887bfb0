"""What a block costs, as plain facts for planners, read off the program over the sample batch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from tatami.partition.tracing.axis_factors import deep_leaves, extent
from tatami.partition.tracing.exporting import FollowedProgram, ModuleCall
from tatami.partition.tracing.operators import CONVOLUTIONS, TRANSPOSED, Following, aten
from tatami.partition.tracing.saved_activations import KeepingRun
from tatami.partition.tracing.units import UnitAxis
from tatami.random_state import kept_torch_state
from tatami.workload import ELEMENT_FLOP, Block


def facts_of(
    module: nn.Module, call: ModuleCall, program: FollowedProgram, following: Following, candidates: Sequence[UnitAxis]
) -> list[Block]:
    """The facts of each candidate, per sample of the call; names are left to the caller."""
    samples = call.samples
    parameters = dict(module.named_parameters(remove_duplicate=False))
    requires_grad = any(
        isinstance(leaf, torch.Tensor) and leaf.requires_grad for leaf in pytree.tree_leaves((call.args, dict(call.kwargs)))
    )
    kept = _kept_bytes(module, call, program) if candidates else {}
    return [_facts(candidate, program, following, parameters, samples, requires_grad, kept) for candidate in candidates]


def _kept_bytes(module: nn.Module, call: ModuleCall, program: FollowedProgram) -> dict[fx.Node, int]:
    """What each operation of the program makes that is kept for backward."""
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    # Running statistics are changed in place, and must not be the module's own.
    tensors |= {name: buffer.clone() for name, buffer in module.named_buffers(remove_duplicate=False)}
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    inputs = [leaves[index].detach().requires_grad_(leaves[index].requires_grad) for index in program.given]
    own = [tensors[name] for name in program.tensors]
    run = KeepingRun(program.graph, own)
    with torch.enable_grad(), kept_torch_state():
        run.run(*own, *inputs)
    return run.sizes_bytes


def _facts(
    candidate: UnitAxis,
    program: FollowedProgram,
    following: Following,
    parameters: dict[str, nn.Parameter],
    samples: int,
    requires_grad: bool,
    kept: dict[fx.Node, int],
) -> Block:
    inside = [node for node in program.graph.graph.nodes if _has(following, node, candidate) or node in candidate.exits]
    needed = _requiring_gradients(program, parameters, requires_grad=requires_grad)
    forward_flop = backward_flop = 0.0
    for node in inside:
        if node.op == "call_function":
            flop = _flop(node, following)
            forward_flop += flop
            backward_flop += flop * _gradients(node, needed, following)
    entered = {
        operand
        for node in inside
        if node.op == "call_function"
        for operand in node.all_input_nodes
        if not _has(following, operand, candidate) and _depends_on_inputs(operand, program)
    }
    trained = [program.tensors[at] for at in candidate.tensors if program.tensors[at] in parameters]
    owned = sum(parameters[name].numel() for name in trained if parameters[name].requires_grad)
    forward = sum(_numel(node) for node in candidate.exits)
    backward = sum(_numel(node) for node in entered if _is_float(node)) if requires_grad else 0
    activations = sum(size for node, size in kept.items() if _has(following, node, candidate))
    kind, unit = _words(candidate, following, inside)
    return Block(
        units=candidate.units,
        unit_parameters=owned // candidate.units,
        forward_elements=forward // samples,
        backward_elements=backward // samples,
        flop_per_unit=(forward_flop + backward_flop) / samples / candidate.units,
        forward_fraction=forward_flop / max(1.0, forward_flop + backward_flop),
        forward_sums=len(candidate.exits),
        backward_sums=sum(_is_float(node) for node in entered) if requires_grad else 0,
        unit_activation_bytes=activations / samples / candidate.units,
        kind=kind,
        unit=unit,
    )


def _has(following: Following, node: fx.Node, candidate: UnitAxis) -> bool:
    axes = following.axes.get(node, ()) if node not in candidate.whole else ()
    tensors = axes if isinstance(axes, tuple) else (axes,)
    return any(candidate.atom in deep_leaves(axis) for tensor in tensors for axis in tensor or ())


def _requiring_gradients(
    program: FollowedProgram, parameters: dict[str, nn.Parameter], *, requires_grad: bool
) -> frozenset[fx.Node]:
    trained = {name for name, each in parameters.items() if each.requires_grad}
    found = set[fx.Node]()
    places = [node for node in program.graph.graph.nodes if node.op == "placeholder"]
    for place, node in enumerate(places):
        if program.tensors[place] in trained if place < len(program.tensors) else requires_grad and _is_float(node):
            found.add(node)
    for node in program.graph.graph.nodes:
        if not found.isdisjoint(node.all_input_nodes):
            found.add(node)
    return frozenset(found)


def _gradients(node: fx.Node, needed: frozenset[fx.Node], following: Following) -> int:
    """For how many operands the backward pass computes something as large as the operation."""
    if node.target in CONVOLUTIONS or node in following.contracted:
        values = [(each, each.meta["val"]) for each in node.args if isinstance(each, fx.Node)]
        operands = [each for each, value in values if isinstance(value, torch.Tensor) and value.dim() > 1]
        return sum(each in needed for each in operands[-2:])
    return 2 * (not needed.isdisjoint(node.all_input_nodes))


def _depends_on_inputs(node: fx.Node, program: FollowedProgram) -> bool:
    outside = set([each for each in node.graph.nodes if each.op == "placeholder"][len(program.tensors) :])
    seen, todo = set(), [node]
    while todo:
        here = todo.pop()
        if here in outside:
            return True
        if here not in seen:
            seen.add(here)
            todo += here.all_input_nodes
    return False


def _hint(size: Any) -> int:
    return size if isinstance(size, int) else int(size.node.hint)


def _numel(node: fx.Node) -> int:
    value = node.meta.get("val")
    return math.prod(_hint(size) for size in value.shape) if isinstance(value, torch.Tensor) else 0


def _is_float(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def _flop(node: fx.Node, following: Following) -> float:
    """Flop of one node forward; an element-wise operation counts `ELEMENT_FLOP` for each element."""
    if node in following.attentions:
        q, k, v = (node.args[at].meta["val"].shape for at in range(3))  # type: ignore[union-attr]
        queries = math.prod(_hint(size) for size in q[:-1])
        return 2.0 * queries * _hint(k[-2]) * (_hint(q[-1]) + _hint(v[-1]))
    if node.target in CONVOLUTIONS:
        x, weight = (each.meta["val"].shape for each in node.args[:2])  # type: ignore[union-attr]
        # Of each output what it is made of; of a transposed convolution, of each input what is made of it.
        places = math.prod(_hint(size) for size in x) if node.target in TRANSPOSED else _numel(node)
        inner = math.prod(_hint(size) for size in weight[1:])
        return 2.0 * places * inner
    if node in following.contracted and node.target is not aten.sum.dim_IntList:
        return 2.0 * _numel(node) * _hint(extent(following.contracted[node]))
    target = node.target
    pointwise = isinstance(target, torch._ops.OpOverload) and torch.Tag.pointwise in target.tags
    return float(ELEMENT_FLOP * _numel(node)) if pointwise or target in (aten.softmax.int, aten.batch_norm.default) else 0.0


def _words(candidate: UnitAxis, following: Following, inside: Sequence[fx.Node]) -> tuple[str, str]:
    """The kind of a block and what its unit is, for people."""
    if any(node in following.attentions or node.target is aten.softmax.int for node in inside):
        if candidate.joined:
            return "attention with perceptron", "head"
        shares = {runs.per_unit for runs in candidate.tensors.values()}
        per_run = {inner for runs in candidate.tensors.values() for _, inner in runs.runs}
        return "attention", "head" if len(per_run) == 1 else "group of heads" if len(shares) > 1 else "head"
    if any(node.target in CONVOLUTIONS for node in inside):
        return "convolution pair", "group of channels" if candidate.joined else "channel"
    entrances = [node for node in inside if node in following.contracted and node not in candidate.exits]
    packed = any(len(runs.runs) > 1 for runs in candidate.tensors.values())
    multiplied = any(
        node.target is aten.mul.Tensor and len([one for one in node.all_input_nodes if one in inside]) > 1 for node in inside
    )
    unit = "group of hidden units" if candidate.joined else "hidden unit"
    return ("gated pair" if multiplied and (packed or len(entrances) > 1) else "linear pair"), unit
