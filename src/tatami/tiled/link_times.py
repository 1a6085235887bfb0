"""When this rank's messages to other columns left, and when those that it waited for came.

Clocks of different machines differ, by hours or by nothing. What is compared are times since the ranks last left a sum over all
of them together, which every iteration has: they differ by as much as that sum's last message takes.
"""

from __future__ import annotations

from tatami.clock import Clock
from tatami.comm.base import AbstractRequest

_WAITED_S = 20e-6
"""A message that was there already is told in less."""


class LinkTimes:
    """Of one rank. Nothing is measured before `begin`.

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
