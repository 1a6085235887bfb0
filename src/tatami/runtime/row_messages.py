"""Rows on their way from rank to rank: one message for each pair of ranks and direction, and what comes put in place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.checked import as_bytes
from tatami.progress import reported
from tatami.runtime.rows import Rows
from tatami.tiling import Span, Tiling


@dataclass(frozen=True, kw_only=True)
class Moved:
    """What a re-tiling moved: units of all pairs, over all ranks; and the bytes that this rank sent."""

    num_units: int
    sent_bytes: int


def carry(
    comm: AbstractCommunicator,
    *,
    incoming: Mapping[int, Sequence[torch.Tensor]],
    outgoing: Mapping[int, Sequence[torch.Tensor]],
    tag: int,
) -> int:
    """Fill the views `incoming`, by the rank they come from, with those that this rank has `outgoing` to it.

    Returns:
        The bytes that this rank sent.
    """
    incoming, outgoing = ({peer: views for peer, views in each.items() if views} for each in (incoming, outgoing))
    rooms = {
        peer: torch.empty(sum(map(_bytes, views)), dtype=torch.uint8, device=views[0].device)
        for peer, views in incoming.items()
    }
    packed = {peer: torch.cat([as_bytes(view.contiguous()) for view in views]) for peer, views in outgoing.items()}
    requests = [comm.irecv(room, peer, tag=tag) for peer, room in rooms.items()]
    requests += [comm.isend(bundle, peer, tag=tag) for peer, bundle in packed.items()]
    for request in reported(requests, "moving rows", unit="messages", is_shown=comm.rank == 0):
        request.wait()
    for peer, room in rooms.items():
        unpack(room, incoming[peer])
    return sum(bundle.numel() for bundle in packed.values())


def unpack(room: torch.Tensor, views: Sequence[torch.Tensor]) -> None:
    """Fill `views` from the bytes of `room`, (bytes,), in which they lie one after the other."""
    position = 0
    for view in views:
        # A clone starts at an aligned address whatever came before it in the message.
        view.copy_(room[position : position + _bytes(view)].clone().view(view.dtype).view(view.shape))
        position += _bytes(view)


def units_of(tiling: Tiling, name: str) -> Span:
    """The units of the processor `name`."""
    tile = tiling.by_processor.get(name)
    return Span(0, 0) if tile is None else tile.units


def counted_from(origin: Span, span: Span) -> Span:
    """`span` of the unit axis, counted from the first unit of `origin`."""
    return Span(span.start - origin.start, span.stop - origin.start) if span.size else Span(0, 0)


def pieces_of(name: str, rows: Rows, *, here: Span, tiling: Tiling) -> list[tuple[str, torch.Tensor]]:
    """Views of the rows that are here, one for all units that the same ranks hold, each with a name for messages."""
    edges = sorted({edge for tile in tiling.tiles for edge in (tile.units.start, tile.units.stop)})
    return [
        (f"{name} (units {start} to {stop - 1}, part {number})", view)
        for start, stop in pairwise(edges)
        if here.start <= start and stop <= here.stop
        for number, view in enumerate(rows.cut(counted_from(here, Span(start, stop))))
    ]


def room_for(rows: Rows, *, units: int, device: str | None = None) -> torch.Tensor:
    """An uninitialised tensor like that of `rows`, of so many units; on its device, or another."""
    shape = list(rows.tensor.shape)
    shape[rows.runs.axis] = units * rows.runs.per_unit
    return rows.tensor.new_empty(shape, device=device)


def elementwise(optimizer: torch.optim.Optimizer, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What an optimizer keeps for every element of a tensor, in the same order on every rank."""
    state = optimizer.state.get(tensor, {})
    return {
        key: state[key] for key in sorted(state) if isinstance(state[key], torch.Tensor) and state[key].shape == tensor.shape
    }


def put(tensor: torch.Tensor, replacement: torch.Tensor) -> None:
    """Give `tensor` other data, of any shape."""
    # Where a loss of an earlier step is still alive, so is autograd's accumulator of this parameter, which expects gradients
    # of the old shape. torch resets it only when the dtype changes.
    tensor.data = tensor.data.new_empty(0, dtype=torch.float16 if tensor.dtype is not torch.float16 else torch.float32)
    tensor.data = replacement


def _bytes(view: torch.Tensor) -> int:
    return view.numel() * view.element_size()
