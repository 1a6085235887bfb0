"""How long stretches of work take: by the clock of the host, or by what a device's stream has reached.

A device works behind the host: when a call returns, the work was only ordered. So a moment is a mark in the stream, and the
time between two marks is asked for when both were reached, at the end of an iteration, without a wait in the middle of it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import torch

from tatami.clock import Clock
from tatami.comm.base import AbstractRequest


class AbstractStopwatch(ABC):
    """Takes moments, and tells what lies between two of them."""

    @abstractmethod
    def mark(self) -> Any:
        """This moment; never waits."""

    @abstractmethod
    def between_s(self, began: Any, ended: Any) -> float:
        """Seconds between two marks; waits until the second is reached."""

    def finish(self) -> None:  # noqa: B027 - the host is never behind itself
        """Wait until all that was ordered is done."""


class HostStopwatch(AbstractStopwatch):
    """By the clock of the host, for work that is done when its call returns."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def mark(self) -> float:
        return self._clock.now_s()

    def between_s(self, began: float, ended: float) -> float:
        return ended - began


class CudaStopwatch(AbstractStopwatch):
    """By events in the current stream of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def between_s(self, began: torch.cuda.Event, ended: torch.cuda.Event) -> float:
        ended.synchronize()
        return float(began.elapsed_time(ended)) / 1e3

    def finish(self) -> None:
        torch.cuda.synchronize(self._device)


def stopwatch_of(device: torch.device, clock: Clock) -> AbstractStopwatch:
    """The stopwatch of a CUDA device; that of the host for any other."""
    return CudaStopwatch(device) if device.type == "cuda" else HostStopwatch(clock)


_WAITED_S = 20e-6
"""A message that was there already is told in less."""


class LinkTimes:
    """When this rank's messages to other replicas left, and when those that it waited for came; nothing before `begin`.

    Clocks of different machines differ, by hours or by nothing. What is compared are times since the ranks last left a sum
    over all of them together, which every iteration has: they differ by as much as that sum's last message takes.

    Attributes:
        sent_s, arrived_s: by the other rank.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._since_s: float | None = None
        self.sent_s: dict[int, float] = {}
        self.arrived_s: dict[int, float] = {}

    def begin(self) -> None:
        """All ranks have just left a sum together."""
        self._since_s = self._clock.now_s()
        self.sent_s.clear()
        self.arrived_s.clear()

    @property
    def is_watched(self) -> bool:
        """Whether anything is recorded."""
        return self._since_s is not None

    def sends(self, peer: int) -> None:
        """A message to `peer` leaves now."""
        if self._since_s is not None:
            self.sent_s[peer] = self._clock.now_s() - self._since_s

    def wait(self, request: AbstractRequest, peer: int) -> None:
        """Wait for the message of `peer`."""
        if self._since_s is None:
            request.wait()
            return
        self.arrived_s.pop(peer, None)
        began_s = self._clock.now_s()
        request.wait()
        now_s = self._clock.now_s()
        if now_s - began_s >= _WAITED_S:
            self.arrived_s[peer] = now_s - self._since_s
