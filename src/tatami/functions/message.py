"""How a message lies in bytes: a chunk of fixed size, so that its receiver needs to know nothing, then what does not fit.

chunk:  header | label: line of user code, spec of the structure | small tensors
then:   the label, where it did not fit; each tensor that did not fit, from where it lies

A training loop sends the same labels again and again, so both sides keep what they mean and read them only once.
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

from tatami.comm.checked import as_bytes
from tatami.functions.memory import Memory
from tatami.functions.structure import Packed, unpacked
from tatami.functions.wire import Chunk

MAX_LOCATION_BYTES = 200

_HEADER = struct.Struct("<BBIIQQI")
_HEADER_BYTES = _HEADER.size
_LENGTH = struct.Struct("<H")
_MOST_LABELS = 4096
_pack_header, _unpack_header, _copy = _HEADER.pack_into, _HEADER.unpack_from, ctypes.memmove


class MessageKind(IntEnum):
    """What a message is."""

    POINT_TO_POINT = 0
    COLLECTIVE = 1
    ANSWER = 2
    """The gradient of a message; `number` is the serial of the message it answers."""
    REPORT = 3
    """Its sender has waited for a while; the text says for whom. Empty: it waits no longer."""
    FAILURE = 4
    """Its sender found out that the ranks disagree; the text says how."""


REPORT = int(MessageKind.REPORT)


class Head(NamedTuple):
    """The identity of a message on the edge from its sender to its receiver.

    Attributes:
        kind: a `MessageKind`.
        operation: its index in `OPERATIONS`.
        tag: of a point-to-point message; the root of a collective that has one.
        chain: how many forward passes the sender has begun before this one.
        number: how many messages with this tag went before it on this edge, or how many collectives went before this one; of an
            answer the serial of the message it answers.
        serial: of all messages on this edge.
        label_bytes: the size of the label.
    """

    kind: int
    operation: int
    tag: int
    chain: int
    number: int
    serial: int
    label_bytes: int


@dataclass(frozen=True, slots=True, eq=False)
class Label:
    """What many messages have in common.

    Attributes:
        wire: its bytes.
        location: the line of user code that sent it.
        content: the structure.
        places: where in the chunk each tensor lies; -1 for one that follows on its own. Both sides compute this.
        fits: whether the label lies in the chunk.
        all_fit: whether everything does.
        used_bytes: how much of the chunk says something.
    """

    wire: bytes
    location: bytes
    content: Packed
    places: tuple[int, ...]
    fits: bool
    all_fit: bool
    used_bytes: int


def _label(wire: bytes, location: bytes, content: Packed, chunk_bytes: int) -> Label:
    end = _HEADER_BYTES + len(wire)
    fits = end <= chunk_bytes
    free = end if fits else _HEADER_BYTES
    places = []
    for size in content.sizes:
        inside = free + size <= chunk_bytes
        places.append(free if inside else -1)
        free += size if inside else 0
    return Label(wire, location, content, tuple(places), fits, fits and -1 not in places, free)


_labels: dict[tuple[bytes, bytes, int], Label] = {}


def label_of(location: bytes, content: Packed, chunk_bytes: int) -> Label:
    """The label of messages with this structure from this line, in chunks of this size."""
    key = location, content.wire, chunk_bytes
    label = _labels.get(key)
    if label is None:
        if len(_labels) >= _MOST_LABELS:
            _labels.clear()
        wire = _LENGTH.pack(len(location)) + location + content.wire
        label = _labels[key] = _label(wire, location, content, chunk_bytes)
    return label


@lru_cache(maxsize=_MOST_LABELS)
def read_label(wire: bytes, chunk_bytes: int) -> Label:
    """What `label_of` made these bytes from."""
    start = _LENGTH.size
    end = start + _LENGTH.unpack_from(wire)[0]
    return _label(wire, wire[start:end], unpacked(wire[end:]), chunk_bytes)


def text_label(text: str, chunk_bytes: int) -> Label:
    """The label of a message that is not a structure."""
    return _label(_LENGTH.pack(0) + text.encode(), b"", Packed(None, b"", (), (), False, False), chunk_bytes)


def read_text(wire: bytes) -> str:
    """The text of `text_label`."""
    return wire[_LENGTH.size :].decode()


def write(chunk: Chunk, head: tuple[int, int, int, int, int, int], label: Label, tensors: Sequence[torch.Tensor]) -> None:
    """Fill `chunk`; `head` is a `Head` without its last member, `tensors` are contiguous, one for each leaf."""
    wire, view = label.wire, chunk.view
    _pack_header(view, 0, *head, len(wire))
    if label.fits:
        view[_HEADER_BYTES : _HEADER_BYTES + len(wire)] = wire
    address = chunk.address
    for tensor, size, place in zip(tensors, label.content.sizes, label.places, strict=True):
        if place >= 0:
            _copy(address + place, tensor.data_ptr(), size)


def following(label: Label, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What must follow the chunk, as bytes."""
    follow = [] if label.fits else [torch.frombuffer(bytearray(label.wire), dtype=torch.uint8)]
    return follow + [as_bytes(tensor) for tensor, place in zip(tensors, label.places, strict=True) if place < 0]


def read_head(chunk: Chunk) -> Head:
    """The head."""
    return Head._make(_unpack_header(chunk.view))


def read_wire(chunk: Chunk, label_bytes: int) -> bytes | None:
    """The bytes of the label; None where they follow on their own."""
    end = _HEADER_BYTES + label_bytes
    return bytes(chunk.view[_HEADER_BYTES:end]) if end <= chunk.size_bytes else None


def read_tensors(chunk: Chunk, label: Label, memory: Memory) -> list[torch.Tensor]:
    """A tensor for each leaf; those that follow on their own still have to come."""
    tensors, content = [], label.content
    for leaf, size, place in zip(content.leaves, content.sizes, label.places, strict=True):
        tensor = memory.empty(leaf.shape, leaf.dtype, size_bytes=size)
        if place >= 0:
            _copy(tensor.data_ptr(), chunk.address + place, size)
        tensors.append(tensor)
    return tensors


def movable(tensor: torch.Tensor, memory: Memory) -> torch.Tensor:
    """Values that lie in memory one after the other; in `memory` if they do not yet."""
    if tensor.layout != torch.strided:
        return tensor.detach().to_dense().contiguous()
    if tensor.is_contiguous() and not tensor.is_conj() and not tensor.is_neg():
        return tensor
    return memory.empty(tensor.shape, tensor.dtype, size_bytes=tensor.nbytes).copy_(tensor.detach())
