"""What a sum over ranks costs, in closed form: the schedules of `tatami.tiling.traffic` without unrolling them.

Planners price thousands of layouts of thousands of processors. That these are the prices of the schedules is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

from tatami.cluster import Link
from tatami.collective.direct import sends_whole


@dataclass(frozen=True, kw_only=True)
class SumSize:
    """What one rank has of a sum.

    Attributes:
        rounds: one after the other; a round waits for the slowest message.
        share: of the vector's bytes that a rank sends, and receives as much, one message after the other.
        messages: that it sends, and receives as many.
    """

    rounds: int
    share: float
    messages: int

    def seconds(self, size_bytes: float, *, link: Link, message_s: float, copy_bytes_per_s: float) -> float:
        """Between processors like this, over links like this.

        Each message costs a processor its time, sent or received. It copies bytes both ways, while the wire carries others.
        """
        wire_s = self.rounds * link.latency_s + self.share * size_bytes / link.bandwidth_bytes_per_s
        return 2 * self.messages * message_s + max(wire_s, 2 * self.share * size_bytes / copy_bytes_per_s)


def sum_size(algorithm: str, *, members: int, size: float, element_bytes: int) -> SumSize:
    """Messages and bytes of a sum of `size` elements over `members` ranks.

    Args:
        algorithm: as `tatami.tiling.traffic.sum_algorithm` says; a native sum counts as halving and doubling.
    """
    k = members
    if k == 1 or not size:
        return SumSize(rounds=0, share=0.0, messages=0)
    if algorithm == "direct":
        if sends_whole(k, size, element_bytes=element_bytes):
            return SumSize(rounds=1, share=k - 1, messages=k - 1)
        return SumSize(rounds=2, share=2 * (k - 1) / k, messages=2 * (k - 1))
    rounds = 2 * (k - 1).bit_length()
    return SumSize(rounds=rounds, share=2 * (k - 1) / k, messages=rounds)
