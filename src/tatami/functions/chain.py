"""The token: it chains the operations of a forward pass, so that backward visits them all, also those that do not lead to the
loss.

Each operation takes the token of the one before it as an input and returns a new one. Backward from the last token comes to all
operations, and torch runs those that are ready in the reverse of the order in which they were called.

Operations that are called outside of every `Pass` belong to one chain, which ends when backward has visited it. Each `Pass` has
another chain on each communicator, so that several may be in flight.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable
from weakref import ReferenceType, ref

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.errors import ClosedError, CommError

NO_GRAPH_TASK = -1
MOST_OPERATIONS = 10_000
"""So many operations of a communicator may wait for a backward pass: each keeps some 10 kB of graph and of messages."""

_OVER = torch.zeros((), dtype=torch.float32, device="cpu")
"""In place of the tokens of a chain that is over, which would keep its graph."""


class Chain:
    """The operations of one forward pass on one communicator, from the first token, a leaf, to the last.

    Attributes:
        number: how many there were before it on this communicator.
        owner: the `Pass` that it belongs to; None for no pass.
        first: the first token; requires a gradient, gets none.
        last: the token that the next operation takes.
        location: the line of user code of the last operation.
        num_operations: how many there are.
        retained_in: the graph task in which backward last visited all of it and torch was told to retain the graph.
        first_serials: by rank, the serial of the first message to it that is answered by a gradient.
        begun, visited: how many chains of this thread had been visited when it began, and when it was visited.
    """

    def __init__(self, number: int, owner: object) -> None:
        self.number = number
        self.owner = owner
        self.first = torch.zeros((), dtype=torch.float32, device="cpu", requires_grad=True)
        self.last = self.first
        self.location = b""
        self.num_operations = 0
        self.retained_in = NO_GRAPH_TASK
        self.first_serials: dict[int, int] = {}
        self.begun, self.visited = _here.num_visited, 0
        self._graph_task = NO_GRAPH_TASK

    @property
    def is_over(self) -> bool:
        """Whether backward has visited all of it, and may not do so again."""
        return self.last is _OVER

    def goes_with(self, others: Iterable[Chain]) -> bool:
        """Whether it is of the pass of one of these, perhaps on another communicator: backward visits all of a pass."""
        return any(each.retained_in == self.retained_in and each.owner is self.owner for each in others)

    def add(self, token: torch.Tensor, location: bytes) -> int:
        """The next operation; returns its index."""
        self.last = token
        self.location = location
        self.num_operations += 1
        return self.num_operations - 1

    def end(self) -> None:
        """Backward will not visit it any more: its graph is given up."""
        self.first = self.last = _OVER

    def is_last(self, index: int) -> bool:
        """Whether backward from operation `index` comes to all operations."""
        return index == self.num_operations - 1

    def visit(self, index: int, *, name: str, location: bytes, comm: AbstractCommunicator) -> None:
        """Backward has come to operation `index`.

        Raises:
            ClosedError: the communicator was closed.
            CommError: the pass is over; or backward did not begin at the end of the chain, so that the gradients of later
                operations would be lost.
        """
        # Only the first operation that a backward pass visits needs the check, and it must be the last one of the chain. Say
        # the loss depends on a recv, and a send follows it that the loss does not reach: backward would begin at the recv, and
        # the peer of the send would wait for its gradient forever. torch numbers its backward passes, which tells a new one.
        graph_task: int = torch._C._current_graph_task_id()
        if graph_task == self._graph_task:
            return
        if index != self.num_operations - 1 or self.last is _OVER or comm.is_closed:
            raise self._refusal(f"backward of {name} at {location.decode()}", comm)
        self._graph_task = graph_task

    def _refusal(self, where: str, comm: AbstractCommunicator) -> CommError:
        if comm.is_closed:
            return ClosedError(f"{where}: this communicator was closed, and the other ranks can no longer be told the gradient")
        if self.is_over:
            return CommError(
                f"{where} comes to a pass that is over: an earlier backward visited all {self.num_operations} operations of it "
                "and sent zeros for what did not reach its loss. Run one backward over the sum of all losses of the pass; or "
                "put each forward pass that is in flight into another `with tatami.functions.Pass():`; or say "
                "retain_graph=True in the earlier backward, on all ranks"
            )
        return CommError(
            f"{where} begins, but the result here does not depend on what was "
            f"communicated later, up to {self.location.decode()}, whose gradients would be lost and whose peers would "
            "wait; use tatami.functions.backward(loss) or tatami.functions.grad(outputs, inputs)"
        )


class Chains:
    """The chains of a communicator on this rank.

    Attributes:
        in_flight: those that backward has not visited to the end; by the `Pass` that they belong to, None for no pass.
        retained: those that it has visited, and may visit again.
        num_operations: of the chains in flight.
    """

    def __init__(self, comm: AbstractCommunicator) -> None:
        self._comm = ref(comm)
        self._num_chains = 0
        self.in_flight: dict[object, Chain] = {}
        self.retained: list[Chain] = []
        self.num_operations = 0

    @property
    def number(self) -> int:
        """Number of the chain that the next operation belongs to, which may not have begun."""
        chain = self.in_flight.get(_here.entered)
        return self._num_chains if chain is None else chain.number

    def is_open(self) -> bool:
        """Whether the communicator is; what was abandoned on one that was closed is given up."""
        comm = self._comm()
        if comm is not None and not comm.is_closed:
            return True
        for chain in (*self.in_flight.values(), *self.retained):
            chain.end()
        self.in_flight.clear()
        self.retained.clear()
        return False

    def current(self) -> Chain:
        """The chain that the next operation belongs to, begun if there is none."""
        entered = _here.entered
        chain = self.in_flight.get(entered)
        if chain is None:
            chain = self.in_flight[entered] = Chain(self._num_chains, entered)
            self._num_chains += 1
            known = _here.chains.get(id(self))
            if known is None or known() is not self:
                _here.chains = {key: each for key, each in _here.chains.items() if each() is not None} | {id(self): ref(self)}
        return chain

    def add(self, chain: Chain, token: torch.Tensor, location: bytes) -> int:
        """The next operation of `chain`; returns its index."""
        self.num_operations += 1
        return chain.add(token, location)

    @property
    def is_full(self) -> bool:
        """Whether no further operation may wait for a backward pass."""
        return self.num_operations >= MOST_OPERATIONS

    def close(self, chain: Chain) -> None:
        """Backward has visited all of `chain`: what is called next belongs to another pass."""
        if self.in_flight.get(chain.owner) is chain:
            del self.in_flight[chain.owner]
            self.num_operations -= chain.num_operations
        task = _here.last_closed_in = torch._C._current_graph_task_id()
        _here.num_visited += 1
        chain.visited = _here.num_visited
        if self.retained:
            for each in self.retained:
                if each.visited <= chain.begun:  # something was communicated since: it is not run again
                    each.end()
            self.retained = [each for each in self.retained if each is not chain and not each.is_over]
        if torch._C._autograd._get_current_graph_task_keep_graph():
            chain.retained_in = task
            self.retained.append(chain)
        else:
            chain.end()


def chains_of(comm: AbstractCommunicator) -> Chains:
    """The chains of `comm`, kept for as long as it is."""
    return comm.attached(Chains, Chains)


class _Here(threading.local):
    """What this thread has in flight, ranks being threads or not.

    Attributes:
        chains: by their ids; a WeakSet takes longer than all the rest.
        entered: the `Pass` whose block is being run.
        last_closed_in: the graph task in which a chain was last visited to the end.
        num_visited: how many were.
    """

    def __init__(self) -> None:
        self.chains: dict[int, ReferenceType[Chains]] = {}
        self.entered: object = None
        self.last_closed_in = NO_GRAPH_TASK
        self.num_visited = 0


_here = _Here()


def enter(owner: object) -> object:
    """What is called next in this thread belongs to `owner`; returns what it belonged to so far."""
    before, _here.entered = _here.entered, owner
    return before


def all_here() -> list[Chains]:
    """The chains of all communicators that this thread uses and that are not closed."""
    return [chains for each in _here.chains.values() if (chains := each()) is not None and chains.is_open()]


def to_visit(everything: Iterable[Chains]) -> tuple[list[Chain], list[Chain]]:
    """What backward must visit, and what it visits where it begins there.

    Inside of the block of a `Pass`, the chains of the pass must be visited, and no others may. Elsewhere those of no pass must.
    """
    entered = _here.entered
    wanted: list[Chain] = []
    possible: list[Chain] = []
    for chains in everything:
        for chain in chains.in_flight.values():
            if chain.owner is entered:
                wanted.append(chain)
            elif entered is None:
                possible.append(chain)
    return wanted, possible


def retained_last(everything: Iterable[Chains]) -> list[Chain]:
    """What may be visited again: what the last backward of this thread visited; in the block of a `Pass`, that pass."""
    retained = [each for chains in everything for each in chains.retained]
    if _here.entered is not None:
        return [each for each in retained if each.owner is _here.entered]
    return [each for each in retained if each.retained_in == _here.last_closed_in]


def chains_here() -> list[Chain]:
    """All chains of this thread that backward may visit: those in flight, and those that were and whose graph is retained."""
    return [chain for chains in all_here() for chain in (*chains.in_flight.values(), *chains.retained)]
