"""Steps of optimizers whose state is sharded: an optimizer sees the shard that this rank owns, and nothing else.

For the time of `step` each weight in the optimizer's groups is replaced by the part of it that is here, a view of its memory,
with its part of the gradient. Between two steps the groups hold the whole weights again, so that schedules, `zero_grad`,
parameter groups and clipping work as ever, and `optimizer.state` holds, by weight, the state of the part.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook
from torch.utils.hooks import RemovableHandle

from tatami.errors import InputError
from tatami.runtime.norms import models
from tatami.runtime.optimizers import check_shardable
from tatami.runtime.sharded_sums import ShardedSums
from tatami.runtime.weight_average import WeightAverage

_lock = threading.Lock()
_is_watching = False
_take_shard_hooks: weakref.WeakKeyDictionary[torch.optim.Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


@dataclass(kw_only=True)
class _Stepped:
    """Weights that are replaced by their shards.

    Attributes:
        groups: the weights of each group.
        pairs: each weight with its shard, and what it belongs to.
        moved: of each sharded model, the weights that change in this step, on this rank or another.
    """

    groups: list[list[Any]]
    pairs: list[tuple[nn.Parameter, nn.Parameter]] = field(default_factory=list)
    moved: dict[ShardedSums, list[nn.Parameter]] = field(default_factory=dict)


_stepped: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Stepped] = weakref.WeakKeyDictionary()


def watch_sharded_steps() -> None:
    """From now on, optimizers of sharded models step the shards."""
    global _is_watching
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_before_step)
            _is_watching = True


@contextmanager
def shards_in_place(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, the groups of an optimizer hold the shards of sharded weights, as they do while it steps."""
    sharded = _sharded(optimizer)
    if sharded:
        _replace(optimizer, sharded)
    try:
        yield
    finally:
        if sharded:
            _put_back(optimizer)


def _sharded(optimizer: torch.optim.Optimizer) -> dict[int, ShardedSums]:
    """By the identity of each sharded weight that the optimizer has, the sums of its model; an average has whole weights."""
    if isinstance(optimizer, WeightAverage):
        return {}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    found: dict[int, ShardedSums] = {}
    for model in models():
        sums: ShardedSums | None = getattr(model, "sharding", None)
        if sums is not None:
            found |= {id(each): sums for each in model.own_parameters() if id(each) in held}  # type: ignore[attr-defined]
    return found


def _before_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    _put_back(optimizer)  # where an error ended the step before
    if optimizer not in _take_shard_hooks:
        if not _sharded(optimizer):
            return
        handle = optimizer.register_step_post_hook(_after_step)
        # Before those of the user, such as an average of the weights, which is of whole ones.
        hooks: Any = optimizer._optimizer_step_post_hooks
        hooks.move_to_end(handle.id, last=False)
        _take_shard_hooks[optimizer] = optimizer.register_step_pre_hook(_take_shards)
    # After those of the user, such as clipping, which is of whole gradients.
    hooks = optimizer._optimizer_step_pre_hooks
    hooks.move_to_end(_take_shard_hooks[optimizer].id)


def _take_shards(optimizer: torch.optim.Optimizer, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    sharded = _sharded(optimizer)
    if not sharded:
        return
    if any(each is not None for each in (*args[1:], *kwargs.values())):
        raise InputError(
            "with sharded_optimizer=True, optimizer.step takes no closure: gradients must be there before the step. Call "
            "backward() and then step(), or leave sharded_optimizer out"
        )
    check_shardable(optimizer)
    _replace(optimizer, sharded)


def _after_step(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    stepped = _put_back(optimizer)
    if stepped is not None:
        for sums, parameters in stepped.moved.items():
            sums.gather(parameters)


def _replace(optimizer: torch.optim.Optimizer, sharded: dict[int, ShardedSums]) -> None:
    _stepped[optimizer] = stepped = _Stepped(groups=[group["params"] for group in optimizer.param_groups])
    for group in optimizer.param_groups:
        here = []
        for whole in group["params"]:
            sums = sharded.get(id(whole))
            if sums is None:
                here.append(whole)
            elif whole.grad is not None:
                if not sums.knows(whole):
                    raise InputError(
                        f"a gradient of shape {tuple(whole.shape)} did not come from loss.backward() of the tiled model, and "
                        "is not known to the other ranks. With sharded_optimizer=True, do not set parameter.grad by hand"
                    )
                stepped.moved.setdefault(sums, []).append(whole)
                shard = _shard(optimizer, whole, sums)
                if shard is not None:
                    here.append(shard)
                    stepped.pairs.append((whole, shard))
        group["params"] = here


def _shard(optimizer: torch.optim.Optimizer, whole: nn.Parameter, sums: ShardedSums) -> nn.Parameter | None:
    """The part of a weight that is here, with its gradient and the optimizer's state; None where there is none."""
    start, stop = sums.range_of(whole)
    if start == stop:
        return None
    shard = nn.Parameter(sums.part(whole, whole.detach()))
    assert whole.grad is not None
    whole.grad = whole.grad.contiguous()
    shard.grad = sums.part(whole, whole.grad)
    state = optimizer.state.pop(whole, None)
    if state:
        # What was loaded from the state of a run without shards is whole.
        optimizer.state[shard] = {key: _part_of(value, whole, sums) for key, value in state.items()}
    return shard


def _part_of(value: Any, whole: nn.Parameter, sums: ShardedSums) -> Any:
    if not isinstance(value, torch.Tensor) or value.shape != whole.shape:
        return value
    return sums.part(whole, value.contiguous()).clone()


def _put_back(optimizer: torch.optim.Optimizer) -> _Stepped | None:
    stepped = _stepped.pop(optimizer, None)
    if stepped is None:
        return None
    for group, parameters in zip(optimizer.param_groups, stepped.groups, strict=False):
        group["params"] = parameters
    for whole, shard in stepped.pairs:
        if shard in optimizer.state:
            optimizer.state[whole] = optimizer.state.pop(shard)
    return stepped
