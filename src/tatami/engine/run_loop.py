"""The loop of a run on Ray: what its processes tell is handed on, who is silent or lost is found, and at last all are ended.

What follows from that is decided elsewhere, by a state machine; this only listens.
"""

from __future__ import annotations

from collections.abc import Callable

from tatami.clock import Clock
from tatami.engine.calls import Calls
from tatami.engine.crew import Crew
from tatami.engine.ray_watch import RayWatch
from tatami.engine.silence import Listening, look

_LONGEST_STEP_S = 0.1
"""A longer pause of this process counts as so long where silence is judged."""


class RunLoop:
    """The processes of one run, in `crews`, with the `calls` that are under way and the clock by which they are `listening`."""

    def __init__(self, *, clock: Clock, watch: RayWatch, tick_s: float) -> None:
        self.calls = Calls()
        self.listening = Listening(clock.now_s(), longest_step_s=_LONGEST_STEP_S)
        self.crews: list[Crew] = []
        self._clock, self._watch, self._tick_s = clock, watch, tick_s

    def step(self, *, is_over: Callable[[], bool], stopped: Callable[[str], Exception]) -> None:
        """Hand on what the processes have to tell, waiting `tick_s` where there is nothing, and who is silent or lost.

        Raises what `stopped` makes of the fault where Ray's own processes do not work any more.
        """
        if self._watch.fault is not None:
            raise stopped(self._watch.fault)

        def read(timeout_s: float = 0.0) -> bool:
            self.calls.wait(timeout_s=timeout_s, is_over=is_over)
            return not is_over()

        if read(self._tick_s):
            self.listening.advance(self._clock.now_s())
            look(self.crews, now_s=self.listening.now_s, read=read)
        for crew in self.crews:
            if not is_over():
                crew.look_for_lost_starts()

    def end(self) -> None:
        """End all processes, or keep them for the next run."""
        self.calls.clear()
        for crew in self.crews:
            if self._watch.fault is None:
                crew.end()
            else:
                crew.abandon()
