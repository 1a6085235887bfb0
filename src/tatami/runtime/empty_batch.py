"""A pass of a rank without samples: of a batch smaller than the replicas, or of a rank that was left out of the tiling.

What all ranks do together (batch normalization, random numbers, the sums of gradients) needs that rank, but the network's own
Python may not work for no sample: `x.view(b, t, -1, n)` does not. So one sample stands in, and counts nowhere: its result is
cut to no sample, which sends gradients of 0 back; its statistics are left out (`batch_operations.batch_norm`); its replica sums
nothing in that pass (`ReplicaComm.now`); and no gradient, not even a NaN, leaves the rank (`TiledModel._sum_gradients`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.utils import _pytree as pytree


def with_stand_in(inputs: Any) -> Any:
    """Inputs of no sample, (0, ...), with one: the first of what they were cut from, where torch knows that, or else zeros."""
    made: dict[int, torch.Tensor] = {}  # what was one tensor stays one

    def add(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor) or not leaf.dim() or leaf.shape[0]:
            return leaf
        if id(leaf) not in made:
            made[id(leaf)] = torch.cat((leaf, _first_of(leaf._base, leaf)))
        return made[id(leaf)]

    return pytree.tree_map(add, inputs)


def without_stand_in(output: Any, axes: Sequence[int | None] | None) -> Any:
    """An output of the one sample, cut to none; a single number becomes 0.

    Args:
        output: of the network.
        axes: of each leaf, the axis on which samples lie; None: of no leaf is that known, and it is the first one.
    """
    leaves, structure = pytree.tree_flatten(output)
    known = axes if axes is not None and len(axes) == len(leaves) else [0] * len(leaves)
    return pytree.tree_unflatten([_cut(leaf, axis) for leaf, axis in zip(leaves, known, strict=True)], structure)


def _first_of(whole: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    fits = whole is not None and whole.dim() == like.dim() and whole.shape[1:] == like.shape[1:] and whole.dtype == like.dtype
    if whole is None or not fits or not len(whole):
        return like.new_zeros(1, *like.shape[1:])
    return whole[:1].detach()


def _cut(leaf: Any, axis: int | None) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    if not leaf.dim():
        # The sum over none of it: 0, even of a NaN, and still the end of a graph.
        return leaf.unsqueeze(0)[:0].sum(dtype=leaf.dtype)
    return leaf if axis is None else leaf.narrow(axis, 0, 0)
