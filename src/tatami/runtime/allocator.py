"""Freed memory goes back to the system where a plan fills much of a machine's memory.

glibc keeps freed memory of up to 32 MiB for later use, with holes between what is in use: processes peak at 1.2 to 2.4 times
what their tensors take (benchmarks/memory.py), by amounts that differ from run to run. Where tensors of at least `_LEAST_BYTES`
are given back at once, and what is left of smaller ones before each forward pass, they do not: an LSTM has thousands of
smaller ones, between which a third of its memory lay free. Pages are new each time, which costs a GPT of 4.8 M weights a
quarter of its CPU time, so this is done only where memory is tight.
"""

from __future__ import annotations

import ctypes
import sys

_LEAST_BYTES = 1 << 17
TIGHT = 0.4
"""A plan that takes more of a machine's memory would not fit with what the allocator may keep."""
_MMAP_THRESHOLD, _TRIM_THRESHOLD = -3, -1
"""Options of glibc's malloc.h: M_MMAP_THRESHOLD, from which size memory is the system's own piece, and M_TRIM_THRESHOLD."""


_libraries: list[ctypes.CDLL] = []
"""The C library, once it gives freed memory back."""


def give_freed_memory_back() -> bool:
    """From now on, in this process; returns whether its C library can be told so (glibc)."""
    library = _glibc()
    if library is None:
        return False
    told = [library.mallopt(_MMAP_THRESHOLD, _LEAST_BYTES), library.mallopt(_TRIM_THRESHOLD, _LEAST_BYTES)]
    _libraries[:] = [library]
    trim()
    return all(told)


def trim_once() -> None:
    """Give back what is free now, whatever was called before: after a network of which this rank keeps a part was made."""
    if (library := _glibc()) is not None:
        library.malloc_trim(0)


def _glibc() -> ctypes.CDLL | None:
    library = ctypes.CDLL(None) if sys.platform.startswith("linux") else None
    names = ("mallopt", "malloc_trim", "gnu_get_libc_version")
    return library if library is not None and all(hasattr(library, name) for name in names) else None


def trim() -> None:
    """Give back what is free now, if `give_freed_memory_back` was called."""
    for library in _libraries:
        library.malloc_trim(0)
