"""Ray as the engine of a run: started here for one machine, or found where the user has a cluster."""

from __future__ import annotations

import logging
import os
import platform
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tatami.errors import InputError, MissingExtraError, TrainingError
from tatami.server.folder import run_folder

LOOPBACK = "127.0.0.1"
_STARTS = 3
_ANSWER_S = 10.0
_STREAMED = "glibc.cpu.x86_non_temporal_threshold"
MESSAGE_BYTES = 1 << 20
"""Up to here a copy in each message costs less than the object store, which wakes a third process several times."""
_CONFIG = {"free_objects_period_milliseconds": 0, "max_direct_call_object_size": MESSAGE_BYTES}
"""Memory is freed at once, not every second: rounds that are shorter would each be given fresh memory, which is slow at first.
And what `mail` puts in messages stays in them."""


def require_ray() -> Any:
    """The module `ray`.

    Raises:
        MissingExtraError: it is not installed.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Announced for a later release; it concerns GPUs and is printed by every process.
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    try:
        import ray
    except ImportError as error:
        raise MissingExtraError("ray, which the parameter server runs on,", extra="server") from error
    return ray


@contextmanager
def engine(*, address: str | None = None, store_bytes: int | None = None) -> Iterator[Any]:
    """Ray, running: as the caller has started it, on the cluster at `address`, or on this machine alone until the end.

    Alone it listens on loopback only, shows no dashboard, reports nothing to anybody, and leaves no file.

    Args:
        address: of a Ray cluster; None starts one on this machine.
        store_bytes: shared memory for what is under way; a third of the machine's where None.

    Raises:
        MissingExtraError: Ray is not installed.
        InputError: the cluster cannot be reached, or is of another version of Ray or Python.
        TrainingError: Ray does not start here.
    """
    ray = require_ray()
    if ray.is_initialized():
        yield ray
        return
    if address is not None:
        _ask(address)
        try:
            ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"the Ray cluster at {address} cannot be used: {error}") from error
        try:
            yield ray
        finally:
            ray.shutdown()
        return
    with run_folder() as folder:
        try:
            with on_loopback(ray), _environment(_streaming_copies()):
                _start(ray, folder=folder, store_bytes=store_bytes)
            with _quiet():
                yield ray
        finally:
            ray.shutdown()


def _ask(address: str) -> None:
    """Whether anybody listens there: Ray itself tries for half a minute, and then says little."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return  # a name like "auto"; Ray knows what it means
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S):
            return
    except OSError as error:
        raise InputError(
            f"the Ray cluster at {address} cannot be used: nobody answers there ({error.strerror or error}). "
            "`ray start --head` prints the address of its cluster"
        ) from error


def _start(ray: Any, *, folder: Path, store_bytes: int | None) -> None:
    """Start Ray here, again if it fails: on a machine that is busy with other things its own limit of 30 s is too short."""
    for attempt in range(_STARTS):
        try:
            ray.init(
                num_cpus=1,
                num_gpus=0,
                include_dashboard=False,
                log_to_driver=False,
                logging_level=logging.ERROR,
                object_store_memory=store_bytes,
                _node_ip_address=LOOPBACK,
                _temp_dir=str(folder),
                _system_config=_CONFIG,
            )
        except Exception as error:
            ray.shutdown()
            if attempt == _STARTS - 1:
                raise TrainingError(f"Ray did not start, {_STARTS} times: {error}") from error
        else:
            return


@contextmanager
def on_loopback(ray: Any) -> Iterator[None]:
    """Workers find the same modules as this process, and nobody listens on other addresses than loopback.

    Ray binds to loopback only where it takes loopback for the machine's address, as it does on desktop systems.
    """
    constants = ray._private.ray_constants
    path = os.pathsep.join(each for each in [*sys.path, os.environ.get("PYTHONPATH", "")] if each)
    clusters = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({"PYTHONPATH": path, constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


def _streaming_copies() -> dict[str, str]:
    """Copies of some MB go around the caches, as what they carry is read by another process: rounds take a tenth less.

    By default only those do that are larger than all caches of the machine, which 100 MB of parameters are not.
    """
    is_set = "GLIBC_TUNABLES" in os.environ
    return {} if is_set or platform.machine() != "x86_64" else {"GLIBC_TUNABLES": f"{_STREAMED}={4 << 20}"}


@contextmanager
def _environment(wanted: Mapping[str, str]) -> Iterator[None]:
    """What processes that are started meanwhile find in their environment."""
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray prints a page about each process that dies; here that is daily business, and the report tells of it."""
    from ray._private import worker

    name = "print_to_stdstream"
    shown = getattr(worker, name, None)
    if shown is None:  # another version of Ray: its pages do no harm
        yield
        return
    setattr(worker, name, lambda *_, **__: None)
    try:
        yield
    finally:
        setattr(worker, name, shown)
