"""A tiled model among other ranks than before: rows from those who hold them, and the rest of the state for newcomers.

Who takes what from whom is data (`tatami.membership.copies`). Nothing that is held is changed before all ranks have all that
they need, so that a death on the way leaves every survivor as it was: `relay` collects, and what it returns puts in place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.membership import Regroup, Take
from tatami.same_steps import optimizers_of
from tatami.tiled.carrying import carry, counted_from, elementwise, put, room_for, units_of
from tatami.tiled.mirroring import MirrorRows
from tatami.tiled.model import TiledModel
from tatami.tiled.placement import place
from tatami.tiled.rows import Rows
from tatami.tiled.tiled_block import TiledBlock
from tatami.tiling import Span, Tiling

_TAG = 15

Bundle = list[Rows]


def relay(
    model: TiledModel,
    change: Regroup,
    *,
    name: str,
    cluster: Cluster,
    optimizer: torch.optim.Optimizer,
    mirror: MirrorRows,
    before: Regroup | None,
) -> Callable[[], None]:
    """Collect what this rank holds after `change`. Collective among its members; between two steps.

    Args:
        model: whose communicator has the members of the change as its ranks already.
        change: who is there, how the work is laid out, and who takes what from whom.
        name: of this rank.
        cluster: the members' processors, in the order of the ranks.
        optimizer: whose state goes along.
        mirror: what this rank keeps for another.
        before: the change by which this rank holds what it holds; None where it holds what `tile` gave it, or nothing.

    Returns:
        What puts all in place; it sends nothing.
    """
    others = [type(each).__name__ for each in optimizers_of(model.parameters()) if each is not optimizer]
    if others:
        raise InputError(
            f"{', '.join(others)} steps the weights beside the Trainer's optimizer, and its state does not follow ranks that "
            "come and go. Use one optimizer in an elastic run"
        )
    optimizer.zero_grad(set_to_none=True)
    for _, kept in mirror.tensors:
        kept.grad = None
    names = change.members
    is_new = name in change.newcomers
    placement = place(change.layout, model.comm, cluster=cluster, workload=model.workload, blocks=model.found.blocks)
    _agree_on_states(model, optimizer, mirror, change, is_new=is_new)
    own_tiles = () if is_new else model.tilings
    kept_for = None if before is None or is_new else _kept_for(before, name)
    keeps_for = _kept_for(change, name)
    tilings = placement.tilings[: len(model.found.blocks)]
    with torch.no_grad():
        held = {
            (index, kind): (
                _bundle(block, optimizer),
                units_of(own_tiles[index], name) if not kind and own_tiles else _units_kept(own_tiles, index, kept_for, kind),
            )
            for kind, blocks in ((False, model.block_rows()), (True, mirror.blocks))
            for index, block in enumerate(blocks)
        }
        laid = {
            (index, kind): ([Rows(room_for(rows, units=span.size), rows.runs) for rows in held[index, kind][0]], span)
            for index, tiling in enumerate(tilings)
            for kind, span in (
                (False, units_of(tiling, name)),
                (True, Span(0, 0) if keeps_for is None else units_of(tiling, keeps_for)),
            )
        }
        _exchange(model, _of_tensors(change.takes, model.found.blocks), held, laid, name=name, names=names)

    def put_in_place() -> None:
        model._regroup(cluster=cluster)
        model._adopt(placement)
        with torch.no_grad():
            for key, (bundle, _) in laid.items():
                for rows, replacement in zip(held[key][0], bundle, strict=True):
                    put(rows.tensor, replacement.tensor)
        if keeps_for is None:
            mirror.detach()
        else:
            mirror.attach()

    return put_in_place


def tell_newcomers(comm: AbstractCommunicator, change: Regroup, what: Callable[[], Any]) -> Any:
    """What the source of `change` makes, on newcomers; None on all others, which do not wait for it. Collective."""
    source, mine = change.members.index(change.source), change.members[comm.rank]
    if comm.rank == source and change.newcomers:
        value = what()
        for name in change.newcomers:
            comm.send_object(value, change.members.index(name), tag=_TAG)
    return comm.recv_object(source, tag=_TAG) if mine in change.newcomers else None


def common_state(model: TiledModel, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """What all ranks have in common beside the states of the optimizer: for newcomers, who then `load_common_state`."""
    tiled = {id(rows.tensor) for block in model.block_rows() for rows in block}
    tensors = {
        name: tensor.detach().clone()
        for name, tensor in [*model.module.named_parameters(), *model.module.named_buffers()]
        if id(tensor) not in tiled
    }
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    return {
        "tensors": tensors,
        "groups": groups,
        "generator": model.generator.get_state(),
        "draws": None if model.draws is None else model.draws.state_dict(),
        "training": model.training,
    }


def load_common_state(model: TiledModel, optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """On a newcomer."""
    own = dict([*model.module.named_parameters(), *model.module.named_buffers()])
    with torch.no_grad():
        for name, tensor in state["tensors"].items():
            own[name].copy_(tensor)
    for group, told in zip(optimizer.param_groups, state["groups"], strict=True):
        group.update(told)
    model.generator.set_state(state["generator"])
    if model.draws is not None:
        model.draws.load_state_dict(state["draws"])
    model.train(state["training"])


# -- the optimizer's states ---------------------------------------------------------------------------------------------------


def _agree_on_states(
    model: TiledModel, optimizer: torch.optim.Optimizer, mirror: MirrorRows, change: Regroup, *, is_new: bool
) -> None:
    """Have the same kinds of state for every parameter on all ranks; those that are whole everywhere go to newcomers."""
    parameters = list(model.parameters())
    tiled = {id(rows.tensor) for block in model.block_rows() for rows in block}
    mine = [] if is_new else [_kinds_of(p, optimizer.state.get(p, {}), rows=id(p) in tiled) for p in parameters]
    mirrors = {id(own): kept for own, kept in mirror.tensors}
    told: list[list[dict[str, Any]]] = model.comm.allgather_object(mine)
    whole: list[Any] | None = tell_newcomers(
        model.comm, change, lambda: [dict(optimizer.state.get(p, {})) if id(p) not in tiled else None for p in parameters]
    )
    for index, parameter in enumerate(parameters):
        if id(parameter) in tiled:
            kinds: dict[str, Any] = {}
            for each in told:
                kinds |= each[index] if each else {}
            for holder in (parameter, mirrors[id(parameter)]):
                if kinds or holder in optimizer.state:
                    _fill_state(optimizer, holder, kinds)
        elif is_new and whole is not None and whole[index]:
            optimizer.state[parameter] = {
                key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in whole[index].items()
            }


def _kinds_of(parameter: nn.Parameter, state: Mapping[str, Any], *, rows: bool) -> dict[str, Any]:
    """Of each entry of a tiled parameter's state its dtype, where it has a value for each element, and otherwise the entry."""
    if not rows:
        return {}
    return {
        key: value.dtype if isinstance(value, torch.Tensor) and value.shape == parameter.shape else value
        for key, value in state.items()
    }


def _fill_state(optimizer: torch.optim.Optimizer, parameter: torch.Tensor, kinds: Mapping[str, Any]) -> None:
    state = optimizer.state[parameter]
    for key, kind in kinds.items():
        if isinstance(kind, torch.dtype):
            if key not in state or state[key].shape != parameter.shape:
                state[key] = torch.zeros_like(parameter, dtype=kind).detach()
        elif isinstance(kind, torch.Tensor):
            state[key] = kind.clone()
        else:
            state[key] = kind


# -- rows --------------------------------------------------------------------------------------------------------------------


def _bundle(block: Sequence[Rows], optimizer: torch.optim.Optimizer) -> Bundle:
    """A block's tensors, and the optimizer's element-wise state of each, in the same order on every rank."""
    return [
        Rows(tensor, rows.runs) for rows in block for tensor in (rows.tensor, *elementwise(optimizer, rows.tensor).values())
    ]


def _of_tensors(takes: Sequence[Take], blocks: Sequence[TiledBlock]) -> list[Take]:
    """What is taken of each block of tensors: of blocks of the workload, some of which have tensors for each of their units."""
    found = []
    number = -1
    for index, block in enumerate(blocks):
        number += block.begins
        for take in takes:
            if take.block == number and block.only is None:
                found.append(replace(take, block=index))
            elif take.block == number and take.units.start <= (block.only or 0) < take.units.stop:
                found.append(replace(take, block=index, units=Span(0, 1)))
    return found


def _exchange(
    model: TiledModel,
    takes: Sequence[Take],
    held: Mapping[tuple[int, bool], tuple[Bundle, Span]],
    laid: Mapping[tuple[int, bool], tuple[Bundle, Span]],
    *,
    name: str,
    names: Sequence[str],
) -> None:
    """Fill `laid` from `held`, here and on others; one message for each pair of ranks and direction."""
    incoming: dict[int, list[torch.Tensor]] = {}
    outgoing: dict[int, list[torch.Tensor]] = {}
    for take in takes:
        targets = _views(laid[take.block, take.to_mirror], take.units) if take.dest == name else []
        sources = _views(held[take.block, take.from_mirror], take.units) if take.source == name else []
        if take.dest == take.source == name:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source)
        elif take.dest == name:
            incoming.setdefault(names.index(take.source), []).extend(targets)
        elif take.source == name:
            outgoing.setdefault(names.index(take.dest), []).extend(sources)
    carry(model.comm, incoming=incoming, outgoing=outgoing, tag=_TAG)


def _views(where: tuple[Bundle, Span], units: Span) -> list[torch.Tensor]:
    bundle, origin = where
    return [view for rows in bundle for view in rows.cut(counted_from(origin, units))]


def _kept_for(change: Regroup, name: str) -> str | None:
    return next((mirror.owner for mirror in change.mirrors if mirror.keeper == name), None)


def _units_kept(tilings: Sequence[Tiling], index: int, kept_for: str | None, kind: bool) -> Span:
    return units_of(tilings[index], kept_for) if kind and tilings and kept_for is not None else Span(0, 0)
