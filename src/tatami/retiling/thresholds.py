"""When a sum of samples is an alarm: the constants of the sums, from the rate of false alarms that is wanted.

Normal noise is told by Siegmund's approximation of the mean time between false alarms, (exp(2 k b) - 2 k b - 1) / (2 k^2) with
b = h + 1.166 (Siegmund: Sequential Analysis, 1985, equation 2.57). Stalls are not normal: where one iteration in a hundred
takes three times as long, a rule that answers to n such samples in a row also answers to n stalls in a row, and there are
`OUTLIER_SHARE` ** n of these for each series and iteration. That is a bound for every rule, and it sets n: samples are clipped
so that n - 1 of them cannot reach h, however long they are. What takes more than `FAR` times as long is more often a stall
than a slower machine, so that one more of these is needed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

FALSE_ALARMS = 1e-5
"""False alarms of all series together, for each iteration: one in 100,000."""
OUTLIER_SHARE = 0.01
FAR = 2.0
"""From this many times the level on, a sample may as well be a stall."""
_FAST, _SLOW = 1.5, 0.5
_UNSURE = 1.25
_NORMAL_SHARE = 0.1
"""Fraction of the false alarms that normal noise may cause in either pair of sums; stalls have the rest."""


@dataclass(frozen=True, kw_only=True)
class Sums:
    """The constants of a pair of CUSUMs, in units of the noise; samples beyond `FAR` are clipped at `far_clip`."""

    k: float
    h: float
    clip: float
    far_clip: float


def sums_for(num_series: int, *, false_alarms: float = FALSE_ALARMS) -> tuple[Sums, Sums]:
    """The fast and the slow sums for so many series that are watched together."""
    # One stall for each clipped sample; so many in a row, and not fewer, make an alarm.
    in_a_row = max(2, math.ceil(math.log(false_alarms / num_series) / math.log(OUTLIER_SHARE) - 1e-6))
    samples = 2 * num_series / (_NORMAL_SHARE * false_alarms)
    # Inverts the approximation, whose exponential is all but everything; rounded, so that all machines have the same.
    fast_h, slow_h = (round(math.log(2 * k * k * samples) / (2 * k) - 1.166, 3) for k in (_FAST, _SLOW))
    # A quarter of a sample is left for those that are not quite at the clip.
    clip, far_clip = (round(_FAST + fast_h / (count - 0.25), 3) for count in (in_a_row, in_a_row + 1))
    return (
        Sums(k=_FAST, h=fast_h, clip=clip, far_clip=far_clip),
        # The level is not known exactly, which small k feel.
        Sums(k=_SLOW, h=round(_UNSURE * slow_h, 3), clip=clip, far_clip=far_clip),
    )
