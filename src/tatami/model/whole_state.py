"""The ordinary, whole state dict of a tiled model: gathered from the ranks, cut for them again, and kept in a file."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path

import torch
from torch import nn

from tatami.checkpoints.tensors import read_tensors, write_tensors_somewhere
from tatami.comm.agreement import called_by_all, decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.errors import CheckpointError
from tatami.model.model import TiledModel
from tatami.progress import reported
from tatami.runtime.row_messages import room_for, units_of
from tatami.runtime.rows import Rows, UnitRuns, cut_units
from tatami.stages.stand_in import StandIn
from tatami.tiling import Span

_TAG = 9


@called_by_all("whole_state_dict")
def whole_state_dict(model: TiledModel, *, root: int = 0) -> dict[str, torch.Tensor]:
    """The state dict of the plain model, on `root`, in host memory; an empty one on the other ranks. Collective.

    Units come from the first replica, whose ranks hold each unit once.
    """
    return dict(gathered_weights(model, root=root))


def gathered_weights(
    model: TiledModel, *, root: int = 0, known: Mapping[str, torch.Tensor] | None = None
) -> Iterator[tuple[str, torch.Tensor]]:
    """The same, one tensor after the other. All ranks must take all of them; ranks other than `root` get none.

    A tensor of `known`, given on `root`, is itself the result where all of it is the same; then there is no copy of it.
    """
    known = known or {}
    sliced, shapes = sliced_tensors(model), whole_tensors(model)
    own, is_root = model.module.state_dict(), model.comm.rank == root
    for name, value in reported(own.items(), "gathering weights", unit="tensors", is_shown=is_root):
        holder = root if model.stage is None else model.stage.holder_of(name)
        found: torch.Tensor | None = None
        if name in sliced:
            block, runs = sliced[name]
            found = _gather(
                model, Rows(value.detach(), runs), block=block, root=root if model.stage is None else 0, known=known.get(name)
            )
        elif not isinstance(value, StandIn):
            is_known = name in known and holder in (None, root) and _same(known[name], value.detach())
            found = known[name] if is_known else value.detach().to("cpu", copy=True)
        if holder not in (None, root):
            found = _handed_to(root, found, like=shapes[name], holder=holder, comm=model.comm)
        if found is not None and is_root:
            yield name, found


def _handed_to(
    root: int, tensor: torch.Tensor | None, *, like: torch.Tensor, holder: int, comm: AbstractCommunicator
) -> torch.Tensor | None:
    """The tensor of `holder`, on `root`; what other ranks have stays theirs."""
    if comm.rank == holder:
        assert tensor is not None
        comm.send(tensor.contiguous(), root, tag=_TAG)
    elif comm.rank == root:
        tensor = torch.empty(like.shape, dtype=like.dtype, device="cpu")
        comm.recv(tensor, holder, tag=_TAG)
    return tensor


@called_by_all("load_whole_state_dict")
def load_whole_state_dict(model: TiledModel, state: Mapping[str, torch.Tensor] | None, *, root: int = 0) -> None:
    """Load the state dict of the plain model, given on `root` (None elsewhere), whatever the tiling. Collective.

    Raises:
        CheckpointError: on every rank, and before anything is changed: see `check_state`.
    """
    expected = whole_tensors(model)
    decided_on_root(model.comm, lambda: check_state(expected, state or {}), root=root)
    sliced = sliced_tensors(model)
    own = model.module.state_dict()
    with torch.no_grad():
        for name, wanted in reported(expected.items(), "loading weights", unit="tensors", is_shown=model.comm.rank == root):
            whole = torch.empty_like(wanted, device="cpu")
            if model.comm.rank == root:
                assert state is not None
                whole.copy_(state[name])
            model.comm.bcast(whole, root=root)
            if name in sliced:
                block, runs = sliced[name]
                whole = cut_units(whole, runs, units_of(model.tilings[block], model.name))
            if not isinstance(own[name], StandIn):
                own[name].copy_(whole)


def whole_tensors(model: TiledModel) -> dict[str, torch.Tensor]:
    """Shape and dtype that every tensor of the state dict has in the plain model, as tensors without memory."""
    tensors = {
        name: torch.empty(value.shape, dtype=value.dtype, device="meta") for name, value in model.module.state_dict().items()
    }
    for name, (block, runs) in sliced_tensors(model).items():
        if name in tensors:
            tensors[name] = room_for(Rows(tensors[name], runs), units=model.tilings[block].units)
    return tensors


def sliced_tensors(model: TiledModel) -> dict[str, tuple[int, UnitRuns]]:
    """The tensors of which this rank holds only some units: name -> (block, where the units lie)."""
    return {name: (index, runs) for index, block in enumerate(model.found.blocks) for name, runs in block.cuts.items()}


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(one, other.to(one.device))


def _gather(model: TiledModel, mine: Rows, *, block: int, root: int, known: torch.Tensor | None = None) -> torch.Tensor | None:
    """All units of one tensor on `root`, from the ranks of the first replica; `known` itself if it is the same."""
    comm, tiling = model.stage_comm, model.tilings[block]
    holders = {model.stage_names.index(tile.processor): tile.units for tile in tiling.replicas[0]}
    if comm.rank != root:
        if comm.rank in holders and holders[comm.rank].size:
            comm.send(mine.tensor.contiguous(), root, tag=_TAG)
        return None
    shape = room_for(mine, units=tiling.units, device="meta").shape
    whole = None if known is None or known.shape != shape else Rows(known, mine.runs)
    for rank, units in holders.items():
        if not units.size:
            continue
        held = mine.tensor
        if rank != root:
            held = room_for(mine, units=units.size, device="cpu")
            comm.recv(held, rank, tag=_TAG)
        pieces = Rows(held, mine.runs).cut(Span(0, units.size))
        if whole is not None and whole.tensor is known and not all(map(_same, whole.cut(units), pieces)):
            whole = Rows(whole.tensor.clone(), mine.runs)
        whole = whole or Rows(room_for(mine, units=tiling.units, device="cpu"), mine.runs)
        for part, piece in zip(whole.cut(units), pieces, strict=True):
            if whole.tensor is not known:
                part.copy_(piece)
    return None if whole is None else whole.tensor


def check_state(expected: Mapping[str, torch.Tensor], state: Mapping[str, torch.Tensor]) -> None:
    """Whether `state` is that of a network with tensors of these shapes and dtypes.

    Raises:
        CheckpointError: it is not: names every tensor that is missing, unknown, of another shape, or of a dtype that cannot be
            taken for the network's: floating-point numbers are converted into each other, and nothing else is.
    """
    problems = [f"{name} is missing" for name in expected if name not in state]
    problems += [f"{name} {tuple(state[name].shape)} is not known here" for name in state if name not in expected]
    problems += [
        f"{name} has shape {tuple(state[name].shape)}, this network needs {tuple(wanted.shape)}"
        for name, wanted in expected.items()
        if name in state and state[name].shape != wanted.shape
    ]
    problems += [
        f"{name} is {state[name].dtype}, this network needs {wanted.dtype}"
        for name, wanted in expected.items()
        if name in state and not _can_be_taken(state[name].dtype, wanted.dtype)
    ]
    if problems:
        raise CheckpointError("these weights are of another network:\n  " + "\n  ".join(problems))


def _can_be_taken(given: torch.dtype, wanted: torch.dtype) -> bool:
    return given == wanted or (given.is_floating_point and wanted.is_floating_point)


@called_by_all("save_model")
def save_model(model: TiledModel, path: Path | str, *, force: bool = False) -> None:
    """Write the ordinary state dict of the plain model. Collective: rank 0 writes.

    What was trained is not lost where `path` cannot be had: it is written elsewhere then, and the error says where. To hear of
    it before training, call `tatami.outputs.check_output` there.

    Raises:
        OutputExistsError: on every rank, if the file exists and `force` is not given; the weights are beside it.
        CheckpointError: on every rank, if it cannot be written; the weights are in this or the temporary folder.
        OSError: on every rank, if there is no place for them there, either.
        InputError: on every rank, after it is written: ranks hold different weights that should be the same.
    """
    write_model(model, Path(path), force=force, strict=True)
    model.check_same_weights()


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


@called_by_all("load_model")
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
