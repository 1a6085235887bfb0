"""How a message lies in bytes: a chunk of fixed size, so that its receiver needs to know nothing, then what does not fit.

chunk:  header | line of user code | spec of the structure | small tensors
then:   the spec, where it did not fit; each tensor that did not fit, from where it lies
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from typing import NamedTuple

import torch

from tatami.functions.structure import Packed

CHUNK_BYTES = 1024
"""Over shared memory a message of this size costs 0.3 us more than one of 8 bytes; a second message costs 5 us."""
MAX_LOCATION_BYTES = 200

_HEADER = struct.Struct("<BBIIQQIH")
_copy = ctypes.memmove


class Kind(IntEnum):
    """What a message is."""

    POINT_TO_POINT = 0
    COLLECTIVE = 1
    ANSWER = 2
    """The gradient of a message; `number` is the serial of the message it answers."""
    REPORT = 3
    """Its sender has waited for a while; the text says for whom. Empty: it waits no longer."""
    FAILURE = 4
    """Its sender found out that the ranks disagree; the text says how."""


class Head(NamedTuple):
    """The identity of a message on the edge from its sender to its receiver.

    Attributes:
        kind: a `Kind`.
        operation: its index in `OPERATIONS`.
        tag: of a point-to-point message; the root of a collective that has one.
        chain: how many forward passes the sender has begun before this one.
        number: how many messages with this tag went before it on this edge, or how many collectives went before this one; of an
            answer the serial of the message it answers.
        serial: of all messages on this edge.
        location: the line of user code that sent it.
    """

    kind: int
    operation: int
    tag: int
    chain: int
    number: int
    serial: int
    location: bytes


@dataclass(slots=True, eq=False)
class Chunk:
    """A reusable first message."""

    tensor: torch.Tensor
    view: memoryview
    address: int

    @classmethod
    def new(cls) -> Chunk:
        tensor = torch.zeros(CHUNK_BYTES, dtype=torch.uint8)
        return cls(tensor, tensor.numpy().data.cast("B"), tensor.data_ptr())


@lru_cache(maxsize=4096)
def _places(sizes: tuple[int, ...], start: int) -> tuple[int, ...]:
    """Where in the chunk each tensor lies; -1 for one that follows on its own. Both sides compute this."""
    places, free = [], start
    for size in sizes:
        fits = free + size <= CHUNK_BYTES
        places.append(free if fits else -1)
        free += size if fits else 0
    return tuple(places)


def write(chunk: Chunk, head: Head, packed: Packed, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Fill `chunk`; returns the tensors, as bytes, that must follow it. `tensors` are those of the leaves, contiguous."""
    wire, location = packed.wire, head.location
    view = chunk.view
    free = _HEADER.size + len(location)
    _HEADER.pack_into(view, 0, *head[:6], len(wire), len(location))
    view[_HEADER.size : free] = location
    follow = []
    if free + len(wire) <= CHUNK_BYTES:
        view[free : free + len(wire)] = wire
        free += len(wire)
    else:
        follow.append(torch.frombuffer(bytearray(wire), dtype=torch.uint8))
    for tensor, size, place in zip(tensors, packed.sizes, _places(packed.sizes, free), strict=True):
        if place < 0:
            follow.append(as_bytes(tensor))
        else:
            _copy(chunk.address + place, tensor.data_ptr(), size)
    return follow


def read_head(chunk: Chunk) -> tuple[Head, int, int]:
    """The head, the length of the spec, and where the head ends."""
    kind, operation, tag, chain, number, serial, wire_bytes, location_bytes = _HEADER.unpack_from(chunk.view)
    end = _HEADER.size + location_bytes
    location = bytes(chunk.view[_HEADER.size : end])
    return Head(kind, operation, tag, chain, number, serial, location), wire_bytes, end


def read_wire(chunk: Chunk, wire_bytes: int, start: int) -> bytes | None:
    """The bytes of the spec; None where they follow on their own."""
    return bytes(chunk.view[start : start + wire_bytes]) if start + wire_bytes <= CHUNK_BYTES else None


def read_tensors(chunk: Chunk, packed: Packed, start: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """A tensor for each leaf, and those of them, as bytes, that still have to come. `start` is where the spec ended."""
    tensors, follow = [], []
    for leaf, size, place in zip(packed.leaves, packed.sizes, _places(packed.sizes, start), strict=True):
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype)
        if place < 0:
            follow.append(as_bytes(tensor))
        else:
            _copy(tensor.data_ptr(), chunk.address + place, size)
        tensors.append(tensor)
    return tensors, follow


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a contiguous tensor."""
    return tensor.detach().view(-1).view(torch.uint8)
