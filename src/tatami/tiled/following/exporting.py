"""A module as a program of tensor operations, by torch.export, over the inputs that a sample batch gave it."""

from __future__ import annotations

import contextlib
import inspect
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree


class NotFollowedError(Exception):
    """A module could not be followed; the message is the reason in one line. Never reaches users: they are told the reason."""


@dataclass(frozen=True, kw_only=True)
class ModuleCall:
    """The arguments of one call of a module.

    Attributes:
        args, kwargs: as they were given.
        sample_axes: for each leaf of (args, kwargs): the axis on which the samples lie; None where there is none.
    """

    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    sample_axes: tuple[int | None, ...]


@dataclass(frozen=True, kw_only=True)
class FollowedProgram:
    """A module's forward pass as a graph, whose inputs are first the module's own tensors and then the call's.

    Attributes:
        graph: placeholders for `tensors`, then one for each leaf of the call.
        tensors: the name in the module of each own tensor (parameters and buffers), in the order of their placeholders.
        in_spec: the structure of (args, kwargs).
        out_spec: the structure of the result.
        sample_axes: of each leaf of the call, as in `ModuleCall`.
        same: of each leaf of the call: the index of the first leaf that is the same tensor; its own for all other leaves.
        leaves: of each leaf of the call: the lengths that a tensor must have (None where any will do), or its value.
    """

    graph: fx.GraphModule
    tensors: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    sample_axes: tuple[int | None, ...]
    same: tuple[int, ...]
    leaves: tuple[Any, ...]


def export(module: nn.Module, call: ModuleCall) -> FollowedProgram:
    """Follow `module` over the inputs of `call`, in the mode (training or not) that it is in.

    Raises:
        NotFollowedError: torch.export could not follow it, or it holds tensors that are neither parameters nor buffers.
    """
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    samples = Dim("samples", min=2)
    marked = [_dynamic(leaf, axis, samples) for leaf, axis in zip(leaves, call.sample_axes, strict=True)]
    shapes = _by_name(module, *pytree.tree_unflatten(marked, structure))
    try:
        with _quiet():
            exported = torch.export.export(module, call.args, dict(call.kwargs), dynamic_shapes=shapes or None, strict=False)
    except Exception as error:
        reason = str(error).strip().splitlines() or [type(error).__name__]
        raise NotFollowedError(f"torch.export: {reason[0]}") from error
    signature = exported.graph_signature
    names = []
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            names.append(spec.target)
        elif spec.kind is not InputKind.USER_INPUT:
            raise NotFollowedError(f"it holds a tensor that is neither a parameter nor a buffer ({spec.target})")
    if exported.call_spec.in_spec is None or exported.call_spec.out_spec is None:
        raise NotFollowedError("its inputs or results have no structure that torch knows")
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"][len(names) :]
    return FollowedProgram(
        graph=exported.graph_module,
        tensors=tuple(names),
        in_spec=exported.call_spec.in_spec,
        out_spec=exported.call_spec.out_spec,
        sample_axes=call.sample_axes,
        same=same_leaves(leaves),
        leaves=tuple(_expected(node.meta.get("val")) for node in placeholders),
    )


def same_leaves(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf the index of the first that is the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), index) if isinstance(leaf, torch.Tensor) else index for index, leaf in enumerate(leaves)
    )


def _dynamic(value: Any, sample_axis: int | None, samples: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return None
    return {axis: samples if axis == sample_axis else Dim.AUTO for axis in range(value.dim())}


def _by_name(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The marks of all arguments as torch.export takes them: by name, those without a name of their own below `**kwargs`'."""
    parameters = inspect.signature(module.forward).parameters.values()
    positional = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_POSITIONAL][: len(args)]
    if len(positional) < len(args) or any(each.kind is inspect.Parameter.VAR_POSITIONAL for each in parameters):
        raise NotFollowedError("its forward takes *args")
    rest = next((each.name for each in parameters if each.kind is inspect.Parameter.VAR_KEYWORD), "")
    named = {each.name for each in parameters}
    shapes: dict[str, Any] = dict(zip(positional, args, strict=True))
    for name, mark in kwargs.items():
        (shapes if name in named else shapes.setdefault(rest, {}))[name] = mark
    return shapes


def _expected(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return tuple(size if isinstance(size, int) else None for size in value.shape)
    return value


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs every failure with its stack; who asked for the reason is told it."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)
