"""Cutting the tensors of a module to some units of a block, where they are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tatami.tiled.rows import UnitRuns, cut_units
from tatami.tiling import Span


def tensor_of(root: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its qualified name."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    tensor = owner._parameters[leaf] if leaf in owner._parameters else owner._buffers[leaf]
    assert tensor is not None
    return tensor


def cut_units_of(root: nn.Module, cuts: Mapping[str, UnitRuns], span: Span) -> None:
    """Leave of some tensors of `root` the units of `span`. One that has several names keeps them."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the whole tensor, whose id no other one may get meanwhile
    for name, runs in cuts.items():
        path, _, leaf = name.rpartition(".")
        owner = root.get_submodule(path)
        whole = tensor_of(root, name)
        if any(whole is cut for _, cut in made.values()):
            continue  # a module that is there under several names
        if id(whole) not in made:
            cut = cut_units(whole.detach(), runs, span).clone(memory_format=torch.contiguous_format)
            made[id(whole)] = whole, nn.Parameter(cut, whole.requires_grad) if isinstance(whole, nn.Parameter) else cut
        tensors: dict[str, Any] = owner._parameters if isinstance(whole, nn.Parameter) else owner._buffers
        tensors[leaf] = made[id(whole)][1]
