"""The tiled models of this process, for what torch does with tensors that it does not know to be tiles."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from typing import Any, Protocol

from torch import nn

from tatami.runtime.norms import WholeNorms


class HoldsTiles(Protocol):
    """A model of which this rank has tiles."""

    @property
    def norms(self) -> WholeNorms: ...

    def tiled_parameters(self) -> Iterable[nn.Parameter]: ...

    def plain_parameters(self) -> Iterable[nn.Parameter]: ...


_lock = threading.Lock()
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def register(model: HoldsTiles) -> None:
    """Know `model` for as long as it lives."""
    with _lock:
        _models.add(model)


def models() -> list[HoldsTiles]:
    """Those that are alive; where ranks are threads of one process, those of all of them."""
    with _lock:
        return list(_models)
