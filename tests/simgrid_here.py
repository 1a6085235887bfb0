"""SimGrid, which the simulator's times are held against; asked once for all tests that need it."""

import ctypes
import importlib
import importlib.util
from pathlib import Path
from typing import Any

import pytest

_FOUND = importlib.util.find_spec("simgrid")
needs_simgrid = pytest.mark.skipif(_FOUND is None, reason="SimGrid 4.1 is not here (make simgrid)")


def simgrid() -> Any:
    """The module; the library that it is linked against lies next to it, where the loader finds it only if it is loaded."""
    assert _FOUND is not None
    assert _FOUND.origin is not None
    for library in sorted(Path(_FOUND.origin).parent.glob("libsimgrid.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    return importlib.import_module("simgrid")
