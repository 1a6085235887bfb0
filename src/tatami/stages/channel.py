"""How tensors travel between the stages of a replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch


@dataclass(frozen=True, kw_only=True)
class Parcel:
    """What a message between stages is about.

    Attributes:
        value: number of the value in its program.
        micro_batch: which part of the batch it is of.
        source, target: the stages that make and read the value.
        backward: whether this is the value's gradient, which travels from target to source.
    """

    value: int
    micro_batch: int
    source: int
    target: int
    backward: bool = False


class AbstractChannel(ABC):
    """Sends and receives parcels; every parcel is sent once and received once in a pass."""

    @abstractmethod
    def send(self, parcel: Parcel, tensor: torch.Tensor | None) -> None:
        """Send without waiting for the receiver; `tensor` must not change until `flush`. None: there is no gradient.

        Whether it requires a gradient is sent along: weights may be frozen and trained again at any time.
        """

    def expect(self, parcel: Parcel) -> None:  # noqa: B027 -- nothing is to be done where parcels come by themselves
        """Be ready for this parcel, which may come while this rank computes; it is received later."""

    @abstractmethod
    def receive(self, parcel: Parcel) -> torch.Tensor | None:
        """What was sent as this parcel; it requires a gradient if the sender waits for one."""

    @abstractmethod
    def flush(self) -> None:
        """Wait until everything that was sent has left."""
