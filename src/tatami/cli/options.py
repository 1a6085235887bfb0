"""Options that several commands share."""

from __future__ import annotations

import functools
import inspect
import math
import os
from collections.abc import Callable, Mapping
from dataclasses import MISSING, fields
from functools import partial
from pathlib import Path
from typing import Annotated, Any, TypeVar, get_origin, get_type_hints

import typer

from tatami.cluster import Cluster, parse_speeds, read_cluster
from tatami.cluster.device_choice import DEVICE_REQUESTS, choose_device
from tatami.errors import InputError
from tatami.units import parse_size

Number = TypeVar("Number", int, float)

MOST_RANKS = 4096
"""Most ranks that one command starts; use the site's own launcher for more."""


def finite(value: float | None) -> float | None:
    """Refuse NaN and infinities; it is the callback of every floating-point option.

    Raises:
        BadParameter: the value is NaN or infinite.
    """
    if value is not None and not math.isfinite(value):
        raise typer.BadParameter(f"must be a finite number, not {value}")
    return value


def given(option: str, parse: Callable[[str], Number], text: str) -> Number:
    """Parse the text of an option.

    Raises:
        InputError: the error of `parse`, with the name of the option.
    """
    try:
        return parse(text)
    except InputError as error:
        raise InputError(f"{option}: {error}") from None


def given_sizes(option: str, text: str) -> tuple[int, ...]:
    """Parse comma-separated sizes into bytes. Raises as `given` does."""
    return tuple(given(option, parse_size, size.strip()) for size in text.split(","))


def epilog(*paragraphs: str) -> str:
    """Format the end of a command's help: examples, one command per paragraph, and remarks."""
    return "\n\n".join(["[bold]Examples[/]", *paragraphs])


optional = partial(typer.Option, show_default=False)
"""An option whose help text states its default."""

Ranks = Annotated[
    int | None, typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="Number of ranks.", show_default="2")
]
Hosts = Annotated[str | None, typer.Option(metavar="A:4,B:4", help="Machines to start ranks on. Default: this one.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Number of timings, whose median is reported.")]
Seconds = Annotated[float, typer.Option(callback=finite, min=0.0001, metavar="S", help="Approximate length of a timing.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement, as it comes.")]


DEVICE_HELP = "Devices of the ranks of each host: auto (a GPU each, then CPUs), cuda (GPUs in turn), cpu."


def machines_of(file: Path | None, speeds: str | None) -> Cluster:
    """Return the machines of a cluster file, or of `--speeds`.

    Raises:
        InputError: neither or both were given; one of its subclasses for a file or speeds that are invalid.
    """
    if (file is None) == (speeds is None):
        both = "" if file is None else "; not both"
        raise InputError(f"which machines? Give a cluster file (`tatami probe` writes one), or --speeds 1,1,0.5,0.25{both}")
    return Cluster.from_speeds(parse_speeds(speeds)) if speeds is not None else read_cluster(file or "")


def check_different(outputs: Mapping[str, Path | None]) -> None:
    """
    Raises:
        InputError: two options name the same output file.
    """
    named: dict[str, str] = {}
    for option, path in outputs.items():
        if path is not None and (other := named.setdefault(os.path.realpath(path), option)) != option:
            raise InputError(f"{other} and {option} both name {path}: give each its own file")


def check_device(device: str, *, hosts: str | None) -> None:
    """
    Raises:
        InputError: an unknown device, or GPUs are asked for on this machine, which has none.
    """
    if device not in DEVICE_REQUESTS:
        raise InputError(f"--device {device!r}: choose one of: {', '.join(DEVICE_REQUESTS)}")
    if device == "cuda" and hosts is None:
        import torch

        choose_device(device, local_rank=0, num_cards=torch.cuda.device_count())


Settings = TypeVar("Settings")


def takes(kind: type[Settings]) -> Callable[[Callable[[Settings], None]], Callable[..., None]]:
    """Turn a function of settings into a command, with an option for each field of `kind` that is `Annotated` as one.

    typer reads the options of a command from its signature. So the command gets a signature made from the fields, and
    the parsed values are passed on as one object, from the command line to the library and to the records. Inherited fields
    come last in the help, because options of one command are more important there than shared ones.
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
