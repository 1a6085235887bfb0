"""Activation checkpointing: a layer that torch computes once more finds what it found in the forward pass.

`torch.utils.checkpoint` drops activations and computes them again during the backward pass. It brings torch's own random
state back for that. The layers of a tiled model ask for more: which samples of the batch are here, and what the generator
draws that all ranks share. Meanwhile another batch may have been announced, and other layers have drawn. So where a
checkpoint begins, inside of the forward pass of a tiled model, what its layers may ask for is kept, and brought back whenever
torch computes it again.

A recomputation repeats the tensor-parallel sums of the forward pass, and all ranks of a replica must enter it at the same place
among the sums of the backward pass. Without reentrant autograd torch starts it where the first saved tensor is read, and a rank
without an expert that computes reads none before it reaches a sum. So each operation that sums reads one before it sums.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
import torch.utils.checkpoint as checkpointing

from tatami.errors import warn

Restore = Callable[[], AbstractContextManager[Any]]
"""Brings back, for the length of a with-block, what was there when it was made."""
Keep = Callable[[bool], Restore]
"""Keeps what is there now. The argument says whether the checkpoint uses reentrant autograd."""

_GENERATOR = "_checkpoint_without_reentrant_generator"
_EARLY_STOP = 5
"""Place of `early_stop` among the arguments that torch.utils.checkpoint hands on, behind the function."""
_running = threading.local()
_lock = threading.Lock()


def recompute_before_backward(ctx: Any, like: torch.Tensor) -> None:
    """In the forward pass of an operation that sums over ranks: save a tensor of no element for `recompute_now`."""
    ctx.save_for_backward(like.new_empty(0))


def recompute_now(ctx: Any) -> None:
    """In the backward pass, before anything is sent: a checkpoint around the operation is computed again, if it is not yet."""
    _ = ctx.saved_tensors


@contextmanager
def recomputable(keep: Keep) -> Iterator[None]:
    """A forward pass of a tiled model; `keep` is called where a checkpoint begins in it."""
    keeps: list[Keep] = _running.__dict__.setdefault("keeps", [])
    keeps.append(keep)
    try:
        yield
    finally:
        keeps.pop()


def watch_checkpoints() -> None:
    """From now on, checkpoints bring back what layers of tiled models ask for."""
    with _lock:
        if getattr(checkpointing, "tatami_watches", False):
            return
        generator = getattr(checkpointing, _GENERATOR, None)
        function: Any = checkpointing.CheckpointFunction
        if generator is None:
            warn(
                f"torch {torch.__version__} checkpoints activations in a way that is not known here: do not use "
                "torch.utils.checkpoint with dropout or batch normalization inside of a tiled model"
            )
            return
        forward = function.forward
        # This one calls its function in the backward pass alone, and that one in both.
        setattr(checkpointing, _GENERATOR, functools.partial(_to_the_end, generator))
        function.forward = staticmethod(lambda ctx, fn, *args: forward(ctx, _again(fn, first=2), *args))
        checkpointing.tatami_watches = True  # type: ignore[attr-defined]


def _to_the_end(generator: Callable[..., Any], function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Without reentrant autograd torch ends a recomputation early, where it has what is missing. Ranks that share units do not
    miss the same (one may have no sample of an expert), and each sum over them must be entered by all: they go to the end.
    """
    if getattr(_running, "keeps", ()) and len(args) >= _EARLY_STOP:
        args = (*args[: _EARLY_STOP - 1], False, *args[_EARLY_STOP:])
    return generator(_again(function, first=1), *args, **kwargs)


def _again(function: Callable[..., Any], *, first: int) -> Callable[..., Any]:
    """`function`, which from its call number `first` on finds what is there now."""
    keeps: tuple[Keep, ...] = tuple(getattr(_running, "keeps", ()))
    if not keeps:
        return function
    restores = [keep(first > 1) for keep in keeps]
    calls = 0

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls < first:
            return function(*args, **kwargs)
        with ExitStack() as stack:
            for keep, restore in zip(keeps, restores, strict=True):
                stack.enter_context(restore())
                stack.enter_context(recomputable(keep))  # for checkpoints inside of this one
            return function(*args, **kwargs)

    return run
