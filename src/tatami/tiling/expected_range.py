"""The range of times in which nine of ten iterations are expected, where a plan predicts one time.

A prediction is off for two reasons: what its model leaves out, which mostly takes time (messages that wait for each other,
ranks that arrive late), and how far the speeds of the machines scatter, where a probe has measured it.
"""

from __future__ import annotations

from collections.abc import Sequence

from tatami.cluster import Processor
from tatami.tiling.compute import scatter, scatter_range

_FASTEST, _SLOWEST = 0.9, 1.2
"""Multiples of the predicted time. Of the 186 tilings in `benchmarks/results/evaluation-paced-*.jsonl`, from which they are,
90 % took between these times; of tilings and stages of other networks since then, see `docs/measured.md`."""


def expected_range_s(predicted_s: float, *, compute_s: float, processors: Sequence[Processor]) -> tuple[float, float]:
    """The times between which nine of ten iterations of a plan are expected, in seconds.

    It holds for speeds and links that are as the cluster has them: what they are not is in no prediction.

    Args:
        predicted_s: an iteration of the plan.
        compute_s: how much of it the slowest of its processors computes, on which all wait.
        processors: those that have work.
    """
    rest_s, one_s = predicted_s - compute_s, compute_s / (1 + scatter(processors))
    low, high = scatter_range(processors) or (0.0, 0.0)
    return _FASTEST * (rest_s + one_s * (1 + low)), _SLOWEST * (rest_s + one_s * (1 + high))
