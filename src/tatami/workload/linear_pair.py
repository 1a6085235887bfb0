"""The block of the paper: Linear(inputs -> units), an activation, Linear(units -> outputs), with the operations of Table 1."""

from __future__ import annotations

from tatami.errors import PlanError
from tatami.workload.block import Block
from tatami.workload.table1 import PairSizes, forward_counts, iteration_counts

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
