"""A part of a network that splits over units, as plain facts: all that planners, re-tiling and the simulator know of it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from tatami.errors import PlanError
from tatami.workload.recomputation import RepeatedLayer

ELEMENT_FLOP = 100
"""What one element of an element-wise operation counts: as many flop of a product take as long, where memory is the limit.

Measured on CPUs: 85 (ResNet-18) to 119 (GPT) for each element of the forward pass, with what copies and sums take; 90 and 98
for a ViT and a Llama, which were not fitted. Fast GPUs have more.
"""
_COUNTS = ("unit_parameters", "forward_elements", "backward_elements", "forward_sums", "backward_sums")
_AMOUNTS = (
    "flop_per_unit",
    "flop_per_sample",
    "unit_activation_bytes",
    "sample_activation_bytes",
    "unit_frozen_bytes",
    "unit_largest",
)


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a network that is a sum over its units: f(x) = f_1(x) + ... + f_u(x), where each f_j owns its weights.

    A unit is a hidden unit between two linear layers, a head of an attention, a channel between two convolutions, an expert.
    The ranks of a replica share the units of a block, and sum what it gives.

    Attributes:
        units: how many.
        unit_parameters: elements of trained weights that one unit owns; (n + l) of the paper's pair (+ 1 with a bias).
        forward_elements: elements of one sample that are summed over the replica forward: l of the paper's pair.
        backward_elements: the same backward; 0 where the input of the block needs no gradient.
        flop_per_unit: of one sample and one unit, forward, backward and update.
        flop_per_sample: of one sample, however few units: every rank of a replica that takes part repeats it.
        forward_fraction: of these flop, the share of the forward pass. The default, a third, holds where backward is two
            products of the same size for each of forward.
        forward_sums: sums over the replica in one forward pass.
        backward_sums: the same backward; they do not count where `backward_elements` is 0.
        unit_activation_bytes: what is kept from forward to backward for one sample and one unit.
        sample_activation_bytes: the same for one sample, however few units.
        unit_frozen_bytes: of what one unit owns that is not trained: frozen weights, and running statistics with a copy.
        unit_largest: elements of one unit in the largest trained weight of the block; 0 where that is not known.
        name: the qualified name of the module it lies in. Like the next two it is for words only: blocks that differ in nothing
            else are equal, and are priced once.
        kind: what sort of block it is.
        unit: what one unit is, singular.

    Raises:
        PlanError: no unit, or an amount that is negative or not finite.
    """

    units: int
    unit_parameters: int
    forward_elements: int
    backward_elements: int = 0
    flop_per_unit: float
    flop_per_sample: float = 0.0
    forward_fraction: float = 1 / 3
    forward_sums: int = 1
    backward_sums: int = 1
    unit_activation_bytes: float = 0.0
    sample_activation_bytes: float = 0.0
    unit_frozen_bytes: float = 0.0
    unit_largest: float = 0.0
    name: str = field(default="", compare=False)
    kind: str = field(default="linear pair", compare=False)
    unit: str = field(default="hidden unit", compare=False)

    def __post_init__(self) -> None:
        what = f"block {self.name!r}" if self.name else f"a block ({self.kind})"
        if self.units < 1:
            raise PlanError(f"{what} must have at least 1 unit, not {self.units}")
        for name in (*_COUNTS, *_AMOUNTS):
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} of {what} must be a finite number >= 0, not {getattr(self, name)}")
        if not 0 <= self.forward_fraction <= 1:
            raise PlanError(f"forward_fraction of {what} must be a share from 0 to 1, not {self.forward_fraction}")

    @property
    def summed_elements(self) -> int:
        """Elements of one sample that a replica sums, forward and backward."""
        return self.forward_elements + self.backward_elements

    @property
    def sums(self) -> int:
        """Sums over the replica in one iteration."""
        return self.forward_sums + (self.backward_sums if self.backward_elements else 0)

    @property
    def replica_sums(self) -> tuple[tuple[int, int], ...]:
        """Forward and backward: the elements of one sample that a replica sums, and in how many sums; none where nothing is."""
        ways = ((self.forward_elements, self.forward_sums), (self.backward_elements, self.backward_sums))
        return tuple((elements, sums) for elements, sums in ways if elements and sums)

    @property
    def parameters(self) -> int:
        """Elements of the trained weights of all units."""
        return self.units * self.unit_parameters

    def flop(self, *, units: float, samples: float) -> float:
        """Flop of one iteration of a tile; both may be fractions of a whole, as planners use them."""
        return samples * (self.flop_per_unit * units + (self.flop_per_sample if units else 0.0))


@dataclass(frozen=True, kw_only=True)
class Section:
    """All alike blocks of a network, and their part of what every rank repeats: flop of one sample.

    What is repeated lies between the blocks. It is shared out among them by their flop, so that heights which balance the whole
    balance each block.

    Attributes:
        units: of each of the blocks.
        unit_flop: for each unit that a rank has.
        beside_flop: of a rank that has any unit.
        repeated_flop: of every rank of a replica.
    """

    units: int
    unit_flop: float
    beside_flop: float
    repeated_flop: float

    def flop(self, units: float) -> float:
        """Flop of a rank with so many units of each block."""
        return self.work(units) + (self.beside_flop if units else 0.0)

    def work(self, units: float) -> float:
        """The same as abilities are estimated by: without what a sample costs in a block beside its units, as in the paper."""
        return self.unit_flop * units + self.repeated_flop


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some consecutive operations of the forward pass, which are never divided between two stages.

    Attributes:
        name: of the first module in it, as the network calls it.
        flop_per_sample: forward and backward pass.
        late_flop_per_sample: those of `flop_per_sample` that give gradients of weights, where they are computed after the
            gradient of the piece's input has left for the stage in front: of linear layers.
        parameters: trained elements that its operations read. A tied weight counts in each piece that reads it.
        frozen_bytes: of weights that are not trained, and of buffers with the Trainer's copy.
        activation_bytes_per_sample: what the forward pass keeps for the backward pass.
        crossing_bytes_per_sample: what a stage that begins here receives in the forward pass; 0 for the first piece. The
            gradients that go back have as many bytes, except those of integers and of what needs no gradient.
        shared: the weights among `parameters` that other pieces read too (tied weights): their names and elements. Stages that
            hold the same one sum its gradients.
        blocks: the blocks that begin in this piece, each with the number of pieces that it takes. Several ranks can share the
            units of a stage that has all of these pieces.
        layers: the repeated layers that begin in this piece.
        largest_parameters: elements of the largest trained weight that its operations read; None: it is all of them.
    """

    name: str
    flop_per_sample: float
    parameters: int
    late_flop_per_sample: float = 0.0
    frozen_bytes: float = 0.0
    activation_bytes_per_sample: float = 0.0
    crossing_bytes_per_sample: float = 0.0
    shared: tuple[tuple[str, int], ...] = ()
    blocks: tuple[tuple[Block, int], ...] = ()
    layers: tuple[RepeatedLayer, ...] = ()
    largest_parameters: int | None = None

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if isinstance(value, int | float) and not value >= 0:
                raise ValueError(f"{each.name} of piece {self.name} must be at least 0, not {value}")

    @property
    def largest(self) -> int:
        """`largest_parameters`, or what they are at the most."""
        return self.parameters if self.largest_parameters is None else self.largest_parameters
