"""Real jobs: they end well, and when a rank fails they end and say which, though the other ranks would wait forever."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest

from tatami.comm import forked, launch
from tatami.comm.launch import SHARED_MEMORY, Launcher, find_launcher, launch_command, rank_command, run
from tatami.comm.signals import undisturbed
from tatami.errors import InputError, MissingExtraError

pytest.importorskip("mpi4py", reason="needs the extra 'mpi'")

if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK")):
    pytest.skip("inside mpiexec no other mpiexec can be started", allow_module_level=True)


MAY_COPY = sys.platform == "linux" and not any(map(os.path.exists, forked._GPUS))


@dataclass(frozen=True, kw_only=True)
class Ended:
    """How a job ended."""

    code: int
    out: str
    err: str


class Job:
    """Starts a script on ranks by the command, which on Linux are copies of it."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory

    def __call__(self, script: str, *arguments: str, ranks: int) -> Ended:
        path = self._directory / "script.py"
        path.write_text(textwrap.dedent(script), encoding="utf-8")
        command = [sys.executable, "-m", "tatami", "run", "-n", str(ranks), str(path), *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=800)
        return Ended(code=done.returncode, out=done.stdout, err=done.stderr)


@pytest.fixture
def job(tmp_path: Path) -> Job:
    return Job(tmp_path)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_a_job_ends_well(job: Job, ranks: int) -> None:
    script = """
        import sys, torch
        from tatami.comm import init
        comm = init(timeout_s=1000)
        total = torch.tensor([comm.rank + 1])
        comm.allreduce(total)
        if comm.rank == 0:
            print(f"size={comm.size} total={total.item()} threads={torch.get_num_threads()} said={sys.argv[1:]}")
    """
    ended = job(script, "two words", ranks=ranks)
    threads = max(1, len(os.sched_getaffinity(0)) // ranks)
    if ranks == 1:
        assert "size=1 total=1 threads=" in ended.out
    else:
        assert f"size={ranks} total={ranks * (ranks + 1) // 2} threads={threads} said=['two words']" in ended.out
    assert (ended.code, ended.err) == (0, "")


@pytest.mark.parametrize("family", ["mpich", "other"])
@pytest.mark.parametrize("moment", ["before init", "after init", "in a thread"])
def test_an_exception_on_one_rank_ends_the_job_with_its_traceback(
    job: Job, moment: str, family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By whatever the ranks are started: `other` is called as mpiexec."""
    if family == "other":
        found = find_launcher()
        monkeypatch.setattr(launch, "find_launcher", lambda: Launcher(program=found.program, family="other"))
    script = """
        import os, sys, threading, time
        def work():
            raise ValueError("boom")
        if sys.argv[1] == "before init" and os.environ["PMI_RANK"] == "1":
            work()
        from tatami.comm import init
        comm = init(timeout_s=1000)
        if comm.rank == 1:
            if sys.argv[1] == "in a thread":
                threading.Thread(target=work, name="loader").start()
            else:
                work()
        comm.barrier()
        time.sleep(1000)
    """
    ended = job(script, moment, ranks=3)
    assert ended.code != 0
    assert "[rank 1" in ended.err
    assert 'raise ValueError("boom")' in ended.err
    assert "ValueError: boom" in ended.err
    assert "tatami/comm/program" not in ended.err
    assert ("in thread 'loader'" in ended.err) == (moment == "in a thread")


def test_a_rank_that_is_killed_is_named(job: Job) -> None:
    script = """
        import os, signal
        from tatami.comm import init
        comm = init(timeout_s=1000)
        print(f"rank {comm.rank} is {os.getpid()}", flush=True)
        comm.barrier()
        if comm.rank == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        comm.barrier()
    """
    before = set(SHARED_MEMORY.glob("mpich_shm_*"))
    ended = job(script, ranks=3)
    # Other jobs of this machine have files there, too, and have them mapped, but for the moments of their beginning and end.
    wait_for(
        lambda: {str(path) for path in set(SHARED_MEMORY.glob("mpich_shm_*")) - before} <= launch.mapped(),
        what="the end of the job's files",
    )
    # Ranks share the output, and their lines may run into each other.
    pid = re.search(r"rank 2 is (\d+)", ended.out)
    assert pid is not None
    assert ended.code != 0
    assert f"tatami run: rank 2 (pid {pid[1]} on " in ended.err
    assert ended.err.endswith(") was killed by signal 9 (SIGKILL); the other ranks are stopped\n")
    assert "BAD TERMINATION" not in ended.out + ended.err


@pytest.mark.parametrize("algorithm", ["shared", "ring", "torus_put", "native"])
def test_a_rank_that_dies_in_mid_reduce_is_named(job: Job, algorithm: str) -> None:
    script = """
        import os, signal, sys, threading
        from tatami.comm import AllReduce, AllReduceSpec, init
        comm = init(timeout_s=1000)
        reduce = AllReduce(comm, AllReduceSpec(size=1 << 20, algorithm=sys.argv[1]))
        for step in range(10_000):
            if comm.rank == 1 and step == 3:
                threading.Timer(0.05, os.kill, (os.getpid(), signal.SIGKILL)).start()
            reduce.run()
    """
    ended = job(script, algorithm, ranks=4)
    assert ended.code != 0
    assert "tatami run: rank 1 (pid " in ended.err
    assert ") was killed by signal 9 (SIGKILL); the other ranks are stopped" in ended.err


@pytest.mark.parametrize(("moment", "code"), [("before init", 5), ("after init", 5), ("after init", 0)])
def test_a_rank_that_leaves_without_a_word_is_named(job: Job, moment: str, code: int) -> None:
    script = """
        import os, sys
        code = int(sys.argv[2])
        if sys.argv[1] == "before init" and os.environ["PMI_RANK"] == "1":
            os._exit(code)
        from tatami.comm import init
        comm = init(timeout_s=1000)
        if comm.rank == 1:
            os._exit(code)
        comm.barrier()
    """
    ended = job(script, moment, str(code), ranks=2)
    assert ended.code != 0
    assert "tatami run: rank 1 (pid " in ended.err
    how = "" if code else " before it had left MPI (by os._exit?)"
    assert f") ended with exit code {code}{how}; the other ranks are stopped" in ended.err


def test_a_rank_that_leaves_before_the_others_begin_is_named(job: Job) -> None:
    script = """
        import os, sys
        if os.environ["PMI_RANK"] == "1":
            sys.exit(0)
        from tatami.comm import init
        init()
    """
    ended = job(script, ranks=2)
    assert ended.code == 1
    assert "tatami run: rank 1 (pid " in ended.err
    assert ") ended with exit code 0 without having begun MPI, where rank 0 waited for it; the other ranks" in ended.err


def test_ranks_without_mpi_need_none(job: Job) -> None:
    """Also with more variables and words than some launchers take, and with input for the first rank alone."""
    with pytest.MonkeyPatch.context() as patch:
        for number in range(300):
            patch.setenv(f"TATAMI_TEST_{number}", "x" * 100)
        ended = job(
            "import os, sys; sys.stdout.write(f'{len(sys.argv)} {os.environ[\"TATAMI_TEST_299\"][:3]}\\n')",
            *map(str, range(100)),
            ranks=2,
        )
    assert (ended.code, ended.out, ended.err) == (0, "101 xxx\n" * 2, "")


def test_a_mistake_of_all_ranks_has_one_traceback_after_its_sentence(job: Job) -> None:
    """Also where each rank names its own numbers; what the call was and what to do come first."""
    script = "import os\nerror = ValueError(f'wrong on {os.getpid()}')\nerror.add_note('in a call by all')\nraise error\n"
    ended = job(script, ranks=3)
    told = re.findall(
        r"rank \d(?: of 3)? failed; all ranks are stopped\. In a call by all\. ValueError: wrong on \d+\n", ended.err
    )
    assert 1 <= len(told) <= 3
    assert ended.err.count("Traceback") == 1
    assert ended.err.index(told[0]) < ended.err.index("Traceback")


@pytest.mark.parametrize(
    ("end", "code", "told"),
    [
        ("sys.exit(7)", 7, "rank 1 of 2 ended with exit code 7; all ranks are stopped"),
        ("comm.abort('the disk is full')", 1, "rank 1 of 2 aborted: the disk is full"),
    ],
)
def test_one_rank_ends_the_job_with_its_own_code_and_reason(job: Job, end: str, code: int, told: str) -> None:
    script = f"""
        import sys
        from tatami.comm import init
        comm = init(timeout_s=1000)
        if comm.rank == 1:
            {end}
        comm.barrier()
    """
    ended = job(script, ranks=2)
    assert ended.code == code
    assert told in ended.err


def test_a_rank_that_never_comes_ends_the_job_after_the_timeout(job: Job) -> None:
    script = """
        import time
        from tatami.comm import init
        comm = init(timeout_s=1000)
        if comm.rank == 0:
            time.sleep(1000)
        comm.timeout_s = 1.0
        comm.barrier()
    """
    ended = job(script, ranks=2)
    assert ended.code != 0
    assert re.search(r"CommTimeoutError: barrier on rank 1 of 2 timed out after [\d.]+ s: not every rank joined", ended.err)


def test_a_rank_that_never_starts_mpi_is_not_waited_for_without_end(job: Job) -> None:
    script = """
        import os, time
        from tatami.comm import init, session
        session.START_TIMEOUT_S = 2.0
        if "1" in (os.environ.get("PMI_RANK"), os.environ.get("OMPI_COMM_WORLD_RANK")):
            time.sleep(1000)
        init(timeout_s=1.0)
    """
    ended = job(script, ranks=2)
    assert ended.code != 0
    assert "Timeout (0:00:02)!" in ended.err
    assert "in _meet_all_ranks_of_the_job" in ended.err


def test_a_world_under_mpiexec_fails_on_all_ranks_together(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "conftest.py").write_text('pytest_plugins = ["tatami.testing.worlds"]\n', encoding="utf-8")
    (tmp_path / "test_ranks.py").write_text(
        textwrap.dedent("""
            def test_passes(world):
                assert world(lambda comm: comm.rank) == [0, 1]

            def test_fails_on_the_last(world):
                def body(comm):
                    assert comm.rank == 0, "only the last"
                world(body)
        """),
        encoding="utf-8",
    )
    module = ["-m", "pytest", "-p", "no:cacheprovider", "--rootdir", str(tmp_path), "-m", "mpi", "--world=mpi", str(tmp_path)]
    assert run(module, ranks=2) == 1
    out = capfd.readouterr().out
    assert out.count("1 failed, 1 passed, 6 deselected") == 1
    assert "AssertionError: only the last" in out
    assert "rank 1 of 2:" in out


def test_the_launcher_beside_this_python_is_found() -> None:
    found = find_launcher()
    assert found.program.name == "mpiexec"
    assert found.family in ("mpich", "openmpi")


def test_without_a_launcher_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(MissingExtraError, match=r"mpiexec.*pip install 'tatami-torch\[mpi\]'"):
        find_launcher()


def test_launchers_get_the_flags_they_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    mpich, openmpi = (Launcher(program=Path("mpiexec"), family=family) for family in ("mpich", "openmpi"))
    assert launch_command(mpich, ["prog"], ranks=4, hosts=None) == [
        "mpiexec",
        "-n",
        "4",
        "-launcher",
        "fork",
        "-iface",
        "lo",
        "prog",
    ]
    assert launch_command(mpich, ["prog"], ranks=4, hosts=["a:2", "b"]) == ["mpiexec", "-n", "4", "-hosts", "a:2,b", "prog"]
    words = "mpiexec -n 2 --oversubscribe --bind-to none --allow-run-as-root --mca btl ^tcp prog x"
    assert launch_command(openmpi, ["prog", "x"], ranks=2, hosts=None) == words.split()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "--allow-run-as-root" not in launch_command(openmpi, ["prog"], ranks=2, hosts=["a"])


def test_what_cannot_be_started_is_refused(tmp_path: Path) -> None:
    launcher = Launcher(program=Path("mpiexec"), family="mpich")
    with pytest.raises(InputError, match="cannot start 0 ranks"):
        launch_command(launcher, ["prog"], ranks=0, hosts=None)
    for hosts in ([], ["a b"], ["a:0"], ["-x"]):
        with pytest.raises(InputError, match="give names"):
            launch_command(launcher, ["prog"], ranks=1, hosts=hosts)
    with pytest.raises(InputError, match=r"3 ranks do not fit on old:1,new:1, with places for 2: give fewer"):
        launch_command(launcher, ["prog"], ranks=3, hosts=["old:1", "new:1"])
    with pytest.raises(InputError, match="nothing to run"):
        rank_command([])
    with pytest.raises(InputError, match=r"there is no script '.*missing.py'"):
        rank_command([str(tmp_path / "missing.py")])
    with pytest.raises(InputError, match="there is no option '--hots'"):
        rank_command(["--hots", "a:1", "prog.py"])
    with pytest.raises(InputError, match="there is no program 'no-such-program'"):
        rank_command(["no-such-program"])
    assert rank_command(["-m", "tatami", "x"])[-6:] == [sys.executable, "-m", "tatami.comm.runner", "-m", "tatami", "x"]


@pytest.mark.parametrize(
    ("number", "family"),
    [
        (signal.SIGTERM, "mpich"),
        (signal.SIGTERM, "other"),
        (signal.SIGHUP, "mpich"),
        (signal.SIGKILL, "mpich"),
        (signal.SIGKILL, "other"),
    ],
)
def test_a_run_that_is_ended_leaves_no_rank_and_no_file(tmp_path: Path, number: signal.Signals, family: str) -> None:
    """SIGKILL ends the ranks with it, too."""
    (tmp_path / "files").mkdir()
    (tmp_path / "rank.py").write_text(
        "import os, sys, time\n"
        "from tatami.comm import init\n"
        "comm = init()\n"
        "comm.barrier()\n"
        "open(f'{sys.argv[1]}/up-{comm.rank}.part', 'w').write(str(os.getpid()))\n"
        "os.rename(f'{sys.argv[1]}/up-{comm.rank}.part', f'{sys.argv[1]}/up-{comm.rank}')\n"
        "comm.timeout_s = 1000\n"
        "comm.recv_object(1 - comm.rank)\n"
    )
    starter = (
        "import signal, sys\nfrom dataclasses import replace\nfrom tatami.comm import launch\n"
        f"signal.signal({number:d}, signal.SIG_DFL) if {number:d} != signal.SIGKILL else None\n"  # nohup has it ignored
        "found = launch.find_launcher()\n"
        f"launch.find_launcher = lambda: replace(found, family={family!r})\n"
        f"sys.exit(launch.run([{str(tmp_path / 'rank.py')!r}, {str(tmp_path)!r}], ranks=2))"
    )
    environ = {**os.environ, "TMPDIR": str(tmp_path / "files")}
    with subprocess.Popen([sys.executable, "-c", starter], env=environ, stderr=subprocess.PIPE, text=True) as process:
        try:
            wait_for(lambda: len(list(tmp_path.glob("up-?"))) == 2 or process.poll() is not None, what="the start")
            ranks = [int(path.read_text()) for path in tmp_path.glob("up-?")]
            assert len(ranks) == 2
            process.send_signal(number)
            _, said = process.communicate(timeout=800)
        finally:
            process.kill()
    wait_for(lambda: not any(is_alive(pid) for pid in ranks), what="the end of the ranks")
    if number != signal.SIGKILL:
        assert process.returncode == 128 + number
        assert said.endswith(f"tatami run: ended by {number.name}; all 2 ranks are stopped\n")
        assert family == "other" or said.count("\n") == 1, "mpiexec has words of its own"
    assert list((tmp_path / "files").iterdir()) == []


def is_alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def wait_for(done: Callable[[], object], *, what: str) -> None:
    deadline_s = time.monotonic() + 800
    while not done():
        assert time.monotonic() < deadline_s, f"{what} did not come within 800 s"
        time.sleep(0.02)


def test_ranks_may_save_their_work_when_the_run_is_to_end(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(
        "import os, pathlib, signal, sys, time\n"
        "rank = os.environ['PMI_RANK']\n"
        "def save(*_):\n"
        "    pathlib.Path(f'saved-{rank}').touch()\n"
        "    sys.exit()\n"
        "signal.signal(signal.SIGTERM, save)\n"
        "pathlib.Path(f'up-{rank}').touch()\n"
        "time.sleep(800)\n"
    )
    command = [sys.executable, "-m", "tatami", "run", "-n", "3", "rank.py"]
    with subprocess.Popen(command, cwd=tmp_path) as process:
        try:
            wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 3 or process.poll() is not None, what="the start")
            process.terminate()
            assert process.wait(800) == 143
        finally:
            process.kill()
    assert sorted(path.name for path in tmp_path.glob("saved-*")) == ["saved-0", "saved-1", "saved-2"]


def test_copies_of_the_command_are_ranks_as_new_processes_are(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(
        "import atexit, json, os, pathlib, random, signal, sys, threading, time, warnings\n"
        "import numpy\n"
        "from tatami.comm import init\n"
        "facts = dict(argv=sys.argv[1:], name=__name__, path=sys.path[0], stdin=sys.stdin.read(), main=sys.argv[0])\n"
        "files = map('/proc/self/fd/{}'.format, os.listdir('/proc/self/fd'))\n"
        "facts['sockets'] = sum(os.readlink(each).startswith('socket') for each in files if os.path.exists(each))\n"
        "facts['signals'] = [int(signal.getsignal(each)) for each in (signal.SIGTERM, signal.SIGHUP)]\n"
        "facts['blocked'] = len(signal.pthread_sigmask(signal.SIG_BLOCK, []))\n"
        "facts['draws'] = [random.random(), numpy.random.random()]\n"
        "facts['warns'] = warnings.showwarning.__module__, any(each[2] is UserWarning for each in warnings.filters)\n"
        "facts['is copy'] = 'tatami.cli.app' in sys.modules\n"
        "found = pathlib.Path(f'{sys.argv[1]}-{init().rank}')\n"
        "atexit.register(lambda: found.write_text(json.dumps(facts)))\n"
        "threading.Thread(target=lambda: (time.sleep(0.1), facts.update(thread='waited for'))).start()\n"
    )
    command = [sys.executable, "-m", "tatami", "run", "-n", "2"]
    for how in (["script.py"], ["-m", "script"]):
        subprocess.run(
            [*command, *how, how[0], "--flag"],
            cwd=tmp_path,
            input="in",
            text=True,
            check=True,
            timeout=800,
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN),  # as nohup does
        )
        first, second = (json.loads((tmp_path / f"{how[0]}-{rank}").read_text()) for rank in range(2))
        assert first["argv"] == second["argv"] == [how[0], "--flag"]
        assert first["name"] == "__main__"
        assert first["path"] == str(tmp_path)
        assert Path(first["main"]).name == "script.py"
        assert (first["stdin"], second["stdin"]) == ("in", "")
        assert first["signals"] == [signal.SIG_DFL, signal.SIG_IGN]
        assert first["blocked"] == 0
        assert first["warns"] == ["warnings", False]
        assert len(set(first["draws"] + second["draws"])) == 4
        assert first["thread"] == "waited for"
        assert first["is copy"] == MAY_COPY
        assert (first["sockets"], second["sockets"]) == (1, 1), "each has its own connection to the launcher alone"


def test_a_process_that_has_computed_on_several_threads_is_not_copied() -> None:
    script = """
        import torch
        torch.set_num_threads(2)
        from tatami.comm.forked import can_copy, copyable
        can = [can_copy()]
        with copyable():
            torch.rand(1000, 1000).exp()
        can.append(can_copy())
        torch.rand(1000, 1000).exp()
        can.append(can_copy())
        print(can, torch.get_num_threads())
    """
    command = [sys.executable, "-c", textwrap.dedent(script)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, timeout=800).stdout
    assert out == f"[{MAY_COPY}, {MAY_COPY}, False] 2\n"


def test_signals_act_after_what_is_to_run_undisturbed() -> None:
    came: list[str] = []
    before = signal.signal(signal.SIGTERM, lambda *_: came.append("signal"))
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)  # does not block the signal, as threads of BLAS do not
    thread.start()
    try:
        with undisturbed():
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(0.1)
            came.append("end")
        wait_for(lambda: "signal" in came, what="the signal")
        assert came == ["end", "signal"]
    finally:
        idle.set()
        thread.join()
        signal.signal(signal.SIGTERM, before)


def test_hosts_that_are_not_there_are_named_by_ssh(capfd: pytest.CaptureFixture[str]) -> None:
    if find_launcher().family != "mpich" or shutil.which("ssh") is None:
        pytest.skip("needs MPICH's mpiexec, and ssh, which it calls")
    assert run(["true"], ranks=2, hosts=["no-such-machine.invalid", "localhost"]) != 0
    out, err = capfd.readouterr()
    assert out == ""
    assert "ssh: Could not resolve hostname no-such-machine.invalid" in err
    last = err.splitlines()[-1]
    assert last.startswith("tatami run: the job of 2 ranks ended with exit code ")
    assert last.endswith("`tatami doctor --hosts no-such-machine.invalid,localhost` checks these machines")
