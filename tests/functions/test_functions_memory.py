"""Memory that is lent again, and results that are changed in place."""

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.functions import memory
from tatami.functions.memory import Memory

SHAPE = (256, 512)
SIZE_BYTES = 4 * 256 * 512


def empty(lender: Memory) -> torch.Tensor:
    return lender.empty(SHAPE, torch.float32, size_bytes=SIZE_BYTES)


def test_is_lent_again_when_nobody_has_it() -> None:
    lender = Memory()
    first = empty(lender)
    assert (first.shape, first.dtype, first.is_contiguous()) == (torch.Size(SHAPE), torch.float32, True)
    place = first.data_ptr()
    second = empty(lender)
    assert second.data_ptr() != place
    row = first[3]
    del first
    gc.collect()
    assert empty(lender).data_ptr() != place, "a view of it is still there"
    del row
    gc.collect()
    assert empty(lender).data_ptr() == place


def test_what_autograd_keeps_is_not_lent() -> None:
    lender = Memory()
    x = empty(lender).fill_(2.0).requires_grad_()
    place, loss = x.data_ptr(), x.square().sum()
    weight = torch.ones(SHAPE, requires_grad=True)
    product: Any = (empty(lender).fill_(3.0) * weight).sum()
    gc.collect()
    assert empty(lender).fill_(9.0).data_ptr() not in (place, x.data_ptr())
    product.backward()
    assert weight.grad is not None
    assert torch.equal(weight.grad, torch.full(SHAPE, 3.0))
    assert float(loss.detach()) == 4.0 * 256 * 512


def test_keeps_no_more_than_is_worth_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "_MOST_FREE_BYTES", 2 * SIZE_BYTES)
    lender = Memory()
    held = [empty(lender) for _ in range(5)]
    held.clear()
    gc.collect()
    assert 1 <= sum(len(each) for each in lender._free.values()) <= 2
    small = lender.empty((2,), torch.float64, size_bytes=16)
    assert small.shape == (2,)


@pytest.mark.ranks(2, 3)
def test_large_tensors_of_many_steps_keep_their_values(comm: AbstractCommunicator) -> None:
    """What came in one step is as it was, although memory of other steps is lent again meanwhile."""
    source, dest = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    kept = []
    x = torch.zeros(SHAPE, requires_grad=True)
    for step in range(6):
        came = functions.sendrecv(x + (10 * step + comm.rank), comm, dest=dest, source=source)
        if step % 2 == 0:
            kept.append((step, came.detach()))
        functions.backward((step + 1) * came.t())
    for step, tensor in kept:
        assert bool((tensor == 10 * step + source).all())
    assert x.grad is not None
    assert bool((x.grad == 21.0).all())


SIZES = {"small": 8, "large": 48 * 1024}
"""Elements of float64: memory of large tensors is lent, and large sums go in two steps."""

CALLS: dict[str, Callable[[torch.Tensor, AbstractCommunicator], list[torch.Tensor]]] = {
    "allgather": lambda x, comm: list(functions.allgather(x, comm)),
    "alltoall": lambda x, comm: list(functions.alltoall([x] * comm.size, comm)),
    "bcast": lambda x, comm: [functions.bcast(x, comm)],
    "scatter": lambda x, comm: [functions.scatter([x] * comm.size, comm)],
    "gather": lambda x, comm: list(functions.gather(x, comm)) if comm.rank == 0 else [functions.gather(x, comm)],
    "allreduce": lambda x, comm: [functions.allreduce(x, comm)],
    "reduce": lambda x, comm: [functions.reduce(x, comm)],
    "reduce_scatter": lambda x, comm: [functions.reduce_scatter([x] * comm.size, comm)],
    "sendrecv": lambda x, comm: (
        [functions.sendrecv(x, comm, dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)]
        if comm.size > 1
        else [x * 1]
    ),
    "pseudo_connect": lambda x, comm: list(functions.pseudo_connect(functions.allreduce(x, comm), x, x)),
}


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("name", CALLS)
def test_results_may_be_changed_in_place(comm: AbstractCommunicator, name: str, size: str) -> None:
    found = []
    for change in (torch.relu, torch.relu_):
        x = torch.linspace(-1.0, 1.0, SIZES[size], dtype=torch.float64).requires_grad_()
        kept = x.detach().clone()
        outputs: list[Any] = [change(output) for output in CALLS[name](x, comm)]
        functions.backward(torch.stack([(output * (output + 1)).sum() for output in outputs]).sum())
        assert torch.equal(x.detach(), kept), "the input was changed"
        found.append((x.grad, outputs))
    (plain, plain_outputs), (in_place, outputs) = found
    assert (plain is None) == (in_place is None)
    if plain is not None and in_place is not None:
        torch.testing.assert_close(in_place, plain, rtol=0, atol=0)
    for output, expected in zip(outputs, plain_outputs, strict=True):
        torch.testing.assert_close(output, expected, rtol=0, atol=0)
