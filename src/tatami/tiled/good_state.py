"""The last parameters with which the loss was finite: a step with a bad gradient cannot be undone."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tatami.outputs import free_name
from tatami.tiled.model import TiledModel
from tatami.tiled.weights import write_model


class GoodState:
    """A copy of the state of a model, kept from update to update.

    Args:
        model: whose state.
        folder: where it is saved when it is needed.
    """

    def __init__(self, model: TiledModel, *, folder: Path) -> None:
        self._model = model
        self._folder = folder
        self._kept: dict[str, torch.Tensor] = {}
        self._tilings = model.tilings
        self._iteration = 0

    def keep(self, iteration: int) -> None:
        """The parameters are good after `iteration`."""
        state = self._state()
        self._iteration = iteration
        if self._kept and self._tilings is self._model.tilings:
            torch._foreach_copy_(list(self._kept.values()), list(state.values()))
        else:
            self._kept = {name: tensor.clone() for name, tensor in state.items()}
            self._tilings = self._model.tilings

    def companions(self) -> dict[nn.Parameter, torch.Tensor]:
        """What moves along with the parameters in a re-tiling."""
        return {parameter: self._kept[name] for name, parameter in self._model.module.named_parameters() if name in self._kept}

    def moved(self) -> None:
        """The re-tiling is done, and the companions moved along."""
        self._tilings = self._model.tilings

    def rescue(self) -> str:
        """Put the parameters back and save them; returns where they are, for an error. Collective."""
        if not self._kept or self._tilings is not self._model.tilings:
            return "there was no good state yet to save"
        with torch.no_grad():
            torch._foreach_copy_(list(self._state().values()), list(self._kept.values()))
        path = free_name(self._folder / f"last-good-{self._iteration:06d}.safetensors")
        path = write_model(self._model, path, force=False, strict=False)
        return f"the last good state, after iteration {self._iteration}, is in {path} and in the model"

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self._model.module.state_dict().items()}
