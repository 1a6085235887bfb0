"""Contestants that all ranks run together: how often each is repeated, and the times of the slowest rank."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from tatami.bench.interleaved import Contestant, interleaved
from tatami.comm.base import AbstractCommunicator

MOST_REPEATS = 20_000
CALIBRATIONS = 4


def measured(
    contestants: dict[str, Contestant], comm: AbstractCommunicator, *, rounds: int, seconds: float
) -> dict[str, dict[str, float]]:
    """`median_s`, `mean_s` and `spread` of each contestant, of the slowest rank in each round. Collective.

    Each is repeated so often that one timing takes about `seconds`: a fast one more often than a slow one.
    """
    repeats = {name: _repeats(run, comm, seconds=seconds) for name, run in contestants.items()}
    timed = interleaved(contestants, rounds=rounds, repeats=repeats, warm=True, before=comm.barrier)
    everywhere = comm.allgather_object({name: each.seconds for name, each in timed.items()})
    result = {}
    for name in contestants:
        slowest = [max(each) for each in zip(*(seconds[name] for seconds in everywhere), strict=True)]
        median_s = statistics.median(slowest)
        spread = (max(slowest) - min(slowest)) / median_s
        result[name] = {"median_s": median_s, "mean_s": statistics.fmean(slowest), "spread": spread}
    return result


def _repeats(run: Contestant, comm: AbstractCommunicator, *, seconds: float) -> int:
    """How many times take about `seconds`, so that ranks that leave a barrier one after the other do not count. Collective."""
    repeats = 1
    for _ in range(CALIBRATIONS):
        fastest_s = min(interleaved({"": run}, rounds=2, repeats=repeats, before=comm.barrier)[""].seconds)
        taken_s = max(comm.allgather_object(fastest_s * repeats))
        if taken_s >= seconds / 2:
            break
        repeats = min(MOST_REPEATS, max(2 * repeats, round(repeats * seconds / taken_s)))
    return repeats


def message_record(comm: AbstractCommunicator, timed: dict[str, float], *, size_bytes: int) -> dict[str, float]:
    """What a benchmark's line says of messages of `size_bytes` among the ranks of `comm`, which took `timed`."""
    return {
        "ranks": comm.size,
        "hosts": len(set(comm.hosts)),
        "size_bytes": size_bytes,
        **timed,
        "bandwidth_bytes_per_s": size_bytes / timed["median_s"],
    }


def times(run: Callable[[], object]) -> Contestant:
    """`run`, so many times."""

    def act(times: int) -> None:
        for _ in range(times):
            run()

    return act
