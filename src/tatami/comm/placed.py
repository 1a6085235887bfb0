"""Which ranks a communicator has, where their tensors lie, and how they travel from there."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tatami.comm.objects import ObjectMessages
from tatami.comm.staging import is_on_host, own_device, place_of
from tatami.comm.transport import DevicePlace, Route, Transport, choose_route, describe_route
from tatami.errors import ClosedError, InputError


class PlacedCommunicator(ObjectMessages):
    """What a communicator knows of its ranks; abstract, as it moves nothing."""

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

    @property
    def rank(self) -> int:
        return self._rank

    @property
    def size(self) -> int:
        return len(self._hosts)

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._hosts

    @property
    def is_closed(self) -> bool:
        return self._closed

    def _check_open(self, operation: str) -> None:
        if self._closed:
            raise ClosedError(f"{operation} on rank {self.rank} of {self.size}: this communicator was closed")

    def use_device(self, device: torch.device | str) -> Route:
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
        return self._device

    @property
    def transport(self) -> Transport:
        return Transport.HOST if self._route is None else self._route.transport

    @property
    def on_devices(self) -> bool:
        return any(place.kind != "cpu" for place in self._places or ())

    def describe(self) -> str:
        places = self._places or tuple(DevicePlace(host=host) for host in self.hosts)
        return describe_route(places, self._route or choose_route(places), library=self.library)

    def _lie_at(self, places: tuple[DevicePlace, ...]) -> Route:
        self._places, self._route = places, choose_route(places)
        return self._route

    def _inherit(self, part: PlacedCommunicator, ranks: Sequence[int]) -> None:
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
