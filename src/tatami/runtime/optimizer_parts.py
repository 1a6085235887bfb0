"""State dicts of optimizers that say which part of the weights they are of, so that one rank's is not loaded as another's.

An optimizer is torch's own, and nothing shows it to a tiled model before it steps; so torch's two methods are replaced.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from itertools import zip_longest
from typing import Any

import torch
from torch.optim import Optimizer

from tatami.checkpoints.parts import KEY, units_tensor
from tatami.errors import CheckpointError
from tatami.runtime.norms import models
from tatami.runtime.weight_average import WeightAverage

_lock = threading.Lock()
_is_watching = False


def watch_optimizer_states() -> None:
    """From now on, states of optimizers of tiled models carry their part, and refuse to be loaded as another one."""
    global _is_watching
    with _lock:
        if _is_watching:
            return
        save: Callable[..., Any] = Optimizer.state_dict
        load: Callable[..., Any] = Optimizer.load_state_dict

        @functools.wraps(save)
        def state_dict(self: Optimizer) -> Any:
            state, parts = save(self), _parts(self)
            if _has_parts(parts):
                state[KEY] = units_tensor(parts)
            return state

        @functools.wraps(load)
        def load_state_dict(self: Optimizer, state_dict: Any) -> None:
            parts = _parts(self)
            _refuse_other(state_dict.get(KEY), parts)
            if KEY not in state_dict and _has_parts(parts):
                _refuse_whole(self, state_dict)
            load(self, state_dict)

        Optimizer.state_dict, Optimizer.load_state_dict = state_dict, load_state_dict  # type: ignore[method-assign]
        _is_watching = True


def _parts(optimizer: Optimizer) -> list[tuple[int, int, int]]:
    """The units that this rank's state is of, and its shard: the first, the one after the last, and how many there are."""
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    is_sharded = not isinstance(optimizer, WeightAverage)  # an average has whole weights
    return [each for model in models() for each in model.parts_of(held, is_sharded=is_sharded)]


def _refuse_other(given: torch.Tensor | None, own: list[tuple[int, int, int]]) -> None:
    there = [] if given is None else [tuple(each) for each in given.round().to(torch.int64).tolist()]
    if given is not None and there != own:
        one, other = next((a, b) for a, b in zip_longest(there, own) if a != b)
        raise CheckpointError(
            f"this optimizer state is of another part of the weights than this rank has ({_told(one)}, here {_told(other)}): "
            "it was saved by another rank, or under another layout. Load on each rank what it saved itself, or use "
            "tatami.save_training and tatami.load_training, which take any ranks and layout"
        )


def _has_parts(parts: list[tuple[int, int, int]]) -> bool:
    return any(stop - start < total for start, stop, total in parts)


def _refuse_whole(optimizer: Optimizer, given: Any) -> None:
    """Refuse the state of a plain run where a rank has a part of the weights."""
    tiled = {id(each) for model in models() for each in model.tiled_parameters()}
    weights = [each for group in optimizer.param_groups for each in group["params"]]
    numbers = [number for group in given["param_groups"] for number in group["params"]]
    for weight, number in zip(weights, numbers, strict=False):
        for value in given["state"].get(number, {}).values():
            if id(weight) in tiled and isinstance(value, torch.Tensor) and value.numel() > max(1, weight.numel()):
                raise CheckpointError(
                    f"this state has {tuple(value.shape)} for a weight of which this rank holds {tuple(weight.shape)}. "
                    "It is of whole weights, and cannot be loaded where ranks share the units of a layer. Take a layout of "
                    "replicas of one rank, or save with tatami.save_training, whose checkpoints are for any ranks and layout"
                )


def _told(part: tuple[int, ...] | None) -> str:
    return "nothing" if part is None else f"{part[0]} to {part[1]} of {part[2]}"
