"""The smallest pieces of a schedule: a step, and the group of ranks it belongs to. `schedule` says what they mean together."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import Enum


class Via(Enum):
    """How elements get from a step's source to its target."""

    MESSAGE = "message"
    PUT = "put"
    LOAD = "load"
    STORE = "store"

    @property
    def local(self) -> bool:
        """Whether source and target must share a window in one host's memory."""
        return self in (Via.LOAD, Via.STORE)


class Sync(Enum):
    """What opens and closes the rounds of a phase.

    * ARRIVAL: messages carry it: a rank's round ends when its own sends and receives are done. For MESSAGE and for natives.
    * FENCE: all ranks of the group meet before the first round and after every round (R rounds, R + 1 fences). For PUT.
    * PSCW: post-start-complete-wait with the round's own peers: a source waits until its target has entered the round, a
      target until its sources have completed. For PUT.
    * LOCK: the group meets once, before the first round; then a source locks, puts, flushes and notifies its target (one
      empty message), and a target's round ends when all its notices are there. Nothing keeps a fast source from
      writing while its target is some rounds behind, so an element may not be written after an earlier round
      of the phase has touched it: `verify` checks that. For PUT.
    * BARRIER: as FENCE, between the ranks of one host, with memory made visible. For LOAD and STORE.
    """

    ARRIVAL = "arrival"
    FENCE = "fence"
    PSCW = "pscw"
    LOCK = "lock"
    BARRIER = "barrier"

    @property
    def one_sided(self) -> bool:
        """Whether it synchronises puts."""
        return self in (Sync.FENCE, Sync.PSCW, Sync.LOCK)


class Role(Enum):
    """What a phase has achieved, in each of its groups, when it ends."""

    REDUCE_SCATTER = "reduce-scatter"
    ALL_REDUCE = "all-reduce"
    ALL_GATHER = "all-gather"


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Elements `start .. stop` of `source`'s vector go to the same elements of `target`'s.

    Attributes:
        source: whose elements are read.
        target: whose elements are written.
        start: the first element.
        stop: one after the last.
        reduce: True: reduced into what the target has there; False: copied over it.
        via: how.
    """

    source: int
    target: int
    start: int
    stop: int
    reduce: bool
    via: Via

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    @property
    def issuer(self) -> int:
        """The rank that acts: the target of a load, the source of everything else (a message needs its target to receive)."""
        return self.target if self.via is Via.LOAD else self.source

    def __str__(self) -> str:
        verb = "reduced into" if self.reduce else "copied to"
        return f"elements {self.start}..{self.stop} of rank {self.source} {verb} rank {self.target} (by {self.via.value})"


def sums_of(steps: Iterable[Step], *, rank: int) -> dict[tuple[int, int], tuple[int, ...]]:
    """What `rank` adds up at the end of a round of messages.

    Returns:
        For each range (start, stop) of elements, the ranks whose contributions are added, in that order, `rank` among them.
    """
    found: dict[tuple[int, int], list[int]] = {}
    for step in steps:
        if step.target == rank and step.reduce and step.via is Via.MESSAGE:
            found.setdefault((step.start, step.stop), [rank]).append(step.source)
    return {span: tuple(sorted(ranks)) for span, ranks in found.items()}


@dataclass(frozen=True, kw_only=True)
class RankGroup:
    """Ranks that together work on elements `start .. stop`; member i is `ranks[i]`."""

    ranks: tuple[int, ...]
    start: int
    stop: int

    @property
    def members(self) -> int:
        """How many ranks."""
        return len(self.ranks)

    @property
    def size(self) -> int:
        """Elements."""
        return self.stop - self.start

    def cut(self, index: int) -> int:
        """Where part `index` begins, and the one before it ends."""
        return self.start + self.size * index // len(self.ranks)

    def part(self, index: int) -> tuple[int, int]:
        """(start, stop) of part `index`."""
        return self.cut(index), self.cut(index + 1)

    def transfer(self, *, source: int, target: int, first: int, num_parts: int = 1, reduce: bool, via: Via) -> Iterator[Step]:
        """`num_parts` consecutive parts from part `first`, around the end, from member `source` to member `target`.

        One step, two where they run around the end; none that is empty.
        """
        end = first + num_parts
        pieces = [(first, min(end, self.members)), (0, max(0, end - self.members))]
        for low, high in pieces:
            start, stop = self.cut(low), self.cut(high)
            if start < stop:
                yield Step(source=self.ranks[source], target=self.ranks[target], start=start, stop=stop, reduce=reduce, via=via)
