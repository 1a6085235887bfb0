"""Who is in a tiled run, and what follows from deaths, joins and departures: events in, actions out."""

from tatami.membership.actions import Abort, Action, Ask, Dismiss, EndCause, EndRun, Kill, Regroup, Release, Restart
from tatami.membership.copies import Held, Lost, Mirror, Take, mirrors_of, takes
from tatami.membership.events import Died, Ended, Entered, Halted, Laid, Leaving, MemberEvent, Silent, Stalled, Unbalanced
from tatami.membership.state import Membership, RunStage

__all__ = [
    "Abort",
    "Action",
    "Ask",
    "Died",
    "Dismiss",
    "EndCause",
    "EndRun",
    "Ended",
    "Entered",
    "Halted",
    "Held",
    "Kill",
    "Laid",
    "Leaving",
    "Lost",
    "MemberEvent",
    "Membership",
    "Mirror",
    "Regroup",
    "Release",
    "Restart",
    "RunStage",
    "Silent",
    "Stalled",
    "Take",
    "Unbalanced",
    "mirrors_of",
    "takes",
]
