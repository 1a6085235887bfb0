"""A plain network from the weights that ranks hold, and errors for who takes one kind of state dict for the other."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError

_Model = TypeVar("_Model", bound=nn.Module)


def plain_network(
    model: _Model,
    make: Callable[[], nn.Module | None] | None,
    *,
    gather: Callable[..., Iterator[tuple[str, torch.Tensor]]] | None,
    comm: AbstractCommunicator,
) -> nn.Module | None:
    """A plain network with all of the weights, on the CPU of rank 0; None on other ranks. Collective.

    Args:
        model: whose weights.
        make: makes the network that was tiled, with any weights; None, or the result of None, where it is gone.
        gather: `gathered_weights`: a tensor of the network that is the same as the gathered one is returned itself, and is left
            as it is, such as the pages of a file.
        comm: all ranks.

    Raises:
        ModelError: on rank 0: there is nothing to put weights into, or the function made another network this time.
    """
    plain = problem = None
    if not comm.rank:
        try:
            plain = None if make is None else make()
        except Exception as error:  # of the user's function: the other ranks are about to send
            problem = error
    network = None if plain is None else plain.cpu().train(model.training)
    own = {} if network is None else network.state_dict()
    changed, same = {}, set()
    for name, value in () if gather is None else gather(model, known=own):
        if value is own.get(name):
            same.add(name)
        elif network is not None:
            changed[name] = value
    if comm.rank:
        return None
    if network is None:
        raise problem or ModelError(
            "the network that was tiled is gone: keep a reference to it, give tatami.tile a function that makes it, or "
            "load tatami.train.whole_state_dict(model) into a network of your own"
        )
    keys = network.load_state_dict(changed, strict=False)
    if keys.unexpected_keys or not same.issuperset(keys.missing_keys):
        raise ModelError(f"the function of tatami.tile made another network this time: {keys}")
    return network


def refuse_larger(module: nn.Module, state_dict: Mapping[str, object]) -> None:
    """
    Raises:
        ModelError: one of these tensors has more elements than the part of it that the module holds.
    """
    for name, own in module.named_parameters():
        given = state_dict.get(name)
        if isinstance(given, torch.Tensor) and given.dim() == own.dim() and given.numel() > own.numel():
            raise whole_weights(f" ({name} is {tuple(given.shape)}, and {tuple(own.shape)} here)")


def whole_weights(seen: str = "") -> ModelError:
    """The error for whole weights where a rank's part of them is loaded."""
    return ModelError(
        f"these are whole weights, and a rank holds its tile{seen}: tatami.train.load_whole_state_dict(model, weights) takes "
        "them, under the names of the plain network (without 'module.'), and tatami.train.whole_state_dict(model) gives them"
    )
