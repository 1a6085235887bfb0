"""The state of a training run in shards: each rank writes a part of what it holds, and any tiling puts them together again.

A piece is one tensor (or some units of it) with what an optimizer keeps for it. Every replica has every unit, so that the
pieces of a unit can be written by the rank of any replica; they are shared out so that all ranks write about as much. Where the
optimizer is sharded, each rank writes its shard: a range of the elements of every weight, and the state of it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from tatami.checkpoints.state_codec import State
from tatami.errors import CheckpointError, InputError, warn
from tatami.model.model import TiledModel
from tatami.model.whole_state import check_state, sliced_tensors, whole_tensors
from tatami.runtime.row_messages import counted_from, elementwise, units_of
from tatami.runtime.rows import Rows, UnitRuns, cut_units
from tatami.runtime.sharded_sums import ShardedSums
from tatami.runtime.weight_average import REFUSED, WeightAverage
from tatami.same_steps import optimizers_of
from tatami.stages.stand_in import StandIn
from tatami.state.moving import move
from tatami.tiling import Layout, Span, StagedLayout

_Places = range | torch.Tensor
"""Where elements are in a whole tensor, in ascending order: int64 of shape (elements,), or a range."""
_VALUE = "value"
"""The key of a tensor itself, beside those of the optimizer's state for it."""
_AVERAGE = "average "
"""Before the number of a moving average, the key of its value for a tensor."""


@dataclass(frozen=True, kw_only=True)
class _Piece:
    """Some units of a tensor, or all of it.

    Attributes:
        units: which; None: it is whole on every rank.
        writer: the rank that writes it.
    """

    name: str
    units: Span | None
    writer: int


def shard_of(model: TiledModel, optimizer: torch.optim.Optimizer, averages: Sequence[WeightAverage]) -> State:
    """What this rank writes of the weights, buffers, optimizer state and averages of weights. Not collective."""
    tensors = _tensors(model)
    sliced = sliced_tensors(model)
    pieces: list[dict[str, Any]] = []
    for piece in _pieces(model):
        tensor = tensors[piece.name]
        averaged = {f"{_AVERAGE}{number}": each.value_of(tensor) for number, each in enumerate(averages)}
        known = {key: value for key, value in averaged.items() if value is not None}
        if (sharding := _sharding(model, tensor)) is not None:
            if model.stage is not None and not model.stage.counts(piece.name):  # the first stage that has it writes it
                continue
            start, stop = sharding.range_of(tensor)
            flat = {key: value.view(-1)[start:stop] for key, value in {_VALUE: tensor.detach(), **known}.items()}
            parts = {**flat, **_state(model, optimizer, tensor)}
            if start < stop:
                pieces.append({"name": piece.name, "elements": [start, stop], "tensors": parts})
            continue
        if piece.writer != model.stage_comm.rank:
            continue
        parts = {_VALUE: tensor, **known, **elementwise(optimizer, tensor)}
        span = where = None
        if piece.units is not None:
            block, runs = sliced[piece.name]
            span, where = [piece.units.start, piece.units.stop], [runs.axis, [list(run) for run in runs.runs]]
            here = counted_from(units_of(model.tilings[block], model.name), piece.units)
            parts = {key: _cut(Rows(part, runs), here) for key, part in parts.items()}
        kept = {key: part.detach() for key, part in parts.items()}
        pieces.append({"name": piece.name, "units": span, "runs": where, "tensors": kept})
    return {"pieces": pieces}


def common_state(model: TiledModel, optimizer: torch.optim.Optimizer, averages: Sequence[WeightAverage]) -> State:
    """What all ranks have in common: shapes, the optimizer's settings and counters, draws, and the layout with its ranks.

    Collective where ranks have the counters of different weights: those of their pipeline stage, or of their shard.

    Raises:
        InputError: an average is in place of the weights.
    """
    for average in averages:
        average.check_not_applied("saving a checkpoint")
    names = _names(model)
    counters = {
        names[id(parameter)]: {key: value for key, value in state.items() if key not in _state(model, optimizer, parameter)}
        for parameter, state in optimizer.state.items()
        if id(parameter) in names and _is_updated_here(model, parameter)
    }
    if model.stage is not None or model.sharding is not None:
        for each in model.comm.allgather_object(counters):
            counters = {**each, **counters}
    shapes = {name: [list(each.shape), str(each.dtype).removeprefix("torch.")] for name, each in _whole(model).items()}
    return {
        "tensors": shapes,
        "optimizer": {**_settings_of(optimizer, names), "counters": counters},
        "averages": [_settings_of(each, names) for each in averages],
        **draws_state(model),
        "names": list(model.names),
        "layout": model.whole_layout.to_dict(),
        "modules": _numbers_of(model),
    }


def _numbers_of(model: TiledModel) -> dict[str, dict[str, float]]:
    """The fractions in modules, such as the `p` of a dropout, by the names of the modules; sizes may be those of a tile."""
    return {
        name: {key: value for key, value in vars(module).items() if type(value) is float and not key.startswith("_")}
        for name, module in model.module.named_modules()
    }


def _settings_of(optimizer: torch.optim.Optimizer, names: Mapping[int, str]) -> dict[str, Any]:
    """Its kind, and the weights and settings of its groups."""
    groups = []
    for group in optimizer.param_groups:
        own = [names[id(parameter)] for parameter in group["params"] if id(parameter) in names]  # and not mirrors of others
        groups.append({"names": own, "settings": {key: value for key, value in group.items() if key != "params"}})
    return {"kind": type(optimizer).__name__, "groups": groups}


def refuse_rows(model: TiledModel, named: Mapping[str, Any]) -> None:
    """Refuse what would give this rank's part of what an optimizer keeps for the weights to other ranks.

    Args:
        named: objects with a state, and states.

    Raises:
        InputError: one is an optimizer of the weights, or has the state of one; names it.
    """
    own = {id(each) for each in model.parameters()}
    kept = [
        each for optimizer in optimizers_of(model.parameters()) for state in optimizer.state.values() for each in state.values()
    ]
    own |= {id(each) for each in kept if isinstance(each, torch.Tensor)}
    for name, thing in named.items():
        for leaf in pytree.tree_leaves(thing):
            held = [leaf]
            if isinstance(leaf, torch.optim.Optimizer):
                held = [each for group in leaf.param_groups for each in group["params"]]
            if any(isinstance(each, torch.Tensor) and id(each) in own for each in held):
                raise InputError(REFUSED.format(what=name))


def draws_state(model: TiledModel) -> State:
    """What the next random numbers of the model depend on; the same on all ranks."""
    return {"generator": model.generator.get_state(), "draws": model.draws.state_dict() if model.draws is not None else None}


def restore_draws(model: TiledModel, common: State) -> None:
    """Restore what `draws_state` returned."""
    model.generator.set_state(common["generator"])
    if model.draws is not None and common["draws"] is not None:
        model.draws.load_state_dict(common["draws"])


def restore_layout(model: TiledModel, optimizer: torch.optim.Optimizer, common: State) -> None:
    """Move to the layout of a checkpoint if the ranks are those that wrote it; others keep the plan that was made for them."""
    if common["layout"] is None:  # an earlier version did not save stages
        return
    layout = _layout(common["layout"])
    if isinstance(layout, StagedLayout):
        can_be = model.staged is not None and not model.shards_optimizer
    else:
        can_be = not model.shards_optimizer or (model.stage is None and layout.deepest == 1)
    if can_be and tuple(common["names"]) == model.names and layout != model.whole_layout:
        move(model, layout, optimizer=optimizer)


def _layout(saved: Mapping[str, Any] | Sequence[Any]) -> Layout | StagedLayout:
    """The layout of a checkpoint; older ones list widths, processors and heights."""
    if isinstance(saved, Mapping) and "stages" in saved:
        return StagedLayout.from_dict(saved)
    if isinstance(saved, Mapping):
        return Layout.from_dict(saved)
    return Layout.from_dict(
        {"replicas": [dict(zip(("width", "processors", "heights"), replica, strict=True)) for replica in saved]}
    )


class Assembly:
    """Shards put together for the tiling of a model. The model and its optimizer are changed by `commit` alone.

    Args:
        averages: of its parameters; each gets the state of the one that was made as the same number of those that were saved.
        common: `common_state` of the run that wrote the shards.

    Raises:
        CheckpointError: the state is of another network or another optimizer.
    """

    def __init__(
        self, model: TiledModel, optimizer: torch.optim.Optimizer, averages: Sequence[WeightAverage], *, common: State
    ) -> None:
        self._model, self._optimizer, self._averages, self._common = model, optimizer, averages, common
        self._tensors = _tensors(model)
        self._sliced = sliced_tensors(model)
        saved = {
            name: torch.empty(shape, dtype=getattr(torch, dtype), device="meta")
            for name, (shape, dtype) in common["tensors"].items()
        }
        self._whole = _whole(model)
        check_state(self._whole, saved)
        if model.sharding is not None:
            model.sharding.shard([each for each in model.own_parameters() if each.requires_grad])
        saved_ones = [common["optimizer"], *common.get("averages", ())]  # an earlier version did not save averages
        self._groups = [
            (group, settings)
            for each, one in zip((optimizer, *averages), saved_ones, strict=False)
            for group, settings in _matching_groups(each, one, names=_names(model))
        ]
        self._num_saved = len(saved_ones) - 1
        self._found: dict[str, dict[str, torch.Tensor]] = {}
        self._missing = {name: tensor.numel() for name, tensor in self._tensors.items()}

    def take(self, shard: State) -> None:
        """Copy out of a shard what this rank needs of it."""
        for piece in shard["pieces"]:
            name, tensors = piece["name"], piece["tensors"]
            mine = self._tensors.get(name)
            if mine is None:  # of another stage
                continue
            found = self._found.setdefault(name, {})
            sharding = _sharding(self._model, mine)
            if "elements" in piece or sharding is not None:
                come = self._take_elements(found, piece, mine, sharding)
                # What was whole on each rank comes from every stage that had it.
                is_whole = piece.get("units") is None and "elements" not in piece
                self._missing[name] = 0 if is_whole else self._missing[name] - come
                continue
            for key, part in tensors.items():
                if key not in found:
                    found[key] = torch.empty_like(mine, dtype=part.dtype, requires_grad=False)
            own = self._sliced.get(name)
            if piece["units"] is None:  # it was whole on each rank
                for key, part in tensors.items():
                    found[key].copy_(part if own is None else cut_units(part, own[1], self._units_here(own[0])))
                self._missing[name] = 0
                continue
            runs = _runs(piece) if own is None else own[1]  # it is whole on each rank now, or not
            here = Span(0, Rows(mine, runs).units) if own is None else self._units_here(own[0])
            there = Span(*piece["units"])
            both = here & there
            for key, part in tensors.items():
                source, target = Rows(part, runs), Rows(found[key], runs)
                for view, given in zip(
                    target.cut(counted_from(here, both)), source.cut(counted_from(there, both)), strict=True
                ):
                    view.copy_(given)
            self._missing[name] -= both.size * Rows(mine, runs).per_unit

    def _take_elements(
        self, found: dict[str, torch.Tensor], piece: Mapping[str, Any], mine: torch.Tensor, sharding: ShardedSums | None
    ) -> int:
        """As `take`, of a shard of a tensor or for one; returns how many of its elements came."""
        shape, own = self._whole[piece["name"]].shape, self._sliced.get(piece["name"])
        size, come = math.prod(shape), 0
        comes: _Places = range(*piece.get("elements", (0, size)))
        if piece.get("units") is not None:
            comes = _places(shape, _runs(piece), Span(*piece["units"]))
        here: _Places = range(size) if own is None else _places(shape, own[1], self._units_here(own[0]))
        for key, part in piece["tensors"].items():
            goes, room = here, mine.shape
            if sharding is not None and key != _VALUE and not key.startswith(_AVERAGE):
                goes, room = range(*sharding.range_of(mine)), sharding.part(mine, mine).shape
            if key not in found:
                found[key] = torch.empty(room, dtype=part.dtype, device=mine.device)
            copied = _copy(found[key].view(-1), goes, part.reshape(-1).to(mine.device), comes)
            come = copied if key == _VALUE else come
        return come

    def _units_here(self, block: int) -> Span:
        return units_of(self._model.tilings[block], self._model.name)

    def check(self) -> None:
        """
        Raises:
            CheckpointError: the shards do not cover every tensor exactly once.
        """
        wrong = [name for name, missing in self._missing.items() if missing]
        if wrong:
            raise CheckpointError(f"the shards of this checkpoint do not make up {', '.join(wrong)}")

    def commit(self) -> None:
        """Give the model, the optimizer and the averages what was taken."""
        optimizer, counters = self._optimizer, self._common["optimizer"]["counters"]
        with torch.no_grad():
            for name, found in self._found.items():
                tensor = self._tensors[name]
                tensor.copy_(found.pop(_VALUE))
                averaged = {key: found.pop(key) for key in tuple(found) if key.startswith(_AVERAGE)}
                if isinstance(tensor, nn.Parameter):
                    for number, average in enumerate(self._averages):
                        average.restore(tensor, averaged.get(f"{_AVERAGE}{number}"))
                    optimizer.state.pop(tensor, None)
                    was = getattr(torch, self._common["tensors"][name][1])
                    own = {key: part.to(tensor.dtype) if part.dtype == was else part for key, part in found.items()}
                    kept = {**counters.get(name, {}), **own}
                    if kept:
                        optimizer.state[tensor] = kept
        for group, settings in self._groups:
            group.update(settings)
        num_here = len(self._averages)
        if self._num_saved != num_here and self._model.comm.rank == 0:
            what = "begins with the weights of the next average.step()"
            if self._num_saved > num_here:
                what = "is dropped: make averages before load_training, or before Trainer.fit or in on_fit_start"
            warn(
                f"the checkpoint has {self._num_saved} moving averages (WeightAverage) of the weights, and the run has "
                f"{num_here}; one without a counterpart {what}"
            )
        was = self._common.get("modules", {})  # an earlier version did not save them
        changed = [
            f"{name or 'the network'}.{key} is {value} (was {was[name][key]})"
            for name, own in _numbers_of(self._model).items()
            for key, value in own.items()
            if value != was.get(name, {}).get(key, value)
        ]
        if changed and self._model.comm.rank == 0:
            warn(f"the network has other numbers than that of the checkpoint, and goes on with them: {', '.join(changed)}")


def _places(shape: Sequence[int], runs: UnitRuns, units: Span) -> torch.Tensor:
    """Where the elements of some units are in the whole tensor, in ascending order."""
    return cut_units(torch.arange(math.prod(shape), dtype=torch.int64, device="cpu").view(*shape), runs, units).reshape(-1)


def _copy(target: torch.Tensor, goes: _Places, source: torch.Tensor, comes: _Places) -> int:
    """Copy the elements whose places in a whole tensor both have; returns how many."""
    if isinstance(goes, range) and isinstance(comes, range):
        both = range(max(goes.start, comes.start), min(goes.stop, comes.stop))
        if len(both):
            target[both.start - goes.start :][: len(both)] = source[both.start - comes.start :][: len(both)]
        return len(both)
    wanted, given = (
        torch.arange(each.start, each.stop, dtype=torch.int64, device="cpu") if isinstance(each, range) else each
        for each in (goes, comes)
    )
    if not len(given):
        return 0
    index = torch.searchsorted(given, wanted).clamp_(max=len(given) - 1)
    has = given[index] == wanted
    target[has.to(target.device)] = source[index[has].to(source.device)]
    return int(has.sum())


def _sharding(model: TiledModel, tensor: torch.Tensor) -> ShardedSums | None:
    """What knows the shard of a weight that is here; None where this rank has the optimizer's state of all of it."""
    return model.sharding if model.sharding is not None and model.sharding.knows(tensor) else None


def _is_updated_here(model: TiledModel, parameter: torch.Tensor) -> bool:
    """Not where it is on other stages, or wholly in shards of others: some optimizers have a counter there, which stays 0."""
    if (sharding := _sharding(model, parameter)) is not None:
        start, stop = sharding.range_of(parameter)
        return start < stop
    return not isinstance(parameter, StandIn)


def _state(model: TiledModel, optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer keeps here for every element of a weight, or of this rank's shard of it; the latter is flat."""
    whole = elementwise(optimizer, tensor)
    if (sharding := _sharding(model, tensor)) is None:
        return whole
    own = {key: value for key, value in optimizer.state.get(tensor, {}).items() if isinstance(value, torch.Tensor)}
    shape = sharding.part(tensor, tensor).shape
    parts = {key: value for key, value in own.items() if value.shape == shape and shape}
    return {
        key: value.reshape(-1) for key, value in {**parts, **{k: sharding.part(tensor, v) for k, v in whole.items()}}.items()
    }


def _runs(piece: Mapping[str, Any]) -> UnitRuns:
    """
    Raises:
        CheckpointError: the checkpoint does not say where the units lie.
    """
    if piece.get("runs") is None:
        raise CheckpointError(
            f"{piece['name']} was saved in parts by an earlier version, and is whole on each rank now. Resume it without "
            "pipeline stages, and save it again"
        )
    axis, runs = piece["runs"]
    return UnitRuns(axis=axis, runs=tuple((start, inner) for start, inner in runs))


def _pieces(model: TiledModel) -> list[_Piece]:
    """All pieces, the same on every rank."""
    sliced = sliced_tensors(model)
    everyone = range(model.stage_comm.size)
    rank_of = {name: rank for rank, name in enumerate(model.stage_names)}
    names: list[tuple[str, Span | None]] = []
    sizes: list[tuple[int, list[int]]] = []
    own = _tensors(model)
    for name, whole in _whole(model).items():
        if name not in own:
            continue
        if name not in sliced:
            names.append((name, None))
            sizes.append((whole.numel(), list(everyone)))
            continue
        tiling = model.tilings[sliced[name][0]]
        for group in tiling.owned_units:
            names.append((name, group.units))
            owners = [rank_of[owner] for owner in group.owners]
            sizes.append((whole.numel() * group.units.size // max(tiling.units, 1), owners))
    writers = share_out(sizes)
    return [_Piece(name=name, units=units, writer=writer) for (name, units), writer in zip(names, writers, strict=True)]


def _tensors(model: TiledModel) -> dict[str, torch.Tensor]:
    """The parameters and kept buffers of this rank, each under its first name."""
    return {name: tensor for name, tensor in _all_tensors(model).items() if not isinstance(tensor, StandIn)}


def _all_tensors(model: TiledModel) -> dict[str, torch.Tensor]:
    """The same with stand-ins for those of other stages."""
    tensors: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, value in model.module.state_dict(keep_vars=True).items():
        if isinstance(value, torch.Tensor) and id(value) not in seen:
            seen.add(id(value))
            tensors[name] = value
    return tensors


def _names(model: TiledModel) -> dict[int, str]:
    return {id(tensor): name for name, tensor in _all_tensors(model).items()}


def _whole(model: TiledModel) -> dict[str, torch.Tensor]:
    whole = whole_tensors(model)
    return {name: whole[name] for name in _all_tensors(model)}


def _cut(rows: Rows, span: Span) -> torch.Tensor:
    """Some units of a tensor, closed up."""
    parts = rows.cut(span)
    return parts[0] if len(parts) == 1 else torch.cat(parts, rows.runs.axis)


def _matching_groups(
    optimizer: torch.optim.Optimizer, saved: State, *, names: Mapping[int, str]
) -> list[tuple[dict[str, Any], dict[str, Any]]]:
    """Each group of parameters with its settings.

    Raises:
        CheckpointError: the saved optimizer is another one, or has other groups.
    """
    if saved["kind"] != type(optimizer).__name__:
        raise CheckpointError(f"this state is of {saved['kind']}, and the optimizer is {type(optimizer).__name__}")
    own = [group["names"] for group in _settings_of(optimizer, names)["groups"]]
    theirs = [group["names"] for group in saved["groups"]]
    if own != theirs:
        raise CheckpointError(
            f"the {type(optimizer).__name__} has {len(own)} groups of {[len(each) for each in own]} parameters, and this state "
            f"is of {len(theirs)} of {[len(each) for each in theirs]}, or in another order"
        )
    return [(group, one["settings"]) for group, one in zip(optimizer.param_groups, saved["groups"], strict=True)]


def share_out(pieces: Sequence[tuple[int, Sequence[int]]]) -> list[int]:
    """For each piece the rank that writes it: of those that have it, the one with least to write so far.

    Args:
        pieces: of each, its size, and the ranks that have it.
    """
    load: dict[int, int] = {}
    writers = [0] * len(pieces)
    # The largest first, or a late one would make one rank's load twice the others'.
    for index in sorted(range(len(pieces)), key=lambda index: (-pieces[index][0], index)):
        size, owners = pieces[index]
        writer = min(owners, key=lambda rank: (load.get(rank, 0), rank))
        load[writer] = load.get(writer, 0) + size
        writers[index] = writer
    return writers
