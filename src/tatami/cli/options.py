"""Options that several commands have, each said once."""

from __future__ import annotations

from functools import partial
from typing import Annotated

import typer

from tatami.cli.numbers import MOST_RANKS, finite

optional = partial(typer.Option, show_default=False)
"""An option whose help says by itself what it is where it is left out."""

Ranks = Annotated[
    int | None, typer.Option("-n", "--ranks", min=1, max=MOST_RANKS, metavar="N", help="How many.", show_default="2")
]
Hosts = Annotated[str | None, typer.Option(metavar="A:4,B:4", help="Machines to start on; this one if left out.")]
Rounds = Annotated[int, typer.Option(min=1, metavar="N", help="Timings to take the median of.")]
Seconds = Annotated[float, typer.Option(callback=finite, min=0.0001, metavar="S", help="About how long one timing takes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print a JSON line for each measurement, as it comes.")]
