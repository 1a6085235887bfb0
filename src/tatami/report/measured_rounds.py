"""Parallel efficiency that can be believed: gamma = work / (iteration x sum of the ranks' speeds), measured in turn.

A rank's speed is the rate at which it does the whole network's work alone. Measured at another moment it is no denominator:
on a shared machine a rank takes 2 s now and 3 s later, and gamma comes out as anything, 1.5 too. So the ranks work alone
between the iterations, in the same job and all at once, at least five times; each round has its own gamma, and the median
counts. What comes out above 1 is an error of the method, and is not published.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import fsum
from statistics import median

from tatami.errors import InputError

LEAST_ROUNDS = 5
MOST_GAMMA = 1.02
"""What rounding and clocks excuse."""


@dataclass(frozen=True, kw_only=True)
class EfficiencyRound:
    """One round of a measurement: some iterations of all ranks together, and right after them every rank alone.

    Attributes:
        iteration_s: seconds of an iteration of all ranks together.
        alone_s: of every rank, for the same work alone, all ranks at once.
        compute_s: of every rank, what it computed of `iteration_s`; empty where that was not measured.
    """

    iteration_s: float
    alone_s: tuple[float, ...]
    compute_s: tuple[float, ...] = ()

    def __post_init__(self) -> None:
        if not (self.iteration_s > 0 and self.alone_s and min(self.alone_s) > 0):
            raise InputError(f"a round of an efficiency needs times > 0, not {self.iteration_s} s and {self.alone_s} s alone")
        if self.compute_s and len(self.compute_s) != len(self.alone_s):
            raise InputError(
                f"{len(self.compute_s)} ranks computed and {len(self.alone_s)} worked alone; they must be the same"
            )

    @property
    def gamma(self) -> float:
        """What the ranks did together over what they do alone in the same time."""
        return 1 / (self.iteration_s * fsum(1 / each for each in self.alone_s))

    @property
    def computing(self) -> float | None:
        """The share of the time in which ranks computed, weighted by their speeds: a check of gamma."""
        if not self.compute_s:
            return None
        weights = [1 / each for each in self.alone_s]
        return fsum(w * c for w, c in zip(weights, self.compute_s, strict=True)) / (self.iteration_s * fsum(weights))


@dataclass(frozen=True, kw_only=True)
class Efficiency:
    """The result of all rounds.

    Attributes:
        gamma: the median.
        spread: (largest - smallest) / median.
        computing: the median share of the time in which ranks computed; None where it was not measured.
        rounds: how many there were.
    """

    gamma: float
    spread: float
    computing: float | None
    rounds: int

    @property
    def problem(self) -> str | None:
        """Why this figure must not be published; None where it may be."""
        if self.rounds < LEAST_ROUNDS:
            return f"an efficiency needs at least {LEAST_ROUNDS} rounds, not {self.rounds}"
        if self.gamma > MOST_GAMMA:
            return (
                f"an efficiency of {self.gamma:.2f} cannot be: the ranks were slower alone than together. Other work on this "
                "machine disturbs the measurement; measure again when it is quiet"
            )
        return None

    @property
    def cell(self) -> str:
        """For tables: the median and its spread; "-" where there is a problem."""
        return "-" if self.problem else f"{100 * self.gamma:.0f} % ±{100 * self.spread:.0f} %"


def efficiency(rounds: Sequence[EfficiencyRound]) -> Efficiency:
    """The efficiency of rounds that were measured in turn.

    Raises:
        InputError: there is no round.
    """
    if not rounds:
        raise InputError("an efficiency needs rounds of iterations, and of work alone between them")
    gammas = [each.gamma for each in rounds]
    shares = [each.computing for each in rounds if each.computing is not None]
    return Efficiency(
        gamma=median(gammas),
        spread=(max(gammas) - min(gammas)) / median(gammas),
        computing=median(shares) if shares else None,
        rounds=len(rounds),
    )
