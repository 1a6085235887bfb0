"""Finding the blocks of a network: its modules are followed one by one, from the smallest up, and what is found is tested.

Around what was followed stays the user's own Python. Modules that are alike (the layers of a transformer) are followed once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.tiled.following.believing import believe
from tatami.tiled.following.capturing import Captured, inputs_of
from tatami.tiled.following.exporting import FollowedProgram, ModuleCall, NotFollowedError, export
from tatami.tiled.following.facts import facts_of
from tatami.tiled.following.local import LocalProgram, localise
from tatami.tiled.following.operators import Following
from tatami.tiled.following.units import UnitAxis, find_stops, find_units, follow, unclear_axes
from tatami.tiled.rows import UnitRuns
from tatami.workload import Block

_LAYERS = (nn.Linear, nn.Embedding, nn.modules.conv._ConvNd, nn.modules.batchnorm._BatchNorm, nn.LayerNorm)
"""A single one of these is no block."""


_WORTH_FOLLOWING = 16
"""A module whose parts were followed is followed itself if so small a part of its weights could still be split."""

_KEEPS = "its forward pass keeps something in the module ({}), which a program of it would not; return it, or leave it out"

_ALIKE: OrderedDict[Any, Followed | str] = OrderedDict()
_MOST_ALIKE = 64


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
        stops: of weights that are whole: the line of the user's code because of which they are.
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
    """The modules of `model` that can be split, by name; of others that have weights why they cannot; and lines of code.

    The lines are those because of which weights, by name, are whole though what reads them was followed.

    Args:
        model: the whole network; it is not changed.
        captured: its calls.
        taken: names of tensors that other blocks have already, or that must stay whole.
        closed: names of modules that are not looked into; nor can be followed what they are a part of.
    """
    found: dict[str, Followed] = {}
    reasons: dict[str, str] = {}
    stops: dict[str, str] = {}
    names = [name for name, _ in model.named_modules()]
    for name in sorted(names, key=lambda name: -_depth(name)):
        module = model.get_submodule(name)
        prefix = f"{name}." if name else ""
        if isinstance(module, _LAYERS) or name not in captured.calls:
            continue
        if any(not other or f"{other}.".startswith(prefix) or prefix.startswith(f"{other}.") for other in closed):
            continue
        used = set(taken) | {inner for other, each in found.items() for inner in cut_names(other, each)}
        own = _weights(module, prefix)
        spare = [elements for parameter, elements in own.items() if parameter not in used]
        if len(spare) < 2 or sum(spare) * _WORTH_FOLLOWING < sum(own.values()):
            continue
        inside = {other for other in found if other.startswith(prefix) or not prefix}
        taken_inside = {tensor for tensor in taken if tensor.startswith(prefix)} | captured.read_elsewhere(name)
        whole = frozenset(tensor.removeprefix(prefix) for tensor in taken_inside)
        kept = sorted(each.removeprefix(prefix) for each in captured.leaves_behind.attributes if each.startswith(prefix))
        if kept:
            reasons[name] = _KEEPS.format(", ".join(kept))
            continue
        result = _remembered(module, captured.calls[name], whole)
        if isinstance(result, str):
            reasons[name] = result
            continue
        stops |= {prefix + tensor: line for tensor, line in result.stops.items()}
        if result.blocks and _elements(model, {name: result}) > _elements(model, {other: found[other] for other in inside}):
            for other in inside:
                del found[other]
            found[name] = result
    return dict(sorted(found.items(), key=lambda item: names.index(item[0]))), reasons, stops


def _weights(module: nn.Module, prefix: str) -> dict[str, int]:
    """The elements of the weights that could begin or end a block, by name: not of embeddings, whose rows are looked up."""
    found = {}
    for inner, owner in module.named_modules(prefix=prefix.removesuffix(".")):
        for name, value in owner.named_parameters(recurse=False):
            if value.dim() > 1 and not isinstance(owner, nn.Embedding):
                found[f"{inner}.{name}" if inner else name] = value.numel()
    return found


def _depth(name: str) -> int:
    return name.count(".") + 1 if name else 0


def cut_names(name: str, followed: Followed) -> set[str]:
    """The tensors that a followed module splits, by their names in the network."""
    return {f"{name}.{tensor}" if name else tensor for block in followed.blocks for tensor in block.cuts}


def _elements(model: nn.Module, found: Mapping[str, Followed]) -> int:
    """Of all the weights that are split."""
    names = {tensor for name, each in found.items() for tensor in cut_names(name, each)}
    return sum(parameter.numel() for name, parameter in model.named_parameters(remove_duplicate=False) if name in names)


def _remembered(module: nn.Module, call: ModuleCall, whole: frozenset[str]) -> Followed | str:
    """`_followed`, once for modules that are alike: the layers of a transformer, and the ranks of a world of threads."""
    key = (_signature(module, call), whole)
    if key not in _ALIKE:
        _ALIKE[key] = _followed(module, call, whole)
        while len(_ALIKE) > _MOST_ALIKE:
            _ALIKE.popitem(last=False)
    _ALIKE.move_to_end(key)
    return _ALIKE[key]


def _signature(module: nn.Module, call: ModuleCall) -> tuple[Any, ...]:
    """Equal for modules that have the same program."""
    tensors = (*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False))
    shapes = tuple((name, tuple(tensor.shape), tensor.dtype, tensor.requires_grad) for name, tensor in tensors)
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    inputs = tuple(
        (tuple(leaf.shape), leaf.dtype, leaf.requires_grad) if isinstance(leaf, torch.Tensor) else repr(leaf) for leaf in leaves
    )
    plain = tuple(
        (name, _identified(value))
        for inner in module.modules()
        for name, value in sorted(vars(inner).items())
        if not name.startswith("_") and name != "training"
    )
    return type(module), repr(module), shapes, str(structure), inputs, call.sample_axes, plain


@dataclass(frozen=True)
class _TheSame:
    """An object that is like no other one, and lives as long as it is compared with."""

    value: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _TheSame) and other.value is self.value

    def __hash__(self) -> int:
        return id(self.value)


def _identified(value: Any) -> Any:
    """What an attribute is compared by: one layer may compute `F.relu` where another that looks like it computes `F.gelu`."""
    if isinstance(value, (bool, int, float, str, type(None), torch.dtype, torch.device)):
        return repr(value)
    if isinstance(value, (list, tuple)):
        return type(value), tuple(map(_identified, value))
    if isinstance(value, dict):
        return tuple((repr(key), _identified(each)) for key, each in value.items())
    if isinstance(value, torch.Tensor) or callable(value) or repr(value) == object.__repr__(value):
        return _TheSame(value)
    return type(value), repr(value)


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
        kept = {training: _kept(modes[training][2], cuts[training], common) for training in (True, False)}
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


def _kept(
    candidates: Sequence[UnitAxis], cuts: Sequence[Mapping[str, UnitRuns]], common: Sequence[Mapping[str, UnitRuns]]
) -> list[UnitAxis]:
    return [candidates[cuts.index(each)] for each in common]
