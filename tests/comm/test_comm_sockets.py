"""Ranks of one machine talk over its loopback: no socket of a local run can be reached from another machine."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from sockets import exposed, family_of

from tatami.comm import launch, run_threads
from tatami.comm.launch import find_launcher

SCRIPT = Path(__file__).with_name("sockets.py")

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc/net")


def test_a_socket_that_listens_beyond_the_loopback_is_found() -> None:
    before = set(exposed([os.getpid()]))
    with socket.create_server(("0.0.0.0", 0)), socket.create_server(("::", 0), family=socket.AF_INET6):
        found = set(exposed(family_of(os.getpid()))) - before
        assert sorted(line.split(": ")[1].rpartition(":")[0] for line in found) == ["tcp 0.0.0.0", "tcp6 ::"]
    with socket.create_server(("127.0.0.1", 0)), socket.create_server(("::1", 0), family=socket.AF_INET6):
        assert set(exposed([os.getpid()])) == before


@pytest.mark.parametrize("ranks", [1, 3])
def test_a_run_of_mpi_ranks(tmp_path: Path, ranks: int) -> None:
    pytest.importorskip("mpi4py")
    if find_launcher().family != "mpich":
        pytest.skip("another launcher than MPICH's opens ports of its own, as the tutorial says")
    before = sorted(exposed([os.getpid()]))
    assert launch.run([str(SCRIPT), str(tmp_path / "found"), str(os.getpid())], ranks=ranks) == 0
    assert json.loads((tmp_path / "found").read_text()) == {"exposed": before, "ranks": ranks}


def test_ranks_of_torchrun(tmp_path: Path) -> None:
    """Of the ranks; torchrun's own store listens on all interfaces, for which it has no switch."""
    words = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(SCRIPT)]
    ended = subprocess.run([*words, str(tmp_path / "found"), "ranks"], capture_output=True, text=True, check=False, timeout=800)
    assert ended.returncode == 0, ended.stderr
    assert json.loads((tmp_path / "found").read_text()) == {"exposed": [], "ranks": 2}


def test_ranks_that_are_threads() -> None:
    before = exposed([os.getpid()])
    assert run_threads(lambda comm: comm.allgather_object(exposed([os.getpid()])), size=3) == [[before] * 3] * 3


def test_gloo_as_the_benchmarks_start_it(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py")
    if find_launcher().family != "mpich":
        pytest.skip("another launcher than MPICH's opens ports of its own, as the tutorial says")
    (tmp_path / "rank.py").write_text(
        f"import json, os, sys\nsys.path.insert(0, {str(SCRIPT.parent)!r})\n"
        "import tatami, torch\nfrom sockets import exposed\nfrom tatami.bench.interleaved import start_gloo\n"
        "comm = tatami.init()\nstart_gloo(comm)\ntorch.distributed.all_reduce(torch.ones(4))\n"
        "open(f'{sys.argv[1]}/{comm.rank}.json', 'w').write(json.dumps(exposed([os.getpid()])))\n"
        "torch.distributed.destroy_process_group()\n"
    )
    assert launch.run([str(tmp_path / "rank.py"), str(tmp_path)], ranks=2) == 0
    assert [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)] == [[], []]
