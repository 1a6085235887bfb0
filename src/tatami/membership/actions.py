"""What the membership asks for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Any

from tatami.membership.copies import Mirror, Take
from tatami.tiling import Layout, StagedLayout


class EndCause(Enum):
    """Why a run is stopped."""

    UNITS_LOST = "units lost"
    NO_MEMBERS = "no members"
    CANNOT_PLAN = "cannot plan"
    STALLED = "stalled"
    OUT_OF_STEP = "out of step"


@dataclass(frozen=True, kw_only=True)
class Ask:
    """Have these members stop between two sections, all at the same place. Nothing that is under way is lost."""

    members: tuple[str, ...]
    ticket: int


@dataclass(frozen=True, kw_only=True)
class Abort:
    """Break all connections of these members at once, and have them stop where they are."""

    members: tuple[str, ...]
    ticket: int


@dataclass(frozen=True, kw_only=True)
class Kill:
    """End this process: it counts as dead, and must not come back."""

    member: str


@dataclass(frozen=True, kw_only=True)
class Release:
    """This member is not needed any more; it leaves in good order."""

    member: str


@dataclass(frozen=True, kw_only=True)
class Restart:
    """These members form a group and begin their scripts again: before the first section, or where units are lost.

    Attributes:
        returns: with no section passed, as what they hold is dropped.
        resumes: there is a checkpoint of this run, from which they go on then.
    """

    ticket: int
    group: int
    members: tuple[str, ...]
    returns: bool = False
    resumes: bool = False


@dataclass(frozen=True, kw_only=True)
class Regroup:
    """Finish or redo what is open, form a group, and lay out the work in another way. For all `members`.

    Attributes:
        ticket: to be named when it is done.
        group: number of the new group of connections.
        members: in the order of their ranks.
        sections: that all have passed when the open one is settled.
        finish: members that commit their open section with `outcome`; all others drop what they have begun, and redo it.
        newcomers: members that have nothing yet.
        source: the member that tells newcomers what all members have in common.
        layout: from now on.
        mirrors: who keeps a copy of whose units from now on.
        takes: the rows that each member fills, and from whom.
        reason: of the change, for the report.
    """

    ticket: int
    group: int
    members: tuple[str, ...]
    sections: int
    finish: tuple[str, ...]
    outcome: Any
    newcomers: tuple[str, ...]
    source: str
    layout: Layout | StagedLayout
    mirrors: tuple[Mirror, ...]
    takes: tuple[Take, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Dismiss:
    """Some members have come to the end of their scripts, past all sections: the others finish theirs, and go on alone."""

    ticket: int
    members: tuple[str, ...]
    finish: tuple[str, ...]
    sections: int
    outcome: Any


@dataclass(frozen=True, kw_only=True)
class EndRun:
    """End the run; it cannot go on."""

    cause: EndCause
    reason: str


Action = Ask | Abort | Kill | Release | Restart | Regroup | Dismiss | EndRun
