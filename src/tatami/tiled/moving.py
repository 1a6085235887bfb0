"""Carry a re-tiling out: move the rows of weights and of optimizer state to where they now belong.

Which units go from whom to whom is data (`tatami.retiling.moves`). All that one rank sends another, of all pairs, travels in
one message. Parameters keep their identity, so the optimizer goes on as if nothing had happened.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from tatami.comm.agreement import same_everywhere
from tatami.errors import PlanError
from tatami.retiling.moves import Move, moves
from tatami.same_steps import optimizers_of
from tatami.tiled.carrying import Moved, carry, counted_from, elementwise, put, room_for, units_of
from tatami.tiled.model import TiledModel
from tatami.tiled.restaging import restage
from tatami.tiled.rows import Rows
from tatami.tiling import Layout, StagedLayout, Tiling

_TAG = 11


def move(
    model: TiledModel,
    layout: Layout | StagedLayout,
    *,
    optimizer: torch.optim.Optimizer | None,
    companions: Mapping[torch.Tensor, torch.Tensor] | None = None,
) -> Moved:
    """Give `model` another layout, and the rows of weights and optimizer state that belong to it. Collective; not in a step.

    It happens wholly or not at all: where the rows do not come, model and optimizer stay as they were.
    Gradients move as well, so that a re-tiling may fall between passes that accumulate them; drop them before where they are
    done with. A rank that gets a tile for the first time gets the optimizer's state with it.

    Args:
        model: from `tatami.tile`.
        layout: where the ranks lie from now on, in other pipeline stages too where the model knows its pieces: one that
            `tatami.tile` was given a sample for.
        optimizer: whose state goes along, as do those of all others that have stepped parameters of the model; None where
            there is none.
        companions: more tensors, each shaped like a parameter or buffer, that go where its rows go; the same on all ranks.

    Raises:
        PlanError: the layout names processors that no rank runs on, or differs between ranks.
        ModelError: on all ranks: other stages, of a model that cannot be divided so.
    """
    if not isinstance(layout, Layout | StagedLayout):
        raise PlanError(
            f"tatami.tiled.move takes a tatami.tiling.Layout, such as that of tatami.plan(...).best, or a StagedLayout, not "
            f"{layout!r}"
        )
    same_everywhere(model.comm, {"layout": layout}, where="a re-tiling", error=PlanError)
    if isinstance(layout, StagedLayout) or model.stage is not None:
        return restage(model, layout, optimizer=optimizer, companions=companions)
    placement = model._place(layout, stage=None, workload=model.workload, found=model.found)
    before, after = model.tilings, placement.tilings
    plans = [moves(old, new) for old, new in zip(before, after, strict=True)]
    optimizers = list(optimizers_of(model.parameters()))
    if optimizer is not None and optimizer not in optimizers:
        optimizers.append(optimizer)
    with torch.no_grad():
        bundles = [_bundle(rows, optimizers, companions or {}) for rows in model.block_rows()]
        kinds = {f"block {number}": [str(rows.tensor.dtype) for rows in bundle] for number, bundle in enumerate(bundles)}
        same_everywhere(model.comm, kinds, where="the tensors that a re-tiling moves", error=PlanError)
        laid = [
            [Rows(room_for(rows, units=units_of(tiling, model.name).size), rows.runs) for rows in bundle]
            for bundle, tiling in zip(bundles, after, strict=True)
        ]
        _keep(bundles, laid, before, after, model.name)
        sent_bytes = _exchange(bundles, laid, before, after, plans, model)
        # A rank whose rows did not come does not come here either, so that all ranks change their tiling or none does. What
        # follows moves nothing and cannot fail.
        model.comm.barrier()
        model._adopt(placement)
        for bundle, new in zip(bundles, laid, strict=True):
            for rows, replacement in zip(bundle, new, strict=True):
                put(rows.tensor, replacement.tensor)
    return Moved(num_units=sum(m.units.size for plan in plans for m in plan), sent_bytes=sent_bytes)


def _bundle(
    rows_of_block: Sequence[Rows], optimizers: Sequence[torch.optim.Optimizer], companions: Mapping[torch.Tensor, torch.Tensor]
) -> list[Rows]:
    """A block's tensors, and all that there is of the same shape for each, in the same order on every rank."""
    bundle = []
    for rows in rows_of_block:
        own = rows.tensor
        state = [tensor for optimizer in optimizers for tensor in elementwise(optimizer, own).values()]
        beside = [tensor for tensor in (own.grad, companions.get(own)) if tensor is not None]
        bundle += [Rows(tensor, rows.runs) for tensor in (own, *beside, *state)]
    return bundle


def _keep(
    bundles: Sequence[list[Rows]], laid: Sequence[list[Rows]], before: Sequence[Tiling], after: Sequence[Tiling], name: str
) -> None:
    """Copy what this rank, the processor `name`, holds and goes on holding."""
    for old_rows, new_rows, old, new in zip(bundles, laid, before, after, strict=True):
        had, has = units_of(old, name), units_of(new, name)
        kept = had & has
        for source, target in zip(old_rows, new_rows, strict=True):
            for view, kept_view in zip(target.cut(counted_from(has, kept)), source.cut(counted_from(had, kept)), strict=True):
                view.copy_(kept_view)


def _exchange(
    bundles: Sequence[list[Rows]],
    laid: Sequence[list[Rows]],
    before: Sequence[Tiling],
    after: Sequence[Tiling],
    plans: Sequence[Sequence[Move]],
    model: TiledModel,
) -> int:
    """Send and receive what moves; one message for each pair of ranks and direction. Returns the bytes sent."""
    rank_of = {name: rank for rank, name in enumerate(model.names)}
    incoming: dict[int, list[torch.Tensor]] = {}
    outgoing: dict[int, list[torch.Tensor]] = {}
    for index, plan in enumerate(plans):
        had, has = units_of(before[index], model.name), units_of(after[index], model.name)
        for each in plan:
            if each.dest == model.name:
                views = [view for rows in laid[index] for view in rows.cut(counted_from(has, each.units))]
                incoming.setdefault(rank_of[each.source], []).extend(views)
            if each.source == model.name:
                views = [view for rows in bundles[index] for view in rows.cut(counted_from(had, each.units))]
                outgoing.setdefault(rank_of[each.dest], []).extend(views)
    return carry(model.comm, incoming=incoming, outgoing=outgoing, tag=_TAG)
