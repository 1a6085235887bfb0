"""The interface between the gradient engine and what sums the gradients of one model over its replicas."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import nn

from tatami.errors import ModelError

PASSES = 4
"""Forward passes are counted modulo this, so that float32 has `samples` of four million samples exactly; see `finish`."""


class AbstractGradientSums(ABC):
    """Sums the gradients of one model over its replicas."""

    @property
    @abstractmethod
    def layout(self) -> object:
        """Who holds which units; another object after a re-tiling."""

    @property
    @abstractmethod
    def are_needed(self) -> bool:
        """Whether there is anything to sum: not where all ranks are one replica."""

    @property
    @abstractmethod
    def shares_units(self) -> bool:
        """Whether ranks of a replica share the units of some layers."""

    @property
    def takes_early(self) -> bool:
        """Whether `put` does anything in the pass that `begin` has begun."""
        return False

    def begin(self, parameters: Sequence[nn.Parameter]) -> None:  # noqa: B027 - not all have something to do here
        """A forward pass begins; `parameters` are trained.

        Raises:
            TrainingError: the sums of a backward pass that was broken off are still under way.
        """

    def put(  # noqa: B027 - not all have something to do here
        self, parameter: nn.Parameter, gradient: torch.Tensor, weight: float, *, is_whole: bool
    ) -> None:
        """A gradient of the running backward pass is there, and may be sent; `finish` gets it as well.

        Args:
            parameter: whose gradient it is.
            gradient: this rank's.
            weight: of this rank in the sum.
            is_whole: whether no other part of it is expected in this pass.
        """

    @abstractmethod
    def finish(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, weight: float, samples: int
    ) -> list[torch.Tensor | None]:
        """The backward pass is over. Collective.

        Args:
            parameters: all that are trained, the same on all ranks.
            gradients: this rank's, dense; None where a parameter had no part in the pass. Their memory may become the result.
            weight: of this rank in the sum.
            samples: of the global batch, times `PASSES`, and the number of forward passes since the last sum, in which
                replicas may find that they differ.

        Returns:
            The sums; None where no rank had a part.
        """


def refuse_counted_rows(name: str, layer: nn.Module) -> None:
    """
    Raises:
        ModelError: the gradient of the layer, an embedding, depends on all samples of the batch together, so that no sum over
            replicas gives it.
    """
    if isinstance(layer, nn.Embedding | nn.EmbeddingBag) and layer.scale_grad_by_freq:
        raise ModelError(
            f"layer {name or '(the model itself)'} ({type(layer).__name__}) divides gradients by how often its samples look up "
            "a row, and a rank sees only its own samples. Set scale_grad_by_freq=False"
        )
