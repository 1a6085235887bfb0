"""The old name of what is in `tatami.tiled` and `tatami.parallel` now; kept so that old programs run.

`tatami.train` is the other old name. Each use warns and says the new name.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from importlib import import_module
from typing import Any

_PACKAGES = ("tatami.tiled", "tatami.parallel", "tatami.checkpoints", "tatami.records")


def moved_from(old: str) -> Callable[[str], Any]:
    """The `__getattr__` of a module `old` whose contents have moved."""

    def look_up(name: str) -> Any:
        for package in _PACKAGES:
            module = import_module(package)
            if not name.startswith("_") and hasattr(module, name):
                warnings.warn(f"{old}.{name} is {package}.{name} now", DeprecationWarning, stacklevel=2)
                return getattr(module, name)
        raise AttributeError(f"module '{old}' has no attribute {name!r}; what it had is in {', '.join(_PACKAGES)} now")

    return look_up


__getattr__ = moved_from("tatami.nn")
