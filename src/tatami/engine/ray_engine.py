"""Ray as the engine of a run: started here for one machine, or found where the user has a cluster."""

from __future__ import annotations

import atexit
import json
import logging
import os
import shutil
import site
import socket
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tatami.comm.signals import ending_as_exception
from tatami.engine.processes import is_running, kill, machine, sees_our_files, values_at_start
from tatami.engine.ray_start import FOLDER_VARIABLE, shut_down, start, uninterrupted
from tatami.engine.ray_watch import Condition, ray_processes
from tatami.errors import InputError, MissingExtraError

_PREFIX = "tatami-"
_OWNER = "owner.json"


@contextmanager
def run_folder(*, parent: Path | None = None) -> Iterator[Path]:
    """A folder of this user alone, until the end.

    Args:
        parent: /tmp if None, and not `tempfile.gettempdir()`: the paths of Ray's sockets must stay under 108 characters.
    """
    if parent is None:
        parent = Path("/tmp") if Path("/tmp").is_dir() else Path(tempfile.gettempdir())
    remove_stale(parent)
    folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    try:
        (folder / _OWNER).write_text(json.dumps({"pid": os.getpid(), "machine": machine()}), encoding="utf-8")
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def remove_stale(parent: Path) -> None:
    """Remove what this user's runs that were killed have left on this machine: their folders, and processes of their Ray.

    Workers that are being started when their run ends may take minutes to notice it. Of other machines nothing is known here.
    """
    for owner in parent.glob(f"{_PREFIX}*/{_OWNER}"):
        with suppress(OSError, ValueError, KeyError, TypeError):
            if owner.parent.lstat().st_uid != os.getuid():
                continue
            known = json.loads(owner.read_text(encoding="utf-8"))
            if known["machine"] == machine() and not is_running(int(known["pid"])):
                shutil.rmtree(owner.parent, ignore_errors=True)
    for pid, folder in values_at_start(FOLDER_VARIABLE).items():
        if not Path(folder).exists() and sees_our_files(pid) and pid != os.getpid():
            kill(pid)


_ANSWER_S = 10.0


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

    Alone it listens on loopback only, takes orders only with a token that is gone with it, keeps its files and sockets in a
    folder that no other user can enter, shows no dashboard, reports nothing, and leaves no file.

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
    # By default SIGTERM would leave Ray's processes behind.
    with ending_as_exception(), _started(ray, address=address, store_bytes=store_bytes):
        yield ray


@contextmanager
def _started(ray: Any, *, address: str | None, store_bytes: int | None) -> Iterator[None]:
    if address is not None:
        _ask(address)
        try:
            with uninterrupted(ray):
                ray.init(address=address, log_to_driver=False, logging_level=logging.ERROR)
        except (ConnectionError, RuntimeError, ValueError) as error:
            raise InputError(f"the Ray cluster at {address} cannot be used: {error}") from error
        raylet = ray_processes(ray)
        try:
            yield
        finally:
            # Leave a cluster of the user's; not by Ray where its raylet here is stopped: that would never end, and it is not
            # ours.
            if any(process.condition is Condition.STOPPED for process in raylet):
                atexit.unregister(ray._private.worker.shutdown)
            else:
                ray.shutdown()
        return
    with run_folder() as folder, _quiet():
        agents: tuple[int, ...] = ()
        try:
            agents = start(ray, folder=folder, store_bytes=store_bytes)
            yield
        finally:
            shut_down(ray, folder=folder, agents=agents)


def _ask(address: str) -> None:
    """Whether anything listens there: Ray itself tries for half a minute, and then says little."""
    host, _, port = address.rpartition("://")[2].rpartition(":")
    if not (host and port.isdecimal()):
        return  # a name like "auto"; Ray knows what it means
    try:
        with socket.create_connection((host, int(port)), timeout=_ANSWER_S):
            return
    except OSError as error:
        raise InputError(
            f"the Ray cluster at {address} cannot be used: nothing answers there ({error.strerror or error}). "
            "`ray start --head` prints the address of its cluster"
        ) from error


@contextmanager
def _quiet() -> Iterator[None]:
    """Ray prints a page about each process that dies; here deaths are expected, and the report has them."""
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


@contextmanager
def by_value(*functions: Any) -> Iterator[None]:
    """Send the user's own modules along: a worker's process could not import a script or a test."""
    ray = require_ray()
    installed = (*site.getsitepackages(), sys.prefix, sys.base_prefix)
    modules = []
    for function in functions:
        module = sys.modules.get(getattr(function, "__module__", None) or type(function).__module__)
        file = getattr(module, "__file__", None)
        known = module is None or module.__name__ == "__main__" or module.__name__.startswith("tatami.")
        if module is not None and not known and file and not file.startswith(installed):
            modules.append(module)
    for module in modules:
        ray.cloudpickle.register_pickle_by_value(module)
    try:
        yield
    finally:
        for module in set(modules):
            ray.cloudpickle.unregister_pickle_by_value(module)
