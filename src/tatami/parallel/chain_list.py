"""A network of parts on several ranks: each part says which ranks its inputs come from and where its output goes."""

from __future__ import annotations

from collections import Counter, defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tatami import functions
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.functions.point_to_point import MAX_MESSAGE_TAG
from tatami.parallel.spanning import AbstractSpanning, check_rank, connected, one_each

Ranks = int | Sequence[int] | None


@dataclass(frozen=True, kw_only=True)
class _Ports:
    """Where a part's inputs come from and where its output goes: pairs of a rank and a tag, None for outside of the list."""

    inputs: tuple[tuple[int, int], ...] | None
    outputs: tuple[tuple[int, int], ...] | None


class MultiNodeChainList(AbstractSpanning):
    """The parts of this rank, run in the order in which they were added.

        class First(MultiNodeChainList):                 # on rank 0
            def __init__(self, comm):
                super().__init__(comm)
                self.add_link(nn.Linear(784, 100), rank_out=1)
                self.add_link(nn.Linear(100, 10), rank_in=1)

        class Second(MultiNodeChainList):                # on rank 1
            def __init__(self, comm):
                super().__init__(comm)
                self.add_link(nn.Linear(100, 100), rank_in=0, rank_out=0)

    A rank with a loss ends its pass with `loss.backward()`, the others with `tatami.functions.backward()`. No delegates are
    needed, and backward may begin from any part of the output.

    Attributes:
        comm: the ranks.
        links: the parts.
    """

    def __init__(self, comm: AbstractCommunicator) -> None:
        super().__init__()
        self.comm = comm
        self.links = nn.ModuleList()
        self._ports: list[_Ports] = []

    def add_link(
        self,
        link: nn.Module,
        *,
        rank_in: Ranks = None,
        rank_out: Ranks = None,
        tag_in: int | Sequence[int] = 0,
        tag_out: int | Sequence[int] = 0,
    ) -> None:
        """Add a part.

        Args:
            link: called with one argument for each rank of `rank_in`, what that rank sent: a tensor, or a structure of them.
            rank_in: the ranks that its inputs come from, in their order; None for the inputs of the model, all of them.
                This rank itself stands for the output of an earlier part, oldest first.
            rank_out: the ranks that its output goes to; None for the output of the model.
            tag_in: of the messages of `rank_in`: one, or one for each. Messages of the same ranks and tag keep their order.
            tag_out: of those to `rank_out`.

        Raises:
            InputError: no ranks, or some that are not there; tags out of range, too few or too many; a second part whose
                output is that of the model.
        """
        ports = _Ports(
            inputs=self._pairs("rank_in", rank_in, "tag_in", tag_in),
            outputs=self._pairs("rank_out", rank_out, "tag_out", tag_out),
        )
        if ports.outputs is None and any(each.outputs is None for each in self._ports):
            raise InputError(
                f"part {len(self._ports)} is the second without rank_out on rank {self.comm.rank}; only one part gives the "
                "output of the model. Send the other one's on, to this rank itself if need be"
            )
        self.links.append(link)
        self._ports.append(ports)

    def forward(self, *inputs: Any) -> Any:
        """Run all parts.

        Args:
            inputs: of the model, for the parts without `rank_in`.

        Returns:
            the output of the model; on a rank without one a delegate, as `tatami.functions.send` returns it.

        Raises:
            InputError: no parts; one that takes what no earlier part has left for it, or leaves what is not taken.
            CommError: ranks disagree; CommTimeoutError, RankDiedError, ClosedError.
        """
        self._check_own_edges()
        own: defaultdict[int, deque[Any]] = defaultdict(deque)
        output: Any = None
        delegate: torch.Tensor | None = None
        for link, ports in zip(self.links, self._ports, strict=True):
            taken = inputs if ports.inputs is None else [self._take(rank, tag, own[tag]) for rank, tag in ports.inputs]
            result = link(*taken)
            if ports.outputs is None:
                output = result
                continue
            for rank, tag in ports.outputs:
                if rank == self.comm.rank:
                    own[tag].append(result)
                else:
                    delegate = functions.send(result, self.comm, dest=rank, tag=tag)
        if all(ports.outputs is not None for ports in self._ports):
            return torch.zeros((), dtype=torch.float32, device="cpu") if delegate is None else delegate
        return connected(delegate, output)

    def _pairs(self, what: str, ranks: Ranks, tags_what: str, tags: int | Sequence[int]) -> tuple[tuple[int, int], ...] | None:
        if ranks is None:
            return None
        listed = (ranks,) if isinstance(ranks, int) else tuple(ranks)
        if not listed:
            raise InputError(f"{what} is empty; name at least one rank, or None for what comes from or goes to the outside")
        for rank in listed:
            check_rank(what, self.comm, rank)
        paired = one_each(tags_what, tags, number=len(listed))
        for tag in paired:
            if not 0 <= tag <= MAX_MESSAGE_TAG:
                raise InputError(f"{tags_what}: tag {tag} is not between 0 and {MAX_MESSAGE_TAG}")
        return tuple(zip(listed, paired, strict=True))

    def _take(self, rank: int, tag: int, own: deque[Any]) -> Any:
        return own.popleft() if rank == self.comm.rank else functions.recv(self.comm, source=rank, tag=tag)

    def _check_own_edges(self) -> None:
        """Before anything is sent: what this rank leaves for itself must fit together."""
        here = self.comm.rank
        if not self._ports:
            raise InputError(f"this MultiNodeChainList has no parts on rank {here}; add them with add_link")
        waiting: Counter[int] = Counter()
        for number, ports in enumerate(self._ports):
            for rank, tag in ports.inputs or ():
                if rank == here:
                    waiting[tag] -= 1
                    if waiting[tag] < 0:
                        raise InputError(
                            f"part {number} takes an input from its own rank {here} with tag {tag}, but no part before it has "
                            "left one; add a part with rank_out of this rank first"
                        )
            waiting.update(tag for rank, tag in ports.outputs or () if rank == here)
        for tag, number in waiting.items():
            if number:
                raise InputError(
                    f"{number} outputs to the own rank {here} with tag {tag} are taken by no later part; rank_in and rank_out "
                    "must correspond"
                )
