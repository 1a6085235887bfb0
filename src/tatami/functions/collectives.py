"""Differentiable collectives: bcast, gather, scatter, allgather, alltoall. Shapes may differ between the ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Never

import torch

from tatami.comm.agreement import debugging
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.functions.channel import channel_of
from tatami.functions.connecting import pseudo_connect
from tatami.functions.exchange import Exchange, Outgoing
from tatami.functions.location import user_location
from tatami.functions.message import MessageKind
from tatami.functions.replay import replayed
from tatami.functions.structure import Packed, Structure, describe, flatten, packed, unflatten, with_tensors

CALLS = {
    "bcast": ("x, comm, root=0", "comm, x, root"),
    "gather": ("x, comm, root=0", "comm, x, root"),
    "scatter": ("xs, comm, root=0", "comm, xs, root"),
    "allgather": ("x, comm", "comm, x"),
    "alltoall": ("xs, comm", "comm, xs"),
    "allreduce": ("x, comm", "comm, x"),
    "reduce": ("x, comm, root=0", "comm, x, root"),
    "reduce_scatter": ("xs, comm", "comm, xs"),
}
"""Our arguments, and the order of ChainerMN's."""


def check_order(operation: str, comm: AbstractCommunicator, extra: tuple[object, ...]) -> None:
    """Whether the second argument is the communicator, and the last that is not named.

    Raises:
        InputError: it is not.
    """
    if not extra and isinstance(comm, AbstractCommunicator):
        return
    ours, chainermns = CALLS[operation]
    given = f"{2 + len(extra)} arguments without names" if extra else f"a {type(comm).__name__} as the second argument"
    raise InputError(f"{operation} got {given}; call {operation}({ours}), which is not ChainerMN's order ({chainermns})")


_NOTHING = packed(None)
_OF_ROOT = ("bcast", "scatter")
"""Only the root gives parts. The others tell it that they are there, so that it finds out if they name another root: two ranks
that each took themselves for the root would else never hear of each other."""


def bcast(
    x: Structure, comm: AbstractCommunicator, *extra: Never, root: int = 0, delegate: torch.Tensor | None = None
) -> Structure:
    """`x` of `root`, on every rank; the `x` of others is not looked at. Backward sums the gradients of all ranks on `root`.

    `delegate`, a scalar, is as in `recv`.

    Raises:
        InputError: an unknown rank, something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("bcast", comm, extra)
    check_root("bcast", comm, root)

    def run() -> Structure:
        parts: dict[int, Structure] = dict.fromkeys(range(comm.size), x) if comm.rank == root else {}
        return collective("bcast", comm, parts, sources=(root,), root=root, delegate=delegate)[0][root]

    return replayed("bcast", run)


def gather(x: Structure, comm: AbstractCommunicator, *extra: Never, root: int = 0) -> Any:
    """All ranks' `x`, a tuple in the order of the ranks, on `root`. Backward scatters the gradients.

    Returns:
        the tuple on `root`; a delegate elsewhere, see `send`.

    Raises:
        InputError: an unknown rank, something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("gather", comm, extra)
    check_root("gather", comm, root)

    def run() -> Any:
        everyone = range(comm.size) if comm.rank == root else ()
        parts, delegate = collective("gather", comm, {root: x}, sources=everyone, root=root, pattern=x)
        return tuple(parts[rank] for rank in everyone) if comm.rank == root else delegate

    return replayed("gather", run)


def scatter(
    xs: Sequence[Structure] | None,
    comm: AbstractCommunicator,
    *extra: Never,
    root: int = 0,
    delegate: torch.Tensor | None = None,
) -> Structure:
    """Part `rank` of the sequence `xs` of `root`; the `xs` of other ranks is not looked at. Backward gathers the gradients.

    `delegate`, a scalar, is as in `recv`.

    Raises:
        InputError: an unknown rank, a number of parts other than that of the ranks, something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("scatter", comm, extra)
    check_root("scatter", comm, root)

    def run() -> Structure:
        parts = dict(enumerate(one_for_each("scatter", comm, xs))) if comm.rank == root else {}
        return collective("scatter", comm, parts, sources=(root,), root=root, delegate=delegate)[0][root]

    return replayed("scatter", run)


def allgather(x: Structure, comm: AbstractCommunicator, *extra: Never) -> tuple[Structure, ...]:
    """All ranks' `x`, in the order of the ranks, on every rank. Backward sums the gradients that all ranks have of `x`.

    A loss that every rank computes alike from it counts once for each rank: see `tatami.functions.share`.

    Raises:
        InputError: something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("allgather", comm, extra)

    def run() -> tuple[Structure, ...]:
        everyone = range(comm.size)
        parts = collective("allgather", comm, dict.fromkeys(everyone, x), sources=everyone, pattern=x)[0]
        return tuple(parts[rank] for rank in everyone)

    return replayed("allgather", run)


def alltoall(xs: Sequence[Structure], comm: AbstractCommunicator, *extra: Never) -> tuple[Structure, ...]:
    """Part `rank` of all ranks' sequence `xs`, in the order of the ranks. Backward brings each gradient back to its owner.

    Raises:
        InputError: a number of parts other than that of the ranks, something that is not a tensor.
        CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
    """
    check_order("alltoall", comm, extra)

    def run() -> tuple[Structure, ...]:
        parts = one_for_each("alltoall", comm, xs)
        everyone = range(comm.size)
        came = collective("alltoall", comm, dict(enumerate(parts)), sources=everyone, pattern=parts[comm.rank])[0]
        return tuple(came[rank] for rank in everyone)

    return replayed("alltoall", run)


def collective(
    name: str,
    comm: AbstractCommunicator,
    parts: Mapping[int, Structure],
    *,
    sources: Sequence[int],
    root: int = 0,
    pattern: Structure = None,
    same_shapes: bool = False,
    delegate: torch.Tensor | None = None,
) -> tuple[dict[int, Structure], torch.Tensor]:
    """Give `parts` to ranks and get one from each of `sources`, this rank among both or not.

    Args:
        name: one of `OPERATIONS`.
        comm: the ranks, all of which call this.
        parts: by rank; the same object for several ranks counts as one input.
        sources: ranks.
        root: of collectives that have one.
        pattern: what every part that comes must look like; None for anything.
        same_shapes: whether their shapes and dtypes must agree with it too.
        delegate: to be visited by backward afterwards.

    Returns:
        what came, by rank, and a delegate.
    """
    location = user_location()
    channel = channel_of(comm)
    inputs: list[torch.Tensor] = []
    # Each part is flattened once, also where all ranks are given the same object, as in bcast: its tensors are one
    # input of the graph, and its structure is packed once, not once for each rank.
    flat: dict[int, tuple[range, Packed]] = {}
    for x in parts.values():
        if id(x) not in flat:
            tensors, content = flatten(x, operation=name)
            flat[id(x)] = range(len(inputs), len(inputs) + len(tensors)), content
            inputs += tensors
    expected = None if pattern is None else flatten(pattern, operation=name)[1]
    agree(name, comm, root=root, pattern=expected, same_shapes=same_shapes, location=location)
    number = channel.peer_reports.begin_collective(name, root, location)
    outgoing = [Outgoing(peer, number, flat[id(x)][1], flat[id(x)][0]) for peer, x in parts.items() if peer != comm.rank]
    others = [(peer, number) for peer in sources if peer != comm.rank]
    if name in _OF_ROOT and comm.rank != root:
        outgoing.append(Outgoing(root, number, _NOTHING, ()))
    elif name in _OF_ROOT:
        others = [(peer, number) for peer in range(comm.size) if peer != root]
    exchange = Exchange(
        channel,
        name,
        kind=int(MessageKind.COLLECTIVE),
        tag=root,
        outgoing=outgoing,
        sources=others,
        location=location,
        pattern=expected,
        same_shapes=same_shapes,
    )
    if comm.size == 1:
        comm.barrier()  # nothing moves, but a closed communicator must say so
    exchange.move(inputs)
    came = iter(exchange.record(inputs, delegate=delegate))
    result = {
        each.peer: unflatten(each.content.spec, came, device=comm.device) for each in exchange.received if each.peer in sources
    }
    if comm.rank in sources:
        # A sum touches the chain by the parts of the others; a loss made of this rank's own part alone would not.
        delegate_here = None if same_shapes or exchange.chain is None else exchange.delegate()
        result[comm.rank] = with_tensors(parts[comm.rank], lambda tensor: _own(tensor, delegate_here))
    return result, exchange.delegate()


def _own(tensor: torch.Tensor, delegate: torch.Tensor | None) -> torch.Tensor:
    """A copy of this rank's own part, so that a loss that needs nothing else brings backward to the collective."""
    return pseudo_connect(delegate, tensor)[0] if tensor.requires_grad else tensor.clone()


def one_for_each(operation: str, comm: AbstractCommunicator, xs: Sequence[Structure] | None) -> Sequence[Structure]:
    """`xs` if it has one part for each rank.

    Raises:
        InputError: it has not.
    """
    if not isinstance(xs, tuple | list):
        raise InputError(f"{operation}: xs is a {type(xs).__name__}; give a tuple or list with one part for each rank")
    if len(xs) != comm.size:
        raise InputError(f"{operation}: {len(xs)} parts for {comm.size} ranks; give one for each")
    return xs


def check_root(operation: str, comm: AbstractCommunicator, root: int) -> None:
    """Whether `root` is a rank.

    Raises:
        InputError: it is not.
    """
    if not 0 <= root < comm.size:
        raise InputError(f"{operation}: there is no rank {root}; this communicator has ranks 0 to {comm.size - 1}")


def agree(
    name: str, comm: AbstractCommunicator, *, root: int, pattern: Packed | None, same_shapes: bool, location: bytes
) -> None:
    """In debug mode, compare with all ranks.

    Raises:
        CommError: two ranks are about to do different things; names both.
    """
    if comm.size == 1 or not debugging():
        return
    channel = channel_of(comm)
    number = channel.peer_reports.begin_collective(name, root, location)
    peers = [rank for rank in range(comm.size) if rank != comm.rank]
    mine = packed(_intention(pattern, same_shapes=same_shapes))
    outgoing = [Outgoing(peer, number, mine, ()) for peer in peers]
    sources = [(peer, number) for peer in peers]
    meeting = Exchange(
        channel,
        name,
        kind=int(MessageKind.COLLECTIVE),
        tag=root,
        outgoing=outgoing,
        sources=sources,
        location=location,
        pattern=mine,
        same_shapes=True,
    )
    meeting.move(())


def _intention(pattern: Packed | None, *, same_shapes: bool) -> str:
    if pattern is None:
        return "anything"
    if same_shapes:
        return describe(pattern.spec)
    return ", ".join(str(leaf.dtype).removeprefix("torch.") for leaf in pattern.leaves)
