"""Whether the optimizers of all ranks step alike: equally often, and by the same learning rate, momentum and so on.

Nothing else would notice: a schedule that looks at the loss of a rank's own samples (`ReduceLROnPlateau`), or a step that is
left out for it, leaves ranks with other weights. A `Watch` compares them.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tatami.errors import InputError

_TOLERANCE = 1e-6
"""Relative; machines that are not alike round a cosine differently."""
_OF_THE_MACHINE = frozenset({"capturable", "differentiable", "foreach", "fused"})
"""How the same step is computed; a rank on a card and one on a CPU may differ."""

_lock = threading.Lock()
_is_watching = False
_num_steps: weakref.WeakKeyDictionary[torch.optim.Optimizer, int] = weakref.WeakKeyDictionary()


@dataclass(frozen=True, kw_only=True)
class StepNumbers:
    """What is compared of one optimizer.

    Attributes:
        name: of its class.
        steps: how many it has begun.
        settings: of each group of parameters, by name.
    """

    name: str = "no optimizer"
    steps: int = 0
    settings: tuple[dict[str, tuple[float, ...]], ...] = ()


def watch_steps() -> None:
    """From now on, count the steps of optimizers."""
    global _is_watching
    with _lock:
        if not _is_watching:
            register_optimizer_step_pre_hook(_count)
            _is_watching = True


def know(optimizer: torch.optim.Optimizer) -> None:
    """Have `optimizers_of` find an optimizer before it has made a step."""
    with _lock:
        _num_steps.setdefault(optimizer, 0)


def num_steps(optimizer: torch.optim.Optimizer) -> int:
    """How many steps an optimizer has begun since `watch_steps`."""
    with _lock:
        return _num_steps.get(optimizer, 0)


def optimizers_of(parameters: Iterable[nn.Parameter]) -> dict[torch.optim.Optimizer, int]:
    """The optimizers of any of these parameters that `know` was given or that have stepped, in this order, and how often."""
    mine = {id(parameter) for parameter in parameters}
    with _lock:  # all through: a list of all would keep those alive that another rank of this process has let go
        return {
            optimizer: steps
            for optimizer, steps in _num_steps.items()
            if any(id(parameter) in mine for group in optimizer.param_groups for parameter in group["params"])
        }


def steps_of(parameters: Iterable[nn.Parameter]) -> tuple[StepNumbers, ...]:
    """What is compared of the optimizers that have stepped any of these parameters."""
    return tuple(
        StepNumbers(
            name=type(optimizer).__name__, steps=steps, settings=tuple(_numbers(group) for group in optimizer.param_groups)
        )
        for optimizer, steps in optimizers_of(parameters).items()
    )


def refuse_other_steps(told: Sequence[Sequence[StepNumbers]]) -> None:
    """
    Args:
        told: by each rank; the same on all ranks, which then all raise or none.

    Raises:
        InputError: names a rank that steps otherwise than rank 0, and in what.
    """
    for rank, theirs in enumerate(told):
        for one, other in zip_longest(told[0], theirs, fillvalue=StepNumbers()):
            if one.steps != other.steps:
                raise _other(f"{other.name} has made {other.steps} steps on rank {rank}, {one.name} {one.steps} on rank 0")
            for mine, yours in zip(one.settings, other.settings, strict=False):
                for name in mine.keys() & yours.keys():
                    if len(mine[name]) != len(yours[name]) or any(
                        not (a == b or abs(a - b) <= _TOLERANCE * max(abs(a), abs(b)) or (a != a and b != b))
                        for a, b in zip(mine[name], yours[name], strict=True)
                    ):
                        raise _other(
                            f"{name} of {other.name} is {_told(yours[name])} on rank {rank}, {_told(mine[name])} on rank 0"
                        )


def _count(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:  # noqa: ARG001 -- a hook of torch's
    with _lock:
        _num_steps[optimizer] = _num_steps.get(optimizer, 0) + 1


def _numbers(group: dict[str, Any]) -> dict[str, tuple[float, ...]]:
    found = {}
    for name, value in group.items():
        values = value if isinstance(value, (tuple, list)) and name != "params" else (value,)
        if name not in _OF_THE_MACHINE and values and all(_is_number(each) for each in values):
            found[name] = tuple(float(each) for each in values)
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, (bool, int, float)) or (isinstance(value, torch.Tensor) and value.numel() == 1)


def _told(numbers: tuple[float, ...]) -> str:
    return ", ".join(f"{number:g}" for number in numbers)


def _other(what: str) -> InputError:
    return InputError(
        f"the ranks do not step alike: {what}. Decide on numbers that all ranks share, as the loss of the whole batch "
        "(model.global_loss of a tiled model), not on the loss of a rank's own samples"
    )
