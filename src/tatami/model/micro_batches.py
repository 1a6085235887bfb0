"""What the global batch is cut into for one forward pass: looking at what was given, and joining what comes out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.errors import ModelError, PlanError
from tatami.partition.exactness import BATCH_NORMS

_PLAIN_VALUES = (bool, int, float, complex, str, bytes, type(None))


def samples_given(inputs: tuple[Any, ...], named_inputs: Mapping[str, Any]) -> int | None:
    """The length of the first tensor; None where there is none with an axis. Torch's look into structures takes its time."""
    for value in (*inputs, *named_inputs.values()):
        if not isinstance(value, (torch.Tensor, *_PLAIN_VALUES)):
            break
        if isinstance(value, torch.Tensor) and value.dim():
            return value.shape[0]
    tensors = (value for value in pytree.tree_leaves((inputs, dict(named_inputs))) if isinstance(value, torch.Tensor))
    return next((tensor.shape[0] for tensor in tensors if tensor.dim()), None)


def joined(outputs: Sequence[Any], axes: Sequence[int | None] | None) -> Any:
    """The outputs of consecutive micro-batches as one.

    Args:
        outputs: of each micro-batch, in tensors, tuples, lists or dicts of one structure.
        axes: the axis of samples of each tensor, None for one that has none; the first for all where they are not known.

    Raises:
        ModelError: one of its tensors is not of samples, such as a loss.
    """
    leaves = [pytree.tree_flatten(output)[0] for output in outputs]
    known = axes if axes is not None and len(axes) == len(leaves[0]) else [0] * len(leaves[0])
    whole = []
    for parts, axis in zip(zip(*leaves, strict=True), known, strict=True):
        if isinstance(parts[0], torch.Tensor) and (axis is None or not parts[0].dim()):
            raise ModelError(
                f"the network returns a tensor of shape {tuple(parts[0].shape)} that is not of single samples, and cannot be "
                "put together from micro-batches. Train with tatami.Trainer, take model.micro_batches(...), or give "
                "tatami.tile micro_batches=1"
            )
        whole.append(torch.cat(parts, axis or 0) if isinstance(parts[0], torch.Tensor) else parts[0])
    return pytree.tree_unflatten(whole, pytree.tree_flatten(outputs[0])[1])


def versions_of(network: nn.Module) -> dict[str, Any]:
    """How often each buffer was changed, but for those of batch normalization, and the fractions that modules hold.

    Whole numbers may be sizes of a micro-batch.
    """
    owners = {name: module for name, module in network.named_modules() if not isinstance(module, BATCH_NORMS)}
    versions = {name: buffer._version for name, buffer in network.named_buffers() if name.rpartition(".")[0] in owners}
    held = ((f"{name}.{own}".lstrip("."), value) for name, module in owners.items() for own, value in vars(module).items())
    return versions | {name: value for name, value in held if isinstance(value, float) and not math.isnan(value)}


def refuse_changed(names: Sequence[str]) -> None:
    """
    Raises:
        PlanError: there are some: buffers and attributes that each forward pass changes, in a batch of several micro-batches.
    """
    if names:
        raise PlanError(
            f"the forward pass changes {', '.join(names[:3])}, which would happen once for each micro-batch and not once for "
            "a batch. Use micro_batches=1 and a layout of one micro-batch for each replica, or change it between steps"
        )
