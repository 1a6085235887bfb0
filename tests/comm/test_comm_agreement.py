"""Agreement between ranks: what one rank finds wrong, all ranks raise, with the same words."""

from typing import Any

import pytest

from tatami.comm.agreement import all_or_none, decided_on_root, problems_of, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import (
    CheckpointError,
    CommError,
    InputError,
    MissingExtraError,
    NotFiniteError,
    OutputExistsError,
    PlanError,
    TrainingError,
)
from tatami.testing.worlds import World


def test_the_same_facts_pass_and_cost_a_single_rank_nothing(comm: AbstractCommunicator) -> None:
    same_everywhere(comm, {"size": 3, "shape": (2, 3), "layout": None}, where="here")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("theirs", "told"),
    [
        ({"a": 1, "b": 3}, "rank 0 has b 2, rank {last} has b 3"),
        ({"a": 1}, "rank 0 has b 2, rank {last} has nothing more"),
        ({"a": 1, "b": 2, "c": 0}, "rank 0 has nothing more, rank {last} has c 0"),
        ({"b": 2, "a": 1}, "rank 0 has a 1, rank {last} has b 2"),
    ],
)
def test_the_first_rank_and_the_first_fact_that_differ_are_named_on_all_ranks(
    comm: AbstractCommunicator, theirs: dict[str, int], told: str
) -> None:
    last = comm.size - 1
    with pytest.raises(PlanError) as caught:
        same_everywhere(comm, theirs if comm.rank == last else {"a": 1, "b": 2}, where="the test", error=PlanError)
    assert str(caught.value) == f"the test: {told.format(last=last)}; all ranks must have the same"


@pytest.mark.parametrize("root", [0, -1])
def test_the_root_decides_alone_for_all(world: World, root: int) -> None:
    def body(comm: AbstractCommunicator) -> tuple[list[int], bool]:
        called = []

        def decide() -> list[int]:
            called.append(comm.rank)
            return [7, comm.rank]

        return decided_on_root(comm, decide, root=root % comm.size), bool(called)

    root_rank = root % world.size
    assert world(body) == [([7, root_rank], rank == root_rank) for rank in range(world.size)]


@pytest.mark.parametrize(
    ("error", "elsewhere"),
    [
        (OutputExistsError("x is there"), OutputExistsError),
        (NotFiniteError("the loss", rank=1, iteration=2), NotFiniteError),  # its constructor needs more than the message
        (MissingExtraError("Ray", extra="server"), MissingExtraError),
        (KeyError("accuracy"), TrainingError),
        (OSError(28, "No space left"), OSError),
    ],
)
def test_what_the_root_refuses_all_ranks_refuse(
    comm: AbstractCommunicator, error: Exception, elsewhere: type[Exception]
) -> None:
    def refuse() -> None:
        raise error

    with pytest.raises(type(error) if comm.rank == 0 else elsewhere) as caught:
        decided_on_root(comm, refuse)
    wanted = "KeyError: 'accuracy'" if isinstance(error, KeyError) else str(error)
    assert wanted in str(caught.value) or comm.rank == 0
    comm.barrier()


def test_all_or_none(comm: AbstractCommunicator) -> None:
    assert all_or_none(comm, lambda: comm.rank * 10, what="it failed") == comm.rank * 10

    def sometimes(failing: set[int], error: Exception) -> Any:
        if comm.rank in failing:
            raise error
        return "done"

    last = comm.size - 1
    with pytest.raises(TrainingError) as caught:
        all_or_none(comm, lambda: sometimes({last}, ValueError("odd")), what="the step failed")
    assert str(caught.value) == f"the step failed on rank {last} of {comm.size}: ValueError: odd"
    assert (caught.value.__cause__ is not None) == (comm.rank == last)
    with pytest.raises(CheckpointError) as several:
        all_or_none(comm, lambda: sometimes({0, last}, InputError("too long")), what="it was not kept", error=CheckpointError)
    lines = [f"on rank {rank} of {comm.size}: too long" for rank in sorted({0, last})]
    assert str(several.value) == "it was not kept " + "\n  ".join(lines)


def test_an_error_of_communication_is_raised_where_it_is_and_not_told(comm: AbstractCommunicator) -> None:
    """The others could not be told; here no rank calls another one."""

    def fail() -> None:
        raise CommError("the link is cut")

    with pytest.raises(CommError, match="the link is cut"):
        all_or_none(comm, fail, what="it failed")
    if comm.rank == 0:
        with pytest.raises(CommError, match="the link is cut"):
            decided_on_root(comm, fail)


def test_problems_by_rank(world: World) -> None:
    def body(comm: AbstractCommunicator) -> dict[int, int]:
        return problems_of(comm, comm.rank if comm.rank % 2 else None)

    assert world(body) == [{rank: rank for rank in range(1, world.size, 2)}] * world.size
