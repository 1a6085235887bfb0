"""Whether two-dimensional tiles are worth it: a rule of thumb, beside weighted data parallelism."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, sqrt

from tatami.tiling.plan import Plan

CLEAR_RHO, CLEAR_Q = 32.0, 0.5
"""From both on tiles pay clearly."""
_MUCH = 1.05


@dataclass(frozen=True, kw_only=True)
class Advice:
    """What to expect of tiles, in two numbers.

    Attributes:
        rho: N (n + l) m / (l s): weights that travel over outputs that travel, times the processors. For any network, the
            elements of all units' gradients over those that replicas sum.
        q: the weights' exchange over the computing, both of weighted data parallelism.
    """

    rho: float
    q: float

    @property
    def gain(self) -> float:
        """About how many times faster than weighted data parallelism: (1 + q) / (1 + 2 q / sqrt(rho)), at least 1."""
        return max(1.0, (1 + self.q) / (1 + 2 * self.q / sqrt(self.rho))) if self.rho else 1.0

    def sentence(self, predicted: float, *, has_replicas: bool = True) -> str:
        """What to do.

        Args:
            predicted: how many times faster than weighted data parallelism the best plan is predicted to be.
            has_replicas: whether processors share replicas in it, so that its tiles have two dimensions.
        """
        if not self.rho:
            return "Nothing in this network splits over units: it is laid in replicas of one processor each."
        numbers = f"rho = {self.rho:.3g} (weights over outputs), q = {self.q:.2g} (exchange over computing)"
        if self.rho >= CLEAR_RHO and self.q >= CLEAR_Q:
            return f"Use two-dimensional tiles: {numbers} promise {self.gain:.1f} x the speed of weighted data parallelism."
        rule = f"by the rule of thumb tiles pay where rho is at least {CLEAR_RHO:g} and q at least {CLEAR_Q:g}"
        if predicted >= _MUCH:
            gain = f"are predicted to be {predicted:.2f} x as fast as weighted data parallelism"
            if not has_replicas:
                return f"Fewer machines, or other shares of the samples, {gain}; {rule}: {numbers}."
            return f"Tiles {gain}, although {rule}: {numbers}."
        return f"Weighted data parallelism does about as well; {rule}: {numbers}."


def advise(weighted: Plan) -> Advice:
    """The rule of thumb for what `weighted`, a plan of weighted data parallelism, lays out."""
    workload = weighted.workload
    sums = workload.tensor_parallel_elements
    weights = len(weighted.layout.processors) * workload.gradient_elements
    rho = weights / sums if sums else (inf if weights else 0.0)
    return Advice(rho=rho, q=weighted.predicted.gradients / weighted.predicted.compute if weighted.predicted.compute else 0.0)
