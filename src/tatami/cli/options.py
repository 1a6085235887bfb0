"""Options that several commands have, each said once."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable
from dataclasses import MISSING, fields
from functools import partial
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from tatami.cluster.device_choice import DEVICE_REQUESTS, DEVICE_VARIABLE, choose_device
from tatami.errors import InputError
from tatami.units import parse_size

Number = TypeVar("Number", int, float)

MOST_RANKS = 4096
"""Most ranks that one command starts; use the site's own launcher for more."""


def finite(value: float | None) -> float | None:
    """The callback of every option that takes a number with a point.

    Raises:
        BadParameter: NaN, or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, not {value}")
    return value


def given(option: str, parse: Callable[[str], Number], text: str) -> Number:
    """What `parse` makes of the text of an option.

    Raises:
        InputError: as `parse`, with the name of the option.
    """
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def given_sizes(option: str, text: str) -> tuple[int, ...]:
    """Sizes in bytes, with commas between them. Raises as `given`."""
    return tuple(given(option, parse_size, size.strip()) for size in text.split(","))


def epilog(*paragraphs: str) -> str:
    """The end of a command's help: what can be typed, one command a paragraph, and what else is to be said of them."""
    return "\n\n".join(["[bold]Examples[/]", *paragraphs])


optional = partial(typer.Option, show_default=False)
"""An option whose help says by itself what it is where it is left out."""

Ranks = Annotated[
    int | None, typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="Number of ranks.", show_default="2")
]
Hosts = Annotated[str | None, typer.Option(metavar="A:4,B:4", help="Machines to start on; this one if left out.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Number of timings, whose median is reported.")]
Seconds = Annotated[float, typer.Option(callback=finite, min=0.0001, metavar="S", help="Approximate length of a timing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement, as it comes.")]


DEVICE_HELP = "Cards for the ranks of each host: auto (one each, then CPUs), cuda (in turn), cpu."


def check_device(device: str, *, hosts: str | None) -> None:
    """
    Raises:
        InputError: there is no such choice; or ranks of this machine are to have cards, of which it has none.
    """
    if device not in DEVICE_REQUESTS:
        raise InputError(f"--device {device!r}: choose one of: {', '.join(DEVICE_REQUESTS)}")
    if device == "cuda" and hosts is None:
        import torch

        choose_device(device, local_rank=0, num_cards=torch.cuda.device_count())


def ask_for_device(device: str, *, hosts: str | None) -> None:
    """Tell the ranks that are started from here, whose `tatami.tile` follows it.

    Raises:
        InputError: as `check_device`.
    """
    check_device(device, hosts=hosts)
    os.environ[DEVICE_VARIABLE] = device


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
