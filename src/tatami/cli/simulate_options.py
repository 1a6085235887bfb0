"""What the commands of `tatami simulate` share: sweeps and platforms."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from tatami.cli.options import optional
from tatami.errors import InputError

if TYPE_CHECKING:
    from tatami.sim.platforms import AbstractPlatform

Value = TypeVar("Value")

PlatformFile = Annotated[
    Path | None, optional("--platform", metavar="FILE", help="A cluster.toml, groups with backbones, or SimGrid's XML.")
]
Cores = Annotated[int | None, typer.Option(min=1, help="Number of runs at a time.", show_default="all cores")]
SweepOption = Annotated[str | None, optional("--sweep", metavar="NAME=A,B,...", help="Simulate for each value of one option.")]


@dataclass(frozen=True, kw_only=True)
class Sweep:
    """An option's name, and the values to simulate; one value None where nothing is swept."""

    name: str
    values: tuple[str | None, ...]

    def read(self, parse: Callable[[str], Value], value: str) -> Value:
        """One of the values, parsed. Raises InputError with the words that were given."""
        try:
            return parse(value)
        except ValueError as error:
            raise InputError(f"--sweep {self.name}={value}: {error}") from None


def parse_sweep(text: str | None, *, known: Collection[str]) -> Sweep:
    """The sweep "mtbf=30d,1y,3y".

    Raises:
        InputError: it has another form, or names an option that cannot be swept: the message lists those that can.
    """
    if text is None:
        return Sweep(name="", values=(None,))
    name, equals, values = text.partition("=")
    listed = tuple(value.strip() for value in values.split(","))
    if name not in known:
        raise InputError(f"--sweep: there is no {name!r} to be swept; there are: {', '.join(sorted(known))}")
    if not equals or not all(listed):
        raise InputError(f"--sweep is NAME=A,B,..., as mtbf=30d,1y,3y; not {text!r}")
    return Sweep(name=name, values=listed)


def chosen_platform(preset: str | None, file: Path | None, *, nodes: int | None, latency_s: float | None) -> AbstractPlatform:
    """The platform of `--preset` or of `--platform`.

    Raises:
        InputError: neither was given, or both, or the preset is unknown.
        ClusterError: the file describes none.
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
