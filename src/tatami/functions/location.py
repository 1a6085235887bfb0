"""Which line of user code called: carried with every message, so that an error on one rank can name the line of another."""

from __future__ import annotations

import sys
from functools import lru_cache
from pathlib import Path
from types import CodeType

from tatami.functions.message import MAX_LOCATION_BYTES

_FRAMES_OF_OURS = 4
"""The operation at least is so far up: between here and it are that of the exchange, what is run, and `replayed`."""


def user_location() -> bytes:
    """`file.py:12` of the nearest frame outside of Tatami and torch."""
    frame = sys._getframe(_FRAMES_OF_OURS)
    while frame.f_back is not None and _is_inside(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return _as_bytes(frame.f_code, frame.f_lineno)


@lru_cache(maxsize=4096)
def _is_inside(module: str) -> bool:
    return module.startswith(("tatami.", "torch."))


@lru_cache(maxsize=4096)
def _as_bytes(code: CodeType, line: int) -> bytes:
    path = Path(code.co_filename)
    try:
        path = path.relative_to(Path.cwd())
    except ValueError:
        path = Path(*path.parts[-3:])
    return f"{path}:{line}".encode()[-MAX_LOCATION_BYTES:]
