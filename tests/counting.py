"""How much work a function is, told by what it calls: the same on every machine, however busy it is."""

import sys
from collections.abc import Callable
from typing import Any


def calls_of(run: Callable[[], object]) -> int:
    """How many functions `run` calls, Python's own among them, in this thread."""
    calls = 0

    def count(frame: object, event: str, argument: Any) -> None:  # noqa: ARG001 -- as Python calls it
        nonlocal calls
        calls += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(count)
    try:
        run()
    finally:
        sys.setprofile(before)
    return calls
