"""Objects between ranks, pickled: a message of fixed size with the length and the first bytes, and the rest where there is any.

Most are short, such as what ranks agree on, and then it takes one message in place of two that wait for each other.
Unpickling runs what the sender wrote: this is only ever for ranks that the user started.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from typing import Any

import torch

from tatami.comm.base import AbstractCommunicator


class ObjectMessages(AbstractCommunicator):
    """The object operations of a communicator that can move tensors; abstract."""

    def send_object(self, value: Any, dest: int, *, tag: int = 0) -> None:
        head, rest = _pickled(value)
        self.send(head, dest, tag=tag)
        if rest.numel():
            self.send(rest, dest, tag=tag)

    def recv_object(self, source: int, *, tag: int = 0) -> Any:
        head = _room(_HEAD_BYTES)
        self.recv(head, source, tag=tag)
        rest = _room(_rest_bytes(head))
        if rest.numel():
            self.recv(rest, source, tag=tag)
        return _unpickled(head, rest)

    def bcast_object(self, value: Any, *, root: int = 0) -> Any:
        head, rest = _pickled(value) if self.rank == root else (_room(_HEAD_BYTES), _room(0))
        self.bcast(head, root=root)
        if self.rank != root:
            rest = _room(_rest_bytes(head))
        if rest.numel():
            self.bcast(rest, root=root)
        return value if self.rank == root else _unpickled(head, rest)

    def allgather_object(self, value: Any) -> list[Any]:
        head, rest = _pickled(value)
        heads = _room(self.size * _HEAD_BYTES)
        self.allgather(head, heads)
        counts = [_rest_bytes(each) for each in torch.split(heads, _HEAD_BYTES)]
        rests = _room(sum(counts))
        if rests.numel():
            self.allgather(rest, rests, counts=counts)
        return _all_unpickled(heads, rests, counts)

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        head, rest = _pickled(value)
        if self.rank != root:
            self.gather(head, None, root=root)
            self.gather(rest, None, root=root)
            return None
        heads = _room(self.size * _HEAD_BYTES)
        self.gather(head, heads, root=root)
        counts = [_rest_bytes(each) for each in torch.split(heads, _HEAD_BYTES)]
        rests = _room(sum(counts))
        self.gather(rest, rests, root=root, counts=counts)  # also where all are empty: only the root knows that
        return _all_unpickled(heads, rests, counts)


def tensor_of(data: bytes) -> torch.Tensor:
    """(bytes,) of uint8, as ranks send it."""
    if not data:
        return torch.empty(0, dtype=torch.uint8, device="cpu")
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(payload: torch.Tensor) -> bytes:
    """What `tensor_of` was given."""
    return bytes(payload.numpy().tobytes())


_HEAD_BYTES = 512
_LENGTH_BYTES = 8


def _room(num_bytes: int) -> torch.Tensor:
    return torch.empty(num_bytes, dtype=torch.uint8, device="cpu")


def _pickled(value: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """(_HEAD_BYTES,) and what does not fit in there."""
    data = pickle.dumps(value)
    data = len(data).to_bytes(_LENGTH_BYTES, "little") + data
    return tensor_of(data[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0")), tensor_of(data[_HEAD_BYTES:])


def _rest_bytes(head: torch.Tensor) -> int:
    return max(_length(bytes_of(head)) + _LENGTH_BYTES - _HEAD_BYTES, 0)


def _length(head: bytes) -> int:
    return int.from_bytes(head[:_LENGTH_BYTES], "little")


def _unpickled(head: torch.Tensor, rest: torch.Tensor) -> Any:
    first = bytes_of(head)
    return pickle.loads((first + bytes_of(rest))[_LENGTH_BYTES : _LENGTH_BYTES + _length(first)])


def _all_unpickled(heads: torch.Tensor, rests: torch.Tensor, counts: Sequence[int]) -> list[Any]:
    parts = torch.split(rests, list(counts))
    return [_unpickled(head, rest) for head, rest in zip(torch.split(heads, _HEAD_BYTES), parts, strict=True)]
