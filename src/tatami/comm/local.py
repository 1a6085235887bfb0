"""Ranks of MPICH on this machine, started and watched here: this opens no socket that another machine could reach.

Hydra, MPICH's own launcher, listens on all interfaces for its helpers on other machines, also where there are none (5.0 has no
switch for it); its `mpiexec.gforker` does not, but refuses a large environment and ends with code 0 when a rank was killed.
What the ranks of one machine need is little: a socket pair each, over which they ask what `tatami.comm.pmi` answers. And this
program sees what no launcher tells: which rank ended first, how, and whether it had left MPI.
"""

from __future__ import annotations

import os
import selectors
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import final

from tatami.comm.forked import Copy, start_copy
from tatami.comm.pmi import PmiServer
from tatami.comm.session import FAILURES, WATCHED
from tatami.comm.signals import StopRequest, end_with_parent
from tatami.comm.stall_report import format_ranks
from tatami.errors import CommError

LOOK_S = 0.05
"""How often the launcher looks for ends of ranks where the system does not report them, and while they are asked to end."""
_TELLS_OF_ENDS = hasattr(os, "pidfd_open")
_CHUNK_BYTES = 1 << 16


@dataclass(eq=False)
class _Rank:
    """A rank: its process, this side of its socket pair, what the system tells of its end by, and an unfinished line."""

    number: int
    process: subprocess.Popen[bytes] | Copy
    pmi: socket.socket
    handle: int | None
    unread: bytes = b""


@final
class LocalJob:
    """The ranks of one job on this machine.

    Args:
        environ: their variables; each gets some more.
        show: is given what they print.
        program: of Python, its words as `run_program` takes them: ranks are copies of this process that run it, not `command`.

    Raises:
        CommError: not all of them could be started; those that were are ended.
    """

    def __init__(
        self,
        command: Sequence[str],
        *,
        ranks: int,
        environ: Mapping[str, str],
        show: Callable[[bytes], object],
        program: Sequence[str] | None = None,
    ) -> None:
        self._command = command
        self._program = program
        self._server = PmiServer(ranks)
        self._show = show
        self._selector = selectors.DefaultSelector()
        self._running: dict[int, _Rank] = {}
        self._absent: list[_Rank] = []
        self._failed: int | None = None
        self._output, output = os.pipe()
        failures = os.memfd_create(FAILURES)
        self._selector.register(self._output, selectors.EVENT_READ, self._pass_on)
        try:
            for number in range(ranks):
                self._start(number, environ={**environ, WATCHED: str(failures)}, output=output, failures=failures)
        except OSError as error:
            started = len(self._running)
            self._end()
            raise CommError(
                f"only {started} of {ranks} ranks could be started: {error.strerror}; start fewer, or raise the limits of this "
                "user (ulimit -u -n)"
            ) from None
        finally:
            os.close(output)
            os.close(failures)

    def run(self, stop: StopRequest) -> int:
        """Serve the ranks until all have ended, or are made to by the request; returns the exit code of the job."""
        self._selector.register(stop, selectors.EVENT_READ, lambda: None)
        while self._running:
            stop.pursue(ask=lambda: self._signal(signal.SIGTERM), end=self._end)
            for key, _ in self._selector.select(None if _TELLS_OF_ENDS and stop.number is None else LOOK_S):
                key.data()
            for rank in list(self._running.values()):
                if (code := rank.process.poll()) is not None:
                    self._ended(rank, code, stopping=stop.number is not None)
        self._pass_on_the_rest()
        self._selector.close()
        return 128 + stop.number if stop.number is not None else self._failed or 0

    # -- what ranks say and do ------------------------------------------------------------------------------------------------

    def _answer(self, rank: _Rank) -> None:
        """Serve the lines that a rank has sent."""
        try:
            data = rank.pmi.recv(_CHUNK_BYTES)
        except ConnectionResetError:
            data = b""
        if not data:
            self._selector.unregister(rank.pmi)
            return
        *lines, rank.unread = (rank.unread + data).split(b"\n")
        for line in lines:
            for reply in self._server.handle(rank.number, line.decode(errors="replace")):
                if (receiver := self._running.get(reply.rank)) is not None:
                    with suppress(BrokenPipeError, ConnectionResetError):  # it has ended, and is found in a moment
                        receiver.pmi.sendall(reply.line.encode() + b"\n")
        if (code := self._server.aborted.get(rank.number)) is not None:
            self._fail(rank, f"ended the job with exit code {code}", code=code or 1)
        self._check_start()

    def _ended(self, rank: _Rank, code: int, *, stopping: bool) -> None:
        """A rank has ended: well, or so that the others would wait for it in vain."""
        del self._running[rank.number]
        if rank.pmi in self._selector.get_map():
            self._selector.unregister(rank.pmi)
        rank.pmi.close()
        if rank.handle is not None:
            self._selector.unregister(rank.handle)
            os.close(rank.handle)
        server = self._server
        if stopping:
            return
        if code != 0:
            self._fail(rank, _ended_by(code), code=code if code > 0 else 128 - code)
        elif rank.number in server.joined - server.left:
            self._fail(rank, "ended with exit code 0 before it had left MPI (by os._exit?)", code=1)
        elif rank.number not in server.joined:
            self._absent.append(rank)
            self._check_start()

    def _check_start(self) -> None:
        """MPI begins on all ranks or on none: those that have begun it wait for one that has ended without, forever."""
        if self._absent and self._server.joined:
            waiting = format_ranks(sorted(self._server.joined))
            self._fail(
                self._absent[0], f"ended with exit code 0 without having begun MPI, where {waiting} waited for it", code=1
            )

    def _fail(self, rank: _Rank, how: str, *, code: int) -> None:
        """The first failure ends all ranks."""
        if self._failed is None:
            self._failed = code
            which = f"rank {rank.number} (pid {rank.process.pid} on {socket.gethostname()})"
            print(f"tatami run: {which} {how}; the other ranks are stopped", file=sys.stderr, flush=True)
            self._end()

    def _pass_on(self) -> None:
        if data := os.read(self._output, _CHUNK_BYTES):
            self._show(data)
        else:
            self._selector.unregister(self._output)

    def _pass_on_the_rest(self) -> None:
        """What the ranks printed last. Programs that they left running may hold the pipe open, and are not waited for."""
        os.set_blocking(self._output, False)
        with suppress(BlockingIOError):
            while data := os.read(self._output, _CHUNK_BYTES):
                self._show(data)
        os.close(self._output)

    # -- their processes -----------------------------------------------------------------------------------------------------

    def _start(self, number: int, *, environ: Mapping[str, str], output: int, failures: int) -> None:
        ours, theirs = socket.socketpair()
        with theirs, open(os.devnull, "rb") as nothing:
            size = self._server.size
            own = {"PMI_FD": theirs.fileno(), "PMI_RANK": number, "PMI_SIZE": size}
            own |= {"MPI_LOCALRANKID": number, "MPI_LOCALNRANKS": size}
            environ = {**environ, **{name: str(value) for name, value in own.items()}}
            stdin = nothing.fileno() if number > 0 or not _is_open(0) else 0
            passed = [theirs.fileno(), failures]
            process = (
                start_copy(self._program, environ=environ, stdin=stdin, stdout=output, pass_fds=passed)
                if self._program is not None
                else subprocess.Popen(
                    self._command,
                    env=environ,
                    stdin=stdin,
                    stdout=output,
                    pass_fds=passed,
                    preexec_fn=end_with_parent,
                )
            )
        handle = os.pidfd_open(process.pid) if _TELLS_OF_ENDS else None
        rank = _Rank(number=number, process=process, pmi=ours, handle=handle)
        self._running[number] = rank
        self._selector.register(ours, selectors.EVENT_READ, lambda: self._answer(rank))
        if handle is not None:
            self._selector.register(handle, selectors.EVENT_READ, lambda: None)

    def _signal(self, number: signal.Signals) -> None:
        for rank in self._running.values():
            rank.process.send_signal(number)

    def _end(self) -> None:
        self._signal(signal.SIGKILL)


def _is_open(number: int) -> bool:
    try:
        os.fstat(number)
    except OSError:
        return False
    return True


def _ended_by(code: int) -> str:
    """How a process ended, by its exit code, or the negative number of the signal."""
    if code >= 0:
        return f"ended with exit code {code}"
    names = {each.value: each.name for each in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'a signal without a name')})"
