"""SimGrid, found and loaded; nothing else of Tatami imports it."""

from __future__ import annotations

import ctypes
import importlib
import importlib.util
from functools import cache
from pathlib import Path
from typing import Any

from tatami.errors import MissingExtraError

_WHAT = (
    "SimGrid 4.1, which reads platforms in its XML and is built from source where it is installed (in a checkout: make "
    "simgrid; elsewhere see docs/rehearsal.md: it needs a C++ compiler, cmake, Boost's headers and pybind11 < 3),"
)
_OLDEST = (4, 0)
"""Host.add_actor, ActivitySet and NetZone.add_* are of this release."""


def require_simgrid() -> Path:
    """The folder that SimGrid is in; does not load it.

    Raises:
        MissingExtraError: it is not installed; says how to get it.
    """
    spec = importlib.util.find_spec("simgrid")
    if spec is None or spec.origin is None:
        raise MissingExtraError(_WHAT, extra="sim")
    return Path(spec.origin).parent


@cache
def simgrid() -> Any:
    """The module `simgrid`.

    Raises:
        MissingExtraError: it is not installed, cannot be loaded, or is too old; says how to get it.
    """
    folder = require_simgrid()
    # The extension is linked against a library that lies next to it, where the loader does not look: loaded first, and for all
    # to see, it is found by its name. Debian's package has none next to it, and the loader finds its own.
    for library in sorted(folder.glob("libsimgrid.so.*")):
        ctypes.CDLL(str(library), mode=ctypes.RTLD_GLOBAL)
    try:
        module = importlib.import_module("simgrid")
    except ImportError as error:
        raise MissingExtraError(f"{_WHAT} ({folder} has it, but: {error})", extra="sim") from error
    version = str(module.simgrid_version)
    if tuple(int(part) for part in version.split(".")[:2]) < _OLDEST:
        raise MissingExtraError(f"{_WHAT} (here is {version}, which is too old)", extra="sim")
    return module
