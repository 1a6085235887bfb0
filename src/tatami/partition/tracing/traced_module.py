"""A followed module at work: its forward pass is its local program, over the tensors that the module holds just then."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx, nn
from torch.fx.experimental.symbolic_shapes import SYMPY_INTERP
from torch.utils import _pytree as pytree

from tatami.errors import ModelError
from tatami.partition.tracing.capturing import canonical
from tatami.partition.tracing.exporting import FollowedProgram, same_leaves
from tatami.partition.tracing.tracing import Followed, Mode
from tatami.runtime import batch_operations
from tatami.runtime.context import ModuleContext, StandsIn
from tatami.runtime.rows import slot_of
from tatami.tiling import Span


class LocalForward(StandsIn):
    """Stands in place of a module's `forward`. Its tensors are cut to the units here.

    Args:
        name: the module's, for errors.
        followed: its programs.
        context: what they ask.
        units: for each block, the units here and how many there are.
        plainly: whether it may run as the user wrote it where all units are here.
        device: on which it runs; the network was followed on the CPU.
    """

    def __init__(
        self,
        module: nn.Module,
        *,
        name: str,
        followed: Followed,
        context: ModuleContext,
        units: tuple[Callable[[], tuple[Span, int]], ...],
        plainly: bool,
        device: torch.device,
    ) -> None:
        self._module = module
        self._name = name
        self._followed = followed
        self._context = context
        self._units = units
        self._plain = module.forward
        self._plainly = plainly
        self._graphs = {training: _on_device(followed.mode(training).local.graph, device) for training in (True, False)}
        self._variants: dict[tuple[bool, frozenset[str]], fx.GraphModule] = {}
        self._inside: list[tuple[str, nn.Module]] | None = None
        self._known: dict[bool, set[tuple[tuple[int, ...], ...]]] = {True: set(), False: set()}
        # The dicts are read in every call: a forward pass in training may put other tensors there.
        self._owners = {
            training: [slot_of(module, tensor) for tensor in followed.mode(training).program.tensors]
            for training in (True, False)
        }

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        mode = self._followed.mode(self._module.training)
        units = [units() for units in self._units]
        # Those of its replica that have no unit wait for what it gives.
        alone = self._context.rank.replica.comm is None
        runs_plainly = self._plainly and alone and all(here.size == total for here, total in units)
        # On all ranks, or on none: where one of them refuses, no other may wait for it.
        frozen = frozenset[str]() if runs_plainly and self._context.rank.comm is None else self._frozen(mode)
        if runs_plainly:
            return self._plain(*args, **kwargs)
        leaves, structure = pytree.tree_flatten(canonical(self._module, args, kwargs))
        if structure != mode.program.in_spec:
            raise ModelError(f"{self._what} is called with other arguments than it was for the sample batch; {_REMEDY}")
        self._check(mode.program, leaves)
        tensors = [owner[name] for owner, name in self._owners[self._module.training]]
        inputs = [leaves[index] for index in mode.program.given]
        self._check_lengths(mode.program, inputs)
        graph = self._graphs[self._module.training]
        if frozen:
            key = (self._module.training, frozen)
            if key not in self._variants:
                self._variants[key] = _frozen_in(graph, frozen, before=2 + len(units), tensors=mode.program.tensors)
            graph = self._variants[key]
        results = graph.forward(self._context, mode.local.facts, *(here.size for here, _ in units), *tensors, *inputs)
        return pytree.tree_unflatten(results, mode.program.out_spec)

    @property
    def _what(self) -> str:
        return f"{self._name or 'the network'} ({type(self._module).__name__})"

    def _check(self, program: FollowedProgram, leaves: list[Any]) -> None:
        """Whether the call is one that the program was followed for."""
        for index, (leaf, expected) in enumerate(zip(leaves, program.leaves, strict=True)):
            if isinstance(expected, tuple) and isinstance(leaf, torch.Tensor):
                fits = len(leaf.shape) == len(expected) and all(
                    want is None or have == want for have, want in zip(leaf.shape, expected, strict=True)
                )
                if not fits:
                    shape = ", ".join("any" if size is None else str(size) for size in expected)
                    raise ModelError(
                        f"input {index} of {self._what} has the shape {tuple(leaf.shape)}; the network was followed for "
                        f"({shape}) and cannot be split otherwise; {_REMEDY}"
                    )
            elif isinstance(expected, tuple) != isinstance(leaf, torch.Tensor) or leaf != expected:
                raise ModelError(
                    f"input {index} of {self._what} is {leaf!r}; in the sample batch it was {expected!r}; {_REMEDY}. A number "
                    "that changes from call to call must be given as a tensor"
                )
        if program.same != tuple(range(len(leaves))) and same_leaves(leaves) != program.same:
            raise ModelError(f"the inputs of {self._what} were one tensor in the sample batch and are several now; {_REMEDY}")

    def _frozen(self, mode: Mode) -> frozenset[str]:
        """The batch normalizations inside that were frozen by `eval()`; all else is in the mode in which it was followed."""
        if self._inside is None:  # layers are replaced after this was made
            self._inside = list(self._module.named_modules())
        frozen = set()
        for (name, inner), was_training in zip(self._inside, mode.modes, strict=False):
            if inner.training == was_training or isinstance(inner, _WITHOUT_MODE):
                continue
            if was_training and isinstance(inner, nn.modules.batchnorm._BatchNorm):
                frozen.add(name)
                continue
            now = "training" if inner.training else "evaluation"
            raise ModelError(
                f"{name} of {self._what} is in {now}, in which the network was not followed. To keep a layer frozen, "
                "override train() of the module that holds it, before the network is tiled"
            )
        return frozenset(frozen)

    def _check_lengths(self, program: FollowedProgram, inputs: Sequence[torch.Tensor]) -> None:
        """Whether branches that the module takes by lengths are those that were followed, however many samples there are."""
        lengths = tuple(
            tuple(program.samples if place == axis else size for place, size in enumerate(tensor.shape))
            for tensor, axis in zip(inputs, program.sample_axes, strict=True)
        )
        known = self._known[self._module.training]
        if lengths in known:
            return
        tensors = [_Lengths(each) for each in lengths]
        for guard in program.guards:
            if not eval(guard, dict(SYMPY_INTERP), {"L": {"tensors": tensors}}):
                said = guard.replace("L['tensors']", "inputs")
                raise ModelError(
                    f"{self._what} was followed for lengths of which {said} is true, and takes another way for inputs of the "
                    f"shapes {', '.join(str(tuple(tensor.shape)) for tensor in inputs)}; {_REMEDY}"
                )
        known.add(lengths)


class _Lengths:
    """Stands for a tensor in the guards of a program."""

    def __init__(self, lengths: tuple[int, ...]) -> None:
        self._lengths = lengths

    def size(self) -> tuple[int, ...]:
        return self._lengths


_WITHOUT_MODE = (
    nn.Linear, nn.Bilinear, nn.Embedding, nn.LayerNorm, nn.Sequential, nn.ModuleList, nn.Identity, nn.modules.conv._ConvNd,
)  # fmt: skip
_REMEDY = "tile the network with a sample batch (sample=) that is like those it will get"


def _on_device(graph: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """A program whose new tensors (positions, masks) are made on `device`: they would be where the program was followed."""
    if device.type == "cpu":
        return graph
    moved = copy.deepcopy(graph)

    def move(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    for node in moved.graph.nodes:
        node.args = fx.node.map_aggregate(node.args, move)
        node.kwargs = fx.node.map_aggregate(node.kwargs, move)
    moved.recompile()
    return moved


def _frozen_in(graph: fx.GraphModule, frozen: frozenset[str], *, before: int, tensors: Sequence[str]) -> fx.GraphModule:
    """The program where these batch normalizations take their running statistics, and leave them as they are.

    Args:
        frozen: the layers' names. One that has no running statistics takes those of the batch even then.
        before: inputs of the program before `tensors`.
    """
    copied = copy.deepcopy(graph)
    nodes = list(copied.graph.nodes)
    layers = {node: name.rpartition(".") for node, name in zip(nodes[before:], tensors, strict=False)}
    for node in nodes:
        layer, _, tensor = next((layers[each] for each in node.all_input_nodes if each in layers), ("", "", ""))
        if node.target is batch_operations.batch_norm:
            layer, _, tensor = layers.get(node.args[5], ("", "", ""))
            if layer in frozen and tensor == "running_mean":
                node.update_arg(7, False)
        elif layer in frozen and tensor == "num_batches_tracked" and not node.users:
            copied.graph.erase_node(node)
    copied.recompile()
    return copied
