"""Which modules of a network run with some of their units: vocabularies, registered modules, mixtures of experts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.gradients.passes import leads_to
from tatami.partition.parts import vocabulary
from tatami.partition.parts.declared import declared_parts
from tatami.partition.parts.experts import ExpertParts, expert_lists
from tatami.partition.parts.part_module import AbstractParts, PartForward, Results
from tatami.partition.parts.part_test import Believed, believe_embedding, believe_head, believe_parts
from tatami.partition.parts.vocabulary import Vocabulary, find_vocabulary
from tatami.partition.tracing.capturing import Captured, inputs_of
from tatami.partition.tracing.exporting import ModuleCall, NotFollowedError
from tatami.partition.tracing.settings import has_hooks
from tatami.runtime.context import ModuleContext
from tatami.runtime.rows import ONE_EACH, TiledBlock, UnitRuns
from tatami.workload import Block

_FLOAT_BYTES = 4
_INDEX_BYTES = 8
_BACKWARD = 3
"""Forward and backward together, for each operation of forward."""


@dataclass(frozen=True, kw_only=True)
class PartModule:
    """A module that runs with some of its units.

    Attributes:
        name: in the network.
        parts: how it runs.
        results: what it gives.
    """

    name: str
    parts: AbstractParts
    results: Results
    total: int
    blocks: tuple[TiledBlock, ...]

    @property
    def closed(self) -> tuple[str, ...]:
        """The modules in which nothing else is to be split."""
        return (self.name,)

    def install(self, model: nn.Module, context: ModuleContext) -> None:
        """Put it in place of the module's forward pass."""
        module = model.get_submodule(self.name)
        module.__dict__["forward"] = PartForward(
            module=module, parts=self.parts, results=self.results, context=context, total=self.total
        )


@dataclass(frozen=True, kw_only=True)
class PartVocabulary:
    """The layers of a vocabulary, split over its rows."""

    vocabulary: Vocabulary
    blocks: tuple[TiledBlock, ...]

    @property
    def closed(self) -> tuple[str, ...]:
        """The modules in which nothing else is to be split."""
        head = self.vocabulary.head
        return (self.vocabulary.embedding, *([head] if head is not None else []))

    def install(self, model: nn.Module, context: ModuleContext) -> None:
        """Put the parts in place of the layers' forward passes."""
        vocabulary.install(model, self.vocabulary, context)


FoundPart: TypeAlias = PartModule | PartVocabulary


def find_parts(model: nn.Module, captured: Captured) -> tuple[tuple[FoundPart, ...], dict[str, str]]:
    """What was found, and of modules that were registered, or look like mixtures, why they cannot be split.

    Raises:
        ModelError: a module is not what was registered of its class.
    """
    found: list[FoundPart] = []
    reasons: dict[str, str] = {}
    for name, module in model.named_modules():
        if name not in captured.calls or any(
            not other or name.startswith(f"{other}.") for part in found for other in part.closed
        ):
            continue
        if any(map(has_hooks, module.modules())):  # they are to be called with what is whole
            continue
        try:
            part = _part_of(name, module, captured)
        except NotFollowedError as error:
            reasons[name] = str(error)
        else:
            found += [part] if part is not None else []
    vocabulary = find_vocabulary(model, captured)
    if vocabulary is not None and not any(vocabulary.embedding.startswith(f"{each.closed[0]}.") for each in found):
        try:
            found.append(_split_vocabulary(model, vocabulary, captured))
        except NotFollowedError as error:
            reasons[vocabulary.embedding] = str(error)
    return tuple(found), reasons


def _part_of(name: str, module: nn.Module, captured: Captured) -> PartModule | None:
    """A registered module, or a mixture of experts; None where it is neither."""
    prefix = f"{name}." if name else ""
    declared = declared_parts(module)
    if declared is not None:
        _refuse(module, prefix, captured)
        args, kwargs = inputs_of(captured.calls[name])
        believed = believe_parts(module, args, kwargs, parts=declared, units=[declared.cuts], total=declared.total)
        facts = _facts(
            module,
            name,
            captured,
            believed,
            units=declared.total,
            own=list(declared.cuts),
            kind="mixture of experts" if declared.routed() else type(module).__name__,
            unit=declared.declaration.unit,
        )
        cuts = {prefix + tensor: runs for tensor, runs in declared.cuts.items()}
        blocks: tuple[TiledBlock, ...] = (TiledBlock(facts=facts, cuts=cuts),)
        return PartModule(name=name, parts=declared, results=believed.results, total=declared.total, blocks=blocks)
    for listed in expert_lists(module):
        experts = tuple(f"{listed}.{index}" for index in range(len(module.get_submodule(listed))))  # type: ignore[arg-type]
        shape = _shape_of_experts(prefix, experts, captured)
        if shape is None:
            continue
        if _follow_each_other(module, prefix, experts, captured):
            raise NotFollowedError(f"its result is not the sum of what the modules in {listed} give: they follow each other")
        tensors = tuple(
            tuple(f"{each}.{leaf}" for leaf, _ in module.get_submodule(each).named_parameters()) for each in experts
        )
        named = dict(module.named_parameters(remove_duplicate=False))
        if len({id(named[each]) for names in tensors for each in names}) < sum(map(len, tensors)):
            continue
        _refuse(module, prefix, captured)
        parts = ExpertParts(experts=experts, outputs=shape, tensors=tensors)
        units = [{each: UnitRuns(axis=0, runs=((0, named[each].shape[0]),)) for each in names} for names in tensors]
        args, kwargs = inputs_of(captured.calls[name])
        believed = believe_parts(module, args, kwargs, parts=parts, units=units, total=len(experts))
        own = [each for names in tensors for each in names]
        facts = _facts(module, name, captured, believed, units=len(experts), own=own, kind="mixture of experts", unit="expert")
        blocks = tuple(
            TiledBlock(facts=facts, cuts={prefix + each: runs for each, runs in cuts.items()}, only=index)
            for index, cuts in enumerate(units)
        )
        return PartModule(name=name, parts=parts, results=believed.results, total=len(experts), blocks=blocks)
    return None


def _shape_of_experts(prefix: str, experts: Sequence[str], captured: Captured) -> int | None:
    """The last axis of what experts give; None where they are no experts: each takes rows, and gives as many."""
    for each in experts:
        found = captured.last_axis.get(prefix + each)
        if found is not None:
            return found
    return None


def _follow_each_other(module: nn.Module, prefix: str, experts: Sequence[str], captured: Captured) -> bool:
    """Whether the second gets what was made of the result of the first: then they are layers, and need no costly test."""
    first, call = module.get_submodule(experts[0]), captured.calls.get(prefix + experts[1])
    weights = {id(parameter) for parameter in first.parameters()}
    nodes = [leaf.grad_fn for leaf in _leaves(call) if isinstance(leaf, torch.Tensor)] if call is not None else []
    return leads_to(nodes, lambda node: id(getattr(node, "variable", None)) in weights)


def _refuse(module: nn.Module, prefix: str, captured: Captured) -> None:
    """What looks beyond single samples cannot be cut without knowing its axes.

    Raises:
        NotFollowedError: there is such a layer inside.
    """
    kept = [name for name in captured.leaves_behind.with_gradient if name.startswith(prefix)]
    if kept:
        raise NotFollowedError(f"its forward pass keeps what has a gradient in the module ({', '.join(kept)}); return it")
    for inner, layer in module.named_modules():
        name = (prefix + inner).removesuffix(".")
        drops = isinstance(layer, nn.modules.dropout._DropoutNd) and layer.p > 0.0
        if drops or name in captured.draws:
            raise NotFollowedError(f"{name} ({type(layer).__name__}) draws random numbers inside of it")
        if isinstance(layer, nn.modules.batchnorm._NormBase) or name in captured.normalizes:
            raise NotFollowedError(f"{name} ({type(layer).__name__}) keeps statistics of the batch inside of it")


def _facts(
    module: nn.Module,
    name: str,
    captured: Captured,
    believed: Believed,
    *,
    units: int,
    own: Sequence[str],
    kind: str,
    unit: str,
) -> Block:
    tensors = dict(module.named_parameters(remove_duplicate=False))
    owned = sum(tensors[each].numel() for each in own if each in tensors and tensors[each].requires_grad)
    call, samples = captured.calls[name], captured.samples
    entered = sum(
        leaf.numel()
        for leaf in _leaves(call)
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() and leaf.requires_grad
    )
    return Block(
        units=units,
        unit_parameters=owned // units,
        forward_elements=believed.summed_elements // samples,
        backward_elements=entered // samples,
        flop_per_unit=max(1.0, _BACKWARD * captured.flop.get(name, 0.0) / units),
        forward_sums=sum(believed.results.summed),
        unit_activation_bytes=believed.kept_bytes / samples / units,
        name=name,
        kind=kind,
        unit=unit,
    )


def _leaves(call: ModuleCall) -> list[Any]:
    return pytree.tree_leaves((call.args, dict(call.kwargs)))


def _split_vocabulary(model: nn.Module, vocabulary: Vocabulary, captured: Captured) -> PartVocabulary:
    embedding = model.get_submodule(vocabulary.embedding)
    assert isinstance(embedding, nn.Embedding)
    looked_up = next(leaf for leaf in _leaves(captured.calls[vocabulary.embedding]) if isinstance(leaf, torch.Tensor))
    believe_embedding(embedding, looked_up)
    tokens, width = looked_up.numel() // captured.samples, embedding.embedding_dim
    named = dict(model.named_parameters())
    block = Block(
        units=vocabulary.rows,
        unit_parameters=sum(
            math.prod(named[name].shape[1:]) for name in vocabulary.tensors if name in named and named[name].requires_grad
        ),
        forward_elements=tokens * width,
        flop_per_unit=max(1.0, tokens * width / vocabulary.rows),
        sample_activation_bytes=_INDEX_BYTES * tokens,
        name=vocabulary.embedding,
        kind="vocabulary",
        unit="row",
    )
    if vocabulary.head is not None:
        head = model.get_submodule(vocabulary.head)
        assert isinstance(head, nn.Linear)
        entered = next(leaf for leaf in _leaves(captured.calls[vocabulary.head]) if isinstance(leaf, torch.Tensor))
        believe_head(head, entered)
        predicted = entered.numel() // head.in_features // captured.samples
        block = replace(
            block,
            # The embedding, and of every row of logits the logarithms of the parts' sums and the logit of the target.
            forward_elements=block.forward_elements + 3 * predicted,
            backward_elements=entered.numel() // captured.samples,
            flop_per_unit=block.flop_per_unit + (2 + head.weight.requires_grad) * 2 * predicted * head.in_features,
            forward_sums=2,
            unit_activation_bytes=2.0 * _FLOAT_BYTES * predicted,
            # The places of the tokens and of the targets, and the logarithm of every sum.
            sample_activation_bytes=_INDEX_BYTES * tokens + 2 * _INDEX_BYTES * predicted,
        )
    cuts = dict.fromkeys(vocabulary.tensors, ONE_EACH)
    return PartVocabulary(vocabulary=vocabulary, blocks=(TiledBlock(facts=block, cuts=cuts),))
