"""The whole state dict of a tiled model in a safetensors file, which the plain model loads, and any other tiling."""

from __future__ import annotations

from pathlib import Path

from torch import nn

from tatami.checkpoints.tensors import read_tensors, write_tensors
from tatami.errors import CheckpointError, OutputExistsError
from tatami.tiled.model import TiledModel
from tatami.tiled.state import load_whole_state_dict, mismatch, whole_state_dict


def save_model(model: TiledModel, path: Path | str, *, force: bool = False) -> None:
    """Write the ordinary state dict of the plain model. Collective: rank 0 writes.

    Raises:
        OutputExistsError: on every rank, if the file exists and `force` is not given.
    """
    path = Path(path)
    exists = model.comm.bcast_object(path.exists() if model.comm.rank == 0 else None)
    if exists and not force:
        raise OutputExistsError(f"{path} exists already; choose another name, or overwrite it with force (--force)")
    state = whole_state_dict(model)
    if model.comm.rank == 0:
        write_tensors(path, state, force=True)
    model.comm.barrier()


def load_model(model: TiledModel, path: Path | str) -> None:
    """Load what `save_model` wrote, or `safetensors.torch.save_file(plain.state_dict(), path)`. Collective: rank 0 reads.

    Raises:
        CheckpointError: on every rank, before anything is changed: no such file, damaged, or of another network (says which
            tensors, which shapes).
    """
    state, problem = None, None
    if model.comm.rank == 0:
        try:
            state = read_tensors(path)
        except CheckpointError as error:
            problem = str(error)
    problem = model.comm.bcast_object(problem)
    if problem is not None:
        raise CheckpointError(problem)
    try:
        load_whole_state_dict(model, state)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from error


def check_weights(model: nn.Module, path: Path | str) -> None:
    """Whether the plain `model` could load the file, before any rank is started for it.

    Raises:
        CheckpointError: as `load_model`.
    """
    shapes = {name: value.shape for name, value in model.state_dict().items()}
    problem = mismatch(shapes, read_tensors(path))
    if problem is not None:
        raise CheckpointError(f"{path}: {problem}")
