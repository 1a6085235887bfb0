"""Options that the commands of `tatami simulate` share: sweeps and platforms."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tatami.cli.options import optional
from tatami.errors import InputError, shortened

if TYPE_CHECKING:
    from tatami.sim.platforms import AbstractPlatform

Value = TypeVar("Value")

PlatformFile = Annotated[
    Path | None, optional("--platform", metavar="FILE", help="Cluster file, or file of groups with backbones.")
]
Cores = Annotated[int | None, typer.Option(min=1, help="Number of parallel runs.", show_default="all cores")]
SweepOption = Annotated[
    list[str] | None, optional("--sweep", metavar="NAME=A,B,...", help="Simulate for each value of one option; not repeated.")
]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """An option's name, and the values to simulate; a single None if nothing is swept."""

    name: str
    values: tuple[str | None, ...]

    def read(self, parse: Callable[[str], Value], value: str) -> Value:
        """Parse one of the values. Raises InputError with the text that was given."""
        try:
            return parse(value)
        except ValueError as error:
            raise InputError(f"--sweep {self.name}={value}: {error}") from None


def parse_sweep(texts: Sequence[str] | None, *, known: Collection[str]) -> Sweep:
    """Parse a sweep such as "mtbf=30d,1y,3y".

    Raises:
        InputError: there are several, or the text has another form, or it names an option that cannot be swept; the message
            lists those that can.
    """
    if not texts:
        return Sweep(name="", values=(None,))
    if len(texts) > 1:
        raise InputError(
            f"--sweep varies one option, and was given {len(texts)} times: {shortened(', '.join(texts))}; give it once"
        )
    (text,) = texts
    name, equals, values = text.partition("=")
    listed = tuple(value.strip() for value in values.split(","))
    if name not in known:
        raise InputError(f"--sweep: {name!r} cannot be swept; choose one of: {', '.join(sorted(known))}")
    if not equals or not all(listed):
        raise InputError(f"--sweep is NAME=A,B,..., such as mtbf=30d,1y,3y; not {text!r}")
    return Sweep(name=name, values=listed)


def chosen_platform(preset: str | None, file: Path | None, *, nodes: int | None, latency_s: float | None) -> AbstractPlatform:
    """Return the platform of `--preset` or `--platform`.

    Raises:
        InputError: neither or both were given, or the preset is unknown.
        ClusterError: the file does not describe a platform.
    """
    from tatami.sim.platforms import PRESETS, read_platform
    from tatami.sim.platforms import preset as named

    if (preset is None) == (file is None):
        raise InputError(
            f"which machines? Give --platform FILE or --preset NAME (one of {', '.join(sorted(PRESETS))}), not both"
        )
    if preset is not None:
        return named(preset, nodes=nodes, latency_s=latency_s)
    assert file is not None
    return read_platform(file)
