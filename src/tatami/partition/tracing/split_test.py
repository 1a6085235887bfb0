"""The definition of a block as its test: on the sample, two parts of its units give what the whole gives.

Two ranks of a replica are played in this thread: the local program runs twice in step, each time with a part of the units of
every block, in double precision. What enters a block and what leaves it is summed over both, forward and backward, as between
ranks. The result of each, and every gradient, must be those of the module itself. What fails is not believed; so a wrong rule
about some operation can make a network be tiled less, never wrongly. A program computes the same with gradients and without; so
must the module.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.function import once_differentiable
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

from tatami.partition.tracing.exporting import FollowedProgram, ModuleCall, NotFollowedError
from tatami.partition.tracing.local_program import LocalProgram
from tatami.partition.tracing.restore_state import copy_of, kept
from tatami.partition.tracing.units import UnitAxis
from tatami.random_state import kept_torch_state
from tatami.runtime import batch_operations
from tatami.runtime import context as steps
from tatami.runtime.rows import UnitRuns, cut_units
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.tiling import Span

_TOLERANCE = 1e-9
"""Tolerance, of the largest element in double precision: sums in other order are off by 1e-15, a wrong cut by 1e-2 or more."""
_PARTS = 2
_ASKS_GRADIENTS = (
    "its forward pass does something else without gradients (torch.no_grad()), which a program of it would not; branch outside "
    "of it, or by self.training"
)


def believe(
    module: nn.Module, call: ModuleCall, program: FollowedProgram, local: LocalProgram, candidates: Sequence[UnitAxis]
) -> None:
    """Run `local` in two parts and `module` whole, both without dropout, on the inputs of `call`.

    Where code asks for the dtype of its input (`torch.arange(t, dtype=x.dtype)`), the program has single precision written
    down; where it asks for single precision itself, too. So what fails as it is written is tried in double precision.

    Raises:
        NotFollowedError: they differ; the message says where.
    """
    try:
        _believe(module, call, program, local, candidates, written=torch.float32)
    except Exception as error:
        if not any(_is_single(value) for node in local.graph.graph.nodes for value in (*node.args, *node.kwargs.values())):
            raise
        try:
            _believe(module, call, program, local, candidates, written=torch.float64)
        except Exception:
            raise error from None


def _is_single(value: Any) -> bool:
    return value is torch.float32


def _believe(
    module: nn.Module,
    call: ModuleCall,
    program: FollowedProgram,
    local: LocalProgram,
    candidates: Sequence[UnitAxis],
    *,
    written: torch.dtype,
) -> None:
    module = copy_of(module).double()
    leaves = pytree.tree_leaves((call.args, dict(call.kwargs)))
    # A tensor that was given twice is one tensor: some modules look at that.
    inputs = [_double(leaves[first]) if first == index else None for index, first in enumerate(program.same)]
    inputs = [inputs[first] for first in program.same]
    with torch.enable_grad(), kept_torch_state():
        torch.manual_seed(0)
        own = dict(_tensors(module, program))
        cuts = _cuts(program, candidates)
        parts = [_Part(own, cuts, inputs, program.same, index, candidates) for index in range(_PARTS)]
        with torch.no_grad(), kept(module):
            without = _floats_of(module, program, _copies(inputs, program.same))
        torch.manual_seed(0)
        expected, buffers = _floats_of(module, program, inputs)
        try:
            compare([*without[0], *without[1]], [*expected, *buffers], "")
        except NotFollowedError as error:
            raise NotFollowedError(_ASKS_GRADIENTS) from error
        # Random weights of the results, for the backward pass: with a plain sum, errors of opposite signs would cancel, and
        # softmax, whose outputs add up to 1, would have no gradient at all.
        weights = [torch.randn_like(leaf) for leaf in expected]
        results = [[leaf for leaf in result if _is_float(leaf)] for result in _run(local, parts, program.given, written)]
        for index, result in enumerate(results):
            compare(result, expected, f"the result of part {index}")
            parts[index].compare_buffers(dict(_tensors(module, program)), cuts)
        _backward(expected, weights)
        _backward([leaf for result in results for leaf in result], weights * _PARTS)
        for part in parts:
            part.compare(own, cuts, inputs)


def _floats_of(
    module: nn.Module, program: FollowedProgram, inputs: Sequence[Any]
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The floating-point results of the module without dropout, and what its buffers are after that."""
    args, kwargs = pytree.tree_unflatten(inputs, program.in_spec)
    with _WithoutDropout():
        results = [leaf for leaf in pytree.tree_leaves(module(*args, **kwargs)) if _is_float(leaf)]
    own = (tensor for _, tensor in _tensors(module, program))
    return results, [
        each.detach().to(torch.float64, copy=True)
        for each in own
        if not isinstance(each, nn.Parameter) and not each.is_complex()
    ]


class _Part:
    """One rank's tensors and inputs: copies of their own, so that each rank's gradients are its own."""

    def __init__(
        self,
        own: dict[str, torch.Tensor],
        cuts: dict[str, tuple[UnitRuns, int]],
        inputs: Sequence[Any],
        same: Sequence[int],
        index: int,
        candidates: Sequence[UnitAxis],
    ) -> None:
        halves = [(candidate.units + 1) // 2 for candidate in candidates]
        self.spans = [
            Span(0, half) if index == 0 else Span(half, candidate.units)
            for half, candidate in zip(halves, candidates, strict=True)
        ]
        self.own = {}
        whole: dict[int, torch.Tensor] = {}  # a tensor may be there under several names
        for name, tensor in own.items():
            value = tensor.detach()
            if name in cuts:
                runs, block = cuts[name]
                value = cut_units(value, runs, self.spans[block])
            elif id(tensor) in whole:
                self.own[name] = whole[id(tensor)]
                continue
            self.own[name] = value.clone().requires_grad_(tensor.requires_grad)
            if name not in cuts:
                whole[id(tensor)] = self.own[name]
        self.inputs = _copies(inputs, same)
        for copied, leaf in zip(self.inputs, inputs, strict=True):
            if isinstance(leaf, torch.Tensor):
                copied.requires_grad_(leaf.requires_grad)

    def compare(self, own: dict[str, torch.Tensor], cuts: dict[str, tuple[UnitRuns, int]], inputs: Sequence[Any]) -> None:
        for name, tensor in own.items():
            grad = tensor.grad
            if grad is not None and name in cuts:
                runs, block = cuts[name]
                grad = cut_units(grad, runs, self.spans[block])
            compare([self.own[name].grad], [grad], f"the gradient of {name}")
        for mine, whole in zip(self.inputs, inputs, strict=True):
            if isinstance(whole, torch.Tensor):
                compare([mine.grad], [whole.grad], "the gradient of an input")

    def compare_buffers(self, own: dict[str, torch.Tensor], cuts: dict[str, tuple[UnitRuns, int]]) -> None:
        """What the forward pass left in them."""
        for name, tensor in own.items():
            if not isinstance(tensor, nn.Parameter) and not tensor.is_complex():
                whole = cut_units(tensor, cuts[name][0], self.spans[cuts[name][1]]) if name in cuts else tensor
                compare([self.own[name].double()], [whole.double()], f"the buffer {name} after a pass")


def _tensors(module: nn.Module, program: FollowedProgram) -> list[tuple[str, torch.Tensor]]:
    tensors = dict(module.named_parameters(remove_duplicate=False)) | dict(module.named_buffers(remove_duplicate=False))
    return [(name, tensors[name]) for name in program.tensors]


def _cuts(program: FollowedProgram, candidates: Sequence[UnitAxis]) -> dict[str, tuple[UnitRuns, int]]:
    return {
        program.tensors[at]: (runs, index)
        for index, candidate in enumerate(candidates)
        for at, runs in candidate.tensors.items()
    }


def _run(local: LocalProgram, parts: Sequence[_Part], given: Sequence[int], written: torch.dtype) -> list[Sequence[Any]]:
    """The program in step on all parts, with `written` for the single precision that is written in it."""

    def argument(value: Any) -> Any:
        return written if _is_single(value) else value

    rank = steps.RankContext(replica=ReplicaComm.alone(), comm=None, generator=torch.Generator())
    inputs = []
    for part in parts:
        context = steps.ModuleContext(rank=rank, units=[functools.partial(lambda given: given, span) for span in part.spans])
        units = [span.size for span in part.spans]
        inputs.append(iter([context, local.facts, *units, *part.own.values(), *(part.inputs[index] for index in given)]))
    values: list[dict[fx.Node, Any]] = [{} for _ in parts]
    for node in local.graph.graph.nodes:
        if node.op == "placeholder":
            for known, mine in zip(values, inputs, strict=True):
                known[node] = next(mine)
            continue
        written_args = fx.node.map_aggregate((node.args, node.kwargs), argument)
        operands = [fx.node.map_arg(written_args, known.__getitem__) for known in values]
        if node.op == "output":
            return [args[0] for args, _ in operands]
        if node.target is steps.enter:
            results = _Enter.apply(*(args[1] for args, _ in operands))  # type: ignore[no-untyped-call]
        elif node.target is steps.leave:
            results = _Leave.apply(*(args[1] for args, _ in operands))  # type: ignore[no-untyped-call]
        else:
            results = [_without_dropout(node.target, args, kwargs) for args, kwargs in operands]
        for known, result in zip(values, results, strict=True):
            known[node] = result
    raise AssertionError("a program ends with its output")


def _without_dropout(target: Any, args: Any, kwargs: Any) -> Any:
    if target is batch_operations.dropout:
        return args[1]
    if target is batch_operations.attention:
        context, shape, *values = args
        named = dict(zip(("q", "k", "v", "attn_mask", "dropout_p", "is_causal"), values, strict=False)) | dict(kwargs)
        q, k, v = (named.pop(name) for name in "qkv")
        return batch_operations.attention(context, shape, q, k, v, **{**named, "dropout_p": 0.0})
    return target(*args, **kwargs)


class _Enter(torch.autograd.Function):
    """`copy_to_replica` of all ranks at once."""

    @staticmethod
    def forward(ctx: Any, *copies: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        return tuple(copy.view_as(copy) for copy in copies)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        total = torch.stack(grads).sum(0)
        return tuple(total.clone() for _ in grads)


class _Leave(torch.autograd.Function):
    """`sum_over_replica` of all ranks at once."""

    @staticmethod
    def forward(ctx: Any, *partials: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        total = torch.stack(partials).sum(0)
        return tuple(total.clone() for _ in partials)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, ...]:  # noqa: ARG004
        return grads


_DROPOUT_ARGUMENT = {torch.nn.functional.scaled_dot_product_attention: 4, torch.nn.functional.multi_head_attention_forward: 10}


class _WithoutDropout(TorchFunctionMode):
    """Dropout hands its input on."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.dropout, torch.dropout_, torch.nn.functional.dropout):
            return args[0] if args else kwargs["input"]
        at = _DROPOUT_ARGUMENT.get(func)
        if at is not None and len(args) > at:
            args = (*args[:at], 0.0, *args[at + 1 :])
        elif at is not None and "dropout_p" in kwargs:
            kwargs["dropout_p"] = 0.0
        return func(*args, **kwargs)


def _copies(inputs: Sequence[Any], same: Sequence[int]) -> list[Any]:
    """Inputs cut loose from all others; what is one tensor stays one."""
    copies = [leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in inputs]
    return [copies[first] for first in same]


def _double(leaf: Any) -> Any:
    """An input in double precision, cut loose from the sample's own history."""
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.is_floating_point():
        return leaf.detach()
    return leaf.detach().double().requires_grad_()


def _is_float(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_floating_point()


def _backward(outputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    pairs = [(output, weight) for output, weight in zip(outputs, weights, strict=True) if output.requires_grad]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [weight for _, weight in pairs])


def compare(actual: Sequence[torch.Tensor | None], expected: Sequence[torch.Tensor | None], what: str) -> None:
    if len(actual) != len(expected):
        raise NotFollowedError(f"{what} has {len(actual)} tensors in parts and {len(expected)} whole")
    for one, other in zip(actual, expected, strict=True):
        zero = one if other is None else other
        if zero is None:
            continue
        left = torch.zeros_like(zero) if one is None else one.detach()
        right = torch.zeros_like(zero) if other is None else other.detach()
        if left.shape != right.shape:
            raise NotFollowedError(f"{what} has the shape {tuple(left.shape)} in parts and {tuple(right.shape)} whole")
        if not left.numel():
            continue
        error = float((left - right).abs().max() / right.abs().max().clamp(min=1e-30))
        # A gradient that is 0 by construction (of a bias that a norm takes away again) is rounding on both sides.
        if error > _TOLERANCE and float(left.abs().max().maximum(right.abs().max())) > _TOLERANCE:
            raise NotFollowedError(f"{what} differs by {error:.1e} of its largest element between parts and whole")
