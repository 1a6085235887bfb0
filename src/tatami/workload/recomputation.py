"""Layers whose activations a rank can compute once more in the backward pass in place of keeping them."""

from __future__ import annotations

from dataclasses import dataclass


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
