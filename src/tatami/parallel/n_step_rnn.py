"""A recurrent network whose states go from rank to rank: an encoder on one, a decoder on the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from tatami import functions
from tatami.comm.base import AbstractCommunicator
from tatami.errors import CommError, InputError
from tatami.functions.point_to_point import MAX_MESSAGE_TAG
from tatami.parallel.spanning import AbstractSpanning, check_rank, connected

State = torch.Tensor | tuple[torch.Tensor, torch.Tensor]
"""`(layers * directions, batch, hidden)`, or without `batch`; of an LSTM the hidden one and that of the cells."""


class MultiNodeNStepRNN(AbstractSpanning):
    """`rnn`, with first states that come from another rank, and last states that go to one.

    Attributes:
        comm: the ranks.
        rnn: the network itself.
        rank_in: where the first states come from; None for the caller.
        rank_out: where the last states go to; None for nowhere.
        tag: of both messages.
    """

    def __init__(
        self,
        rnn: nn.LSTM | nn.GRU | nn.RNN,
        comm: AbstractCommunicator,
        *,
        rank_in: int | None = None,
        rank_out: int | None = None,
        tag: int = 0,
    ) -> None:
        """See `create_multi_node_n_step_rnn`."""
        super().__init__()
        if not isinstance(rnn, nn.LSTM | nn.GRU | nn.RNN):
            raise InputError(f"rnn is a {type(rnn).__name__}; give an nn.LSTM, an nn.GRU or an nn.RNN")
        for what, rank in (("rank_in", rank_in), ("rank_out", rank_out)):
            if rank is not None:
                check_rank(what, comm, rank)
                if rank == comm.rank:
                    raise InputError(f"{what}={rank} is this rank, which would wait for itself; pass states as torch does")
        if not 0 <= tag <= MAX_MESSAGE_TAG:
            raise InputError(f"tag {tag} is not between 0 and {MAX_MESSAGE_TAG}")
        self.comm = comm
        self.rnn = rnn
        self.rank_in = rank_in
        self.rank_out = rank_out
        self.tag = tag

    def forward(self, input: torch.Tensor | PackedSequence, state: State | None = None) -> tuple[Any, State]:
        """What `rnn` returns: its output, and its last states, whether they are sent or not.

        Args:
            input: as `rnn` takes it: (steps, batch, inputs), (batch, steps, inputs) with its `batch_first`, or packed.
            state: the first states, on a rank without `rank_in`; None for zeros.

        Raises:
            InputError: first states on a rank that gets them from another.
            CommError: the states that came do not fit `rnn`, or ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
        """
        if self.rank_in is not None:
            if state is not None:
                raise InputError(
                    f"state was given, but on rank {self.comm.rank} it comes from rank {self.rank_in}; leave it out"
                )
            state = functions.recv(self.comm, source=self.rank_in, tag=self.tag)
            self._check(state, input)
        output, last = self.rnn(input, state)
        if self.rank_out is None:
            return output, last
        delegate = functions.send(last, self.comm, dest=self.rank_out, tag=self.tag)
        joined: tuple[Any, State] = connected(delegate, (output, last))
        return joined

    def _check(self, state: Any, input: torch.Tensor | PackedSequence) -> None:
        """Whether what came are first states of this network."""
        rnn = self.rnn
        if isinstance(input, PackedSequence):
            batch: tuple[int, ...] = (int(input.batch_sizes[0]),)
        else:
            batch = () if input.dim() == 2 else (input.shape[0 if rnn.batch_first else 1],)
        layers = rnn.num_layers * (2 if rnn.bidirectional else 1)
        wanted = [(layers, *batch, rnn.proj_size or rnn.hidden_size)]
        if isinstance(rnn, nn.LSTM):
            wanted.append((layers, *batch, rnn.hidden_size))
        came = [state] if isinstance(state, torch.Tensor) else list(state) if isinstance(state, tuple) else []
        shapes = [tuple(each.shape) if isinstance(each, torch.Tensor) else type(each).__name__ for each in came]
        if shapes != wanted or isinstance(state, tuple) != isinstance(rnn, nn.LSTM):
            raise CommError(
                f"rank {self.rank_in} sent states {shapes or type(state).__name__}, but the {type(rnn).__name__} on rank "
                f"{self.comm.rank} begins with {wanted}; both need the same kind, layers, directions, hidden size and batch"
            )


def create_multi_node_n_step_rnn(
    rnn: nn.LSTM | nn.GRU | nn.RNN,
    comm: AbstractCommunicator,
    *,
    rank_in: int | None = None,
    rank_out: int | None = None,
    tag: int = 0,
) -> MultiNodeNStepRNN:
    """`rnn` as one stage of a network over several ranks: it begins with the states in which the stage before it ended.

        encoder = create_multi_node_n_step_rnn(nn.LSTM(64, 128), comm, rank_out=1)     # on rank 0
        decoder = create_multi_node_n_step_rnn(nn.LSTM(32, 128), comm, rank_in=0)      # on rank 1

    A rank with a loss ends its pass with `loss.backward()`, the others with `tatami.functions.backward()`.

    Args:
        rnn: of one or more layers, in one direction or both, with dropout or projections: as torch has it.
        comm: the ranks.
        rank_in: where its first states come from; None for the caller.
        rank_out: where its last states go to; None for nowhere.
        tag: of both messages.

    Raises:
        InputError: another module; this rank itself, a rank that is not there, a tag out of range.
    """
    return MultiNodeNStepRNN(rnn, comm, rank_in=rank_in, rank_out=rank_out, tag=tag)
