"""Tensors in a safetensors file, written in one step; nothing read from a file is ever executed."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tatami.errors import CheckpointError, InputError, OutputExistsError
from tatami.inputs import check_input
from tatami.outputs import free_name, write_bytes


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, force: bool) -> None:
    """Write a safetensors file in one step. Raises as `tatami.outputs.replacing`."""
    # Not `save_file`: it writes to a file of its own, which nothing else may read, and leaves that behind when it is killed.
    write_bytes(path, save({key: value.contiguous() for key, value in tensors.items()}), force=force)


def write_tensors_somewhere(path: Path, tensors: Mapping[str, torch.Tensor], *, force: bool) -> tuple[Path, InputError | None]:
    """Write what must not be lost: to `path`, else beside the file that is kept there, else to this or the temporary folder.

    Returns:
        the file, and an error to raise where it is not `path`: it says why, and where the tensors are.

    Raises:
        OSError: there is no place for them in any of these folders; says what was wrong with `path`.
    """
    try:
        write_tensors(path, tensors, force=force)
    except (InputError, OSError) as error:
        first = error
    else:
        return path, None
    name = f"{path.stem[:100] or 'model'}.safetensors"
    for folder in (path.parent, Path(), Path(tempfile.gettempdir())):
        if folder == path.parent and not isinstance(first, OutputExistsError):
            continue  # what is wrong may be the folder
        where = free_name(folder / name)
        try:
            write_tensors(where, tensors, force=False)
        except (InputError, OSError):
            continue
        kind = OutputExistsError if isinstance(first, OutputExistsError) else CheckpointError
        return where, kind(f"{first}. What was to be saved is in {where.absolute()}")
    raise OSError(f"nothing could be saved, neither there nor in this or the temporary folder: {first}") from first


def read_tensors(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: no such file, or damaged.
    """
    check_input(path, what="the weights", error=CheckpointError)
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} cannot be read as safetensors: {error}") from error
