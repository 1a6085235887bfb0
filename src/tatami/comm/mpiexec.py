"""Runs an mpiexec: what its ranks print is passed on, what it says of itself is kept back, requests to end are obeyed."""

from __future__ import annotations

import os
import re
import selectors
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import IO, Protocol

from tatami.comm.guard import end_with_parent
from tatami.comm.signals import StopRequest

LOOK_S = 0.05
"""How often is looked whether an mpiexec that was asked to end has done it."""
_RULE = re.compile(rb"^(?:={83}\n|={1,83}\Z)", re.MULTILINE)
"""The line above the banner, or the beginning of one that has not come whole."""
_BANNER = b"=   BAD TERMINATION OF ONE OF YOUR APPLICATION PROCESSES"
_OWN_LINES = (b"[mpiexec@", b"[proxy:")
_REASONS = (b"ssh: ", b"srun: ")
_CHUNK_BYTES = 1 << 16


class _Filter(Protocol):
    def feed(self, data: bytes) -> bytes: ...

    def rest(self) -> bytes: ...


class BannerFilter:
    """Passes on what ranks print, and keeps the banner that Hydra puts under it when a rank dies."""

    def __init__(self) -> None:
        self._held = b""
        self.banner = b""

    def feed(self, data: bytes) -> bytes:
        """What of the output so far can be shown."""
        self._held += data
        if self.banner:
            self.banner += self.rest()
            return b""
        for rule in _RULE.finditer(self._held):
            after = self._held[rule.end() :]
            if _BANNER.startswith(after[: len(_BANNER)]):
                shown, self._held = self._held[: rule.start()], self._held[rule.start() :]
                if after.startswith(_BANNER):
                    self.banner = self.rest()
                return shown
        return self.rest()

    def rest(self) -> bytes:
        """What is still held back."""
        shown, self._held = self._held, b""
        return shown


class OwnLinesFilter:
    """Passes on what ranks write to standard error, and keeps the lines of Hydra, and why ssh or srun could not start it."""

    def __init__(self) -> None:
        self._held = b""
        self._is_within_line = False
        self.own: list[bytes] = []
        self.reasons: list[bytes] = []

    def feed(self, data: bytes) -> bytes:
        """What of the output so far can be shown."""
        *lines, self._held = (self._held + data).split(b"\n")
        shown = b""
        for line in lines:
            if self._is_within_line or not self._keep(line):
                shown += line + b"\n"
            self._is_within_line = False
        may_be_own = any(word.startswith(self._held[: len(word)]) for word in (*_OWN_LINES, *_REASONS))
        if self._held and (self._is_within_line or not may_be_own):
            self._is_within_line = True
            shown += self.rest()
        return shown

    def rest(self) -> bytes:
        """What is still held back of a line that has not ended."""
        shown, self._held = self._held, b""
        return shown

    def _keep(self, line: bytes) -> bool:
        if line.startswith(_OWN_LINES):
            self.own.append(line)
        elif line.startswith(_REASONS):
            self.reasons.append(line)
        else:
            return False
        return True


def run_mpiexec(arguments: Sequence[str], *, environ: Mapping[str, str], stop: StopRequest) -> int:
    """Run it to its end, or until it is made to by `stop`; returns its exit code, of a signal as a shell has it."""
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=environ, preexec_fn=end_with_parent
    )
    assert process.stdout is not None
    assert process.stderr is not None
    errors = OwnLinesFilter()
    with selectors.DefaultSelector() as selector:
        selector.register(stop, selectors.EVENT_READ)
        selector.register(process.stdout, selectors.EVENT_READ, (BannerFilter(), show))
        selector.register(process.stderr, selectors.EVENT_READ, (errors, show_error))
        while len(selector.get_map()) > 1:
            stop.pursue(ask=process.terminate, end=process.kill)
            for key, _ in selector.select(None if stop.number is None else LOOK_S):
                if key.data is not None and not _pass_on(key.fd, *key.data):
                    selector.unregister(key.fd)
            if stop.number is not None and process.poll() is not None:
                break
    process.stdout.close()
    process.stderr.close()
    code = process.wait()
    if errors.reasons and code != 0 and stop.number is None:
        reasons = "; ".join(line.decode(errors="replace").strip() for line in errors.reasons)
        show_error(
            f"tatami run: not all hosts could be reached ({reasons}). Each name given with --hosts must be one that "
            "`ssh NAME true` reaches from here without asking\n".encode()
        )
    return code if code >= 0 else 128 - code


def show(data: bytes) -> None:
    """Onto standard output, which may be a file, a terminal, or a test's stand-in without bytes."""
    _write(sys.stdout, data)


def show_error(data: bytes) -> None:
    """The same for standard error."""
    _write(sys.stderr, data)


def _pass_on(source: int, passes: _Filter, shown: Callable[[bytes], None]) -> bool:
    data = os.read(source, _CHUNK_BYTES)
    shown(passes.feed(data) if data else passes.rest())
    return bool(data)


def _write(stream: IO[str], data: bytes) -> None:
    if hasattr(stream, "buffer"):
        stream.flush()
        stream.buffer.write(data)
    else:
        stream.write(data.decode(errors="replace"))
    stream.flush()
