"""Ranks of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors; under torchrun, or of a process group there is.

Every communicator has process groups of its own, made on the job's store, so that no other message comes between.

* Collectives move bytes of every dtype; only all-reduce and reduce know types. What gloo or NCCL lacks is made of what
  both have: an uneven all-gather of broadcasts, gather and scatter of an all-to-all, a reduce-scatter of an all-to-all whose
  parts are added in the order of the ranks.
* Messages go over gloo; those of CUDA tensors through host memory, because NCCL knows no tags. A message tells its size first:
  gloo ends the process when more comes than there is room for. A wait for a message happens in a thread of its own:
  gloo closes all connections when it gives up a wait itself.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Never, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tatami.clock import SystemClock
from tatami.comm.base import DEFAULT_TIMEOUT_S, AbstractRequest
from tatami.comm.checked import CheckedCommunicator, DoneRequest, ThenRequest, as_bytes
from tatami.comm.reduction import Op, combine
from tatami.comm.roll_call import AbstractRollCall, ProcessPlace
from tatami.comm.staging import is_on_host
from tatami.comm.store_roll_call import StoreRollCall
from tatami.comm.thread_world import wrong_size
from tatami.comm.threads import single_communicator
from tatami.comm.transport import Transport, gather_roots
from tatami.comm.wait import Waiting, wait_policy, wait_until
from tatami.errors import CommError, InputError, RankDiedError

_NEVER = timedelta(days=365)
"""Waits end by our own timeouts; gloo's would take the connections along."""
_FIRST_PAYLOAD_TAG = 1 << 16
_NUM_PAYLOAD_TAGS = 1 << 30
_HEADER_ELEMENTS = 2
_THREAD_ENDS_S = 1.0
_SHORTEST_S = 1e-3
"""A shorter wait of gloo's would be one without an end."""
_LOOK_S = 0.02
_SLICE_S = 0.25
"""So long a wait goes on before it is looked whether another rank asks what this one does."""

_abandoned: list[tuple[Any, Any, tuple[torch.Tensor, ...]]] = []
"""Collectives whose wait timed out, with their group and tensors: gloo may still write there."""


class WorkRequest(AbstractRequest):
    """Works of one collective, complete together."""

    def __init__(
        self, communicator: TorchdistCommunicator, works: list[Any], group: Any, operation: str, *keep: torch.Tensor
    ) -> None:
        self._communicator = communicator
        self._works = works
        self._group = group
        self._waiting = Waiting(operation=operation, rank=communicator.rank, size=communicator.size)
        self._keep = keep

    def test(self) -> bool:
        if not all(work.is_completed() for work in self._works):
            return False
        self._finish()
        return True

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        if is_on_host(self._keep[0]):
            # Gloo's own wait sleeps, and gives the core to gloo's threads.
            for work in self._works:
                while not work.is_completed() and (left_s := communicator.left_s(start_s)) > 0:
                    with suppress(RuntimeError):
                        work.wait(timedelta(seconds=min(max(left_s, _SHORTEST_S), _SLICE_S)))
                    if not work.is_completed():
                        communicator.check_off()
                        communicator.answer(self._waiting)
        left_s = max(0.0, communicator.left_s(start_s))
        policy, doing = communicator.policy, self._waiting.describe
        if wait_until(self.test, policy=policy, timeout_s=left_s, clock=communicator.clock, doing=doing) is not None:
            _abandoned.append((self._works, self._group, self._keep))
            raise self._waiting.timeout(communicator.clock.now_s() - start_s, roll_call=communicator.roll_call)

    def _finish(self) -> None:
        works, self._works = self._works, []
        try:
            for work in works:
                work.wait()
        except RuntimeError as error:
            raise CommError(f"{self._waiting.describe()}: a rank has ended, or the link to it broke: {_said(error)}") from error


@contextmanager
def _over_its_link(waiting: Waiting) -> Iterator[None]:
    """What gloo raises where the link to the peer broke becomes an error that names it."""
    try:
        yield
    except CommError:
        raise
    except RuntimeError as error:
        assert waiting.peer is not None
        raise RankDiedError(
            f"{waiting.describe()}: rank {waiting.peer} has ended, or the link to it broke: {_said(error)}", rank=waiting.peer
        ) from error


class MessageRequest(AbstractRequest):
    """A message, moved by `move` in a thread of its own."""

    def __init__(self, communicator: TorchdistCommunicator, waiting: Waiting, move: Callable[[], object]) -> None:
        self._communicator = communicator
        self._waiting = waiting
        self._move = move
        self._done = threading.Event()
        self._error: Exception | None = None
        communicator.start_thread(self._run, name=f"tatami {waiting.describe()}")

    def test(self) -> bool:
        if not self._done.is_set():
            return False
        if self._error is not None:
            raise self._error
        return True

    def wait(self) -> None:
        communicator = self._communicator
        start_s = communicator.clock.now_s()
        while not self._done.wait(min(max(left_s := communicator.left_s(start_s), 0.0), _SLICE_S)):
            if left_s <= 0:
                raise self._waiting.timeout(communicator.timeout_s, roll_call=communicator.roll_call)
            communicator.check_off()
            communicator.answer(self._waiting)
        self.test()

    def _run(self) -> None:
        try:
            with _over_its_link(self._waiting):
                self._move()
        except CommError as error:
            self._error = error
        self._done.set()


class TorchdistCommunicator(CheckedCommunicator):
    """One rank of a torch.distributed job, or of a part of it made by `split`.

    Collectives of CUDA tensors are NCCL's once `use_device` has found that every rank has a card of its own. Ranks that give a
    collective different sizes are ended by gloo, with its message.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        hosts: tuple[str, ...] | None = None,
        roll_call: AbstractRollCall | None = None,
        off: threading.Event | None = None,
    ) -> None:
        """
        Args:
            store: of torch.distributed, that all ranks reach.
            rank: this one.
            size: how many there are.
            name: unique among the communicators on this store, and the same on all ranks.
            timeout_s: how long a wait may take.
            hosts: of all ranks; None: they are asked.
            roll_call: that these ranks have already; None: a new one among them.
            off: once it is set, every rank that forms this communicator or a part of it, or waits in one, stops with a
                `CommError`.

        Raises:
            InputError: this torch was built without gloo.
            CommError: not all ranks came.
        """
        # Who shares this host is not known yet: as if all did, a wait is polite in any case.
        super().__init__(rank=rank, hosts=hosts or (socket.gethostname(),) * size, timeout_s=timeout_s)
        if not (dist.is_available() and dist.is_gloo_available()):
            raise InputError("this build of torch has no gloo; start the ranks with mpiexec or tatami run")
        self.clock = SystemClock()
        self._store = store
        self._name = name
        self._num_splits = 0
        self._num_sent: Counter[int] = Counter()
        self._threads: weakref.WeakSet[threading.Thread] = weakref.WeakSet()
        self._parts: weakref.WeakSet[TorchdistCommunicator] = weakref.WeakSet()
        self._severed = False
        self._off = off
        self._alone = single_communicator(timeout_s=timeout_s)
        self._nccl: Any = None
        try:
            self._gloo: Any = self._connect(c10d.PrefixStore(f"{name}/gloo", store))
        except RuntimeError as error:
            raise CommError(f"rank {rank} of {size} could not reach all others through gloo: {_said(error)}") from error
        _open.add(self)
        cores = len(os.sched_getaffinity(0))
        self._roll_call = roll_call
        self.policy = wait_policy(ranks_on_host=self.local_size, cores=cores)
        if hosts is None or roll_call is None:
            places = self.allgather_object(ProcessPlace.here())
            self._hosts = tuple(place.host for place in places)
            ours = c10d.PrefixStore(f"{name}/roll call", store)
            self._roll_call = StoreRollCall(ours, rank=rank, places=places, clock=self.clock)
            self.barrier()  # all are in the store
        policy = wait_policy(ranks_on_host=self.local_size, cores=cores)
        self.policy = replace(policy, roll_call=self._roll_call)

    def _connect(self, store: Any) -> Any:
        """Gloo's connections to all others; in a thread that is left behind where this is called off, as gloo cannot be."""
        if self._off is None:
            return dist.ProcessGroupGloo(store, self.rank, self.size, _NEVER)
        made: list[Any] = []

        def connect() -> None:
            try:
                made.append(dist.ProcessGroupGloo(store, self.rank, self.size, _NEVER))
            except RuntimeError as error:
                made.append(error)

        thread = threading.Thread(target=connect, name=f"tatami connects {self._name}", daemon=True)
        thread.start()
        start_s = self.clock.now_s()
        while not made and self.left_s(start_s) > 0:
            thread.join(_LOOK_S)
            self.check_off()
        if not made:
            raise CommError(f"rank {self.rank} of {self.size}: {self._name} was not formed in {self.timeout_s:.3g} s")
        if isinstance(made[0], RuntimeError):
            raise made[0]
        return made[0]

    def check_off(self) -> None:
        """
        Raises:
            CommError: this communicator was called off.
        """
        if self._severed or (self._off is not None and self._off.is_set()):
            raise CommError(f"{self._name} was called off on rank {self.rank} of {self.size}: its members change")

    @classmethod
    def world(cls, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TorchdistCommunicator:
        """All ranks that torchrun started, or those of torch's default process group where the program has made it.

        Raises:
            InputError: neither exists.
        """
        if dist.is_available() and dist.is_initialized():
            return cls.of_group(timeout_s=timeout_s)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                f"backend 'torchdist': this is not a rank of torchrun ({', '.join(missing)} not set), and there is no process "
                "group; start the ranks with torchrun, or call torch.distributed.init_process_group first"
            )
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        store, rank, size = next(iter(cast(Any, c10d).rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
        return cls(store, rank=rank, size=size, name="tatami", timeout_s=timeout_s)

    @classmethod
    def of_group(cls, group: Any = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TorchdistCommunicator:
        """The ranks of a process group (None: the default one); collective on it. The group itself is not used."""
        group = group or dist.group.WORLD
        number = _num_adopted[group.group_name] = _num_adopted[group.group_name] + 1
        store = c10d._get_default_store()
        name = f"tatami/{group.group_name}/{number}"
        return cls(store, rank=dist.get_rank(group), size=dist.get_world_size(group), name=name, timeout_s=timeout_s)

    def split(self, color: int | None, *, key: int = 0) -> TorchdistCommunicator | None:
        self._check_open("split")
        self._num_splits += 1
        ranks = self._split_ranks(color, key)
        if ranks is None:
            return None
        part = TorchdistCommunicator(
            self._store,
            rank=ranks.index(self.rank),
            size=len(ranks),
            name=f"{self._name}/{self._num_splits}.{color}",
            timeout_s=self.timeout_s,
            hosts=tuple(self.hosts[rank] for rank in ranks),
            roll_call=self._roll_call,
            off=self._off,
        )
        self._parts.add(part)
        self._inherit(part, ranks)
        if self._severed:
            part.sever()
        return part

    @property
    def roll_call(self) -> AbstractRollCall | None:
        return self._roll_call

    def left_s(self, start_s: float) -> float:
        """What is left of the timeout of a wait that began then."""
        return self.timeout_s - (self.clock.now_s() - start_s)

    def answer(self, waiting: Waiting) -> None:
        """In a long wait: answer those who ask."""
        if self._roll_call is not None:
            self._roll_call.answer(waiting.describe())

    def sever(self) -> None:
        """Break all connections of this communicator and its parts, from any thread: every wait on them ends with an error.

        The other ranks' waits end too. It takes milliseconds, and is safe in the middle of any operation.
        """
        self._severed = True
        self._break_off()
        for part in list(self._parts):
            part.sever()

    def _break_off(self) -> None:
        # The one way to end waits inside of gloo (its abort() ends none): a wait that times out takes all connections of the
        # group along. A wait for a rank that is gone fails at once, and takes nothing along, so each rank is tried.
        gloo = self._gloo
        for other in range(self.size):
            if other != self.rank and gloo is not None:
                with suppress(RuntimeError):
                    room = torch.empty(1, dtype=torch.float32, device="cpu")
                    gloo.recv([room], other, _FIRST_PAYLOAD_TAG).wait(timedelta(milliseconds=1))

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            waiting = [thread for thread in self._threads if thread.is_alive()]
            if waiting:
                self._break_off()
            for thread in waiting:
                thread.join(_THREAD_ENDS_S)
            self._gloo = self._nccl = None

    def start_thread(self, run: Callable[[], object], *, name: str) -> None:
        """In which a message is waited for."""
        thread = threading.Thread(target=run, name=name, daemon=True)
        self._threads.add(thread)
        thread.start()

    def abort(self, reason: str) -> Never:
        """Ends this process; torchrun then ends the others."""
        _leave(f"rank {self.rank} of {self.size} aborted: {reason}")

    # -- point to point -----------------------------------------------------------------------------------------------

    def _start_send(self, tensor: torch.Tensor, dest: int, tag: int) -> AbstractRequest:
        if dest == self.rank:
            return self._alone.isend(tensor, 0, tag=tag)
        waiting = Waiting(operation="send", rank=self.rank, size=self.size, peer=dest, tag=tag)
        payload = as_bytes(tensor)
        self._num_sent[dest] += 1
        payload_tag = _FIRST_PAYLOAD_TAG + self._num_sent[dest] % _NUM_PAYLOAD_TAGS
        header = torch.tensor([payload.numel(), payload_tag], dtype=torch.int64, device="cpu")
        with _over_its_link(waiting):
            works = [self._gloo.send([header], dest, tag)]
            if payload.numel():
                works.append(self._gloo.send([payload], dest, payload_tag))

        def move() -> None:
            for work in works:
                work.wait()

        return MessageRequest(self, waiting, move)

    def _start_recv(self, out: torch.Tensor, source: int, tag: int) -> AbstractRequest:
        if source == self.rank:
            return self._alone.irecv(out, 0, tag=tag)
        waiting = Waiting(operation="recv", rank=self.rank, size=self.size, peer=source, tag=tag)
        gloo = self._gloo
        header = torch.empty(_HEADER_ELEMENTS, dtype=torch.int64, device="cpu")
        with _over_its_link(waiting):
            told = gloo.recv([header], source, tag)

        def move() -> None:
            told.wait()
            size_bytes, payload_tag = header.tolist()
            fits = size_bytes == out.nbytes
            room = as_bytes(out) if fits else torch.empty(size_bytes, dtype=torch.uint8, device="cpu")
            if size_bytes:
                gloo.recv([room], source, payload_tag).wait()
            if not fits:
                raise CommError(f"{waiting.describe()}: {wrong_size(size_bytes, out.nbytes)}")

        return MessageRequest(self, waiting, move)

    # -- collectives --------------------------------------------------------------------------------------------------

    def _start_barrier(self) -> AbstractRequest:
        return self._start_allreduce(torch.zeros(1, dtype=torch.float32, device="cpu"), Op.SUM, operation="barrier")

    def _start_bcast(self, tensor: torch.Tensor, root: int) -> AbstractRequest:
        return self._works("bcast", [self._bcast_work(tensor, root)], tensor)

    def _start_gather(
        self, tensor: torch.Tensor, out: torch.Tensor | None, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        room = torch.empty(0, dtype=tensor.dtype, device=tensor.device) if out is None else out
        recv_counts = counts or (0,) * self.size
        return self._exchange("gather", tensor, room, self._only(root, tensor.numel()), recv_counts)

    def _start_scatter(
        self, tensor: torch.Tensor | None, out: torch.Tensor, root: int, counts: tuple[int, ...]
    ) -> AbstractRequest:
        whole = torch.empty(0, dtype=out.dtype, device=out.device) if tensor is None else tensor
        return self._exchange("scatter", whole, out, counts or (0,) * self.size, self._only(root, out.numel()))

    def _start_allgather(self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...]) -> AbstractRequest:
        rooms = torch.split(out.view(-1), list(counts))
        rooms[self.rank].copy_(tensor.view(-1))
        with self._grouped(out) as works:
            works += [self._bcast_work(rooms[root], root) for root in gather_roots(counts)]
        return self._works("allgather", works, out)

    def _start_alltoall(
        self, tensor: torch.Tensor, out: torch.Tensor, send_counts: tuple[int, ...], recv_counts: tuple[int, ...]
    ) -> AbstractRequest:
        return self._exchange("alltoall", tensor, out, send_counts, recv_counts)

    def _start_reduce(self, tensor: torch.Tensor, root: int, op: Op) -> AbstractRequest:
        # Gloo leaves parts of the result in the tensors of all ranks.
        mine = tensor if self.rank == root else tensor.clone()
        options = dist.ReduceOptions()
        options.rootRank, options.reduceOp = root, _OPS[op]
        return self._works("reduce", [self._group(mine).reduce([mine], options)], mine) if mine.numel() else DoneRequest()

    def _start_allreduce(self, tensor: torch.Tensor, op: Op, *, operation: str = "allreduce") -> AbstractRequest:
        options = dist.AllreduceOptions()
        options.reduceOp = _OPS[op]
        return (
            self._works(operation, [self._group(tensor).allreduce([tensor], options)], tensor)
            if tensor.numel()
            else DoneRequest()
        )

    def _start_reduce_scatter(
        self, tensor: torch.Tensor, out: torch.Tensor, counts: tuple[int, ...], op: Op
    ) -> AbstractRequest:
        came = torch.empty(self.size, out.numel(), dtype=out.dtype, device=out.device)

        def add_up() -> None:
            for values in came[1:]:
                combine(came[0], values, op)
            out.view(-1).copy_(came[0])

        return ThenRequest(self._exchange("reduce_scatter", tensor, came, counts, (out.numel(),) * self.size), add_up)

    # -- what they are made of ------------------------------------------------------------------------------------------

    def _exchange(
        self, operation: str, tensor: torch.Tensor, out: torch.Tensor, sends: tuple[int, ...], recvs: tuple[int, ...]
    ) -> AbstractRequest:
        """An all-to-all of elements, as bytes."""
        given, room = as_bytes(tensor), as_bytes(out)
        recv_bytes, send_bytes = [count * out.itemsize for count in recvs], [count * out.itemsize for count in sends]
        work = self._group(out).alltoall_base(room, given, recv_bytes, send_bytes, dist.AllToAllOptions())
        return self._works(operation, [work], given, room)

    def _bcast_work(self, tensor: torch.Tensor, root: int) -> Any:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = root, 0
        return self._group(tensor).broadcast([as_bytes(tensor)], options)

    @contextmanager
    def _grouped(self, tensor: torch.Tensor) -> Iterator[list[Any]]:
        """Works that are begun together: to NCCL one operation, which would otherwise carry them out one after the other."""
        works: list[Any] = []
        if is_on_host(tensor):
            yield works
            return
        group = self._group(tensor)
        group._start_coalescing()
        yield works
        works[:] = [group._end_coalescing()]

    def _works(self, operation: str, works: list[Any], *keep: torch.Tensor) -> WorkRequest:
        return WorkRequest(self, works, self._gloo, operation, *keep)

    def _only(self, peer: int, count: int) -> tuple[int, ...]:
        """`count` elements to or from `peer`, none for the others."""
        return tuple(count if rank == peer else 0 for rank in range(self.size))

    def _group(self, tensor: torch.Tensor) -> Any:
        if is_on_host(tensor):
            return self._gloo
        if self._nccl is None:
            make: Any = dist.ProcessGroupNCCL
            options = make.Options()
            # A rank that does not come is found here first; NCCL's own watchdog, which ends the process, is the last resort.
            options._timeout = timedelta(seconds=2 * self.timeout_s)
            self._nccl = make(c10d.PrefixStore(f"{self._name}/nccl", self._store), self.rank, self.size, options)
        return self._nccl

    def _has_nccl(self) -> bool:
        return bool(dist.is_nccl_available())

    def _takes(self, tensor: torch.Tensor, *, message: bool = False) -> bool:
        return super()._takes(tensor) or (tensor.is_cuda and not message and self.transport is Transport.NCCL)


_open: weakref.WeakSet[TorchdistCommunicator] = weakref.WeakSet()
_num_adopted: Counter[str] = Counter()
"""Communicators made of each process group, so that each has a name of its own."""

_OPS: dict[Op, Any] = (
    {Op.SUM: dist.ReduceOp.SUM, Op.MAX: dist.ReduceOp.MAX, Op.MIN: dist.ReduceOp.MIN} if dist.is_available() else {}
)


def _said(error: RuntimeError) -> str:
    """What gloo says, without the place in its source."""
    return str(error).rpartition("] ")[2].partition(" This is typically")[0]


def _leave(message: str) -> Never:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _say_goodbye() -> None:
    """Gloo's threads must end before the process does, and those of abandoned collectives never would."""
    for communicator in list(_open):
        communicator.close()
    if any(not work.is_completed() for works, _, _ in _abandoned for work in works):
        _leave("this rank ends with collectives that timed out")


atexit.register(_say_goodbye)
