"""Where a run stands: what all parts of the coordinator read and change."""

from __future__ import annotations

from enum import Enum

from tatami.server import actions as act
from tatami.server.actions import Action


class RunPhase(Enum):
    """The step that a run is in."""

    STARTING = "starting"
    COLLECT = "collecting updates"
    SUM = "summing"
    APPLY = "applying"
    COPY = "copying shards to a new server"
    WRITE = "writing a checkpoint"
    READ = "reading a checkpoint"
    RESTART = "restarting servers"
    FETCH = "fetching the result"
    DONE = "done"


class Standing:
    """The standing of one run.

    Attributes:
        phase: what the servers do now.
        version: commits that are applied on all shards. In lockstep that is the number of rounds done.
        attempt: roll-backs so far; a push of an earlier attempt is void.
        ticket: the number of the latest order to the servers. Their answers to earlier orders are void.
        now_s: the time of the event that is being handled.
        roll_back: a death requires going back to the last checkpoint, which has not been read yet.
        stopping: how the run will stop, as soon as the state of its last commit is on disk; None while it goes on.
        actions: what the event that is being handled has led to so far.
    """

    def __init__(self, *, version: int) -> None:
        self.phase = RunPhase.STARTING
        self.version = version
        self.attempt = 0
        self.ticket = 0
        self.now_s = 0.0
        self.roll_back = False
        self.stopping: act.Stop | None = None
        self.actions: list[Action] = []

    def begin(self, phase: RunPhase) -> int:
        """Start what the servers do next; returns the ticket of the orders for it."""
        self.phase = phase
        self.ticket += 1
        return self.ticket

    def awaits(self, phase: RunPhase, ticket: int) -> bool:
        """Whether an answer with this ticket belongs to what the servers do now."""
        return self.phase is phase and self.ticket == ticket

    def do(self, *actions: Action) -> None:
        """Have these done next, in their order."""
        if any(isinstance(action, act.Finish | act.Stop) for action in actions):
            self.phase = RunPhase.DONE
        self.actions += actions
