"""Messages between this program and the processes it started itself: a length, then a pickle.

Over pipes to which no other process can write; nothing is ever unpickled that came from a file or a network.
"""

from __future__ import annotations

import pickle
import struct
from typing import Any, BinaryIO

_LENGTH = struct.Struct("<Q")


def write_frame(pipe: BinaryIO, value: Any) -> None:
    data = pickle.dumps(value)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def read_frame(pipe: BinaryIO) -> Any:
    """The next message.

    Raises:
        EOFError: the other end is closed.
    """
    (length,) = _LENGTH.unpack(_read(pipe, _LENGTH.size))
    return pickle.loads(_read(pipe, length))


def _read(pipe: BinaryIO, size: int) -> bytes:
    data = pipe.read(size)
    if len(data) < size:
        raise EOFError
    return data
