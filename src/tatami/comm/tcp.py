"""Ranks of torch.distributed: over TCP, and NCCL for CUDA tensors; under torchrun, or of a process group there is.

Messages and collectives of CPU tensors go over TCP connections of all ranks (`tatami.comm.tcp_mesh`), which a communicator and
its parts share and no one else uses; messages of CUDA tensors through host memory. A process group that there is is only asked
for its ranks and its store.
"""

from __future__ import annotations

import atexit
import hashlib
import os
import socket
import sys
import threading
import weakref
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from datetime import timedelta
from typing import Any, Never, cast

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tatami.comm.base import AbstractRequest
from tatami.comm.job_token import job_token
from tatami.comm.mesh_collectives import MessageRequest
from tatami.comm.nccl_collectives import AbstractNcclCollectives, abandoned, said_by
from tatami.comm.ranks import DEFAULT_TIMEOUT_S
from tatami.comm.rendezvous import AbstractMeeting, StoreMeeting, Whereabouts
from tatami.comm.stall_report import StoreRollCall, format_ranks
from tatami.comm.tcp_mesh import TcpMesh
from tatami.comm.threads import single_communicator
from tatami.comm.wait import Waiting, wait_policy
from tatami.errors import CommError, InputError


class TcpCommunicator(AbstractNcclCollectives):
    """One rank of a torch.distributed job, or of a part of it made by `split`.

    Collectives of CUDA tensors are NCCL's once `use_device` has found that every rank has a card of its own. Ranks that give a
    collective different sizes are told so.
    """

    def __init__(
        self,
        store: Any,
        *,
        rank: int,
        size: int,
        name: str,
        timeout_s: float,
        off: threading.Event | None = None,
        token: bytes | None = None,
        meeting: AbstractMeeting | None = None,
        part_of: TcpCommunicator | None = None,
        world_ranks: tuple[int, ...] | None = None,
    ) -> None:
        """
        Args:
            store: of torch.distributed, that all ranks reach.
            rank: this one.
            size: how many there are.
            name: unique among the communicators on this store, and the same on all ranks.
            timeout_s: how long a wait may take.
            off: once it is set, every rank that forms this communicator or a part of it, or waits in one, stops with a
                `CommError`.
            token: by which the ranks know each other in the store; None: `job_token`.
            meeting: how the ranks find each other; None: by the store.
            part_of: whose connections, hosts and roll call it shares; None: none.
            world_ranks: of these ranks, in the communicator that has no other above it; None: this is it.

        Raises:
            InputError: this torch was built without torch.distributed.
            CommError: not all ranks came.
        """
        self.world_ranks = world_ranks or tuple(range(size))
        roll_call = None if part_of is None else part_of._roll_call
        if roll_call is None:
            hosts = (socket.gethostname(),) * size  # until all have met
        else:
            hosts = tuple(roll_call.places[at].host for at in self.world_ranks)
        super().__init__(rank=rank, hosts=hosts, name=name, timeout_s=timeout_s, roll_call=roll_call, off=off)
        if not dist.is_available():
            raise InputError("this build of torch has no torch.distributed; start the ranks with mpiexec or tatami run")
        self._store = store
        self._num_splits = 0
        self._owns_mesh = part_of is None
        self._number = int.from_bytes(hashlib.sha256(name.encode()).digest()[:8])
        self._parts: weakref.WeakSet[TcpCommunicator] = weakref.WeakSet()
        self._alone = single_communicator(timeout_s=timeout_s)
        if part_of is None:
            if meeting is None:
                token = job_token(os.environ) if token is None else token
                meeting = StoreMeeting(c10d.PrefixStore(f"{name}/mesh", store), rank=rank, size=size, token=token)
            self.mesh = TcpMesh(meeting, rank=rank, size=size)
            places = [each.place for each in self._met()]
            self._hosts = tuple(place.host for place in places)
            ours = c10d.PrefixStore(f"{name}/roll call", store)
            self._roll_call = StoreRollCall(ours, rank=rank, places=places, clock=self.clock)
        else:
            self.mesh = part_of.mesh
        _open.add(self)
        policy = wait_policy(ranks_on_host=self.local_size, cores=len(os.sched_getaffinity(0)))
        self.policy = replace(policy, roll_call=self._roll_call, lineage=name, members=self.world_ranks)

    def _met(self) -> tuple[Whereabouts, ...]:
        """
        Raises:
            CommError: not all ranks came.
        """
        start_s = self.clock.now_s()
        try:
            return self.mesh.connect(lambda missing: self._check_meeting(start_s, missing))
        except BaseException as error:
            self.mesh.close()
            if isinstance(error, RuntimeError) and not isinstance(error, CommError):
                raise CommError(f"rank {self.rank} of {self.size} could not reach all others: {said_by(error)}") from error
            raise

    def _check_meeting(self, start_s: float, missing: Sequence[int]) -> None:
        """
        Raises:
            CommError: it is called off, or has taken too long.
        """
        self.check_off()
        if self.left_s(start_s) <= 0:
            raise CommError(
                f"rank {self.rank} of {self.size}: {self._name} was not formed in {self.timeout_s:.3g} s: "
                f"{format_ranks(missing)} did not come"
            )

    @classmethod
    def world(cls, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TcpCommunicator:
        """All ranks that torchrun started, or those of torch's default process group where the program has made it.

        Raises:
            InputError: neither exists.
        """
        if dist.is_available() and dist.is_initialized():
            return cls.of_group(timeout_s=timeout_s)
        missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name not in os.environ]
        if missing:
            raise InputError(
                f"backend 'tcp': this is not a rank of torchrun ({', '.join(missing)} not set), and there is no process "
                "group; start the ranks with torchrun, or call torch.distributed.init_process_group first"
            )
        if os.environ.get("LOCAL_WORLD_SIZE") == os.environ["WORLD_SIZE"]:
            for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
                os.environ.setdefault(name, "lo")
        store, rank, size = next(iter(cast(Any, c10d).rendezvous("env://", timeout=timedelta(seconds=timeout_s))))
        return cls(store, rank=rank, size=size, name="tatami", timeout_s=timeout_s)

    @classmethod
    def of_group(cls, group: Any = None, *, timeout_s: float = DEFAULT_TIMEOUT_S) -> TcpCommunicator:
        """The ranks of a process group (None: the default one); collective on it. The group itself is not used."""
        group = group or dist.group.WORLD
        number = _num_adopted[group.group_name] = _num_adopted[group.group_name] + 1
        store = c10d._get_default_store()
        name = f"tatami/{group.group_name}/{number}"
        return cls(store, rank=dist.get_rank(group), size=dist.get_world_size(group), name=name, timeout_s=timeout_s)

    def split(self, color: int | None, *, key: int = 0) -> TcpCommunicator | None:
        self._check_open("split")
        ranks = self._split_ranks(color, key)
        return self._part(() if ranks is None else ranks)

    def subgroup(self, ranks: Sequence[int]) -> TcpCommunicator | None:
        self._check_open("subgroup")
        return self._part(ranks)

    def duplicate(self) -> TcpCommunicator:
        other = self.subgroup(range(self.size))
        assert other is not None
        return other

    def _part(self, ranks: Sequence[int]) -> TcpCommunicator | None:
        """The communicator of these ranks, in this order; None for no ranks. It sends nothing, and is counted on all ranks."""
        self._num_splits += 1
        if not ranks:
            return None
        part = TcpCommunicator(
            self._store,
            rank=ranks.index(self.rank),
            size=len(ranks),
            name=f"{self._name}/{self._num_splits}.{ranks[0]}",
            timeout_s=self.timeout_s,
            off=self._off,
            part_of=self,
            world_ranks=tuple(self.world_ranks[rank] for rank in ranks),
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
        if self._owns_mesh:
            self.mesh.sever()
        for part in list(self._parts):
            part.sever()

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._owns_mesh:
                self.mesh.close()
            self._nccl = None

    def abort(self, reason: str) -> Never:
        """Ends this process; torchrun then ends the others."""
        _leave(f"rank {self.rank} of {self.size} aborted: {reason}")

    # -- point to point -----------------------------------------------------------------------------------------------

    def _start_send(self, tensor: torch.Tensor, dest: int, tag: int) -> AbstractRequest:
        if dest == self.rank:
            return self._alone.isend(tensor, 0, tag=tag)
        waiting = Waiting(operation="send", rank=self.rank, size=self.size, peer=dest, tag=tag)
        return MessageRequest(self, waiting, lambda: [self._sending(tensor, dest, tag)])

    def _start_recv(self, out: torch.Tensor, source: int, tag: int) -> AbstractRequest:
        if source == self.rank:
            return self._alone.irecv(out, 0, tag=tag)
        waiting = Waiting(operation="recv", rank=self.rank, size=self.size, peer=source, tag=tag)
        return MessageRequest(self, waiting, lambda: [self._receiving(out, source, tag)])

    def _await_tag(self, source: int) -> int:
        tag = torch.empty(1, dtype=torch.int64, device="cpu")
        waiting = Waiting(operation="next_tag", rank=self.rank, size=self.size, peer=source)
        MessageRequest(self, waiting, lambda: [self._seeking(source, tag)]).wait()
        return int(tag)


_open: weakref.WeakSet[TcpCommunicator] = weakref.WeakSet()
_num_adopted: Counter[str] = Counter()
"""Communicators made of each process group, so that each has a name of its own."""


def _leave(message: str) -> Never:
    sys.stdout.flush()
    print(message, file=sys.stderr, flush=True)
    os._exit(1)


def _say_goodbye() -> None:
    """NCCL's threads must end before the process does, and those of abandoned collectives never would."""
    for communicator in list(_open):
        communicator.close()
    if any(not work.is_completed() for works, _, _ in abandoned for work in works):
        _leave("this rank ends with collectives that timed out")


atexit.register(_say_goodbye)
