"""Objects between ranks, pickled: a message of fixed size with the length and the first bytes, and the rest where there is any.

Most are short, such as what ranks agree on, and then it takes one message in place of two that wait for each other.
Unpickling runs what the sender wrote: this is only ever for ranks that the user started.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch


def tensor_of(data: bytes) -> torch.Tensor:
    """(bytes,) of uint8, as ranks send it."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(payload: torch.Tensor) -> bytes:
    """What `tensor_of` was given."""
    return bytes(payload.numpy().tobytes())


HEAD_BYTES = 512
_LENGTH_BYTES = 8


def bytes_room(num_bytes: int) -> torch.Tensor:
    """(num_bytes,) to receive into."""
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def pickled(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(HEAD_BYTES,) and what does not fit in there."""
    data = pickle.dumps(value)
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return tensor_of(data[:HEAD_BYTES].ljust(HEAD_BYTES, b"\0")), tensor_of(data[HEAD_BYTES:])


def rest_bytes(head: torch.Tensor) -> int:
    """The size of the second message, from the first one."""
    return max(_length(bytes_of(head)) + _LENGTH_BYTES - HEAD_BYTES, 0)


def _length(head: bytes) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def unpickled(head: torch.Tensor, rest: torch.Tensor) -> Any:
    """The object of both messages."""
    first = bytes_of(head)
    return pickle.loads((first + bytes_of(rest))[_LENGTH_BYTES : _LENGTH_BYTES + _length(first)])


def all_unpickled(heads: torch.Tensor, rests: torch.Tensor, counts: Sequence[int]) -> list[Any]:
    """The objects of several ranks; `counts` are the bytes of each one's second message."""
    parts = torch.split(rests, list(counts))
    return [unpickled(head, rest) for head, rest in zip(torch.split(heads, HEAD_BYTES), parts, strict=True)]
