"""Every function on every number of ranks: values, and gradients against one process that holds all ranks' inputs."""

from collections.abc import Callable, Sequence

import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.testing.worlds import World

Inputs = list[torch.Tensor]
"""What each rank begins with."""


def inputs(size: int, *, ragged: bool = False) -> Inputs:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(2 * size, 3 + (rank if ragged else 0), dtype=torch.float64, generator=generator).requires_grad_()
        for rank in range(size)
    ]


def loss_of(outputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Not linear, and another one for each rank and each output."""
    terms = [((rank + 1) * (index + 2) * output).sin().sum() for index, output in enumerate(outputs)]
    return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)


Operation = Callable[[torch.Tensor, AbstractCommunicator], Sequence[torch.Tensor]]
Reference = Callable[[Inputs, int], Sequence[torch.Tensor]]


def cut(x: torch.Tensor, size: int) -> list[torch.Tensor]:
    """Parts of different sizes, one of them empty if there are many."""
    sizes = [x.shape[0] // size] * size
    sizes[0] += x.shape[0] % size
    if size > 2:
        sizes[0], sizes[1] = sizes[0] + sizes[1], 0
    return list(torch.split(x, sizes))


def last(comm: AbstractCommunicator) -> int:
    return comm.size - 1


def on_root(result: object, comm: AbstractCommunicator) -> Sequence[torch.Tensor]:
    return result if comm.rank == last(comm) and isinstance(result, tuple) else []


OPERATIONS: dict[str, tuple[Operation, Reference]] = {
    "bcast": (
        lambda x, comm: [functions.bcast(x if comm.rank == last(comm) else None, comm, root=last(comm))],
        lambda xs, _: [xs[-1]],
    ),
    "gather": (
        lambda x, comm: on_root(functions.gather(x, comm, root=last(comm)), comm),
        lambda xs, rank: xs if rank == len(xs) - 1 else [],
    ),
    "scatter": (
        lambda x, comm: [functions.scatter(cut(x, comm.size) if comm.rank == last(comm) else None, comm, root=last(comm))],
        lambda xs, rank: [cut(xs[-1], len(xs))[rank]],
    ),
    "allgather": (lambda x, comm: functions.allgather(x, comm), lambda xs, _: xs),
    "alltoall": (
        lambda x, comm: functions.alltoall(cut(x, comm.size), comm),
        lambda xs, rank: [cut(x, len(xs))[rank] for x in xs],
    ),
    "allreduce": (lambda x, comm: [functions.allreduce(x, comm)], lambda xs, _: [torch.stack(xs).sum(0)]),
    "reduce": (
        lambda x, comm: on_root((functions.reduce(x, comm, root=last(comm)),), comm),
        lambda xs, rank: [torch.stack(xs).sum(0)] if rank == len(xs) - 1 else [],
    ),
    "reduce_scatter": (
        lambda x, comm: [functions.reduce_scatter(cut(x, comm.size), comm)],
        lambda xs, rank: [cut(torch.stack(xs).sum(0), len(xs))[rank]],
    ),
}
RAGGED = {"bcast", "gather", "scatter", "allgather", "alltoall"}


def expected(reference: Reference, xs: Inputs) -> tuple[list[Sequence[torch.Tensor]], Sequence[torch.Tensor]]:
    """What every rank gets, and the gradient of every input of the sum of all ranks' losses."""
    outputs = [reference([torch.sin(x) for x in xs], rank) for rank in range(len(xs))]
    total = torch.stack([loss_of(each, rank) for rank, each in enumerate(outputs)]).sum()
    grads = torch.autograd.grad(total, xs, allow_unused=True)
    return outputs, [torch.zeros_like(x) if grad is None else grad for x, grad in zip(xs, grads, strict=True)]


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients(world: World, name: str, ragged: bool) -> None:
    if ragged and name not in RAGGED:
        ragged = False
    operation, reference = OPERATIONS[name]

    def body(comm: AbstractCommunicator) -> tuple[list[torch.Tensor], torch.Tensor]:
        x = inputs(comm.size, ragged=ragged)[comm.rank]
        outputs = operation(torch.sin(x), comm)
        functions.backward(loss_of(outputs, comm.rank))
        assert x.grad is not None or name in {"bcast", "scatter"}
        return [output.detach() for output in outputs], torch.zeros_like(x) if x.grad is None else x.grad

    outputs, grads = expected(reference, inputs(world.size, ragged=ragged))
    for rank, (got, grad) in enumerate(world(body)):
        torch.testing.assert_close(got, [each.detach() for each in outputs[rank]], rtol=0, atol=1e-10)
        torch.testing.assert_close(grad, grads[rank], rtol=0, atol=1e-10)


def test_large_sums_take_two_steps(comm: AbstractCommunicator) -> None:
    x = torch.full((4097,), comm.rank + 1.0, dtype=torch.float64, requires_grad=True)
    total = functions.allreduce({"x": x, "n": torch.tensor([comm.rank])}, comm)
    assert total["n"].tolist() == [sum(range(comm.size))]
    assert (total["x"] == comm.size * (comm.size + 1) / 2).all()
    ((comm.rank + 1) * total["x"]).sum().backward()
    assert x.grad is not None
    assert (x.grad == comm.size * (comm.size + 1) / 2).all()


@pytest.mark.ranks(2, 3, 4)
def test_ring(world: World) -> None:
    """ChainerMN's pipeline: a layer on each rank, and back to the first."""

    def layers(size: int) -> list[torch.Tensor]:
        generator = torch.Generator().manual_seed(3)
        return [torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(size)]

    def body(comm: AbstractCommunicator) -> tuple[torch.Tensor | None, torch.Tensor]:
        weight = layers(comm.size)[comm.rank]
        following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
        if comm.rank == 0:
            x = torch.ones(2, 4, dtype=torch.float64)
            functions.send(torch.tanh(x @ weight), comm, dest=following)
            y = functions.recv(comm, source=preceding)
            y.sum().backward()
            assert weight.grad is not None
            return weight.grad, y.detach()
        functions.send(torch.tanh(functions.recv(comm, source=preceding) @ weight), comm, dest=following)
        functions.backward()
        return weight.grad, torch.zeros(())

    weights = layers(world.size)
    y = torch.ones(2, 4, dtype=torch.float64)
    for weight in weights:
        y = torch.tanh(y @ weight)
    y.sum().backward()  # type: ignore[no-untyped-call]
    results = world(body)
    torch.testing.assert_close(results[0][1], y.detach(), rtol=0, atol=1e-10)
    for weight, (grad, _) in zip(weights, results, strict=True):
        torch.testing.assert_close(grad, weight.grad, rtol=0, atol=1e-10)


@pytest.mark.ranks(2, 3, 4)
def test_sendrecv_all_around(world: World) -> None:
    def body(comm: AbstractCommunicator) -> tuple[float, float]:
        x = torch.tensor(float(comm.rank), requires_grad=True)
        y = functions.sendrecv(x, comm, dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)
        ((comm.rank + 1) * y).backward()
        assert x.grad is not None
        return y.item(), x.grad.item()

    size = world.size
    assert world(body) == [((rank - 1) % size, (rank + 1) % size + 1) for rank in range(size)]


@pytest.mark.ranks(2)
def test_structures_travel(world: World) -> None:
    shared = torch.arange(3.0, dtype=torch.float64)
    value = {
        "pair": (shared, [torch.ones(2, 2, dtype=torch.float32), None]),
        3: torch.tensor([1, 2]),
        "mask": torch.tensor([True, False]),
        "half": torch.ones(2, dtype=torch.float16),
        "empty": torch.zeros(0, 5),
        "scalar": torch.tensor(2.5),
        "one": (torch.tensor(1.0),),
        "long": torch.arange(1000.0),
        "complex": torch.tensor([1 + 2j]),
        "turned": torch.arange(6.0).view(2, 3).t(),
    }

    def body(comm: AbstractCommunicator) -> object:
        if comm.rank == 0:
            functions.send(value, comm, dest=1)
            return None
        return functions.recv(comm, source=0)

    got = world(body)[1]
    assert isinstance(got, dict)
    assert list(got) == list(value)
    assert got["pair"][1][1] is None
    torch.testing.assert_close(
        {key: each for key, each in got.items() if key != "pair"}, {key: each for key, each in value.items() if key != "pair"}
    )
    torch.testing.assert_close(got["pair"][1][0], torch.ones(2, 2))
    assert got["half"].dtype == torch.float16


@pytest.mark.ranks(2)
def test_gradients_of_a_structure(world: World) -> None:
    def body(comm: AbstractCommunicator) -> list[torch.Tensor | None]:
        if comm.rank == 0:
            a = torch.ones(2, dtype=torch.float64, requires_grad=True)
            b = torch.ones(300, requires_grad=True)
            unused = torch.ones(3, requires_grad=True)
            functions.send({"a": a, "n": torch.tensor([4]), "rest": (b, unused, torch.ones(2))}, comm, dest=1)
            functions.backward()
            return [a.grad, b.grad, unused.grad]
        got = functions.recv(comm, source=0)
        assert [got["a"].requires_grad, got["n"].requires_grad, got["rest"][2].requires_grad] == [True, False, False]
        ((got["a"] * got["n"]).sum() + (3 * got["rest"][0]).sum()).backward()
        return []

    a, b, unused = world(body)[0]
    torch.testing.assert_close(a, torch.full((2,), 4.0, dtype=torch.float64))
    torch.testing.assert_close(b, torch.full((300,), 3.0))
    torch.testing.assert_close(unused, torch.zeros(3))


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_values", [1, 90, 1000, 1024, 8000, 8192, 200_000])
def test_all_sizes_cross(world: World, num_values: int) -> None:
    """Both send first: nobody waits for the other to receive."""

    def body(comm: AbstractCommunicator) -> float:
        x = torch.full((num_values,), float(comm.rank + 1), requires_grad=True)
        functions.send(x, comm, dest=1 - comm.rank)
        y = functions.recv(comm, source=1 - comm.rank)
        assert (y == 2 - comm.rank).all()
        ((comm.rank + 1) * y).sum().backward()
        assert x.grad is not None
        assert (x.grad == 2 - comm.rank).all()
        return float(x.grad.sum())

    assert world(body) == [2.0 * num_values, 1.0 * num_values]
