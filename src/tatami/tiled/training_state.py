"""The state of a training run in shards: each rank writes a part of what it holds, and any tiling puts them together again.

A piece is one tensor (or some units of it) with what an optimizer keeps for it. Every column has every unit, so that the pieces
of a unit can be written by the rank of any column; they are shared out so that all ranks write about as much.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tatami.checkpoints.sharing import share_out
from tatami.checkpoints.state_codec import State
from tatami.errors import CheckpointError
from tatami.tiled.carrying import counted_from, elementwise, units_of
from tatami.tiled.model import TiledModel
from tatami.tiled.rows import Rows
from tatami.tiled.state import check_state, sliced_tensors, whole_tensors
from tatami.tiling import Span

_VALUE = "value"
"""The key of a tensor itself, beside those of the optimizer's state for it."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some units of a tensor, or all of it.

    Attributes:
        name: of the tensor.
        units: which; None: it is whole on every rank.
        writer: the rank that writes it.
    """

    name: str
    units: Span | None
    writer: int


def shard_of(model: TiledModel, optimizer: torch.optim.Optimizer) -> State:
    """What this rank writes of the weights, buffers and optimizer state. Not collective."""
    tensors = _tensors(model)
    sliced = sliced_tensors(model)
    pieces = []
    for piece in _pieces(model):
        if piece.writer != model.comm.rank:
            continue
        tensor = tensors[piece.name]
        parts = {_VALUE: tensor, **elementwise(optimizer, tensor)}
        span = None
        if piece.units is not None:
            block, runs = sliced[piece.name]
            span = [piece.units.start, piece.units.stop]
            here = counted_from(units_of(model.tilings[block], model.name), piece.units)
            parts = {key: _cut(Rows(part, runs), here) for key, part in parts.items()}
        pieces.append({"name": piece.name, "units": span, "tensors": {key: part.detach() for key, part in parts.items()}})
    return {"pieces": pieces}


def common_state(model: TiledModel, optimizer: torch.optim.Optimizer) -> State:
    """What all ranks have alike beside the pieces: the shapes, the settings of the optimizer, and its counters."""
    names = {id(tensor): name for name, tensor in _tensors(model).items()}
    groups = []
    for group in optimizer.param_groups:
        settings = {key: value for key, value in group.items() if key != "params"}
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]  # and not mirrors of others
        groups.append({"names": own, "settings": settings})
    counters = {
        names[id(parameter)]: {key: value for key, value in state.items() if key not in elementwise(optimizer, parameter)}
        for parameter, state in optimizer.state.items()
        if id(parameter) in names
    }
    shapes = {name: [list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in _whole(model).items()}
    return {"tensors": shapes, "optimizer": {"kind": type(optimizer).__name__, "groups": groups, "counters": counters}}


class Assembly:
    """Shards put together for the tiling of a model. The model and its optimizer are changed by `commit` alone.

    Args:
        model: tiled, in any way.
        optimizer: of its parameters.
        common: `common_state` of the run that wrote the shards.

    Raises:
        CheckpointError: the state is of another network or another optimizer.
    """

    def __init__(self, model: TiledModel, optimizer: torch.optim.Optimizer, *, common: State) -> None:
        self._model, self._optimizer, self._common = model, optimizer, common
        self._tensors = _tensors(model)
        self._sliced = sliced_tensors(model)
        saved = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (shape, dtype) in common["tensors"].items()
        }
        check_state(_whole(model), saved)
        self._groups = _matching_groups(optimizer, common["optimizer"], names={id(t): n for n, t in self._tensors.items()})
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._missing = {name: tensor.numel() for name, tensor in self._tensors.items()}

    def take(self, shard: State) -> None:
        """Copy out of a shard what this rank needs of it."""
        for piece in shard["pieces"]:
            name, tensors = piece["name"], piece["tensors"]
            mine = self._tensors[name]
            found = self._found.setdefault(name, {})
            for key, part in tensors.items():
                if key not in found:
                    found[key] = torch.empty_like(mine, dtype=part.dtype, requires_grad=False)
            if piece["units"] is None:
                for key, part in tensors.items():
                    found[key].copy_(part)
                self._missing[name] = 0
                continue
            block, runs = self._sliced[name]
            here, there = units_of(self._model.tilings[block], self._model.name), Span(*piece["units"])
            both = here & there
            for key, part in tensors.items():
                source, target = Rows(part, runs), Rows(found[key], runs)
                for view, given in zip(
                    target.cut(counted_from(here, both)), source.cut(counted_from(there, both)), strict=True
                ):
                    view.copy_(given)
            self._missing[name] -= both.size * Rows(mine, runs).per_unit

    def check(self) -> None:
        """
        Raises:
            CheckpointError: the shards do not cover every tensor exactly once.
        """
        wrong = [name for name, missing in self._missing.items() if missing]
        if wrong:
            raise CheckpointError(f"the shards of this checkpoint do not make up {', '.join(wrong)}")

    def commit(self) -> None:
        """Give the model and the optimizer what was taken."""
        optimizer, counters = self._optimizer, self._common["optimizer"]["counters"]
        with torch.no_grad():
            for name, found in self._found.items():
                tensor = self._tensors[name]
                tensor.copy_(found.pop(_VALUE))
                if isinstance(tensor, nn.Parameter):
                    optimizer.state.pop(tensor, None)
                    kept = {**counters.get(name, {}), **found}
                    if kept:
                        optimizer.state[tensor] = kept
        for group, settings in zip(optimizer.param_groups, self._groups, strict=True):
            group.update(settings)


def _pieces(model: TiledModel) -> list[_Piece]:
    """All pieces, the same on every rank."""
    sliced = sliced_tensors(model)
    everyone = range(model.comm.size)
    rank_of = {name: rank for rank, name in enumerate(model.names)}
    names: list[tuple[str, Span | None]] = []
    sizes: list[tuple[int, list[int]]] = []
    for name, whole in _whole(model).items():
        if name not in sliced:
            names.append((name, None))
            sizes.append((whole.numel(), list(everyone)))
            continue
        tiling = model.tilings[sliced[name][0]]
        for group in tiling.groups:
            names.append((name, group.units))
            owners = [rank_of[owner] for owner in group.owners]
            sizes.append((whole.numel() * group.units.size // max(tiling.units, 1), owners))
    writers = share_out(sizes)
    return [_Piece(name=name, units=units, writer=writer) for (name, units), writer in zip(names, writers, strict=True)]


def _tensors(model: TiledModel) -> dict[str, torch.Tensor]:
    """The parameters and kept buffers of this rank, each under its first name."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _whole(model: TiledModel) -> dict[str, torch.Tensor]:
    whole = whole_tensors(model)
    return {name: whole[name] for name in _tensors(model)}


def _cut(rows: Rows, span: Span) -> torch.Tensor:
    """Some units of a tensor, closed up."""
    parts = rows.cut(span)
    return parts[0] if len(parts) == 1 else torch.cat(parts, rows.runs.axis)


def _matching_groups(optimizer: torch.optim.Optimizer, saved: State, *, names: Mapping[int, str]) -> list[dict[str, Any]]:
    """The settings of each group of parameters.

    Raises:
        CheckpointError: the saved optimizer is another one, or has other groups.
    """
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(f"this state is of {saved['kind']}, and the optimizer is {type(optimizer).__name__}")
    own = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
    theirs = [group["names"] for group in saved["groups"]]
    if own != theirs:
        raise CheckpointError(
            f"the optimizer has {len(own)} groups of {[len(each) for each in own]} parameters, and this state is of "
            f"{len(theirs)} of {[len(each) for each in theirs]}, or in another order"
        )
    return [group["settings"] for group in saved["groups"]]
