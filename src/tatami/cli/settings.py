"""Commands that take one frozen dataclass: its fields are their options."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

Settings = TypeVar("Settings")


def takes(kind: type[Settings]) -> Callable[[Callable[[Settings], None]], Callable[..., None]]:
    """Make a function of settings a command, with an option for each field of `kind` that is `Annotated` as one.

    typer reads the options of a command from its signature. So the command gets a signature that is made of the fields, and
    what typer has read for them travels on as one object, from the command line to the library and to the records. Fields that
    `kind` inherits come last in the help: what several commands share is less special than what one has.
    """
    hints = get_type_hints(kind, include_extras=True)
    own_first = sorted(fields(kind), key=lambda each: each.name not in kind.__annotations__)  # type: ignore[arg-type]
    options = {each.name: each for each in own_first if get_origin(hints[each.name]) is Annotated}

    def decorate(run: Callable[[Settings], None]) -> Callable[..., None]:
        def command(**values: Any) -> None:
            run(kind(**values))

        functools.update_wrapper(command, run, assigned=("__module__", "__name__", "__qualname__", "__doc__"))
        del command.__wrapped__  # type: ignore[attr-defined] # whose signature would be read in place of this one
        command.__annotations__ = {name: hints[name] for name in options}
        command.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
            [
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=inspect.Parameter.empty if each.default is MISSING else each.default,
                    annotation=hints[name],
                )
                for name, each in options.items()
            ]
        )
        return command

    return decorate
