"""How chunks get from rank to rank: through the communicator, or, where that is MPI itself, by MPI's own calls.

A small message costs about a microsecond inside MPI, and a communicator's checks and request objects five times that. A chunk
is memory of ours, checked when it was made, so nothing is lost without them. Large tensors go through the communicator anyway.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from tatami.clock import Clock
from tatami.comm.base import AbstractCommunicator
from tatami.comm.checked import MAX_TAG
from tatami.comm.mpi import MpiCommunicator
from tatami.comm.wait import WaitPolicy, wait_until

TAG = MAX_TAG
"""On the communicator, whose other tags remain the user's; the tags of functions travel inside the messages."""
CLOSE_POLLS = 100
"""So many polls between two looks at the clock: a poll of MPI costs 0.2 us, the clock and giving way to others 1 us."""

Test = Callable[[], bool]
"""Whether a transfer is done; never blocks, makes progress."""


@dataclass(slots=True, eq=False)
class Chunk:
    """A reusable first message: its memory as a tensor, as bytes, by address, as the wire takes it, and its size."""

    tensor: torch.Tensor
    view: memoryview
    address: int
    spec: Any
    size_bytes: int


class AbstractWire(ABC):
    """Moves chunks.

    Attributes:
        chunk_bytes: the size of a chunk. A second message costs ten times what some KiB more of the first do.
        errors: what `Test` raises where the transfer failed and no error of ours says so.
    """

    chunk_bytes: int
    errors: tuple[type[Exception], ...] = ()

    def new_chunk(self) -> Chunk:
        """Memory for a message, with nothing in it."""
        tensor = torch.zeros(self.chunk_bytes, dtype=torch.uint8, device="cpu")
        view = tensor.numpy().data.cast("B")
        return Chunk(tensor, view, tensor.data_ptr(), self._spec(tensor), self.chunk_bytes)

    def _spec(self, tensor: torch.Tensor) -> Any:
        return tensor

    @abstractmethod
    def send(self, chunk: Chunk, peer: int, size_bytes: int) -> Test:
        """Begin to send a chunk, of which the first `size_bytes` say something.

        Raises:
            ClosedError: the communicator was closed.
        """

    @abstractmethod
    def recv(self, chunk: Chunk, peer: int) -> Test:
        """Be ready for the next chunk of `peer`.

        Raises:
            ClosedError: the communicator was closed.
        """

    @abstractmethod
    def send_memory(self, memory: torch.Tensor, peer: int) -> Test:
        """Begin to send contiguous bytes that follow a chunk.

        Raises:
            ClosedError: the communicator was closed.
        """


class CommunicatorWire(AbstractWire):
    """Through any communicator: whole chunks, because both sides must name the same size."""

    chunk_bytes = 4096

    def __init__(self, comm: AbstractCommunicator) -> None:
        self._comm = comm

    def send(self, chunk: Chunk, peer: int, size_bytes: int) -> Test:  # noqa: ARG002 -- whole chunks
        return self._comm.isend(chunk.tensor, peer, tag=TAG).test

    def recv(self, chunk: Chunk, peer: int) -> Test:
        return self._comm.irecv(chunk.tensor, peer, tag=TAG).test

    def send_memory(self, memory: torch.Tensor, peer: int) -> Test:
        return self._comm.isend(memory, peer, tag=TAG).test


class MpiWire(AbstractWire):
    """By MPI's own nonblocking calls on the communicator's handle; a handle that was freed is false.

    A receiver with room for a whole chunk takes one that is shorter, so only what says something is sent.
    """

    chunk_bytes = 32 * 1024

    def __init__(self, comm: MpiCommunicator) -> None:
        self._comm = comm
        self._through = CommunicatorWire(comm)
        self.errors = (comm.mpi.Exception,)

    def _spec(self, tensor: torch.Tensor) -> Any:
        return self._comm.as_buffer(tensor)

    def send(self, chunk: Chunk, peer: int, size_bytes: int) -> Test:
        handle = self._comm.handle
        if not handle:
            return self._through.send(chunk, peer, size_bytes)
        memory, _, datatype = chunk.spec
        test: Test = handle.Isend([memory, size_bytes, datatype], peer, TAG).Test
        return test

    def recv(self, chunk: Chunk, peer: int) -> Test:
        handle = self._comm.handle
        if not handle:
            return self._through.recv(chunk, peer)
        test: Test = handle.Irecv(chunk.spec, peer, TAG).Test
        return test

    def send_memory(self, memory: torch.Tensor, peer: int) -> Test:
        return self._through.send_memory(memory, peer)  # in pieces, as it is received


def wire_of(comm: AbstractCommunicator) -> AbstractWire:
    """The shortest way: not around a wrapper, whose purpose is to see each message."""
    return MpiWire(comm) if type(comm) is MpiCommunicator else CommunicatorWire(comm)


def wait_closely(done: Test, *, policy: WaitPolicy, timeout_s: float, clock: Clock) -> bool:
    """Poll `done` until it is true or `timeout_s` is over; returns which.

    As `wait_until`, but while the policy spins it gives way only after every `CLOSE_POLLS` polls: a message between ranks that
    have a core each is there after microseconds, and a core that was given away comes back after milliseconds.
    """
    polls = range(CLOSE_POLLS)
    if policy.spin_s > 0:
        for _ in polls:
            if done():
                return True

    def several() -> bool:
        return any(done() for _ in polls) if spinning_until_s > clock.now_s() else done()

    spinning_until_s = clock.now_s() + policy.spin_s
    return wait_until(several, policy=policy, timeout_s=timeout_s, clock=clock) is None
