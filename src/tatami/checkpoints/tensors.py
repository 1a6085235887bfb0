"""Tensors in a safetensors file, written in one step; nothing read from a file is ever executed."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from tatami.errors import CheckpointError
from tatami.outputs import refuse_to_overwrite


def write_tensors(path: Path, tensors: Mapping[str, torch.Tensor], *, force: bool) -> None:
    """Write a safetensors file in one step: a reader sees the old file or the new one, never a part."""
    refuse_to_overwrite(path, force=force)
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, name = tempfile.mkstemp(dir=path.parent, prefix=path.name, suffix=".part")
    os.close(handle)
    try:
        save_file({key: value.contiguous() for key, value in tensors.items()}, name)
        os.replace(name, path)
    except BaseException:
        Path(name).unlink(missing_ok=True)
        raise


def read_tensors(path: Path | str) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors file.

    Raises:
        CheckpointError: no such file, or damaged.
    """
    try:
        return load_file(path)
    except FileNotFoundError:
        raise CheckpointError(f"there is no file {path}") from None
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"{path} can not be read as safetensors: {error}") from error
