"""What must be computed: the linear pairs of a network, and how many samples go through them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from tatami.errors import PlanError
from tatami.workload.table1 import iteration_counts


@dataclass(frozen=True, kw_only=True)
class Pair:
    """Linear(inputs -> units), an activation, Linear(units -> outputs): what is tiled over its `units`.

    Attributes:
        inputs: n, the inputs of the first layer.
        units: m, the hidden units.
        outputs: l, the outputs of the second layer.
        unit_bias: whether the first layer has a bias: one more element for each unit.
        input_gradient: whether layers with weights lie below: the backward pass then exchanges `inputs` elements a sample.
    """

    inputs: int
    units: int
    outputs: int
    unit_bias: bool = False
    input_gradient: bool = False

    def __post_init__(self) -> None:
        for name in ("inputs", "units", "outputs"):
            if getattr(self, name) < 1:
                raise PlanError(f"{name} of a pair must be at least 1, not {getattr(self, name)}")

    @property
    def unit_size(self) -> int:
        """Elements that belong to one unit: its row of the first weight (and bias), its column of the second: n + l (+ 1)."""
        return self.inputs + self.outputs + self.unit_bias

    @property
    def sample_size(self) -> int:
        """Elements of one sample that a column sums: l forward, and n backward where the input needs a gradient."""
        return self.outputs + (self.inputs if self.input_gradient else 0)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration: `samples` through the tiled `pairs`, and through layers that every rank of a column repeats.

    Attributes:
        samples: the global batch.
        pairs: in the order of the forward pass; at least one.
        replicated_parameters: elements of the weights outside of pairs.
        replicated_flop_per_sample: what those layers cost each rank, forward and backward, for each of its samples.
        sample_flop: what else a rank spends on each of its samples, however few units it has: reading the inputs and filling
            the outputs costs the same for one unit as for all. In flop at the rank's speed; 0 where nobody has measured it
            (`tatami.tiled.measure_sample_flop`).
        element_bytes: 4 for float32.
    """

    samples: int
    pairs: tuple[Pair, ...]
    replicated_parameters: int = 0
    replicated_flop_per_sample: int = 0
    sample_flop: float = 0.0
    element_bytes: int = 4

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise PlanError(f"a workload needs at least 1 sample, not {self.samples}")
        if not 0 <= self.sample_flop < math.inf:
            raise PlanError(f"sample_flop of a workload must be a finite number >= 0, not {self.sample_flop}")
        if not self.pairs:
            raise PlanError("a workload needs at least one pair of linear layers: only pairs are tiled")

    @classmethod
    def mlp(cls, inputs: int, units: int, outputs: int, *, samples: int, element_bytes: int = 4) -> Workload:
        """The three-layer perceptron n-m-l of the paper, without biases."""
        return cls(samples=samples, pairs=(Pair(inputs=inputs, units=units, outputs=outputs),), element_bytes=element_bytes)

    @property
    def units(self) -> int:
        """The units of the pair that has most: the height at which tilings are drawn."""
        return max(pair.units for pair in self.pairs)

    @property
    def narrowest(self) -> int:
        """The units of the pair that has fewest: nobody may come out with none."""
        return min(pair.units for pair in self.pairs)

    @property
    def vertical_elements(self) -> int:
        """Elements that a column as wide as the batch sums in one iteration: l s for each pair (and n s backward)."""
        return self.samples * sum(pair.sample_size for pair in self.pairs)

    @property
    def horizontal_elements(self) -> int:
        """Gradient elements of all units, summed across columns in one iteration: (n + l) m for each pair."""
        return sum(pair.unit_size * pair.units for pair in self.pairs)

    @property
    def vertical_bytes(self) -> int:
        """`vertical_elements` in bytes: beta of the communication volume, per unit of width."""
        return self.vertical_elements * self.element_bytes

    @property
    def horizontal_bytes(self) -> int:
        """`horizontal_elements` in bytes: alpha of the communication volume, per unit of height."""
        return self.horizontal_elements * self.element_bytes

    @property
    def replicated_bytes(self) -> int:
        """Gradients of the layers outside of pairs, summed across columns whatever the heights are."""
        return self.replicated_parameters * self.element_bytes

    @property
    def vertical_exchanges(self) -> int:
        """Sums inside a column in one iteration: one forward for each pair, one backward where the input needs a gradient."""
        return sum(2 if pair.input_gradient else 1 for pair in self.pairs)

    @property
    def flop_per_area(self) -> float:
        """Flop that grow with the area of a tile: those of the whole floor."""
        return self.flop(width=1.0, height=1.0) - self.flop_per_width

    @property
    def flop_per_width(self) -> float:
        """Flop that each rank of a column repeats for its samples, however few units it has."""
        return self.flop(width=1.0, height=0.0)

    def flop(self, *, width: float, height: float) -> float:
        """Flop of one iteration of a tile: Table 1 for every pair, the replicated layers, and what each sample costs beside.

        Args:
            width: the tile's fraction of the samples.
            height: its fraction of the units of every pair.
        """
        samples = width * self.samples
        tiled = sum(iteration_counts(pair, units=height * pair.units, samples=samples).flop for pair in self.pairs)
        return tiled + samples * (self.replicated_flop_per_sample + self.sample_flop)

    def with_samples(self, samples: int) -> Workload:
        return replace(self, samples=samples)
