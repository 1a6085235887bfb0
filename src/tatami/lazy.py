"""Packages whose names are imported when they are first asked for: torch alone takes seconds to import."""

from __future__ import annotations

import ast
import sys
from collections.abc import Callable
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path


def lazy_names(package: str) -> Callable[[str], object]:
    """The `__getattr__` of a package.

    Args:
        package: its name; it has an `__all__`, and imports the names that are not imported at once under `if TYPE_CHECKING`,
            where they are looked up.
    """

    @cache
    def homes() -> dict[str, str]:
        source = Path(str(sys.modules[package].__file__)).read_text(encoding="utf-8")
        unread = next(each for each in ast.parse(source).body if isinstance(each, ast.If)).body
        found = [each for each in unread if isinstance(each, ast.ImportFrom)]
        return {name.name: str(each.module) for each in found for name in each.names}

    def look_up(name: str) -> object:
        here = sys.modules[package]
        if name not in here.__all__ or name not in homes():
            if name.isidentifier() and not name.startswith("_") and find_spec(f"{package}.{name}") is not None:
                return import_module(f"{package}.{name}")
            raise AttributeError(f"module '{package}' has no attribute {name!r}; it has {', '.join(here.__all__)}")
        value = getattr(import_module(homes()[name]), name)
        setattr(here, name, value)
        return value

    return look_up
