"""The numbers of an elastic run, and where it takes place: what the command line builds, and `run_elastic` takes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Protocol

from tatami.clock import Clock, SystemClock
from tatami.errors import InputError
from tatami.report.elastic_run import ElasticReport, MemberChange
from tatami.tiling import DEFAULT_PLANNER

if TYPE_CHECKING:
    from tatami.engine.crew import Pool


MOST_STARTING = 16
"""Ranks that may be starting: a program that adds ranks until enough are members would add without end."""


@dataclass(frozen=True, kw_only=True)
class ElasticSettings:
    """How a run is run; its report keeps them.

    Attributes:
        ranks: to begin with, one process each.
        copies: holders that every unit has at least, so that the death of copies - 1 ranks at once loses nothing: 1, or 2.
        planner: lays out the work after a change; see `tatami.plan`.
        heartbeat_s: a rank that gives no sign of life for longer counts as dead. A rank that is stopped is noticed by this.
        patience_s: so long a rank may take to stop, or to carry out a change; after that it counts as dead, too.
        timeout_s: so long an operation waits for another rank.
        retile: tiles follow the ranks' speeds, by the rule of `tatami.retiling.Retiler()`; a rank that is best left out waits
            without a tile until it is faster, or leaves where it would delay every message.

    Raises:
        InputError: invalid numbers.
    """

    ranks: int
    copies: int = 2
    planner: str = DEFAULT_PLANNER
    heartbeat_s: float = 10.0
    patience_s: float = 60.0
    timeout_s: float = 60.0
    retile: bool = False

    def __post_init__(self) -> None:
        for name in ("heartbeat_s", "patience_s", "timeout_s"):
            if not getattr(self, name) > 0:
                raise InputError(f"{name} must be more than 0 seconds, not {getattr(self, name)}")
        if self.ranks < 1:
            raise InputError(f"ranks must be at least 1, not {self.ranks}")
        if self.copies not in (1, 2):
            raise InputError(f"copies must be 1 or 2, not {self.copies}")


class ElasticControl(Protocol):
    """What may be changed in a run while it goes on, in what `ElasticContext` names: it is called by the run itself."""

    @property
    def members(self) -> tuple[str, ...]:
        """Names, in the order of the ranks."""

    @property
    def starting(self) -> tuple[str, ...]:
        """Names of the ranks that `add` has asked for and that are not members yet, in the order in which they were added."""

    def add(self) -> str:
        """Have one more rank, from the step after its process is up. Returns its name.

        Some processes are started at a time, the next ones as these are up.

        Raises:
            InputError: `MOST_STARTING` ranks are starting already.
        """

    def remove(self, name: str) -> None:
        """Let a rank go between two steps; no sample and no row is lost. One that is starting is ended at once."""


@dataclass(frozen=True, kw_only=True)
class ElasticContext:
    """The surroundings of one call of `run_elastic`; none of it changes what is computed.

    Attributes:
        address: of a Ray cluster; None starts Ray on this machine for the run.
        on_change: told of every change of the members, in this process.
        on_line: given the name of a rank and every line that it prints.
        on_process: given the name of a rank that has come to its loop, the number of its process, and the host.
        on_start: given the run's control before the ranks are started; to be used in `on_change` and `on_line`.
        on_end: given the report when the run has ended, also where an error or Ctrl-C has ended it.
        hook: see `tatami.elastic.settings`.
        pool: keeps the processes of runs that have ended for the next one.
        clock: of the run's process.
    """

    address: str | None = None
    on_change: Callable[[MemberChange], None] | None = None
    on_line: Callable[[str, str], None] | None = None
    on_process: Callable[[str, int, str], None] | None = None
    on_start: Callable[[ElasticControl], None] | None = None
    on_end: Callable[[ElasticReport], None] | None = None
    hook: Callable[[Moment, str, int], None] | None = None
    pool: Pool | None = None
    clock: Clock = field(default_factory=SystemClock)


class Moment(Enum):
    """What a rank is about to do."""

    BEFORE_FORWARD = "before forward"
    FORWARD = "forward"
    TENSOR_PARALLEL = "tensor_parallel"
    HANDOVER = "waiting for another stage"
    BACKWARD = "backward"
    GRADIENTS = "gradients"
    BEFORE_POINT = "before the point"
    BEFORE_UPDATE = "before the update"
    IN_UPDATE = "in the update"
    AFTER_UPDATE = "after the update"
    FORMING = "forming a group"
    TAKING = "taking rows"
    LAYING = "before all have their rows"
    LAID = "after the change"


MomentHook = Callable[[Moment, str, int], None]
"""Called in the rank's process with the moment, the member's name, and the number of the step."""
