"""Whether moving pays when it is unknown for how long: the ski rental problem.

A machine became slower; to stay costs so much an iteration, to move costs a price once. Moving as soon as the loss would
exceed the price costs at most twice what an oracle pays that knows how long the change lasts, and no rule without knowledge of
the future is better (Karlin, Manasse, Rudolph, Sleator: Competitive snoopy caching, Algorithmica 3, 1988). The oracle is asked
again at each change, from where the run then is.

What is known of the past may only make it better. A change that ended before it was worth a move has cost as much as an oracle
pays, and not twice that. What was saved so is in the bank, and is all that may be spent on a guess: where changes of this run
used to last, the move comes earlier by what is in the bank, and where they used to end soon, it comes later by as much. So the
whole course costs at most twice the oracle's, whatever the past led to expect.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

LEAST_PAST = 3
"""Changes that ended, before their lengths say something about the next."""


class Rental:
    """The account of one run. All in seconds.

    Attributes:
        loss_s: since the last change began, or the last move.
        bank_s: twice what an oracle would have paid for what is over, less what was paid; never negative.
    """

    def __init__(self) -> None:
        self.loss_s = 0.0
        self.bank_s = 0.0

    def lose(self, loss_s: float) -> None:
        """An iteration, or several, took so much longer than they would after a move."""
        self.loss_s += loss_s

    def limit_s(self, price_s: float, *, rate_s: float = 0.0, rest: float | None = None) -> float:
        """The loss that is borne before a price is paid.

        Args:
            price_s: of the move.
            rate_s: loss of an iteration.
            rest: for how many more iterations the change is expected to last; None: nothing is known.
        """
        if rest is None or not self.bank_s:
            return price_s
        return max(0.0, price_s - self.bank_s) if rest * rate_s > price_s else price_s + self.bank_s

    def due(self, price_s: float, *, rate_s: float, rest: float | None = None) -> bool:
        """Whether to move before the next iteration, which would cost `rate_s` more than after the move."""
        # A price of 10 s and 0.5 s lost an iteration: after 20 iterations 10 s are lost, and the move is made, 20 s in all,
        # twice what an oracle pays. If the change ends after 8 iterations, 4 s were lost, as with an oracle, and the bank has 4
        # s (2 * 4 - 4): the next change is borne for 6 s where changes used to last, and for 14 s where they used to end soon.
        return rate_s > 0 and self.loss_s + rate_s > self.limit_s(price_s, rate_s=rate_s, rest=rest)

    def moved(self, price_s: float, *, rate_s: float) -> None:
        """The price was paid, before an iteration that would have cost `rate_s`."""
        self._close(oracle_s=min(self.loss_s + rate_s, price_s), paid_s=self.loss_s + price_s)

    def ended(self, price_s: float) -> None:
        """The change is over, and its price was not paid."""
        self._close(oracle_s=min(self.loss_s, price_s), paid_s=self.loss_s)

    def _close(self, *, oracle_s: float, paid_s: float) -> None:
        # Below 0 only by what was lost before it was known: no rule can do anything about that, and none is to make up for it.
        self.bank_s = max(0.0, self.bank_s + 2 * oracle_s - paid_s)
        self.loss_s = 0.0


def expected_rest(lengths: Sequence[int], *, lasted: int) -> float | None:
    """Iterations that a change which has lasted so long still lasts, from the lengths of past ones; None: nothing is known."""
    if len(lengths) < LEAST_PAST:
        return None
    longer = [length - lasted for length in lengths if length > lasted]
    # Longer than all before it: as its like, it may well last as long again.
    return float(statistics.median(longer)) if longer else float(lasted) if lasted else math.inf
