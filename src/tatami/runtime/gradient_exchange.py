"""Gradient sums: gradients are summed across replicas, which split the samples and share the units.

Who sends which units to whom is data (`tatami.tiling.traffic`); here it is carried out. Gradients of replicated parameters,
the same on every rank of a replica, ride on the same messages: each rank hears of every other replica from one of its members.
Where each rank is a replica, all gradients are one vector, and messages are pieces of its memory: nothing is packed.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

import torch

from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.runtime.gradient_memory import GradientStage, GradientVector
from tatami.runtime.rows import Rows, blocks, flat_rows, pack
from tatami.runtime.stopwatch import LinkTimes
from tatami.runtime.vector_sum import VectorSum, wire_dtype
from tatami.tiling import Span, Tiling
from tatami.tiling.traffic import SumKind, gradient_sums, is_one_vector

_TAG = 7


@dataclass(frozen=True, kw_only=True)
class _Transfer:
    """One message as this rank sees it: with whom, which of its units of which pair, and whether replicated gradients ride."""

    peer: int
    replica: int
    spans: tuple[tuple[int, Span], ...]
    carries_replicated: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Room:
    """The memory of one message, and where on the stages what it carries lies: found once.

    Attributes:
        buffer: (elements,).
        pieces: units on a stage, and their place in the buffer; both flat.
        riders: the rest of the buffer, for replicated gradients.
    """

    buffer: torch.Tensor
    pieces: tuple[tuple[torch.Tensor, torch.Tensor], ...]
    riders: torch.Tensor


@dataclass(kw_only=True, eq=False)
class _UnderWay:
    """A sum that has begun.

    Attributes:
        riders: replicated gradients, which travel with the rest.
        own: the same, one after the other, as they travel.
        arrivals, sends: of the phase.
    """

    riders: Sequence[torch.Tensor]
    own: torch.Tensor
    arrivals: list[tuple[AbstractRequest, _Transfer, _Room]] = field(default_factory=list)
    sends: list[AbstractRequest] = field(default_factory=list)


class GradientExchange:
    """Sums gradients across the replicas of a tiling, over one communicator of all its ranks.

    Args:
        comm: all ranks of the tiled model.
        tilings: one for each pair of the network; the same replicas, cut for that pair's units.
        names: the processor of every rank.
        wire: to what gradients are rounded on their way, this rank's own, too; None: they travel as they are.
        rates: at which processors send and receive, as `transfer_rates` has them, the same on all ranks; None: all alike.
        byte_s: of the slowest link, as `slowest_byte_s` has it, the same on all ranks.
    """

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        tilings: Sequence[Tiling],
        names: Sequence[str],
        wire: str | None = None,
        rates: Mapping[str, float] | None = None,
        byte_s: float = 0.0,
    ) -> None:
        self._comm = comm
        self._tilings = tuple(tilings)
        self._names = tuple(names)
        self._wire, self.rates = wire, rates
        self._vectors = VectorSum(comm, wire=wire, byte_s=byte_s)
        self._rooms: dict[tuple[object, ...], _Room] = {}
        self._stages: list[GradientStage] = []
        self._vector: GradientVector | None = None
        self._begun: _UnderWay | None = None
        self._interrupted: list[_UnderWay] = []
        self._shapes: tuple[object, ...] = ()
        me = names[comm.rank]
        tile = tilings[0].by_processor.get(me)
        self._replica = None if tile is None else tile.replica
        self._num_replicas = len(tilings[0].replicas)
        self._speaks_for_replica = tile is not None and tilings[0].replicas[tile.replica][0].processor == me
        self._rides = True
        self._sends: list[list[_Transfer]] = []
        self._receives: list[list[_Transfer]] = []

    def _plan(self, unit_elements: Sequence[int], riders: int, *, element_bytes: int) -> None:
        """This rank's part of the messages that sum so many elements."""
        self._rooms.clear()
        names, tilings = self._names, self._tilings
        planned = gradient_sums(
            tilings,
            unit_elements=unit_elements,
            riders=riders,
            element_bytes=element_bytes,
            wire=self._wire,
            names=names,
            hosts=dict(zip(names, self._comm.hosts, strict=True)),
            rates=self.rates,
        )
        self._rides = all(each.kind is SumKind.GRADIENTS for each in planned)
        me = names[self._comm.rank]
        tile = tilings[0].by_processor.get(me)
        offsets = [tiling.by_processor[me].units.start if tile is not None else 0 for tiling in tilings]
        rank_of = {name: rank for rank, name in enumerate(names)}
        replica_of = {other.processor: other.replica for other in tilings[0].tiles}
        self._sends = [[], []]
        self._receives = [[], []]
        for message in (message for each in planned for message in each.messages):
            if me not in (message.source, message.dest):
                continue
            sending = message.source == me
            transfer = _Transfer(
                peer=rank_of[message.dest if sending else message.source],
                replica=replica_of[message.source],
                spans=tuple((p, Span(s.start - offsets[p], s.stop - offsets[p])) for p, s in message.spans),
                carries_replicated=message.carries_riders,
            )
            (self._sends if sending else self._receives)[message.phase].append(transfer)
        for receives in self._receives:
            receives.sort(key=lambda transfer: (transfer.replica, transfer.peer))

    def sum(
        self, pairs: Sequence[Sequence[Rows]], replicated: Sequence[torch.Tensor], *, times: LinkTimes | None = None
    ) -> list[torch.Tensor]:
        """Sum over the replicas. All owners of a unit end with the same bits, and the order of sums is the same in every run.

        Args:
            pairs: the tensors of every pair, contiguous; they become the sums.
            replicated: may be other layers' gradients too, and stay as they are.
            times: records when the messages of the first phase leave and arrive.

        Returns:
            The sums of the replicated tensors.
        """
        tensors = [*(rows.tensor for pair in pairs for rows in pair), *replicated]
        dtype = _sum_dtype(tensors)
        if self._begun is not None:  # by an error; what is still under way goes on to use its memory
            self._interrupted.append(self._begun)
            self._shapes = ()
        shapes = (dtype, *map(len, pairs), *(tensor.shape for tensor in tensors))
        if shapes != self._shapes:
            num_riders = sum(tensor.numel() for tensor in replicated)
            self._plan([sum(r.per_unit for r in pair) for pair in pairs], num_riders, element_bytes=dtype.itemsize)
            tiling = self._tilings[0]
            whole = is_one_vector(
                replicas=self._num_replicas, tiles=len(tiling.tiles), ranks=len(self._names), blocks=len(pairs)
            )
            self._vector = GradientVector(tensors, dtype=dtype) if whole else None
            self._stages = [] if whole else [GradientStage(pair, dtype=dtype) for pair in pairs]
            self._shapes = shapes
        riders, own = [], tensors[0].new_empty(0, dtype=dtype)
        if self._vector is not None:
            self._vector.take(tensors)
        else:
            for stage, pair in zip(self._stages, pairs, strict=True):
                stage.take(pair)
            riders = [tensor.to(dtype, copy=True, memory_format=torch.contiguous_format) for tensor in replicated]
            if not self._rides:
                self._all_reduce(riders)
            elif riders:
                own = torch.cat([rider.view(-1) for rider in riders])
        own = own.to(wire_dtype(self._wire) or dtype)
        self._begun = begun = _UnderWay(riders=riders, own=own)
        self._receive(begun, phase=0)
        self._send(begun, phase=0, times=times)
        self._sum_arrivals(begun, times)
        for request, _, room in begun.arrivals:
            request.wait()
            for units, piece in room.pieces:
                units.copy_(piece)
        for sent in begun.sends:
            sent.wait()
        self._begun = None
        if self._vector is None:
            for stage, pair in zip(self._stages, pairs, strict=True):
                stage.give(pair)
            return [rider.to(tensor.dtype) for tensor, rider in zip(replicated, begun.riders, strict=True)]
        sums = [torch.empty_like(tensor, memory_format=torch.contiguous_format) for tensor in replicated]
        self._vector.give([*(rows.tensor for pair in pairs for rows in pair), *sums])
        return sums

    def _sum_arrivals(self, begun: _UnderWay, times: LinkTimes | None) -> None:
        """Wait for the other replicas, add them up in their order while the rest is still under way, and give the sums back."""
        heard: dict[int, torch.Tensor] = {}
        for request, transfer, room in begun.arrivals:
            if times is None:
                request.wait()
            else:
                times.wait(request, transfer.peer)
            # Messages may be sent from where the gradients lie (`_room`). With two replicas each sends all its units and adds
            # to the same ones, which must have left by then; with more, a rank sends the parts that others sum, and adds to the
            # part that it sums.
            if self._num_replicas == 2:  # each has sent all that it now adds to
                for sent in begun.sends:
                    sent.wait()
            if self._vector is not None:
                heard[transfer.replica] = room.buffer
                continue
            for units, piece in room.pieces:
                units.add_(piece)
            if transfer.carries_replicated:
                heard[transfer.replica] = room.riders
        if self._vector is not None:
            if heard:  # all of the same elements
                (units, _), *_ = begun.arrivals[0][2].pieces
                own = units if self._wire is None else units.to(wire_dtype(self._wire))
                _sum_in_order([units], own, heard, mine=self._replica, num_replicas=self._num_replicas)
        elif begun.own.numel():
            _sum_in_order(begun.riders, begun.own, heard, mine=self._replica, num_replicas=self._num_replicas)
        left = begun.sends
        begun.sends = []
        self._send(begun, phase=1, times=None)
        for sent in left:  # from where the sums may come to
            sent.wait()
        self._receive(begun, phase=1)

    def _receive(self, begun: _UnderWay, *, phase: int) -> None:
        """Begin to receive all of the phase."""
        begun.arrivals = []
        for transfer in self._receives[phase]:
            room = self._room(False, phase, transfer, begun.own)
            request = self._comm.irecv(room.buffer, transfer.peer, tag=_TAG + phase)
            begun.arrivals.append((request, transfer, room))

    def _send(self, begun: _UnderWay, *, phase: int, times: LinkTimes | None) -> None:
        """Begin to send all of the phase."""
        filled: set[_Room] = set()
        for transfer in self._sends[phase]:
            room = self._room(True, phase, transfer, begun.own)
            if room not in filled:
                filled.add(room)
                for units, piece in room.pieces:
                    piece.copy_(units)
                    if self._wire is not None:
                        units.copy_(piece)  # rounded, as the others will have it
                if transfer.carries_replicated:
                    room.riders.copy_(begun.own)
            if times is not None:
                times.sends(transfer.peer)
            begun.sends.append(self._comm.isend(room.buffer, transfer.peer, tag=_TAG + phase))

    def _room(self, sending: bool, phase: int, transfer: _Transfer, riders: torch.Tensor) -> _Room:
        # What goes to several ranks is packed once.
        key = (phase, transfer.spans, transfer.carries_replicated) if sending else (phase, transfer.peer)
        room = self._rooms.get(key)
        if room is None:
            staged = [(self._vector or self._stages[pair]).span(span) for pair, span in transfer.spans]
            sizes = [units.numel() for units in staged]
            size = sum(sizes)
            if len(staged) == 1 and self._wire is None and not transfer.carries_replicated and (sending or phase == 1):
                room = self._rooms[key] = _Room(staged[0], (), staged[0][:0])  # as it lies there
                return room
            buffer = riders.new_empty(size + (riders.numel() if transfer.carries_replicated else 0))
            starts = accumulate(sizes, initial=0)
            pieces = tuple((units, buffer[start : start + units.numel()]) for start, units in zip(starts, staged, strict=False))
            room = self._rooms[key] = _Room(buffer, pieces, buffer[size:])
        return room

    def _all_reduce(self, tensors: Sequence[torch.Tensor]) -> None:
        """Sum large replicated gradients over all ranks, one rank speaking for each replica."""
        flat = tensors[0].new_zeros(sum(tensor.numel() for tensor in tensors))
        whole = [(flat_rows(tensor), Span(0, tensor.numel())) for tensor in tensors]
        if self._speaks_for_replica:
            pack(flat, whole)
        self._vectors.sum_(flat)
        for rows, span, pieces in blocks(flat, whole):
            rows.cut(span)[0].copy_(pieces[0])


def _sum_dtype(tensors: Sequence[torch.Tensor]) -> torch.dtype:
    """One dtype for all; half precision is summed in float32, and without a `wire` must travel so."""
    dtype = torch.float32
    for tensor in tensors:
        dtype = torch.promote_types(dtype, tensor.dtype)
    return dtype


def _sum_in_order(
    tensors: Sequence[torch.Tensor], own: torch.Tensor, heard: dict[int, torch.Tensor], *, mine: int | None, num_replicas: int
) -> None:
    """What all replicas have of `tensors`, added from the left: the same bits on whichever rank they are added.

    Args:
        tensors: of this rank's replica; `own` has the same, one after the other, as it travels.
        heard: of every other replica, as `own`; that of the first one is overwritten.
    """
    # Floats: (1e8 + 1) - 1e8 is 0 in float32, and (1e8 - 1e8) + 1 is 1. If each rank began with its own part, ranks would end
    # with other bits, and replicas would drift apart.
    contributions = [own if replica == mine else heard[replica] for replica in range(num_replicas)]
    if mine == 0 and num_replicas > 1:  # a + b has the bits of b + a, and what was received is memory to add to
        contributions[:2] = contributions[1::-1]
    total = contributions[0].to(tensors[0].dtype, copy=contributions[0] is own)
    for contribution in contributions[1:]:
        total += contribution
    for rows, span, pieces in blocks(total, [(flat_rows(tensor), Span(0, tensor.numel())) for tensor in tensors]):
        rows.cut(span)[0].copy_(pieces[0])
