"""What a rank is told by the run, and what it reports."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tatami.cluster import Link, Processor
from tatami.comm.rendezvous import Whereabouts
from tatami.membership import Dismiss, Entered, Leaving, Regroup, Restart, Stalled, Unbalanced


@dataclass(frozen=True, kw_only=True)
class Assignment:
    """What a process is told when it is started.

    Attributes:
        members: of its first group; this one alone where it joins a run.
        joins: it joins a run that is under way.
        store: host and port of the store by which groups are formed.
        token: by which the ranks of this run know each other there.
        timeout_s: how long an operation may wait for another rank.
        loopback: all processes are on this machine.
        retile: tiles follow the ranks' speeds.
    """

    name: str = ""
    members: tuple[str, ...] = ()
    joins: bool = False
    store: tuple[str, int]
    token: bytes
    timeout_s: float
    loopback: bool
    retile: bool


@dataclass(frozen=True, kw_only=True)
class RegroupOrder:
    """A change of the membership.

    Attributes:
        processors: of its members, in the order of the ranks.
        members: where they are, in the same order.
        token: by which they know each other when they connect.
    """

    change: Regroup
    processors: tuple[Processor, ...]
    members: tuple[Whereabouts, ...]
    token: bytes


Order = RegroupOrder | Restart | Dismiss


@dataclass(frozen=True, kw_only=True)
class EnteredLoop:
    """The script has come to its loop.

    Attributes:
        event: for the membership.
        stages: into how many pipeline stages the network is to be divided where there are as many ranks; None: as is fastest.
        whereabouts: of the rank.
        links: between hosts, as far as they are known.
    """

    event: Entered
    whereabouts: Whereabouts
    processor: Processor
    links: dict[tuple[str, str], Link]
    stages: int | None = None


@dataclass(frozen=True, kw_only=True)
class CarriedOut:
    """A change is done.

    Attributes:
        step: that is done next.
        settled: what became of the step that was open: "finished", "redone" or "none"; or "returned", to a checkpoint.
        steps_lost: that had been made since that checkpoint.
        spent_s: of the dropped step, until this rank noticed.
    """

    ticket: int
    step: int
    settled: str
    spent_s: float
    steps_lost: int


@dataclass(frozen=True, kw_only=True)
class ScriptEnded:
    """The script has come to its end; `value` is what its function returned."""

    value: Any


@dataclass(frozen=True, kw_only=True)
class ScriptFailed:
    """The script raised what no repair helps against.

    Attributes:
        trace: of the user's own lines.
        step: that was open, or would have come next; None before the loop.
    """

    error: BaseException
    trace: str
    step: int | None = None


@dataclass(frozen=True, kw_only=True)
class Said:
    """A line for the terminal."""

    text: str


@dataclass(frozen=True, kw_only=True)
class WantsLayout:
    """The ranks are not as fast as they were, and would be faster with the layout of `event`.

    Attributes:
        speeds: of each member, all in one unit.
    """

    event: Unbalanced
    speeds: dict[str, float]


Report = EnteredLoop | Stalled | Leaving | CarriedOut | ScriptEnded | ScriptFailed | Said | WantsLayout
"""What a rank reports of itself; where the membership needs no more than this, the event itself."""
