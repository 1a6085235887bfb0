"""Debug mode: before a collective moves data, all ranks tell each other what they are about to do, and compare."""

from __future__ import annotations

from tatami.comm.agreement import debugging
from tatami.comm.base import AbstractCommunicator
from tatami.functions.channel import channel_of
from tatami.functions.exchange import Exchange, Outgoing
from tatami.functions.message import MessageKind
from tatami.functions.structure import Packed, describe, packed


def agree(
    name: str, comm: AbstractCommunicator, *, root: int, pattern: Packed | None, same_shapes: bool, location: bytes
) -> None:
    """In debug mode, compare with all ranks.

    Raises:
        CommError: two ranks are about to do different things; names both.
    """
    if comm.size == 1 or not debugging():
        return
    channel = channel_of(comm)
    number = channel.peer_reports.begin_collective(name, root, location)
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    mine = packed(_intention(pattern, same_shapes=same_shapes))
    outgoing = [Outgoing(peer, number, mine, ()) for peer in peers]
    sources = [(peer, number) for peer in peers]
    meeting = Exchange(
        channel,
        name,
        kind=int(MessageKind.COLLECTIVE),
        tag=root,
        outgoing=outgoing,
        sources=sources,
        location=location,
        pattern=mine,
        same_shapes=True,
    )
    meeting.move(())


def _intention(pattern: Packed | None, *, same_shapes: bool) -> str:
    if pattern is None:
        return "anything"
    if same_shapes:
        return describe(pattern.spec)
    return ", ".join(str(leaf.dtype).removeprefix("torch.") for leaf in pattern.leaves)
