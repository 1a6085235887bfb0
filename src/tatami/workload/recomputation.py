"""Layers whose activations a rank can compute once more in the backward pass in place of keeping them."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class RepeatedLayer:
    """A layer that begins in a piece of the network, and that a stage which has all of it can compute once more.

    Attributes:
        name: as the network calls it.
        pieces: number of pieces that it takes.
        kept_bytes, input_bytes: what it leaves behind of one sample, and what its input alone takes.
        flop: of its forward pass over one sample.
    """

    name: str
    pieces: int
    kept_bytes: float
    input_bytes: float
    flop: float

    def has(self, name: str) -> bool:
        """Whether the module or block of this name is inside of the layer."""
        return name == self.name or name.startswith(f"{self.name}.")


@dataclass(frozen=True, kw_only=True)
class RecomputedLayer:
    """One layer.

    Attributes:
        beside_bytes: what it leaves behind of one sample beside the units of its blocks.
        blocks: the places of its blocks in `Workload.blocks`.
    """

    beside_bytes: float
    blocks: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Recomputation:
    """What a network keeps of one sample where its layers are computed once more.

    From the forward pass to the backward pass only the inputs of the layers stay, and what operations outside of layers leave
    behind. While the backward pass goes through a layer, that layer's activations are there as well.

    Attributes:
        kept_bytes: of one sample, beside the units of blocks outside of layers.
        layers: those that are computed once more.
        flop_fraction: their forward pass as a part of all flop of an iteration.
    """

    kept_bytes: float
    layers: tuple[RecomputedLayer, ...]
    flop_fraction: float

    @property
    def beside_bytes(self) -> float:
        """The most that a layer leaves behind of one sample beside the units of its blocks."""
        return max(layer.beside_bytes for layer in self.layers)
