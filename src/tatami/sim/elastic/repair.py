"""A tiled run that is repaired: the library's own `Membership`, told of simulated deaths and joins, and obeyed."""

from __future__ import annotations

import math
from collections import defaultdict
from dataclasses import replace
from enum import Enum

from tatami.membership import Abort, Ask, Died, EndRun, Entered, Halted, Laid, MemberEvent, Membership, Regroup
from tatami.retiling.options import carried_s
from tatami.sim.elastic.elastic_setup import MOST_IN_VAIN, LossyRun, LossySetup, MachineEvents
from tatami.tiling import Layout


def rehearse_repair(setup: LossySetup, *, seed: int) -> LossyRun:
    """Simulate one run, whose machines live as long as `seed` says.

    Raises:
        PlanError: there is no plan for the machines at the beginning.
    """
    return _Play(setup, seed=seed).run()


class _Doing(Enum):
    TRAINING = "training"
    ASKED = "asked"  # they stop at the end of the step
    HALTING = "halting"
    CHANGING = "changing"


class _Play:
    """One run. All ranks of it are at the same place at any time, as steps of a tiled run are in lockstep."""

    def __init__(self, setup: LossySetup, *, seed: int) -> None:
        self._setup = setup
        self._workload = replace(setup.workload, pieces=())  # it lays no pipeline stages
        self._seed = seed
        self._events = MachineEvents(setup, seed=seed)
        self._processors = self._events.first()
        names = tuple(self._processors)
        self._machine = Membership(names, plan=self._plan, copies=setup.copies)
        self._doing = _Doing.CHANGING
        self._until_s = 0.0  # when what they do is done
        self._began_s = 0.0  # the open step
        self._broken_s: float | None = None  # when the open step was broken off
        self._sections = 0
        self._told: tuple[str, ...] = names
        self._ticket = 0
        self._iteration_s = 0.0
        self._in_vain = 0
        self._ended: str | None = None
        self._steps, self._deaths, self._joins = 0, 0, 0
        self._useful_s = self._redone_s = self._moved_s = 0.0
        self._moving_from_s = 0.0
        self._now_s = 0.0
        layout = self._plan(names)
        for name in names:
            self._tell(Entered(member=name, group=0, layout=layout, workload=self._workload))
        self._until_s = 0.0  # all have the same weights from the same seed: to begin costs no rows
        self._done()

    def run(self) -> LossyRun:
        while self._ended is None and self._steps < self._setup.iterations:
            if self._doing is _Doing.TRAINING:
                self._train()
            if self._steps == self._setup.iterations:
                break
            if self._events.next_s < self._until_s:
                self._strike()
            else:
                self._now_s = self._until_s
                self._done()
        stopped_s = self._now_s - self._useful_s - self._redone_s - self._moved_s
        return LossyRun(
            seed=self._seed,
            total_s=self._now_s,
            steps=self._steps,
            useful_s=self._useful_s,
            redone_s=self._redone_s,
            stopped_s=max(0.0, stopped_s),
            moved_s=self._moved_s,
            deaths=self._deaths,
            joins=self._joins,
            ended=self._ended,
        )

    def _train(self) -> None:
        """Do all steps at once that end before the next event; the step after them is open then."""
        left_s = self._events.next_s - self._began_s
        left = self._setup.iterations - self._steps
        whole = left if math.isinf(left_s) else min(left, max(0, math.floor(left_s / self._iteration_s)))
        if whole > 0:
            self._in_vain = 0
        self._steps += whole
        self._sections += whole
        self._useful_s += whole * self._iteration_s
        self._began_s += whole * self._iteration_s
        self._now_s = self._began_s
        self._until_s = self._began_s + self._iteration_s

    def _strike(self) -> None:
        """A machine dies or joins."""
        event = self._events.take()
        self._now_s = event.at_s
        name = event.processor.name
        if event.dies:
            self._deaths += 1
            self._tell(Died(member=name))
            return
        self._joins += 1
        self._processors[name] = event.processor
        held = self._machine.held
        assert held is not None
        self._tell(Entered(member=name, group=None, layout=held.layout, workload=self._workload))

    def _done(self) -> None:
        """Report, as the ranks do, that what they did is done."""
        match self._doing:
            case _Doing.TRAINING | _Doing.ASKED:
                self._finish_step()
                if self._doing is _Doing.ASKED and self._steps < self._setup.iterations:
                    self._say_halted(self._sections)
            case _Doing.HALTING:
                broken_s, self._broken_s = self._broken_s, None
                passed = broken_s is not None and self._has_passed(broken_s)
                if broken_s is not None and not passed:
                    self._redone_s += max(0.0, broken_s - self._began_s)
                self._say_halted(self._sections + passed)
            case _Doing.CHANGING:
                self._moved_s += self._now_s - self._moving_from_s
                self._doing, self._began_s = _Doing.TRAINING, self._now_s
                self._until_s = self._now_s + self._iteration_s
                for name in self._told:
                    self._tell(Laid(member=name, ticket=self._ticket))
                self._sections = self._machine.sections

    def _finish_step(self) -> None:
        self._steps += 1
        self._sections += 1
        self._useful_s += self._iteration_s
        self._began_s = self._until_s
        self._in_vain = 0

    def _has_passed(self, at_s: float) -> bool:
        """Whether the open step was past its point: all had all gradients."""
        return at_s >= self._began_s + (1 - self._setup.update_fraction) * self._iteration_s

    def _say_halted(self, sections: int) -> None:
        for name in self._told:
            self._tell(Halted(member=name, ticket=self._ticket, sections=sections))

    # -- the membership's orders ----------------------------------------------------------------------------------

    def _tell(self, event: MemberEvent) -> None:
        for action in self._machine.handle(event):
            match action:
                case Ask():
                    self._told, self._ticket = action.members, action.ticket
                    self._doing = _Doing.ASKED
                case Abort():
                    self._abort(action)
                case Regroup():
                    self._regroup(action)
                case EndRun():
                    if self._doing in (_Doing.TRAINING, _Doing.ASKED):
                        self._redone_s += max(0.0, self._now_s - self._began_s)
                    self._ended = action.reason

    def _abort(self, action: Abort) -> None:
        self._count_change()
        self._until_s = self._now_s + self._setup.halt_s
        if self._doing in (_Doing.TRAINING, _Doing.ASKED):
            self._broken_s = self._now_s
        elif self._doing is _Doing.CHANGING:
            self._moved_s += max(0.0, self._now_s - self._moving_from_s)
        if self._broken_s is not None and self._has_passed(self._broken_s):
            # What is left of the update sends nothing, and is done.
            self._until_s = max(self._until_s, self._began_s + self._iteration_s)
        self._told, self._ticket = action.members, action.ticket
        self._doing = _Doing.HALTING

    def _regroup(self, change: Regroup) -> None:
        if self._doing is _Doing.HALTING and change.sections > self._sections:
            self._steps += 1  # the membership says that the open step is finished, not redone
            self._useful_s += self._iteration_s
            self._in_vain = 0
            if self._steps == self._setup.iterations:
                self._now_s = self._began_s + self._iteration_s
                return
        waits_s = 0.0
        if self._doing is _Doing.ASKED:
            self._count_change()
            waits_s = self._setup.halt_s
        self._sections = change.sections
        self._told, self._ticket = change.members, change.ticket
        self._doing = _Doing.CHANGING
        processors = tuple(self._processors[name] for name in change.members)
        assert isinstance(change.layout, Layout)
        self._iteration_s = self._setup.iteration_s(change.layout, processors)
        self._moving_from_s = self._now_s + waits_s
        self._until_s = self._moving_from_s + self._rows_s(change)

    def _count_change(self) -> None:
        self._in_vain += 1
        if self._in_vain > MOST_IN_VAIN:
            self._ended = f"{MOST_IN_VAIN} changes in a row, and no step was done between them: machines live too short for it"

    def _rows_s(self, change: Regroup) -> float:
        """Seconds until all have their rows, and newcomers what all have in common."""
        sizes: dict[tuple[str, str], float] = defaultdict(float)
        for take in change.takes:
            if take.source != take.dest:
                block = self._workload.blocks[take.block]
                sizes[take.source, take.dest] += take.units.size * self._workload.unit_moved_bytes(block)
        for name in change.newcomers:
            sizes[change.source, name] += self._workload.replicated_moved_bytes
        return carried_s(sizes, cluster=self._setup.among(tuple(self._processors[name] for name in change.members)))

    def _plan(self, names: tuple[str, ...]) -> Layout:
        return self._setup.lay(tuple(self._processors[name] for name in names))
