"""Labs as they are: three hosts on this machine, a run across them, changes, deaths, and nothing left behind."""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from lab_rig import (
    CLUSTER,
    CLUSTER_TOML,
    HELD,
    HELD_SAMPLES,
    JOB,
    NETWORK,
    base_memory,
    holding,
    interfaces,
    processes_of,
    traces,
)

from tatami.cluster import Cluster, Processor
from tatami.errors import InputError, MemoryLackError
from tatami.lab import Lab, LabEvent, known_labs, missing, parse_event
from tatami.lab.check import check_rates_of, check_speeds_of
from tatami.lab.launched_job import LOST
from tatami.tiling import plan
from tatami.units import parse_bandwidth
from tatami.workload import Workload

REASON = missing()
pytestmark = pytest.mark.skipif(REASON is not None, reason=str(REASON))
pytest.importorskip("mpi4py")

PATIENCE_S = 800.0
"""Only ends what hangs."""


@pytest.fixture(scope="module")
def lab() -> Iterator[Lab]:
    with Lab(CLUSTER) as lab:
        yield lab


def wait_for(done: Callable[[], object], *, what: str) -> None:
    deadline_s = time.monotonic() + PATIENCE_S
    while not done():
        assert time.monotonic() < deadline_s, f"{what} did not happen within {PATIENCE_S} s"
        time.sleep(0.02)


def reports(folder: Path) -> dict[str, Any]:
    return {path.stem: json.loads(path.read_text()) for path in folder.glob("rank-*.json")}


def test_a_run_across_hosts_over_links_of_the_asked_rate(lab: Lab, tmp_path: Path) -> None:
    assert lab.run([str(JOB), "sum", str(tmp_path)], timeout_s=PATIENCE_S) == 0
    found = reports(tmp_path)
    assert [found[f"rank-{rank}"]["sum"] for rank in range(3)] == [6.0, 6.0, 6.0]
    assert found["rank-0"]["hosts"] == ["h1", "h2", "h3"]
    assert found["rank-0"]["local_size"] == 1
    # 1.25 MB at 100 Mbit/s are 0.1 s, and longer beside other work; through shared memory it would be 0.001 s.
    assert found["rank-0"]["seconds"] > 0.09


def test_training_across_hosts_is_exact_and_notices_that_one_becomes_slower(lab: Lab, tmp_path: Path) -> None:
    job = lab.start(["python", str(JOB), "train", str(tmp_path)])
    wait_for(lambda: (tmp_path / "trained").exists() or job.poll() is not None, what="the first iterations")
    lab.set_speed("h1", 0.2)
    (tmp_path / "changed").touch()
    code = job.wait(timeout_s=PATIENCE_S)
    lab.set_speed("h1", 1.0)
    assert code == 0
    found = reports(tmp_path)["rank-0"]
    assert found["losses"][:5] == pytest.approx(found["plain"], rel=1e-4)
    assert found["losses"][-1] < found["losses"][0]
    # h1 had two fifths of all speed, as h2, and h3 the last one; then it has a fifth of that, and one eighth of all.
    assert found["before"] > 0.3
    assert found["after"] < 0.7 * found["before"]


USES_CPU = """
import time
before_s, began_s = time.process_time(), time.monotonic()
while (used_s := time.process_time() - before_s) < 0.5:
    pass
print(used_s / (time.monotonic() - began_s))
"""


def cores_used(lab: Lab) -> list[float]:
    """What each processor got, all at once, until it had half a second of a core."""
    words = [sys.executable, "-I", "-S", "-c", USES_CPU]
    started = [lab.spawn(processor.name, words, stdout=subprocess.PIPE) for processor in lab.plan.cluster.processors]
    return [float(process.communicate(timeout=PATIENCE_S)[0]) for process in started]


def test_no_processor_is_faster_and_no_link_wider_than_asked(lab: Lab) -> None:
    """Other work on this machine may make them slower, so that the limits are what can be measured here.

    `tatami lab check` measures both sides, for machines that do nothing else; what it makes of its measurements is tested in
    `test_lab_words.py`.
    """
    for speed in (1.0, 0.5):
        lab.set_speed("h1", speed)
        for cores, asked in zip(cores_used(lab), (speed, 1.0, 0.5), strict=True):
            assert cores < 1.1 * asked * lab.plan.scale
    lab.set_speed("h1", 1.0)
    assert [finding.name for finding in check_speeds_of(lab, rounds=1)] == ["p1", "p2", "p3"]
    for rate in ("100 Mbit/s", "25 Mbit/s"):
        lab.set_rate("h2", rate)
        got = {finding.name: finding.got for finding in check_rates_of(lab, rounds=1)}
        assert list(got) == ["h1 -> h2", "h2 -> h3", "h3 -> h1"]
        assert 0 < got["h1 -> h2"] < 1.1 * parse_bandwidth(rate)
        assert 0 < got["h2 -> h3"] < 1.1 * parse_bandwidth(rate)
        assert 0 < got["h3 -> h1"] < 1.1 * 12.5e6
    lab.set_rate("h2", "100 Mbit/s")


@pytest.mark.parametrize("verb", ["cut", "kill"])
def test_the_others_notice_a_host_that_is_gone(verb: str, tmp_path: Path) -> None:
    with Lab(CLUSTER) as lab:
        job = lab.start([str(JOB), "wait", str(tmp_path)])
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 3 or job.poll() is not None, what="the start of all ranks")
        assert job.poll() is None
        lab.happen(parse_event(f"0s {verb} h3"))
        (tmp_path / "gone").touch()
        assert (processes_of(f"{lab.name}/h3") == []) == (verb == "kill")
        assert job.wait(timeout_s=PATIENCE_S) != 0
        if verb == "kill":
            with pytest.raises(InputError, match="h3 was killed"):
                lab.mend("h3")
        name = lab.name
    found = reports(tmp_path)
    assert found
    for rank in set(found) - {"rank-2"}:
        assert found[rank]["waited_s"] > 2.9
        assert "allreduce" in found[rank]["said"]
        assert "nothing came from rank 2" in found[rank]["named"]
    assert traces(name) == []


@pytest.mark.parametrize("verb", ["cut", "kill"])
def test_a_command_ends_when_all_ranks_but_the_lost_have(verb: str, tmp_path: Path) -> None:
    happened: list[LabEvent] = []
    script = "touch up-$(hostname); [ $(hostname) = h3 ] && sleep 1000; until [ -e gone ]; do sleep 0.05; done"

    def say(event: LabEvent) -> None:
        wait_for(lambda: len(list(tmp_path.glob("up-*"))) == 3, what="the start of all ranks")
        happened.append(event)
        (tmp_path / "gone").touch()

    with Lab(CLUSTER) as lab:
        user = lab.spawn("h1", ["sleep", "1000"])  # no rank of the command
        events = [parse_event(f"0s {verb} h3"), parse_event("1h kill h1")]
        assert lab.run(["bash", "-c", f"cd {tmp_path}; {script}"], events=events, timeout_s=PATIENCE_S, said=say) == LOST
        assert user.poll() is None
    assert happened == events[:1]


def test_a_command_that_crashes_leaves_nothing() -> None:
    before, hosts_file = interfaces(), Path("/etc/hosts").read_bytes()
    with Lab(CLUSTER) as lab:
        assert len(traces(lab.name)) > 5
        assert lab.run(["bash", "-c", "kill -9 $$"], timeout_s=PATIENCE_S) != 0
        assert lab.spawn("h2", ["bash", "-c", "setsid sleep 1000 & kill -9 $$"]).wait(PATIENCE_S) == -9
        assert len(processes_of(f"{lab.name}/h2")) == 1
        with Lab(CLUSTER) as other:  # two labs with the same hosts and addresses
            assert other.run(["true"], timeout_s=PATIENCE_S) == 0
        assert traces(other.name) == []
        assert lab.run(["true"], timeout_s=PATIENCE_S) == 0
    assert traces(lab.name) == []
    assert interfaces() == before
    assert Path("/etc/hosts").read_bytes() == hosts_file


def test_an_error_inside_leaves_nothing() -> None:
    lab = Lab(CLUSTER)
    with pytest.raises(InputError, match="no host 'h9'"), lab:
        lab.kill("h9")
    assert traces(lab.name) == []


def test_labs_that_are_ended_by_signals(tmp_path: Path) -> None:
    """Ctrl-C and a request to end leave nothing; after SIGKILL `tatami lab clean` takes away what is left."""
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML)
    command = [sys.executable, "-m", "tatami", "lab"]
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGKILL: -9}
    started = {
        number: subprocess.Popen(
            [*command, "run", "cluster.toml", "--", "sleep", "1000"], cwd=tmp_path, preexec_fn=_hear_interrupts
        )
        for number in codes
    }
    try:
        names = {number: name_of_lab(process) for number, process in started.items()}
        for number, process in started.items():
            process.send_signal(number)
        assert {number: process.wait(PATIENCE_S) for number, process in started.items()} == codes
    finally:
        for process in started.values():
            process.terminate()
    assert traces(names[signal.SIGINT]) == traces(names[signal.SIGTERM]) == []
    crashed = names[signal.SIGKILL]
    assert len(traces(crashed)) > 5
    done = subprocess.run([*command, "clean"], capture_output=True, text=True, timeout=PATIENCE_S, check=True)
    assert f"removed {crashed}" in done.stdout
    assert traces(crashed) == []


def _hear_interrupts() -> None:
    """What a shell starts in the background ignores Ctrl-C, and so would what these tests start."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def name_of_lab(process: subprocess.Popen[bytes]) -> str:
    """Once a command runs on its third host."""
    wait_for(lambda: any(state.owner == process.pid for state in known_labs()), what="the lab")
    name = next(state.name for state in known_labs() if state.owner == process.pid)
    wait_for(lambda: len(processes_of(f"{name}/h3")) > 1, what="the start of the ranks")
    return name


def test_a_shell_is_on_its_host(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML)
    command = [sys.executable, "-m", "tatami", "lab", "shell", "h1", "--cluster", "cluster.toml"]
    script = "cat /proc/sys/kernel/hostname; ls /sys/class/net; cat /etc/hosts; exit 7"
    done = subprocess.run(command, cwd=tmp_path, input=script, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 7
    assert done.stdout.split()[:3] == ["h1", "eth0", "lo"]
    assert "10.77.0.2\th2" in done.stdout
    assert "scale: the fastest processor" in done.stderr


def test_events_are_checked_before_anything_starts(lab: Lab) -> None:
    with pytest.raises(InputError, match="no host 'h9' in this lab; its hosts are h1, h2, h3"):
        lab.run(["true"], events=[parse_event("1s kill h9")])
    with pytest.raises(InputError, match="speed 5 for h3 would be"):
        lab.run(["true"], events=[parse_event("1s speed h3 5")])
    with pytest.raises(InputError, match="all processors together need"):
        lab.set_speed("h3", 1.2)


MIB = 1 << 20
SEES = "from tatami.cluster.cores import memory_here; print(memory_here())"
TAKES = "held = bytearray(192 << 20); held[::4096] = b'1' * len(held[::4096])"
"""Writes to every page of it."""


def test_a_host_sees_its_limit_and_what_wants_more_is_ended_there() -> None:
    processors = tuple(
        Processor(name=f"p{i}", speed=1.0, host=f"h{i}", memory=memory) for i, memory in enumerate(("64 MiB", "256 MiB"))
    )
    with Lab(Cluster(processors=processors, network=NETWORK), base_memory="64 MiB") as lab:
        for name, seen in (("h0", 128 * MIB), ("p1", 320 * MIB)):
            told = lab.spawn(name, [sys.executable, "-c", SEES], stdout=subprocess.PIPE).communicate(timeout=PATIENCE_S)[0]
            assert int(told) == seen
        assert lab.starved() == {}
        taking = [lab.spawn(name, [sys.executable, "-c", TAKES]) for name in ("h0", "h1")]
        assert [process.wait(PATIENCE_S) for process in taking] == [-9, 0]
        assert lab.starved() == {
            "h0": "the kernel ended 1 process on h0: more was wanted than the 128 MiB of memory that the host has"
        }
    assert traces(lab.name) == []


def test_a_command_is_told_that_a_host_had_too_little(tmp_path: Path) -> None:
    (tmp_path / "cluster.toml").write_text(CLUSTER_TOML.replace("speed", 'memory = "64 MiB"\nspeed'))
    command = [sys.executable, "-m", "tatami", "lab", "run", "cluster.toml", "--base-memory", "32MiB", "--"]
    script = f'[ $(hostname) != h2 ] || exec {sys.executable} -c "{TAKES}"'
    done = subprocess.run(
        [*command, "bash", "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S, check=False
    )
    assert done.returncode != 0
    assert "lab: the kernel ended 1 process on h2: more was wanted than the 96 MiB of memory" in " ".join(done.stderr.split())


def test_a_network_that_no_host_holds_is_refused_there_ended_there_and_trains_on_four(tmp_path: Path) -> None:
    with pytest.raises(MemoryLackError, match="there is no room for this network, with one sample at a time: p0 lacks "):
        plan(cluster=holding(1), workload=Workload.mlp(*HELD, samples=HELD_SAMPLES))
    with Lab(holding(1), base_memory=base_memory()) as lab:
        assert lab.run([str(JOB), "hold", str(tmp_path)], timeout_s=PATIENCE_S) != 0
        assert list(lab.starved()) == ["h0"]
    assert list(tmp_path.iterdir()) == []
    with Lab(holding(4), base_memory=base_memory()) as lab:
        assert lab.run([str(JOB), "hold", str(tmp_path)], timeout_s=PATIENCE_S) == 0
        assert lab.starved() == {}
    found = [json.loads((tmp_path / f"rank-{rank}.json").read_text()) for rank in range(4)]
    assert sum(each["units"] for each in found) == HELD[1]
    assert all(each["losses"] == found[0]["losses"] for each in found)


def test_a_base_that_is_no_size_is_refused() -> None:
    cluster = Cluster(processors=(Processor(name="p0", speed=1.0, host="h0", memory="64 MiB"),), network=NETWORK)
    with pytest.raises(InputError, match="'much' is not a size"):
        Lab(cluster, base_memory="much")
