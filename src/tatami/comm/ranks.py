"""Which ranks a communicator has, where their tensors are, how they travel from there, and checks of what names ranks."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Self, TypeVar

import torch

from tatami.comm.refusals import Refusals
from tatami.comm.staging import is_on_host, own_device, place_of
from tatami.comm.stall_report import AbstractRollCall
from tatami.comm.transport import DevicePlace, Route, Transport, choose_route, describe_route
from tatami.errors import ClosedError, InputError

Attached = TypeVar("Attached")

DEFAULT_TIMEOUT_S = 60.0


class AbstractRanks(ABC):
    """What a communicator knows of its ranks; it moves nothing but what they agree on."""

    timeout_s: float = DEFAULT_TIMEOUT_S

    def __init__(self, *, rank: int, hosts: tuple[str, ...], timeout_s: float) -> None:
        """`hosts` are those of all ranks."""
        if not timeout_s > 0:
            raise InputError(f"timeout_s must be more than 0 seconds, not {timeout_s}")
        self.timeout_s = timeout_s
        self._closed = False
        self._rank = rank
        self._hosts = hosts
        self._places: tuple[DevicePlace, ...] | None = None
        self._route: Route | None = None
        self._device: torch.device | None = None

    # -- who ------------------------------------------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This rank, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return len(self._hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        """The host name of every rank."""
        return self._hosts

    @property
    def library(self) -> str:
        """What moves the bytes, with its version."""
        return type(self).__name__

    @property
    def roll_call(self) -> AbstractRollCall | None:
        """The stall report: ranks ask each other what they do when a message does not arrive; None where there is none."""
        return None

    @property
    def refusals(self) -> Refusals | None:
        """The failures of other ranks, for `fail_together`; None where ranks have no way to send them."""
        return None if self.roll_call is None else self.roll_call.refusals

    @property
    def lineage(self) -> str:
        """The name of this communicator, the same on its ranks; those of its parts begin with it and a slash."""
        return ""

    @property
    def changes(self) -> bool:
        """Whether ranks may leave and join while this object stays: see `tatami.comm.elastic`."""
        return False

    @property
    def group(self) -> int:
        """How often the ranks have changed, as far as this one has seen; a death that was repaired is a change."""
        return 0

    @property
    def local_rank(self) -> int:
        """This rank among those of its own host."""
        return sum(host == self.hosts[self.rank] for host in self.hosts[: self.rank])

    @property
    def local_size(self) -> int:
        """How many ranks its own host has."""
        return self.hosts.count(self.hosts[self.rank])

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called on this rank."""
        return self._closed

    @cached_property
    def _attached(self) -> dict[type, Any]:
        return {}

    def attached(self, kind: type[Attached], make: Callable[[Self], Attached]) -> Attached:
        """The one object of class `kind` that belongs to this communicator; made when it is first asked for.

        Code that builds on communicators keeps its state of each one here, such as how many messages it has sent on it. The
        object may refer to the communicator, and both are freed together. In a `WeakKeyDictionary` of the module, such an
        object would keep its own key alive, and no communicator would ever be freed.
        """
        found: Attached | None = self._attached.get(kind)
        if found is None:
            found = self._attached[kind] = make(self)
        return found

    @abstractmethod
    def bcast_object(self, value: Any, *, root: int = 0) -> Any:
        """`value` of `root`; other ranks' `value` is not looked at."""

    @abstractmethod
    def allgather_object(self, value: Any) -> list[Any]:
        """All ranks' `value`, in the order of the ranks."""

    # -- where their tensors are --------------------------------------------------------------------------------------

    def use_device(self, device: torch.device | str) -> Route:
        """Say on which device the tensors of this rank lie from now on, and find out how they then travel. Collective.

        It is asked of all ranks, because what carries a collective must be the same on all of them: where it was not called,
        tensors of a device go through host memory. In collectives all ranks then give tensors of their devices, or all give
        tensors of the CPU. Parts made by `split` later on know it as well.
        """
        self._check_open("use_device")
        device = own_device(device)
        card, name = place_of(device, host=self.hosts[self.rank])
        on_card = device.type == "cuda"
        mine = DevicePlace(
            host=self.hosts[self.rank],
            kind=device.type,
            card=card,
            name=name,
            has_nccl=on_card and self._has_nccl(),
            mpi_takes_cuda=on_card and self._takes_cuda(),
        )
        self._device = device
        return self._lie_at(tuple(self.allgather_object(mine)))

    @property
    def device(self) -> torch.device | None:
        """On which the tensors of this rank lie, as given to `use_device`; None until then."""
        return self._device

    @property
    def transport(self) -> Transport:
        """What carries tensors of a device; host memory until `use_device`."""
        return Transport.HOST if self._route is None else self._route.transport

    @property
    def on_devices(self) -> bool:
        """Whether some rank has said by `use_device` that its tensors lie on another device than the CPU."""
        return any(place.kind != "cpu" for place in self._places or ())

    def describe(self) -> str:
        """Which ranks there are, on what they compute, how their tensors travel and why: sentences for people."""
        places = self._places or tuple(DevicePlace(host=host) for host in self.hosts)
        return describe_route(places, self._route or choose_route(places), library=self.library)

    def _lie_at(self, places: tuple[DevicePlace, ...]) -> Route:
        self._places, self._route = places, choose_route(places)
        return self._route

    def _inherit(self, part: AbstractRanks, ranks: Sequence[int]) -> None:
        """A part made by `split` lies where its ranks lie here, and has a route of its own: a column may be all of GPUs."""
        if self._places is not None:
            part._lie_at(tuple(self._places[rank] for rank in ranks))
            part._device = self._device

    def _has_nccl(self) -> bool:
        """Whether this backend could run NCCL."""
        return False

    def _takes_cuda(self) -> bool:
        """Whether the library below takes CUDA memory itself, and says so."""
        return False

    def _takes(self, tensor: torch.Tensor, *, message: bool = False) -> bool:  # noqa: ARG002 - for those that tell them apart
        """Whether a collective, or a message, of this backend takes the tensor where it lies."""
        return is_on_host(tensor)

    def _split_ranks(self, color: int | None, key: int) -> list[int] | None:
        """For `split`: the ranks of this color by (key, rank); None where the color is None. Collective."""
        asked = self.allgather_object((color, key))
        if color is None:
            return None
        return sorted((rank for rank in range(self.size) if asked[rank][0] == color), key=lambda rank: (asked[rank][1], rank))

    # -- checks -------------------------------------------------------------------------------------------------------

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation} on rank {self.rank} of {self.size}: this communicator was closed")

    def _check_rank(self, operation: str, rank: int) -> None:
        self._check_open(operation)
        if not 0 <= rank < self.size:
            raise InputError(f"{operation}: there is no rank {rank}; this communicator has ranks 0 to {self.size - 1}")

    def _check_other(self, operation: str, peer: int) -> None:
        if peer == self.rank:
            raise InputError(
                f"{operation}: rank {peer} would wait for itself forever; copy the tensor, or use isend with irecv"
            )

    def _check_part(self, operation: str, elements: int, counts: Sequence[int]) -> None:
        if elements != counts[self.rank]:
            raise InputError(
                f"{operation}: the part of rank {self.rank} has {elements} elements, but its count is {counts[self.rank]} "
                f"(counts {list(counts)})"
            )

    def _check_counts(self, operation: str, counts: Sequence[int]) -> None:
        """There is one for each rank."""
        if len(counts) != self.size:
            raise InputError(f"{operation}: {len(counts)} counts for {self.size} ranks; give one for each")
        if min(counts) < 0:
            raise InputError(f"{operation}: a count is negative: {list(counts)}")

    def _counts(self, operation: str, counts: Sequence[int] | None, elements: int) -> tuple[int, ...]:
        """`counts`, which add up to `elements`, or equal parts."""
        if counts is None:
            if elements % self.size:
                raise InputError(
                    f"{operation}: {elements} elements do not divide into {self.size} equal parts; give the counts of the parts"
                )
            return (elements // self.size,) * self.size
        self._check_counts(operation, counts)
        if sum(counts) != elements:
            raise InputError(
                f"{operation}: the counts add up to {sum(counts)} but the tensor has {elements} elements: {list(counts)}"
            )
        return tuple(counts)
