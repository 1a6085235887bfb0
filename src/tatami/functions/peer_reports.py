"""Who waits for whom: what each rank reports of itself, and the words for ranks that disagree."""

from __future__ import annotations

from collections import deque

from tatami.functions.inbox import ReceivedMessage
from tatami.functions.message import Head
from tatami.functions.structure import Packed, describe, skeleton

OPERATIONS = (
    "send",
    "recv",
    "sendrecv",
    "bcast",
    "gather",
    "scatter",
    "allgather",
    "alltoall",
    "allreduce",
    "reduce",
    "reduce_scatter",
)
HISTORY = 1024
"""So many collectives are remembered with their lines, to name the one that an untaken message belongs to; so many passes."""


class PassPairs:
    """Which pass of a peer corresponds to which one of this rank: those that have exchanged a message."""

    def __init__(self) -> None:
        self._last = (-1, -1)
        self._theirs_of: dict[int, int] = {}
        self._mine_of: dict[int, int] = {}

    def knows_mine(self, mine: int) -> bool:
        """Whether pass `mine` of this rank has got a message from the peer."""
        return mine in self._theirs_of

    def agree(self, mine: int, theirs: int) -> bool:
        """Whether the two correspond, or may from now on."""
        pair = mine, theirs
        if pair == self._last:
            return True
        if self._theirs_of.get(mine, theirs) != theirs or self._mine_of.get(theirs, mine) != mine:
            return False
        self._last = pair
        self._theirs_of[mine], self._mine_of[theirs] = theirs, mine
        if len(self._theirs_of) > HISTORY:
            for known in (self._theirs_of, self._mine_of):
                del known[next(iter(known))]
        return True


class PeerReports:
    """What this rank knows of the others.

    Attributes:
        reports: the last report of each rank; empty once it waits no longer.
        passes: by rank, which of its passes corresponds to which one of this rank.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.reports: dict[int, str] = {}
        self._history: deque[tuple[str, int, bytes]] = deque(maxlen=HISTORY)
        self._num_collectives = 0
        self.passes = [PassPairs() for _ in range(size)]

    def begin_collective(self, name: str, root: int, location: bytes) -> int:
        """Note a collective; returns its number."""
        self._history.append((name, root, location))
        self._num_collectives += 1
        return self._num_collectives - 1

    def problem_with(self, peer: int, head: Head, *, their_location: bytes) -> str | None:
        """Why a message of a collective is one that will not be taken."""
        behind = self._num_collectives - head.number
        if behind < 1 or behind > len(self._history):
            return None
        return self._other_call(peer, head, their_location, *self._history[-behind])

    def _other_call(self, peer: int, head: Head, their_location: bytes, name: str, root: int, location: bytes) -> str | None:
        theirs = OPERATIONS[head.operation]
        if theirs != name:
            return self.disagreement(peer, theirs, their_location, name, location)
        if head.tag != root:
            sides = self._sides(peer, their_location, location)
            return f"{name}: {sides} name different roots: {head.tag} and {root}; all ranks must name the same root"
        return None

    def disagreement(self, peer: int, theirs: str, their_location: bytes, name: str, location: bytes) -> str:
        """Two ranks in different collectives."""
        return (
            f"rank {peer} calls {theirs} at {their_location.decode()} where rank {self.rank} calls {name} at "
            f"{location.decode()}; all ranks must call the same collectives in the same order"
        )

    def collective_problem(
        self, message: ReceivedMessage, *, name: str, root: int, location: bytes, mine: Packed | None, same_shapes: bool
    ) -> str | None:
        """Why what a peer gives is not part of the collective `name` here; `mine` is what it must look like, where it must."""
        peer, head = message.peer, message.head
        their_location, theirs = message.label.location, message.label.content
        problem = self._other_call(peer, head, their_location, name, root, location)
        if problem is not None or mine is None or mine.wire == theirs.wire:
            return problem
        where = self._sides(peer, their_location, location)
        if skeleton(mine.spec, shapes=same_shapes) == skeleton(theirs.spec, shapes=same_shapes):
            return None
        what = "shapes, dtypes or structures" if same_shapes else "structures"
        return f"{name}: {where} give different {what}: {describe(theirs.spec)} and {describe(mine.spec)}"

    def _sides(self, peer: int, their_location: bytes, location: bytes) -> str:
        return f"rank {peer} at {their_location.decode()} and rank {self.rank} at {location.decode()}"

    def pass_problem(self, peer: int, *, chain: int, their_location: bytes, name: str, location: bytes) -> str:
        """Why a message of another forward pass of a peer must not be taken in this rank's forward pass `chain`."""
        edge = f"{name} on rank {self.rank} at {location.decode()} gets what rank {peer} sent at {their_location.decode()}"
        late, early = (self.rank, peer) if self.passes[peer].knows_mine(chain) else (peer, self.rank)
        return (
            f"{edge}, but rank {early} has begun another forward pass since their last message and rank {late} has not. Either "
            f"a message was sent that was not received before backward; or rank {late} did not run backward (a rank without a "
            "loss calls tatami.functions.backward()); or the two do not have the same several passes in flight "
            "(tatami.functions.Pass)"
        )

    def diagnosis(self, own: str, waited_s: float) -> str:
        """All that is known, when a wait ended after `waited_s` seconds."""
        lines = [f"timed out after {waited_s:.3g} s: {own}"]
        for rank in range(self.size):
            if rank == self.rank:
                continue
            report = self.reports.get(rank)
            lines.append(report or f"rank {rank} does not wait in tatami.functions: it computes, has ended or has died")
        advice = (
            "Is every send received and every collective called by all ranks? Does every rank run backward, those without a "
            "loss by tatami.functions.backward()? Raise timeout_s if a rank is only slow."
        )
        return "\n  ".join([*lines, advice])
