"""Recurrent stages whose states go from rank to rank, against the same stages in one process."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.errors import CommError, InputError
from tatami.parallel import MultiNodeNStepRNN, create_multi_node_n_step_rnn
from tatami.testing.worlds import World

HIDDEN, BATCH = 5, 3
F64 = torch.float64
Rnn = nn.LSTM | nn.GRU | nn.RNN

RNNS: dict[str, Callable[[int], Rnn]] = {
    "lstm": lambda size: nn.LSTM(size, HIDDEN, dtype=F64),
    "lstm, 2 layers, both directions": lambda size: nn.LSTM(size, HIDDEN, 2, bidirectional=True, dtype=F64),
    "lstm, projected, batch first": lambda size: nn.LSTM(size, HIDDEN, proj_size=2, batch_first=True, dtype=F64),
    "gru": lambda size: nn.GRU(size, HIDDEN, dtype=F64),
    "gru, 2 layers, both directions": lambda size: nn.GRU(size, HIDDEN, 2, bidirectional=True, dtype=F64),
    "rnn, tanh, 2 layers": lambda size: nn.RNN(size, HIDDEN, 2, dtype=F64),
    "rnn, relu, both directions": lambda size: nn.RNN(size, HIDDEN, nonlinearity="relu", bidirectional=True, dtype=F64),
}


class Stage(nn.Module):
    """A recurrent layer over its own kind of input, and a head of its own size."""

    def __init__(self, make: Callable[[int], Rnn], *, rank: int) -> None:
        super().__init__()
        self.rnn = make(rank + 2)
        width = (self.rnn.proj_size or HIDDEN) * (2 if self.rnn.bidirectional else 1)
        self.head = nn.Sequential(
            nn.Linear(width, 10 * (rank + 1), dtype=F64), nn.Tanh(), nn.Linear(10 * (rank + 1), 1, dtype=F64)
        )

    def loss(self, output: torch.Tensor | PackedSequence, *, weight: float) -> torch.Tensor:
        values = output.data if isinstance(output, PackedSequence) else output
        heads: torch.Tensor = self.head(values)
        return weight * (heads**2).sum()


def stages(make: Callable[[int], Rnn], *, size: int, packed: bool) -> tuple[list[Stage], list[Any]]:
    """A stage and its input for each rank; sequences have other lengths on other ranks."""
    with torch.random.fork_rng():
        torch.manual_seed(3)
        built = [Stage(make, rank=rank) for rank in range(size)]
        inputs: list[Any] = []
        for rank, stage in enumerate(built):
            longest = rank + 4
            shape = (BATCH, longest, rank + 2) if stage.rnn.batch_first else (longest, BATCH, rank + 2)
            x = torch.randn(shape, dtype=F64)
            lengths = [longest - 2, longest, longest - 1]  # not in order: packing reorders samples, states must not notice
            inputs.append(
                pack_padded_sequence(x, lengths, batch_first=stage.rnn.batch_first, enforce_sorted=False) if packed else x
            )
    return built, inputs


def grads(module: nn.Module) -> list[torch.Tensor | None]:
    return [parameter.grad for parameter in module.parameters()]


@pytest.mark.parametrize("packed", [False, True], ids=["padded", "packed"])
@pytest.mark.parametrize("kind", sorted(RNNS))
def test_stages_with_heads_and_losses_of_their_own(world: World, kind: str, packed: bool) -> None:
    check_against_one_process(world, kind=kind, packed=packed, losses="everywhere")


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("kind", ["lstm", "gru, 2 layers, both directions"])
def test_ranks_without_a_loss(world: World, kind: str) -> None:
    check_against_one_process(world, kind=kind, packed=True, losses="at the end")


def check_against_one_process(world: World, *, kind: str, packed: bool, losses: str) -> None:
    """Outputs, states and gradients."""
    built, inputs = stages(RNNS[kind], size=world.size, packed=packed)
    last = world.size - 1
    plain = deepcopy(built)
    state: Any = None
    total = torch.zeros((), dtype=F64)
    expected = []
    for rank, stage in enumerate(plain):
        output, state = stage.rnn(inputs[rank], state)
        expected.append((output.data if packed else output, state))
        if losses == "everywhere" or rank == last:
            total = total + stage.loss(output, weight=rank + 1)
    total.backward()  # type: ignore[no-untyped-call]

    def body(comm: AbstractCommunicator) -> tuple[Any, list[torch.Tensor | None]]:
        rank = comm.rank
        stage = deepcopy(built[rank])
        rnn = create_multi_node_n_step_rnn(
            stage.rnn, comm, rank_in=rank - 1 if rank else None, rank_out=None if rank == last else rank + 1, tag=4
        )
        assert isinstance(rnn, MultiNodeNStepRNN)
        assert rnn.rnn is stage.rnn
        output, state = rnn(inputs[rank])
        if losses == "everywhere" or rank == last:
            stage.loss(output, weight=rank + 1).backward()  # type: ignore[no-untyped-call]
        else:
            functions.backward()
        if packed:
            pad_packed_sequence(output)  # it is a whole PackedSequence
        detached = tuple(each.detach() for each in state) if isinstance(state, tuple) else state.detach()
        return ((output.data if packed else output).detach(), detached), grads(stage)

    for rank, (result, found) in enumerate(world(body)):
        torch.testing.assert_close(result, expected[rank], rtol=0, atol=1e-10)
        for got, wanted in zip(found, grads(plain[rank]), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.ranks(2)
def test_states_that_are_used_and_sent_count_twice(world: World) -> None:
    """The sender's own loss is of its last state, which goes to the next rank as well."""
    built, inputs = stages(RNNS["lstm"], size=2, packed=False)
    plain = deepcopy(built)
    _, (h, c) = plain[0].rnn(inputs[0])
    output, _ = plain[1].rnn(inputs[1], (h, c))
    ((c**3).sum() + (output**2).sum()).backward()

    def body(comm: AbstractCommunicator) -> list[torch.Tensor | None]:
        stage = deepcopy(built[comm.rank])
        if comm.rank == 0:
            rnn = create_multi_node_n_step_rnn(stage.rnn, comm, rank_out=1)
            _, (_, c) = rnn(inputs[0])
            (c**3).sum().backward()
        else:
            rnn = create_multi_node_n_step_rnn(stage.rnn, comm, rank_in=0)
            (rnn(inputs[1])[0] ** 2).sum().backward()
        return grads(stage.rnn)

    for rank, found in enumerate(world(body)):
        for got, wanted in zip(found, grads(plain[rank].rnn), strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-10)


@pytest.mark.ranks(1, 2)
def test_first_states_of_the_caller_and_single_sequences(world: World) -> None:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        gru, x, first = nn.GRU(3, HIDDEN), torch.randn(4, 3), torch.randn(1, HIDDEN)
    expected = gru(x, gru(x, first)[1])[0] if world.size == 2 else gru(x, first)[0]

    def body(comm: AbstractCommunicator) -> torch.Tensor:
        rnn = create_multi_node_n_step_rnn(
            gru, comm, rank_in=0 if comm.rank == 1 else None, rank_out=1 if comm.rank + 1 < comm.size else None
        )
        with torch.no_grad():
            output: torch.Tensor = rnn(x, None if comm.rank else first)[0]
        return output

    torch.testing.assert_close(world(body)[-1], expected)


@pytest.mark.ranks(2)
def test_bad_stages_are_refused(comm: AbstractCommunicator) -> None:
    here, gru = comm.rank, nn.GRU(2, 2)
    with pytest.raises(InputError, match=r"rnn is a Linear; give an nn\.LSTM, an nn\.GRU or an nn\.RNN"):
        create_multi_node_n_step_rnn(nn.Linear(2, 2), comm)  # type: ignore[arg-type]
    for arguments in ({"rank_in": here}, {"rank_out": here}):
        with pytest.raises(InputError, match=f"={here} is this rank, which would wait for itself; pass"):
            create_multi_node_n_step_rnn(gru, comm, **arguments)
    with pytest.raises(InputError, match="rank_out=2: there is no such rank; this communicator has ranks 0 to 1"):
        create_multi_node_n_step_rnn(gru, comm, rank_out=2)
    with pytest.raises(InputError, match="rank_in='1' is a str"):
        create_multi_node_n_step_rnn(gru, comm, rank_in="1")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="tag -1 is not between 0 and"):
        create_multi_node_n_step_rnn(gru, comm, rank_out=1 - here, tag=-1)
    rnn = create_multi_node_n_step_rnn(gru, comm, rank_in=1 - here)
    with pytest.raises(InputError, match=f"state was given, but on rank {here} it comes from rank {1 - here}"):
        rnn(torch.zeros(3, 1, 2), torch.zeros(1, 1, 2))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("first", "second", "message"),
    [
        (nn.LSTM(2, 3), nn.GRU(2, 3), r"rank 0 sent states \[\(1, 2, 3\), \(1, 2, 3\)\], but the GRU on rank 1 begins with"),
        (nn.GRU(2, 3), nn.LSTM(2, 3), r"rank 0 sent states \[\(1, 2, 3\)\], but the LSTM on rank 1 begins with \[.*, .*\]"),
        (nn.GRU(2, 3, 2), nn.GRU(2, 3), r"sent states \[\(2, 2, 3\)\], but the GRU on rank 1 begins with \[\(1, 2, 3\)\]"),
        (nn.RNN(2, 3), nn.RNN(2, 4), r"sent states \[\(1, 2, 3\)\], but the RNN on rank 1 begins with \[\(1, 2, 4\)\]"),
        (nn.RNN(2, 3), nn.RNN(2, 3, batch_first=True), r"begins with \[\(1, 5, 3\)\]; both need the same kind, layers, "),
    ],
)
def test_states_that_do_not_fit_name_both_sides(comm: AbstractCommunicator, first: Rnn, second: Rnn, message: str) -> None:
    x = torch.zeros(5, 2, 2)
    with torch.no_grad():
        if comm.rank == 0:
            create_multi_node_n_step_rnn(first, comm, rank_out=1)(x)
        else:
            with pytest.raises(CommError, match=message):
                create_multi_node_n_step_rnn(second, comm, rank_in=0)(x)
