"""Who waits for whom: what each rank reports of itself, and the words for ranks that disagree."""

from __future__ import annotations

from collections import deque

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
"""So many collectives are remembered with their lines, to name the one that a message that nobody took belongs to."""


class PeerReports:
    """What this rank knows of the others.

    Attributes:
        reports: the last report of each rank; empty once it waits no longer.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.rank = rank
        self.size = size
        self.reports: dict[int, str] = {}
        self._history: deque[tuple[str, bytes]] = deque(maxlen=HISTORY)
        self._num_collectives = 0
        self._passes: dict[int, tuple[int, int]] = {}

    def begin_collective(self, name: str, location: bytes) -> int:
        """Note a collective; returns its number."""
        self._history.append((name, location))
        self._num_collectives += 1
        return self._num_collectives - 1

    def problem_with(self, peer: int, head: Head, *, their_location: bytes) -> str | None:
        """Why a message of a collective is one that nobody will take."""
        behind = self._num_collectives - head.number
        if behind < 1 or behind > len(self._history):
            return None
        name, location = self._history[-behind]
        theirs = OPERATIONS[head.operation]
        if theirs == name:
            return None
        return self.disagreement(peer, theirs, their_location, name, location)

    def disagreement(self, peer: int, theirs: str, their_location: bytes, name: str, location: bytes) -> str:
        """Two ranks in different collectives."""
        return (
            f"rank {peer} calls {theirs} at {their_location.decode()} where rank {self.rank} calls {name} at "
            f"{location.decode()}; all ranks must call the same collectives in the same order"
        )

    def collective_problem(
        self,
        peer: int,
        head: Head,
        *,
        their_location: bytes,
        theirs: Packed,
        name: str,
        root: int,
        location: bytes,
        mine: Packed | None,
        same_shapes: bool,
    ) -> str | None:
        """Why what a peer gives is not part of the collective `name` here; `mine` is what it must look like, where it must."""
        operation = OPERATIONS[head.operation]
        if operation != name:
            return self.disagreement(peer, operation, their_location, name, location)
        agree = mine is None or mine.wire == theirs.wire
        if head.tag == root and agree:
            return None
        where = f"rank {peer} at {their_location.decode()} and rank {self.rank} at {location.decode()}"
        if head.tag != root:
            return f"{name}: {where} name different roots: {head.tag} and {root}"
        assert mine is not None
        if skeleton(mine.spec, shapes=same_shapes) == skeleton(theirs.spec, shapes=same_shapes):
            return None
        what = "shapes, dtypes or structures" if same_shapes else "structures"
        return f"{name}: {where} give different {what}: {describe(theirs.spec)} and {describe(mine.spec)}"

    def pass_problem(
        self, peer: int, head: Head, *, their_location: bytes, chain: int, name: str, location: bytes
    ) -> str | None:
        """Why a message of a peer's forward pass `head.chain` must not be taken in this rank's forward pass `chain`."""
        mine, theirs = self._passes.get(peer, (-1, -1))
        if (mine == chain) == (theirs == head.chain):
            self._passes[peer] = (chain, head.chain)
            return None
        edge = f"{name} on rank {self.rank} at {location.decode()} gets what rank {peer} sent at {their_location.decode()}"
        late, early = (self.rank, peer) if mine == chain else (peer, self.rank)
        return (
            f"{edge}, but rank {early} has run backward since their last message and rank {late} has not: either a message was "
            f"sent that was not received before backward, or rank {late} did not run backward. A rank without a loss calls "
            "tatami.functions.backward()"
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
