"""Packages whose names are imported when they are first asked for: torch alone takes seconds to import."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec


def lazy_names(package: str, modules: Mapping[str, tuple[str, ...]]) -> Callable[[str], object]:
    """The `__getattr__` of a package, whose `dir` lists them as well.

    Args:
        package: its name; it has an `__all__`.
        modules: the public names of each module that is not imported at once.
    """
    homes = {name: module for module, names in modules.items() for name in names}
    here = sys.modules[package]
    vars(here)["__dir__"] = lambda: sorted({*vars(here), *here.__all__})

    def look_up(name: str) -> object:
        if name not in homes:
            if name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
                return import_module(f"{package}.{name}")
            raise AttributeError(f"module '{package}' has no attribute {name!r}; it has {', '.join(here.__all__)}")
        value = getattr(import_module(homes[name]), name)
        setattr(here, name, value)
        return value

    return look_up
