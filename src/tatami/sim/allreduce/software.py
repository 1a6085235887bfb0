"""What the software of a rank adds to what its wires take."""

from __future__ import annotations

import math
from dataclasses import dataclass

from tatami.errors import InputError


@dataclass(frozen=True, kw_only=True)
class Software:
    """Costs of a rank's own; the defaults cost nothing, and leave latency and bandwidth alone.

    Attributes:
        message_s: the sender's, for each message of two sides; its messages of a round leave one after the other (LogP's o).
        put_s: the same for a put, which no receiver has to match.
        sum_bytes_per_s: at which what arrived is added to what is there.

    Raises:
        InputError: a time that is negative, or a rate that is not positive.
    """

    message_s: float = 0.0
    put_s: float = 0.0
    sum_bytes_per_s: float = math.inf

    def __post_init__(self) -> None:
        for name in ("message_s", "put_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise InputError(f"{name} of the software must be a finite number of seconds >= 0, not {value}")
        if not self.sum_bytes_per_s > 0:
            raise InputError(f"sum_bytes_per_s of the software must be > 0, not {self.sum_bytes_per_s}")
