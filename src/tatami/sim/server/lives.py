"""When machines break: exponential, from a seed, each machine for itself."""

from __future__ import annotations

import hashlib
import math

_SCALE = 2.0**-53


def life_s(mtbf_s: float, *, seed: int, kind: str, number: int, generation: int) -> float:
    """Seconds until a machine breaks, exponentially distributed with mean `mtbf_s`.

    It is a function of its arguments: the same on every machine and in every order of asking, so that a run repeats to the last
    digit, and two recoveries compared with one seed see the same first failures.

    Args:
        seed: of the run.
        kind: what it is, as "worker".
        number: which of them.
        generation: 0 for the first in this place, 1 for who replaced it, ...
    """
    name = f"{kind}/{number}/{generation}/{seed}".encode()
    word = int.from_bytes(hashlib.blake2b(name, digest_size=8).digest(), "little") >> 11
    return -mtbf_s * math.log((word + 0.5) * _SCALE)
