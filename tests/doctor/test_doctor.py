"""`tatami doctor`: from facts to advice; and hosts that are there, are not, differ, or cannot be reached."""

import json
import socket
import struct
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

import tatami
from hand_clock import HandClock
from tatami.cli.app import app
from tatami.doctor import (
    Diagnosis,
    HostFacts,
    LoadWatch,
    Trial,
    compared,
    connected,
    diagnosed,
    examine,
    facts_here,
    steps_to_take,
    tried,
)
from tatami.doctor.agent import _greet, reach
from tatami.doctor.host_facts import PACKAGES
from tatami.doctor.hosts import SHELL_VARIABLE, host_names
from tatami.errors import InputError

WHOLE = HostFacts(
    host="new",
    address="10.0.0.2",
    python="3.11.9",
    program="/usr/bin/python3",
    packages={"tatami": "0.1.0", **dict.fromkeys(PACKAGES, "1.0")},
    cores=4,
    quota=None,
    memory_bytes=8 << 30,
    shared_bytes=4 << 30,
    gpus=0,
)


def problems(found: list[Diagnosis]) -> dict[str, str]:
    return {each.what: each.seen for each in found if each.is_problem}


def without(*names: str) -> HostFacts:
    return replace(WHOLE, packages={name: value for name, value in WHOLE.packages.items() if name not in names})


def test_where_all_is_there_nothing_is_to_be_done() -> None:
    found = diagnosed(WHOLE)
    assert problems(found) == {}
    assert steps_to_take(found) == []
    assert {"Python", "torch", "ray", "CUDA", "cores", "shared memory"} <= {each.what for each in found}


@pytest.mark.parametrize(
    ("facts", "what", "seen", "advice"),
    [
        (replace(WHOLE, shared_bytes=64 << 20), "shared memory", "64 MiB free", "--shm-size"),
        (replace(WHOLE, shared_bytes=None), "shared memory", "no /dev/shm", "tmpfs"),
        (replace(WHOLE, address=""), "host name", "new has no address", "/etc/hosts"),
        (replace(WHOLE, quota=1.5), "cores", r"2 usable (of 4: the container may use 1.5)", "TATAMI_THREADS"),
        (without("torch"), "torch", "not installed", "pip install torch"),
    ],
)
def test_what_does_not_work_comes_with_what_to_do(facts: HostFacts, what: str, seen: str, advice: str) -> None:
    found = diagnosed(facts)
    assert list(problems(found)) == [what]
    assert seen in problems(found)[what]
    assert advice in steps_to_take(found)[0]


def test_what_is_only_not_installed_is_no_problem_and_names_its_extra() -> None:
    found = diagnosed(without("ray", "matplotlib"))
    assert problems(found) == {}
    assert steps_to_take(found) == [
        "matplotlib: for pictures: pip install 'tatami-torch[plot]'",
        "ray: for elastic runs and parameter servers: pip install 'tatami-torch[server]'",
    ]


def test_versions_that_differ_are_named_with_their_hosts() -> None:
    old = replace(WHOLE, host="old", python="3.12.1", packages={**WHOLE.packages, "torch": "0.9"})
    same = compared({"new": WHOLE, "other": replace(WHOLE, python="3.11.2")}, silent={})
    assert problems(same) == {}
    assert [each.seen for each in same if each.what == "hosts"] == ["4 cores on new, other"]
    found = problems(compared({"new": WHOLE, "old": old}, silent={}))
    assert found == {"Python": "3.11 on new; 3.12 on old", "torch": "1.0 on new; 0.9 on old"}


@pytest.mark.parametrize(
    ("said", "advice"),
    [
        ("ssh: Could not resolve hostname old: Name or service not known", "/etc/hosts"),
        ("old: Permission denied (publickey,password).", "ssh-copy-id old"),
        ("Host key verification failed.", "log in once by hand, so that its key is known: ssh old"),
        ("ssh: connect to host old port 22: Connection refused", "sshd"),
        ("/usr/bin/python3: Error while finding module: No module named 'tatami'", "install the same Tatami"),
        ("bash: line 1: cd: /home/me/train: No such file or directory", "the same folder"),
        ("no answer in 60 s", "firewall"),
        ("something else", "try it by hand: ssh old true"),
    ],
)
def test_a_host_that_is_silent_comes_with_what_to_do(said: str, advice: str) -> None:
    (found,) = compared({}, silent={"old": said})
    assert found.is_problem
    assert found.advice is not None
    assert advice in found.advice


def test_connections_are_told_by_what_stands_in_their_way() -> None:
    fine = {("a", "b"): 0.001, ("b", "a"): 0.002}
    assert [each.seen for each in connected(fine)] == ["2 of 2 pairs of hosts reach each other, the slowest in 2 ms"]
    shut = connected({**fine, ("a", "c"): "no answer in 3 s", ("b", "c"): "no answer in 3 s", ("c", "a"): 0.001})
    assert problems(shut) == {"connections": "a -> c, b -> c: no answer in 3 s"}
    assert "connect to c" in (shut[0].advice or "")
    unknown = connected({("a", "b"): "the name is not known there (Name or service not known)"})
    assert unknown[0].advice == "give b an entry in /etc/hosts of every host"
    assert connected({}) == []


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In the place of ssh: hosts are this machine, but for 127.0.0.9, which nothing leads to, and 127.0.0.8, which hangs."""
    program = tmp_path / "shell"
    program.write_text(
        '#!/bin/sh\necho "Welcome to $1"\ncase $1 in\n'
        '127.0.0.9) echo "ssh: connect to host $1 port 22: Connection refused" >&2; exit 255;;\n'
        '127.0.0.8) exec sleep 600;;\n*) exec sh -c "$2";;\nesac\n',
        encoding="ascii",
    )
    program.chmod(0o755)
    monkeypatch.setenv(SHELL_VARIABLE, str(program))
    monkeypatch.setenv("PYTHONPATH", str(Path(tatami.__file__).parents[1]))


@pytest.mark.usefixtures("shell")
def test_hosts_are_examined_and_connected_to() -> None:
    found = examine(["127.0.0.2:4", "127.0.0.3", "127.0.0.9", "localhost"], patience_s=800.0, connect_s=800.0)
    assert set(found.facts) == {"127.0.0.2", "127.0.0.3", "localhost"}
    assert found.silent == {"127.0.0.9": "ssh: connect to host 127.0.0.9 port 22: Connection refused"}
    assert len(found.reached) == 6
    assert all(isinstance(said, float) for said in found.reached.values()), found.reached
    assert found.facts["127.0.0.2"].packages == facts_here().packages


@pytest.mark.usefixtures("shell")
def test_a_host_that_hangs_is_not_waited_for_and_a_port_that_is_shut_is_told() -> None:
    found = examine(["127.0.0.8"], patience_s=0.5)
    assert found.silent["127.0.0.8"] == "no answer in 0.5 s"
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert reach("127.0.0.1", port, limit_s=0.1) == "no answer in 0.1 s"
    assert reach("127.0.0.1", port, limit_s=5.0) == "Connection refused"
    assert "the name is not known there" in str(reach("no-such-host.invalid", port, limit_s=5.0))


def test_a_connection_that_is_reset_ends_no_agent() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=_greet, args=(listener,), daemon=True).start()
        for _ in range(20):
            with socket.create_connection(listener.getsockname()) as connection:
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closing it is a reset
        assert isinstance(reach(*listener.getsockname(), limit_s=60.0), float)


def test_names_of_hosts_are_checked_and_counted_once() -> None:
    assert host_names(["a:4", "b", "a:2"]) == ["a", "b"]
    for wrong in ([], [""], ["a b"], ["-x"], ["a:0"], ["n" * 300]):
        with pytest.raises(InputError, match="give names"):
            host_names(wrong)


def test_a_thing_that_is_installed_and_does_not_work_is_found() -> None:
    def trial(words: tuple[str, ...]) -> Trial:
        return Trial(what="it", needs="torch", words=words, expects="fine", advice="mend it")

    good, bad, late = (
        tried(WHOLE, trials=[trial(("-c", code))], limit_s=limit_s)[0]
        for code, limit_s in (("print('fine 3')", 800.0), ("raise OSError('no library')", 800.0), ("while 1: pass", 0.0))
    )
    assert (good.is_problem, good.seen) == (False, "works (fine 3)")
    assert (bad.is_problem, bad.seen, bad.advice) == (True, "OSError: no library", "mend it")
    assert late.seen == "no answer in 0 s"
    assert tried(without("torch"), trials=[trial(())]) == []


def test_a_busy_machine_is_told_from_our_own_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0, 1})
    monkeypatch.setattr("os.sysconf", lambda _: 100)
    texts = iter(["cpu 100 0 0 500 0 0 0 0\n"] * 3 + ["cpu 280 0 0 520 0 0 0 0\n"] * 3)
    hands = HandClock(0.0)
    watches = [LoadWatch(clock=hands, read=lambda: next(texts)) for _ in range(3)]
    hands.sleep(1.0)
    ours, others, some = (watch.load(own_s=own_s) for watch, own_s in zip(watches, (1.75, 0.5, 1.3), strict=True))
    assert ours is not None
    assert others is not None
    assert some is not None
    assert [ours.others, ours.idle, others.others] == pytest.approx([0.05, 0.2, 1.3])
    assert [ours.is_busy, others.is_busy] == [False, True]
    assert some.is_busy
    assert others.sentence() == "other programs kept 1.3 cores of this machine busy, 0.2 were idle"

    def nothing() -> str:
        raise OSError

    assert LoadWatch(clock=hands, read=nothing).load(own_s=0.0) is None


def test_the_command_ends_with_what_to_do_and_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tatami.doctor.facts_here", lambda: without("ray"))
    invoke = CliRunner().invoke
    fine = invoke(app, ["doctor", "--quick"])
    assert fine.exit_code == 0, fine.output
    assert "pip install 'tatami-torch[server]'" in fine.stdout
    assert fine.stdout.rstrip().endswith("Everything installed works. Next: tatami demo")
    monkeypatch.setattr("tatami.doctor.facts_here", lambda: replace(WHOLE, address=""))
    broken = invoke(app, ["doctor", "--quick", "--json"])
    assert broken.exit_code == 1
    record = json.loads(broken.stdout.splitlines()[-1])
    assert record["steps"][0].startswith("host name: give new an entry in /etc/hosts")
    assert record["facts"]["cores"] == 4
    assert invoke(app, ["doctor", "--hosts", "a,,b"]).exit_code == 2


def test_what_is_here_is_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("mpi4py")
    from tatami.doctor.trials import TRIALS

    trials = [trial for trial in TRIALS if trial.needs == "mpi4py"]
    loaded, found = tried(facts_here(), trials=trials, limit_s=800.0)
    assert loaded.seen.startswith("works (loaded "), loaded
    assert not found.is_problem, found
    assert found.seen.startswith("works (sum 3 ")
    assert facts_here().program == sys.executable
    (tmp_path / "mpi4py").mkdir()
    (tmp_path / "mpi4py" / "__init__.py").write_text("class rc: pass")
    (tmp_path / "mpi4py" / "MPI.py").write_text("raise RuntimeError('cannot load\\nlibmpi.so: no such file')")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{Path(tatami.__file__).parents[1]}")
    (broken,) = tried(facts_here(), trials=trials, limit_s=800.0)
    assert broken.seen == "RuntimeError: cannot load libmpi.so: no such file"
    assert broken.advice == "mpi4py is installed, but the MPI library does not load: pip install mpich"
    code = "from tatami.comm.session import load_mpi; load_mpi(timeout_s=9)"
    init = subprocess.run([sys.executable, "-c", code], capture_output=True, check=False)
    assert f"MissingExtraError: {broken.advice} (cannot load libmpi.so: no such file)" in init.stderr.decode()
