"""Counting what a rank sends: to prove that an exchange is one message for each pair of neighbours, and to report traffic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.wrapper import WrappedCommunicator


@dataclass(frozen=True, kw_only=True)
class Call:
    """One operation begun on this rank.

    Attributes:
        operation: the name of the communicator's method.
        peer: the other rank, or the root; None for collectives without one.
        size_bytes: of the tensor this rank gave; 0 where it only receives. Objects are not measured: 0.
    """

    operation: str
    peer: int | None
    size_bytes: int


class Recording(WrappedCommunicator):
    """Notes every operation in `calls`, in order. Parts made by `split` note theirs in the same list."""

    def __init__(self, inner: AbstractCommunicator, *, calls: list[Call] | None = None) -> None:
        super().__init__(inner)
        self.calls: list[Call] = [] if calls is None else calls

    def num_messages(self, operation: str, *, peer: int | None = None) -> int:
        """How often `operation` was begun; only with `peer`, where one is given."""
        return len(self._matching(operation, peer))

    def size_bytes(self, operation: str, *, peer: int | None = None) -> int:
        """The bytes this rank gave to `operation`; only with `peer`, where one is given."""
        return sum(call.size_bytes for call in self._matching(operation, peer))

    def _matching(self, operation: str, peer: int | None) -> list[Call]:
        return [call for call in self.calls if call.operation == operation and (peer is None or call.peer == peer)]

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:
        self.calls.append(Call(operation=operation, peer=peer, size_bytes=0 if tensor is None else tensor.nbytes))

    def _wrap(self, part: AbstractCommunicator) -> Self:
        return type(self)(part, calls=self.calls)
