"""Ray as a run starts it: closed to other users, at work at once, and with nothing left of it in this process."""

import ipaddress
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("ray")

import ray

import tatami
from tatami.engine.processes import children, started_with
from tatami.engine.ray_engine import engine, require_ray


class Teller:
    """A process of Ray's that tells of itself."""

    def look(self) -> tuple[int, int, dict[str, str]]:
        return os.getpid(), os.nice(0), dict(os.environ)


# Once their meeting has begun, processes of Ray's wait for each other before they are anything: unless all of them are started
# at the same time, none goes on.
MEET = """
import os, sys, time
folder = os.environ["MEETING"]
if os.path.isdir(folder) and any("default_worker" in word for word in sys.orig_argv):
    open(os.path.join(folder, str(os.getpid())), "w").close()
    limit_s = time.monotonic() + 800
    while len(os.listdir(folder)) < 3 and time.monotonic() < limit_s:
        time.sleep(0.01)
    if len(os.listdir(folder)) < 3:
        open(os.path.join(folder, "alone"), "w").close()
"""


@pytest.fixture(scope="module")
def meeting(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("meeting") / "begun"


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("home")


@pytest.fixture(scope="module")
def ours(home: Path, meeting: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[set[tuple[str, str]]]:
    """What starting Ray has changed in the environment of this process; one Ray for all that is asked of it."""
    hook = tmp_path_factory.mktemp("hook")
    (hook / "sitecustomize.py").write_text(MEET)
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("GLIBC_TUNABLES", raising=False)
        patch.setenv("HOME", str(home))
        patch.setenv("MEETING", str(meeting))
        patch.syspath_prepend(str(hook))
        require_ray()
        before = dict(os.environ)
        with engine(store_bytes=100 * 2**20):
            meeting.mkdir()  # one process is up already, and stands by
            yield set(os.environ.items() ^ before.items())


Seen = list[tuple[int, int, dict[str, str]]]


@pytest.fixture(scope="module")
def seen(ours: object) -> Iterator[Seen]:  # noqa: ARG001 - runs in it
    """Process id, niceness and environment of each process, while they are there."""
    remote: Any = ray.remote
    actors = [remote(num_cpus=0)(Teller).remote() for _ in range(4)]
    yield ray.get([actor.look.remote() for actor in actors], timeout=800)
    for actor in actors:
        ray.kill(actor)


def test_processes_start_at_the_same_time(seen: Seen, meeting: Path) -> None:
    assert len({pid for pid, _, _ in seen}) == 4
    assert len(os.listdir(meeting)) >= 3
    assert "alone" not in os.listdir(meeting), "a process waited for the others, which were to be started after it only"


def test_processes_run_at_the_niceness_of_this_one(seen: Seen) -> None:
    assert [niceness for _, niceness, _ in seen] == [os.nice(0)] * 4


def test_processes_find_their_environment_and_this_one_keeps_its_own(ours: set[tuple[str, str]], seen: Seen) -> None:
    theirs = seen[0][2]
    is_set = platform.machine() == "x86_64"
    assert theirs.get("GLIBC_TUNABLES") == ("glibc.cpu.x86_non_temporal_threshold=4194304" if is_set else None)
    assert str(Path(tatami.__file__).parents[1]) in theirs["PYTHONPATH"].split(os.pathsep)
    assert ours == set()


def test_no_other_user_can_enter_what_ray_keeps(seen: Seen) -> None:
    folder = Path(seen[0][2]["TATAMI_RAY_FOLDER"])
    about = folder.stat()
    assert (about.st_mode & 0o777, about.st_uid) == (0o700, os.getuid())
    sockets = [str(path) for path in folder.rglob("*") if path.is_socket()]
    assert {Path(each).name for each in sockets} >= {"raylet", "plasma_store"}
    names = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()]
    theirs = [name for name in names if name.startswith("/") and f"_{os.getpid()}/" in name]
    assert set(theirs) == set(sockets), "none of this process's Ray is anywhere else"


def test_ray_listens_on_loopback_only(seen: Seen) -> None:
    processes = {os.getpid(), *started_with("TATAMI_RAY_FOLDER", seen[0][2]["TATAMI_RAY_FOLDER"])}
    processes |= {child for each in processes for child in children(each)}
    assert {pid for pid, _, _ in seen} < processes
    addresses = listening(processes)
    assert len(addresses) >= 4 + 2, "those of the four, of the raylet and of the GCS are seen at least"
    assert set(addresses) == {"127.0.0.1"}


def test_nothing_is_started_that_a_run_has_no_use_for(seen: Seen) -> None:
    """Neither dashboard nor autoscaler nor a reader of logs, each a Python that takes seconds of a core."""
    processes = started_with("TATAMI_RAY_FOLDER", seen[0][2]["TATAMI_RAY_FOLDER"])
    said = [Path(f"/proc/{process}/cmdline").read_bytes().decode() for process in processes]
    assert {"gcs_server", "raylet"} <= {Path(each.split("\0")[0]).name for each in said}
    assert not re.findall(r"\w*monitor\.py|dashboard\.py", " ".join(said))


def listening(processes: set[int]) -> list[str]:
    """The addresses at which these processes wait to be connected to."""
    inodes = set()
    for process in processes:
        for handle in Path(f"/proc/{process}/fd").glob("*"):
            with suppress(OSError):
                inodes.add(os.readlink(handle))
    found = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *rest = line.split()
            if state == "0A" and f"socket:[{rest[5]}]" in inodes:
                found.append(_address(local.partition(":")[0]))
    return found


def _address(words: str) -> str:
    """An address as the kernel writes it: words of four bytes, each in the machine's order."""
    packed = b"".join(bytes.fromhex(words[at : at + 8])[::-1] for at in range(0, len(words), 8))
    address = ipaddress.ip_address(packed)
    return str(getattr(address, "ipv4_mapped", None) or address)


ASK = """
import sys
from ray._raylet import GcsClient
print("keys:", GcsClient(address=sys.argv[1]).internal_kv_keys(b"", None, timeout=800))
"""


@pytest.mark.parametrize("token", ["0" * 64, None])
def test_a_run_has_a_token_without_which_it_takes_no_orders(seen: Seen, home: Path, token: str | None) -> None:
    (ours,) = {environment["RAY_AUTH_TOKEN"] for _, _, environment in seen}
    assert len(ours) == 64
    assert not list(home.rglob("*auth*")), "it is nowhere on the disk"
    address = ray.get_runtime_context().gcs_address
    mode = {"RAY_AUTH_MODE": "disabled"} if token is None else {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}
    words = [sys.executable, "-c", ASK, address]
    asked = subprocess.run(words, env=os.environ | mode, capture_output=True, text=True, timeout=800, check=False)
    assert asked.returncode != 0
    assert "token is missing or incorrect" in asked.stderr
    mode = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": ours}
    asked = subprocess.run(words, env=os.environ | mode, capture_output=True, text=True, timeout=800, check=True)
    assert asked.stdout.startswith("keys: [b")
