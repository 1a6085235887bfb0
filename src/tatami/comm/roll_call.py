"""Who is there: after a wait that ended without its message, the rank asks all others what they do, and says who is silent.

A collective of MPI cannot tell who has not come, and the one that did not is often waiting for another rank: rank 0 waits for
rank 1, which waits for rank 2, which was stopped. So ranks that wait for long answer questions, each by what it waits for
itself; one that computes, is stopped or has died does not answer, and of those on its own machine a rank knows which it is.
"""

from __future__ import annotations

import os
import socket
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

SHORTEST_S, LONGEST_S = 1.0, 5.0
"""How long answers are waited for: a tenth of the time that was waited before, within these bounds."""
_NAMED = 8
"""So many ranks are named; a list of a thousand numbers would not be read."""


@dataclass(frozen=True, kw_only=True)
class ProcessPlace:
    """Where a rank's process is.

    Attributes:
        host: as its machine calls itself.
        kernel: what only processes have in common that see one another: the kernel's start and the name space of numbers.
        pid: its number there.
    """

    host: str
    kernel: str
    pid: int

    @classmethod
    def here(cls) -> Self:
        """Of this process."""
        try:
            boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
            kernel = f"{boot} {os.readlink('/proc/self/ns/pid')}"
        except OSError:
            kernel = ""
        return cls(host=socket.gethostname(), kernel=kernel, pid=os.getpid())


class AbstractRollCall(ABC):
    """Questions and answers among all ranks of a job, on ways of their own.

    Attributes:
        places: of all ranks' processes.
    """

    def __init__(self, *, rank: int, places: Sequence[ProcessPlace]) -> None:
        self.rank = rank
        self.places = tuple(places)

    @abstractmethod
    def answer(self, doing: str) -> None:
        """Answer those who have asked, if there are any: this rank waits in `doing`. Returns at once."""

    @abstractmethod
    def ask(self, doing: str, *, patience_s: float) -> dict[int, str]:
        """What other ranks wait in, of those that answer; meanwhile this one answers, too."""

    def findings(self, doing: str, *, size: int, waited_s: float) -> str:
        """Sentences for the error of a wait in `doing` that ended after `waited_s` seconds; empty for a rank alone.

        Args:
            size: how many ranks that wait was among; where these are not all, numbers are of another communicator than its own.
        """
        if len(self.places) == 1:
            return ""
        said = self.ask(doing, patience_s=min(max(waited_s / 10, SHORTEST_S), LONGEST_S))
        text = describe_findings(said, rank=self.rank, places=self.places)
        return text if size == len(self.places) else f"Of all {len(self.places)} ranks of the job: {text}"


def describe_findings(said: Mapping[int, str], *, rank: int, places: Sequence[ProcessPlace]) -> str:
    """What is known of the ranks, the silent ones first; `said` is by whom, who asked is `rank`."""
    sentences = []
    silent = [other for other in range(len(places)) if other != rank and other not in said]
    for other in silent[:_NAMED]:
        sentences.append(
            f"Rank {other} (pid {places[other].pid} on {places[other].host}) {_silence_of(places[other], places[rank])}."
        )
    if len(silent) > _NAMED:
        sentences.append(f"{len(silent) - _NAMED} more do not answer.")
    doing: dict[str, list[int]] = {}
    for other in sorted(said):
        doing.setdefault(said[other].removesuffix(f" on rank {other} of {len(places)}"), []).append(other)
    for what, ranks in doing.items():
        sentences.append(f"{format_ranks(ranks).capitalize()} wait{'s' if len(ranks) == 1 else ''} in {what}.")
    return " ".join(sentences)


def format_ranks(ranks: Sequence[int]) -> str:
    """`rank 5`, or `ranks 5, 7`; not all of many."""
    if len(ranks) == 1:
        return f"rank {ranks[0]}"
    rest = f" and {len(ranks) - _NAMED} more" if len(ranks) > _NAMED else ""
    return f"ranks {', '.join(map(str, ranks[:_NAMED]))}{rest}"


def _silence_of(place: ProcessPlace, own: ProcessPlace) -> str:
    if not place.kernel or (place.host, place.kernel) != (own.host, own.kernel):
        return "does not answer: it computes, was stopped, has died, or cannot be reached"
    try:
        state = Path(f"/proc/{place.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[0]
    except OSError:
        return "has ended"
    if state in "ZX":
        return "has ended"
    if state in "Tt":
        return f"was stopped by a signal: `kill -CONT {place.pid}` lets it go on"
    return "is alive, but does not wait for other ranks: it computes, or waits for something else"
