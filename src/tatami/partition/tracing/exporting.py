"""A module as a program of tensor operations, by torch.export, over the inputs that a sample batch gave it."""

from __future__ import annotations

import contextlib
import functools
import logging
import re
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx, nn
from torch.export import Dim
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from tatami.partition.tracing.restore_state import kept

_NOT_USERS = (Path(str(torch.__file__)).parent, Path(__file__).parents[2])


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

    @property
    def samples(self) -> int:
        """How many it was called with; 1 where its arguments do not say."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return next((leaf.shape[axis] for leaf, axis in zip(leaves, self.sample_axes, strict=True) if axis is not None), 1)


@dataclass(frozen=True, kw_only=True)
class FollowedProgram:
    """A module's forward pass as a graph, whose inputs are first the module's own tensors and then the call's.

    Attributes:
        graph: placeholders for `tensors`, then one for each tensor that the call is given (`given`).
        tensors: the name in the module of each own tensor (parameters and buffers), in the order of their placeholders.
        in_spec: the structure of (args, kwargs).
        out_spec: the structure of the result.
        given: which leaves of the call are inputs of the graph: the tensors, each once.
        sample_axes: of each of them, as in `ModuleCall`.
        same: of each leaf of the call: the index of the first leaf that is the same tensor; its own for all other leaves.
        leaves: of each leaf of the call: the lengths that a tensor must have (None where any will do), or its value.
        guards: what else must hold of lengths, as Python of the tensors `L['tensors']`: branches on shapes were taken by it.
        samples: how many it was followed with.
    """

    graph: fx.GraphModule
    tensors: tuple[str, ...]
    in_spec: pytree.TreeSpec
    out_spec: pytree.TreeSpec
    given: tuple[int, ...]
    sample_axes: tuple[int | None, ...]
    same: tuple[int, ...]
    leaves: tuple[Any, ...]
    guards: tuple[str, ...] = ()
    samples: int = 1


def export(module: nn.Module, call: ModuleCall, *, fixed: Collection[tuple[int, int]] = ()) -> FollowedProgram:
    """Follow `module` over the inputs of `call`, in the mode (training or not) that it is in.

    Args:
        module: it is not changed.
        call: its inputs.
        fixed: axes that keep their length: (leaf, axis). Others may have any, unless the module needs the one that they have.

    Raises:
        NotFollowedError: torch.export could not follow it, or it holds tensors that are neither parameters nor buffers.
    """
    leaves, structure = pytree.tree_flatten((call.args, dict(call.kwargs)))
    same = same_leaves(leaves)
    given = tuple(index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and same[index] == index)
    samples = Dim("samples", min=2)
    marks = tuple(_dynamic(leaves[index], call.sample_axes[index], samples, fixed, index) for index in given)
    tensors = tuple(leaves[index] for index in given)
    on_tensors = _OnTensors(module, leaves, same, structure)
    try:
        # Remembering what operations give for which symbolic lengths takes torch longer than computing it again.
        with _quiet(), kept(module), _recurrences_by_shape(), torch._dynamo.config.patch(fake_tensor_cache_enabled=False):
            exported = torch.export.export(on_tensors, tensors, dynamic_shapes={"tensors": marks}, strict=False)
    except Exception as error:
        said = str(error).strip().splitlines() or [type(error).__name__]
        raise NotFollowedError(f"{line_of_error(error)}torch.export: {said[0]}") from error
    signature = exported.graph_signature
    names = []
    for spec in signature.input_specs:
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            assert spec.target is not None
            names.append(spec.target.removeprefix("module."))
        elif spec.kind is not InputKind.USER_INPUT:
            raise NotFollowedError(f"it holds a tensor that is neither a parameter nor a buffer ({spec.target})")
    if exported.call_spec.out_spec is None:
        raise NotFollowedError("its result has no structure that torch knows")
    placeholders = [node for node in exported.graph.nodes if node.op == "placeholder"][len(names) :]
    shapes = {index: _lengths(node.meta["val"]) for index, node in zip(given, placeholders, strict=True)}
    for node in reversed(list(exported.graph.nodes)):
        if node.target is torch.ops.aten.copy_.default and _written_into(node.args[1]) is node.args[0]:
            # torch ends with a copy of what was changed in place to itself, after which its backward pass would fail.
            exported.graph.erase_node(node)
    exported.graph_module.recompile()
    return FollowedProgram(
        graph=exported.graph_module,
        tensors=tuple(names),
        in_spec=structure,
        out_spec=exported.call_spec.out_spec,
        given=given,
        sample_axes=tuple(call.sample_axes[index] for index in given),
        same=same,
        leaves=tuple(shapes[first] if first in shapes else leaves[first] for first in same),
        guards=tuple(guard for guard in exported._guards_code if not _NOT_CHECKED.search(guard)),
        samples=call.samples,
    )


_NOT_CHECKED = re.compile(r"^L\['tensors'\]\[\d+\]\.size\(\)\[\d+\] == \d+$|!= [01]$|stride|storage_offset")
"""Guards that `leaves` has already, those of torch's own for lengths of 0 and 1, and those on how tensors lie in memory."""


def _written_into(node: Any) -> Any:
    """What an operation that changes its operand in place changes."""
    while isinstance(node, fx.Node) and isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable:
        node = node.args[0]
    return node


def line_of_error(error: Exception) -> str:
    """The last line of the user's own code on the way to the error, such as "net.py:13 `if h.sum() > 0:`: "; or nothing."""
    line = _line_of(traceback.extract_tb(error.__traceback__))
    return f"{line}: " if line else ""


def line_of_caller() -> str:
    """The last line of the user's own code on the way here; or nothing."""
    return _line_of(traceback.extract_stack())


def _line_of(frames: traceback.StackSummary) -> str:
    own = [told for frame in frames if frame.line and (told := _told(frame.filename, frame.lineno, frame.line))]
    return own[-1] if own else ""


def line_of_node(node: fx.Node) -> str:
    """The line of the user's own code that an operation comes from, such as "net.py:13 `x = x.view(-1, 64)`"; or nothing."""
    own = [told for found in _FRAME.finditer(str(node.meta.get("stack_trace", ""))) if (told := _told(*found.groups()))]
    return own[-1] if own else ""


_FRAME = re.compile(r'File "([^"]+)", line (\d+), in [^\n]*\n\s*([^\n]+)')


def _told(filename: str, number: int | str | None, line: str) -> str:
    is_users = not any(folder in Path(filename).parents for folder in _NOT_USERS)
    return f"{Path(filename).name}:{number} `{line.strip()}`" if is_users else ""


class _OnTensors(nn.Module):
    """A module as a function of the tensors among its arguments; the other arguments are what they were in the sample batch."""

    def __init__(self, module: nn.Module, leaves: Sequence[Any], same: Sequence[int], structure: pytree.TreeSpec) -> None:
        super().__init__()
        self.module = module
        self.training = module.training
        self._leaves = [None if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._given = [index for index, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and same[index] == index]
        self._same = same
        self._structure = structure

    def forward(self, *tensors: torch.Tensor) -> Any:
        leaves = list(self._leaves)
        for index, tensor in zip(self._given, tensors, strict=True):
            leaves[index] = tensor
        args, kwargs = pytree.tree_unflatten([leaves[first] for first in self._same], self._structure)
        return self.module(*args, **kwargs)


def same_leaves(leaves: Sequence[Any]) -> tuple[int, ...]:
    """For each leaf the index of the first that is the same tensor."""
    first: dict[int, int] = {}
    return tuple(
        first.setdefault(id(leaf), index) if isinstance(leaf, torch.Tensor) else index for index, leaf in enumerate(leaves)
    )


def _dynamic(
    value: torch.Tensor, sample_axis: int | None, samples: Any, fixed: Collection[tuple[int, int]], index: int
) -> dict[int, Any]:
    return {
        axis: samples if axis == sample_axis else Dim.STATIC if (index, axis) in fixed else Dim.AUTO
        for axis in range(value.dim())
    }


@contextlib.contextmanager
def _recurrences_by_shape() -> Iterator[None]:
    """In this thread, recurrent layers that are traced give tensors of the right shapes at once.

    A program has such a layer as one operation. Torch finds the shapes of its results by going through all steps, with symbolic
    lengths: some 40 ms for each step of each layer, in each of several programs.
    """
    _replace_recurrences()
    _TRACES.is_on = True
    try:
        yield
    finally:
        _TRACES.is_on = False


_TRACES = threading.local()


@functools.cache
def _replace_recurrences() -> None:
    aten = torch.ops.aten
    for operation in (aten.lstm.input, aten.gru.input, aten.rnn_tanh.input, aten.rnn_relu.input):
        for key, steps in operation.py_kernels.items():
            operation.py_kernels[key] = _or_by_shape(steps)
        operation._dispatch_cache.clear()


def _or_by_shape(steps: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(steps)
    def kernel(*args: Any, **kwargs: Any) -> Any:
        if kwargs or not getattr(_TRACES, "is_on", False):
            return steps(*args, **kwargs)
        inputs, states, _weights, _biases, _layers, _dropout, _training, both_directions, _samples_first = args
        first, *more = states if isinstance(states, (list, tuple)) else [states]
        output = inputs.new_empty((*inputs.shape[:2], (2 if both_directions else 1) * first.shape[-1]))
        return (output, *(each.new_empty(each.shape) for each in (first, *more)))

    return kernel


def _lengths(value: torch.Tensor) -> tuple[int | None, ...]:
    return tuple(size if isinstance(size, int) else None for size in value.shape)


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """torch.export logs every failure with its stack, and prints half the program; who asked for the reason is told it."""
    logger = logging.getLogger("torch")
    before = logger.level
    logger.setLevel(logging.CRITICAL)
    muted: Any = _Muted(sys.stderr)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(muted):
            warnings.simplefilter("ignore")
            yield
    finally:
        logger.setLevel(before)


class _Muted:
    """A stream to which the thread that made this writes nothing, and all others what they like: they may be ranks."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._thread = threading.get_ident()

    def write(self, text: str) -> int:
        written: int = len(text) if threading.get_ident() == self._thread else self._stream.write(text)
        return written

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)
