"""The tests of modules that run as they are with some of their units: two parts give what the whole gives.

Each part is run by itself, in double precision, as on a rank that is alone: what would be summed between ranks is summed here.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.partition.parts.part_module import AbstractParts, PartForward, Results
from tatami.partition.parts.vocabulary import EmbeddingPart
from tatami.partition.tracing.exporting import NotFollowedError, same_leaves
from tatami.partition.tracing.restore_state import copy_of
from tatami.partition.tracing.saved_activations import Keeping
from tatami.partition.tracing.split_test import compare
from tatami.random_state import kept_torch_state
from tatami.runtime.context import ModuleContext, RankContext
from tatami.runtime.rows import ONE_EACH, UnitRuns, cut_units, cut_units_of, tensor_of
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.tiling import Span

_ALIKE = 1e-9
_EXACT = (torch.float32, torch.float64)
_FLOAT_BYTES = 4
_ROWS = 1024
"""So many rows of an output layer are tested at a time."""


@dataclass(frozen=True, kw_only=True)
class Believed:
    """What the test of a module showed.

    Attributes:
        results: which of its results are sums over units.
        summed_elements: of them, in the whole sample batch.
        kept_bytes: of its units, that its forward pass keeps for backward, in the whole sample batch.
    """

    results: Results
    summed_elements: int
    kept_bytes: int


def believe_parts(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    parts: AbstractParts,
    units: Sequence[Mapping[str, UnitRuns]],
    total: int,
) -> Believed:
    """Run `module` whole, and in two parts, in training and in evaluation.

    Args:
        module: with all its units; it is not changed.
        args, kwargs: what it was called with.
        parts: how it runs with some of them.
        units: what is cut: one mapping for all units, or one for each.

    Raises:
        NotFollowedError: the parts do not make up the whole; the message says where.
    """
    result = None
    element_bytes = max((parameter.element_size() for parameter in module.parameters()), default=_FLOAT_BYTES)
    for training in (True, False):
        whole = copy_of(module).double().train(training)
        try:
            believed = _believe(whole, args, kwargs, parts, units, total, element_bytes)
        except NotFollowedError:
            raise
        except Exception as error:  # the module is the user's, and any of its lines may fail with fewer units
            raise NotFollowedError(f"with some of its units it fails: {type(error).__name__}: {error}") from error
        if result is not None and believed.results != result.results:
            raise NotFollowedError("what it sums over its units differs between training and evaluation")
        result = result or believed
    assert result is not None
    return result


def _believe(
    whole: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    parts: AbstractParts,
    units: Sequence[Mapping[str, UnitRuns]],
    total: int,
    element_bytes: int,
) -> Believed:
    leaves, structure = pytree.tree_flatten((args, dict(kwargs)))
    inputs = _copies(leaves)
    half = (total + 1) // 2
    keeping = Keeping(whole.parameters(), double_bytes=element_bytes)
    with torch.enable_grad(), kept_torch_state():
        torch.manual_seed(0)
        with keeping.watched():
            expected = _run(whole, inputs, structure)
        halves = [_Half(whole, leaves, parts, units, total, span) for span in (Span(0, half), Span(half, total))]
        results = Results(summed=_summed([_run(each.forward(None), each.inputs, structure) for each in halves], expected))
        ends = [index for index, leaf in enumerate(expected) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
        weights = {index: torch.randn_like(expected[index]) for index in ends}
        torch.autograd.backward([expected[index] for index in ends], [weights[index] for index in ends])
        kept = [keeping.size_bytes]
        for each in halves:
            keeping = Keeping(each.module.parameters(), double_bytes=element_bytes)
            with keeping.watched():
                given = _run(each.forward(results), each.inputs, structure)
            kept.append(keeping.size_bytes)
            torch.autograd.backward([given[index] for index in ends], [weights[index] for index in ends])
        _compare_gradients(whole, inputs, halves, parts)
    elements = sum(leaf.numel() for leaf, summed in zip(expected, results.summed, strict=True) if summed)
    # The whole keeps what its units do and what is beside them, the halves together that twice.
    beside = max(0, kept[1] + kept[2] - kept[0])
    return Believed(results=results, summed_elements=elements, kept_bytes=max(0, kept[0] - beside))


class _Half:
    """A copy of a module with a part of its units."""

    def __init__(
        self,
        whole: nn.Module,
        leaves: Sequence[Any],
        parts: AbstractParts,
        units: Sequence[Mapping[str, UnitRuns]],
        total: int,
        span: Span,
    ) -> None:
        self.module = copy.deepcopy(whole)
        self.inputs = _copies(leaves)
        spans = [span] if len(units) == 1 else [Span(0, int(span.start <= unit < span.stop)) for unit in range(total)]
        self.cuts = {name: (runs, here) for cuts, here in zip(units, spans, strict=True) for name, runs in cuts.items()}
        for cuts, here in zip(units, spans, strict=True):
            cut_units_of(self.module, cuts, here)
        rank = RankContext(replica=ReplicaComm.alone(), comm=None, generator=torch.Generator(), speaks=span.start == 0)
        self._context = ModuleContext(rank=rank, units=[functools.partial(_given, here) for here in spans])
        self._parts, self._total = parts, total

    def forward(self, results: Results | None) -> PartForward:
        return PartForward(module=self.module, parts=self._parts, results=results, context=self._context, total=self._total)


def _given(span: Span) -> Span:
    return span


def _copies(leaves: Sequence[Any]) -> list[Any]:
    """Inputs in double precision that are no other's; a tensor that is there twice is one."""
    copies = [
        leaf.detach().double().clone().requires_grad_() if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf
        for leaf in leaves
    ]
    return [copies[first] for first in same_leaves(leaves)]


def _run(forward: Callable[..., Any], inputs: Sequence[Any], structure: pytree.TreeSpec) -> list[Any]:
    args, kwargs = pytree.tree_unflatten(inputs, structure)
    return pytree.tree_leaves(forward(*args, **kwargs))


def _summed(halves: Sequence[Sequence[Any]], whole: Sequence[Any]) -> tuple[bool, ...]:
    """Which results of the halves are to be summed; the other ones are the whole's already."""
    if any(len(half) != len(whole) for half in halves):
        raise NotFollowedError("with some of its units it has another number of results")
    summed = []
    for index, leaf in enumerate(whole):
        parts = [half[index] for half in halves]
        if not isinstance(leaf, torch.Tensor):
            summed.append(False)
        elif any(part.shape != leaf.shape for part in parts):
            raise NotFollowedError(f"result {index} has another shape in parts than {tuple(leaf.shape)}")
        elif leaf.is_floating_point() and _close(parts[0] + parts[1], leaf):
            summed.append(True)
        elif all(_close(part, leaf) if leaf.is_floating_point() else torch.equal(part, leaf) for part in parts):
            summed.append(False)
        else:
            raise NotFollowedError(f"result {index} is not the sum of what its units give")
    if not any(summed):
        raise NotFollowedError("none of its results is a sum over its units")
    return tuple(summed)


def _close(one: torch.Tensor, other: torch.Tensor) -> bool:
    if torch.equal(one, other):
        return True
    scale = float(other.detach().abs().max()) if other.numel() else 0.0
    return torch.allclose(one.detach(), other.detach(), rtol=0.0, atol=_ALIKE * max(scale, 1e-30))


def _compare_gradients(whole: nn.Module, inputs: Sequence[Any], halves: Sequence[_Half], parts: AbstractParts) -> None:
    for name, parameter in whole.named_parameters(remove_duplicate=False):
        grads = [tensor_of(half.module, name).grad for half in halves]
        what = f"the gradient of {name}"
        if name in parts.own():
            for half, grad in zip(halves, grads, strict=True):
                runs, span = half.cuts[name]
                compare([grad], [None if parameter.grad is None else cut_units(parameter.grad, runs, span)], what)
        elif name in parts.once():
            for grad in grads:
                compare([grad], [parameter.grad], what)
        else:
            compare([_total(grads)], [parameter.grad], what)
    for index, leaf in enumerate(inputs):
        if isinstance(leaf, torch.Tensor) and leaf.is_floating_point():
            compare([_total([half.inputs[index].grad for half in halves])], [leaf.grad], "the gradient of an input")


def _total(grads: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    there = [grad for grad in grads if grad is not None]
    return torch.stack(there).sum(0) if there else None


# -- vocabularies -----------------------------------------------------------------------------------------------------------


def believe_embedding(layer: nn.Embedding, tokens: torch.Tensor) -> None:
    """Two parts of an embedding's rows, summed, against the layer.

    Raises:
        NotFollowedError: they differ.
    """
    # A row is looked up whole or not at all, so the layer's own precision is exact, and doubles of a large weight take long.
    whole = layer if layer.weight.dtype in _EXACT else copy.deepcopy(layer).double()
    halves = [_rows_of(whole, span) for span in _halves(layer.num_embeddings)]
    with torch.enable_grad():
        expected = whole(tokens)
        given = torch.stack([EmbeddingPart(half, context)(tokens) for half, context in halves]).sum(0)
        compare([given], [expected], "an embedding")
        weights = torch.linspace(-1.0, 1.0, expected.numel(), dtype=expected.dtype, device=expected.device).view(expected.shape)
        if whole.weight.requires_grad:
            parts = torch.autograd.grad((given * weights).sum(), [half.weight for half, _ in halves])
            compare(
                [torch.cat(parts)],
                torch.autograd.grad((expected * weights).sum(), whole.weight),
                "the gradient of an embedding",
            )


def believe_head(layer: nn.Linear, inputs: torch.Tensor) -> None:
    """Two parts of an output layer's rows, side by side, against the layer.

    Its weight may be the largest of the network, and is twice as large in double precision, as its results are. In `nn.Linear`
    each row gives its own result, so some rows are compared at a time.

    Raises:
        NotFollowedError: they differ.
    """
    halves = [(span, _rows_of(layer, span)[0]) for span in _halves(layer.out_features)]
    with torch.no_grad():
        x = inputs.detach().double()
        for start in range(0, layer.out_features, _ROWS):
            here = Span(start, min(start + _ROWS, layer.out_features))
            whole = _rows_of(layer, here)[0].double()
            parts = []
            for span, half in halves:
                rows = slice(max(here.start - span.start, 0), max(here.stop - span.start, 0))
                bias = None if half.bias is None else half.bias[rows].double()
                parts.append(torch.nn.functional.linear(x, half.weight[rows].double(), bias))
            compare([torch.cat(parts, -1)], [whole(x)], "an output layer")


def _halves(rows: int) -> tuple[Span, Span]:
    return Span(0, (rows + 1) // 2), Span((rows + 1) // 2, rows)


def _rows_of(layer: Any, span: Span) -> tuple[Any, ModuleContext]:
    cut = {
        id(whole): nn.Parameter(cut_units(whole.detach(), ONE_EACH, span), whole.requires_grad) for whole in layer.parameters()
    }
    half = copy.deepcopy(layer, cut)  # only these rows are copied, of what may be the largest weight of the network
    rank = RankContext(replica=ReplicaComm.alone(), comm=None, generator=torch.Generator(), speaks=span.start == 0)
    return half, ModuleContext(rank=rank, units=[functools.partial(_given, span)])
