"""How reports write shares and speeds, and what a tiling's tiles are called in them."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import replace

from tatami.errors import PlanError
from tatami.tiling import Tile, Tiling, spans

ALIKE = 0.05
"""Speeds that differ by less of the fastest are shown as equal: no measurement is finer."""


def percent(fraction: float) -> str:
    """ "33.3 %"; three digits, so that a share of a thousandth is still one."""
    return f"{100 * fraction:.3g} %"


def wrapped(text: str, *, width: int, indent: str = "") -> str:
    """`text` in lines of at most `width` characters, later ones after `indent`; no number is parted from its unit."""
    glued = re.sub(r"(?<=\d) (?=[A-Za-z%])", "\u00a0", text)
    return textwrap.fill(glued, width, subsequent_indent=indent).replace("\u00a0", " ")


def share(tile: Tile, *, tiling: Tiling) -> float:
    """The fraction of the whole work that lies in `tile`."""
    return tile.area / (tiling.samples * tiling.units)


def in_order(tiling: Tiling, names: Iterable[str]) -> Tiling:
    """The same shares, with replicas and their tiles in the order of `names`; planners begin with the slowest."""
    ranks = {name: rank for rank, name in enumerate(names)}
    replicas = [sorted(each, key=lambda tile: ranks[tile.processor]) for each in tiling.replicas]
    replicas.sort(key=lambda replica: ranks[replica[0].processor])
    widths = spans([replica[0].samples.size for replica in replicas])
    tiles = (
        replace(tile, replica=index, samples=width, units=units)
        for index, (replica, width) in enumerate(zip(replicas, widths, strict=True))
        for tile, units in zip(replica, spans([each.units.size for each in replica]), strict=True)
    )
    return replace(tiling, tiles=tuple(tiles))


def working(tiling: Tiling) -> tuple[Tile, ...]:
    """The tiles in which something lies."""
    return tuple(tile for tile in tiling.tiles if tile.area)


def idle(tiling: Tiling, *, speeds: Mapping[str, float]) -> tuple[str, ...]:
    """Who has a speed but no work."""
    busy = {tile.processor for tile in working(tiling)}
    return tuple(name for name in speeds if name not in busy)


def check_speeds(tiling: Tiling, *, speeds: Mapping[str, float]) -> None:
    """Whether every tile's processor has a speed.

    Raises:
        PlanError: some have none; names them.
    """
    missing = [tile.processor for tile in tiling.tiles if tile.processor not in speeds]
    if missing:
        raise PlanError(f"speeds are missing for {', '.join(missing)}: give one for each processor of the tiling, by its name")
