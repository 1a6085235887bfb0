"""Who lies where, in fractions: the answer of a planner before it is cut to whole samples and units."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import accumulate, chain, compress
from typing import Any

import numpy as np
from numpy.typing import NDArray

from tatami.errors import PlanError
from tatami.tiling.span import FEW, Span, micro_batch_sizes, spans, whole_shares, whole_shares_of
from tatami.tiling.tiling import Tile, Tiling
from tatami.workload import Workload

GRAIN = 8
"""Units: 32 bytes of float32. A matrix product whose result has rows of another length takes half as long again (MKL on an AMD
EPYC: 203 inputs, 8,192 samples, 396 units against 400)."""
_LEAST_UNITS = 8 * GRAIN
"""Where a tile has fewer, a grain would spoil the balance more than it makes up for."""
_SURELY_ONE = 1.01
"""So many units are one at least when they are cut to whole ones, where units are not `FEW`."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A replica: processors that share the same samples, from top to bottom.

    Attributes:
        width: the replica's fraction of the samples.
        processors: names, from top to bottom.
        heights: each processor's fraction of the units; they sum to 1.
        micro_batches: the number of parts, as equal as possible, in which the replica computes its samples one after another,
            so that only the activations of one part are in memory. Gradients are summed across replicas once for all parts.
        recomputes: whether its ranks keep only the inputs of the network's layers, and compute the rest of their activations
            once more in the backward pass.
    """

    width: float
    processors: tuple[str, ...]
    heights: tuple[float, ...]
    micro_batches: int = 1
    recomputes: bool = False
    _sizes: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.processors) != len(self.heights) or not self.processors:
            raise PlanError(f"a replica needs one height for each processor: {self.processors} have {self.heights}")
        if self.micro_batches < 1:
            raise PlanError(f"micro_batches of replica {self.processors} must be at least 1, not {self.micro_batches}")
        height = sum(self.heights)
        if 0 <= self.width < math.inf and min(self.heights) >= 0 and math.isclose(height, 1.0, rel_tol=1e-6):
            return
        for name, share in (("width", self.width), *zip(self.processors, self.heights, strict=True)):
            if not (math.isfinite(share) and share >= 0):
                raise PlanError(f"share of {name} must be a finite number >= 0, not {share}")
        raise PlanError(f"the heights of replica {self.processors} sum to {height}, not 1")

    def as_wide_as(self, width: float) -> Replica:
        """The same processors at the same heights with another `width`, a fraction of the samples."""
        return self._with(width, self.micro_batches, self.recomputes)

    def in_micro_batches(self, number: int) -> Replica:
        """The same replica with another number of `micro_batches`."""
        return self._with(self.width, number, self.recomputes)

    def recomputing(self) -> Replica:
        """The same replica, whose ranks recompute their activations."""
        return self._with(self.width, self.micro_batches, True)

    def _with(self, width: float, micro_batches: int, recomputes: bool) -> Replica:
        replica = Replica(
            width=width, processors=self.processors, heights=self.heights, micro_batches=micro_batches, recomputes=recomputes
        )
        replica._sizes.update(self._sizes)  # they depend on the heights alone
        return replica

    def micro_batch_sizes(self, samples: int) -> tuple[int, ...]:
        """The samples of each micro-batch where the replica has `samples`: one micro-batch at least, and none without samples
        beyond the first."""
        return micro_batch_sizes(samples, number=self.micro_batches)

    @cached_property
    def cuts(self) -> tuple[float, ...]:
        """Where the replica is cut, from 0 to 1; rounded, so that cuts meant to be level are, whatever was added up first."""
        return (0.0, *(round(cut, 12) for cut in accumulate(self.heights[:-1])), 1.0)

    def unit_sizes(self, units: int) -> tuple[int, ...]:
        """How many of a block's `units` each processor has: `whole_shares`; large tiles are cut at multiples of `GRAIN`."""
        sizes = self._sizes.get(units)
        if sizes is None:
            (sizes,) = _at_grains([self], [whole_shares(self.heights, total=units)], units)
            self._sizes[units] = sizes
        return sizes

    def unit_shares(self, units: int) -> tuple[float, ...]:
        """Each processor's fraction of a block's `units` as planners price it: in whole ones where they are `FEW`."""
        if units >= FEW * len(self.processors):
            return self.heights
        return tuple(size / units for size in self.unit_sizes(units))

    def unit_spans(self, units: int) -> tuple[Span, ...]:
        """Each processor's units, from the top."""
        return spans(self.unit_sizes(units))

    @staticmethod
    def cut_together(replicas: Iterable[Replica], units: int) -> None:
        """Find `unit_sizes` of all these replicas at once: thousands one by one would take longer than all else of a plan."""
        unknown = [replica for replica in replicas if units not in replica._sizes]
        kinds = {replica.heights: replica for replica in unknown}
        if kinds:
            cut = _at_grains(list(kinds.values()), whole_shares_of(list(kinds), total=units), units)
            found = dict(zip(kinds, cut, strict=True))
            for replica in unknown:
                replica._sizes[units] = found[replica.heights]


def _at_grains(replicas: Sequence[Replica], sizes: list[tuple[int, ...]], units: int) -> list[tuple[int, ...]]:
    """`sizes` of the replicas' tiles with large tiles cut at multiples of `GRAIN`; replicas with a smaller tile stay."""
    sizes = list(sizes)
    by_depth: dict[int, list[int]] = {}
    for index, own in enumerate(sizes):
        if min(own) >= _LEAST_UNITS:
            by_depth.setdefault(len(own), []).append(index)
    for depth, places in by_depth.items():
        cuts = np.array([replicas[index].cuts for index in places])
        stops = GRAIN * np.rint(cuts * units / GRAIN).astype(np.int64)
        stops[:, depth] = units
        for index, own in zip(places, np.diff(stops, axis=1).tolist(), strict=True):
            sizes[index] = tuple(own)
    return sizes


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Replicas side by side; their widths sum to 1. The same layout is cut for any batch and any number of units."""

    replicas: tuple[Replica, ...]
    _samples: dict[int, tuple[int, ...]] = field(default_factory=dict, init=False, repr=False, compare=False)
    _units: dict[int, NDArray[np.int64]] = field(default_factory=dict, init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        width = sum(replica.width for replica in self.replicas)
        if not math.isclose(width, 1.0, rel_tol=1e-6):
            raise PlanError(f"the widths of the replicas sum to {width}, not 1")
        if len(set(self.processors)) < len(self.processors):
            name = next(name for name, count in Counter(self.processors).items() if count > 1)
            raise PlanError(f"{name} lies twice in the layout; each processor has one place")

    @cached_property
    def processors(self) -> tuple[str, ...]:
        """All names, replica by replica, from top to bottom."""
        return tuple(chain.from_iterable(replica.processors for replica in self.replicas))

    @cached_property
    def heights(self) -> NDArray[np.float64]:
        """Heights of all `processors`."""
        return self._of_all(replica.heights for replica in self.replicas)

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where each replica begins among all `processors`."""
        return np.cumsum([0, *(len(replica.processors) for replica in self.replicas[:-1])])

    @cached_property
    def deepest(self) -> int:
        """The processors of the replica that has most."""
        return max(len(replica.processors) for replica in self.replicas)

    def _of_all(self, shares: Iterable[Sequence[float]]) -> NDArray[np.float64]:
        return np.fromiter(chain.from_iterable(shares), dtype=np.float64, count=len(self.processors))

    def unit_shares(self, units: int) -> NDArray[np.float64]:
        """`Replica.unit_shares` of all `processors`."""
        if units >= FEW * self.deepest or self.deepest == 1:
            return self.heights
        counts = np.diff(self.starts, append=len(self.processors))
        few = units < FEW * counts
        Replica.cut_together(compress(self.replicas, few), units)
        whole = (replica.unit_sizes(units) if own else replica.heights for replica, own in zip(self.replicas, few, strict=True))
        shares = self._of_all(whole)
        return np.where(np.repeat(few, counts), shares / units, shares)

    def unit_sizes(self, units: int) -> NDArray[np.int64]:
        """`Replica.unit_sizes` of all `processors`."""
        sizes = self._units.get(units)
        if sizes is None and self.deepest == 1:
            sizes = np.full(len(self.replicas), units)
        elif sizes is None:
            Replica.cut_together(self.replicas, units)
            own = chain.from_iterable(replica.unit_sizes(units) for replica in self.replicas)
            sizes = np.fromiter(own, dtype=np.int64, count=len(self.processors))
        self._units[units] = sizes
        return sizes

    def renamed(self, names: Mapping[str, str]) -> Layout:
        """The same with other processors in the places of those that are in `names`."""
        replicas = (
            replace(each, processors=tuple(names.get(name, name) for name in each.processors)) for each in self.replicas
        )
        return Layout(replicas=tuple(replicas))

    def in_micro_batches(self, number: int) -> Layout:
        """The same shares, every replica in this number of micro-batches."""
        if all(replica.micro_batches == number for replica in self.replicas):
            return self
        return Layout(replicas=tuple(replica.in_micro_batches(number) for replica in self.replicas))

    @cached_property
    def recomputes(self) -> tuple[str, ...]:
        """The processors that recompute their activations."""
        return tuple(chain.from_iterable(replica.processors for replica in self.replicas if replica.recomputes))

    def recomputing(self, names: Iterable[str] | None = None) -> Layout:
        """The same shares, where the replicas of these processors recompute their activations; None: all replicas."""
        chosen = set(self.processors if names is None else names)
        replicas = tuple(
            replica.recomputing() if not replica.recomputes and chosen.intersection(replica.processors) else replica
            for replica in self.replicas
        )
        return self if replicas == self.replicas else Layout(replicas=replicas)

    @property
    def keeping(self) -> Layout:
        """The same shares, where no replica recomputes."""
        return Layout(replicas=tuple(replace(replica, recomputes=False) for replica in self.replicas))

    def sample_sizes(self, samples: int) -> tuple[int, ...]:
        """How many of a batch's `samples` each replica has: `whole_shares`."""
        sizes = self._samples.get(samples)
        if sizes is None:
            (sizes,) = whole_shares_of([[replica.width for replica in self.replicas]], total=samples)
            self._samples[samples] = sizes
        return sizes

    def sample_shares(self, samples: int) -> tuple[float, ...]:
        """Each replica's fraction of a batch's `samples` as planners price it: in whole ones where they are `FEW`."""
        if samples >= FEW * len(self.replicas):
            return tuple(replica.width for replica in self.replicas)
        return tuple(size / samples for size in self.sample_sizes(samples))

    def cut(self, *, samples: int, units: int) -> Tiling:
        """Whole samples and units. A tile may come out without any; planners see to it that every processor has work."""
        tiles = []
        Replica.cut_together(self.replicas, units)
        widths = spans(self.sample_sizes(samples))
        for index, (replica, width) in enumerate(zip(self.replicas, widths, strict=True)):
            for name, height in zip(replica.processors, replica.unit_spans(units), strict=True):
                tiles.append(Tile(processor=name, replica=index, samples=width, units=height))
        return Tiling(samples=samples, units=units, tiles=tuple(tiles))

    def cut_blocks(self, workload: Workload) -> tuple[Tiling, ...]:
        """One tiling for each block of the workload: the same replicas and samples, each block's own units."""
        units = {block.units for block in workload.blocks}
        tilings = {each: self.cut(samples=workload.samples, units=each) for each in units}
        return tuple(tilings[block.units] for block in workload.blocks)

    def empty(self, workload: Workload) -> frozenset[str]:
        """The processors that would get no sample, or no unit of any block."""
        widths = self.sample_sizes(workload.samples)
        names = {name for replica, width in zip(self.replicas, widths, strict=True) if not width for name in replica.processors}
        most = max(section.units for section in workload.sections)
        doubtful = [
            replica
            for replica, width in zip(self.replicas, widths, strict=True)
            if width and (most < FEW * len(replica.processors) or min(replica.heights) * most < _SURELY_ONE)
        ]
        for section in workload.sections:
            Replica.cut_together(doubtful, section.units)
        for replica in doubtful:
            idle = set(replica.processors)
            for section in workload.sections:
                idle.difference_update(
                    name for name, size in zip(replica.processors, replica.unit_sizes(section.units), strict=True) if size
                )
            names |= idle
        return frozenset(names)

    def to_json(self) -> str:
        """One line of JSON; `from_json` reads it back, bit for bit."""
        return json.dumps(self.to_dict())

    def to_dict(self) -> dict[str, Any]:
        replicas = [
            {
                "width": replica.width,
                "processors": list(replica.processors),
                "heights": list(replica.heights),
                "micro_batches": replica.micro_batches,
                **({"recomputes": True} if replica.recomputes else {}),
            }
            for replica in self.replicas
        ]
        return {"replicas": replicas}

    @classmethod
    def from_json(cls, text: str) -> Layout:
        """Read what `to_json` wrote; replicas without a number of micro-batches have one, and do not recompute
        unless they say so; they may be called columns.

        Raises:
            PlanError: not JSON, a key is missing, or invalid shares.
        """
        try:
            return cls.from_dict(json.loads(text))
        except json.JSONDecodeError as error:
            raise PlanError(f"not the JSON of a layout: {error!r}; Layout.to_json writes it") from error

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any]) -> Layout:
        """`from_json` without the text. Raises as that."""
        try:
            return cls(
                replicas=tuple(
                    Replica(
                        width=float(replica["width"]),
                        processors=tuple(map(str, replica["processors"])),
                        heights=tuple(map(float, replica["heights"])),
                        micro_batches=int(replica.get("micro_batches", 1)),
                        recomputes=bool(replica.get("recomputes", False)),
                    )
                    for replica in raw["replicas" if "replicas" in raw else "columns"]
                )
            )
        except PlanError:
            raise
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise PlanError(f"not the JSON of a layout: {error!r}; Layout.to_json writes it") from error
