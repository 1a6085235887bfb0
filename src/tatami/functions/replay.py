"""Activation checkpointing: what is computed again is not communicated again, but repeated from what came the first time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from weakref import ReferenceType, WeakKeyDictionary

import torch

from tatami.errors import CommError
from tatami.functions.structure import Structure, with_tensors

Result = TypeVar("Result")


class _Tape:
    """What the operations in one checkpointed region returned, in order, and how many have been repeated, by graph task."""

    def __init__(self) -> None:
        self.results: list[Structure] = []
        self.num_repeated: dict[int, int] = {}


_tapes: WeakKeyDictionary[Any, _Tape] = WeakKeyDictionary()
"""By the checkpointed region, torch's `_CheckpointFrame`, so that a tape is kept no longer than it."""


def replayed(name: str, run: Callable[[], Result]) -> Result:
    """What `run` returns; while torch.utils.checkpoint computes a region again, what it returned there.

    Raises:
        CommError: it is called inside of a backward pass that does not repeat a forward pass.
    """
    graph_task: int = torch._C._current_graph_task_id()
    hooks: Any = torch._C._autograd._top_saved_tensors_default_hooks(False)
    if graph_task == -1 and hooks is None:
        return run()
    region, repeats = _region(hooks)
    if region is None:
        if graph_task == -1:
            return run()
        raise CommError(
            f"{name} is called inside of a backward pass, in which the other ranks do not take part. Where this is "
            "torch.utils.checkpoint, call it with use_reentrant=False, and do not nest regions around communication"
        )
    if repeats:
        tape = _tapes[region]
        number = tape.num_repeated.get(graph_task, 0)
        tape.num_repeated[graph_task] = number + 1
        repeated: Result = with_tensors(tape.results[number], _detached)
        return repeated
    result = run()
    _tapes.setdefault(region, _Tape()).results.append(with_tensors(result, _detached))
    return result


def _detached(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().requires_grad_(tensor.requires_grad)


def _region(hooks: Any) -> tuple[Any, bool]:
    """The checkpointed region that these hooks of torch work for, and whether it is being computed again.

    torch does not tell; its hooks know it: `frame` when tensors are saved, `target_frame_ref` when they are computed again.
    """
    pack = None if hooks is None else getattr(hooks[0], "__wrapped__", hooks[0])
    if pack is None or getattr(pack, "__closure__", None) is None:
        return None, False
    inside = dict(zip(pack.__code__.co_freevars, (cell.cell_contents for cell in pack.__closure__), strict=True))
    if "frame" in inside and type(inside["frame"]).__name__ == "_CheckpointFrame":
        return inside["frame"], False
    again = inside.get("target_frame_ref")
    return (again(), True) if isinstance(again, ReferenceType) else (None, False)
