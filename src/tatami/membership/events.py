"""What the membership is told. Each event names the member that it is about.

A rank's work is a sequence of *sections*: a training step, an evaluation, a change of the membership. A section has a body,
which may be done again, a point, which no rank passes before all have completed the body, and a commit, which sends nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tatami.tiling import Layout, StagedLayout
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class _OfMember:
    member: str


@dataclass(frozen=True, kw_only=True)
class Entered(_OfMember):
    """Its script has come to its loop, and it waits to be let in. A process that joins the run says no more than this.

    Attributes:
        group: that it was in when its script began; of a process that joins, none.
        layout: that the first members have been tiled by; not looked at later.
        workload: the blocks whose units are split; the same for all.
        shards: each rank keeps the optimizer's state of its shard of the weights, and no other rank has it.
    """

    group: int | None
    layout: Layout | StagedLayout
    workload: Workload
    shards: bool = False


@dataclass(frozen=True, kw_only=True)
class Leaving(_OfMember):
    """It is asked to leave, or asks to; `because` is for the report, and may be empty."""

    because: str = ""


@dataclass(frozen=True, kw_only=True)
class Unbalanced(_OfMember):
    """The members are not as fast as they were: it asks for another layout, in which some may have no tile.

    `because` is for the report.
    """

    layout: Layout | StagedLayout
    because: str


@dataclass(frozen=True, kw_only=True)
class Died(_OfMember):
    """Its process is gone."""


@dataclass(frozen=True, kw_only=True)
class Silent(_OfMember):
    """It gives no sign of life, or does not do what it is told; it may come back, and must not."""


@dataclass(frozen=True, kw_only=True)
class Stalled(_OfMember):
    """Its communication failed or took too long, and it has stopped.

    Attributes:
        group: that it was a member of then.
    """

    group: int
    reason: str


@dataclass(frozen=True, kw_only=True)
class Halted(_OfMember):
    """It has stopped, as it was told to.

    Attributes:
        ticket: of the order.
        sections: whose point it has passed, so many in all.
        outcome: what the last of them gave; the same for all who pass it.
        ended: its script has come to its end.
        admits: newcomers may begin where it is: in a step, or between two.
        has_checkpoint: there is one of all of training, which any ranks can go on from.
        is_half_done: its last commit failed, as one may that sends weights (with a sharded optimizer).
    """

    ticket: int
    sections: int
    outcome: Any = None
    ended: bool = False
    admits: bool = True
    has_checkpoint: bool = False
    is_half_done: bool = False


@dataclass(frozen=True, kw_only=True)
class Laid(_OfMember):
    """It has carried out the change with this ticket."""

    ticket: int


@dataclass(frozen=True, kw_only=True)
class Ended(_OfMember):
    """Its script has come to its end."""


MemberEvent = Entered | Leaving | Unbalanced | Died | Silent | Stalled | Halted | Laid | Ended
