"""Ray as it is found: absent, out of reach, of another version; and what is left of a run that was killed."""

import json
import os
import signal
import socket
import subprocess
import sys
from contextlib import AbstractContextManager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tatami.engine.processes import machine, started_with
from tatami.engine.ray_engine import engine, remove_stale, require_ray, run_folder
from tatami.engine.ray_start import conditions, end
from tatami.engine.ray_watch import Condition, RayProcess
from tatami.errors import InputError, MissingExtraError


def test_where_ray_is_absent_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tatami-torch\[server\]'"):
        require_ray()


def test_the_command_line_names_it_too(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("typer")
    from typer.testing import CliRunner

    from tatami.cli.app import app

    monkeypatch.setitem(sys.modules, "ray", None)
    script = tmp_path / "script.py"
    script.write_text("import torch\nmodel_fn = loss_fn = print\ndataset = (torch.zeros(1, 1), torch.zeros(1, 1))\n")
    result = CliRunner().invoke(app, ["server", "train", str(script), "--rounds", "1"])
    assert result.exit_code != 0
    assert "pip install 'tatami-torch[server]'" in result.stderr


@pytest.mark.parametrize(
    "problem",
    [
        RuntimeError("Version mismatch: The cluster was started with: Ray: 2.9.0, Python: 3.10.1"),
        ConnectionError("Could not find any running Ray instance"),
        ValueError("not an address"),
    ],
    ids=lambda problem: type(problem).__name__,
)
def test_a_cluster_that_cannot_be_used_is_named(problem: Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")

    def init(**_: object) -> None:
        raise problem

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(InputError, match="cluster at theirs cannot be used: ") as caught, engine(address="theirs"):
        pass
    assert str(problem) in str(caught.value)


def test_what_the_user_says_of_libc_stays_and_of_the_run_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    ray = pytest.importorskip("ray")
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.check=0")
    tokens, folders = set(), []
    for _ in range(2):  # one after the other in one process
        with engine(store_bytes=100 * 2**20):
            theirs = ray.get(ray.remote(num_cpus=0)(lambda: dict(os.environ)).remote(), timeout=800)
        assert theirs["GLIBC_TUNABLES"] == "glibc.malloc.check=0"
        tokens.add(theirs["RAY_AUTH_TOKEN"])
        folders.append(Path(theirs["TATAMI_RAY_FOLDER"]))
        assert not started_with("TATAMI_RAY_FOLDER", theirs["TATAMI_RAY_FOLDER"])
    assert len(tokens) == 2
    assert [folder for folder in folders if folder.exists()] == []


def test_an_address_at_which_nothing_listens() -> None:
    pytest.importorskip("ray")
    with socket.create_server(("127.0.0.1", 0)) as gone:
        address = f"127.0.0.1:{gone.getsockname()[1]}"
    with (
        pytest.raises(InputError, match=f"cluster at {address} cannot be used: nothing answers there"),
        engine(address=address),
    ):
        pass


class Services:
    """What Ray starts a node with: a raylet, and a question that is answered when the node is up."""

    def __init__(self, *, raylet: subprocess.Popen[bytes], asked_for: int) -> None:
        self._raylet, self._left = raylet, asked_for
        self.num_asked = 0

    def start_raylet(self) -> Any:
        return SimpleNamespace(process=self._raylet)

    def get_node(self, address: str) -> str:
        self.num_asked += 1
        self._left -= 1
        if self._left >= 0:
            raise RuntimeError("no such node")
        return f"the node at {address}"


def starting(services: Services, folder: Path) -> AbstractContextManager[None]:
    constants = SimpleNamespace(ENABLE_RAY_CLUSTER=True, ENABLE_RAY_CLUSTERS_ENV_VAR="TATAMI_TEST_CLUSTERS")
    node = SimpleNamespace(Node=SimpleNamespace(start_api_server=None, start_monitor=None, start_log_monitor=None))
    ray = SimpleNamespace(_private=SimpleNamespace(ray_constants=constants, services=services, node=node))
    return conditions(ray, folder=folder, token="")


def test_a_node_is_waited_for_while_its_raylet_lives(tmp_path: Path) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    try:
        services = Services(raylet=raylet, asked_for=3)
        own = services.get_node
        with starting(services, tmp_path):
            services.start_raylet()
            assert services.get_node("here") == "the node at here"
        assert services.num_asked == 4
        assert services.get_node == own, "Ray has its own again"
    finally:
        raylet.kill()
        raylet.wait()


def test_a_node_whose_raylet_has_ended_is_not_waited_for(tmp_path: Path) -> None:
    raylet = subprocess.Popen([sys.executable, "-c", ""])
    raylet.wait()
    services = Services(raylet=raylet, asked_for=10**9)
    with starting(services, tmp_path):
        services.start_raylet()
        with pytest.raises(ConnectionError, match="raylet ended while it started"):
            services.get_node("here")


def test_what_does_not_end_with_ray_is_ended(tmp_path: Path) -> None:
    """As a process that Ray had started and that is stopped: it would write into a folder that is removed."""
    environment = os.environ | {"TATAMI_RAY_FOLDER": str(tmp_path)}
    marked, agent = (
        subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"], env=env) for env in (environment, None)
    )
    os.kill(marked.pid, signal.SIGSTOP)
    try:
        end(tmp_path, agents=(agent.pid,), limit_s=0.0)
        assert (marked.wait(timeout=800), agent.wait(timeout=800)) == (-signal.SIGKILL, -signal.SIGKILL)
    finally:
        marked.kill()
        agent.kill()


def test_a_cluster_of_the_users_is_not_waited_for_where_its_raylet_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    """The raylet is not ours to kill, and Ray's way to leave waits for it, at the end of the process again."""
    ray = pytest.importorskip("ray")
    raylet = subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"])
    process = RayProcess(name="raylet", pid=raylet.pid, is_ours=False)
    calls: list[object] = []
    monkeypatch.setattr(ray, "init", lambda **_: None)
    monkeypatch.setattr(ray, "shutdown", lambda: calls.append("shutdown"))
    monkeypatch.setattr("atexit.unregister", calls.append)
    monkeypatch.setattr("tatami.engine.ray_engine.ray_processes", lambda _: (process,))
    try:
        with engine(address="theirs"):
            pass
        assert calls == ["shutdown"]
        with engine(address="theirs"):
            os.kill(raylet.pid, signal.SIGSTOP)
            while process.condition is not Condition.STOPPED:
                os.sched_yield()
        assert calls == ["shutdown", ray._private.worker.shutdown]
    finally:
        raylet.kill()
        raylet.wait()


def test_what_a_killed_run_left_is_removed_by_the_next(tmp_path: Path) -> None:
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    owners = {
        "tatami-dead": {"pid": ended.pid, "machine": machine()},
        "tatami-mine": {"pid": os.getpid(), "machine": machine()},
        "tatami-elsewhere": {"pid": ended.pid, "machine": "another one"},
        "tatami-broken": "?",
    }
    for name, owner in owners.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "owner.json").write_text(json.dumps(owner))
    (tmp_path / "tatami-run-of-others").mkdir()
    remove_stale(tmp_path)
    left = {"tatami-mine", "tatami-elsewhere", "tatami-broken", "tatami-run-of-others"}
    assert {each.name for each in tmp_path.iterdir()} == left
    with run_folder(parent=tmp_path) as folder:
        (folder / "session").mkdir()
        assert {each.name for each in tmp_path.iterdir()} == left | {folder.name}
    assert {each.name for each in tmp_path.iterdir()} == left


def test_processes_of_a_ray_that_is_gone_are_ended_by_the_next_run_and_others_are_not(tmp_path: Path) -> None:
    (tmp_path / "tatami-live").mkdir()
    words = [sys.executable, "-c", "input()"]
    folders = {name: str(tmp_path / f"tatami-{name}") for name in ("gone", "live")}
    started = {
        name: subprocess.Popen(words, stdin=subprocess.PIPE, env={**os.environ, "TATAMI_RAY_FOLDER": folder})
        for name, folder in folders.items()
    }
    try:
        remove_stale(tmp_path)
        assert started["gone"].wait(800) == -signal.SIGKILL
        assert started["live"].poll() is None
    finally:
        for process in started.values():
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("raised", "code"),
    [
        ("OSError('Connection reset by peer')", 1),
        ("ray.exceptions.RaySystemError(None)", 1),
        ("ray.exceptions.ObjectStoreFullError()", 3),
        ("ValueError()", 3),
        ("None", 0),
    ],
)
def test_a_process_ends_with_its_node_and_keeps_its_mistakes(raised: str, code: int) -> None:
    """The first is what a worker said when its node was killed under it, and what stopped the run as if it were the user's."""
    pytest.importorskip("ray")
    script = (
        "import ray.exceptions, sys\nfrom tatami.engine.processes import tethered\n"
        f"error = {raised}\n"
        "try:\n with tethered():\n  if error is not None: raise error\n"
        "except Exception: sys.exit(3)\n"
    )
    assert subprocess.run([sys.executable, "-c", script], timeout=800, check=False).returncode == code
