"""Ranks that leave and join: the same communicator before and after, over new connections each time."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Self, final

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.comm.wrapper import WrappedCommunicator


@final
class ElasticCommunicator(WrappedCommunicator):
    """The members of an elastic run. What is made by `split` has the members of that moment, and breaks with their group.

    Args:
        inner: the members now.
        names: of the members, in the order of their ranks; they stay the same from group to group.
    """

    def __init__(self, inner: AbstractCommunicator, *, names: Sequence[str]) -> None:
        super().__init__(inner)
        self.names = tuple(names)
        self._duplicates: list[ElasticCommunicator] = []
        self._of: ElasticCommunicator | None = None
        self._group = 0

    @property
    def changes(self) -> bool:
        return True

    @property
    def group(self) -> int:
        return self._group

    def regroup(self, inner: AbstractCommunicator, *, names: Sequence[str]) -> None:
        """From now on the members are the ranks of `inner`; its duplicates' too. Collective among them.

        All members have made the same number of duplicates by then, as they run the same script.
        """
        inner.timeout_s = self.timeout_s
        for duplicate in self._duplicates:
            duplicate.regroup(inner.duplicate(), names=names)
        self.inner, self.names = inner, tuple(names)
        self._group += 1

    def forget(self) -> None:
        """The script begins again, and makes its duplicates again."""
        self._duplicates.clear()

    def duplicate(self) -> Self:
        other = ElasticCommunicator(self.inner.duplicate(), names=self.names)
        self._duplicates.append(other)
        other._of = self
        return other

    def close(self) -> None:
        super().close()
        if self._of is not None and self in self._of._duplicates:
            self._of._duplicates.remove(self)

    def split(self, color: int | None, *, key: int = 0) -> AbstractCommunicator | None:  # type: ignore[override]
        return self.inner.split(color, key=key)

    def subgroup(self, ranks: Sequence[int]) -> AbstractCommunicator | None:
        return self.inner.subgroup(ranks)

    def _before(self, operation: str, *, peer: int | None = None, tensor: torch.Tensor | None = None) -> None: ...

    def _wrap(self, part: AbstractCommunicator) -> Self:
        raise AssertionError(f"{part} is not wrapped: `split` hands it out as it is")


_world: list[ElasticCommunicator] = []


def elastic_world() -> ElasticCommunicator | None:
    """The members of the elastic run that this process belongs to; None where it belongs to none."""
    return _world[0] if _world else None


def set_elastic_world(world: ElasticCommunicator | None) -> None:
    """Called by the run, in each of its processes, before the script begins."""
    _world[:] = [] if world is None else [world]
