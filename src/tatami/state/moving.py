"""Carry a re-tiling out: the rows of weights and of optimizer state move to where they now belong."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch

from tatami.comm.agreement import all_or_none, same_everywhere
from tatami.errors import ModelError, PlanError
from tatami.model.model import TiledModel
from tatami.runtime.row_messages import Moved
from tatami.state.restaging import Relocation
from tatami.state.transfer import NetworkTensors
from tatami.tiling import Layout, StagedLayout


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
            `tatami.tile` was given a sample for, with the default planner and neither `stages=1` nor a layout without stages.
        optimizer: whose state goes along, as do those of all others that have stepped parameters of the model; None where
            there is none.
        companions: more tensors, each shaped like a parameter or buffer, that go where its rows go; the same on all ranks.

    Raises:
        PlanError: the layout names processors that no rank runs on, or differs between ranks.
        ModelError: on all ranks: other stages, of a model that cannot be divided so.
    """
    if not isinstance(layout, Layout | StagedLayout):
        raise PlanError(
            f"tatami.train.move takes a tatami.tiling.Layout, such as that of tatami.plan(...).best, or a StagedLayout, not "
            f"{layout!r}"
        )
    same_everywhere(model.comm, {"layout": layout}, where="a re-tiling", error=PlanError)
    if isinstance(layout, StagedLayout) or model.stage is not None:
        look = functools.partial(_refuse_stages, model, layout, companions)
        all_or_none(model.comm, look, what="the re-tiling cannot be done:", error=ModelError)
    network = NetworkTensors(model, optimizer, companions=companions)
    relocation = Relocation(model, layout, network)
    if relocation.changes_stages:
        relocation.leave()
    try:
        with torch.no_grad():
            fetched = network.fetch(relocation.mine)
        # A rank for which something did not come does not come here either, so that all ranks change their layout or none does.
        # What follows moves nothing and cannot fail.
        model.comm.barrier()
    except BaseException:
        if relocation.changes_stages:
            relocation.stay()
        raise
    relocation.arrive(fetched)
    return fetched.moved


def _refuse_stages(
    model: TiledModel, layout: Layout | StagedLayout, companions: Mapping[torch.Tensor, torch.Tensor] | None
) -> None:
    """
    Raises:
        ModelError: this model cannot be moved to, from or between pipeline stages.
    """
    if isinstance(layout, StagedLayout) and model.staged is None:
        raise ModelError(
            "this model does not know the pieces that stages share out: give tatami.tile a sample and the default planner, "
            "and neither stages=1 nor a layout without stages; or a layout with stages"
        )
    if model.shards_optimizer:
        raise ModelError("a model with sharded_optimizer=True cannot be moved to, from or between pipeline stages yet")
    if companions:
        raise ModelError("tensors other than the weights (companions) cannot be moved to, from or between pipeline stages yet")
    if model._gradients.in_parts:
        raise ModelError("re-tile between two steps, not inside of the loop over model.micro_batches(...)")
    for name, module in model.module.named_modules():
        if vars(module).get("forward") is not model._own_forwards.get(module):
            raise ModelError(
                f"the forward of {name or 'the network'} was replaced after tatami.tile, which would be lost with the stages. "
                "Replace it before the network is tiled"
            )
