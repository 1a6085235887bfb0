"""What must be computed: the blocks of a network, the rest of it, and how many samples go through them."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from tatami.errors import PlanError, shortened
from tatami.workload.block import Block, Piece, Section
from tatami.workload.linear_pair import linear_pair
from tatami.workload.recomputation import Recomputation

MOST_SAMPLES = 10**12
"""Most samples of a batch: far below what a float counts exactly."""


WIRES = ("bfloat16", "float16")
"""As what numbers of more bytes may travel."""
HALF_BYTES = 2
"""Bytes of an element of either."""
OWN_COPIES = 2
"""A trained weight and its gradient, which every rank that computes with the weight keeps."""
_AMOUNTS = (
    "sample_flop",
    "state_bytes_per_parameter",
    "sharded_bytes_per_parameter",
    "rescue_bytes_per_parameter",
    "replicated_activation_bytes",
    "replicated_frozen_bytes",
    "update_bytes_per_parameter",
    "largest_parameters",
)


@dataclass(frozen=True, kw_only=True)
class Workload:
    """One iteration: `samples` through the tiled `blocks`, and through layers that every rank of a replica repeats.

    Attributes:
        samples: the global batch.
        blocks: in the order of the forward pass. Without any, replicas have one processor each: data
            parallelism.
        replicated_parameters: elements of the weights outside of blocks.
        replicated_flop_per_sample: what those layers cost each rank, forward and backward, for each of its samples.
        sample_flop: what else a rank spends on each of its samples, however few units it has: reading the inputs and filling
            the outputs costs the same for one unit as for all. In flop at the rank's speed; 0 where it was not measured
            (`tatami.train.measure_sample_flop`).
        element_bytes: 4 for float32.
        wire: one of `WIRES`: what is summed over ranks is rounded to it on its way; None: it travels as it is.
        overlaps_sums: whether hosts sum gradients while the backward pass computes, where every rank is a replica.
        state_bytes_per_parameter: what a processor keeps for each trained weight: the weight, its gradient, the optimizer's
            state, and the Trainer's copy of the last good weight. 20 for float32 and Adam, which has two moments; 12 for plain
            SGD, 16 with momentum.
        sharded_bytes_per_parameter: the part of them that is divided among the ranks, each of which keeps that of its shard; 0
            where the optimizer is not sharded. Only of weights outside of blocks.
        rescue_bytes_per_parameter: the part of them that is the Trainer's copy; 0 where it keeps none.
        tied_parameters: elements of the weights outside of blocks that other pipeline stages hold, too: of their state each
            rank keeps an equal share where the optimizer is sharded.
        micro_batches: the number of micro-batches in which every replica computes its samples; None: as few as memory allows,
            or more where that is faster.
        update_bytes_per_parameter: work space of the optimizer for each element of the weight that it is updating: two
            elements for Adam, 0 for SGD.
        largest_parameters: elements of the largest trained weight outside of blocks.
        backward_moments: at which moments of a backward pass memory may be fullest: of what the forward pass left behind, the
            part that is still there with the gradients that pass from layer to layer, which may be more than 1; and of the
            gradients of weights the part that is there already. Where a replica computes several micro-batches, those of the
            ones before are there all along.
        trained_tensors: how many trained weights there are, in all layers: ranks tell each other which had part in the loss.
        replicated_activation_bytes: what the layers outside of blocks leave behind for backward, for each sample.
        replicated_frozen_bytes: of weights outside of blocks that are not trained, and of buffers with the Trainer's copy.
        batch_statistics: for every call of a layer whose statistics are summed over the global batch (batch normalization), in
            the order of the forward pass, how many elements each rank sums; the backward pass sums as many. Where there are
            any, a replica must compute its share of the samples in one micro-batch.
        recomputation: what a rank keeps that recomputes the activations of the layers; None where there are no such layers.
        recompute: whether all ranks do; None: those that have too little memory otherwise.
        pieces: the same work in the order of the forward pass, as pipeline stages can share it out; empty where it is not
            known, and then there are no stages.
    """

    samples: int
    blocks: tuple[Block, ...] = ()
    replicated_parameters: int = 0
    replicated_flop_per_sample: int = 0
    sample_flop: float = 0.0
    element_bytes: int = 4
    wire: str | None = None
    overlaps_sums: bool = False
    state_bytes_per_parameter: float = 20.0
    sharded_bytes_per_parameter: float = 0.0
    rescue_bytes_per_parameter: float = 4.0
    tied_parameters: int = 0
    replicated_activation_bytes: float = 0.0
    replicated_frozen_bytes: float = 0.0
    update_bytes_per_parameter: float = 0.0
    largest_parameters: int = 0
    backward_moments: tuple[tuple[float, float], ...] = ((1.0, 1.0),)
    trained_tensors: int = 0
    batch_statistics: tuple[int, ...] = ()
    micro_batches: int | None = None
    recomputation: Recomputation | None = None
    recompute: bool | None = None
    pieces: tuple[Piece, ...] = ()

    def __post_init__(self) -> None:
        if self.samples < 1:
            raise PlanError(f"a workload needs at least 1 sample, not {self.samples}")
        if self.samples > MOST_SAMPLES:
            raise PlanError(f"a workload has at most {MOST_SAMPLES:,} samples, not {shortened(str(self.samples))}")
        check_wire(self.wire)
        if self.micro_batches is not None and self.micro_batches < 1:
            raise PlanError(f"micro_batches of a workload must be at least 1, or None, not {self.micro_batches}")
        if self.batch_statistics and (self.micro_batches or 1) > 1:
            raise PlanError(
                f"this network cannot be computed in {self.micro_batches} micro-batches: it has {len(self.batch_statistics)} "
                "layers (batch normalization) whose statistics are of the whole batch. Take one micro-batch, or other layers"
            )
        for name in _AMOUNTS:
            if not 0 <= getattr(self, name) < math.inf:
                raise PlanError(f"{name} of a workload must be a finite number >= 0, not {getattr(self, name)}")
        if not self.backward_moments or any(not 0 <= part < math.inf for moment in self.backward_moments for part in moment):
            raise PlanError(f"backward_moments of a workload must be pairs of numbers >= 0, not {self.backward_moments}")
        if any(elements < 1 for elements in self.batch_statistics):
            raise PlanError(
                f"batch_statistics of a workload must be numbers of at least 1 element, not {self.batch_statistics}"
            )

    @classmethod
    def mlp(cls, inputs: int, units: int, outputs: int, *, samples: int, element_bytes: int = 4) -> Workload:
        """The three-layer perceptron n-m-l of the paper, without biases."""
        blocks = (linear_pair(inputs, units, outputs),)
        return cls(samples=samples, blocks=blocks, trained_tensors=2, element_bytes=element_bytes)

    @cached_property
    def units(self) -> int:
        """The units of the block that has most: the height at which tilings are drawn. 1 where there is no block."""
        return max((block.units for block in self.blocks), default=1)

    @cached_property
    def kinds(self) -> tuple[tuple[Block, int], ...]:
        """The blocks that differ, and how many there are of each: 96 identical layers are priced once."""
        return tuple(Counter(self.blocks).items())

    @cached_property
    def sections(self) -> tuple[Section, ...]:
        """What a rank computes between sums over its replica, one for each of `kinds`; one in all without blocks."""
        repeated = self.replicated_flop_per_sample + self.sample_flop
        shares = [count * block.flop_per_unit * block.units for block, count in self.kinds]
        if not sum(shares):
            return (Section(units=1, unit_flop=0.0, beside_flop=0.0, repeated_flop=repeated),)
        return tuple(
            Section(
                units=block.units,
                unit_flop=count * block.flop_per_unit,
                beside_flop=count * block.flop_per_sample,
                repeated_flop=repeated * (share / sum(shares)),
            )
            for (block, count), share in zip(self.kinds, shares, strict=True)
        )

    @cached_property
    def tensor_parallel_elements(self) -> int:
        """Elements that a replica as wide as the batch sums in one iteration: l s of the paper (and n s backward)."""
        return self.samples * sum(block.summed_elements for block in self.blocks)

    @cached_property
    def gradient_elements(self) -> int:
        """Gradient elements of all units, summed across replicas in one iteration: (n + l) m of the paper."""
        return sum(block.parameters for block in self.blocks)

    @property
    def wire_bytes(self) -> int:
        """Bytes of an element on its way between hosts."""
        return self.element_bytes if self.wire is None else HALF_BYTES

    @property
    def tensor_parallel_bytes(self) -> int:
        """`tensor_parallel_elements` in bytes: beta of the communication volume, per unit of width."""
        return self.tensor_parallel_elements * self.wire_bytes

    @property
    def gradient_bytes(self) -> int:
        """`gradient_elements` in bytes: alpha of the communication volume, per unit of height."""
        return self.gradient_elements * self.wire_bytes

    @property
    def replicated_bytes(self) -> int:
        """Gradients of the layers outside of blocks, summed across replicas whatever the heights are."""
        return self.replicated_parameters * self.wire_bytes

    @property
    def replicated_state_bytes(self) -> float:
        """What every rank keeps of the weights outside of blocks, with gradients, the optimizer's state and a copy."""
        kept = self.state_bytes_per_parameter - self.sharded_bytes_per_parameter
        return self.replicated_parameters * kept + self.replicated_frozen_bytes

    @property
    def sharded_state_bytes(self) -> float:
        """What the ranks divide among them."""
        return self.replicated_parameters * self.sharded_bytes_per_parameter

    @cached_property
    def with_sharded_optimizer(self) -> Workload:
        """The same network where each rank keeps the optimizer's state of its shard alone, and nothing is split over units."""
        if self.sharded_bytes_per_parameter:
            return self
        units_bytes = [block.units * block.unit_activation_bytes for block in self.blocks]
        again = self.recomputation
        if again is not None:
            inside = {index for layer in again.layers for index in layer.blocks}
            layers = (
                replace(layer, beside_bytes=layer.beside_bytes + sum(units_bytes[index] for index in layer.blocks), blocks=())
                for layer in again.layers
            )
            outside_bytes = sum(size for index, size in enumerate(units_bytes) if index not in inside)
            again = replace(again, kept_bytes=again.kept_bytes + outside_bytes, layers=tuple(layers))
        return replace(
            self,
            blocks=(),
            pieces=tuple(replace(piece, blocks=()) for piece in self.pieces),
            replicated_parameters=self.replicated_parameters + self.gradient_elements,
            replicated_flop_per_sample=self.replicated_flop_per_sample
            + round(sum(block.flop(units=block.units, samples=1) for block in self.blocks)),
            sharded_bytes_per_parameter=max(0.0, self.state_bytes_per_parameter - OWN_COPIES * self.element_bytes),
            replicated_activation_bytes=self.replicated_activation_bytes + sum(units_bytes),
            replicated_frozen_bytes=self.replicated_frozen_bytes
            + sum(block.units * block.unit_frozen_bytes for block in self.blocks),
            largest_parameters=max(
                self.largest_parameters, *(round(block.units * block.unit_largest) for block in self.blocks), 0
            ),
            recomputation=again,
        )

    def unit_state_bytes(self, block: Block) -> float:
        """The same of one unit of a block."""
        return block.unit_parameters * self.state_bytes_per_parameter + block.unit_frozen_bytes

    @property
    def replicated_update_bytes(self) -> float:
        """The optimizer's work space for the largest weight outside of blocks."""
        return self.largest_parameters * self.update_bytes_per_parameter

    @property
    def most_update_bytes(self) -> float:
        """The optimizer's work space for the largest weight of all."""
        own = (block.units * self.unit_update_bytes(block) for block, _ in self.kinds)
        return max(self.replicated_update_bytes, *own, 0.0)

    def unit_update_bytes(self, block: Block) -> float:
        """The same for one unit of the largest weight of a block."""
        return block.unit_largest * self.update_bytes_per_parameter

    @property
    def replicated_gradient_bytes(self) -> int:
        """The part of `replicated_state_bytes` that is gradients."""
        return self.replicated_parameters * self.element_bytes

    @property
    def replicated_moved_bytes(self) -> float:
        """The part of `replicated_state_bytes` that a joining rank receives: all but the gradients."""
        return self.replicated_state_bytes - self.replicated_gradient_bytes

    def unit_gradient_bytes(self, block: Block) -> int:
        """The part of `unit_state_bytes` that is gradients."""
        return block.unit_parameters * self.element_bytes

    def unit_moved_bytes(self, block: Block) -> float:
        """The part of `unit_state_bytes` that moves with a unit in a re-tiling."""
        return self.unit_state_bytes(block) - self.unit_gradient_bytes(block)

    @cached_property
    def tensor_parallel_exchanges(self) -> int:
        """Sums inside a replica in one iteration, forward and backward."""
        return sum(block.sums for block in self.blocks)

    @property
    def most_micro_batches(self) -> int:
        """The most micro-batches in which a replica may compute: one where statistics are of the whole batch."""
        return 1 if self.batch_statistics else self.samples

    @property
    def may_recompute(self) -> bool:
        """Whether a rank may recompute activations where it lacks memory."""
        return self.recomputation is not None and self.recompute is not False

    @cached_property
    def recomputing(self) -> Workload:
        """The same network with the activations of a rank that recomputes, by which its memory is counted.

        Beside what `Recomputation` says, the gradients that pass from layer to layer count as much as without it. The layer
        that keeps most counts whole: the most of any beside its units, and the units of that whose units keep most.
        """
        found = self.recomputation
        if found is None:
            return self

        def units_bytes(index: int) -> float:
            block = self.blocks[index]
            return block.units * block.unit_activation_bytes + block.sample_activation_bytes

        most = max(found.layers, key=lambda layer: sum(map(units_bytes, layer.blocks)))
        dropped = {index for layer in found.layers for index in layer.blocks}.difference(most.blocks)
        all_bytes = self.replicated_activation_bytes + sum(map(units_bytes, range(len(self.blocks))))
        passing_bytes = (max(kept for kept, _ in self.backward_moments) - 1) * all_bytes
        return replace(
            self,
            blocks=tuple(
                replace(block, unit_activation_bytes=0.0, sample_activation_bytes=0.0) if index in dropped else block
                for index, block in enumerate(self.blocks)
            ),
            replicated_activation_bytes=found.kept_bytes + found.beside_bytes + max(0.0, passing_bytes),
            backward_moments=((1.0, 1.0),),
            recomputation=None,
        )

    def passes(self, *, recomputes: bool) -> float:
        """How often a rank computes its flop: where it recomputes activations, by a third more if their part is not known."""
        again = 1 / 3 if self.recomputation is None else self.recomputation.flop_fraction
        return 1 + again if recomputes else 1.0

    @cached_property
    def recomputed_kinds(self) -> tuple[tuple[Block, int], ...]:
        """The blocks whose forward pass, with its sums over the replica, is repeated, as `kinds` has them."""
        layers = () if self.recomputation is None else self.recomputation.layers
        return tuple(Counter(self.blocks[index] for layer in layers for index in layer.blocks).items())

    @cached_property
    def flop_per_area(self) -> float:
        """Flop that grow with the area of a tile: those of the whole floor."""
        return self.samples * sum(block.flop_per_unit * block.units for block in self.blocks)

    @cached_property
    def flop_per_width(self) -> float:
        """Flop that each rank of a replica repeats for its samples, however few units it has."""
        beside = self.replicated_flop_per_sample + self.sample_flop
        return self.samples * (sum(block.flop_per_sample for block in self.blocks) + beside)

    @cached_property
    def backward_fraction(self) -> float:
        """The part of an iteration's flop that the backward pass has; of layers outside of blocks two thirds."""
        forward = sum(block.flop_per_unit * block.units * block.forward_fraction for block in self.blocks)
        all_flop = self.flop_per_area + self.flop_per_width
        return 1 - (self.samples * forward + self.flop_per_width / 3) / all_flop if all_flop else 2 / 3

    def flop(self, *, width: float, height: float) -> float:
        """Flop of one iteration of a tile: every block, the replicated layers, and what each sample costs beside.

        Args:
            width: the tile's fraction of the samples.
            height: its fraction of the units of every block.
        """
        samples = width * self.samples
        tiled = sum(block.flop(units=height * block.units, samples=samples) for block in self.blocks)
        return tiled + samples * (self.replicated_flop_per_sample + self.sample_flop)

    def tile_work(self, units: Sequence[int], *, samples: int) -> float:
        """The work of a tile, in samples x units of the block that has most: by it abilities are estimated while training.

        For the paper's perceptron that is the tile's area. Units of other blocks count by their flop, and so does what every
        rank repeats.

        Args:
            units: how many the tile has of each block.
            samples: how many go through it.
        """
        flop = sum(block.flop_per_unit * own for block, own in zip(self.blocks, units, strict=True))
        flop += self.replicated_flop_per_sample + self.sample_flop
        return samples * (flop / self.work_flop if self.blocks or flop else 1.0)

    @cached_property
    def work_flop(self) -> float:
        """Flop of one unit of `tile_work`; without blocks that is a sample."""
        units = sum(block.flop_per_unit * block.units for block in self.blocks) / self.units
        return units or self.replicated_flop_per_sample + self.sample_flop or 1.0

    def with_samples(self, samples: int) -> Workload:
        """The same network with another global batch."""
        return replace(self, samples=samples)


def corners(moments: Sequence[tuple[float, float]]) -> tuple[tuple[float, float], ...]:
    """The `moments` (see `Workload.backward_moments`) at which memory may be fullest.

    They are the corners of the upper right hull of all of them, beginning with the one that has most of what is kept.
    """
    found: list[tuple[float, float]] = []
    for kept, there in sorted(set(moments), reverse=True):
        if found and there <= max(there for _, there in found):
            continue
        while len(found) > 1:
            (a, b), (c, d) = found[-2:]
            if (c - a) * (there - b) > (d - b) * (kept - a):
                break
            found.pop()
        found.append((kept, there))
    return tuple(found)


def check_wire(wire: str | None) -> None:
    """Whether sums can travel as `wire`.

    Raises:
        PlanError: it is none of `WIRES`.
    """
    if wire is not None and wire not in WIRES:
        raise PlanError(f"wire must be {' or '.join(WIRES)}, or None: sums travel as they are; not {shortened(str(wire))!r}")
