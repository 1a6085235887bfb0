"""Means of several vectors over all ranks, taken while the ranks compute: what `overlap` makes.

    means = overlap(comm, sizes=[1000, 250_000])
    means.vectors[1].copy_(gradient)       # better: compute it there
    means.begin(1)                         # this rank's part is there; returns at once
    means.progress()                       # now and then: what can be done without waiting
    means.begin(0)
    means.wait()                           # every vector is the mean over all ranks

Every round begins every vector once, in any order, and ends with `wait`. All ranks of one host: they add up in each other's
memory, a slice each, as soon as all have begun a vector; no message is sent. Elsewhere nonblocking all-reduces are under way
meanwhile. A named algorithm (`AllReduce`) runs inside of `wait`.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Sequence
from itertools import accumulate

import torch

from tatami.clock import Clock, SystemClock
from tatami.collective import build
from tatami.comm.allreduce import AUTO, AllReduce
from tatami.comm.base import AbstractCommunicator, AbstractRequest, Op
from tatami.comm.loads import loads_and_stores
from tatami.comm.reduction import HALF_DTYPES, Reduction, divide
from tatami.comm.wait import Waiting, wait_policy, wait_until

_PAGE_BYTES = 4096


class AbstractOverlap(ABC):
    """Means under way.

    Attributes:
        vectors: (size,) each: what this rank gives before `begin`, the mean after `wait`; not to be touched in between.
    """

    vectors: tuple[torch.Tensor, ...]

    @abstractmethod
    def begin(self, index: int) -> None:
        """Vector `index` of this rank holds what it gives; does not wait."""

    @abstractmethod
    def progress(self) -> None:
        """Do what can be done now; does not wait."""

    @abstractmethod
    def wait(self) -> None:
        """Return when all vectors hold their means.

        Raises:
            CommTimeoutError: a rank did not come; the object cannot be used any more.
            RankDiedError: where the death of a rank is known.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back; the vectors must not be touched any more. Collective."""


def overlap(
    comm: AbstractCommunicator,
    *,
    sizes: Sequence[int],
    dtype: torch.dtype = torch.float32,
    device: torch.device | None = None,
    algorithm: str | None = None,
) -> AbstractOverlap:
    """The way that fits these ranks. Collective.

    Args:
        comm: the ranks.
        sizes: elements of each vector.
        dtype: floating; bfloat16 and float16 travel as they are: half the bytes.
        device: of the vectors; None: the CPU.
        algorithm: one of `AllReduce`, run when all vectors are there; None: reduce while ranks compute.

    Raises:
        InputError: an algorithm or dtype that cannot be.
    """
    on_cpu = device is None or device.type == "cpu"
    if algorithm is None and on_cpu and comm.has_windows and len(set(comm.hosts)) == 1:
        return SharedOverlap(comm, sizes=sizes, dtype=dtype)
    if algorithm is None and (dtype not in HALF_DTYPES or not on_cpu):
        return MessageOverlap(comm, sizes=sizes, dtype=dtype, device=device)
    # A communicator sums halves in float32, and sends them so.
    return ScheduledOverlap(comm, sizes=sizes, dtype=dtype, algorithm=algorithm or AUTO)


class SharedOverlap(AbstractOverlap):
    """Ranks of one host: each adds up its slice of a vector, straight from the others' memory, when all have announced it.

    A rank announces by counting, in memory that all see, how often it has begun each vector, and done its slice of it.
    """

    def __init__(
        self, comm: AbstractCommunicator, *, sizes: Sequence[int], dtype: torch.dtype, clock: Clock | None = None
    ) -> None:
        self._comm = comm
        self._clock = clock or SystemClock()
        self._policy = wait_policy(ranks_on_host=comm.size, cores=len(os.sched_getaffinity(0)))
        page = _PAGE_BYTES // dtype.itemsize
        starts = list(accumulate((-(-size // page) * page for size in sizes), initial=0))
        self._window = comm.shared_window(starts[-1], dtype)
        self._counts = comm.shared_window(2 * len(sizes), torch.int64)
        counts = [self._counts.of(rank).numpy() for rank in range(comm.size)]
        self._begun = [each[: len(sizes)] for each in counts]
        self._done = [each[len(sizes) :] for each in counts]
        self._rounds = [0] * len(sizes)
        self._open: list[int] = []
        self.vectors = tuple(self._window.tensor[start : start + size] for start, size in zip(starts, sizes, strict=False))
        self._reduce = []
        for size, start in zip(sizes, starts, strict=False):
            vectors = {rank: self._window.of(rank)[start : start + size] for rank in range(comm.size)}
            phases = build("shared", ranks=comm.size, size=size).phases
            steps = [step for phase in phases for step in phase.steps_of(comm.rank, round=0) if step.issuer == comm.rank]
            self._reduce.append(loads_and_stores(steps, vectors, rank=comm.rank, op=Op.SUM, divisor=comm.size))

    def begin(self, index: int) -> None:
        self._rounds[index] += 1
        self._window.make_visible()
        self._begun[self._comm.rank][index] = self._rounds[index]
        self._open.append(index)

    def progress(self) -> None:
        for index in tuple(self._open):
            count = self._rounds[index]
            if any(begun[index] < count for begun in self._begun):
                continue
            self._window.make_visible()
            for action in self._reduce[index]:
                action()
            self._window.make_visible()
            self._done[self._comm.rank][index] = count
            self._open.remove(index)

    def wait(self) -> None:
        waited_s = wait_until(self._complete, policy=self._policy, timeout_s=self._comm.timeout_s, clock=self._clock)
        if waited_s is not None:
            awaited = self._begun if self._open else self._done
            missing = tuple(rank for rank, counts in enumerate(awaited) if (counts < self._rounds).any())
            waiting = Waiting(operation="shared all-reduce", rank=self._comm.rank, size=self._comm.size, missing=missing)
            raise waiting.timeout(waited_s)
        self._window.make_visible()

    def close(self) -> None:
        self._reduce.clear()
        self._counts.close()
        self._window.close()

    def _complete(self) -> bool:
        self.progress()
        if not self._open and all((done >= self._rounds).all() for done in self._done):
            return True
        self._comm.check_peers()
        return False


class MessageOverlap(AbstractOverlap):
    """One nonblocking all-reduce for each vector, in their order on all ranks, as far as all before them have begun."""

    def __init__(
        self, comm: AbstractCommunicator, *, sizes: Sequence[int], dtype: torch.dtype, device: torch.device | None
    ) -> None:
        private = comm.split(0)
        assert private is not None
        self._comm = private
        self.vectors = tuple(torch.zeros(size, dtype=dtype, device=device) for size in sizes)
        self._ready: set[int] = set()
        self._requests: list[AbstractRequest] = []

    def begin(self, index: int) -> None:
        self._ready.add(index)
        while (following := len(self._requests)) in self._ready:
            self._requests.append(self._comm.iallreduce(self.vectors[following]))

    def progress(self) -> None:
        for request in self._requests:
            request.test()

    def wait(self) -> None:
        for request, vector in zip(self._requests, self.vectors, strict=True):
            request.wait()
            divide(vector, self._comm.size)
        self._requests.clear()
        self._ready.clear()

    def close(self) -> None:
        self._comm.close()


class ScheduledOverlap(AbstractOverlap):
    """One `AllReduce` for each vector, run in their order when all are there: for algorithms, and halves on the network."""

    def __init__(self, comm: AbstractCommunicator, *, sizes: Sequence[int], dtype: torch.dtype, algorithm: str) -> None:
        self._reduces = [
            AllReduce(comm, size=size, dtype=dtype, op=Reduction.MEAN, algorithm=algorithm, wire=dtype) for size in sizes
        ]
        self.vectors = tuple(reduce.buffer for reduce in self._reduces)

    def begin(self, index: int) -> None:
        """Nothing before `wait`."""

    def progress(self) -> None:
        """Nothing before `wait`."""

    def wait(self) -> None:
        for reduce in self._reduces:
            reduce.run()

    def close(self) -> None:
        for reduce in self._reduces:
            reduce.close()
