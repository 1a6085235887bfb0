"""`tuned_allreduce` and `AllReduce`: what they stage, keep, choose and refuse."""

import pytest
import torch

from tatami.collective import ALGORITHMS
from tatami.comm import AbstractCommunicator, Reduction, run_threads
from tatami.comm.agreement import DEBUG_VARIABLE
from tatami.comm.allreduce import CACHED, AllReduce, AllReduceSpec, release, tuned_allreduce
from tatami.comm.thread_world import ThreadCommunicator
from tatami.errors import ClosedError, CommTimeoutError, InputError, RankDiedError, ScheduleError
from tatami.testing.worlds import World


def test_tensors_of_any_strides_are_reduced_in_place(comm: AbstractCommunicator) -> None:
    tensor = torch.arange(12.0).reshape(3, 4).T[::2]
    assert not tensor.is_contiguous()
    for _ in range(2):
        mine = tensor.clone(memory_format=torch.preserve_format)
        view = torch.zeros(4, 3)[::2].copy_(mine)
        tuned_allreduce(view, comm)
        assert torch.equal(view, comm.size * tensor)
    scalar = torch.tensor(2.5, requires_grad=True)
    tuned_allreduce(scalar, comm, op="mean")
    assert scalar.item() == 2.5


@pytest.mark.ranks(2)
def test_truths_are_reduced_by_or(comm: AbstractCommunicator) -> None:
    for algorithm in ALGORITHMS:
        truths = torch.tensor([False, comm.rank == 0, comm.rank == 1, True])
        tuned_allreduce(truths, comm, algorithm=algorithm)
        assert truths.tolist() == [False, True, True, True], algorithm


@pytest.mark.ranks(2)
def test_the_plan_of_a_size_is_kept_and_the_oldest_goes(comm: AbstractCommunicator) -> None:
    for size in (*range(1, CACHED + 4), 1, 2):
        tensor = torch.ones(size)
        tuned_allreduce(tensor, comm, algorithm="ring")
        assert tensor.tolist() == [2.0] * size


@pytest.mark.ranks(1, 2, 3)
def test_what_is_kept_for_a_communicator_can_be_given_back(comm: AbstractCommunicator) -> None:
    part = comm.split(0)
    assert part is not None
    for _ in range(2):
        tensor = torch.ones(3)
        tuned_allreduce(tensor, part)
        assert tensor.tolist() == [comm.size] * 3
        release(part)
    release(part)
    part.close()


@pytest.mark.ranks(1, 2, 3)
def test_auto_is_one_of_the_algorithms_and_sums(world: World) -> None:
    def body(comm: AbstractCommunicator) -> str:
        with AllReduce(comm, AllReduceSpec(size=1000)) as reduce:
            reduce.buffer.fill_(1.0)
            reduce.run()
            assert reduce.buffer.tolist() == [comm.size] * 1000
            return reduce.algorithm

    chosen = set(world(body))
    assert len(chosen) == 1
    assert chosen <= set(ALGORITHMS)
    if world.size > 1:
        assert chosen == {"shared"}  # one host: by the cost model, too


@pytest.mark.ranks(2)
def test_the_buffer_is_the_window_itself(comm: AbstractCommunicator) -> None:
    with AllReduce(comm, AllReduceSpec(size=100, algorithm="shared")) as reduce:
        before = reduce.buffer.data_ptr()
        reduce.buffer.fill_(1.0)
        reduce.run()
        assert reduce.buffer.data_ptr() == before
        assert reduce.buffer[99] == 2.0


@pytest.mark.ranks(2)
def test_after_close_there_is_nothing_to_run(comm: AbstractCommunicator) -> None:
    reduce = AllReduce(comm, AllReduceSpec(size=10, algorithm="shared"))
    reduce.close()
    reduce.close()
    with pytest.raises(ClosedError, match="closed"):
        reduce.run()


@pytest.mark.ranks(3)
def test_ranks_that_ask_for_different_things_are_named(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match=r"rank 0 has size 10, rank 2 has size 11"):
        AllReduce(comm, AllReduceSpec(size=11 if comm.rank == 2 else 10, algorithm="ring"))
    with pytest.raises(InputError, match=r"rank 0 has dtype torch.float32, rank 1 has dtype torch.float64"):
        AllReduce(comm, AllReduceSpec(size=10, dtype=torch.float64 if comm.rank == 1 else torch.float32, algorithm="ring"))


@pytest.mark.ranks(2)
def test_debug_mode_compares_shapes_at_every_call(comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    tuned_allreduce(torch.ones(6), comm)
    tuned_allreduce(torch.ones(2, 3), comm)
    with pytest.raises(InputError, match=r"rank 0 has shape \(2, 3\), rank 1 has shape \(3, 2\)"):
        tuned_allreduce(torch.ones(2, 3) if comm.rank == 0 else torch.ones(3, 2), comm)


@pytest.mark.ranks(4)
def test_a_grid_that_does_not_fit_is_refused(comm: AbstractCommunicator) -> None:
    with pytest.raises(ScheduleError, match="3 x 2 has 6 places, but there are 4 ranks"):
        AllReduce(comm, AllReduceSpec(size=10, algorithm="torus", grid=(3, 2)))


@pytest.mark.ranks(2)
def test_what_cannot_be_is_refused(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match="no all-reduce 'fastest'; choose one of: auto, native"):
        AllReduce(comm, AllReduceSpec(size=10, algorithm="fastest"))
    with pytest.raises(InputError, match="no reduction 'product'; choose one of 'sum', 'mean', 'max', 'min'"):
        AllReduce(comm, AllReduceSpec(size=10, op="product"))  # type: ignore[arg-type]
    with pytest.raises(InputError, match="no sync 'wait'"):
        tuned_allreduce(torch.ones(3), comm, sync="wait")
    with pytest.raises(InputError, match="mean of int64"):
        AllReduce(comm, AllReduceSpec(size=10, dtype=torch.int64, op=Reduction.MEAN))
    with pytest.raises(InputError, match="complex64"):
        AllReduce(comm, AllReduceSpec(size=10, dtype=torch.complex64))
    with pytest.raises(InputError, match="0 or more elements, not -1"):
        AllReduce(comm, AllReduceSpec(size=-1))
    with pytest.raises(InputError, match="int64 cannot travel as float16"):
        AllReduce(comm, AllReduceSpec(size=10, dtype=torch.int64, wire=torch.float16))
    with pytest.raises(InputError, match="does not accumulate"):
        AllReduce(comm, AllReduceSpec(size=10, algorithm="accumulate", wire=torch.bfloat16))
    with pytest.raises(ScheduleError, match="does not sum in a fixed order"):
        AllReduce(comm, AllReduceSpec(size=10, algorithm="native", fixed_order=True))
    with pytest.raises(ScheduleError, match="shared needs all ranks on one host"):
        AllReduce(comm, AllReduceSpec(size=10, algorithm="shared"), hosts=("a", "b"))


class WithoutWindows(ThreadCommunicator):
    """As a backend that has none."""

    has_windows = AbstractCommunicator.has_windows
    window = AbstractCommunicator.window
    shared_window = AbstractCommunicator.shared_window


def test_a_backend_without_windows_says_who_has_them() -> None:
    def body(comm: ThreadCommunicator) -> str:
        comm.__class__ = WithoutWindows
        comm.split = lambda color, *, key=0: comm  # type: ignore[method-assign]  # noqa: ARG005
        with pytest.raises(InputError, match="no one-sided communication; the MPI backend has"):
            AllReduce(comm, AllReduceSpec(size=10, algorithm="torus_put"))
        return AllReduce(comm, AllReduceSpec(size=10)).algorithm

    assert run_threads(body, size=2)[0] not in ("shared", "torus_put", "accumulate", "torus_accumulate", "hierarchical")


@pytest.mark.parametrize("algorithm", ["ring", "shared", "accumulate", "native"])
def test_a_rank_that_dies_in_mid_reduce_is_named(algorithm: str) -> None:
    def body(comm: AbstractCommunicator) -> None:
        reduce = AllReduce(comm, AllReduceSpec(size=10, algorithm=algorithm))
        if comm.rank == 1:
            raise ArithmeticError("out of sums")
        with pytest.raises(RankDiedError, match=r"rank 1.* died: ArithmeticError: out of sums"):
            reduce.run()

    with pytest.raises(ArithmeticError):
        run_threads(body, size=3)


@pytest.mark.parametrize("algorithm", ["ring", "shared", "torus_put"])
@pytest.mark.ranks(2)
def test_a_rank_that_does_not_come_ends_the_wait(comm: AbstractCommunicator, algorithm: str) -> None:
    impatient = comm.split(0)
    assert impatient is not None
    impatient.timeout_s = 5.0  # the windows are made within it, too
    reduce = AllReduce(impatient, AllReduceSpec(size=10, algorithm=algorithm))
    if comm.rank == 0:
        with pytest.raises(CommTimeoutError, match=r"timed out after [\d.]+ s: .*rank 1"):
            reduce.run()
    comm.barrier()
