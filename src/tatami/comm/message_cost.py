"""What messages cost the processors that send and receive them: CPU time, over each one's share of a core.

Waiting is left out: messages are posted, some time passes in which they travel, and then they are taken. So what is timed is
what a rank spends, not what it waits. All ranks do it at once, as they will in a run.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

from tatami.clock import Clock, SystemClock
from tatami.comm.base import AbstractCommunicator

_SMALL_BYTES, _LARGE_BYTES = 8, 8 * 1024
"""Both are sent at once and buffered; long ones would wait for their receivers."""
_BURST = 16
_TRAVEL_S = 0.05
_SPIN_S = 0.25
"""More than two periods of a container's quota."""


@dataclass(frozen=True, kw_only=True)
class MessageCost:
    """Of one rank.

    Attributes:
        message_s: seconds for each message sent, or received.
        copy_bytes_per_s: of the bytes in it; infinite where that cannot be told from none.
        core_share: what part of a core the rank had.
    """

    message_s: float
    copy_bytes_per_s: float
    core_share: float


def measure_message_costs(
    comm: AbstractCommunicator, *, repeats: int = 7, clock: Clock | None = None, cpu_s: Callable[[], float] = time.thread_time
) -> list[MessageCost]:
    """What a message costs every rank, the same list on all of them. Collective.

    Args:
        comm: the ranks; one alone has nothing to send.
        repeats: bursts to take the median of.
        clock: of the wall.
        cpu_s: the CPU time of this rank so far.
    """
    clock = clock or SystemClock()
    if comm.size == 1:
        return [MessageCost(message_s=0.0, copy_bytes_per_s=float("inf"), core_share=1.0)]
    comm.barrier()
    share = _core_share(clock=clock, cpu_s=cpu_s)
    small_s, large_s = (
        statistics.median(_burst_s(comm, size_bytes, clock=clock, cpu_s=cpu_s) for _ in range(repeats + 1))
        for size_bytes in (_SMALL_BYTES, _LARGE_BYTES)
    )
    byte_s = (large_s - small_s) / (_LARGE_BYTES - _SMALL_BYTES) / share
    mine = MessageCost(message_s=small_s / share, copy_bytes_per_s=1 / byte_s if byte_s > 0 else float("inf"), core_share=share)
    return list(comm.allgather_object(mine))


def _burst_s(comm: AbstractCommunicator, size_bytes: int, *, clock: Clock, cpu_s: Callable[[], float]) -> float:
    """CPU seconds of one message, sent or received, of a burst to the next rank and from the one before."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    values = [torch.zeros(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(_BURST)]
    rooms = [torch.empty(size_bytes, dtype=torch.uint8, device="cpu") for _ in range(_BURST)]
    comm.barrier()
    start_s = cpu_s()
    requests = [comm.irecv(room, before) for room in rooms] + [comm.isend(each, after) for each in values]
    spent_s = cpu_s() - start_s
    clock.sleep(_TRAVEL_S)
    start_s = cpu_s()
    for request in requests:
        request.wait()
    return (spent_s + cpu_s() - start_s) / (2 * _BURST)


def _core_share(*, clock: Clock, cpu_s: Callable[[], float]) -> float:
    """CPU seconds that a rank gets in a second in which it wants all."""
    start_s, start_cpu_s = clock.now_s(), cpu_s()
    while (spent_s := clock.now_s() - start_s) < _SPIN_S:
        pass  # The loop itself is the measurement: it wants a whole core, and CPU time says how much it got.
    return min(1.0, max(0.01, (cpu_s() - start_cpu_s) / spent_s))
