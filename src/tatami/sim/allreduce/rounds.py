"""One rank's part of a round: what it sends, what comes to it, and what it reads and writes in its host's memory."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass

from tatami.collective import Phase


@dataclass(frozen=True, kw_only=True)
class RankTransfers:
    """Bytes by peer; all that goes from one rank to another in a round is one transfer.

    Attributes:
        sends: to whom, how many bytes.
        receives: from whom.
        sum_bytes: of what arrives and must be added, also by accumulate: a processor does it.
        local: (from, to, bytes) of loads and stores, one after the other.
    """

    sends: dict[int, int]
    receives: dict[int, int]
    sum_bytes: int
    local: tuple[tuple[int, int, int], ...]

    @property
    def empty(self) -> bool:
        return not (self.sends or self.receives or self.local)


def part_of(phase: Phase, *, rank: int, round: int, element_bytes: int) -> RankTransfers:
    """What `rank` does in a round of a phase that is not native."""
    sends: dict[int, int] = defaultdict(int)
    receives: dict[int, int] = defaultdict(int)
    local: dict[tuple[int, int, bool], int] = defaultdict(int)
    summed = 0
    for step in phase.steps_of(rank, round=round):
        size_bytes = step.size * element_bytes
        if step.via.local:
            if step.issuer == rank:
                local[step.source, step.target, step.reduce] += size_bytes
        elif step.source == rank:
            sends[step.target] += size_bytes
        else:
            receives[step.source] += size_bytes
            summed += size_bytes if step.reduce else 0
    return RankTransfers(
        sends=dict(sends),
        receives=dict(receives),
        sum_bytes=summed,
        local=tuple((source, target, size_bytes) for (source, target, _), size_bytes in local.items()),
    )
