"""The random state of this process: of torch, of Python, and of NumPy."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_NO_GARBAGE = threading.Lock()


def torch_state(generator: torch.Generator | None = None) -> torch.Tensor:
    """The state of a generator, by default of torch's own, taken without collecting garbage meanwhile.

    Torch has the generator locked while it makes the tensor. Were garbage collected there, the end of a graph would let another
    thread run, which would wait for the generator forever, holding on to Python.
    """
    with _NO_GARBAGE:
        collects = gc.isenabled()
        gc.disable()
        try:
            return (generator or torch.default_generator).get_state()
        finally:
            if collects:
                gc.enable()


@contextmanager
def kept_torch_state() -> Iterator[None]:
    """What is drawn meanwhile of torch's default generator is as if it were not."""
    before = torch_state()
    try:
        yield
    finally:
        torch.set_rng_state(before)


def random_state() -> dict[str, Any]:
    """All of it, as tensors and plain values."""
    kind, keys, *rest = np.random.get_state()
    numpy = [kind, torch.from_numpy(np.asarray(keys).astype(np.int64)), *rest]
    state = {"torch": torch_state(), "python": random.getstate(), "numpy": numpy}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state_all()
    return state


def set_random_state(state: dict[str, Any]) -> None:
    """Put back what `random_state` returned."""
    torch.set_rng_state(state["torch"])
    version, numbers, last = state["python"]
    random.setstate((version, tuple(numbers), last))
    kind, keys, *rest = state["numpy"]
    np.random.set_state((kind, keys.numpy().astype(np.uint32), *rest))
    if "cuda" in state and torch.cuda.is_available() and torch.cuda.device_count() == len(state["cuda"]):
        torch.cuda.set_rng_state_all(state["cuda"])
