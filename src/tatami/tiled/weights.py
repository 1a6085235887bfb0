"""The whole state dict of a tiled model in a safetensors file, which the plain model loads, and any other tiling."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import nn

from tatami.checkpoints.tensors import read_tensors, write_tensors_somewhere
from tatami.comm.agreement import decided_on_root
from tatami.errors import CheckpointError
from tatami.tiled.model import TiledModel
from tatami.tiled.state import check_state, load_whole_state_dict, whole_state_dict


def save_model(model: TiledModel, path: Path | str, *, force: bool = False) -> None:
    """Write the ordinary state dict of the plain model. Collective: rank 0 writes.

    What was trained is not lost where `path` cannot be had: it is written elsewhere then, and the error says where. To hear of
    it before training, call `tatami.outputs.check_output` there.

    Raises:
        OutputExistsError: on every rank, if the file exists and `force` is not given; the weights are beside it.
        CheckpointError: on every rank, if it cannot be written; the weights are in this or the temporary folder.
        OSError: on every rank, if there is no place for them there, either.
    """
    write_model(model, Path(path), force=force, strict=True)


def write_model(model: TiledModel, path: Path, *, force: bool, strict: bool) -> Path:
    """As `save_model`; returns the file. Without `strict`, one that is not `path` is no error."""
    state = whole_state_dict(model)

    def write() -> Path:
        where, problem = write_tensors_somewhere(path, state, force=force)
        if problem is not None and strict:
            raise problem
        return where

    # All ranks wait until the file is there: an error that nothing catches ends them all.
    return decided_on_root(model.comm, write)


def load_model(model: TiledModel, path: Path | str) -> None:
    """Load what `save_model` wrote, or `safetensors.torch.save_file(plain.state_dict(), path)`. Collective: rank 0 reads.

    Raises:
        CheckpointError: on every rank, before anything is changed: no such file, damaged, or of another network (says which
            tensors, which shapes and dtypes).
    """
    state: dict[str, torch.Tensor] = {}
    decided_on_root(model.comm, lambda: state.update(read_tensors(path)))
    try:
        load_whole_state_dict(model, state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_weights(model: nn.Module, path: Path | str) -> None:
    """Whether the plain `model` could load the file, before any rank is started for it.

    Raises:
        CheckpointError: as `load_model`.
    """
    state = read_tensors(path)
    try:
        check_state(model.state_dict(), state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error
