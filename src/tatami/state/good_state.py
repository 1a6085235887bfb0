"""Parameters with which the loss was finite: a step with a bad gradient cannot be undone.

A loss tells of the parameters that it was computed with, and by then the next update has changed them; so what is known to be
good is a copy from before that update. Copying takes next to nothing of an update over many samples. Of one over few it would
take a good part, and there not every state is kept. Which ones are follows from what all ranks know alike, so that what they
put back fits together.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tatami.model.model import TiledModel
from tatami.model.whole_state import write_model
from tatami.outputs import free_name
from tatami.stages.stand_in import StandIn
from tatami.tiling import Tiling

FIRST = 10
"""Updates of a run before each of which the state is kept: a run that diverges mostly does so at once."""
MOST_APART = 10
"""Updates from one copy to the next, at the most."""
_COPY_FLOP = 10.0
"""About what a processor computes while it copies one byte."""
_COPY_FRACTION = 0.01
"""So much of an update may be copying."""


class GoodState:
    """A copy of the trained weights and the buffers of a model, made before an update, on all ranks before the same ones.

    Args:
        folder: where it is saved when it is needed; None: no copy is made.
    """

    def __init__(self, model: TiledModel, *, folder: Path | None) -> None:
        self._model = model
        self._folder = folder
        self._places: list[tuple[dict[str, Any], str]] = []
        self._frozen: list[tuple[dict[str, Any], str]] = []
        self._sharded: set[int] = set()
        self._kept: list[torch.Tensor] = []
        self._tilings: tuple[Tiling, ...] | None = None
        self._stage = model.stage
        self._apart = 1
        self._updates = self._iteration = 0

    def begin(self) -> None:
        """A run begins, perhaps with other parameters than the one before ended with."""
        self._updates = 0

    def keep(self, iteration: int) -> None:
        """The state is good after `iteration`, and an update follows: copy it if it is time."""
        if self._folder is None:
            return
        self._updates += 1
        is_known = bool(self._kept) and self._tilings is self._model.tilings
        is_known = is_known and not any(held[name].requires_grad for held, name in self._frozen)  # trained from now on
        if is_known and self._updates > FIRST and self._updates % self._apart:
            return
        with torch.no_grad():
            if is_known:
                torch._foreach_copy_(self._kept, self._state())
            else:
                places = _places(self._model.module)
                self._frozen = [(held, name) for held, name in places if _is_frozen(held[name])]
                self._places = [(held, name) for held, name in places if not _is_frozen(held[name])]
                sharding = self._model.sharding
                self._sharded = {
                    place
                    for place, (held, name) in enumerate(self._places)
                    if sharding is not None and sharding.knows(held[name])
                }
                self._kept = [tensor.clone() for tensor in self._state()]
                self.moved()
        self._iteration = iteration

    def companions(self) -> dict[torch.Tensor, torch.Tensor]:
        """What moves along with the parameters and buffers in a re-tiling."""
        return dict(zip(self._state(), self._kept, strict=True))

    def moved(self) -> None:
        """The re-tiling is done, and the companions moved along; not to other stages, where other weights are."""
        if self._stage is not self._model.stage:
            self._stage, self._kept, self._places, self._tilings = self._model.stage, [], [], None
            self._frozen = []
        elif self._tilings is not self._model.tilings:
            self._tilings, self._apart = self._model.tilings, _apart(self._model)

    def rescue(self) -> str:
        """Put the parameters back and save them; returns where they are, for an error. Collective."""
        if self._folder is None:
            return "no copy of the last good weights was kept (rescue_dir, rescue_copy)"
        if not self._kept or self._tilings is not self._model.tilings:
            return "there was no good state yet to save"
        with torch.no_grad():
            torch._foreach_copy_(self._state(), self._kept)
        if self._model.sharding is not None:
            self._model.sharding.gather([self._places[place][0][self._places[place][1]] for place in sorted(self._sharded)])
        path = self._write(self._iteration, folder=self._folder)
        return f"the last good state that was kept, after iteration {self._iteration}, is in {path} and in the model"

    def save(self, iteration: int) -> str:
        """Save the weights as they are after `iteration`; returns where they are, for an error. Collective."""
        if self._folder is None:
            return "the weights were not saved (rescue_dir, rescue_copy)"
        try:
            return f"the weights after iteration {iteration} are in {self._write(iteration, folder=self._folder)}"
        except OSError as error:
            return f"the weights were not saved: {error}"

    def _write(self, iteration: int, *, folder: Path) -> Path:
        path = free_name(folder / f"last-good-{iteration:06d}.safetensors")
        return write_model(self._model, path, force=False, strict=False)

    def _state(self) -> list[torch.Tensor]:
        """The tensors that the network holds now: of a buffer, a forward pass may put another one in place.

        Of weights whose optimizer is sharded, the shard that is here.
        """
        tensors, sharding = [held[name] for held, name in self._places], self._model.sharding
        for place in self._sharded:
            assert sharding is not None
            tensors[place] = sharding.part(tensors[place], tensors[place].detach())
        return tensors


def _places(network: nn.Module) -> list[tuple[dict[str, Any], str]]:
    """Where the tensors of its state dict are, each once."""
    places: dict[int, tuple[dict[str, Any], str]] = {}
    for module in network.modules():
        for held, left_out in ((module._parameters, ()), (module._buffers, module._non_persistent_buffers_set)):
            for name, tensor in held.items():
                if tensor is not None and name not in left_out and not isinstance(tensor, StandIn):
                    places.setdefault(id(tensor), (held, name))
    return list(places.values())


def _is_frozen(tensor: torch.Tensor) -> bool:
    """No update changes it, so there is nothing to put back: under LoRA that is most of the network."""
    return isinstance(tensor, nn.Parameter) and not tensor.requires_grad


def _apart(model: TiledModel) -> int:
    """Updates from one copy to the next. Where ranks come and go, or know the work of their stage alone, they count all."""
    if model.comm.changes or model.stage is not None:
        return 1
    work = model.workload
    size_bytes = (work.gradient_elements + work.replicated_parameters) * work.element_bytes
    flop = work.flop(width=1 / len(model.layout.replicas), height=1.0)
    return max(1, min(MOST_APART, math.ceil(_COPY_FLOP * size_bytes / max(_COPY_FRACTION * flop, 1.0))))
