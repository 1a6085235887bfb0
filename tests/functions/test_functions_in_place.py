"""What operations return may be changed in place, as `nn.ReLU(inplace=True)` does, large or small; gradients stay right."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.testing.worlds import World

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
def test_results_may_be_changed_in_place(world: World, name: str, size: str) -> None:
    def body(comm: AbstractCommunicator) -> None:
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

    world(body)
