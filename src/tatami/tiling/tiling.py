"""The floor: tiles that cover samples x units exactly once, in straight columns."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import Any

from tatami.errors import PlanError
from tatami.tiling.span import Span
from tatami.tiling.tile import Tile


@dataclass(frozen=True, kw_only=True)
class Group:
    """A horizontal strip of units that no cut crosses, with its one owner in every column (left to right)."""

    units: Span
    owners: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles in straight columns that cover `samples` x `units` exactly once; checked when it is made.

    Tiles are kept column by column from the left, and from the top inside a column.
    """

    samples: int
    units: int
    tiles: tuple[Tile, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tiles, key=lambda tile: (tile.column, tile.units.start, tile.units.stop)))
        object.__setattr__(self, "tiles", ordered)
        _check(self)

    @cached_property
    def columns(self) -> tuple[tuple[Tile, ...], ...]:
        """The tiles of each column, top to bottom."""
        columns: list[list[Tile]] = [[] for _ in range(1 + max(tile.column for tile in self.tiles))]
        for tile in self.tiles:
            columns[tile.column].append(tile)
        return tuple(map(tuple, columns))

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The unit axis cut at the union of all columns' cuts: every unit has one owner per column, and no funnel."""
        cuts = sorted({0, self.units, *(tile.units.stop for tile in self.tiles)})
        position = [0] * len(self.columns)
        result = []
        for start, stop in pairwise(cuts):
            for index, column in enumerate(self.columns):
                while column[position[index]].units.stop <= start:
                    position[index] += 1
            owners = tuple(column[at].processor for column, at in zip(self.columns, position, strict=True))
            result.append(Group(units=Span(start, stop), owners=owners))
        return tuple(result)

    @cached_property
    def by_processor(self) -> dict[str, Tile]:
        """The tile of each processor; one that was left out has none."""
        return {tile.processor: tile for tile in self.tiles}

    def to_json(self) -> str:
        """One line of JSON; `from_json` reads it back."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        tiles = [
            {
                "processor": tile.processor,
                "column": tile.column,
                "samples": [tile.samples.start, tile.samples.stop],
                "units": [tile.units.start, tile.units.stop],
            }
            for tile in self.tiles
        ]
        return {"samples": self.samples, "units": self.units, "tiles": tiles}

    @classmethod
    def from_json(cls, text: str) -> Tiling:
        """Read what `to_json` wrote.

        Raises:
            PlanError: not JSON, a key is missing, or the tiles do not cover the floor exactly once.
        """
        try:
            raw = json.loads(text)
            tiles = tuple(
                Tile(
                    processor=str(tile["processor"]),
                    column=int(tile["column"]),
                    samples=Span(*map(int, tile["samples"])),
                    units=Span(*map(int, tile["units"])),
                )
                for tile in raw["tiles"]
            )
            return cls(samples=int(raw["samples"]), units=int(raw["units"]), tiles=tiles)
        except PlanError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not the JSON of a tiling: {error!r}; Tiling.to_json writes it") from error


def _check(tiling: Tiling) -> None:
    if tiling.samples < 1 or tiling.units < 1 or not tiling.tiles:
        raise PlanError(
            f"a tiling needs samples, units and tiles, not {tiling.samples} x {tiling.units} with {len(tiling.tiles)} tiles"
        )
    for name, count in Counter(tile.processor for tile in tiling.tiles).items():
        if count > 1:
            raise PlanError(f"{name} has two tiles; each processor has one")
    numbers = sorted({tile.column for tile in tiling.tiles})
    if numbers != list(range(len(numbers))):
        raise PlanError(f"columns must be numbered from 0 without a gap, not {numbers}")
    for index, column in enumerate(tiling.columns):
        if len({tile.samples for tile in column}) != 1:
            raise PlanError(f"the tiles of column {index} have different samples: {[tile.samples for tile in column]}")
        _check_axis([tile.units for tile in column], tiling.units, f"the units of column {index}")
    _check_axis([column[0].samples for column in tiling.columns], tiling.samples, "the samples of the columns")


def _check_axis(parts: Iterable[Span], total: int, what: str) -> None:
    position = 0
    listed = list(parts)
    for part in listed:
        if part.start != position or part.stop < part.start:
            raise PlanError(f"{what} must cover 0..{total} exactly once, in order: {[(p.start, p.stop) for p in listed]}")
        position = part.stop
    if position != total:
        raise PlanError(f"{what} end at {position}, not at {total}: {[(p.start, p.stop) for p in listed]}")
