"""The user's functions on their way to other processes."""

from __future__ import annotations

import site
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from tatami.engine.ray_engine import require_ray


@contextmanager
def by_value(*functions: Any) -> Iterator[None]:
    """Send the user's own modules along: a worker's process could not import a script or a test."""
    ray = require_ray()
    installed = (*site.getsitepackages(), sys.prefix, sys.base_prefix)
    modules = []
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        file = getattr(module, "__file__", None)
        known = module is None or module.__name__ == "__main__" or module.__name__.startswith("tatami.")
        if module is not None and not known and file and not file.startswith(installed):
            modules.append(module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in set(modules):
            ray.cloudpickle.unregister_pickle_by_value(module)
