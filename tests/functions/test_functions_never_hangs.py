"""Ranks that disagree: an error on every rank, within the timeout, that names both sides and their lines."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch

from tatami import functions
from tatami.clock import Clock
from tatami.comm import AbstractCommunicator
from tatami.errors import CommError, CommTimeoutError, InputError, RankDiedError
from tatami.functions.channel import Channel
from tatami.functions.outbox import MANY_UNSENT
from tatami.testing.worlds import World

TIMEOUT_S = 1.5
pytestmark = pytest.mark.threads_only
"""Under MPI see `test_functions_mpi_faults.py`: communicators that failed cannot be used again."""


def x_of(rank: int) -> torch.Tensor:
    return torch.full((2,), float(rank), requires_grad=True)


class InStep:
    """Clocks of ranks that all wait: by a hundredth of a second at each look, and none ahead of the others by more.

    So no wait ends before those of the other ranks are as long, and told of, however late a rank begins.
    """

    def __init__(self, ranks: int) -> None:
        self._lock = threading.Lock()
        self._shown_s = [0.0] * ranks

    def look(self, rank: int) -> float:
        """What the clock of a rank shows now."""
        with self._lock:
            behind_s = min(self._shown_s)
            self._shown_s[rank] = behind_s + 0.01
            return behind_s

    def of(self, rank: int) -> Clock:
        """The clock of a rank."""
        return _ClockInStep(all_ranks=self, rank=rank)


@dataclass(frozen=True, kw_only=True)
class _ClockInStep:
    all_ranks: InStep
    rank: int

    def now_s(self) -> float:
        return self.all_ranks.look(self.rank)

    def sleep(self, duration_s: float) -> None:
        time.sleep(duration_s)


def errors_of(world: World, body: Callable[[AbstractCommunicator], object], *, timeout_s: float | None = None) -> list[str]:
    """What each rank raised; `''` for nothing. No rank ends before all have raised, so that none is taken for dead.

    Where `timeout_s` is not given, an error that only a timeout could bring comes too late.
    """
    clocks = InStep(world.size)

    def guarded(comm: AbstractCommunicator) -> str:
        hasty, problem = comm.duplicate(), ""
        if timeout_s is not None:
            hasty.timeout_s = timeout_s
            hasty.attached(Channel, lambda each: Channel(each, clock=clocks.of(each.rank)))
        comm.barrier()
        try:
            body(hasty)
        except RankDiedError:
            raise
        except CommTimeoutError as error:
            if timeout_s is None:
                raise
            problem = str(error)
        except CommError as error:
            problem = str(error)
        comm.barrier()
        return problem

    return world(guarded)


@pytest.mark.ranks(2, 3)
def test_missing_send(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        functions.recv(comm, source=(comm.rank + 1) % comm.size, tag=7)

    for error in errors_of(world, body, timeout_s=TIMEOUT_S):
        for rank in range(world.size):
            assert f"rank {rank} waits for rank {(rank + 1) % world.size} in recv (forward, tag 7, message 0)" in error
        assert "test_functions_never_hangs.py:" in error


@pytest.mark.ranks(3)
def test_missing_recv_is_found_in_backward(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 0:
            functions.send(x_of(0), comm, dest=1)
            functions.backward()
        else:
            functions.allreduce(x_of(1), comm)

    for error in errors_of(world, body, timeout_s=TIMEOUT_S):
        assert "rank 0 waits for rank 1 in the backward pass of send" in error
        assert "rank 2 waits for rank 0 in allreduce (forward, collective 0, root 0)" in error


@pytest.mark.ranks(2)
def test_extra_send(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        for _ in range(3):
            if comm.rank == 0:
                functions.send(x_of(0), comm, dest=1)
                functions.send(x_of(0), comm, dest=1)
                functions.backward()
            else:
                functions.recv(comm, source=0).sum().backward()

    first, second = errors_of(world, body)
    assert "a message was sent that was not received before backward" in second
    assert f"rank 1 found: {second}" == first


@pytest.mark.ranks(2)
def test_backward_forgotten(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        for _ in range(2):
            if comm.rank == 0:
                functions.send(x_of(0), comm, dest=1)
            else:
                functions.recv(comm, source=0).sum().backward()

    assert "rank 1 has begun another forward pass since their last message and rank 0 has not" in errors_of(world, body)[1]


@pytest.mark.ranks(2, 3)
def test_different_collectives(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 0:
            functions.allgather(x_of(0), comm)
        else:
            functions.alltoall([x_of(1)] * comm.size, comm)

    for error in errors_of(world, body):
        assert "allgather" in error
        assert "alltoall" in error
        assert error.count("test_functions_never_hangs.py:") == 2


@pytest.mark.ranks(2)
def test_different_roots(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        functions.gather(x_of(comm.rank), comm, root=comm.rank)

    for error in errors_of(world, body, timeout_s=TIMEOUT_S):
        assert "gather (forward, collective 0, root 0)" in error
        assert "gather (forward, collective 0, root 1)" in error


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("debugging", [False, True])
def test_different_shapes(world: World, debugging: bool) -> None:
    def body(comm: AbstractCommunicator) -> None:
        functions.allreduce(torch.ones(3 if comm.rank else 2, requires_grad=True), comm)

    with functions.debug(debugging):
        for error in errors_of(world, body):
            assert "float32 (2,)" in error
            assert "float32 (3,)" in error


def float_of(*shape: int) -> torch.Tensor:
    return torch.ones(shape, requires_grad=True)


MISMATCHES: dict[str, tuple[Callable[[AbstractCommunicator], object], tuple[str, str]]] = {
    "allreduce, dtypes": (
        lambda comm: functions.allreduce(float_of(2).double() if comm.rank else float_of(2), comm),
        ("float32 (2,)", "float64 (2,)"),
    ),
    "allreduce, large, shapes": (
        lambda comm: functions.allreduce(float_of(5000 + comm.rank), comm),
        ("float32 (5000,)", "float32 (5001,)"),
    ),
    "allreduce, structures": (
        lambda comm: functions.allreduce([float_of(2)] if comm.rank else (float_of(2),), comm),
        ("[float32 (2,)]", "(float32 (2,),)"),
    ),
    "reduce, shapes": (lambda comm: functions.reduce(float_of(2 + comm.rank), comm), ("float32 (2,)", "float32 (3,)")),
    "reduce_scatter, shapes": (
        lambda comm: functions.reduce_scatter([float_of(2 + comm.rank)] * comm.size, comm),
        ("float32 (2,)", "float32 (3,)"),
    ),
    "gather, structures": (
        lambda comm: functions.gather({"b": float_of(1)} if comm.rank else {"a": float_of(1)}, comm),
        ("{'a': float32 (1,)}", "{'b': float32 (1,)}"),
    ),
    "allgather, structures": (
        lambda comm: functions.allgather((x_of(0), x_of(1)) if comm.rank else {"a": x_of(0)}, comm),
        ("{'a': float32 (2,)}", "(float32 (2,), float32 (2,))"),
    ),
    "alltoall, structures": (
        lambda comm: functions.alltoall([None if comm.rank else float_of(1)] * comm.size, comm),
        ("None", "float32 (1,)"),
    ),
}


@pytest.mark.ranks(2)
@pytest.mark.parametrize("case", MISMATCHES)
def test_what_does_not_fit_is_named_on_both_sides(world: World, case: str) -> None:
    body, sides = MISMATCHES[case]
    name = case.split(",")[0]
    found = errors_of(world, body)
    assert any(found)
    for error in found:
        if error:
            assert f"{name}: rank " in error
            assert "give different" in error
            assert error.count("test_functions_never_hangs.py:") == 2
            for side in sides:
                assert side in error


@pytest.mark.ranks(2)
def test_debug_mode_compares_before_data_moves(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        functions.gather(torch.ones(2, dtype=torch.float64 if comm.rank else torch.float32), comm)

    with functions.debug():
        for error in errors_of(world, body):
            assert "float32" in error
            assert "float64" in error
    assert errors_of(world, body) == ["", ""]


@pytest.mark.ranks(2, 3)
def test_debug_mode_changes_nothing_else(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        x = x_of(comm.rank)
        parts = functions.allgather(functions.allreduce(functions.bcast(x if comm.rank == 0 else None, comm), comm), comm)
        torch.stack(functions.alltoall(parts, comm)).sum().backward()  # type: ignore[no-untyped-call]
        assert x.grad is None or x.grad.tolist() == [comm.size**3] * 2

    with functions.debug():
        world(body)


@pytest.mark.ranks(3)
def test_a_rank_that_raises_ends_the_others(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        if comm.rank == 1:
            raise ValueError("a fault of the model")
        with pytest.raises(RankDiedError, match="a fault of the model"):
            functions.allreduce(x_of(comm.rank), comm)

    with pytest.raises(ValueError, match="a fault of the model"):
        world(body)


@pytest.mark.ranks(2)
def test_a_rank_that_ended(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        functions.send(x_of(0), comm, dest=1)
        with pytest.raises(RankDiedError, match="rank 1 ended without taking part"):
            functions.backward()


@pytest.mark.ranks(2)
def test_after_a_failure_every_operation_says_it_again(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        hasty = comm.duplicate()
        hasty.timeout_s = TIMEOUT_S
        with pytest.raises(CommTimeoutError, match="timed out after"):
            functions.recv(hasty, source=1)
        with pytest.raises(CommError, match="timed out after"):
            functions.recv(hasty, source=1)
    else:
        comm.duplicate()
    comm.barrier()


@pytest.mark.ranks(2)
def test_a_tensor_changed_before_it_left(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = torch.zeros(100_000)
        functions.send(x, comm, dest=1)
        x += 1
        comm.barrier()
        comm.barrier()  # it has left
        with pytest.raises(ValueError, match="changed in place before it had left rank 0"):  # noqa: PT012
            for _ in range(MANY_UNSENT + 1):
                functions.send(torch.ones(1), comm, dest=1)
    else:
        comm.barrier()
        functions.recv(comm, source=0)
        comm.barrier()
    comm.barrier()


@pytest.mark.ranks(2)
def test_torchs_own_grad_is_refused_where_it_loses_gradients(comm: AbstractCommunicator) -> None:
    x = x_of(comm.rank)
    y = functions.sendrecv(x, comm, dest=1 - comm.rank, source=1 - comm.rank)
    functions.send(y, comm, dest=1 - comm.rank)
    functions.recv(comm, source=1 - comm.rank)
    with pytest.raises(CommError, match=r"use tatami\.functions\.backward\(loss\) or tatami\.functions\.grad"):
        torch.autograd.grad(y.sum(), x)


CALLS: dict[str, Callable[[AbstractCommunicator, int], Any]] = {
    "bcast": lambda comm, root: functions.bcast(torch.full((2,), float(comm.rank)), comm, root=root),
    "scatter": lambda comm, root: functions.scatter([torch.full((2,), float(comm.rank))] * comm.size, comm, root=root),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("with_grad", [False, True])
@pytest.mark.parametrize("roots", ["each its own", "each the next", "the last one another"])
@pytest.mark.parametrize("name", CALLS)
def test_different_roots_are_found_in_the_call_itself(world: World, name: str, roots: str, with_grad: bool) -> None:
    def body(comm: AbstractCommunicator) -> str:
        last = comm.size - 1
        root = {"each its own": comm.rank, "each the next": (comm.rank + 1) % comm.size}.get(roots, int(comm.rank == last))
        problem = ""
        try:
            with torch.set_grad_enabled(with_grad):
                CALLS[name](comm, root)
        except CommTimeoutError:
            raise
        except CommError as error:
            problem = str(error)
        comm.barrier()  # no rank ends before all know
        return problem

    told = [text for text in world(body) if text]
    assert told
    if roots == "each its own":
        assert len(told) == world.size
    for text in told:
        assert f"{name}: rank " in text
        assert "name different roots: " in text
        assert text.count("test_functions_never_hangs.py:") == 2


@pytest.mark.ranks(2)
@pytest.mark.parametrize("with_grad", [False, True])
def test_different_roots_of_a_gather_are_found_at_the_next_message(world: World, with_grad: bool) -> None:
    """Each rank gives to the other and waits for nothing."""

    def body(comm: AbstractCommunicator) -> str:
        with torch.set_grad_enabled(with_grad), pytest.raises(CommError) as told:  # noqa: PT012
            functions.gather(torch.ones(1, requires_grad=True), comm, root=1 - comm.rank)
            functions.allgather(torch.ones(1), comm)
        comm.barrier()
        return str(told.value)

    assert any("gather: rank " in text and "name different roots: " in text for text in world(body))


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", CALLS)
def test_the_same_root_is_no_problem(comm: AbstractCommunicator, name: str) -> None:
    with torch.no_grad():
        for root in range(comm.size):
            assert [CALLS[name](comm, root)[0].item() for _ in range(2)] == [float(root)] * 2


OF_COMMUNICATORS: dict[str, Callable[[AbstractCommunicator, int], object]] = {
    "bcast": lambda comm, root: comm.bcast(torch.full((2,), float(comm.rank)), root=root),
    "bcast_object": lambda comm, root: comm.bcast_object(comm.rank, root=root),
    "gather": lambda comm, root: comm.gather(torch.ones(1), torch.ones(comm.size), root=root),
    "scatter": lambda comm, root: comm.scatter(torch.ones(comm.size), torch.ones(1), root=root),
    "reduce": lambda comm, root: comm.reduce(torch.ones(1), root=root),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OF_COMMUNICATORS)
def test_debug_mode_compares_the_roots_of_a_communicators_collectives(world: World, name: str) -> None:
    def body(comm: AbstractCommunicator) -> None:
        OF_COMMUNICATORS[name](comm, comm.size - 1)
        with pytest.raises(InputError, match=r": rank 0 has root 0, rank 1 has root 1; all ranks must have the same"):
            OF_COMMUNICATORS[name](comm, comm.rank)

    with functions.debug():
        world(body)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", OF_COMMUNICATORS)
def test_threads_compare_roots_always(world: World, name: str) -> None:
    operation = name.removesuffix("_object")
    with pytest.raises(CommError, match=rf"calls {operation} with root \d where another rank calls {operation} with root \d"):
        world(lambda comm: OF_COMMUNICATORS[name](comm, comm.rank))
