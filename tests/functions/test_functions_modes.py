"""Under what torch does to a forward pass (no_grad, checkpoints, autocast), with memory that is lent, and changed in place."""

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from operations import OPERATIONS, Operation
from torch.utils.checkpoint import checkpoint

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import CommError
from tatami.functions import memory
from tatami.functions.memory import Memory
from tatami.testing.worlds import World

X = torch.tensor([0.3, -0.7, 1.1], dtype=torch.float64)
A = torch.tensor([[1.0, 0.5, -1.0], [0.2, 2.0, 0.1], [0.0, 1.0, 1.0]], dtype=torch.float64)
B = torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64)


def close(got: torch.Tensor | None, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


def penalized(a: torch.Tensor, b: torch.Tensor, x: torch.Tensor) -> Any:
    score = (torch.tanh(x @ a).pow(2) * b).sum()
    (slope,) = torch.autograd.grad(score, x, create_graph=True)
    return score + (slope.norm() - 1) ** 2


@pytest.mark.ranks(2)
def test_gradient_penalty_across_ranks(comm: AbstractCommunicator) -> None:
    """The slope of rank 1's score at rank 0's input, whose own gradient changes the weights of both."""
    a, b, x = A.clone().requires_grad_(), B.clone().requires_grad_(), X.clone().requires_grad_()
    penalized(a, b, x).backward()
    weight, x = (B if comm.rank else A).clone().requires_grad_(), X.clone().requires_grad_()
    if comm.rank == 0:
        functions.send(torch.tanh(x @ weight), comm, dest=1)
        (slope,) = functions.grad(None, x, create_graph=True)
        ((slope.norm() - 1) ** 2).backward()
    else:
        score = (functions.recv(comm, source=0).pow(2) * weight).sum()
        functions.grad(score, (), create_graph=True)
        functions.backward(score)
    expected = (b if comm.rank else a).grad
    assert expected is not None
    close(weight.grad, expected)


@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("name", OPERATIONS)
def test_double_backward_of_collectives(comm: AbstractCommunicator, name: str) -> None:
    (call, expected), ranks = OPERATIONS[name], range(comm.size)

    def loss_of(outputs: Sequence[torch.Tensor], rank: int) -> torch.Tensor:
        return (torch.stack(list(outputs)).pow(3) * (rank + 1)).sum() if outputs else torch.zeros((), dtype=torch.float64)

    def parts(x: torch.Tensor, _: int) -> list[torch.Tensor]:
        return list(x)

    xs = [torch.linspace(0.1 + rank, 1.0 + rank, comm.size, dtype=torch.float64).requires_grad_() for rank in ranks]
    total = torch.stack([loss_of(expected([torch.sin(x) for x in xs], rank, 0, parts), rank) for rank in ranks]).sum()
    slopes = torch.autograd.grad(total, xs, create_graph=True, allow_unused=True)
    torch.stack([slope.pow(2).sum() for slope in slopes if slope is not None]).sum().backward()  # type: ignore[no-untyped-call]
    x = xs[comm.rank].detach().clone().requires_grad_()
    loss = loss_of(call(torch.sin(x), comm, 0, parts), comm.rank)
    (slope,) = functions.grad(loss if loss.requires_grad else None, x, create_graph=True)
    penalty = slope.pow(2).sum()
    functions.backward(penalty if penalty.requires_grad else None)
    wanted = xs[comm.rank].grad
    close(torch.zeros_like(x) if x.grad is None else x.grad, torch.zeros_like(x) if wanted is None else wanted)


def test_no_grad(comm: AbstractCommunicator) -> None:
    x = torch.ones(2, requires_grad=True)
    with torch.no_grad():
        total = functions.allreduce(x, comm)
        parts = functions.allgather(x, comm)
    assert not total.requires_grad
    assert not any(part.requires_grad for part in parts)
    assert total.tolist() == [comm.size] * 2
    functions.backward()
    assert x.grad is None


@pytest.mark.ranks(2)
def test_evaluation_between_forward_and_backward(comm: AbstractCommunicator) -> None:
    x = torch.tensor(2.0, requires_grad=True)
    y = functions.allreduce(x, comm)
    with torch.no_grad():
        assert functions.allreduce(x, comm).item() == 4
    (y**2).backward()
    assert x.grad is not None
    assert x.grad.item() == 16


@pytest.mark.ranks(2, 3)
def test_checkpointed_regions_communicate_once(comm: AbstractCommunicator) -> None:
    def forward(x: torch.Tensor, comm: AbstractCommunicator) -> torch.Tensor:
        h = torch.tanh(x) * (comm.rank + 1)
        parts = functions.allgather(h, comm)
        neighbour = functions.sendrecv(h, comm, dest=(comm.rank + 1) % comm.size, source=(comm.rank - 1) % comm.size)
        return torch.sin(torch.stack(parts).prod(0)) * torch.exp(neighbour)

    grads = []
    for checkpointed in (False, True):
        x = (X + comm.rank).requires_grad_()
        y = checkpoint(forward, x, comm, use_reentrant=False) if checkpointed else forward(x, comm)
        (y**2).sum().backward()
        grads.append(x.grad)
    assert grads[0] is not None
    close(grads[1], grads[0])


@pytest.mark.ranks(2)
def test_checkpointed_sender_and_receiver(comm: AbstractCommunicator) -> None:
    sent, taken = X.clone().requires_grad_(), X.clone().requires_grad_()
    (torch.tanh(sent.sin()).exp() * taken.exp()).sum().backward()  # type: ignore[no-untyped-call]
    x = X.clone().requires_grad_()
    if comm.rank == 0:
        checkpoint(lambda x: functions.send(torch.tanh(x.sin()), comm, dest=1), x, use_reentrant=False)
        functions.backward()
    else:
        y = checkpoint(lambda x: functions.recv(comm, source=0).exp() * x.exp(), x, use_reentrant=False)
        y.sum().backward()
    expected = (taken if comm.rank else sent).grad
    assert expected is not None
    close(x.grad, expected)


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_reentrant_checkpointing_is_refused(world: World) -> None:
    def body(comm: AbstractCommunicator) -> None:
        x = X.clone().requires_grad_()
        y = checkpoint(lambda x: functions.allreduce(x, comm), x, use_reentrant=True)
        y.sum().backward()

    with pytest.raises(CommError, match="use_reentrant=False"):
        world(body)


@pytest.mark.ranks(2)
def test_autocast(comm: AbstractCommunicator) -> None:
    x = torch.ones(2, 2, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = functions.allgather(x @ x, comm)
        z = (y[1 - comm.rank] @ x).sum()
    z.backward()
    assert x.grad is not None
    sent, grad, total = y[1 - comm.rank].dtype, x.grad.dtype, x.grad.sum().item()
    assert (sent, grad) == (torch.bfloat16, torch.float32)
    assert total == pytest.approx(3 * 16, rel=0.02)


@pytest.mark.ranks(2)
def test_nothing_is_kept_after_backward(comm: AbstractCommunicator) -> None:
    x = X.clone().requires_grad_()
    h = torch.sin(x)
    y = functions.sendrecv(h, comm, dest=1 - comm.rank, source=1 - comm.rank)
    z = functions.allreduce(y, comm)
    kept = [weakref.ref(each) for each in (h, y, z)]
    z.sum().backward()
    del h, y, z
    assert [each() is None for each in kept] == [True] * 3


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


def with_one_tensor(operation: Operation) -> Callable[[torch.Tensor, AbstractCommunicator], Sequence[torch.Tensor]]:
    """All parts are the same tensor."""
    return lambda x, comm: operation.call(x, comm, 0, lambda x, size: [x] * size)


CALLS: dict[str, Callable[[torch.Tensor, AbstractCommunicator], Sequence[torch.Tensor]]] = {
    **{name: with_one_tensor(operation) for name, operation in OPERATIONS.items()},
    # Delegates may be changed, too.
    "gather": lambda x, comm: list(functions.gather(x, comm)) if comm.rank == 0 else [functions.gather(x, comm)],
    "reduce": lambda x, comm: [functions.reduce(x, comm)],
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
