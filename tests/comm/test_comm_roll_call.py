"""After a wait without its message a rank knows who is silent, and why, and what the others wait in."""

import math
import os
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tatami.comm import AbstractCommunicator, launch
from tatami.comm.stall_report import ProcessPlace, describe_findings
from tatami.comm.wait import Waiting, WaitPolicy, wait_policy, wait_until
from tatami.errors import CommTimeoutError, InputError
from tatami.testing.worlds import WORLD_TIMEOUT_S, World

HERE = ProcessPlace.here()
ELSEWHERE = ProcessPlace(host="far", kernel="another", pid=7)


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    with subprocess.Popen(["sleep", "1000"]) as process:
        yield process
        process.kill()


def test_waits_are_told_together() -> None:
    said = {1: "barrier on rank 1 of 4", 3: "barrier on rank 3 of 4", 2: "recv from rank 0 (tag 7) on rank 0 of 2"}
    text = describe_findings(said, rank=0, places=[HERE] * 4)
    assert text == "Ranks 1, 3 wait in barrier. Rank 2 waits in recv from rank 0 (tag 7) on rank 0 of 2."


def test_of_processes_elsewhere_only_their_silence_is_known() -> None:
    assert describe_findings({}, rank=1, places=[ELSEWHERE, HERE]) == (
        "Rank 0 (pid 7 on far) does not answer: it computes, was stopped, has died, or cannot be reached."
    )
    # Another container may have the same host name, and other processes by the same numbers.
    namesake = replace(HERE, kernel="another", pid=2**22)
    assert "does not answer" in describe_findings({}, rank=1, places=[namesake, HERE])


def test_of_processes_of_this_machine_it_is_known_how_they_are(process: subprocess.Popen[bytes]) -> None:
    places = [replace(HERE, pid=process.pid), HERE]
    who = f"Rank 0 (pid {process.pid} on {HERE.host})"
    alive = f"{who} is alive, but does not wait for other ranks: it computes, or waits for something else."
    assert describe_findings({}, rank=1, places=places) == alive
    process.send_signal(signal.SIGSTOP)
    os.waitid(os.P_PID, process.pid, os.WSTOPPED)
    stopped = f"{who} was stopped by a signal: `kill -CONT {process.pid}` lets it go on."
    assert describe_findings({}, rank=1, places=places) == stopped
    process.kill()
    process.wait()
    assert describe_findings({}, rank=1, places=places) == f"{who} has ended."


def test_of_very_many_ranks_some_are_named() -> None:
    places = [HERE, *(replace(ELSEWHERE, pid=number) for number in range(999))]
    text = describe_findings(dict.fromkeys(range(1, 900), "barrier"), rank=0, places=places)
    assert "92 more do not answer. Ranks 1, 2, 3, 4, 5, 6, 7, 8 and 891 more wait in barrier." in text
    assert text.count("does not answer") == 8


@pytest.mark.ranks(1, 2, 4)
def test_ranks_that_wait_answer_and_go_on(world: World, comm: AbstractCommunicator) -> None:
    """Ranks but the last wait for it; it asks meanwhile what they do, and again, and then comes."""
    roll_call = comm.roll_call
    if roll_call is None:
        assert world.kind == "threads"
        return
    last = comm.size - 1
    if comm.rank < last:
        comm.barrier()
    else:
        for _ in range(2):
            said = roll_call.ask("nothing", patience_s=WORLD_TIMEOUT_S)
            assert said == {rank: f"barrier on rank {rank} of {comm.size}" for rank in range(last)}
        comm.barrier()


SCRIPT = """
    import os, pathlib, signal, sys, time, torch
    from tatami.comm import AllReduce, AllReduceSpec, init, stall_report
    from tatami.errors import CommTimeoutError
    stall_report.SHORTEST_S = 5.0  # a rank of a busy machine may take its time to answer
    comm = init(timeout_s=1000)
    comm.barrier()
    comm.timeout_s = 3.0
    folder, pids = pathlib.Path(sys.argv[1]), comm.allgather_object(os.getpid())
    parts = [comm.duplicate() for _ in range(4)]
    sound = comm.split(comm.rank == 1)
    sound.timeout_s = 1000
    ways = {"barrier": parts[0].barrier, "allreduce": lambda: parts[1].allreduce(torch.zeros(9))}
    ways["ring"] = AllReduce(parts[2], AllReduceSpec(size=1 << 16, algorithm="ring")).run
    if comm.has_windows:
        del ways["ring"]
        ways["shared"] = AllReduce(parts[3], AllReduceSpec(size=1 << 16, algorithm="shared")).run
    for way in ways.values():
        way()
    if comm.rank == 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    for name, way in ways.items():
        sound.barrier()
        try:
            way()
        except CommTimeoutError as error:
            (folder / f"{comm.rank}-{name}").write_text(str(error))
    sound.barrier()
    os.kill(pids[1], signal.SIGKILL)
    os._exit(1)
"""


def check_what_was_said(folder: Path, ways: set[str]) -> None:
    found = {path.name: path.read_text() for path in folder.glob("?-*")}
    assert set(found) == {f"{rank}-{way}" for way in ways for rank in (0, 2)}
    for name, text in found.items():
        assert " was stopped by a signal: `kill -CONT " in text
        assert text.count("Rank 1 (pid ") == 1
        assert "Rank 0 (pid " not in text, text
        assert "Rank 2 (pid " not in text, text
        other = 2 - int(name[0])
        assert f"Rank {other} waits in " in text


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(textwrap.dedent(SCRIPT))
    return path


def test_a_rank_that_was_stopped_is_named_and_no_other(script: Path) -> None:
    pytest.importorskip("mpi4py")
    assert launch.run([str(script), str(script.parent)], ranks=3) != 0
    check_what_was_said(script.parent, {"barrier", "allreduce", "shared"})


def test_a_rank_of_torchrun_that_was_stopped_is_named_and_no_other(script: Path) -> None:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3"]
    with subprocess.Popen([sys.executable, *words, str(script), str(script.parent)], stderr=subprocess.DEVNULL) as process:
        assert process.wait(800) != 0
    check_what_was_said(script.parent, {"barrier", "allreduce", "ring"})


class CountedClock:
    """Every look at it takes 10 us; notes the sleeps."""

    def __init__(self) -> None:
        self.time_s = 0.0
        self.sleeps: list[float] = []

    def now_s(self) -> float:
        self.time_s += 10e-6
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        self.sleeps.append(duration_s)
        self.time_s += duration_s


def test_what_is_done_already_is_not_timed() -> None:
    clock = CountedClock()
    assert wait_until(lambda: True, policy=WaitPolicy(spin_s=1.0), timeout_s=1.0, clock=clock) is None
    assert clock.time_s == 0.0


def test_it_spins_first_and_then_sleeps_in_growing_steps() -> None:
    clock = CountedClock()
    policy = WaitPolicy(spin_s=1e-3, first_sleep_s=200e-6, longest_sleep_s=500e-6, sleep_fraction=0.25)
    assert wait_until(lambda: len(clock.sleeps) == 8, policy=policy, timeout_s=1.0, clock=clock) is None
    # 1000 us of spinning, then a quarter of what was waited until then, and 10 us for each look at the clock.
    assert [round(sleep_s * 1e6) for sleep_s in clock.sleeps] == [250, 315, 396, 498, 500, 500, 500, 500]


def test_it_ends_after_the_timeout_and_does_not_oversleep_it() -> None:
    clock = CountedClock()
    waited_s = wait_until(
        lambda: False, policy=WaitPolicy(spin_s=0.0, first_sleep_s=0.4, longest_sleep_s=0.4), timeout_s=0.5, clock=clock
    )
    assert waited_s is not None
    assert 0.5 <= waited_s < 0.501


def test_auto_spins_only_where_every_rank_has_a_core() -> None:
    roomy = wait_policy(ranks_on_host=2, cores=2, environ={})
    crowded = wait_policy(ranks_on_host=3, cores=2, environ={"TATAMI_WAIT": "auto"})
    assert roomy.spin_s > crowded.spin_s == 0
    assert max(roomy.longest_sleep_s, crowded.longest_sleep_s) <= 1e-3


def test_the_environment_chooses() -> None:
    assert wait_policy(ranks_on_host=9, cores=1, environ={"TATAMI_WAIT": "spin"}).spin_s == math.inf
    assert wait_policy(ranks_on_host=1, cores=9, environ={"TATAMI_WAIT": "sleep"}).spin_s == 0.0
    with pytest.raises(InputError, match="TATAMI_WAIT='doze' is not a way to wait; choose one of: auto, spin, sleep"):
        wait_policy(ranks_on_host=1, cores=1, environ={"TATAMI_WAIT": "doze"})


def test_the_error_says_who_waited_for_whom_in_what_and_what_to_do() -> None:
    receiving = Waiting(operation="recv", rank=2, size=8, peer=5, tag=7)
    assert str(receiving.timeout(30.0)) == (
        "recv from rank 5 (tag 7) on rank 2 of 8 timed out after 30 s: nothing came from rank 5. Is rank 5 alive, and does it "
        "use the same tag? Raise timeout_s if it is only slow or the link is."
    )
    meeting = Waiting(operation="barrier", rank=0, size=4, missing=(1, 3))
    assert "barrier on rank 0 of 4 timed out after 1.5 s: ranks 1, 3 did not join" in str(meeting.timeout(1.5))
    assert str(meeting.timeout(1.5, members=(0, 1, 2, 3))) == str(meeting.timeout(1.5))
    assert "ranks 1, 3 did not join. In the whole job ranks 0, 1, 3 are ranks 2, 4, 7. Do all" in str(
        meeting.timeout(1.5, members=(2, 4, 5, 7))
    )


@pytest.mark.ranks(3)
def test_ranks_of_a_part_are_named_by_their_numbers_in_the_job_too(comm: AbstractCommunicator) -> None:
    part = comm.split(0 if comm.rank else None, key=comm.rank)
    if part is not None and part.rank == 0:
        part.timeout_s = 0.2
        with pytest.raises(
            CommTimeoutError, match=r"from rank 1 .* on rank 0 of 2 .* In the whole job ranks 0, 1 are ranks 1, 2\. "
        ):
            part.recv(torch.zeros(1), 1)
    comm.barrier()
