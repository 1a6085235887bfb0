"""Time contestants in turn, so that a machine whose speed drifts is as unfair to one as to the other."""

from __future__ import annotations

import os
import platform
import statistics
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed

from tatami.clock import Clock, SystemClock
from tatami.comm.base import AbstractCommunicator
from tatami.comm.tuning import cpu_model

Contestant = Callable[[int], None]
"""Does its work so many times."""


@dataclass(frozen=True, kw_only=True)
class Timed:
    """What one contestant took.

    Attributes:
        seconds: of one time, in every round.
    """

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> float:
        """(slowest - fastest round) / median."""
        return (max(self.seconds) - min(self.seconds)) / self.median_s


def interleaved(
    contestants: Mapping[str, Contestant],
    *,
    rounds: int,
    repeats: int | Mapping[str, int],
    before: Callable[[], None] = lambda: None,
    warm: bool = False,
    clock: Clock | None = None,
) -> dict[str, Timed]:
    """Run every contestant `repeats` times in each of `rounds` rounds, in turn; one more round, first, is not counted.

    Args:
        contestants: by name.
        rounds: to take the median of.
        repeats: inside one timing; by name, where a fast one is to be repeated more often than a slow one.
        before: called before each timing: a barrier, where several ranks take part.
        warm: run each once more before each timing, uncounted, so that its memory is in the caches, as in a loop of its own.
        clock: for tests.
    """
    clock = clock or SystemClock()
    times = repeats if isinstance(repeats, Mapping) else dict.fromkeys(contestants, repeats)
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for number in range(rounds + 1):
        for name, run in contestants.items():
            if warm:
                run(1)
            before()
            start_s = clock.now_s()
            run(times[name])
            if number > 0:
                seconds[name].append((clock.now_s() - start_s) / times[name])
    return {name: Timed(seconds=tuple(values)) for name, values in seconds.items()}


def machine() -> dict[str, object]:
    """What the figures were measured on."""
    return {
        "cpu": cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


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


def start_gloo(comm: AbstractCommunicator) -> None:
    """A gloo process group over the ranks of `comm`, which are all on this machine: no other one can reach it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = store_of_one_host(comm)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def store_of_one_host(comm: AbstractCommunicator) -> Any:
    """Where the ranks of one machine find each other: a file, for a `TCPStore` listens to all other machines, too."""
    place = None
    if comm.rank == 0:
        handle, place = tempfile.mkstemp(prefix="tatami-store-")
        os.close(handle)
    distributed: Any = torch.distributed  # its stubs leave out internal names
    return distributed.FileStore(comm.bcast_object(place), comm.size)
