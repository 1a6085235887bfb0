"""Calls of functions with a gradient of their own (`torch.autograd.Function`), shown to modes as one operation.

Torch shows a mode what such a function computes inside of its `forward`, where no gradient is recorded, and not that it is
called. A cut in there would separate what `backward` needs, and what is handed over would have no gradient.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch.autograd.function import _SingleLevelFunction
from torch.overrides import _get_current_function_mode_stack

_lock = threading.Lock()
_is_watched = False


@runtime_checkable
class SeesFunctions(Protocol):
    """A function mode to which calls of such functions come as a whole."""

    def apply_function(self, name: str, run: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Called in place of `run`, which is the function's `apply`."""
        ...


def watch_functions() -> None:
    """From now on the innermost mode that sees them is shown the functions that users and their libraries define."""
    global _is_watched
    with _lock:
        if _is_watched:
            return

        def apply(cls: type[torch.autograd.Function], *args: Any, **kwargs: Any) -> Any:
            plain: Callable[..., Any] = super(_SingleLevelFunction, cls).apply  # type: ignore[misc]
            modes = () if cls.__module__.startswith("torch.") else _get_current_function_mode_stack()  # type: ignore[no-untyped-call]
            mode = next((each for each in reversed(modes) if isinstance(each, SeesFunctions)), None)
            if mode is None:
                return plain(*args, **kwargs)
            return mode.apply_function(f"{cls.__name__}.apply", plain, args, kwargs)

        # `Function.apply` calls this one, also where a user bound it to a name (`ste = Ste.apply`) before it was replaced.
        _SingleLevelFunction.apply = classmethod(apply)  # type: ignore[attr-defined]
        _is_watched = True
