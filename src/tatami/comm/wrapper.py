"""Behaviour added by wrapping: a communicator that passes every operation on, and has a hook that runs before each."""

from __future__ import annotations

import functools
import inspect
from abc import abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Self

import torch

from tatami.comm.base import AbstractCommunicator

_OPERATIONS: dict[str, tuple[str, str]] = {
    "send": ("dest", "tensor"),
    "recv": ("source", ""),
    "isend": ("dest", "tensor"),
    "irecv": ("source", ""),
    "next_tag": ("source", ""),
    "barrier": ("", ""),
    "bcast": ("root", "tensor"),
    "gather": ("root", "tensor"),
    "scatter": ("root", "tensor"),
    "allgather": ("", "tensor"),
    "alltoall": ("", "tensor"),
    "reduce": ("root", "tensor"),
    "iallreduce": ("", "tensor"),
    "allreduce": ("", "tensor"),
    "reduce_scatter": ("", "tensor"),
    "window": ("", "memory"),
    "shared_window": ("", ""),
    "send_object": ("dest", ""),
    "recv_object": ("source", ""),
    "bcast_object": ("root", ""),
    "allgather_object": ("", ""),
    "gather_object": ("root", ""),
    "use_device": ("", ""),
}
"""Which arguments `_before` is given as `peer` and as `tensor`; empty: none."""
_ATTRIBUTES = [
    "rank",
    "size",
    "hosts",
    "library",
    "roll_call",
    "refusals",
    "lineage",
    "has_windows",
    "device",
    "transport",
    "on_devices",
    "is_closed",
    "describe",
    "wait_rarely",
]
"""Attributes of `inner`, of which `_before` learns nothing."""


def _start_inside(*_: Any, **__: Any) -> Any:
    """Each public operation of a wrapper is handed on to `inner`, which starts it."""
    raise AssertionError("a wrapper starts nothing itself")


class WrappedCommunicator(AbstractCommunicator):
    """Hands everything on to `inner`, after `_before` was called. Parts made by `split` are wrapped in the same way.

    `_before` sees `send` and `recv` as such, not again as the `isend` and `irecv` they are made of. What `_before` raises,
    the operation raises, and does not begin.
    """

    _start_send = _start_recv = _await_tag = _start_inside
    _start_barrier = _start_bcast = _start_gather = _start_scatter = _start_allgather = _start_alltoall = _start_inside
    _start_reduce = _start_allreduce = _start_reduce_scatter = _start_inside

    def __init__(self, inner: AbstractCommunicator) -> None:
        self.inner = inner

    @abstractmethod
    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None:
        """`operation` is the name of the method; `peer` the other rank or the root; `tensor` what this rank gives, or None."""

    @abstractmethod
    def _wrap(self, part: AbstractCommunicator) -> Self:
        """A wrapper like this one, around a part of the ranks."""

    @property
    def timeout_s(self) -> float:
        return self.inner.timeout_s

    @timeout_s.setter
    def timeout_s(self, timeout_s: float) -> None:
        self.inner.timeout_s = timeout_s

    def split(self, color: int | None, *, key: int = 0) -> Self | None:
        self._before("split")
        part = self.inner.split(color, key=key)
        return None if part is None else self._wrap(part)

    def close(self) -> None:
        self.inner.close()

    def abort(self, reason: str) -> None:
        self.inner.abort(reason)


def _handed_on(operation: str, peer: str, tensor: str) -> Callable[..., Any]:
    method = getattr(AbstractCommunicator, operation)
    parameters = inspect.signature(method).parameters
    places = {name: place - 1 for place, name in enumerate(parameters)}

    def given(name: str, args: tuple[Any, ...], named: dict[str, Any]) -> Any:
        if not name or name in named:
            return named.get(name)
        return args[places[name]] if places[name] < len(args) else parameters[name].default

    @functools.wraps(method)
    def hand_on(self: WrappedCommunicator, *args: Any, **named: Any) -> Any:
        other, values = given(peer, args, named), given(tensor, args, named)
        is_given = operation != "bcast" or self.rank == other  # the other ranks' tensor is only written to
        self._before(operation, peer=other, tensor=values if is_given else None)
        return getattr(self.inner, operation)(*args, **named)

    return hand_on


for _name, _arguments in _OPERATIONS.items():
    setattr(WrappedCommunicator, _name, _handed_on(_name, *_arguments))
for _name in _ATTRIBUTES:
    setattr(WrappedCommunicator, _name, property(attrgetter(f"inner.{_name}")))


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
