"""The floor: tiles that cover samples x units exactly once, in straight replicas."""

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


@dataclass(frozen=True, kw_only=True)
class Tile:
    """`samples` x `units` of one processor, in replica `replica` (counted from the left, from 0)."""

    processor: str
    replica: int
    samples: Span
    units: Span

    @property
    def area(self) -> int:
        """Samples times units: the work, up to a factor."""
        return self.samples.size * self.units.size


@dataclass(frozen=True, kw_only=True)
class OwnedUnits:
    """Units that no cut separates, with their one owner in every replica (left to right)."""

    units: Span
    owners: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Tiling:
    """Tiles in straight replicas that cover `samples` x `units` exactly once; checked when it is made.

    Tiles are kept replica by replica from the left, and from the top inside a replica.
    """

    samples: int
    units: int
    tiles: tuple[Tile, ...]

    def __post_init__(self) -> None:
        ordered = tuple(sorted(self.tiles, key=lambda tile: (tile.replica, tile.units.start, tile.units.stop)))
        object.__setattr__(self, "tiles", ordered)
        _check(self)

    @cached_property
    def replicas(self) -> tuple[tuple[Tile, ...], ...]:
        """The tiles of each replica, top to bottom."""
        replicas: list[list[Tile]] = [[] for _ in range(1 + max(tile.replica for tile in self.tiles))]
        for tile in self.tiles:
            replicas[tile.replica].append(tile)
        return tuple(map(tuple, replicas))

    @cached_property
    def owned_units(self) -> tuple[OwnedUnits, ...]:
        """The unit axis cut at the union of all replicas' cuts: every unit has one owner per replica, and no funnel."""
        cuts = sorted({0, self.units, *(tile.units.stop for tile in self.tiles)})
        position = [0] * len(self.replicas)
        result = []
        for start, stop in pairwise(cuts):
            for index, replica in enumerate(self.replicas):
                while replica[position[index]].units.stop <= start:
                    position[index] += 1
            owners = tuple(replica[at].processor for replica, at in zip(self.replicas, position, strict=True))
            result.append(OwnedUnits(units=Span(start, stop), owners=owners))
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
                "replica": tile.replica,
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
                    replica=int(tile["replica" if "replica" in tile else "column"]),
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
    numbers = sorted({tile.replica for tile in tiling.tiles})
    if numbers != list(range(len(numbers))):
        raise PlanError(f"replicas must be numbered from 0 without a gap, not {numbers}")
    for index, replica in enumerate(tiling.replicas):
        if len({tile.samples for tile in replica}) != 1:
            raise PlanError(f"the tiles of replica {index} have different samples: {[tile.samples for tile in replica]}")
        _check_axis([tile.units for tile in replica], tiling.units, f"the units of replica {index}")
    _check_axis([replica[0].samples for replica in tiling.replicas], tiling.samples, "the samples of the replicas")


def _check_axis(parts: Iterable[Span], total: int, what: str) -> None:
    position = 0
    listed = list(parts)
    for part in listed:
        if part.start != position or part.stop < part.start:
            raise PlanError(f"{what} must cover 0..{total} exactly once, in order: {[(p.start, p.stop) for p in listed]}")
        position = part.stop
    if position != total:
        raise PlanError(f"{what} end at {position}, not at {total}: {[(p.start, p.stop) for p in listed]}")
