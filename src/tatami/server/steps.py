"""What the servers are at."""

from __future__ import annotations

from enum import Enum


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
