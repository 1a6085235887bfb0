"""Finding the blocks of a network: its modules are followed one by one, from the smallest up, and what is found is tested.

Around what was followed stays the user's own Python. Modules that are alike (the layers of a transformer) are followed once.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.partition.tracing.block_costs import facts_of
from tatami.partition.tracing.capturing import Captured, inputs_of
from tatami.partition.tracing.exporting import FollowedProgram, ModuleCall, NotFollowedError, export
from tatami.partition.tracing.local_program import LocalProgram, localise
from tatami.partition.tracing.mixing import close
from tatami.partition.tracing.operators import Following
from tatami.partition.tracing.restore_state import alike, kept
from tatami.partition.tracing.same_program import SameResults
from tatami.partition.tracing.settings import has_hooks, hooked_inside
from tatami.partition.tracing.split_test import believe
from tatami.partition.tracing.units import UnitAxis, find_stops, find_units, follow, unclear_axes
from tatami.progress import reported
from tatami.random_state import kept_torch_state
from tatami.runtime.rows import UnitRuns
from tatami.workload import Block

_LAYERS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
"""A single one of these is no block."""


_WORTH_FOLLOWING = 16
"""A module whose parts were followed is followed itself if so small a part of its weights could still be split."""

_SMALL = f"what is left in {{}} is less than 1/{_WORTH_FOLLOWING} of its weights, so no split was looked for"
_AROUND = "{} around it is not followed, since {} is split by itself"
_KEEPS = "its forward pass keeps something in the module ({}), which a program of it would not; return it, or leave it out"

_TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
_HALF_TOLERANCE = 3e-2
"""Tolerance, of the largest element: a program and its module compute the same operations one by one."""


@dataclass(frozen=True, kw_only=True)
class Mode:
    """A followed module in training or in evaluation.

    Attributes:
        program, local: its programs.
        modes: of the module and of those inside of it: whether they were in training.
    """

    program: FollowedProgram
    local: LocalProgram
    modes: tuple[bool, ...]


@dataclass(frozen=True, kw_only=True)
class FollowedBlock:
    """A block of a followed module.

    Attributes:
        cuts: the tensors that are cut, by their names in the module.
        facts: what it costs.
    """

    cuts: Mapping[str, UnitRuns]
    facts: Block


@dataclass(frozen=True, kw_only=True)
class Followed:
    """A module that runs with a part of its units; modules that are alike share all of it.

    Attributes:
        training, evaluation: its programs.
        blocks: in the order of the programs' inputs.
        stops: why weights are whole that are, where that is known, by their names.
    """

    training: Mode
    evaluation: Mode
    blocks: tuple[FollowedBlock, ...]
    stops: Mapping[str, str]

    def mode(self, training: bool) -> Mode:
        return self.training if training else self.evaluation


def follow_modules(
    model: nn.Module, captured: Captured, *, taken: Collection[str], closed: Collection[str] = ()
) -> tuple[dict[str, Followed], dict[str, str], dict[str, str]]:
    """The modules of `model` that can be split, by name; why others that have weights cannot; and why weights are whole.

    The last are weights, by name, of modules that were followed, or that are too small a part of what is around them.

    Args:
        model: the whole network; it is not changed.
        taken: names of tensors that other blocks have already, or that must stay whole.
        closed: names of modules that are not looked into; nor can be followed what they are a part of.
    """
    found: dict[str, Followed] = {}
    reasons: dict[str, str] = {}
    stops: dict[str, str] = {}
    not_split: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    sizes = {name: parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False)}
    inside_first = sorted(names, key=lambda name: -(name.count(".") + 1 if name else 0))
    for name in reported(inside_first, "tatami.tile: tracing the network", unit="modules"):
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        if isinstance(module, _LAYERS) or name not in captured.calls:
            continue
        used = set(taken) | {inner for other, each in found.items() for inner in cut_names(other, each)}
        own = _weights(module, prefix)
        spare = [elements for parameter, elements in own.items() if parameter not in used]
        closed_inside = next((other for other in closed if f"{other}.".startswith(prefix)), None)
        why = ""
        if closed_inside is not None:
            why = _AROUND.format(name or "the network", closed_inside) if closed_inside != name else ""
        elif len(spare) > 1 and sum(spare) * _WORTH_FOLLOWING < sum(own.values()):
            why = _SMALL.format(name or "the network")
        if why:
            failed = tuple(f"{other}." for other in reasons)
            not_split |= {each: why for each in own if each not in used | not_split.keys() and not each.startswith(failed)}
        if why or len(spare) < 2 or any(not other or prefix.startswith(f"{other}.") for other in closed):
            continue
        inside = {other for other in found if other.startswith(prefix) or not prefix}
        taken_inside = {tensor for tensor in taken if tensor.startswith(prefix)} | captured.read_elsewhere(name)
        whole = frozenset(tensor.removeprefix(prefix) for tensor in taken_inside)
        backward = (inner for inner, each in module.named_modules() if has_hooks(each, forward=False))
        hooked = next(backward, hooked_inside(module))
        if hooked is not None:
            reasons[name] = f"{hooked or 'it'} has hooks, which a program of it would not call; remove them before it is tiled"
            continue
        kept = sorted(each.removeprefix(prefix) for each in captured.leaves_behind.attributes if each.startswith(prefix))
        if kept:
            reasons[name] = _KEEPS.format(", ".join(kept))
            continue
        result = _TRACED.of(module, captured.calls[name], whole)
        if isinstance(result, str):
            reasons[name] = result
            continue
        not_split = {weight: reason for weight, reason in not_split.items() if not weight.startswith(prefix)}
        stops |= {prefix + tensor: line for tensor, line in result.stops.items()}
        if result.blocks and _elements(sizes, {name: result}) > _elements(sizes, {other: found[other] for other in inside}):
            for other in inside:
                del found[other]
            found[name] = result
    return dict(sorted(found.items(), key=lambda item: names.index(item[0]))), reasons, not_split | stops


def _weights(module: nn.Module, prefix: str) -> dict[str, int]:
    """The elements of the weights that could begin or end a block, by name: not of embeddings, whose rows are looked up."""
    found = {}
    for inner, owner in module.named_modules(prefix=prefix.removesuffix(".")):
        for name, value in owner.named_parameters(recurse=False):
            if value.dim() > 1 and not isinstance(owner, nn.Embedding):
                found[f"{inner}.{name}" if inner else name] = value.numel()
    return found


def cut_names(name: str, followed: Followed) -> set[str]:
    """The tensors that a followed module splits, by their names in the network."""
    return {f"{name}.{tensor}" if name else tensor for block in followed.blocks for tensor in block.cuts}


def _elements(sizes: Mapping[str, int], found: Mapping[str, Followed]) -> int:
    """Number of elements of all the weights that are split; `sizes` has those of every weight of the network."""
    names = {tensor for name, each in found.items() for tensor in cut_names(name, each)}
    return sum(sizes.get(name, 0) for name in names)


def _followed(module: nn.Module, call: ModuleCall, whole: Collection[str]) -> Followed | str:
    """The module, followed in both modes; or why it cannot be."""
    args, kwargs = inputs_of(call)
    inputs = replace(call, args=args, kwargs=kwargs)
    was_training = {inner: inner.training for inner in module.modules()}
    try:
        modes, cuts = {}, {}
        for training in (True, False):
            module.train(training)
            modes[training] = program, _, candidates = _exported(module, inputs, whole)
            cuts[training] = [_cuts(program, candidate) for candidate in candidates]
        # In evaluation a model may leave something away; what it splits must be the same.
        common = [each for each in cuts[True] if each in cuts[False]]
        kept = {training: [modes[training][2][cuts[training].index(each)] for each in common] for training in (True, False)}
        localised = {}
        for training, (program, following, _) in modes.items():
            module.train(training)
            local = localise(program, following, kept[training])
            _believe(module, inputs, program, local, kept[training])
            inside = tuple(inner.training for inner in module.modules())
            localised[training] = Mode(program=program, local=local, modes=inside)
        program, following, _ = modes[True]
        facts = facts_of(module, call, program, following, kept[True])
    except NotFollowedError as error:
        return str(error)
    except Exception as error:  # a program that is odd beyond what is known of programs: it is repeated
        return f"its program could not be split ({type(error).__name__}: {error})"
    finally:
        for inner, mode in was_training.items():
            inner.training = mode
    blocks = tuple(FollowedBlock(cuts=cut, facts=fact) for cut, fact in zip(common, facts, strict=True))
    stops = find_stops(program, following, kept[True])
    return Followed(training=localised[True], evaluation=localised[False], blocks=blocks, stops=stops)


def _exported(module: nn.Module, call: ModuleCall, whole: Collection[str]) -> _Exported:
    """The program, with fixed lengths where more can be split then."""
    program = export(module, call)
    following = follow(program)
    found = program, following, find_units(program, following, taken=whole)
    fixed = unclear_axes(program, following)
    if not fixed:
        return found
    try:
        program = export(module, call, fixed=fixed)
    except NotFollowedError:
        return found
    following = follow(program)
    other = program, following, find_units(program, following, taken=whole)
    return other if _tensors_cut(other) > _tensors_cut(found) else found


_Exported: TypeAlias = "tuple[FollowedProgram, Following, list[UnitAxis]]"


def _tensors_cut(exported: _Exported) -> int:
    return sum(len(candidate.tensors) for candidate in exported[2])


def _believe(
    module: nn.Module, call: ModuleCall, program: FollowedProgram, local: LocalProgram, candidates: Sequence[UnitAxis]
) -> None:
    try:
        believe(module, call, program, local, candidates)
    except NotFollowedError:
        raise
    except Exception as error:  # any operation of the user's may fail with fewer units, or in double precision
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotFollowedError(f"its program fails in the test of its blocks: {reason[0]}") from error


def _cuts(program: FollowedProgram, candidate: UnitAxis) -> dict[str, UnitRuns]:
    return {program.tensors[index]: runs for index, runs in candidate.tensors.items()}


def _gives_the_same(module: nn.Module, call: ModuleCall, followed: Followed) -> bool:
    """Whether a program that was made of another module computes what this one does, for its own call, in both modes."""
    was_training = {inner: inner.training for inner in module.modules()}
    try:
        return all(_computes(module, call, followed.mode(training).program, training=training) for training in (True, False))
    except Exception:  # a program that does not fit fails at any of its operations
        return False
    finally:
        for inner, mode in was_training.items():
            inner.training = mode


def _computes(module: nn.Module, call: ModuleCall, program: FollowedProgram, *, training: bool) -> bool:
    module.train(training)
    results: list[list[Any]] = []
    for forward in (module, functools.partial(_run, module, program)):
        args, kwargs = pytree.tree_map_only(torch.Tensor, torch.clone, inputs_of(call))
        with kept(module), kept_torch_state(), torch.enable_grad():
            torch.manual_seed(0)
            results.append(pytree.tree_leaves(forward(*args, **kwargs)))
    return len(results[0]) == len(results[1]) and all(map(_agree, *results))


def _run(module: nn.Module, program: FollowedProgram, *args: Any, **kwargs: Any) -> Any:
    leaves = pytree.tree_leaves((args, kwargs))
    tensors: dict[str, torch.Tensor] = dict(module.named_parameters(remove_duplicate=False))
    tensors |= dict(module.named_buffers(remove_duplicate=False))
    return program.graph(*(tensors[name] for name in program.tensors), *(leaves[index] for index in program.given))


def _agree(one: Any, other: Any) -> bool:
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return alike(one, other)
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return close(one.detach(), other.detach(), tolerance=_TOLERANCE.get(one.dtype, _HALF_TOLERANCE))


_TRACED = SameResults(_followed, holds=_gives_the_same)
