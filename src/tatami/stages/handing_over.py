"""The two ends of a value that crosses from one stage to another, and how autograd finds them on the way back."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from tatami.errors import ModelError
from tatami.stages.channel import AbstractChannel, Parcel
from tatami.stages.stand_in import StandIn, stand_in_of


class SentParcel:
    """The near end of a parcel that was sent: its gradient comes back here.

    Args:
        channel: to the other stages.
        parcel: what was sent.
    """

    def __init__(self, channel: AbstractChannel, parcel: Parcel) -> None:
        self.channel = channel
        self.parcel = replace(parcel, backward=True)
        self.is_settled = False
        channel.expect(self.parcel)

    def gradient(self) -> torch.Tensor | None:
        """The gradient, waited for; None where the other stage has none."""
        self.is_settled = True
        return self.channel.receive(self.parcel)

    def settle(self) -> None:
        """At the end of the backward pass: wait for an answer that nothing has asked for."""
        if not self.is_settled:
            self.gradient()


class ReceivedParcel:
    """The far end of a parcel: its gradient is sent back from here.

    Args:
        channel: to the other stages.
        parcel: what was received.
    """

    def __init__(self, channel: AbstractChannel, parcel: Parcel) -> None:
        self.channel = channel
        self.parcel = replace(parcel, backward=True)
        self.is_settled = False

    def give(self, grad: torch.Tensor | None) -> None:
        """Send the gradient back."""
        refuse_no_values(grad)
        self.is_settled = True
        self.channel.send(self.parcel, grad)

    def settle(self) -> None:
        """At the end of the backward pass: answer that there is no gradient, if none came."""
        if not self.is_settled:
            self.give(None)


def refuse_no_values(grad: torch.Tensor | None) -> None:
    """
    Raises:
        ModelError: the gradient of what is computed here has no values.
    """
    if isinstance(grad, StandIn):
        raise ModelError(
            "the loss reads weights or values of other pipeline stages, which have no values here: a penalty on weights? "
            "Use the optimizer's weight_decay, return what the loss needs from the network, or use stages=1"
        )


class HandOver(torch.autograd.Function):
    """From a tensor of this stage to the stand-in of it that other stages' operations see."""

    @staticmethod
    def forward(ctx: Any, ends: list[SentParcel], tensor: torch.Tensor) -> StandIn:
        ctx.ends = ends
        return stand_in_of(tensor)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, torch.Tensor | None]:
        # In the order of the stages, so that the sum has the same bits in every run.
        grads = [grad for end in ctx.ends if (grad := end.gradient()) is not None]
        total = None if not grads else grads[0] if len(grads) == 1 else torch.stack(grads).sum(0)
        return None, total


class TakeOver(torch.autograd.Function):
    """A tensor that came from another stage, whose gradient goes back there."""

    @staticmethod
    def forward(ctx: Any, end: ReceivedParcel, tensor: torch.Tensor, anchor: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        ctx.end = end
        ctx.set_materialize_grads(False)
        return tensor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[None, None, None]:
        ctx.end.give(grad)
        return None, None, None
