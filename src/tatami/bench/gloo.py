"""Gloo, torch's own communication, as what Tatami is measured against."""

from __future__ import annotations

import os
import tempfile
from typing import Any

import torch
import torch.distributed

from tatami.comm.base import AbstractCommunicator


def start_gloo(comm: AbstractCommunicator) -> None:
    """A gloo process group over the ranks of `comm`, which are all on this machine: no other one can reach it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    store = store_of_one_host(comm)
    torch.distributed.init_process_group("gloo", store=store, rank=comm.rank, world_size=comm.size)


def store_of_one_host(comm: AbstractCommunicator) -> Any:
    """Where the ranks of one machine find each other: a file, for a `TCPStore` listens to all other machines, too."""
    place = None
    if comm.rank == 0:
        handle, place = tempfile.mkstemp(prefix="tatami-store-")
        os.close(handle)
    distributed: Any = torch.distributed  # its stubs leave out internal names
    return distributed.FileStore(comm.bcast_object(place), comm.size)
