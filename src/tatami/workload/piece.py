"""The smallest part of a network that a pipeline stage can begin with."""

from __future__ import annotations

from dataclasses import dataclass, fields

from tatami.workload.block import Block


@dataclass(frozen=True, kw_only=True)
class Piece:
    """Some consecutive operations of the forward pass, which are never divided between two stages.

    Attributes:
        name: of the first module in it, as the network calls it.
        flop_per_sample: forward and backward pass.
        late_flop_per_sample: those of `flop_per_sample` that give gradients of weights, where they are computed after the
            gradient of the piece's input has left for the stage in front: of linear layers.
        parameters: trained elements that its operations read. A tied weight counts in each piece that reads it.
        frozen_bytes: of weights that are not trained, and of buffers.
        activation_bytes_per_sample: what the forward pass keeps for the backward pass.
        crossing_bytes_per_sample: what a stage that begins here receives in the forward pass; 0 for the first piece. The
            gradients that go back have as many bytes, except those of integers and of what needs no gradient.
        shared: the weights among `parameters` that other pieces read too (tied weights): their names and elements. Stages that
            hold the same one sum its gradients.
        blocks: the blocks that begin in this piece, each with the number of pieces that it takes. Several ranks can share the
            units of a stage that has all of these pieces.
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

    def __post_init__(self) -> None:
        for each in fields(self):
            value = getattr(self, each.name)
            if each.name not in ("name", "shared", "blocks") and not value >= 0:
                raise ValueError(f"{each.name} of piece {self.name} must be at least 0, not {value}")
