"""The token: it chains the operations of a forward pass, so that backward visits them all, whatever reaches the loss.

Each operation takes the token of the one before it as an input and returns a new one. Whoever runs backward from the last token
runs all operations, and torch runs those that are ready in the reverse of the order in which they were called.
"""

from __future__ import annotations

import threading
from weakref import ReferenceType, ref

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.errors import CommError

NO_GRAPH_TASK = -1


class Chain:
    """The operations of one forward pass on one communicator, from the first token, a leaf, to the last.

    Attributes:
        number: how many there were before it on this communicator.
        first: the first token; requires a gradient, gets none.
        last: the token that the next operation takes.
        location: the line of user code of the last operation.
    """

    def __init__(self, number: int) -> None:
        self.number = number
        self.first = torch.zeros((), requires_grad=True)
        self.last = self.first
        self.location = b""
        self.num_operations = 0
        self._graph_task = NO_GRAPH_TASK

    def add(self, token: torch.Tensor, location: bytes) -> int:
        """The next operation; returns its index."""
        self.last = token
        self.location = location
        self.num_operations += 1
        return self.num_operations - 1

    def is_last(self, index: int) -> bool:
        """Whether backward from operation `index` comes to all operations."""
        return index == self.num_operations - 1

    def visit(self, index: int, *, name: str, location: bytes) -> None:
        """Backward has come to operation `index`.

        Raises:
            CommError: it did not begin at the end of the chain, so that the gradients of later operations would be lost.
        """
        graph_task: int = torch._C._current_graph_task_id()
        if graph_task != self._graph_task:
            if not self.is_last(index):
                raise CommError(
                    f"backward of {name} at {location.decode()} begins, but the result here does not depend on what was "
                    f"communicated later, up to {self.location.decode()}, whose gradients would be lost and whose peers would "
                    "wait; use tatami.functions.backward(loss) or tatami.functions.grad(outputs, inputs)"
                )
            self._graph_task = graph_task


class Chains:
    """The open chain of a communicator on this rank."""

    def __init__(self) -> None:
        self._num_chains = 0
        self.open: Chain | None = None
        self.retained: Chain | None = None
        """The last chain that was closed, where torch was told to retain its graph: it may be visited again."""

    @property
    def number(self) -> int:
        """Of the open chain, or of the one to be opened."""
        return self._num_chains if self.open is None else self.open.number

    def current(self) -> Chain:
        """The open chain, opened if there is none."""
        if self.open is None:
            self.open = Chain(self._num_chains)
            self._num_chains += 1
            _add_here(self)
        return self.open

    def close(self, chain: Chain) -> None:
        """Backward has visited all of `chain`: what is called next belongs to another pass."""
        self.retained = chain if torch._C._autograd._get_current_graph_task_keep_graph() else None
        if self.open is chain:
            self.open = None


def chains_of(comm: AbstractCommunicator) -> Chains:
    """The chains of `comm`, kept for as long as it is."""
    state = comm.__dict__
    chains: Chains | None = state.get("_functions_chains")
    if chains is None:
        chains = state["_functions_chains"] = Chains()
    return chains


class _Here(threading.local):
    """The chains of this thread, ranks being threads or not. A list of references: a WeakSet takes longer than all the rest."""

    def __init__(self) -> None:
        self.chains: list[ReferenceType[Chains]] = []


_here = _Here()


def _add_here(chains: Chains) -> None:
    alive = [each for each in _here.chains if each() is not None]
    if ref(chains) not in alive:
        alive.append(ref(chains))
    _here.chains = alive


def open_chains() -> list[Chain]:
    """The open chains of all communicators that this thread uses."""
    return [chains.open for each in _here.chains if (chains := each()) is not None and chains.open is not None]


def chains_here() -> list[Chain]:
    """All chains of this thread that backward may visit: the open ones, and those that were and whose graph is retained."""
    found = []
    for each in _here.chains:
        chains = each()
        if chains is not None:
            found += [chain for chain in (chains.open, chains.retained) if chain is not None]
    return found
