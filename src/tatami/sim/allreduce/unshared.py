"""A schedule of messages that share no link, carried out in one pass: when a rank is done follows from when ranks began.

The times are those of `Replay`, which plays every message as an event: for a hundred thousand messages that takes seconds, and
this milliseconds. Each message begins when both its ends have come to the round, and takes what its link says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from tatami.cluster import Link, Processor
from tatami.collective import Schedule, Sync
from tatami.sim.allreduce.rounds import part_of
from tatami.sim.allreduce.software import Software

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class _MessageRound:
    """One round: (messages,) arrays of sources, targets, bytes, and which message of its source each is, from 1 on.

    And of all ranks: how many they send and receive, how many bytes that is, and how many of them are added.
    """

    sources: Ints
    targets: Ints
    sizes_bytes: Floats
    turns: Floats
    num_sends: Ints
    num_receives: Ints
    both_bytes: Floats
    sum_bytes: Floats


@dataclass(frozen=True, kw_only=True, eq=False)
class MessageRounds:
    """All rounds of a schedule, and the bytes of all messages; made by `rounds_of`."""

    rounds: tuple[_MessageRound, ...]
    size_bytes: int

    def done_s(self, begin_s: Floats, *, link: Link, software: Software, processors: Sequence[Processor]) -> Floats:
        """When each rank has everything.

        Args:
            begin_s: (ranks,), when each begins.
            link: that each message has to itself.
            software: what ranks add; without `gap_s` and pieces.
            processors: of each rank, for what messages cost it.
        """
        now_s = begin_s
        message_s = np.array([each.message_s for each in processors])
        copy_s = np.array([1 / each.copy_bytes_per_s for each in processors])
        for part in self.rounds:
            left_s = now_s[part.sources] + part.turns * (software.message_s + message_s[part.sources])
            there_s = np.maximum(left_s, now_s[part.targets]) + link.latency_s + part.sizes_bytes / link.bandwidth_bytes_per_s
            last_s = now_s.copy()
            np.maximum.at(last_s, part.sources, there_s)
            np.maximum.at(last_s, part.targets, there_s)
            copied_s = now_s + part.num_sends * message_s + part.both_bytes * copy_s
            last_s += (
                part.sum_bytes / software.sum_bytes_per_s + part.num_receives * message_s + np.maximum(0, copied_s - last_s)
            )
            now_s = last_s
        return now_s


def rounds_of(schedule: Schedule, *, element_bytes: int) -> MessageRounds | None:
    """The rounds of a schedule without native phases; None where it has other things than messages."""
    found, ranks = [], range(schedule.ranks)
    if any(phase.sync is not Sync.ARRIVAL for phase in schedule.phases):
        return None
    for phase in schedule.phases:
        for round_ in range(phase.num_rounds):
            parts = [part_of(phase, rank=rank, round=round_, element_bytes=element_bytes) for rank in ranks]
            messages = [
                (source, target, size_bytes, turn)
                for source, part in enumerate(parts)
                for turn, (target, size_bytes) in enumerate(part.sends.items(), 1)
            ]
            if not messages:
                continue
            sources, targets, sizes_bytes, turns = map(np.array, zip(*messages, strict=True))
            found.append(
                _MessageRound(
                    sources=sources,
                    targets=targets,
                    sizes_bytes=np.maximum(sizes_bytes, 1.0),
                    turns=turns.astype(float),
                    num_sends=np.array([len(part.sends) for part in parts]),
                    num_receives=np.array([len(part.receives) for part in parts]),
                    both_bytes=np.array([float(sum(part.sends.values()) + sum(part.receives.values())) for part in parts]),
                    sum_bytes=np.array([float(part.sum_bytes) for part in parts]),
                )
            )
    return MessageRounds(rounds=tuple(found), size_bytes=int(sum(part.sizes_bytes.sum() for part in found)))
