"""What the software of a rank adds to what its wires take."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tatami.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Fragment:
    """Messages of one size, as they were measured.

    Attributes:
        size_bytes: of each.
        beyond_s: longer than latency and bandwidth say, where all ranks send and receive without a pause.
        stagger_s: so long after one message has begun may one begin that goes the other way between the same two ranks. MPI
            over TCP has one connection for both, and one thread that moves either one or the other; what fits into the
            sockets' buffers does not wait.

    Raises:
        InputError: a size that is not positive, or a time that is negative.
    """

    size_bytes: float
    beyond_s: float = 0.0
    stagger_s: float = 0.0

    def __post_init__(self) -> None:
        if not 0 < self.size_bytes < math.inf:
            raise InputError(f"a piece of the software is of messages of more than 0 bytes, not {self.size_bytes}")
        for name in ("beyond_s", "stagger_s"):
            if not 0 <= getattr(self, name) < math.inf:
                raise InputError(f"{name} of a piece must be a finite number of seconds >= 0, not {getattr(self, name)}")


@dataclass(frozen=True, kw_only=True)
class Software:
    """Costs of a rank's own; the defaults cost nothing, and leave latency and bandwidth alone.

    Attributes:
        message_s: the sender's, for each message of two sides; its messages of a round leave one after the other (LogP's o).
        put_s: the same for a put, which no receiver has to match.
        gap_s: the least time between two messages that one rank begins to send (LogP's g): what a message costs its
            processor where that does not add up with what the wires take.
        pieces: what messages of some sizes take more than latency and bandwidth say, by rising size; in between it is
            interpolated, from 0 for no bytes, and beyond the last it grows with the size.
        sum_bytes_per_s: at which what arrived is added to what is there.

    Raises:
        InputError: a time that is negative, or a rate that is not positive.
    """

    message_s: float = 0.0
    put_s: float = 0.0
    gap_s: float = 0.0
    pieces: tuple[Fragment, ...] = ()
    sum_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("message_s", "put_s", "gap_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} of the software must be a finite number of seconds >= 0, not {value}")
        if not self.sum_bytes_per_s > 0:
            raise InputError(f"sum_bytes_per_s of the software must be > 0, not {self.sum_bytes_per_s}")
        sizes = [piece.size_bytes for piece in self.pieces]
        if sizes != sorted(set(sizes)):
            raise InputError(f"pieces of the software must be of rising sizes, not of {sizes}")

    def beyond_s(self, size_bytes: float) -> float:
        """What a message of this size takes longer than its wires."""
        return self._between([(piece.size_bytes, piece.beyond_s) for piece in self.pieces], size_bytes)

    def stagger_s(self, size_bytes: float) -> float:
        """By how much a message of this size holds one up that goes the other way."""
        return self._between([(piece.size_bytes, piece.stagger_s) for piece in self.pieces], size_bytes)

    def without_stagger(self) -> Software:
        """The same where messages of two ways do not hold each other up."""
        return replace(self, pieces=tuple(replace(piece, stagger_s=0.0) for piece in self.pieces))

    @staticmethod
    def _between(points: list[tuple[float, float]], size_bytes: float) -> float:
        below = (0.0, 0.0)
        for point in points:
            if size_bytes <= point[0]:
                share = (size_bytes - below[0]) / (point[0] - below[0])
                return below[1] + share * (point[1] - below[1])
            below = point
        return below[1] * size_bytes / below[0] if below[0] else 0.0
