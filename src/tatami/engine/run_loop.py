"""One run on Ray: events of its processes go to a state machine, its actions are carried out, and at last all processes end.

What follows from an event is decided by the state machine, which knows no Ray and has no clock.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Generic, TypeVar

from tatami.clock import Clock
from tatami.engine.calls import Calls
from tatami.engine.crew import Crew, CrewTerms, Pool
from tatami.engine.nodes import Nodes
from tatami.engine.ray_watch import RayWatch
from tatami.engine.silence import Listening, RunClock, look

_LONGEST_STEP_S = 0.1
"""A longer pause of this process counts as so long where silence is judged."""

_Event = TypeVar("_Event")
_Action = TypeVar("_Action")


class AbstractRun(ABC, Generic[_Event, _Action]):
    """One run: `_play` starts its processes and goes round until it is over.

    Args:
        handle: gives an event to the state machine, and returns the actions that answer it, in their order.
        watch: of Ray's own processes.
        nodes: where processes are started.
        heartbeat_s: a process that is silent for longer is reported as late.
        tick_s: a turn waits so long where the processes have nothing to report.
    """

    def __init__(
        self,
        handle: Callable[[_Event], Iterable[_Action]],
        *,
        clock: Clock,
        watch: RayWatch,
        nodes: Nodes,
        heartbeat_s: float,
        pool: Pool | None,
        tick_s: float,
    ) -> None:
        self._handle, self._watch, self._tick_s = handle, watch, tick_s
        self._system_clock, self._clock = clock, RunClock(clock)
        self._calls = Calls()
        self._listening = Listening(clock.now_s(), longest_step_s=_LONGEST_STEP_S)
        self._crew_terms = CrewTerms(
            calls=self._calls,
            nodes=nodes,
            now_s=self._clock.now_s,
            listening=self._listening,
            heartbeat_s=heartbeat_s,
            pool=pool,
        )

    @property
    @abstractmethod
    def _crews(self) -> Sequence[Crew[Any]]:
        """All crews of the run."""

    @abstractmethod
    def _begin(self) -> None:
        """Start the first processes."""

    @abstractmethod
    def _carry_out(self, action: _Action) -> None:
        """Do what the state machine has ordered."""

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether nothing is left to be done; once it is, it stays so."""

    @abstractmethod
    def _stopped(self, reason: str) -> Exception:
        """The error that ends the run for this reason."""

    def _play(self) -> None:
        """To the end of the run; all processes end then, or are kept for the next one.

        Raises:
            TrainingError: Ray's own processes do not work any more.
        """
        try:
            self._begin()
            while not self._is_over():
                self._turn()
        finally:
            self._calls.clear()
            for crew in self._crews:
                if self._watch.fault is None:
                    crew.end()
                else:
                    crew.abandon()

    def _turn(self) -> None:
        """Take what the processes report, waiting a moment where there is nothing; then look for the silent and the lost."""
        if self._watch.fault is not None:
            raise self._stopped(self._watch.fault)

        def read(timeout_s: float = 0.0) -> bool:
            self._calls.wait(timeout_s=timeout_s, is_over=self._is_over)
            return not self._is_over()

        if read(self._tick_s):
            self._listening.advance(self._system_clock.now_s())
            look(self._crews, now_s=self._listening.now_s, read=read)
        for crew in self._crews:
            if not self._is_over():
                crew.look_for_lost_starts()

    def _tell(self, event: _Event) -> None:
        """Hand an event to the state machine, and carry out what it orders."""
        for action in self._handle(event):
            self._carry_out(action)
