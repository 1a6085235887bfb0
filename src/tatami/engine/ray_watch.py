"""Ray's own processes, watched: where one of them is gone or stopped, the run ends with a word, and hangs nowhere.

All that this process sends to workers and servers goes through a raylet and a GCS, one process each. Ray notices late or never
that one of them hangs, and a call of Ray that waits for it cannot be ended but by ending what it waits for.
"""

from __future__ import annotations

import os
import socket
import struct
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum
from types import TracebackType
from typing import Any, Self

from tatami.clock import Clock
from tatami.engine.processes import is_running, is_stopped, kill
from tatami.engine.silence import Listening

STOPPED_S = 10.0
"""For so long one of Ray's processes may be stopped: it may be in a debugger for a moment."""
WAIT_S = 300.0
"""For no call of Ray the run waits longer: also where data of many GB are moved, each call moves a part of them."""
_GRACE_S = 5.0
_LOOK_S = 0.1
_CREDENTIALS = struct.Struct("3i")


class Condition(Enum):
    """How a process is."""

    RUNS = "runs"
    STOPPED = "is stopped"
    GONE = "is gone"


@dataclass(frozen=True, kw_only=True)
class RayProcess:
    """One of Ray's own processes on this machine.

    Attributes:
        is_ours: this process has started it.
    """

    name: str
    pid: int
    is_ours: bool

    @property
    def condition(self) -> Condition:
        """As the kernel has it."""
        if not is_running(self.pid):
            return Condition.GONE
        return Condition.STOPPED if is_stopped(self.pid) else Condition.RUNS


def ray_processes(ray: Any) -> tuple[RayProcess, ...]:
    """The processes without which this one cannot go on, where they are on this machine: the raylet and the GCS.

    Empty where the system cannot tell, which is everywhere but on Linux; Ray and the witness end the run there.
    """
    node = getattr(ray._private.worker, "_global_node", None)
    if node is None or sys.platform != "linux":  # None: of a remote client, which has no raylet of its own
        return ()
    ours = {name: [each.process.pid for each in started] for name, started in node.all_processes.items()}
    raylet = _listener(node.raylet_socket_name)
    found = [RayProcess(name="GCS", pid=pid, is_ours=True) for pid in ours.get("gcs_server", [])]
    if raylet is not None:
        found.append(RayProcess(name="raylet", pid=raylet, is_ours=raylet in ours.get("raylet", [])))
    return tuple(found)


def _listener(path: str) -> int | None:
    """The process that listens at a socket of this machine; None where none does any more."""
    with socket.socket(socket.AF_UNIX) as end:
        end.settimeout(_LOOK_S)
        try:
            end.connect(path)
            return int(_CREDENTIALS.unpack(end.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))[0])
        except OSError:
            return None


class Judge:
    """Decides from what is seen of Ray's processes and of this one whether the run can go on; has no clock.

    Attributes:
        fault: why it cannot, from the first moment that it cannot; None until then.
    """

    def __init__(self, processes: Sequence[RayProcess]) -> None:
        self.fault: str | None = None
        self._processes = tuple(processes)
        self._ran_s = {process.pid: 0.0 for process in processes}

    def look(self, conditions: Mapping[int, Condition], *, waits_for_s: float, waits_in: str, now_s: float) -> bool:
        """Whether there is a fault now.

        Args:
            conditions: of Ray's processes, by id.
            waits_for_s: how long this process has been in one call of Ray.
            waits_in: the function that it waits in.
            now_s: on a clock that stands still while this is not called.
        """
        for process in self._processes:
            how = conditions[process.pid]
            if how is Condition.RUNS:
                self._ran_s[process.pid] = now_s
            stopped_s = now_s - self._ran_s[process.pid]
            what = f"Ray's {process.name} (process {process.pid}), through which this process reaches workers and servers,"
            if how is Condition.GONE:
                self._blame(f"{what} is gone: it was killed, or has crashed")
            elif stopped_s > STOPPED_S:
                self._blame(f"{what} has been stopped for {stopped_s:.0f} s, as by `kill -STOP {process.pid}`")
        if waits_for_s > WAIT_S:
            names = " and ".join(f"{process.name} (process {process.pid})" for process in self._processes) or "cluster"
            self._blame(f"this process has waited {waits_for_s:.0f} s for Ray's {names}, in {waits_in}")
        return self.fault is not None

    def _blame(self, fault: str) -> None:
        self.fault = self.fault or fault


class RayWatch:
    """Looks after Ray from a thread of its own, in a `with` block around all that the run does with it.

    The run asks for `fault` between its calls of Ray and leaves the block where there is one. Where it does not come to ask, as
    it is in a call of Ray that never ends, the processes that the call waits for are killed; Ray then ends this process in most
    cases, and the watch does it in the others.

    Args:
        processes: see `ray_processes`.
        clock: tells how long things take.
        tell: is given the fault before this process may be ended.
    """

    def __init__(
        self,
        processes: Sequence[RayProcess],
        *,
        clock: Clock,
        tell: Callable[[str], None],
        leave: Callable[[int], object] = os._exit,
    ) -> None:
        self._processes = tuple(processes)
        self._judge = Judge(processes)
        self._clock = clock
        self._tell = tell
        self._leave = leave
        self._listening = Listening(clock.now_s(), longest_step_s=4 * _LOOK_S)
        self._asked_s: float | None = 0.0
        self._main = threading.get_ident()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tatami-ray-watch", daemon=True)

    @property
    def fault(self) -> str | None:
        """Why the run cannot go on; None while it can. Asked by the run, which is not in a call of Ray then."""
        self._asked_s = self._listening.now_s
        return self._judge.fault

    @contextmanager
    def elsewhere(self) -> Iterator[None]:
        """Around what is not Ray's: the user's functions and files may take as long as they like."""
        self._asked_s = None
        try:
            yield
        finally:
            self._asked_s = self._listening.now_s

    def __enter__(self) -> Self:
        self._look()
        self._thread.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None) -> None:
        self._is_over.set()
        self._thread.join()

    def _look(self) -> float:
        """Judge; gives how long the run has been in one call of Ray."""
        self._listening.advance(self._clock.now_s())
        asked_s, now_s = self._asked_s, self._listening.now_s
        waits_for_s = 0.0 if asked_s is None else now_s - asked_s
        conditions = {process.pid: process.condition for process in self._processes}
        self._judge.look(conditions, waits_for_s=waits_for_s, waits_in=self._place(), now_s=now_s)
        return waits_for_s

    def _run(self) -> None:
        has_killed_s: float | None = None
        while not self._is_over.wait(_LOOK_S):
            waits_for_s = self._look()
            if self._judge.fault is None or waits_for_s < _GRACE_S:
                continue
            if has_killed_s is None:
                self._tell(f"{self._judge.fault}; it was waited for in {self._place()}")
                has_killed_s = waits_for_s
                for process in self._processes:
                    if process.is_ours:
                        kill(process.pid)
            elif waits_for_s - has_killed_s > _GRACE_S:
                self._leave(1)

    def _place(self) -> str:
        """The function of Tatami's that the run is in."""
        frame = sys._current_frames().get(self._main)
        while frame is not None and not frame.f_globals.get("__name__", "").startswith("tatami."):
            frame = frame.f_back
        return "no function of Tatami" if frame is None else frame.f_code.co_qualname
