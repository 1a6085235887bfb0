"""Ray on this machine for one run: closed to others, patient where the machine is busy, and ended with all its processes."""

from __future__ import annotations

import logging
import os
import platform
import secrets
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from tatami.comm.signals import ENDING
from tatami.engine.processes import children, is_running, is_stopped, kill, started_with
from tatami.errors import TrainingError

LOOPBACK = "127.0.0.1"
MESSAGE_BYTES = 1 << 20
"""Up to here a copy in each message costs less than the object store, which wakes a third process several times."""
CONFIG = {
    # Memory is freed at once, not every second: rounds that are shorter would each be given fresh memory, slow at first.
    "free_objects_period_milliseconds": 0,
    # What `mail` puts in messages stays in them.
    "max_direct_call_object_size": MESSAGE_BYTES,
    # Ray's own 15 lets every other program of the machine go first, and sound workers are silent for so long.
    "worker_niceness": 0,
    # Ray's own is one for each CPU that it is given, and there they would start one after the other.
    "worker_maximum_startup_concurrency": 64,
}
PATIENCE_S = 240
"""For each of Ray's own processes to start. Its own limits are from 5 to 60 s, which a busy machine needs longer than."""
_PATIENCE = {
    "RAY_gcs_server_port_wait_time_s": PATIENCE_S,
    "RAY_gcs_rpc_server_connect_timeout_s": PATIENCE_S,
    "RAY_py_gcs_connect_timeout_s": PATIENCE_S,
    "RAY_raylet_start_wait_time_s": PATIENCE_S,
    "RAY_worker_register_timeout_seconds": PATIENCE_S,
    "RAY_agent_register_timeout_ms": PATIENCE_S * 1000,
}
FOLDER_VARIABLE = "TATAMI_RAY_FOLDER"
"""In the environment of every process that belongs to a Ray of ours: the folder of its run."""
_STARTS = 3
_STARTS_S = 3.0 * PATIENCE_S
_SHUT_DOWN_S = 60.0
_END_S = 10.0
_PAUSE_S = 0.05
_STREAMED = "glibc.cpu.x86_non_temporal_threshold"


def start(ray: Any, *, folder: Path, store_bytes: int | None) -> tuple[int, ...]:
    """Start Ray for this process, again if it fails.

    Args:
        folder: private to this user. Ray makes its own folder in it writable for all, and there are the sockets by which it
            is told what to run.
        store_bytes: shared memory for what is under way; a third of the machine's where None.

    Returns:
        Processes of Ray that its raylet has started for itself; for `shut_down`.

    Raises:
        TrainingError: it does not start.
    """
    for attempt in range(_STARTS):
        try:
            token = secrets.token_hex(32)
            with uninterrupted(ray), conditions(ray, folder=folder, token=token), _within(_STARTS_S, folder):
                read_token(ray)
                ray.init(
                    num_cpus=1,
                    num_gpus=0,
                    include_dashboard=False,
                    log_to_driver=False,
                    logging_level=logging.ERROR,
                    object_store_memory=store_bytes,
                    _node_ip_address=LOOPBACK,
                    _temp_dir=str(folder / "ray"),
                    _system_config=dict(CONFIG),  # Ray notes its folder in it, which the next one would take for its own
                )
        except Exception as error:
            shut_down(ray, folder=folder)
            if attempt == _STARTS - 1:
                raise TrainingError(f"Ray did not start, {_STARTS} times: {error}") from error
        else:
            break
    return tuple(agent for process in started_with(FOLDER_VARIABLE, str(folder)) for agent in children(process))


@contextmanager
def uninterrupted(ray: Any) -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP act at the end of this: in the middle of it, Ray ends by a fatal signal or leaves processes.

    And Ray sets no handler of SIGTERM: its own end the process without a word to the run.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    asked: list[int] = []
    utils, set_handler = ray._private.utils, ray._private.utils.set_sigterm_handler
    utils.set_sigterm_handler = lambda _: None
    before = {number: signal.signal(number, lambda number, _: asked.append(number)) for number in ENDING}
    try:
        yield
    finally:
        utils.set_sigterm_handler = set_handler
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)
    if asked:
        signal.raise_signal(asked[0])


def shut_down(ray: Any, *, folder: Path, agents: tuple[int, ...] = ()) -> None:
    """End what `start` has started, and return when nothing of it is left: its processes would go on writing in `folder`."""
    for process in started_with(FOLDER_VARIABLE, str(folder)):
        if is_stopped(process):
            kill(process)  # Ray would wait for it
    with _within(_SHUT_DOWN_S, folder):
        ray.shutdown()
    end(folder, agents=agents)
    read_token(ray)


@contextmanager
def _within(limit_s: float, folder: Path) -> Iterator[None]:
    """Calls that wait for Ray end when its processes end: these are killed where the block takes longer."""
    timer = threading.Timer(limit_s, lambda: _kill_all(started_with(FOLDER_VARIABLE, str(folder))))
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def end(folder: Path, *, agents: tuple[int, ...] = (), limit_s: float = _END_S) -> None:
    """Wait until all processes of the Ray in `folder` have ended, and end those that do not within the limit."""

    def left() -> set[int]:
        return {*started_with(FOLDER_VARIABLE, str(folder)), *filter(is_running, agents)}

    if _wait_for(lambda: not left(), limit_s=limit_s):
        return
    _kill_all(left())
    _wait_for(lambda: not left(), limit_s=_END_S)


def _kill_all(processes: Iterable[int]) -> None:
    for process in processes:
        kill(process)


@contextmanager
def conditions(ray: Any, *, folder: Path, token: str) -> Iterator[None]:
    """What Ray is started under: on loopback, with this token, and with time; its workers find the modules of this process.

    The token is in the environment of Ray's processes, which only their user can read, and in no file.
    """
    path = os.pathsep.join(each for each in [*sys.path, os.environ.get("PYTHONPATH", "")] if each)
    wanted = {
        "PYTHONPATH": path,
        "RAY_AUTH_MODE": "token",
        "RAY_AUTH_TOKEN": token,
        "RAY_AUTH_TOKEN_PATH": None,
        "PYTHONBREAKPOINT": os.environ.get("PYTHONBREAKPOINT"),  # Ray leaves its own debugger there
        FOLDER_VARIABLE: str(folder),
        **{name: str(value) for name, value in _PATIENCE.items()},
        **_streaming_copies(),
    }
    with _alone(ray), _patient(ray), _lean(ray), _environment(wanted):
        yield


def read_token(ray: Any) -> None:
    """Have Ray read again from the environment whether there is a token, and which: it keeps in mind what it found first."""
    with suppress(AttributeError):  # a version without tokens
        # In this order: Ray ends the process where it looks for a token in vain.
        ray._raylet.Config.initialize("")
        ray._raylet.AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _alone(ray: Any) -> Iterator[None]:
    """Ray binds to loopback only where it takes loopback for the machine's address, as it does on desktop systems."""
    constants = ray._private.ray_constants
    clusters = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        with _environment({constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"}):
            yield
    finally:
        constants.ENABLE_RAY_CLUSTER = clusters


@contextmanager
def _patient(ray: Any) -> Iterator[None]:
    """Wait for a node for as long as its process lives, and not longer: Ray waits for 30 s in any case, by no setting."""
    services = ray._private.services
    get_node, start_raylet = services.get_node, services.start_raylet
    raylets: list[Any] = []

    def start_and_note(*arguments: Any, **names: Any) -> Any:
        info = start_raylet(*arguments, **names)
        raylets.append(info.process)
        return info

    def wait_for_node(*arguments: Any, **names: Any) -> Any:
        def has_ended() -> bool:
            return any(raylet.poll() is not None for raylet in raylets)

        found: list[Any] = []

        def is_there() -> bool:
            with suppress(RuntimeError):
                found.append(get_node(*arguments, **names))
            return bool(found) or has_ended()

        if _wait_for(is_there, limit_s=PATIENCE_S) and found:
            return found[0]
        how = "ended while it started" if has_ended() else f"was not up after {PATIENCE_S} s"
        raise ConnectionError(f"Ray's raylet {how}")  # no RuntimeError: at those Ray tries for longer

    services.get_node, services.start_raylet = wait_for_node, start_and_note
    try:
        yield
    finally:
        services.get_node, services.start_raylet = get_node, start_raylet


@contextmanager
def _lean(ray: Any) -> Iterator[None]:
    """Without a dashboard, for which Ray waits, an autoscaler and a reader of logs, none of which a run has a use for."""
    node = ray._private.node.Node
    before = {name: getattr(node, name) for name in ("start_api_server", "start_monitor", "start_log_monitor")}
    for name in before:
        setattr(node, name, lambda *_, **__: None)
    try:
        yield
    finally:
        for name, start_it in before.items():
            setattr(node, name, start_it)


def _wait_for(is_so: Callable[[], bool], *, limit_s: float) -> bool:
    """Whether it came to be so within the limit."""
    deadline_s = time.monotonic() + limit_s
    while not is_so():
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _streaming_copies() -> dict[str, str]:
    """Copies of some MB go around the caches, as what they carry is read by another process: rounds take a tenth less.

    By default only those do that are larger than all caches of the machine, which 100 MB of parameters are not.
    """
    is_set = "GLIBC_TUNABLES" in os.environ
    return {} if is_set or platform.machine() != "x86_64" else {"GLIBC_TUNABLES": f"{_STREAMED}={4 << 20}"}


@contextmanager
def _environment(wanted: Mapping[str, str | None]) -> Iterator[None]:
    """What processes that are started meanwhile find in their environment; None: no such variable."""
    before = {name: os.environ.get(name) for name in wanted}
    _set(wanted)
    try:
        yield
    finally:
        _set(before)


def _set(variables: Mapping[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
