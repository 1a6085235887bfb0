"""How a process was started decides who its peers are."""

import os
import sys
from contextlib import nullcontext

import pytest
import torch

from tatami.comm import AbstractCommunicator, detect, init, run_threads
from tatami.comm.detect import detect_backend, refuse_lone_tasks, threads_asked_for
from tatami.comm.elastic import ElasticCommunicator, set_elastic_world
from tatami.comm.threads import single_communicator
from tatami.errors import InputError, MissingExtraError

LAUNCHED = ("PMI_RANK", "PMIX_RANK", "OMPI_COMM_WORLD_RANK", "MPI_LOCALRANKID", "SLURM_PROCID", "RANK")


@pytest.fixture(autouse=True)
def _started_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if this process had no launcher and had not called init yet; torch's threads stay as they are."""
    for name in (*LAUNCHED, "TATAMI_THREADS", "OMP_NUM_THREADS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(detect, "_worlds", {})


@pytest.mark.parametrize(
    ("environ", "backend"),
    [
        ({}, "single"),
        ({"PMI_RANK": "0", "PMI_SIZE": "4"}, "mpi"),
        ({"OMPI_COMM_WORLD_RANK": "3"}, "mpi"),
        ({"PMIX_RANK": "1"}, "mpi"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, "mpi"),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, "single"),
        ({"RANK": "0"}, "single"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1"}, "tcp"),
        ({"RANK": "1", "WORLD_SIZE": "4", "PMI_RANK": "1"}, "mpi"),
    ],
)
def test_launchers_are_known_by_their_variables(environ: dict[str, str], backend: str) -> None:
    assert detect_backend(environ) == backend


@pytest.mark.parametrize(
    ("environ", "size", "is_refused"),
    [
        ({"SLURM_STEP_NUM_TASKS": "2"}, 1, True),
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_RANK": "0", "PMI_SIZE": "2"}, 1, True),
        ({"SLURM_STEP_NUM_TASKS": "2"}, 2, False),
        ({"SLURM_STEP_NUM_TASKS": "1"}, 1, False),
        ({"SLURM_NTASKS": "2"}, 1, False),  # a batch script without srun
        ({"SLURM_STEP_NUM_TASKS": "2", "PMI_SIZE": "1"}, 1, False),  # mpiexec -n 1
    ],
)
def test_tasks_of_srun_that_mpi_does_not_connect_are_refused(environ: dict[str, str], size: int, *, is_refused: bool) -> None:
    with pytest.raises(InputError, match=r"srun started 2 tasks, .*srun --mpi=pmi2") if is_refused else nullcontext():
        refuse_lone_tasks(environ, size=size)


def test_tcp_outside_of_torchrun_says_what_is_missing() -> None:
    with pytest.raises(InputError, match=r"not a rank of torchrun \(RANK, WORLD_SIZE, .*init_process_group first"):
        init(backend="tcp")


def test_a_script_started_alone_is_one_rank() -> None:
    comm = init(timeout_s=5.0)
    assert (comm.rank, comm.size, comm.local_rank, comm.local_size, comm.timeout_s) == (0, 1, 0, 1, 5.0)
    assert init() is comm
    assert comm.timeout_s == 5.0, "what an earlier call has said stays"


def test_inside_run_threads_init_is_the_rank_of_the_thread() -> None:
    def script(_: AbstractCommunicator) -> int:
        comm = init()
        assert init(backend="threads") is comm
        assert comm.timeout_s == 7.0
        total = torch.tensor([comm.rank])
        comm.allreduce(total)
        return int(total)

    assert run_threads(script, size=3, timeout_s=7.0) == [3, 3, 3]


def test_in_an_elastic_run_init_leaves_its_timeout() -> None:
    world = ElasticCommunicator(single_communicator(timeout_s=9.0), names=("p0",))
    set_elastic_world(world)
    try:
        assert init() is world
        assert world.timeout_s == 9.0
        assert init(timeout_s=3.0).timeout_s == 3.0
    finally:
        set_elastic_world(None)


def test_an_unknown_backend_lists_the_choices() -> None:
    with pytest.raises(InputError, match="there is no backend 'gloo'; choose one of: mpi, tcp, threads, single"):
        init(backend="gloo")


def test_threads_outside_of_run_threads_are_refused() -> None:
    with pytest.raises(InputError, match="this is not a rank of run_threads"):
        init(backend="threads")


def test_without_mpi4py_the_pip_command_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(MissingExtraError, match=r"pip install 'tatami-torch\[mpi\]'"):
        init(backend="mpi")


@pytest.mark.parametrize("text", ["0", "-1", "two", "1.5", ""])
def test_a_wrong_number_of_threads_is_refused(text: str) -> None:
    with pytest.raises(InputError, match=f"TATAMI_THREADS='{text}' is not a number of threads"):
        threads_asked_for({"TATAMI_THREADS": text})


def test_the_number_of_threads_can_be_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    before = torch.get_num_threads()
    monkeypatch.setenv("TATAMI_THREADS", str(before + 1))
    try:
        init()
        assert torch.get_num_threads() == before + 1
    finally:
        torch.set_num_threads(before)


def test_ranks_as_threads_share_the_cores() -> None:
    before = torch.get_num_threads()
    cores = len(os.sched_getaffinity(0))
    assert run_threads(lambda _: torch.get_num_threads(), size=2) == [max(1, cores // 2)] * 2
    assert torch.get_num_threads() == before
