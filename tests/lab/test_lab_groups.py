"""Control groups of both versions, on folders that look like the kernel's."""

import subprocess
import sys
from pathlib import Path

import pytest

from tatami.errors import LabError
from tatami.lab import groups
from tatami.lab.groups import AbstractGroups, find_groups


@pytest.fixture
def version_1(tmp_path: Path) -> AbstractGroups:
    for controller in ("cpu,cpuacct", "freezer", "memory"):
        (tmp_path / controller).mkdir()
    return find_groups(
        "tatami-1",
        mounts=(
            f"proc /proc proc rw 0 0\ncgroup {tmp_path}/cpu,cpuacct cgroup rw,cpu,cpuacct 0 0\n"
            f"cgroup {tmp_path}/freezer cgroup rw,freezer 0 0\ncgroup {tmp_path}/memory cgroup rw,memory 0 0\n"
            f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"
        ),
    )


@pytest.fixture
def version_2(tmp_path: Path) -> AbstractGroups:
    (tmp_path / "cgroup.controllers").write_text("cpuset cpu io memory\n")
    (tmp_path / "cgroup.subtree_control").write_text("memory\n")
    return find_groups("tatami-1", mounts=f"cgroup2 {tmp_path} cgroup2 rw,nosuid 0 0\n")


def build(ours: AbstractGroups) -> None:
    ours.build_lab()
    ours.build_host("h1", leaves=["free", "0", "1"])
    ours.set_quota("h1", "0", cores=0.45)
    ours.set_quota("h1", "1", cores=0.05)


def test_version_1(version_1: AbstractGroups, tmp_path: Path) -> None:
    build(version_1)
    cpu = tmp_path / "cpu,cpuacct" / "tatami-1"
    assert (cpu / "h1/0/cpu.cfs_period_us").read_text() == "10000"
    assert (cpu / "h1/0/cpu.cfs_quota_us").read_text() == "4500"
    # No quota is below 1 ms: the period grows instead.
    assert (cpu / "h1/1/cpu.cfs_period_us").read_text() == "20000"
    assert (cpu / "h1/1/cpu.cfs_quota_us").read_text() == "1000"
    assert (cpu / "cpu.shares").read_text() == "65536"
    assert (cpu / "h1/cpu.shares").read_text() == "5120"
    assert version_1.files("h1", "1") == [str(cpu / "h1/1/cgroup.procs"), str(tmp_path / "freezer/tatami-1/h1/1/cgroup.procs")]


def test_version_2(version_2: AbstractGroups, tmp_path: Path) -> None:
    build(version_2)
    lab = tmp_path / "tatami-1"
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+cpu"
    assert (lab / "cgroup.subtree_control").read_text() == "+cpu"
    assert (lab / "h1/cgroup.subtree_control").read_text() == "+cpu"
    assert (lab / "h1/0/cpu.max").read_text() == "4500 10000"
    assert (lab / "h1/1/cpu.max").read_text() == "1000 20000"
    assert (lab / "h1/cpu.weight").read_text() == "500"
    assert (lab / "cpu.weight").read_text() == "6400"
    # No process in a group that has groups below it: the kernel forbids it, so all that take any are leaves.
    assert version_2.files("h1", "free") == [str(lab / "h1/free/cgroup.procs")]


def test_killing_version_1_freezes_first(version_1: AbstractGroups, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(groups, "_END_PATIENCE_S", 0.1)
    build(version_1)
    state = tmp_path / "freezer/tatami-1/h1/freezer.state"
    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"]) as process:
        (tmp_path / "cpu,cpuacct/tatami-1/h1/0/cgroup.procs").write_text(f"{process.pid}\n")
        assert version_1.processes("h1") == [process.pid]
        with pytest.raises(LabError, match=rf"processes of host h1 do not die: \[{process.pid}\]"):
            version_1.kill("h1")  # no kernel takes its number out of the file
        assert process.wait(800) == -9
    assert state.read_text() == "THAWED"


def test_killing_version_2_leaves_it_to_the_kernel(version_2: AbstractGroups, tmp_path: Path) -> None:
    build(version_2)
    (tmp_path / "tatami-1/h1/cgroup.kill").touch()
    version_2.kill("h1")
    assert (tmp_path / "tatami-1/h1/cgroup.kill").read_text() == "1"


def test_killing_an_old_version_2_freezes_first(version_2: AbstractGroups, tmp_path: Path) -> None:
    build(version_2)
    version_2.kill("h1")
    assert (tmp_path / "tatami-1/h1/cgroup.freeze").read_text() == "0"


def test_a_version_1_mount_for_the_cpu_wins_over_a_version_2_without(version_1: AbstractGroups) -> None:
    assert [root.parent.name for root in version_1.roots] == ["cpu,cpuacct", "freezer"]


def test_without_cpu_controller() -> None:
    with pytest.raises(LabError, match=r"no control group hierarchy with the cpu controller.*tatami\.testing\.Slowdown"):
        find_groups("tatami-1", mounts="cgroup /sys/fs/cgroup/memory cgroup rw,memory 0 0\n")


def test_groups_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "cpu").write_text("no folder")
    ours = find_groups("tatami-1", mounts=f"cgroup {tmp_path}/cpu cgroup rw,cpu 0 0\n")
    with pytest.raises(LabError, match="cannot make the control group"):
        ours.build_lab()


def test_memory_of_version_1_is_that_of_the_host_and_has_no_swap(version_1: AbstractGroups, tmp_path: Path) -> None:
    build(version_1)
    assert not (tmp_path / "memory/tatami-1").exists()  # a lab without limits does not need it
    group = tmp_path / "memory/tatami-1/h1"
    group.mkdir(parents=True)
    (group / "memory.memsw.limit_in_bytes").touch()
    version_1.limit_memory("h1", limit_bytes=5_000_000)
    assert (group / "memory.limit_in_bytes").read_text() == "5000000"
    assert (group / "memory.memsw.limit_in_bytes").read_text() == "5000000"
    assert version_1.files("h1", "free")[2:] == version_1.files("h1", "0")[2:] == [str(group / "cgroup.procs")]
    version_1.build_host("h2", leaves=["free"])
    assert len(version_1.files("h2", "free")) == 2
    version_1.limit_memory("h2", limit_bytes=6_000_000)
    assert (tmp_path / "memory/tatami-1/h2/memory.swappiness").read_text() == "0"
    assert version_1.num_starved("h1") == 0
    (group / "memory.oom_control").write_text("oom_kill_disable 0\nunder_oom 0\noom_kill 2\n")
    assert version_1.num_starved("h1") == 2


def test_memory_of_version_2(version_2: AbstractGroups, tmp_path: Path) -> None:
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    build(version_2)
    host = tmp_path / "tatami-1/h1"
    (host / "memory.swap.max").touch()
    version_2.limit_memory("h1", limit_bytes=5_000_000)
    assert (tmp_path / "cgroup.subtree_control").read_text() == "+memory"
    assert (tmp_path / "tatami-1/cgroup.subtree_control").read_text() == "+memory"
    assert (host / "memory.max").read_text() == "5000000"
    assert (host / "memory.swap.max").read_text() == "0"
    assert version_2.num_starved("h1") == 0
    (host / "memory.events").write_text("low 0\nhigh 0\nmax 7\noom 1\noom_kill 1\noom_group_kill 0\n")
    assert version_2.num_starved("h1") == 1


def test_memory_without_its_controller_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cgroup.controllers").write_text("cpu\n")
    (tmp_path / "cgroup.subtree_control").write_text("cpu")
    for mounts in (f"cgroup {tmp_path} cgroup rw,cpu 0 0\n", f"cgroup2 {tmp_path} cgroup2 rw 0 0\n"):
        ours = find_groups("tatami-1", mounts=mounts)
        with pytest.raises(LabError, match=r"limit the memory of its hosts.*no memory controller.*leave base_memory out"):
            ours.limit_memory("h1", limit_bytes=1)
        assert ours.num_starved("h1") == 0
