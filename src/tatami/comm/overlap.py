"""Sums of several vectors over all ranks, taken while the ranks compute: what `overlap` makes.

    sums = overlap(comm, sizes=[1000, 250_000])
    sums.vectors[1].copy_(gradient)       # better: compute it there
    sums.begin(1)                         # this rank's part is there; returns at once
    sums.progress()                       # now and then: what can be done without waiting
    sums.begin(0)
    sums.wait()                           # every vector is the sum over all ranks

Every round begins every vector once, in any order, and ends with `wait`. Ranks of one host add up in each other's memory, a
slice each, as soon as all of them have begun a vector; with several hosts of as many ranks each, only that slice's sum goes
through the network, by a nonblocking sum. Elsewhere such sums of whole vectors are under way meanwhile. A named
algorithm (`AllReduce`) runs inside of `wait`.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import weakref
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate
from pathlib import Path

import torch

from tatami.clock import Clock, SystemClock
from tatami.collective import RankGroup, Via, build
from tatami.comm.allreduce import AllReduce, AllReduceSpec
from tatami.comm.base import AbstractCommunicator, AbstractRequest
from tatami.comm.reduction import HALF_DTYPES, Op, Reduction
from tatami.comm.rounds import MessageSum, wait_together
from tatami.comm.shared_sum import loads_and_stores
from tatami.comm.wait import Waiting, wait_for, wait_policy
from tatami.comm.window import AbstractSharedWindow
from tatami.errors import InputError
from tatami.tiling.traffic import sum_schedule

_PAGE_BYTES = 4096
_SHARED_MEMORY = Path("/dev/shm")
_REMOVE = 9
"""MADV_REMOVE of Linux: the pages of shared memory go back to the system, and read as zeros from then on."""


class AbstractOverlap(ABC):
    """Sums under way.

    Attributes:
        vectors: (size,) each: what this rank gives before `begin`, the sum after `wait`; not to be touched in between.
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
        """Return when all vectors hold their sums.

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
    hosts: Sequence[str] | None = None,
) -> AbstractOverlap:
    """The way that fits these ranks. Collective.

    Args:
        comm: the ranks.
        sizes: elements of each vector.
        dtype: floating; bfloat16 and float16 travel as they are: half the bytes.
        device: of the vectors; None: the CPU.
        algorithm: one of `AllReduce`, run when all vectors are there; None: reduce while ranks compute.
        hosts: of each rank, to group them otherwise than by their hosts, for tries on one machine.

    Raises:
        InputError: an unknown algorithm, a dtype that cannot be reduced, or an algorithm for vectors on a device.
    """
    places = tuple(hosts) if hosts is not None else comm.hosts
    needed_bytes = sum(sizes) * dtype.itemsize * places.count(places[comm.rank])
    # Decided for all ranks: one on a CPU and one on a card must take the same way.
    on_devices, have_room = zip(
        *comm.allgather_object((device is not None and device.type != "cpu", _has_room(needed_bytes))), strict=True
    )
    on_cpu = not any(on_devices)
    if algorithm is not None and not on_cpu:
        raise InputError(f"algorithm={algorithm!r} reduces in host memory; leave it out where parameters lie on a device")
    if algorithm is None and on_cpu and all(have_room) and comm.has_windows and _shares(places, dtype):
        return SharedOverlap(comm, sizes=sizes, dtype=dtype, hosts=places)
    if algorithm is not None:
        return ScheduledOverlap(comm, sizes=sizes, dtype=dtype, algorithm=algorithm)
    return MessageOverlap(comm, sizes=sizes, dtype=dtype, device=device, on_cpu=on_cpu, hosts=places)


class SharedOverlap(AbstractOverlap):
    """Ranks of a host: each adds up its slice of a vector, straight from the others' memory, when all have announced it.

    A rank announces by counting, in memory that all see, how often it has begun each vector, and done its slice of it. Between
    the sum and its delivery, the ranks that have the same slice on the other hosts add theirs, in the order of the vectors.
    """

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        sizes: Sequence[int],
        dtype: torch.dtype,
        hosts: Sequence[str] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """`hosts` of each rank, equally many of each; None: one."""
        places = hosts if hosts is not None else [""] * comm.size
        here = comm.split(list(dict.fromkeys(places)).index(places[comm.rank]))
        assert here is not None
        column = comm.split(here.rank) if len(set(places)) > 1 else None
        self._comm, self._here, self._column = comm, here, column
        self._ranks_here = here.allgather_object(comm.rank)
        self._ranks_across = column.allgather_object(comm.rank) if column is not None else []
        self._clock = clock or SystemClock()
        policy = wait_policy(ranks_on_host=here.size, cores=len(os.sched_getaffinity(0)))
        self._policy = replace(policy, roll_call=comm.roll_call, lineage=here.lineage)
        page = _PAGE_BYTES // dtype.itemsize
        starts = list(accumulate((-(-size // page) * page for size in sizes), initial=0))
        self._window = here.shared_window(starts[-1], dtype)
        self._leaves = weakref.finalize(self, _give_pages_back, self._window.tensor)
        self._leaves.atexit = False
        self._counts = here.shared_window(2 * len(sizes), torch.int64)
        counts = [self._counts.of(rank).numpy() for rank in range(here.size)]
        self._begun = [each[: len(sizes)] for each in counts]
        self._done = [each[len(sizes) :] for each in counts]
        self._rounds = [0] * len(sizes)
        self._open: list[int] = []
        apart = [] if column is None else list(map(str, range(column.size)))  # on different hosts, whatever their names are
        self._crossing = None if column is None else _Sums(column, dtype=dtype, on_cpu=True, hosts=apart)
        self.vectors = tuple(self._window.tensor[start : start + size] for start, size in zip(starts, sizes, strict=False))
        make = partial(_Slice, self._window, here, whole=column is None)
        self._slices = [make(start=start, size=size) for size, start in zip(sizes, starts, strict=False)]

    def begin(self, index: int) -> None:
        self._rounds[index] += 1
        self._window.make_visible()
        # A count, and not a flag: a flag would have to be taken down before the next round, by a rank that cannot know who has
        # seen it. In round 5, counts of 5 and 4 say that rank 1 has not come yet.
        self._begun[self._here.rank][index] = self._rounds[index]
        self._open.append(index)

    def progress(self) -> None:
        for index in tuple(self._open):
            if any(begun[index] < self._rounds[index] for begun in self._begun):
                continue
            self._window.make_visible()
            self._slices[index].reduce()
            self._open.remove(index)
            if self._crossing is None:
                self._announce(index)
            else:
                self._crossing.add(index, self._slices[index].values)
        for index in () if self._crossing is None else self._crossing.arrived():
            self._slices[index].deliver()
            self._announce(index)

    def wait(self) -> None:
        timeout_s = self._comm.timeout_s
        wait_for(self._complete, self._waiting, policy=self._policy, timeout_s=timeout_s, clock=self._clock)
        if self._crossing is not None:
            self._crossing.wait()
        self._window.make_visible()

    def close(self) -> None:
        self._leaves.detach()
        self._slices.clear()
        self._counts.close()
        self._window.close()
        for part in (self._here, self._column):
            if part is not None:
                part.close()

    def _announce(self, index: int) -> None:
        self._window.make_visible()
        self._done[self._here.rank][index] = self._rounds[index]

    def _complete(self) -> bool:
        self.progress()
        if not self._open and all((done >= self._rounds).all() for done in self._done):
            return True
        self._comm.check_peers()
        return False

    def _waiting(self) -> Waiting:
        awaited = self._begun if self._open else self._done
        missing = [rank for rank, counts in enumerate(awaited) if (counts < self._rounds).any()]
        waiting = partial(Waiting, rank=self._comm.rank, size=self._comm.size)
        if not self._open and self._here.rank in missing:
            others = tuple(rank for rank in self._ranks_across if rank != self._comm.rank)
            return waiting(operation="all-reduce of a slice across hosts", missing=others)
        return waiting(operation="shared all-reduce", missing=tuple(self._ranks_here[rank] for rank in missing))


class _Slice:
    """This rank's slice of one vector: summed from the neighbours' vectors, and stored into them."""

    def __init__(self, window: AbstractSharedWindow, here: AbstractCommunicator, *, start: int, size: int, whole: bool) -> None:
        """`whole`: the sum is delivered at once, block by block, while it is in the cache; otherwise by `deliver`."""
        vectors = {rank: window.of(rank)[start : start + size] for rank in range(here.size)}
        group = RankGroup(ranks=tuple(range(here.size)), start=0, stop=size)
        low, high = group.part(here.rank)
        phases = build("shared", ranks=here.size, size=size).phases
        steps = [step for phase in phases for step in phase.steps_of(here.rank, round=0) if step.issuer == here.rank]
        stores = [] if whole else [step for step in steps if step.via is Via.STORE]
        first = [step for step in steps if step not in stores]
        act = partial(loads_and_stores, vectors=vectors, rank=here.rank, op=Op.SUM, divisor=None)
        self.values = vectors[here.rank][low:high]
        self._reduce, self._deliver = act(first), act(stores)

    def reduce(self) -> None:
        for action in self._reduce:
            action()

    def deliver(self) -> None:
        """`values` are the sum over all hosts: the neighbours get them."""
        for action in self._deliver:
            action()


class _Sums:
    """Nonblocking sums of vectors over all ranks, begun on all of them in the order of the vectors.

    Args:
        dtype: of the vectors. Half precision in host memory, which libraries do not sum, goes by schedules of messages: it
            travels as it is, is added up in float32, and rounded once for all ranks.
        on_cpu: whether the vectors of all ranks are in host memory.
    """

    def __init__(self, comm: AbstractCommunicator, *, dtype: torch.dtype, on_cpu: bool, hosts: Sequence[str]) -> None:
        self._comm = comm
        self.is_direct = on_cpu and comm.size > 1 and (dtype in HALF_DTYPES or _folds(hosts))
        self._sums: dict[int, MessageSum] = {}
        self._ready: dict[int, torch.Tensor] = {}
        self._under_way: dict[int, AbstractRequest] = {}
        self._next = 0

    def add(self, index: int, vector: torch.Tensor) -> None:
        """Vector `index`, which has the same size each time, may be summed; its sum begins when all before it have begun."""
        self._ready[index] = vector
        # Libraries match nonblocking collectives by the order of the calls. If vectors 0 and 1 became ready here in this order
        # and on another rank in the other one, 0 of the one would be added to 1 of the other; so 1 waits for 0 everywhere.
        while self._next in self._ready:
            self._under_way[self._next] = self._begin(self._next, self._ready.pop(self._next))
            self._next += 1

    def arrived(self) -> list[int]:
        """The vectors whose sums have arrived since the last call."""
        done = [index for index, request in self._under_way.items() if request.test()]
        for index in done:
            self._under_way.pop(index).wait()
        return done

    def wait(self) -> None:
        """All sums have arrived; the next round begins with the first vector."""
        wait_together(self._under_way.values())
        self._under_way.clear()
        self._ready.clear()
        self._next = 0

    def _begin(self, index: int, vector: torch.Tensor) -> AbstractRequest:
        if not self.is_direct:
            return self._comm.iallreduce(vector)
        if index not in self._sums:
            apart = [str(rank) for rank in range(self._comm.size)]
            schedule = sum_schedule(apart, size=vector.numel(), element_bytes=vector.itemsize)
            self._sums[index] = MessageSum(self._comm, schedule, tag=index)
        return self._sums[index].begin(vector)


def _folds(hosts: Sequence[str]) -> bool:
    """Whether a library folds a number of hosts that is no power of two into one that is.

    MPICH's all-reduce sends the whole vector there and back before and after the others sum theirs: among three hosts 3.3 times
    its bytes in place of 1.3.
    """
    return len(set(hosts)) == len(hosts) and len(hosts).bit_count() > 1


class MessageOverlap(AbstractOverlap):
    """One nonblocking sum for each vector, in their order on all ranks, as far as all before them have begun."""

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        sizes: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | None = None,
        on_cpu: bool,
        hosts: Sequence[str],
    ) -> None:
        self._comm = comm.duplicate()
        self.sums = _Sums(self._comm, dtype=dtype, on_cpu=on_cpu, hosts=hosts)
        self.vectors = tuple(torch.zeros(size, dtype=dtype, device=device) for size in sizes)

    def begin(self, index: int) -> None:
        self.sums.add(index, self.vectors[index])

    def progress(self) -> None:
        self.sums.arrived()

    def wait(self) -> None:
        self.sums.wait()

    def close(self) -> None:
        self._comm.close()


class ScheduledOverlap(AbstractOverlap):
    """One `AllReduce` for each vector, run in their order when all are there."""

    def __init__(self, comm: AbstractCommunicator, *, sizes: Sequence[int], dtype: torch.dtype, algorithm: str) -> None:
        self._reduces = [
            AllReduce(comm, AllReduceSpec(size=size, dtype=dtype, op=Reduction.SUM, algorithm=algorithm, wire=dtype))
            for size in sizes
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


def _shares(hosts: Sequence[str], dtype: torch.dtype) -> bool:
    """Whether ranks can meet in memory: on one host, or on hosts with several each, equally many. Halves are summed in float32
    by messages, and would cross the network so."""
    ranks_on = {hosts.count(host) for host in hosts}
    return len(set(hosts)) == 1 or (len(ranks_on) == 1 and ranks_on != {1} and dtype not in HALF_DTYPES)


def _has_room(needed_bytes: int) -> bool:
    """Whether windows of so many bytes take at most half of the shared memory that is left.

    A container of Docker has 64 MiB by default, and a rank that writes beyond the end is killed by a bus error.
    """
    try:
        return 2 * needed_bytes <= shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:  # not on this system
        return True


def _give_pages_back(vectors: torch.Tensor) -> None:
    """Free a window that was not closed: closing is collective, and ranks forget their models at different times."""
    start = -(-vectors.data_ptr() // _PAGE_BYTES) * _PAGE_BYTES
    stop = (vectors.data_ptr() + vectors.nbytes) // _PAGE_BYTES * _PAGE_BYTES
    if stop > start and (advise := getattr(ctypes.CDLL(None), "madvise", None)) is not None:
        advise(ctypes.c_void_p(start), ctypes.c_size_t(stop - start), _REMOVE)  # where it cannot, the pages stay
