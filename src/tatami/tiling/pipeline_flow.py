"""How micro-batches flow through pipeline stages: in which order each stage computes them, and how long that takes.

Each stage begins with some forward passes (`in_flight`), and then does a backward and a forward pass in turn. In a backward
pass it computes the gradient of its input first, which the stage in front waits for, and hands it over. The gradients of its
weights can come later: those of some micro-batches (`weights_left`) are left for when the stage would wait, and for the end.

With F_i the forward pass of one micro-batch on stage i, B_i what of its backward pass the stage in front waits for, W_i the
rest (t_i = F_i + B_i + W_i), and c_i one hand-over behind it, m micro-batches take

    T = max_i  [ sum_(j<i) (F_j + c_j) ]        until the first one is there
             + [ r_i - (n_i - 1) F_i ]+         what the stage stands still after its first forward passes
             + m max(t_i, c_i + c_(i-1))        computing, or the link of the stage in one direction, where that takes longer
             + [ sum_(j<i) (B_j + c_j) - (l_i + 1) W_i ]+      the way back of the last one, less what is computed meanwhile

where r_i = sum_(j>i) (F_j + B_j) + 2 sum_(j>=i) c_j is the time until the first gradient comes back, n_i the micro-batches in
flight and l_i those whose weights are left. Where few are in flight, n_i of them take r_i + t_i all the time. Plain
one-forward-one-backward is n_i = p - i, l_i = 0. Qi et al., Zero Bubble Pipeline Parallelism (ICLR 2024), have l_i = i for
equal stages (ZB-H1), and n_i = 2 (p - i) - 1 (ZB-H2); here both are as many as unequal stages and links need.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

BACKWARD = 2 / 3
"""The part of a stage's time that is its backward pass."""
_LONG = 0.3
"""Hand-overs of this part of the time between two micro-batches are long. Fitted on 200 simulated pipelines of 2 to 6 machines
(`tatami.sim.tiling.staged`): 3 take more than 2 % longer than the formula says, and 31 where stages keep only what hides a way
to and fro; of 200 others, over links that are not alike, none and 20."""
_BUSY = 0.5
"""Fraction of the time between two micro-batches: where a link carries something for longer, no weights are left, and no more
forward passes come first than hide the hand-overs. What comes early comes in bursts, for which such a link is too slow: up to
40 % longer in 358 simulated pipelines. All stages then go at the pace of the slowest."""
_ROUNDING = 1e-9

Floats = NDArray[np.float64]
Integers = NDArray[np.int64]


class PipelineFlow:
    """Many pipelines of the same number of stages p at once.

    Args:
        passes_s: (pipelines, p), t_i: forward and backward pass of one micro-batch.
        late_s: W_i, of the same shape; 0 for the first stage, for which no other one waits.
        behind_s: c_i, of the same shape; 0 for the last stage.
        micro_batches: m.
        again_s: the part of t_i, of the same shape, in which a stage recomputes activations, in its backward pass.
    """

    def __init__(
        self, passes_s: Floats, *, late_s: Floats, behind_s: Floats, micro_batches: int, again_s: Floats | float = 0.0
    ) -> None:
        self.passes_s, self.late_s, self.behind_s, self.micro_batches = passes_s, late_s, behind_s, micro_batches
        self._forward_s = (1 - BACKWARD) * (passes_s - again_s)
        self._early_s = BACKWARD * (passes_s - again_s) + again_s - late_s

    @property
    def num_stages(self) -> int:
        return int(self.passes_s.shape[1])

    @cached_property
    def links_s(self) -> Floats:
        """How long the link of each stage is busy with one micro-batch, in one direction: with what comes from the stage in
        front, and with the gradient from the stage behind it."""
        links_s = self.behind_s.copy()
        links_s[:, 1:] += self.behind_s[:, :-1]
        return links_s

    @cached_property
    def tau_s(self) -> Floats:
        """The time between two micro-batches where enough are in flight, of each pipeline."""
        tau_s: Floats = np.maximum(self.passes_s, self.links_s).max(axis=1)
        return tau_s

    @cached_property
    def is_busy(self) -> NDArray[np.bool_]:
        """For each pipeline, whether a link is busy for so long that bursts are too much for it."""
        return np.asarray((self.links_s > _BUSY * self.tau_s[:, None]).any(axis=1))

    @cached_property
    def _returns_s(self) -> Floats:
        """r_i."""
        ways_s = self._forward_s + self._early_s
        behind = np.cumsum((ways_s + 2 * self.behind_s)[:, ::-1], axis=1)[:, ::-1]
        returns_s: Floats = behind - ways_s
        return returns_s

    @cached_property
    def _begins_s(self) -> Floats:
        return _in_front(self._forward_s + self.behind_s)

    @cached_property
    def backs_s(self) -> Floats:
        """From the gradient of a stage's input until that of the first stage's weights."""
        return _in_front(self._early_s + self.behind_s)

    def early_s(self, left: Integers) -> Floats:
        """How long before the end of the first stage each stage has computed all its gradients."""
        return np.maximum(self.backs_s - (left + 1) * self.late_s, 0.0)

    @cached_property
    def plain_in_flight(self) -> Integers:
        """p - i."""
        fewest = np.arange(self.num_stages, 0, -1)
        return np.broadcast_to(np.minimum(fewest, self.micro_batches), self.passes_s.shape)

    @cached_property
    def deep_in_flight(self) -> Integers:
        """As many as hide the hand-overs while micro-batches flow."""
        most = self.micro_batches
        needed = np.ceil((self._returns_s + self.passes_s) / self.tau_s[:, None] - _ROUNDING)
        return self._spaced(np.maximum(self.plain_in_flight, np.minimum(needed, most)).astype(np.int64))

    def _spaced(self, in_flight: Integers) -> Integers:
        """Each stage with more in flight than the next one.

        Forward and backward passes come in turn. A stage with as many in flight as the next one would stand still in each turn
        until that one has come back; where hand-overs take long, one on its way is not enough, either.
        """
        is_long = (self.num_stages > 2) & (2 * self.behind_s > _LONG * self.tau_s[:, None])
        steps = _in_front(1 + is_long)
        reached = np.maximum.accumulate((in_flight + steps)[:, ::-1], axis=1)[:, ::-1] - steps
        return np.asarray(np.minimum(reached, self.micro_batches), dtype=np.int64)

    def weights_left(self) -> Integers:
        """For each stage, the micro-batches whose gradients of weights fill the time in which the last one goes back; those of
        the first micro-batch are never left."""
        with np.errstate(divide="ignore", invalid="ignore"):
            needed = np.ceil(self.backs_s / self.late_s - _ROUNDING) - 1
        is_asked = (self.late_s > 0) & ~self.is_busy[:, None]
        wanted = np.where(is_asked, np.clip(needed, 0, max(self.micro_batches - 2, 0)), 0)
        return wanted.astype(np.int64)

    def filled_in_flight(self, left: Integers) -> Integers:
        """As many as, beyond `deep_in_flight`, keep those stages busy at the beginning that decide how long all takes."""
        deep, most = self.deep_in_flight, self.micro_batches
        ends_s = self._ends_s(np.full_like(deep, most), left)
        spare_s = ends_s.max(axis=1, keepdims=True) - ends_s
        forward_s = np.maximum(self._forward_s, np.finfo(np.float64).tiny)  # pieces without work
        wanted = 1 + np.ceil((self._returns_s - spare_s) / forward_s - _ROUNDING)
        # No more than that: what comes before the first backward pass delays the stages in front.
        harmless = 1 + np.floor(self._returns_s / forward_s + _ROUNDING)
        wanted = np.where(self.is_busy[:, None], 1, np.clip(np.minimum(wanted, harmless), 1, most))
        return self._spaced(np.maximum(deep, wanted).astype(np.int64))

    def total_s(self, in_flight: Integers, left: Integers) -> Floats:
        """T of each pipeline."""
        total_s: Floats = self._ends_s(in_flight, left).max(axis=1)
        return total_s

    def _ends_s(self, in_flight: Integers, left: Integers) -> Floats:
        """When all is done as far as each stage decides it."""
        most = self.micro_batches
        stands_s = np.maximum(self._returns_s - (in_flight - 1) * self._forward_s, 0.0) * (most > 1)
        flows_s = self.passes_s + (most - 1) * np.maximum(self.passes_s, self.links_s)
        round_s = np.where(in_flight < most, (self._returns_s + self.passes_s) / in_flight, 0.0).max(axis=1)
        slow_s = np.where(self.is_busy | (round_s > self.tau_s), np.maximum(round_s, self.tau_s), 0.0)
        rounds_s = self.passes_s + (most - 1) * slow_s[:, None]
        busy_s = np.maximum(stands_s + flows_s, rounds_s)
        ends_s: Floats = self._begins_s + busy_s + self.early_s(left)
        return ends_s


def _in_front(each: NDArray[Any]) -> NDArray[Any]:
    """For each stage, the sum over the stages before it."""
    sums = np.zeros_like(each)
    np.cumsum(each[:, :-1], axis=1, out=sums[:, 1:])
    return sums
