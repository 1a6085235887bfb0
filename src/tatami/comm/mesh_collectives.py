"""Collectives of tensors of the host, made of messages between all pairs of ranks; they move bytes of every dtype.

What each rank has for each goes there at once. Sums and broadcasts of many bytes begin with a piece for each rank, which adds
up its own, and then sends it to all, so that no rank sends or receives more than twice the bytes of the tensor. A sum has the
same bits on all ranks: it is added up in one place, or in the order of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch

from tatami.comm.base import AbstractRequest
from tatami.comm.checked import MAX_TAG, as_bytes
from tatami.comm.reduction import Op, combine
from tatami.comm.tcp_connection import Transfer
from tatami.comm.tcp_waits import AbstractTcpWaits, MessageRequest
from tatami.comm.wait import Waiting

_FEW_BYTES = 65536
"""Sums and broadcasts that are, sent to all others, no more bytes than that go to them at once."""
_ROOM_BYTES = 1 << 22
"""For what comes from all ranks at a time, twice."""


class AbstractMeshCollectives(AbstractTcpWaits):
    """The collectives of tensors of the host."""

    _num_collectives = 0

    def _start_barrier(self) -> AbstractRequest:
        return self._start_allreduce(torch.zeros(1, dtype=torch.uint8, device="cpu"), Op.MAX, operation="barrier")

    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest:
        whole, is_root = as_bytes(tensor), self.rank == root
        if self._are_few(whole):
            return self._collect("bcast", self._swap(self._to_all(whole) if is_root else {}, {} if is_root else {root: whole}))
        pieces = torch.tensor_split(whole, self.size)
        mine = pieces[self.rank]
        hand_out = self._swap(_by_rank(pieces) if is_root else {}, {} if is_root else {root: mine})
        to_others = {rank: piece for rank, piece in self._to_all(mine).items() if rank != root}
        return self._collect("bcast", hand_out, self._swap(to_others, {} if is_root else _by_rank(pieces)))

    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        rooms = {} if out is None else _parts(out, counts)
        return self._collect("gather", self._swap({root: tensor.view(-1)}, rooms))

    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        given = {} if tensor is None else _parts(tensor, counts)
        return self._collect("scatter", self._swap(given, {root: out.view(-1)}))

    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest:
        return self._collect("allgather", self._swap(self._to_all(tensor.view(-1)), _parts(out, counts)))

    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest:
        return self._collect("alltoall", self._swap(_parts(tensor, send_counts), _parts(out, recv_counts)))

    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest:
        whole, is_root = tensor.view(-1), self.rank == root
        if self._are_few(whole):
            came = self._room(whole.numel() if is_root else 0, whole)
            add_up = _then(lambda: whole.copy_(_reduced(came, op)) if is_root else None)
            return self._collect("reduce", self._swap({root: whole}, _by_rank(came) if is_root else {}), add_up)
        pieces = torch.tensor_split(whole, self.size)
        total = pieces[self.rank].clone()
        return self._collect(
            "reduce", *self._reducing(pieces, total, op), self._swap({root: total}, _by_rank(pieces) if is_root else {})
        )

    def _start_allreduce(self, tensor: torch.Tensor, op: Op, *, operation: str = "allreduce") -> AbstractRequest:
        whole = tensor.view(-1)
        if self._are_few(whole):
            came = self._room(whole.numel(), whole)
            add_up = _then(lambda: whole.copy_(_reduced(came, op)))
            return self._collect(operation, self._swap(self._to_all(whole), _by_rank(came)), add_up)
        pieces = torch.tensor_split(whole, self.size)
        total = pieces[self.rank]
        to_all = self._swap(self._to_all(total), _by_rank(pieces))
        return self._collect(operation, *self._reducing(pieces, total, op), to_all)

    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest:
        parts = _parts(tensor, counts)
        total = out.view(-1).copy_(parts[self.rank])
        return self._collect("reduce_scatter", *self._reducing(list(parts.values()), total, op))

    # -- what they are made of ------------------------------------------------------------------------------------------

    def _reducing(self, pieces: Sequence[torch.Tensor], total: torch.Tensor, op: Op) -> list[_Phase]:
        """Phases after which `total`, until then this rank's values of its own piece, is what all have of it.

        A part at a time, to bound the memory; another part is under way while one is added.
        """
        width = max(1, _ROOM_BYTES // (self.size * total.itemsize))
        rounds = max(1, -(-max(piece.numel() for piece in pieces) // width))
        rooms = [self._room(min(width, total.numel()), total) for _ in range(min(rounds, 2))]
        others = [rank for rank in range(self.size) if rank != self.rank]

        def part(at: int) -> slice:
            return slice(at * width, (at + 1) * width)

        def add(at: int) -> None:
            mine = total[part(at)]
            for rank in others:
                combine(mine, rooms[at % 2][rank, : mine.numel()], op)

        def begin(at: int, tag: int) -> Sequence[tuple[int, Transfer]]:
            size = total[part(at)].numel()
            given = {rank: pieces[rank][part(at)] for rank in others}
            begun = self._swap(given, {rank: rooms[at % 2][rank, :size] for rank in others})(tag)
            if at:
                add(at - 1)
            return begun

        return [*(partial(begin, at) for at in range(rounds)), _then(partial(add, rounds - 1))]

    def _collect(self, operation: str, *phases: _Phase) -> AbstractRequest:
        """The phases of one collective. Its messages have a tag of their own: others may be under way in another order."""
        self._num_collectives += 1
        tag = MAX_TAG + self._num_collectives
        waiting = Waiting(operation=operation, rank=self.rank, size=self.size)
        return MessageRequest(self, waiting, *(partial(phase, tag) for phase in phases))

    def _swap(self, given: Mapping[int, torch.Tensor], rooms: Mapping[int, torch.Tensor]) -> _Phase:
        """What is `given` for each rank goes there, and what each has for this one comes into its room; nothing, if empty."""

        def swap(tag: int) -> list[tuple[int, Transfer]]:
            if self.rank in given and self.rank in rooms:
                rooms[self.rank].copy_(given[self.rank])
            # Not all to the same rank at once.
            others = [(self.rank + away) % self.size for away in range(1, self.size)]
            begun = [self._receiving(rooms[rank], rank, tag) for rank in others if rank in rooms and rooms[rank].numel()]
            return begun + [self._sending(given[rank], rank, tag) for rank in others if rank in given and given[rank].numel()]

        return swap

    def _to_all(self, tensor: torch.Tensor) -> dict[int, torch.Tensor]:
        return dict.fromkeys(range(self.size), tensor)

    def _room(self, num: int, like: torch.Tensor) -> torch.Tensor:
        """(ranks, num): for as many from each."""
        return torch.empty(self.size, num, dtype=like.dtype, device="cpu")

    def _are_few(self, tensor: torch.Tensor) -> bool:
        return tensor.nbytes * (self.size - 1) <= _FEW_BYTES


_Phase = Callable[[int], Sequence[tuple[int, Transfer]]]
"""Begins messages with a tag, and returns them."""


def _then(action: Callable[[], object]) -> _Phase:
    """A phase without messages."""

    def act(_: int) -> tuple[()]:
        action()
        return ()

    return act


def _parts(tensor: torch.Tensor, counts: Sequence[int]) -> dict[int, torch.Tensor]:
    return _by_rank(torch.split(tensor.view(-1), list(counts)))


def _by_rank(tensors: Sequence[torch.Tensor] | torch.Tensor) -> dict[int, torch.Tensor]:
    return dict(enumerate(tensors))


def _reduced(came: torch.Tensor, op: Op) -> torch.Tensor:
    """(elements,): of all rows, which it takes."""
    for values in came[1:]:
        combine(came[0], values, op)
    return came[0]
