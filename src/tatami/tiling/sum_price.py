"""What a sum over ranks costs, in closed form: the schedules of `tatami.tiling.traffic` without unrolling them.

Planners price thousands of layouts of thousands of processors. That these are the prices of the schedules is tested.
"""

from __future__ import annotations

from dataclasses import dataclass

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

    def seconds(self, size_bytes: float, *, bandwidth_bytes_per_s: float, latency_s: float) -> float:
        """Over links like this."""
        return self.rounds * latency_s + self.share * size_bytes / bandwidth_bytes_per_s


def sum_size(algorithm: str, *, members: int, size: float, element_bytes: int) -> SumSize:
    """Of a sum of `size` elements over `members` ranks.

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
