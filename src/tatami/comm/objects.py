"""Objects between ranks: pickled, their length first, then their bytes, as tensors.

Unpickling runs what the sender wrote: this is only ever for ranks that the user started.
"""

from __future__ import annotations

import pickle
from typing import Any

import torch

from tatami.comm.base import AbstractCommunicator


class ObjectMessages(AbstractCommunicator):
    """The object operations of a communicator that can move tensors; abstract."""

    def send_object(self, value: Any, dest: int, *, tag: int = 0) -> None:
        payload = _pickled(value)
        self.send(torch.tensor([payload.numel()], dtype=torch.int64, device="cpu"), dest, tag=tag)
        self.send(payload, dest, tag=tag)

    def recv_object(self, source: int, *, tag: int = 0) -> Any:
        length = torch.empty(1, dtype=torch.int64, device="cpu")
        self.recv(length, source, tag=tag)
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.recv(payload, source, tag=tag)
        return _unpickled(payload)

    def bcast_object(self, value: Any, *, root: int = 0) -> Any:
        payload = _pickled(value if self.rank == root else None)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
        self.bcast(length, root=root)
        if self.rank == root:
            self.bcast(payload, root=root)
            return value
        payload = torch.empty(int(length), dtype=torch.uint8, device="cpu")
        self.bcast(payload, root=root)
        return _unpickled(payload)

    def allgather_object(self, value: Any) -> list[Any]:
        payload = _pickled(value)
        lengths = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self.allgather(torch.tensor([payload.numel()], dtype=torch.int64, device="cpu"), lengths)
        counts = lengths.tolist()
        everything = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
        self.allgather(payload, everything, counts=counts)
        return [_unpickled(part) for part in torch.split(everything, counts)]

    def gather_object(self, value: Any, *, root: int = 0) -> list[Any] | None:
        payload = _pickled(value)
        length = torch.tensor([payload.numel()], dtype=torch.int64, device="cpu")
        if self.rank != root:
            self.gather(length, None, root=root)
            self.gather(payload, None, root=root)
            return None
        lengths = torch.empty(self.size, dtype=torch.int64, device="cpu")
        self.gather(length, lengths, root=root)
        counts = lengths.tolist()
        everything = torch.empty(sum(counts), dtype=torch.uint8, device="cpu")
        self.gather(payload, everything, root=root, counts=counts)
        return [_unpickled(part) for part in torch.split(everything, counts)]


def tensor_of(data: bytes) -> torch.Tensor:
    """(bytes,) of uint8, as ranks send it."""
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def bytes_of(payload: torch.Tensor) -> bytes:
    """What `tensor_of` was given."""
    return bytes(payload.numpy().tobytes())


def _pickled(value: Any) -> torch.Tensor:
    return tensor_of(pickle.dumps(value))


def _unpickled(payload: torch.Tensor) -> Any:
    return pickle.loads(bytes_of(payload))
