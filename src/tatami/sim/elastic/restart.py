"""The same run, restarted from its last checkpoint at each death: what repair is compared with."""

from __future__ import annotations

import math

from tatami.errors import PlanError
from tatami.sim.elastic.elastic_setup import MOST_IN_VAIN, LossyRun, LossySetup, MachineEvents


def rehearse_restart(setup: LossySetup, *, seed: int) -> LossyRun:
    """Simulate one run, whose machines live as long as `seed` says.

    After a death the machines that are left start again. A machine that comes back interrupts no step: all machines finish
    their step, write a checkpoint, and start again with it.

    Raises:
        PlanError: there is no plan for the machines at the beginning.
    """
    return _Play(setup, seed=seed).run()


class _Play:
    def __init__(self, setup: LossySetup, *, seed: int) -> None:
        self._setup = setup
        self._seed = seed
        self._events = MachineEvents(setup, seed=seed)
        self._alive = self._events.first()
        self._waiting: set[str] = set()  # machines, until the end of the step
        self._steps, self._deaths, self._joins, self._in_vain = 0, 0, 0, 0
        self._now_s = self._useful_s = self._redone_s = self._stopped_s = self._saved_s = 0.0
        self._iteration_s = self._predicted_s()

    def run(self) -> LossyRun:
        ended: str | None = None
        while ended is None and self._steps < self._setup.iterations:
            if not self._train_to_checkpoint():
                ended = self._restart()
        return LossyRun(
            seed=self._seed,
            total_s=self._now_s,
            steps=self._steps,
            useful_s=self._useful_s,
            redone_s=self._redone_s,
            stopped_s=self._stopped_s,
            saved_s=self._saved_s,
            deaths=self._deaths,
            joins=self._joins,
            ended=ended,
        )

    def _train_to_checkpoint(self) -> bool:
        """From one checkpoint to the next, or to the end; whether all can go on from there without starting again."""
        self._pass_checkpoints()
        setup, began_s = self._setup, self._now_s
        steps = min(setup.checkpoint_steps, setup.iterations - self._steps)
        while True:
            is_last = self._steps + steps == setup.iterations
            saves_s = 0.0 if is_last else setup.checkpoint_s
            end_s = began_s + steps * self._iteration_s + saves_s
            if self._events.next_s >= end_s:
                break
            if self._strike():
                self._redone_s += self._now_s - began_s
                return False
            if self._waiting:
                steps = min(steps, math.floor((self._now_s - began_s) / self._iteration_s) + 1)
        self._now_s = end_s
        self._steps += steps
        self._useful_s += steps * self._iteration_s
        self._saved_s += saves_s
        self._in_vain = 0
        return is_last or not self._waiting

    def _pass_checkpoints(self) -> None:
        """All whole stretches between checkpoints at once that nothing happens in, but the last of the run."""
        setup = self._setup
        stretch_s = setup.checkpoint_steps * self._iteration_s + setup.checkpoint_s
        most = (setup.iterations - self._steps - 1) // setup.checkpoint_steps
        left_s = self._events.next_s - self._now_s
        whole = most if math.isinf(left_s) else min(most, max(0, math.floor(left_s / stretch_s)))
        if whole > 0:
            self._in_vain = 0
        self._now_s += whole * stretch_s
        self._steps += whole * setup.checkpoint_steps
        self._useful_s += whole * setup.checkpoint_steps * self._iteration_s
        self._saved_s += whole * setup.checkpoint_s

    def _restart(self) -> str | None:
        """All start again with the machines there are; why they cannot, where they cannot."""
        began_s = self._now_s
        ready_s = began_s + self._setup.restart_s
        self._in_vain += 1
        ended: str | None = None
        while self._events.next_s < ready_s or not self._alive:
            if self._in_vain > MOST_IN_VAIN:
                ended = f"{MOST_IN_VAIN} restarts in a row, and no checkpoint was written between them: machines live too short"
                break
            if math.isinf(self._events.next_s):
                ended = "no machine is left"
                break
            had_none = not self._alive
            self._waiting.clear()  # all that are there start together
            if self._strike() or had_none:
                self._in_vain += 1
                ready_s = self._now_s + self._setup.restart_s
        self._waiting.clear()
        if ended is not None:
            self._stopped_s += self._now_s - began_s
            return ended
        self._now_s = ready_s
        self._stopped_s += ready_s - began_s
        try:
            self._iteration_s = self._predicted_s()
        except PlanError as error:
            return f"for the machines that are left there is no plan: {error}"
        return None

    def _strike(self) -> bool:
        """A machine dies or joins; whether one died that trained."""
        event = self._events.take()
        self._now_s, name = event.at_s, event.processor.name
        if event.dies:
            self._deaths += 1
            del self._alive[name]
            was_in = name not in self._waiting
            self._waiting.discard(name)
            return was_in
        self._joins += 1
        self._alive[name] = event.processor
        self._waiting.add(name)
        return False

    def _predicted_s(self) -> float:
        processors = tuple(self._alive.values())
        return self._setup.iteration_s(self._setup.lay(processors), processors)
