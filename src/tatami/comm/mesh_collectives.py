"""Ranks with a connection for each pair: their waits, and collectives made of messages, which move bytes of every dtype.

What each rank has for each goes there at once. Sums and broadcasts of many bytes begin with a piece for each rank, which adds
up its own, and then sends it to all, so that no rank sends or receives more than twice the bytes of the tensor. A sum has the
same bits on all ranks: it is added up in one place, or in the order of the ranks.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Never

import torch

from tatami.clock import SystemClock
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.checked import MAX_TAG, as_bytes
from tatami.comm.reduction import Op, combine
from tatami.comm.stall_report import AbstractRollCall
from tatami.comm.tcp_connection import Transfer
from tatami.comm.tcp_mesh import TcpMesh
from tatami.comm.wait import Waiting, WaitPolicy
from tatami.errors import CommError, RankDiedError

_FEW_BYTES = 65536
"""Sums and broadcasts that are, sent to all others, no more bytes than that go to them at once."""
_ROOM_BYTES = 1 << 22
"""For what comes from all ranks at a time, twice."""
_SLICE_S = 0.25
"""So long a wait goes on before it is looked whether another rank asks what this one does."""


class AbstractMeshCommunicator(AbstractCommunicator):
    """How a rank waits, and the collectives of tensors of the host.

    Attributes:
        policy: how polls for what is not a message are spaced.
        world_ranks: of all ranks, in the communicator that this one is a part of: those of the mesh.
        mesh: on which messages move; one for all parts of a communicator.
    """

    policy: WaitPolicy
    world_ranks: tuple[int, ...]
    mesh: TcpMesh
    _number: int
    _num_collectives = 0

    def __init__(
        self,
        *,
        rank: int,
        hosts: tuple[str, ...],
        name: str,
        timeout_s: float,
        roll_call: AbstractRollCall | None,
        off: threading.Event | None,
    ) -> None:
        super().__init__(rank=rank, hosts=hosts, timeout_s=timeout_s)
        self.clock = SystemClock()
        self._name = name
        self._roll_call = roll_call
        self._off = off
        self._severed = False

    @property
    def roll_call(self) -> AbstractRollCall | None:
        return self._roll_call

    @property
    def lineage(self) -> str:
        return self._name

    def left_s(self, start_s: float) -> float:
        """What is left of the timeout of a wait that began then."""
        return self.timeout_s - (self.clock.now_s() - start_s)

    @property
    def ends_with_its_ranks(self) -> bool:
        """Whether no other communicator follows where a rank ends."""
        return self._off is None

    def answer(self, waiting: Waiting) -> None:
        """In a long wait: answer those who ask, and raise what another rank has failed with."""
        if self._roll_call is not None:
            self._roll_call.answer(waiting.describe())
            needs = self.world_ranks if waiting.peer is None else (self.world_ranks[waiting.peer],)
            self._roll_call.refusals.check(self._name, needs, now_s=self.clock.now_s())

    def check_off(self) -> None:
        """
        Raises:
            CommError: this communicator was called off.
        """
        if self._severed or (self._off is not None and self._off.is_set()):
            raise CommError(f"{self._name} was called off on rank {self.rank} of {self.size}: its members change")

    def _sending(self, tensor: torch.Tensor, dest: int, tag: int) -> tuple[int, Transfer]:
        return dest, self.mesh.send(self.world_ranks[dest], (self._number, tag), _memory(tensor))

    def _receiving(self, out: torch.Tensor, source: int, tag: int) -> tuple[int, Transfer]:
        return source, self.mesh.expect(self.world_ranks[source], (self._number, tag), _memory(out))

    def _seeking(self, source: int, out: torch.Tensor) -> tuple[int, Transfer]:
        return source, self.mesh.seek(self.world_ranks[source], self._number, _memory(out))

    # -- collectives --------------------------------------------------------------------------------------------------

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


class MessageRequest(AbstractRequest):
    """Messages that are complete together, by the rank at their other end; then those of the next phase.

    A phase begins in whatever wait of this rank the one before ends, as the other ranks may wait for its messages.
    """

    def __init__(
        self, communicator: AbstractMeshCommunicator, waiting: Waiting, *phases: Callable[[], Sequence[tuple[int, Transfer]]]
    ) -> None:
        """
        Args:
            phases: each begins its messages when those of the phase before are complete; the first one's begin now.
        """
        self._communicator = communicator
        self._waiting = waiting
        self._phases = deque(phases)
        self._transfers = self._phases.popleft()()
        if self._phases and not self._advance():
            communicator.mesh.pursue(self._advance)

    def test(self) -> bool:
        if not self._is_settled():
            self._communicator.mesh.progress(0.0, is_over=self._is_settled)
        return self._is_over()

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        while not self._is_over():
            if (left_s := communicator.left_s(start_s)) <= 0:
                raise self._given_up().timeout(
                    communicator.timeout_s, roll_call=communicator.roll_call, members=communicator.policy.members
                )
            communicator.mesh.progress(min(left_s, _SLICE_S), is_over=self._is_settled)
            if not self._is_settled():
                communicator.check_off()
                try:
                    communicator.answer(self._waiting)
                except Exception:
                    self._given_up()
                    raise

    def _advance(self) -> bool:
        """Begin what can begin now; whether no phase will have to be begun any more."""
        while self._phases and self._are_settled():
            if any(transfer.problem for _, transfer in self._transfers):
                self._phases.clear()
            else:
                self._transfers = self._phases[0]()
                self._phases.popleft()
        return not self._phases

    def _are_settled(self) -> bool:
        return all(transfer.is_settled for _, transfer in self._transfers)

    def _is_settled(self) -> bool:
        return not self._phases and self._are_settled()

    def _is_over(self) -> bool:
        for peer, transfer in self._transfers:
            if transfer.problem:
                self._fail(peer, transfer)
        return self._is_settled()

    def _fail(self, peer: int, transfer: Transfer) -> Never:
        self._communicator.check_off()
        if not transfer.is_broken:
            raise CommError(f"{self._waiting.describe()}: {transfer.problem}")
        if self._communicator.ends_with_its_ranks:  # the peer may have said why it ends
            self._communicator.answer(self._waiting)
        raise RankDiedError(
            f"{self._waiting.describe()}: rank {peer} has ended, or the link to it broke: {transfer.problem}", rank=peer
        )

    def _given_up(self) -> Waiting:
        self._phases.clear()
        open_ones = [(peer, transfer) for peer, transfer in self._transfers if not transfer.is_settled]
        for peer, transfer in open_ones:
            self._communicator.mesh.withdraw(self._communicator.world_ranks[peer], transfer)
        missing = tuple(sorted({peer for peer, _ in open_ones}))
        return self._waiting if self._waiting.peer is not None else replace(self._waiting, missing=missing)


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


def _memory(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    return as_bytes(tensor).numpy().data
