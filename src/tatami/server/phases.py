"""Moments in a worker's task that tests and rehearsals hook into."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class TaskPhase(Enum):
    """Where in a task a worker is."""

    PULL = "in the pull"
    BEFORE_COMPUTE = "before compute"
    COMPUTE = "in compute"
    BETWEEN_SHARDS = "between two shards of a push"
    AFTER_PUSH = "after the push"


PhaseHook = Callable[[TaskPhase, int, int], None]
"""Called in the worker's process with the phase, the process number and the round."""
