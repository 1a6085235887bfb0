"""Every function on every number of ranks: values, and gradients against one process that holds all ranks' inputs."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from operations import OPERATIONS, RAGGED, cut

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import CommError

DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def inputs(size: int, *, ragged: bool) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randn(2 * size, 3 + (rank if ragged else 0), dtype=torch.float64, generator=generator).requires_grad_()
        for rank in range(size)
    ]


def loss_of(outputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
    """Not linear, and another one for each rank and each output."""
    terms = [((rank + 1) * (index + 2) * output).sin().sum() for index, output in enumerate(outputs)]
    return torch.stack(terms).sum() if terms else torch.zeros((), dtype=torch.float64)


@pytest.mark.parametrize("ragged", [False, True], ids=["equal", "ragged"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients(comm: AbstractCommunicator, name: str, ragged: bool) -> None:
    """Gradients are those of the sum of all ranks' losses."""
    (call, expected), size, root = OPERATIONS[name], comm.size, comm.size - 1
    xs = inputs(size, ragged=ragged and name in RAGGED)
    wanted = [expected([torch.sin(x) for x in xs], rank, root, cut) for rank in range(size)]
    total = torch.stack([loss_of(each, rank) for rank, each in enumerate(wanted)]).sum()
    grads = torch.autograd.grad(total, xs, allow_unused=True)
    x = xs[comm.rank].detach().clone().requires_grad_()
    outputs = call(torch.sin(x), comm, root, cut)
    functions.backward(loss_of(outputs, comm.rank))
    assert x.grad is not None or name in {"bcast", "scatter"}
    torch.testing.assert_close(list(outputs), list(wanted[comm.rank]), rtol=0, atol=1e-10)
    zeros, grad = torch.zeros_like(x), grads[comm.rank]
    torch.testing.assert_close(zeros if x.grad is None else x.grad, zeros if grad is None else grad, rtol=0, atol=1e-10)


@pytest.mark.parametrize("dtype", [torch.uint16, torch.uint32, torch.uint64, torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_what_torch_does_not_add_is_summed(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    sums = functions.allreduce(torch.tensor([1, comm.rank]).to(dtype), comm)
    assert sums.dtype == dtype
    assert sums.double().tolist() == [comm.size, sum(range(comm.size))]


@pytest.mark.threads_only  # what one rank finds may reach another in its next operation
@pytest.mark.ranks(2, 3)
def test_dicts_in_another_order_are_not_summed(comm: AbstractCommunicator) -> None:
    """Their tensors go by position; where nothing is summed, each is put together as its rank has it."""
    one, other = torch.tensor([1.0]), torch.tensor([10.0])
    value: Any = {"a": one, "b": other} if comm.rank == 0 else {"b": other, "a": one}
    gathered: Any = functions.allgather(value, comm)
    assert [(each["a"].item(), each["b"].item()) for each in gathered] == [(1.0, 10.0)] * comm.size
    with pytest.raises(CommError, match=r"allreduce: rank .* give different shapes, dtypes or structures: \{'"):
        functions.allreduce(value, comm)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", OPERATIONS)
def test_every_dtype_stays(comm: AbstractCommunicator, name: str, dtype: torch.dtype) -> None:
    """Small whole numbers, which every dtype holds exactly, ragged where that may be; parts are ragged, one of them empty."""
    (call, expected), ranks = OPERATIONS[name], range(comm.size)
    draws = [torch.Generator().manual_seed(rank) for rank in ranks]
    xs = [
        torch.randint(-4, 5, (10, 1 + (rank if name in RAGGED else 0)), generator=draw).to(dtype).requires_grad_()
        for rank, draw in enumerate(draws)
    ]
    outputs = call(xs[comm.rank], comm, 0, cut)
    wanted = [expected([x.detach().double().requires_grad_() for x in xs], rank, 0, cut) for rank in ranks]
    assert [each.dtype for each in outputs] == [dtype] * len(wanted[comm.rank])
    torch.testing.assert_close([each.double() for each in outputs], list(wanted[comm.rank]), rtol=0, atol=0)
    functions.backward(torch.stack([(comm.rank + 1) * each.sum() for each in outputs]).sum() if outputs else None)
    plain = [x.detach().clone().requires_grad_() for x in xs]
    sums = [(rank + 1) * each.sum() for rank in ranks for each in expected(plain, rank, 0, cut)]
    (grad,) = torch.autograd.grad(torch.stack(sums).sum(), plain[comm.rank], allow_unused=True)
    found = xs[comm.rank].grad
    assert found is not None or name in {"bcast", "scatter"}
    assert found is None or found.dtype == dtype
    zeros = torch.zeros_like(plain[comm.rank])
    torch.testing.assert_close(zeros if found is None else found, zeros if grad is None else grad, rtol=0, atol=0)


def test_large_sums_take_two_steps(comm: AbstractCommunicator) -> None:
    x = torch.full((4097,), comm.rank + 1.0, dtype=torch.float64, requires_grad=True)
    total = functions.allreduce({"x": x, "n": torch.tensor([comm.rank])}, comm)
    assert total["n"].tolist() == [sum(range(comm.size))]
    assert (total["x"] == comm.size * (comm.size + 1) / 2).all()
    ((comm.rank + 1) * total["x"]).sum().backward()
    assert x.grad is not None
    assert (x.grad == comm.size * (comm.size + 1) / 2).all()


@pytest.mark.ranks(2, 3, 4)
def test_ring(comm: AbstractCommunicator) -> None:
    """ChainerMN's pipeline: a layer on each rank, and back to the first."""
    generator = torch.Generator().manual_seed(3)
    weights = [torch.randn(4, 4, dtype=torch.float64, generator=generator).requires_grad_() for _ in range(comm.size)]
    expected = torch.ones(2, 4, dtype=torch.float64)
    for each in weights:
        expected = torch.tanh(expected @ each)
    expected.sum().backward()  # type: ignore[no-untyped-call]
    weight = weights[comm.rank].detach().clone().requires_grad_()
    following, preceding = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    if comm.rank == 0:
        functions.send(torch.tanh(torch.ones(2, 4, dtype=torch.float64) @ weight), comm, dest=following)
        y = functions.recv(comm, source=preceding)
        torch.testing.assert_close(y, expected, rtol=0, atol=1e-10)
        y.sum().backward()
    else:
        functions.send(torch.tanh(functions.recv(comm, source=preceding) @ weight), comm, dest=following)
        functions.backward()
    torch.testing.assert_close(weight.grad, weights[comm.rank].grad, rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_structures_travel(comm: AbstractCommunicator) -> None:
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

    if comm.rank == 0:
        functions.send(value, comm, dest=1)
        return
    got: Any = functions.recv(comm, source=0)
    assert isinstance(got, dict)
    assert list(got) == list(value)
    assert got["pair"][1][1] is None
    torch.testing.assert_close(
        {key: each for key, each in got.items() if key != "pair"}, {key: each for key, each in value.items() if key != "pair"}
    )
    torch.testing.assert_close(got["pair"][1][0], torch.ones(2, 2))
    assert got["half"].dtype == torch.float16


@pytest.mark.ranks(2)
def test_gradients_of_a_structure(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        a = torch.ones(2, dtype=torch.float64, requires_grad=True)
        b = torch.ones(300, requires_grad=True)
        unused = torch.ones(3, requires_grad=True)
        functions.send({"a": a, "n": torch.tensor([4]), "rest": (b, unused, torch.ones(2))}, comm, dest=1)
        functions.backward()
        torch.testing.assert_close(a.grad, torch.full((2,), 4.0, dtype=torch.float64))
        torch.testing.assert_close(b.grad, torch.full((300,), 3.0))
        torch.testing.assert_close(unused.grad, torch.zeros(3))
        return
    got = functions.recv(comm, source=0)
    assert [got["a"].requires_grad, got["n"].requires_grad, got["rest"][2].requires_grad] == [True, False, False]
    ((got["a"] * got["n"]).sum() + (3 * got["rest"][0]).sum()).backward()


@pytest.mark.ranks(2)
@pytest.mark.parametrize("num_values", [1, 90, 1000, 1024, 8000, 8192, 200_000, 800_000])
def test_all_sizes_cross(comm: AbstractCommunicator, num_values: int) -> None:
    """Both send first: nobody waits for the other to receive. Megabytes travel in pieces by MPI."""
    x = torch.full((num_values,), float(comm.rank + 1), requires_grad=True)
    functions.send(x, comm, dest=1 - comm.rank)
    y = functions.recv(comm, source=1 - comm.rank)
    assert (y == 2 - comm.rank).all()
    ((comm.rank + 1) * y).sum().backward()
    torch.testing.assert_close(x.grad, torch.full_like(x, 2.0 - comm.rank), rtol=0, atol=0)
