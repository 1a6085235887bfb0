"""What all modules that talk to other ranks have in common: their communicator, which a copy of the module shares."""

from __future__ import annotations

from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree

from tatami import functions
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError


class AbstractSpanning(nn.Module):
    """A module on several ranks. Its deep copies talk through the same communicator.

    Attributes:
        comm: the ranks.
    """

    comm: AbstractCommunicator

    def __deepcopy__(self, memo: dict[int, Any]) -> AbstractSpanning:
        memo[id(self.comm)] = self.comm
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update(deepcopy(self.__dict__, memo))
        return twin


def check_rank(what: str, comm: AbstractCommunicator, rank: int) -> None:
    """Whether `rank` is one of `comm`.

    Raises:
        InputError: it is not.
    """
    if not isinstance(rank, int) or isinstance(rank, bool):
        raise InputError(f"{what}={rank!r} is a {type(rank).__name__}; give a rank")
    if not 0 <= rank < comm.size:
        raise InputError(f"{what}={rank}: there is no such rank; this communicator has ranks 0 to {comm.size - 1}")


def one_each(what: str, values: int | Sequence[int], *, number: int) -> tuple[int, ...]:
    """`values` as one for each of `number` ranks; a single one is that of all.

    Raises:
        InputError: there are more or fewer.
    """
    if isinstance(values, int):
        return (values,) * number
    if len(values) != number:
        raise InputError(f"{what}={list(values)} has {len(values)} entries for {number} ranks; give one, or one for each")
    return tuple(values)


def connected(delegate: torch.Tensor | None, output: Any) -> Any:
    """`output`, so that backward from any tensor in it comes to all that was sent up to `delegate`.

    `loss.backward()` visits what the loss depends on. Where that is nothing that other ranks sent, torch would not come to
    what this rank sent them.
    """
    if delegate is None or not delegate.requires_grad:
        return output
    leaves, spec = _pytree.tree_flatten(output)
    where = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    for i, leaf in zip(where, functions.pseudo_connect(delegate, *(leaves[i] for i in where)), strict=True):
        leaves[i] = leaf
    return _pytree.tree_unflatten(leaves, spec)
