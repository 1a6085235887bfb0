"""Faults on order: a communicator on which a rank fails, dawdles or loses a message, and a worker that dies in a phase."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import count
from typing import Self

import torch

from tatami.clock import Clock, SystemClock
from tatami.comm.base import AbstractCommunicator, AbstractRequest, DoneRequest
from tatami.comm.wrapper import WrappedCommunicator
from tatami.server.run_settings import TaskPhase


class FaultKind(Enum):
    """What goes wrong."""

    RAISE = "raise"
    DELAY = "delay"
    DROP = "drop"


class InjectedFaultError(Exception):
    """What a rank raises at a fault of kind RAISE."""


@dataclass(frozen=True, kw_only=True)
class Fault:
    """One fault, once.

    Attributes:
        kind: RAISE raises `InjectedFaultError` in the operation; DELAY begins it `delay_s` late; DROP loses the message of a
            send or isend, which looks sent to its sender, and does nothing to other operations.
        rank: of the outermost communicator, also inside its parts.
        step: which of the rank's operations, counted from 0 through all parts made by `split`.
    """

    kind: FaultKind
    rank: int
    step: int
    delay_s: float = 0.05


class Faulty(WrappedCommunicator):
    """Carries out `faults` on the ranks and at the steps they name."""

    def __init__(self, inner: AbstractCommunicator, *, faults: Sequence[Fault], clock: Clock | None = None) -> None:
        super().__init__(inner)
        self._faults = {fault.step: fault for fault in faults if fault.rank == inner.rank}
        self._clock = clock or SystemClock()
        self._steps = count()
        self._drop_next = False

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:  # noqa: ARG002
        fault = self._faults.get(step := next(self._steps))
        self._drop_next = fault is not None and fault.kind is FaultKind.DROP
        if fault is None:
            return
        if fault.kind is FaultKind.RAISE:
            raise InjectedFaultError(f"rank {fault.rank} fails at step {step}, {operation}, as it was told to")
        if fault.kind is FaultKind.DELAY:
            self._clock.sleep(fault.delay_s)

    def _wrap(self, part: AbstractCommunicator) -> Self:
        wrapped = type(self)(part, faults=(), clock=self._clock)
        wrapped._faults, wrapped._steps = self._faults, self._steps
        return wrapped

    def send(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> None:
        self._before("send", peer=dest, tensor=tensor)
        if not self._drop_next:
            self.inner.send(tensor, dest, tag=tag)

    def isend(self, tensor: torch.Tensor, dest: int, *, tag: int = 0) -> AbstractRequest:
        self._before("isend", peer=dest, tensor=tensor)
        return DoneRequest() if self._drop_next else self.inner.isend(tensor, dest, tag=tag)


class Death(Enum):
    """How a process fails: it ends, or it hangs."""

    KILL = signal.SIGKILL
    STOP = signal.SIGSTOP


@dataclass(frozen=True, kw_only=True)
class Crash:
    """One death, once: processes are never reused. Process w is worker w's first; spares follow."""

    process: int
    round: int
    phase: TaskPhase
    death: Death = Death.KILL


class Crashes:
    """Carries out `crashes`; hand it to `tatami.server.train(on_phase=...)`."""

    def __init__(self, crashes: Sequence[Crash]) -> None:
        self._crashes = tuple(crashes)

    def __call__(self, phase: TaskPhase, process: int, round_: int) -> None:
        for crash in self._crashes:
            if (crash.phase, crash.process, crash.round) == (phase, process, round_):
                os.kill(os.getpid(), crash.death.value)
