"""A barrier: ranks tell each other by dissemination that they are there, in ceil(log2 k) rounds of empty messages."""

from __future__ import annotations

from collections.abc import Sequence

from tatami.sim.stage import Stage, Then

_EMPTY_BYTES = 1
"""SimGrid's transfers have at least one."""


class Meeting:
    """One barrier of the ranks on `hosts`; in round t member i tells member i + 2^t (Hensgen, Finkel, Manber 1988)."""

    def __init__(self, stage: Stage, hosts: Sequence[int]) -> None:
        self._stage = stage
        self._hosts = hosts
        self._num_rounds = (len(hosts) - 1).bit_length()
        self._heard: list[set[int]] = [set() for _ in hosts]
        self._at: list[int | None] = [None] * len(hosts)
        self._then: dict[int, Then] = {}

    def enter(self, member: int, then: Then) -> None:
        """`member` is there; `then` when it knows that all are."""
        self._then[member] = then
        self._go_on(member, 0)

    def _go_on(self, member: int, round_: int) -> None:
        while True:
            self._at[member] = round_
            if round_ == self._num_rounds:
                self._then.pop(member)()
                return
            self._tell((member + (1 << round_)) % len(self._hosts), member, round_)
            if round_ not in self._heard[member]:
                return
            round_ += 1

    def _tell(self, target: int, member: int, round_: int) -> None:
        def heard() -> None:
            self._heard[target].add(round_)
            if self._at[target] == round_:
                self._go_on(target, round_ + 1)

        self._stage.send(self._hosts[member], self._hosts[target], size_bytes=_EMPTY_BYTES, then=heard)
