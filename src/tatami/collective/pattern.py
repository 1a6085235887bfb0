"""What a phase does in each of its groups: a pattern of steps, a native collective, or steps written out."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass

from tatami.collective.step import RankGroup, Role, Step


class AbstractPattern(ABC):
    """A rule that unrolls into the steps of a group. Final classes are frozen dataclasses: rules are data, compared as such."""

    @property
    @abstractmethod
    def role(self) -> Role:
        """What the pattern achieves."""

    @property
    @abstractmethod
    def title(self) -> str:
        """How tables call it."""

    def num_rounds(self, members: int) -> int:  # noqa: ARG002 - most patterns take one round with any number of members
        """Rounds in a group of so many ranks."""
        return 1

    @abstractmethod
    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        """The steps of one round in which member number `member` is source or target; those it issues in the order of issue."""

    def distinct_rounds(self, members: int) -> Iterator[tuple[int, int]]:
        """(round, how many rounds move as much, to an element, between the same ranks): all that a price must look at."""
        return ((round_, 1) for round_ in range(self.num_rounds(members)))


@dataclass(frozen=True, kw_only=True)
class Native:
    """The communicator's own collective."""

    role: Role

    @property
    def title(self) -> str:
        return f"native {self.role.value}"


@dataclass(frozen=True, kw_only=True)
class Explicit:
    """Steps written out, round by round."""

    role: Role
    rounds: tuple[tuple[Step, ...], ...]
    title: str = "explicit"
