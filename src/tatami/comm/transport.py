"""How the tensors of a group of ranks travel, by where they lie: a pure decision, the same on every rank.

    NCCL         collectives among ranks on CUDA devices of their own, under torch.distributed
    MPI          messages among them, where the MPI library itself says that it takes CUDA memory
    HOST         everything else: through host memory, which for tensors of the CPU is where they lie

One rank on a CPU, or two on one card (NCCL takes one rank a card), and the whole group goes through host memory: a collective
is carried out by one library or by none. So the decision is over all places, and every rank must come to the same.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from tatami.comm.stall_report import format_ranks


class Transport(Enum):
    """What carries device memory from rank to rank."""

    HOST = "host memory"
    NCCL = "NCCL"
    MPI = "CUDA-aware MPI"


@dataclass(frozen=True, kw_only=True)
class DevicePlace:
    """Where the tensors of a rank lie, and what could take them from there.

    Attributes:
        host: its machine.
        kind: of the device, as torch names it: "cpu", "cuda".
        card: which one, by a name that no other card of any host has; None on a CPU.
        name: what the card is called, for people.
        has_nccl: whether the rank's library of communication can run NCCL.
        mpi_takes_cuda: whether its MPI library says that it takes CUDA memory.
    """

    host: str
    kind: str = "cpu"
    card: str | None = None
    name: str = ""
    has_nccl: bool = False
    mpi_takes_cuda: bool = False


@dataclass(frozen=True, kw_only=True)
class Route:
    """How a group of ranks moves device memory.

    Attributes:
        transport: what carries it.
        why: in a few words.
        hint: what would be faster; empty where there is nothing to be said.
    """

    transport: Transport
    why: str
    hint: str = ""


def choose_route(places: Sequence[DevicePlace]) -> Route:
    """The route of the ranks at `places`, in their order."""
    host = Transport.HOST
    on_cpu = [rank for rank, place in enumerate(places) if place.kind == "cpu"]
    if len(on_cpu) == len(places):
        return Route(transport=host, why="all ranks compute on CPUs")
    if len(places) == 1:
        return Route(transport=host, why="there is one rank")
    if on_cpu:
        verb = "computes" if len(on_cpu) == 1 else "compute"
        return Route(transport=host, why=f"{format_ranks(on_cpu)} of {len(places)} {verb} on a CPU")
    other = [rank for rank, place in enumerate(places) if place.kind != "cuda"]
    if other:
        return Route(transport=host, why=f"{format_ranks(other)}: a device of kind {places[other[0]].kind!r}")
    shared = _sharing(places)
    if shared:
        return Route(
            transport=host,
            why=f"{format_ranks(shared)} share one card, and NCCL takes one rank a card",
            hint="start as many ranks on each host as it has cards",
        )
    without = [rank for rank, place in enumerate(places) if not place.has_nccl]
    if not without:
        return Route(transport=Transport.NCCL, why="every rank has a card of its own")
    if all(place.mpi_takes_cuda for place in places):
        return Route(transport=Transport.MPI, why="the MPI library says that it takes CUDA memory")
    return Route(
        transport=host,
        why=f"{format_ranks(without)} cannot run NCCL",
        hint="start the ranks with torchrun, where torch has NCCL",
    )


def _sharing(places: Sequence[DevicePlace]) -> list[int]:
    """The ranks of the first card that several have."""
    for place in places:
        ranks = [rank for rank, other in enumerate(places) if other.card == place.card]
        if len(ranks) > 1:
            return ranks
    return []


def describe_route(places: Sequence[DevicePlace], route: Route, *, library: str) -> str:
    """In sentences, for people: where the ranks compute, and how their tensors travel."""
    kinds: dict[str, list[int]] = {}
    for rank, place in enumerate(places):
        kinds.setdefault(place.name or place.kind, []).append(rank)
    where = "; ".join(f"{name}: {format_ranks(ranks)}" for name, ranks in kinds.items())
    ways = {
        Transport.HOST: "tensors go through host memory",
        Transport.NCCL: "collectives of device tensors by NCCL, messages through pinned host memory",
        Transport.MPI: "messages of device tensors by CUDA-aware MPI, collectives through pinned host memory",
    }
    hint = f" Faster: {route.hint}." if route.hint else ""
    return f"{len(places)} ranks by {library}. {where}. {ways[route.transport].capitalize()}: {route.why}.{hint}"
