"""State of a run as bytes: its tensors as safetensors, everything else as JSON in their header. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load, save

from tatami.errors import CheckpointError, InputError

State = Any
"""Dicts, lists and tuples, nested, of tensors, numbers, truths, strings and None: what `state_dict` of torch returns."""

_HEADER = "tatami.state"
_HEADER_LENGTH_BYTES = 8


def encode(state: State) -> bytes:
    """The bytes of a safetensors file that holds all of `state`.

    Raises:
        InputError: something that is neither a tensor nor JSON; names its path.
    """
    tensors: dict[str, torch.Tensor] = {}
    owners: set[int] = set()
    tree = _encode(state, "", tensors, owners)
    return save(tensors, metadata={_HEADER: json.dumps(tree)})


def decode(data: bytes) -> State:
    """What `encode` was given; tensors are on the CPU, and dicts are plain ones.

    Raises:
        CheckpointError: these are not bytes of `encode`.
    """
    try:
        end = _HEADER_LENGTH_BYTES + int.from_bytes(data[:_HEADER_LENGTH_BYTES], "little")
        header = json.loads(data[_HEADER_LENGTH_BYTES:end])
        tree = json.loads(header["__metadata__"][_HEADER])
        return _decode(tree, load(data))
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"these bytes hold no state of a run: {type(error).__name__}: {error}") from error


def _encode(value: State, path: str, tensors: dict[str, torch.Tensor], owners: set[int]) -> Any:
    if isinstance(value, torch.Tensor):
        name = path or "tensor"
        while name in tensors:
            name += "'"
        tensors[name] = _own_memory(value, path, owners)
        return {"tensor": name}
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Mapping):
        pairs = []
        for key, item in value.items():
            if key is not None and not isinstance(key, bool | int | float | str):
                raise InputError(f"the key {key!r} of {_named(path)} is a {type(key).__name__}; use strings or numbers")
            pairs.append([key, _encode(item, f"{path}.{key}" if path else str(key), tensors, owners)])
        return {"dict": pairs}
    if isinstance(value, list | tuple):
        items = [_encode(item, f"{path}.{index}" if path else str(index), tensors, owners) for index, item in enumerate(value)]
        return {"list" if isinstance(value, list) else "tuple": items}
    raise InputError(
        f"{_named(path)} is a {type(value).__name__}; a checkpoint holds tensors, numbers, strings, None, and dicts, lists and "
        "tuples of them"
    )


def _own_memory(tensor: torch.Tensor, path: str, owners: set[int]) -> torch.Tensor:
    """On the CPU, contiguous, and in memory that no other tensor of the file lies in, as safetensors wants it."""
    if tensor.layout != torch.strided:
        raise InputError(f"{_named(path)} is a {tensor.layout} tensor; a checkpoint holds dense ones")
    moved = tensor.detach().cpu().contiguous()
    memory = moved.untyped_storage().data_ptr()
    if memory in owners and moved.numel():
        moved = moved.clone()
    owners.add(memory)
    return moved


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> State:
    if not isinstance(tree, dict):
        return tree
    ((kind, content),) = tree.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: _decode(item, tensors) for key, item in content}
    items = [_decode(item, tensors) for item in content]
    return items if kind == "list" else tuple(items)


def _named(path: str) -> str:
    return f"state[{path}]" if path else "the state"
