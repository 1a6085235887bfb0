"""The store by which groups are formed: kept by the process that started the run, which does not die with a rank."""

from __future__ import annotations

import socket
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist


def keep_store(host: str, *, timeout_s: float) -> Any:
    """Keep a store at a free port of this address; by itself it would listen on all interfaces."""
    make = cast(Any, dist).TCPStore
    listener = socket.create_server((host, 0))
    port, number = listener.getsockname()[1], listener.detach()
    limit = timedelta(seconds=timeout_s)
    return make(host, port, is_master=True, wait_for_workers=False, timeout=limit, master_listen_fd=number)


def reach_store(host: str, port: int, *, timeout_s: float) -> Any:
    """A connection of its own: an operation that waits keeps all others of its connection waiting.

    Raises:
        RuntimeError: nothing answers there.
    """
    return cast(Any, dist).TCPStore(host, port, is_master=False, timeout=timedelta(seconds=timeout_s))
