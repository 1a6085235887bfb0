"""Tensors in a safetensors file, written in one step; nothing read from a file is ever executed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save

from tatami.errors import CheckpointError
from tatami.inputs import check_input
from tatami.outputs import write_bytes


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, force: bool) -> None:
    """Write a safetensors file in one step. Raises as `tatami.outputs.replacing`."""
    # Not `save_file`: it writes to a file of its own, which nothing else may read, and leaves that behind when it is killed.
    write_bytes(path, save({key: value.contiguous() for key, value in tensors.items()}), force=force)


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
