"""The process of a rank, as a Ray actor: a thin shell around a session, in which the user's script runs in a thread."""

from __future__ import annotations

import io
import os
import pickle
import queue
import runpy
import signal
import sys
import threading
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from ray import cloudpickle

from tatami.comm.elastic import set_elastic_world
from tatami.elastic.orders import Assignment, Order, Report, Said, ScriptEnded, ScriptFailed
from tatami.elastic.session import Session, set_session
from tatami.elastic.settings import MomentHook
from tatami.elastic.steps import repairs_of_fit
from tatami.engine.processes import Identity, WatchedProcess, identity
from tatami.errors import CommError
from tatami.membership import Halted
from tatami.records import let_records_go_on
from tatami.state.repairing import BeginAgain, set_repairs

_COLLECT_S = 5.0


@dataclass(frozen=True, kw_only=True)
class RankSpec:
    """What every rank runs: `function`, without arguments; and the hook of tests."""

    function: Callable[[], Any]
    hook: MomentHook | None


class RankProcess(WatchedProcess):
    """Runs the script in a thread, and hands orders to it."""

    concurrency_groups = {"pulse": 1, "halts": 8, "mail": 1}  # noqa: RUF012 -- read by the crew

    def __init__(self) -> None:
        # torch does much for the first time in its first backward pass, and where it unpickles its first tensor: a process that
        # stands by has that behind it.
        torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
        pickle.loads(pickle.dumps(torch.ones(1)))
        with Path(os.devnull).open() as nothing:  # a line that is typed would reach any one rank
            os.dup2(nothing.fileno(), 0)
        self._session: Session | None = None
        if threading.current_thread() is threading.main_thread():  # where signals are handled
            self._otherwise = signal.signal(signal.SIGTERM, self._given_notice)

    def _given_notice(self, number: int, frame: FrameType | None) -> None:
        """SIGTERM, as of a spot instance: leave between two steps. A second one ends the process at once."""
        session = self._session
        if session is not None and session.entered and not session.is_leaving:
            session.leave()
        elif callable(self._otherwise):
            self._otherwise(number, frame)
        else:
            sys.exit(1)

    def employ(self, assignment: Assignment, pickled_spec: bytes) -> Identity:
        """Become a member: the script begins in a thread of its own."""
        if assignment.loopback:
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        spec: RankSpec = cloudpickle.loads(pickled_spec)
        session = self._session = Session(assignment, hook=spec.hook)
        set_session(session)
        set_repairs(repairs_of_fit)
        sys.stdout, sys.stderr = _Lines(session), _Lines(session)
        threading.Thread(target=_run, args=(session, spec.function), name="tatami-script", daemon=True).start()
        return identity()

    def dismiss(self) -> None:
        """Let go of the run."""
        session, self._session = self._session, None
        if session is not None and not session.box.has_ended:
            raise RuntimeError("the script is still at work")
        if session is not None:
            session.close()
        set_session(None)
        set_repairs(None)
        set_elastic_world(None)

    def halt(self, ticket: int, abort: bool) -> Halted | None:
        """See `OrderBox.halt`."""
        assert self._session is not None
        return self._session.box.halt(ticket, abort=abort)

    def obey(self, order: Order, ticket: int) -> None:
        """See `OrderBox.hand_in`."""
        assert self._session is not None
        self._session.box.hand_in(order, ticket=ticket)

    def collect(self) -> list[Report]:
        """What the rank has to tell; waits a while where there is nothing."""
        session = self._session
        if session is None:
            return []
        found: list[Report] = []
        try:
            found.append(session.reports.get(timeout=_COLLECT_S))
            while True:
                found.append(session.reports.get_nowait())
        except queue.Empty:
            return found


def _run(session: Session, function: Callable[[], Any]) -> None:
    """The script's thread: begins the script, again where its group changes before it has come to its loop."""
    try:
        is_first = True
        let_records_go_on(session.joins)
        while True:
            try:
                if is_first:
                    is_first = False
                    set_elastic_world(session.begin())
                else:
                    session.begin_again()
                    let_records_go_on(True)
                value = function()
                break
            except BeginAgain:
                continue
            except CommError as error:
                if session.entered or session.assignment.joins:
                    raise
                session.stuck(error)
        session.box.end()
        session.report(ScriptEnded(value=value))
    except BaseException as error:
        session.box.end()
        if isinstance(error, SystemExit) and error.code in (None, 0) and (session.is_through or session.is_over):
            session.report(ScriptEnded(value=None))  # sys.exit(main()); before its end, the others would train no further
        else:
            session.report(ScriptFailed(error=error, trace=_trace(error), step=session.step))


def _trace(error: BaseException) -> str:
    """Without what has called the script."""
    trace, ours = error.__traceback__, (str(Path(__file__).parent), str(runpy.__file__), "<frozen runpy>")
    while trace is not None and trace.tb_next is not None and trace.tb_frame.f_code.co_filename.startswith(ours):
        trace = trace.tb_next
    return "".join(traceback.format_exception(type(error), error, trace))


class _Lines(io.TextIOBase):
    """Standard output, line by line to the process that started the run."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._begun = ""

    def write(self, text: str) -> int:
        *lines, self._begun = (self._begun + text).split("\n")
        for line in lines:
            self._session.report(Said(text=line))
        return len(text)

    def writable(self) -> bool:
        return True
