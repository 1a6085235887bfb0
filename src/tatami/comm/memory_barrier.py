"""Ranks that meet: by counters in the memory they share, or by empty messages."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence

import torch

from tatami.clock import Clock
from tatami.comm.base import AbstractCommunicator
from tatami.comm.wait import Waiting, WaitPolicy, wait_for

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")
"""An empty message, given and taken."""

POLLS = 400
"""Looks at a counter before the core is offered to others, where every rank has one: some 20 microseconds."""


def notices(comm: AbstractCommunicator, *, to: Sequence[int] = (), by: Sequence[int] = (), tag: int) -> None:
    """Send an empty message to each rank of `to`, and wait for one from each of `by`.

    Raises:
        CommTimeoutError: names a rank whose message did not come, or that did not take its own.
        RankDiedError: as the communicator.
    """
    requests = [comm.irecv(_NOTHING, rank, tag=tag) for rank in by]
    requests += [comm.isend(_NOTHING, rank, tag=tag) for rank in to]
    for request in requests:
        request.wait()


def meet(comm: AbstractCommunicator, ranks: Sequence[int], *, tag: int) -> None:
    """Return when all of `ranks` (this one included) have called it: log2(k) rounds of empty messages.

    Raises:
        CommTimeoutError, RankDiedError: as `notices`.
    """
    member, distance = ranks.index(comm.rank), 1
    while distance < len(ranks):
        to, by = ranks[(member + distance) % len(ranks)], ranks[(member - distance) % len(ranks)]
        notices(comm, to=[to], by=[by], tag=tag)
        distance *= 2


class CounterBarrier:
    """A barrier in shared memory: every rank counts its arrivals in a place of its own, and looks at the others'.

    No atomic operation is needed: a counter has one writer. Half a microsecond between two ranks that each have a core.
    """

    def __init__(
        self,
        counters: Sequence[memoryview],
        *,
        rank: int,
        policy: WaitPolicy,
        timeout_s: Callable[[], float],
        clock: Clock,
        visible: Callable[[], object],
        polls: int,
    ) -> None:
        """
        Args:
            counters: of every rank, one int64 each, 0 at the start.
            rank: this one.
            policy: how to wait.
            timeout_s: how long at most, asked at each wait.
            clock: for the wait.
            visible: makes what was written before visible to the other ranks, and theirs to this one: a memory fence.
            polls: how often to look before the core is offered to others.
        """
        self._mine = counters[rank]
        self._others = [counter for other, counter in enumerate(counters) if other != rank]
        self._counters = counters
        self._rank = rank
        self._policy = policy
        self._timeout_s = timeout_s
        self._clock = clock
        self._visible = visible
        self._polls = polls
        self._count = 0

    def wait(self) -> None:
        """Count this rank's arrival, and return when all have come as often.

        Raises:
            CommTimeoutError: names those who did not.
        """
        self._count = count = self._count + 1
        self._visible()
        self._mine[0] = count
        for other in self._others:
            if other[0] < count:
                self._await(other)
        self._visible()

    def _await(self, other: memoryview) -> None:
        count = self._count
        for _ in range(self._polls):
            if other[0] >= count:
                return
        timeout_s = self._timeout_s()
        wait_for(lambda: other[0] >= count, self._waiting, policy=self._policy, timeout_s=timeout_s, clock=self._clock)

    def _waiting(self) -> Waiting:
        missing = tuple(rank for rank, counter in enumerate(self._counters) if counter[0] < self._count)
        return Waiting(operation="shared barrier", rank=self._rank, size=len(self._counters), missing=missing)


def polls_before_yield(*, ranks_on_host: int) -> int:
    """`POLLS` where every rank has a core of its own; none where the one waited for may need this one's."""
    return POLLS if ranks_on_host <= len(os.sched_getaffinity(0)) else 0
