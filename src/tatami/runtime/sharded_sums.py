"""Gradient sums of ranks that hold the same weights and shard the optimizer's state (ZeRO): each sums and updates its shard.

    backward()         gradients are sent to the ranks that own them (reduce-scatter); `.grad` of a weight is the sum where
                       this rank owns its elements, and NaN elsewhere, so that nothing computes with a part of a sum unnoticed
    optimizer.step()   steps the shard that is here (sharded_steps.py); `gather` then sends the weights to all (all-gather)

That is as many bytes as an all-reduce of the gradients. Both go in rounds, so that messages need little memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from itertools import accumulate, pairwise

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.errors import CommTimeoutError
from tatami.gradients.base import AbstractGradientSums
from tatami.runtime.phases import IterationPhase, Phases
from tatami.runtime.same_batch import different_sizes
from tatami.runtime.vector_sum import VectorSum, wire_dtype
from tatami.tiling.sharding import Ranges, Slices, num_rounds, rounds_of, shard_bounds

_TAG = 17
_MILLION = 1_000_000
_KEPT = 16
"""So many sets of weights that are exchanged together are remembered."""
Round = tuple[Slices, ...]


class ShardedSums(AbstractGradientSums):
    """Gradient sums of one model whose optimizer state is sharded.

    Args:
        comm: the ranks; each holds all weights of the network, or of one pipeline stage.
        shares: of every rank, the share of all trained weights that it updates.
        tied: weights that other pipeline stages hold, too. Replicas share each of them evenly, so that the ranks of one replica
            update the same elements in all these stages.
        wire: as what gradients travel; None: as they are. Weights always travel as they are.
        phases: where the time goes.
        layout: who has which samples.
        replicas: the ranks of each replica now.
        replica: the number of this rank's; None where it has no samples.
    """

    shares_units = False

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        shares: Sequence[float],
        tied: Collection[nn.Parameter] = (),
        wire: str | None,
        phases: Phases,
        layout: Callable[[], object],
        replicas: Callable[[], list[list[int]]],
        replica: Callable[[], int | None],
    ) -> None:
        self._comm, self._shares, self._wire, self._phases = comm, tuple(shares), wire_dtype(wire), phases
        self._tied = tied
        self._layout, self._replicas, self._replica = layout, replicas, replica
        self._facts = VectorSum(comm)
        self._ranges: dict[nn.Parameter, Ranges] = {}
        self._rounds: dict[tuple[int, ...], list[Round]] = {}
        self._rooms: dict[tuple[object, ...], torch.Tensor] = {}

    @property
    def layout(self) -> object:
        return self._layout()

    @property
    def are_needed(self) -> bool:
        return self._comm.size > 1

    def knows(self, parameter: torch.Tensor) -> bool:
        """Whether gradients of this parameter were summed."""
        return parameter in self._ranges

    def range_of(self, parameter: torch.Tensor) -> tuple[int, int]:
        """The elements of a parameter that this rank updates."""
        assert isinstance(parameter, nn.Parameter)
        return self._ranges[parameter][self._comm.rank]

    @property
    def part_here(self) -> tuple[int, int, int]:
        """The part of all elements that this rank updates, in millionths, known before any of them is shared out."""
        ends = [round(_MILLION * end) for end in accumulate(self._shares, initial=0.0)]
        return ends[self._comm.rank], ends[self._comm.rank + 1], _MILLION

    def part(self, parameter: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        """A view of the shard's part of `like`, shaped as the parameter: flat, or as it is where that is all."""
        start, stop = self.range_of(parameter)
        return like if stop - start == parameter.numel() else like.view(-1)[start:stop]

    def shard(self, parameters: Sequence[nn.Parameter]) -> None:
        """Share out those that are not known yet; the same on all ranks."""
        new = [parameter for parameter in parameters if parameter not in self._ranges]
        for parameter in new:
            if not parameter.is_contiguous():
                parameter.data = parameter.data.contiguous()
        tied = [parameter for parameter in new if parameter in self._tied]
        rest = [parameter for parameter in new if parameter not in self._tied]
        replicas = self._replicas()
        wanted = [share * sum(each.numel() for each in new) for share in self._shares]
        for each in tied:
            cuts = shard_bounds([each.numel()], (1 / len(replicas),) * len(replicas))[0]
            ranges = {rank: range_ for (rank,), range_ in zip(replicas, pairwise(cuts), strict=True)}
            self._ranges[each] = tuple(ranges.get(rank, (0, 0)) for rank in range(self._comm.size))
            wanted = [size - (stop - start) for size, (start, stop) in zip(wanted, self._ranges[each], strict=True)]
        sizes = [max(0.0, size) for size in wanted]
        shares = [size / sum(sizes) for size in sizes] if tied and sum(sizes) else self._shares
        cut = shard_bounds([each.numel() for each in rest], shares)
        self._ranges.update(zip(rest, (tuple(pairwise(bounds)) for bounds in cut), strict=True))

    def finish(
        self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor | None], *, weight: float, samples: int
    ) -> list[torch.Tensor | None]:
        self.shard(parameters)
        used = self._agree([grad is not None for grad in gradients], samples)
        has = [grad for grad in gradients if grad is not None]
        if weight != 1.0 and has:
            torch._foreach_mul_(has, weight)
        sums = [
            (torch.zeros(each.shape, dtype=each.dtype, device=each.device) if grad is None else grad) if part else None
            for each, grad, part in zip(parameters, gradients, used, strict=True)
        ]
        summed = [each for each, part in zip(parameters, used, strict=True) if part]
        self._reduce(summed, [each for each in sums if each is not None])
        return sums

    def _agree(self, has: Sequence[bool], samples: int) -> list[bool]:
        """Which parameters have a gradient on any rank; refuses batches of different sizes. Collective."""
        facts = torch.zeros(len(has) + len(self._replicas()), dtype=torch.float64, device="cpu")
        facts[: len(has)] = torch.tensor(has, dtype=torch.float64, device="cpu")
        if (replica := self._replica()) is not None:
            facts[len(has) + replica] = samples
        self._facts.sum_(facts)
        found = facts.tolist()
        sizes = [round(each) for each in found[len(has) :]]
        if len(set(sizes)) > 1:
            raise different_sizes(sizes, replicas=self._replicas())
        return [each > 0 for each in found[: len(has)]]

    @torch.no_grad()
    def _reduce(self, parameters: Sequence[nn.Parameter], gradients: Sequence[torch.Tensor]) -> None:
        """Leave the sums in what this rank owns of the gradients, added in the order of the ranks; elsewhere NaN."""
        dtype = torch.float32  # half precision is summed so
        for each in gradients:
            dtype = torch.promote_types(dtype, each.dtype)
        flat = [each.view(-1) for each in gradients]
        me, size = self._comm.rank, self._comm.size

        def begin(number: int, round_: Round) -> Callable[[], None]:
            arrivals, sends = self._meet(number, round_, flat, dtype=self._wire or dtype, scatters=True)
            for peer, slices in enumerate(round_):
                for index, start, stop in slices if peer != me else ():
                    flat[index][start:stop].fill_(math.nan)
            own = _packed(flat, round_[me], self._room((number % 2, "own"), round_[me], flat, self._wire or dtype))

            def end() -> None:
                total = self._room(("total",), round_[me], flat, dtype).zero_()
                for rank in range(size):
                    if rank != me and rank in arrivals:
                        request, room = arrivals[rank]
                        request.wait()
                        total.add_(room)
                    elif rank == me:
                        total.add_(own)
                _unpack(total, flat, round_[me])
                for sent in sends:
                    sent.wait()

            return end

        self._in_rounds(parameters, begin)

    @torch.no_grad()
    def gather(self, parameters: Sequence[nn.Parameter]) -> None:
        """Every rank has updated what it owns of these: send it to all others. Collective.

        Raises:
            CommTimeoutError: other ranks do not step.
        """
        if not parameters or not self.are_needed:
            return
        flat = [each.detach().view(-1) for each in parameters]
        dtype = flat[0].dtype
        for each in flat:
            dtype = torch.promote_types(dtype, each.dtype)

        def begin(number: int, round_: Round) -> Callable[[], None]:
            arrivals, sends = self._meet(number, round_, flat, dtype=dtype, scatters=False)

            def end() -> None:
                for peer, (request, room) in arrivals.items():
                    request.wait()
                    _unpack(room, flat, round_[peer])
                for sent in sends:
                    sent.wait()

            return end

        with self._phases.during(IterationPhase.GRADIENTS):
            try:
                self._in_rounds(parameters, begin)
            except CommTimeoutError as error:
                error.add_note(
                    "after an optimizer's step: with sharded_optimizer=True each rank updates its shard and sends the weights "
                    "to all, so all ranks must step the same optimizers equally often"
                )
                raise

    def _meet(
        self, number: int, round_: Round, flat: Sequence[torch.Tensor], *, dtype: torch.dtype, scatters: bool
    ) -> tuple[dict[int, tuple[AbstractRequest, torch.Tensor]], list[AbstractRequest]]:
        """Begin to receive and send what is of one round: gradients to their owners, or weights from them."""
        me, tag = self._comm.rank, _TAG + (not scatters)
        arrivals, sends = {}, []
        for peer in range(self._comm.size):
            comes = round_[me if scatters else peer]
            if peer != me and comes:
                room = self._room((number % 2, "from", peer), comes, flat, dtype)
                arrivals[peer] = self._comm.irecv(room, peer, tag=tag), room
        packed: torch.Tensor | None = None
        for peer in range(self._comm.size):
            goes = round_[peer if scatters else me]
            if peer != me and goes:
                if packed is None or scatters:  # weights are the same for all
                    packed = _packed(flat, goes, self._room((number % 2, "to", peer), goes, flat, dtype))
                sends.append(self._comm.isend(packed, peer, tag=tag))
        return arrivals, sends

    def _in_rounds(self, parameters: Sequence[nn.Parameter], begin: Callable[[int, Round], Callable[[], None]]) -> None:
        """Each round begins before the one before it ends."""
        under_way: Callable[[], None] | None = None
        for number, round_ in enumerate(self._rounds_of(parameters)):
            following = begin(number, round_)
            if under_way is not None:
                under_way()
            under_way = following
        if under_way is not None:
            under_way()

    def _rounds_of(self, parameters: Sequence[nn.Parameter]) -> list[Round]:
        key = tuple(map(id, parameters))
        if key not in self._rounds:
            if len(self._rounds) == _KEPT:
                self._rounds.clear()
            size_bytes = sum(each.numel() * each.element_size() for each in parameters)
            ranges = [self._ranges[each] for each in parameters]
            self._rounds[key] = rounds_of(ranges, rounds=num_rounds(size_bytes))
        return self._rounds[key]

    def _room(self, key: tuple[object, ...], slices: Slices, flat: Sequence[torch.Tensor], dtype: torch.dtype) -> torch.Tensor:
        """Memory of this name for all slices; it is used again in later rounds."""
        size, device = sum(stop - start for _, start, stop in slices), flat[0].device
        found = self._rooms.get((*key, dtype, device))
        if found is None or len(found) < size:
            found = self._rooms[*key, dtype, device] = torch.empty(size, dtype=dtype, device=device)
        return found[:size]


def _packed(flat: Sequence[torch.Tensor], slices: Slices, room: torch.Tensor) -> torch.Tensor:
    for (index, start, stop), piece in zip(slices, _pieces(room, slices), strict=True):
        piece.copy_(flat[index][start:stop])
    return room


def _unpack(room: torch.Tensor, flat: Sequence[torch.Tensor], slices: Slices) -> None:
    for (index, start, stop), piece in zip(slices, _pieces(room, slices), strict=True):
        flat[index][start:stop].copy_(piece)


def _pieces(room: torch.Tensor, slices: Slices) -> Sequence[torch.Tensor]:
    return torch.split(room, [stop - start for _, start, stop in slices]) if slices else ()
