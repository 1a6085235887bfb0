"""The communicators of a schedule's groups: made once, together, by all ranks."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from tatami.comm.base import AbstractCommunicator
from tatami.errors import ScheduleError

Ranks = tuple[int, ...]


class GroupCommunicators:
    """Parts of a communicator, by their ranks. All ranks must ask for the same groups in the same order."""

    def __init__(self, comm: AbstractCommunicator) -> None:
        self._comm = comm
        self._everyone = tuple(range(comm.size))
        self._parts: dict[Ranks, AbstractCommunicator | None] = {}

    def make(self, groups: Iterable[Ranks]) -> None:
        """Make those that are not there yet; disjoint ones by one split. Collective."""
        wanted = dict.fromkeys(ranks for ranks in groups if ranks not in self._parts and ranks != self._everyone)
        for layer in _layers(list(wanted)):
            mine = next((index for index, ranks in enumerate(layer) if self._comm.rank in ranks), None)
            key = layer[mine].index(self._comm.rank) if mine is not None else 0
            part = self._comm.split(mine, key=key)
            for index, ranks in enumerate(layer):
                self._parts[ranks] = part if index == mine else None

    def of(self, ranks: Ranks) -> AbstractCommunicator:
        """The communicator of a group that this rank is in; member i of the group is its rank i.

        Raises:
            ScheduleError: this rank is not in the group.
        """
        part = self._comm if ranks == self._everyone else self._parts[ranks]
        if part is None:
            raise ScheduleError(f"rank {self._comm.rank} is not in the group {ranks}")
        return part

    def close(self) -> None:
        """Give them back. Collective."""
        for part in self._parts.values():
            if part is not None:
                part.close()
        self._parts.clear()


def _layers(groups: Sequence[Ranks]) -> list[list[Ranks]]:
    """Groups put together so that no two of a layer share a rank."""
    layers: list[tuple[list[Ranks], set[int]]] = []
    for ranks in groups:
        for layer, taken in layers:
            if taken.isdisjoint(ranks):
                layer.append(ranks)
                taken.update(ranks)
                break
        else:
            layers.append(([ranks], set(ranks)))
    return [layer for layer, _ in layers]
