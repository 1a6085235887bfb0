"""The tensors of a block that have something for every unit, and cutting ranges of units out of them.

A unit owns the same number of consecutive elements in each of the runs that make up an axis: a hidden unit one row of a weight
(one run), a head its rows in the three parts of a packed projection (three runs). What holds for a parameter holds for its
gradient and for an optimizer's element-wise state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
from torch import nn

from tatami.tiling import Span
from tatami.workload import Block


@dataclass(frozen=True, kw_only=True)
class UnitRuns:
    """Where the units of a block lie in one whole tensor.

    Unit u is, on axis `axis`, the range from start + u * inner to start + (u + 1) * inner of every run (start, inner). The
    runs cover the axis, in the order of their starts.
    """

    axis: int
    runs: tuple[tuple[int, int], ...]

    @property
    def plain(self) -> bool:
        """Whether the axis is the units and nothing else."""
        return self.runs == ((0, 1),)

    @property
    def per_unit(self) -> int:
        """Positions on the axis that belong to one unit."""
        return sum(inner for _, inner in self.runs)

    def here(self, units: int) -> tuple[tuple[int, int], ...]:
        """The runs of a tensor that holds `units` units: the same, closed up."""
        starts = accumulate((inner * units for _, inner in self.runs), initial=0)
        return tuple((start, inner) for start, (_, inner) in zip(starts, self.runs, strict=False))


ONE_EACH = UnitRuns(axis=0, runs=((0, 1),))
"""Every position on the first axis is a unit."""


def cut_units(whole: torch.Tensor, runs: UnitRuns, span: Span) -> torch.Tensor:
    """The units `span` of a whole tensor, closed up: what a rank that has these units holds."""
    parts = [whole.narrow(runs.axis, start + span.start * inner, span.size * inner) for start, inner in runs.runs]
    return parts[0] if len(parts) == 1 else torch.cat(parts, runs.axis)


@dataclass(frozen=True, slots=True)
class Rows:
    """A tensor that holds some units of a block, and where on it they lie."""

    tensor: torch.Tensor
    runs: UnitRuns

    @property
    def per_unit(self) -> int:
        """Elements that belong to one unit."""
        shape = self.tensor.shape
        return self.runs.per_unit * math.prod(shape[: self.runs.axis]) * math.prod(shape[self.runs.axis + 1 :])

    @property
    def units(self) -> int:
        """How many units are here."""
        return self.tensor.shape[self.runs.axis] // self.runs.per_unit

    def cut(self, span: Span) -> tuple[torch.Tensor, ...]:
        """The views of the units `span`, counted from the first unit of this tensor: one for each run."""
        if self.runs.plain:
            return (self.tensor.narrow(self.runs.axis, span.start, span.size),)
        return tuple(
            self.tensor.narrow(self.runs.axis, start + span.start * inner, span.size * inner)
            for start, inner in self.runs.here(self.units)
        )


def flat_rows(tensor: torch.Tensor) -> Rows:
    """A tensor as a row of elements, each a unit."""
    return Rows(tensor.view(-1), ONE_EACH)


def pack(buffer: torch.Tensor, parts: Iterable[tuple[Rows, Span]]) -> int:
    """Copy the parts into the flat `buffer`, one after the other; returns how many elements were filled."""
    position = 0
    for rows, span in parts:
        for view in rows.cut(span):
            buffer[position : position + view.numel()].view(view.shape).copy_(view)
            position += view.numel()
    return position


def blocks(buffer: torch.Tensor, parts: Iterable[tuple[Rows, Span]]) -> Iterator[tuple[Rows, Span, tuple[torch.Tensor, ...]]]:
    """The inverse view of `pack`: for each part, the pieces of the flat `buffer` that hold it, shaped like `Rows.cut`'s."""
    position = 0
    for rows, span in parts:
        pieces = []
        for view in rows.cut(span):
            pieces.append(buffer[position : position + view.numel()].view(view.shape))
            position += view.numel()
        yield rows, span, tuple(pieces)


def slot_of(root: nn.Module, name: str) -> tuple[dict[str, Any], str]:
    """The parameters, or buffers, of the module that holds a tensor, and its name there."""
    path, _, leaf = name.rpartition(".")
    owner = root.get_submodule(path)
    return (owner._parameters if leaf in owner._parameters else owner._buffers), leaf


def tensor_of(root: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its qualified name."""
    tensors, leaf = slot_of(root, name)
    tensor: torch.Tensor | None = tensors[leaf]
    assert tensor is not None
    return tensor


def cut_units_of(root: nn.Module, cuts: Mapping[str, UnitRuns], span: Span) -> None:
    """Leave of some tensors of `root` the units of `span`. One that has several names keeps them."""
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # with the whole tensor, whose id no other one may get meanwhile
    for name, runs in cuts.items():
        tensors, leaf = slot_of(root, name)
        whole = tensors[leaf]
        if any(whole is cut for _, cut in made.values()):
            continue  # a module that is there under several names
        if id(whole) not in made:
            cut = cut_units(whole.detach(), runs, span).clone(memory_format=torch.contiguous_format)
            made[id(whole)] = whole, nn.Parameter(cut, whole.requires_grad) if isinstance(whole, nn.Parameter) else cut
        tensors[leaf] = made[id(whole)][1]


@dataclass(frozen=True, kw_only=True)
class TiledBlock:
    """A block of a network, or one unit of it whose tensors are its own.

    Attributes:
        facts: what planners know of it.
        cuts: by the names of the network's tensors: where its units lie in them.
        only: the unit that it is, where each has tensors of its own (an expert): then there is one of these for each unit, in
            their order, with the same facts, and `cuts` are those of a single unit. None where it is all units.
    """

    facts: Block
    cuts: Mapping[str, UnitRuns]
    only: int | None = None

    @property
    def begins(self) -> bool:
        """Whether it stands for its facts: all units, or the first of them."""
        return not self.only
