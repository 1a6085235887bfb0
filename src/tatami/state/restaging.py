"""Where a rank of a model goes: its place in another layout, with or without pipeline stages, and how it takes that place.

The model stays as it is until the weights have come (`tatami.state.transfer`).
"""

from __future__ import annotations

import torch

from tatami.errors import PlanError
from tatami.model.model import TiledModel
from tatami.model.seated_model import Seat
from tatami.runtime.placement import Placement
from tatami.state.transfer import Fetched, Holding, NetworkTensors
from tatami.tiling import Layout, StagedLayout


class Relocation:
    """A rank's way from one layout to another. Collective, as are `holding` of the network's tensors and `fetch`.

    Args:
        model: whose communicator has the ranks of the new layout, and whose cluster their processors.
        layout: to lie like from then on; the same on all ranks.
        network: the tensors of the model.

    Attributes:
        mine: what this rank has, and is to have.

    Raises:
        PlanError: on all ranks, and nothing is changed: the layout does not fit the ranks or the network.
        ModelError: on all ranks: the network cannot be cut so.
    """

    def __init__(self, model: TiledModel, layout: Layout | StagedLayout, network: NetworkTensors) -> None:
        self._model, self._network = model, network
        self._place: Seat | Placement
        if isinstance(layout, StagedLayout) or model.stage is not None:
            seat = self._place = _seat(model, layout, network)
            has = None if seat.stage is None else seat.stage.has
            self.mine: Holding = network.holding(seat.found, seat.placement, has=has)
        else:
            placement = self._place = model._place(layout, stage=None, workload=model.workload, found=model.found)
            self.mine = network.holding(model.found, placement, has=None)

    @property
    def changes_stages(self) -> bool:
        """Whether tensors may become stand-ins, and the other way round; then `leave` comes before they are fetched."""
        return isinstance(self._place, Seat)

    def leave(self) -> None:
        """Have no gradient engine watch the parameters, some of which are to become stand-ins or tensors."""
        self._model._gradients.leave()

    def stay(self) -> None:
        """The weights did not come: go on as before."""
        self._model._gradients.enter()

    def arrive(self, fetched: Fetched) -> None:
        """Take the place, with what was fetched. Sends nothing in an elastic run; else it is collective."""
        model = self._model
        if isinstance(self._place, Placement):
            model._adopt(self._place)
            with torch.no_grad():
                self._network.put_in_place(fetched)
            return
        model._leave()
        # Undo what runs in place of the modules' own forward passes.
        for module, plain in model._plain_forwards.items():
            if plain is None:
                vars(module).pop("forward", None)
            else:
                vars(module)["forward"] = plain
        with torch.no_grad():
            self._network.put_in_place(fetched)
        model._past_engine = model._gradients
        model._enter(self._place, model.module, cuts=False)


def _seat(model: TiledModel, layout: Layout | StagedLayout, network: NetworkTensors) -> Seat:
    found = model.found if model.staged is None else model.staged.found
    stage, own = None, layout
    if isinstance(layout, StagedLayout):
        assert model.staged is not None
        stage = model.staged.stage(
            model.comm, layout, cluster=model.cluster, generator=model.generator, phases=model.phases, plan=None
        )
        stage.follow(model.module)
        try:
            found, own = stage.blocks_of(found), stage.own_layout
        except PlanError:  # on all ranks
            stage.close()
            raise
    assert isinstance(own, Layout)
    with network.shown(None if stage is None else stage.has):
        return model._seat(model.module, stage=stage, found=found, layout=own)
