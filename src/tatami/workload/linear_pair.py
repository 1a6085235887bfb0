"""The block of the paper: Linear(inputs -> units), an activation, Linear(units -> outputs), with the operations of Table 1.

Table 1 of Ozawa, Sugaya and Aso has the operations of one iteration on a tile, by phase: a pair n-m-l on a tile of `units`
(m_i) x `samples` (s_i); both may be fractions of a whole, as planners use them.
"""

from __future__ import annotations

from dataclasses import dataclass

from tatami.errors import PlanError
from tatami.workload.block import Block

_FLOAT_BYTES = 4


def linear_pair(
    inputs: int,
    units: int,
    outputs: int,
    *,
    unit_bias: bool = False,
    input_gradient: bool = False,
    rows: float = 1.0,
    name: str = "",
) -> Block:
    """The block of two linear layers with an activation between them, split over its hidden units.

    What it leaves behind for backward is counted in float32: its inputs, and each unit before and after the activation.

    Args:
        inputs: n, the inputs of the first layer.
        units: m, the hidden units.
        outputs: l, the outputs of the second layer.
        unit_bias: whether the first layer has a bias: one more element for each unit.
        input_gradient: whether layers with weights lie below: the backward pass then sums `inputs` elements a sample.
        rows: that go through it for each sample: a sample of a sequence has tokens.
        name: the qualified name of the module it lies in, for words only.

    Raises:
        PlanError: a size below 1.
    """
    for what, size in (("inputs", inputs), ("units", units), ("outputs", outputs)):
        if size < 1:
            raise PlanError(f"{what} of a linear pair must be at least 1, not {size}")
    sizes = PairSizes(inputs=inputs, outputs=outputs, unit_bias=unit_bias, input_gradient=input_gradient)
    per_sample = iteration_counts(sizes, units=0, samples=1).flop
    whole = iteration_counts(sizes, units=units, samples=1).flop
    return Block(
        units=units,
        unit_parameters=inputs + outputs + unit_bias,
        forward_elements=round(rows * outputs),
        backward_elements=round(rows * inputs) if input_gradient else 0,
        flop_per_unit=rows * (iteration_counts(sizes, units=1, samples=1).flop - per_sample),
        flop_per_sample=rows * per_sample,
        forward_fraction=forward_counts(sizes, units=units, samples=1).flop / whole,
        unit_activation_bytes=rows * 2 * _FLOAT_BYTES,
        sample_activation_bytes=rows * _FLOAT_BYTES * inputs,
        unit_largest=max(inputs, outputs),
        name=name,
    )


SIGMOID_FLOP = 10
"""What one sigmoid counts for in flop: an exponential of about eight, an addition and a division."""


@dataclass(frozen=True, kw_only=True)
class PairSizes:
    """What Table 1 needs of a pair besides its units: n, l, and whether the first layer has a bias and layers below it."""

    inputs: int
    outputs: int
    unit_bias: bool = False
    input_gradient: bool = False


@dataclass(frozen=True, kw_only=True)
class Counts:
    """Additions and subtractions, multiplications and divisions, sigmoids."""

    add: float
    multiply: float
    sigmoid: float = 0

    @property
    def flop(self) -> float:
        """All of them as floating-point operations; a sigmoid counts `SIGMOID_FLOP`."""
        return self.add + self.multiply + SIGMOID_FLOP * self.sigmoid

    def __add__(self, other: Counts) -> Counts:
        return Counts(add=self.add + other.add, multiply=self.multiply + other.multiply, sigmoid=self.sigmoid + other.sigmoid)


def forward_counts(pair: PairSizes, *, units: float, samples: float) -> Counts:
    """Table 1, first row: f = sigmoid(W x), h = sigmoid(V f). A bias of the first layer adds m_i s_i additions."""
    n, m, l, s = pair.inputs, units, pair.outputs, samples  # noqa: E741 - the paper's letters
    return Counts(
        add=(n + l - 1) * m * s - l * s + (m * s if pair.unit_bias else 0), multiply=(n + l) * m * s, sigmoid=m * s + l * s
    )


def backward_counts(pair: PairSizes, *, units: float, samples: float) -> Counts:
    """Table 1, second row: the deltas, the gradients and the update.

    Beyond the table: a bias adds m_i s_i additions, and a pair whose input needs a gradient the product W^T delta1, which
    is n m_i s_i multiplications and as many additions.
    """
    n, m, l, s = pair.inputs, units, pair.outputs, samples  # noqa: E741
    table = Counts(add=(n + l) * m * s + 2 * l * s, multiply=(n + 2 * l + 1) * m * s + 2 * l * s)
    bias = Counts(add=m * s if pair.unit_bias else 0, multiply=0)
    below = Counts(add=n * m * s, multiply=n * m * s) if pair.input_gradient else Counts(add=0, multiply=0)
    return table + bias + below


def iteration_counts(pair: PairSizes, *, units: float, samples: float) -> Counts:
    """Both rows of Table 1 together."""
    return forward_counts(pair, units=units, samples=samples) + backward_counts(pair, units=units, samples=samples)
