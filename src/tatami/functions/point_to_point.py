"""Differentiable send, recv and sendrecv."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.functions.channel import channel_of
from tatami.functions.exchange import Exchange, Outgoing
from tatami.functions.location import user_location
from tatami.functions.message import MessageKind
from tatami.functions.replay import replayed
from tatami.functions.structure import Structure, flatten, unflatten

MAX_MESSAGE_TAG = 2**32 - 1
_POINT_TO_POINT = int(MessageKind.POINT_TO_POINT)


def send(
    x: Structure, comm: AbstractCommunicator, *, dest: int, tag: int = 0, delegate: torch.Tensor | None = None
) -> torch.Tensor:
    """Send `x` to rank `dest`, without waiting for it to be received. Backward gets the gradient of `x` back from there.

    Args:
        x: a tensor, or tuples, lists and dicts of tensors, nested; shapes and dtypes travel along. It must stay as it is until
            the other side has it.
        comm: the ranks.
        dest: who receives it.
        tag: messages between two ranks with the same tag are received in the order in which they are sent.
        delegate: backward also comes to the operation that returned it, after this one.

    Returns:
        a delegate: a scalar zero; a loss that depends on it makes backward come to this operation. It may be ignored.

    Raises:
        InputError: this rank itself, an unknown rank, a tag out of range, something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    _check_peer("send", comm, dest, tag)
    return replayed("send", lambda: _point_to_point("send", comm, x, dest=dest, source=None, tag=tag, delegate=delegate))[1]


def recv(comm: AbstractCommunicator, *, source: int, tag: int = 0, delegate: torch.Tensor | None = None) -> Structure:
    """What rank `source` sent. Backward sends its gradient back, zeros where it reached no loss.

    A tensor requires a gradient if the one that was sent did.

    Args:
        comm: the ranks.
        source: who sent it.
        tag: with which it was sent.
        delegate: a scalar; backward also comes to the operation that returned it, after this one.

    Raises:
        InputError: this rank itself, a rank that is not there, a tag out of range.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    _check_peer("recv", comm, source, tag)
    return replayed("recv", lambda: _point_to_point("recv", comm, None, dest=None, source=source, tag=tag, delegate=delegate))[
        0
    ]


def sendrecv(x: Structure, comm: AbstractCommunicator, *, dest: int, source: int, tag: int = 0) -> Structure:
    """Send `x` to rank `dest` and return what rank `source` sent; a ring of ranks may all do so at once.

    Raises:
        InputError: this rank itself, an unknown rank, a tag out of range, something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    _check_peer("sendrecv", comm, dest, tag)
    _check_peer("sendrecv", comm, source, tag)
    return replayed("sendrecv", lambda: _point_to_point("sendrecv", comm, x, dest=dest, source=source, tag=tag, delegate=None))[
        0
    ]


def _point_to_point(
    name: str,
    comm: AbstractCommunicator,
    x: Structure,
    *,
    dest: int | None,
    source: int | None,
    tag: int,
    delegate: torch.Tensor | None,
) -> tuple[Structure, torch.Tensor]:
    channel = channel_of(comm)
    tensors: list[torch.Tensor] = []
    outgoing: Sequence[Outgoing] = ()
    if dest is not None:
        tensors, content = flatten(x, operation=name)
        outgoing = (Outgoing(dest, channel.next_number("to", dest, tag), content, range(len(tensors))),)
    sources = () if source is None else ((source, channel.next_number("from", source, tag)),)
    exchange = Exchange(
        channel, name, kind=_POINT_TO_POINT, tag=tag, outgoing=outgoing, sources=sources, location=user_location()
    )
    exchange.move(tensors)
    came = exchange.record(tensors, delegate=delegate)
    result = None if source is None else unflatten(exchange.received[0].content.spec, iter(came), device=comm.device)
    return result, exchange.delegate()


def _check_peer(operation: str, comm: AbstractCommunicator, peer: int, tag: int) -> None:
    if 0 <= peer < comm.size and peer != comm.rank and 0 <= tag <= MAX_MESSAGE_TAG:
        return
    if not 0 <= peer < comm.size:
        raise InputError(f"{operation}: there is no rank {peer}; this communicator has ranks 0 to {comm.size - 1}")
    if peer == comm.rank:
        raise InputError(f"{operation}: rank {peer} is this rank, which would wait for itself; use the tensor itself")
    raise InputError(f"{operation}: tag {tag} is not between 0 and {MAX_MESSAGE_TAG}")
