"""What one rank refuses ends the waits of all, with the same error, on threads and on ranks that are processes."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from drawing import mlp
from tatami.comm import AbstractCommunicator, fail_together, run
from tatami.comm.agreement import all_or_none, decided_on_root, problems_of, same_everywhere
from tatami.comm.refusals import LONGEST_TEXT, Refusals
from tatami.errors import (
    CheckpointError,
    CommError,
    InputError,
    MissingExtraError,
    ModelError,
    NotFiniteError,
    OutputExistsError,
    PlanError,
    TrainingError,
)
from tatami.parallel import DataParallel, MultiNodeOptimizer
from tatami.testing.worlds import World
from tatami.train import Trainer, tile
from tiled_rig import simple_layout

X, Y = torch.ones(12, 6, dtype=torch.float64), torch.zeros(12, 3, dtype=torch.float64)


def fail_or_wait(comm: AbstractCommunicator, error: Exception, *, on: AbstractCommunicator | None = None) -> None:
    """Rank 1 fails; the others wait, which ends only by what it tells. Nothing is left of the wait."""
    with fail_together(comm):
        if comm.rank == 1:
            raise error
        (on or comm).recv(torch.empty(1), 1, tag=9)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("kind", "text", "expected", "sentence"),
    [
        (ModelError, "no such layer", ModelError, "^no such layer$"),
        (ValueError, "a bad sample", TrainingError, "^rank 1: ValueError: a bad sample$"),
        (InputError, "long " * LONGEST_TEXT, InputError, r"^long long .*\.\.\."),
    ],
)
def test_an_error_of_one_rank_ends_the_waits_of_all(
    comm: AbstractCommunicator, kind: type[Exception], text: str, expected: type[Exception], sentence: str
) -> None:
    """Also on parts of the communicator; it goes on afterwards, and failures of all ranks end no wait."""
    part = comm.duplicate()
    for on in (comm, part):
        is_own = comm.rank == 1
        with pytest.raises(kind if is_own else expected, match=None if is_own else sentence):
            fail_or_wait(comm, kind(text), on=on)
        for _ in range(3):
            with pytest.raises(InputError, match="all"), fail_together(comm):
                raise InputError("all ranks")
    assert comm.allgather_object(comm.rank) == list(range(comm.size))


def test_the_nth_failure_of_a_rank_ends_waits_for_it_of_those_that_failed_less_often() -> None:
    told: list[bytes] = []
    one, other, third = (Refusals(told.append, rank=rank, grace_s=1.0) for rank in range(3))
    one.note(InputError("first"), "/1.0")
    one.note(InputError("second"), "/1.0")
    other.note(ModelError("own"), "/1.0")
    for message in told[:2]:
        other.receive(message)
    for lineage, needs in (("/1", [0]), ("/1.01", [0]), ("/1.0", [2]), ("/1.0", None)):
        other.check(lineage, needs, now_s=10.0)  # of other communicators and ranks, or still under way
    with pytest.raises(InputError, match="second"):
        other.check("/1.0/2.0", [0, 2], now_s=11.0)
    other.check("/1.0", None, now_s=99.0)
    for message in told:
        third.receive(message)
    third.check("/1.0", [1], now_s=0.0)
    with pytest.raises(InputError, match="first"):  # of rank 1 as of rank 0, which told it first
        third.check("/1.0", [1], now_s=1.0)


# -- where Tatami tells by itself ------------------------------------------------------------------------------------------
network = partial(mlp, 6, 8, 3)


def tiled(comm: AbstractCommunicator, *replicas: list[int]) -> Any:
    layout = simple_layout(*replicas)
    return tile(network(), comm, batch_size=12, sample=X, layout=layout, speeds="equal", reduction="mean", quiet=True)


def data(comm: AbstractCommunicator) -> Any:
    return tiled(comm, *([rank] for rank in range(comm.size)))


def split(comm: AbstractCommunicator) -> Any:
    return tiled(comm, list(range(comm.size)))


def parallel(comm: AbstractCommunicator) -> Any:
    return DataParallel(network(), comm)


def step(model: Any, *, given: Any = None, samples: int = 12, loss: Callable[[Any, Any], Any] = F.mse_loss) -> None:
    x, y = model.local(X, Y)
    loss(model(given or x[:samples]), y[:samples]).backward()


def fit(model: Any, *, is_bad: bool = False) -> None:
    def training_step(model: Any, batch: Any) -> Any:
        if is_bad:
            raise ValueError("a bad sample")
        return F.mse_loss(model(batch[0]), batch[1])

    trainer = Trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), training_step=training_step, reduction="mean")
    trainer.fit((X, Y), batch_size=12, iterations=2)


def average(model: Any, **options: Any) -> None:
    MultiNodeOptimizer(torch.optim.SGD(model.module.parameters(), lr=0.1), model._comm).step(**options)


CASES: dict[str, tuple[Any, Callable[..., None], dict[str, Any], str]] = {
    "forward of data": (data, step, {"samples": 1}, "the input has 1 samples, but"),
    "forward of shared units": (split, step, {"samples": 1}, "the input has 1 samples, but"),
    "backward": (data, step, {"loss": lambda *given: F.mse_loss(*given).sqrt()}, "the loss takes Sqrt"),
    "training step": (data, fit, {"is_bad": True}, "a bad sample"),
    "DataParallel": (parallel, step, {"given": "no tensor"}, "none of the arguments is a tensor"),
    "MultiNodeOptimizer": (parallel, average, {"num_samples": 3}, "weighted=False, but num_samples=3"),
}


def said(comm: AbstractCommunicator, name: str) -> str:
    """The error of this rank, where rank 1 does something wrong."""
    make, act, wrong, _ = CASES[name]
    model = make(comm)
    try:
        act(model, **wrong if comm.rank == 1 else {})
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "nothing"


@pytest.mark.ranks(2, 3)
@pytest.mark.threads_only  # transfers are left unfinished; below, as processes
@pytest.mark.parametrize("name", CASES)
def test_all_ranks_end_with_the_sentence_of_the_one_that_refuses(world: World, name: str) -> None:
    found = world(partial(said, name=name))
    assert all(CASES[name][3] in each and "TimeoutError" not in each for each in found), found


def test_all_processes_end_with_the_sentence(tmp_path: Path) -> None:
    pytest.importorskip("mpi4py", reason="needs the extra 'mpi'")
    if any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK")):
        pytest.skip("inside mpiexec no other mpiexec can be started")
    script, here = tmp_path / "script.py", Path(__file__).parent
    script.write_text(
        f"""
import json, sys, tatami
sys.path[:0] = {[str(here), str(here.parent)]}
from test_comm_refusals import CASES, said
comm = tatami.init()
found = comm.allgather_object({{name: said(comm, name) for name in CASES}})
open(__file__ + ".json", "w").write(json.dumps(found)) if comm.rank == 0 else None
comm.barrier()
""",
        encoding="utf-8",
    )
    run([str(script)], ranks=3)
    for rank in json.loads(Path(f"{script}.json").read_text(encoding="utf-8")):
        for name, sentence in rank.items():
            assert CASES[name][3] in sentence
            assert "TimeoutError" not in sentence


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
    assert str(several.value) == "it was not kept " + ("on every rank: too long" if comm.size == 2 else "\n  ".join(lines))
    assert several.value.__cause__ is None


def test_an_error_of_communication_is_raised_where_it_is_and_not_told(comm: AbstractCommunicator) -> None:
    """The others could not be told; here no rank calls another one."""

    def fail() -> None:
        raise CommError("the link is cut")

    with pytest.raises(CommError, match="the link is cut"):
        all_or_none(comm, fail, what="it failed")
    if comm.rank == 0:
        with pytest.raises(CommError, match="the link is cut"):
            decided_on_root(comm, fail)


def test_problems_by_rank(comm: AbstractCommunicator) -> None:
    assert problems_of(comm, comm.rank if comm.rank % 2 else None) == {rank: rank for rank in range(1, comm.size, 2)}
