"""Checkpoints of loops written by hand, in the Trainer's own store: any number of ranks goes on, in any layout.

resumed = tatami.load_training("checkpoints", model, optimizer, objects={"schedule": schedule})
for step in range(resumed.step if resumed else 0, 1000):
    ...
    if step % 100 == 99:
        tatami.save_training("checkpoints", model, optimizer, step=step + 1, objects={"schedule": schedule})
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from tatami.checkpoints.multi_node_checkpoint import MultiNodeCheckpoint, Resumed
from tatami.checkpoints.state_codec import State
from tatami.comm.agreement import called_by_all
from tatami.errors import CheckpointError, InputError
from tatami.model.model import TiledModel
from tatami.random_state import random_state, set_random_state
from tatami.runtime.optimizers import check_optimizer, check_parameters
from tatami.runtime.weight_average import WeightAverage, averages_of
from tatami.state.repairing import Stateful
from tatami.state.training_state import Assembly, common_state, refuse_rows, restore_draws, restore_layout, shard_of
from tatami.train.retiling import refuse_elastic

_Trained = list[tuple[TiledModel, torch.optim.Optimizer, list[WeightAverage]]]

_stores: weakref.WeakKeyDictionary[TiledModel, dict[Path, MultiNodeCheckpoint]] = weakref.WeakKeyDictionary()
"""By model and folder: a store remembers what was there when the run was resumed."""


@called_by_all("save_training")
def save_training(
    folder: Path | str,
    model: TiledModel | Sequence[TiledModel],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    step: int,
    objects: Mapping[str, Stateful | torch.Generator] | None = None,
    values: State = None,
    keep: int = 2,
    copies: int = 0,
) -> Path:
    """Save all of training as the checkpoint of `step`; returns its folder. Collective; between two steps.

    Every rank writes a part of what it holds. Random states (torch, NumPy, Python, and what dropout draws from) are saved, too.

    Args:
        folder: for all checkpoints of the run; shared between ranks or each rank's own.
        model: from `tatami.tile`; several, as those of a GAN, with an optimizer for each.
        optimizer: of the model's parameters.
        step: steps so far.
        objects: what else has a state: schedules, a `GradScaler`, a `ResumableLoader`, a `torch.Generator`.
        values: what `load_training` returns as `Resumed.state`, such as the epoch: numbers, strings, tensors, and lists and
            dicts of them; those of rank 0.
        keep: how many checkpoints are kept.
        copies: on how many other ranks' disks each part is kept beside its own, where disks are not shared.

    Raises:
        CheckpointError: on all ranks: it cannot be written, or something in it cannot be kept (says where).
        InputError: an optimizer of other parameters, or one of the model's among `objects`; an elastic run; on all ranks: a
            folder with later checkpoints of another run.
    """
    pairs = _pairs(model, optimizer, objects or {})
    first = pairs[0][0].comm.rank == 0
    own = {"random": random_state(), "objects": {name: _state_of(each) for name, each in (objects or {}).items()}}
    common = {"pairs": [common_state(*pair) for pair in pairs], "values": values}
    state = {"common": common if first else None, "shards": [shard_of(*pair) for pair in pairs], "own": own}
    store = _store(folder, pairs[0][0])
    store.retain(copies=copies, keep=keep)
    return store.save(step, state)


@called_by_all("load_training")
def load_training(
    folder: Path | str,
    model: TiledModel | Sequence[TiledModel],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    *,
    objects: Mapping[str, Stateful | torch.Generator] | None = None,
) -> Resumed | None:
    """Go on from the newest whole checkpoint of `save_training`; None where there is none. Collective; before `Retiling`.

    On the ranks that saved it, the model takes the layout of that time, and the run goes on to the bit. On any other ranks it
    keeps the layout that it was given, and the run goes on up to floating-point order; ranks that were not there take the
    random state of rank 0.

    Args:
        folder, model, optimizer, objects: as `save_training` was given; the same names and the same order.

    Returns:
        `step` and `ranks` of the checkpoint, and as `state` the `values` that were saved with it.

    Raises:
        CheckpointError: on all ranks: it is damaged, or of another network, optimizer or other objects; says which.
        InputError: an optimizer of other parameters.
    """
    named = objects or {}
    pairs = _pairs(model, optimizer, named)

    def assemble(states: Iterator[State]) -> tuple[list[Assembly], Mapping[str, Any], Mapping[str, Any]]:
        assemblies: list[Assembly] = []
        common, own = None, None
        for rank, state in enumerate(states):
            if common is None:
                common, own = state["common"], state["own"]
                _check(common, own, pairs, named)
                for pair, each in zip(pairs, common["pairs"], strict=True):
                    restore_layout(*pair[:2], each)
                assemblies = [Assembly(*pair, common=each) for pair, each in zip(pairs, common["pairs"], strict=True)]
            if rank == pairs[0][0].comm.rank:
                own = state["own"]
            for assembly, shard in zip(assemblies, state["shards"], strict=True):
                assembly.take(shard)
        for assembly in assemblies:
            assembly.check()
        assert common is not None
        assert own is not None
        return assemblies, common, own

    found = _store(folder, pairs[0][0]).resume(assemble=assemble)
    if found is None:
        return None
    assemblies, common, own = found.state
    for assembly in assemblies:
        assembly.commit()
    for (each_model, *_), each in zip(pairs, common["pairs"], strict=True):
        restore_draws(each_model, each)
    for name, thing in named.items():
        if isinstance(thing, torch.Generator):
            thing.set_state(own["objects"][name])
        else:
            thing.load_state_dict(own["objects"][name])
    set_random_state(own["random"])
    return Resumed(step=found.step, state=common["values"], ranks=found.ranks, skipped=found.skipped)


def _pairs(
    model: TiledModel | Sequence[TiledModel],
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
    objects: Mapping[str, Any],
) -> _Trained:
    """Each model with its optimizer, and the averages that are not given as such.

    Raises:
        InputError: not tiled models, another number of optimizers, optimizers of other parameters, or some among `objects`.
    """
    models = [model] if isinstance(model, torch.nn.Module) else list(model)
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    if len(models) != len(optimizers) or not models:
        raise InputError(f"there are {len(models)} models and {len(optimizers)} optimizers: give one optimizer for each model")
    for each, one in zip(models, optimizers, strict=True):
        if not isinstance(each, TiledModel):
            raise InputError(
                f"a {type(each).__name__} is not a tiled model: give what tatami.tile returned, or use "
                "tatami.MultiNodeCheckpoint"
            )
        check_optimizer(one)
        check_parameters(one, each)
        refuse_rows(each, {f"objects={{{name!r}: ...}}": thing for name, thing in objects.items()})
    averages = [[one for one in averages_of(each.parameters()) if one not in optimizers] for each in models]
    return list(zip(models, optimizers, averages, strict=True))


def _store(folder: Path | str, model: TiledModel) -> MultiNodeCheckpoint:
    refuse_elastic(model.comm, "save_training")
    stores, path = _stores.setdefault(model, {}), Path(folder)
    if path not in stores:
        stores[path] = MultiNodeCheckpoint(path, model.comm)
    return stores[path]


def _state_of(thing: Stateful | torch.Generator) -> State:
    return thing.get_state() if isinstance(thing, torch.Generator) else thing.state_dict()


def _check(common: Mapping[str, Any] | None, own: Mapping[str, Any], pairs: _Trained, objects: Mapping[str, Any]) -> None:
    if not isinstance(common, Mapping) or "pairs" not in common:
        raise CheckpointError("save_training did not write it; a Trainer's is resumed by fit(resume=...)")
    if len(common["pairs"]) != len(pairs):
        raise CheckpointError(f"it has {len(common['pairs'])} models, and {len(pairs)} are to be loaded")
    if own["objects"].keys() != objects.keys():
        raise CheckpointError(
            f"it has the objects {sorted(own['objects'])}, and load_training was given {sorted(objects)}: give the same names"
        )
