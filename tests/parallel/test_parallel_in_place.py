"""What layers that span ranks return may be changed in place, as the next layer of many networks does."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from drawing import one_at_a_time
from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.parallel import MultiNodeChainList, ParallelConv, create_multi_node_n_step_rnn

F64 = torch.float64
WIDTHS = {"small": 6, "large": 20_000}
"""Memory of large tensors is lent."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("in_place", [False, True])
def test_parts_of_a_chain_list_and_what_follows_it(comm: AbstractCommunicator, width: str, in_place: bool) -> None:
    """Rank 0 gives to all and has an output; the parts of the others begin with the activation."""
    model = MultiNodeChainList(comm)
    weight = nn.Parameter(torch.full((2, WIDTHS[width]), 2.0, dtype=F64))
    if comm.rank == 0:
        others = list(range(1, comm.size))
        model.add_link(_Times(weight), rank_out=[*others, 0])
        model.add_link(_Times(weight), rank_in=0)
    else:
        model.add_link(nn.ReLU(inplace=in_place), rank_in=0)
    x = torch.linspace(-1.0, 1.0, 2 * WIDTHS[width], dtype=F64).view(2, -1)
    output = model(x)
    (3 * (nn.ReLU(inplace=in_place)(output) if comm.rank == 0 else output)).sum().backward()
    if comm.rank == 0:
        assert weight.grad is not None
        positive = x.clamp(min=0)
        torch.testing.assert_close(weight.grad, 3 * 4 * positive + 3 * (comm.size - 1) * positive, rtol=1e-12, atol=0)


@one_at_a_time
def drawn(make: Callable[[], Any], *shape: int) -> tuple[Any, torch.Tensor]:
    """A layer, and an input for it."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return make(), torch.randn(*shape, dtype=F64)


class _Times(nn.Module):
    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * x


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_the_output_and_the_states_of_a_recurrent_stage(comm: AbstractCommunicator, kind: type[nn.GRU] | type[nn.LSTM]) -> None:
    plain_rnn, x = drawn(lambda: kind(3, 4, dtype=F64), 5, 2, 3)
    found = []
    for in_place in (False, True):
        rnn = deepcopy(plain_rnn)
        rank_in = comm.rank - 1 if comm.rank else None
        rank_out = comm.rank + 1 if comm.rank < comm.size - 1 else None
        stage = create_multi_node_n_step_rnn(rnn, comm, rank_in=rank_in, rank_out=rank_out)
        output, state = stage(x)
        states = [state] if isinstance(state, torch.Tensor) else list(state)
        activation = nn.ReLU(inplace=in_place)
        total = sum((activation(each) ** 2).sum() for each in (output, *states))
        functions.backward(total)
        found.append([parameter.grad for parameter in rnn.parameters()])
    for plain, changed in zip(*found, strict=True):
        torch.testing.assert_close(changed, plain, rtol=0, atol=0)


def test_the_output_of_a_divided_convolution(comm: AbstractCommunicator) -> None:
    whole, values = drawn(lambda: nn.Conv1d(3, 5, 2, dtype=F64), 2, 3, 6)
    found = []
    for in_place in (False, True):
        conv = ParallelConv(deepcopy(whole), comm)
        x = values.clone().requires_grad_()
        output = nn.ReLU(inplace=in_place)(conv(x))
        functions.share((output**2).sum(), comm).backward()  # type: ignore[no-untyped-call]
        found.append([x.grad, *(parameter.grad for parameter in conv.parameters())])
    for plain, changed in zip(*found, strict=True):
        torch.testing.assert_close(changed, plain, rtol=0, atol=0)
