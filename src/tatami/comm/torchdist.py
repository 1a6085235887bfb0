"""Ranks of torch.distributed: gloo for CPU tensors, NCCL for CUDA tensors; under torchrun, or of a process group there is.

Every communicator has process groups of its own, made on the job's store, so that no other message comes between.

Messages go over gloo; those of CUDA tensors through host memory, because NCCL knows no tags. A message tells its size first:
gloo ends the process when more comes than there is room for.
"""

from __future__ import annotations

import atexit
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from typing import Any, Never, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tatami.comm.base import DEFAULT_TIMEOUT_S, AbstractRequest
from tatami.comm.checked import as_bytes
from tatami.comm.roll_call import AbstractRollCall, ProcessPlace, StoreRollCall
from tatami.comm.thread_world import wrong_size
from tatami.comm.threads import single_communicator
from tatami.comm.torchdist_collectives import AbstractTorchdistCollectives
from tatami.comm.torchdist_waits import MessageRequest, abandoned, over_its_link, said_by
from tatami.comm.wait import Waiting, wait_policy
from tatami.errors import CommError, InputError

_NEVER = timedelta(days=365)
"""Waits end by our own timeouts; gloo's would take the connections along."""
_FIRST_PAYLOAD_TAG = 1 << 16
_NUM_PAYLOAD_TAGS = 1 << 30
_HEADER_ELEMENTS = 2
_THREAD_ENDS_S = 1.0
_LOOK_S = 0.02


class TorchdistCommunicator(AbstractTorchdistCollectives):
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
        here = (socket.gethostname(),) * size
        super().__init__(rank=rank, hosts=hosts or here, name=name, timeout_s=timeout_s, roll_call=roll_call, off=off)
        if not (dist.is_available() and dist.is_gloo_available()):
            raise InputError("this build of torch has no gloo; start the ranks with mpiexec or tatami run")
        self._store = store
        self._num_splits = 0
        self._num_sent: Counter[int] = Counter()
        self._parts: weakref.WeakSet[TorchdistCommunicator] = weakref.WeakSet()
        self._alone = single_communicator(timeout_s=timeout_s)
        try:
            self._gloo = self._connect(c10d.PrefixStore(f"{name}/gloo", store))
        except RuntimeError as error:
            raise CommError(f"rank {rank} of {size} could not reach all others through gloo: {said_by(error)}") from error
        _open.add(self)
        cores = len(os.sched_getaffinity(0))
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
        with over_its_link(waiting):
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
        with over_its_link(waiting):
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


_open: weakref.WeakSet[TorchdistCommunicator] = weakref.WeakSet()
_num_adopted: Counter[str] = Counter()
"""Communicators made of each process group, so that each has a name of its own."""


def _leave(message: str) -> Never:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _say_goodbye() -> None:
    """Gloo's threads must end before the process does, and those of abandoned collectives never would."""
    for communicator in list(_open):
        communicator.close()
    if any(not work.is_completed() for works, _, _ in abandoned for work in works):
        _leave("this rank ends with collectives that timed out")


atexit.register(_say_goodbye)
