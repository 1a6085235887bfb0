"""Ranks that name different roots hear of it, whether gradients are wanted or not."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import CommError, CommTimeoutError, InputError
from tatami.testing.worlds import World

pytestmark = pytest.mark.threads_only
"""Communicators that failed cannot be used again."""

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
        assert text.count("test_functions_roots.py:") == 2


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
def test_the_same_root_is_no_problem(world: World, name: str) -> None:
    def body(comm: AbstractCommunicator) -> list[float]:
        with torch.no_grad():
            return [CALLS[name](comm, root)[0].item() for root in range(comm.size) for _ in range(2)]

    assert world(body) == [[float(root) for root in range(world.size) for _ in range(2)]] * world.size


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
