"""The run of an elastic job: events of the ranks' processes go to the membership, and its actions to the ranks."""

from __future__ import annotations

import secrets
import sys
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace
from functools import partial
from itertools import count
from statistics import median
from typing import Any

from tatami.cluster import Cluster, Link, Processor
from tatami.comm.rendezvous import TOKEN_BYTES, Whereabouts
from tatami.elastic.history import RunHistory
from tatami.elastic.orders import (
    Assignment,
    CarriedOut,
    EnteredLoop,
    Order,
    RegroupOrder,
    Report,
    Said,
    ScriptEnded,
    ScriptFailed,
    WantsLayout,
)
from tatami.elastic.rank_process import RankProcess
from tatami.elastic.settings import MOST_STARTING, ElasticContext, ElasticControl, ElasticSettings
from tatami.engine.calls import ignore
from tatami.engine.crew import Crew, Member
from tatami.engine.nodes import Nodes
from tatami.engine.ray_watch import RayWatch
from tatami.engine.run_loop import AbstractRun
from tatami.errors import CommError, InputError, RankDiedError, TatamiError, TrainingError
from tatami.membership import (
    Abort,
    Action,
    Ask,
    Died,
    Dismiss,
    Ended,
    EndRun,
    Halted,
    Kill,
    Laid,
    Leaving,
    MemberEvent,
    Membership,
    Regroup,
    Release,
    Restart,
    RunStage,
    Silent,
    Stalled,
)
from tatami.report.elastic_run import ElasticReport, MemberChange
from tatami.tiling import Layout, StagedLayout
from tatami.tiling.staged import fastest_plan
from tatami.workload import Workload

_STARTS_AT_ONCE = 4
"""Processes of ranks that were added, until they are in the loop."""


class ElasticRuntime(AbstractRun[MemberEvent, Action], ElasticControl):
    """One run. Members are p0, p1, ... in the order in which they are started; a name is not used twice.

    Args:
        assignment: of every rank, without its name and its members.
        spec: a reference to what every rank runs; see `RankSpec`.
        watch: of Ray's own processes.
    """

    def __init__(
        self, settings: ElasticSettings, *, context: ElasticContext, assignment: Assignment, spec: Any, watch: RayWatch
    ) -> None:
        super().__init__(
            self._events_to_actions,
            clock=context.clock,
            watch=watch,
            nodes=Nodes(now_s=context.clock.now_s, shuns=False),
            heartbeat_s=settings.heartbeat_s,
            pool=context.pool,
            tick_s=0.02,
        )
        self.settings = settings
        self._context = context
        self._assignment, self._spec = assignment, spec
        self._history = RunHistory(self._clock, tell=self._changed)
        self._ranks = Crew(RankProcess, self._crew_terms, on_up=self._collect, on_gone=self._gone)
        self._processors: dict[str, Processor] = {}
        self._whereabouts: dict[str, Whereabouts] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._workload: Workload | None = None
        self._stages: int | None = None
        self._names = (f"p{number}" for number in count())
        names = tuple(next(self._names) for _ in range(settings.ranks))
        self._machine = Membership(names, plan=self._plan, copies=settings.copies)
        self._values: dict[str, Any] = {}
        self._deadlines: dict[str, float] = {}
        self._released: set[str] = set()
        self._end: EndRun | ScriptFailed | None = None
        self._failed = ""
        self._lost: list[str] = []
        self._added: list[str] = []
        self._waiting: deque[str] = deque()

    # -- control --------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        return self._machine.members

    @property
    def starting(self) -> tuple[str, ...]:
        started = set(self._ranks.members).difference(self.members, self._released)
        return tuple(name for name in self._added if name in started or name in self._waiting)

    def add(self) -> str:
        if len(starting := self.starting) >= MOST_STARTING:
            raise InputError(
                f"{len(starting)} ranks are starting already ({starting[0]} to {starting[-1]}), which is the most; "
                "`control.starting` tells which are not among `control.members` yet"
            )
        name = next(self._names)
        self._added.append(name)
        self._waiting.append(name)
        self._start_waiting()
        return name

    def remove(self, name: str) -> None:
        if name in self._waiting:
            self._waiting.remove(name)
        elif name in self.starting and name not in self._processors:
            self._released.add(name)
            self._ranks.kill(name)
        else:
            self._tell(Leaving(member=name))

    def _start_waiting(self) -> None:
        """Start the next ranks that were added, a few at a time: each takes a core for seconds until it enters the loop."""
        while self._waiting:
            not_up = set(self.starting).difference(self._processors, self._waiting)
            if len(not_up) >= _STARTS_AT_ONCE:
                return
            name = self._waiting.popleft()
            self._start(name, members=(name,), joins=True)

    def _start(self, name: str, *, members: tuple[str, ...], joins: bool) -> None:
        """Start the process of a rank, among these members at first."""
        assignment = replace(self._assignment, name=name, members=members, joins=joins)
        self._ranks.start(name, employ=lambda actor: actor.employ.remote(assignment, self._spec))

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """To the end of the script; gives what it returned, by member.

        Raises:
            TrainingError: the run cannot go on.
        """
        self._play()
        if isinstance(self._end, EndRun):
            raise TrainingError(f"the run stopped ({self._end.cause.value}): {self._end.reason}")
        if isinstance(self._end, ScriptFailed):
            raise self._failure(self._end)
        return self._values

    def report(self) -> ElasticReport:
        """The report of what has happened so far."""
        return self._history.report(settings=asdict(self.settings))

    @property
    def _crews(self) -> Sequence[Crew[Any]]:
        return (self._ranks,)

    def _begin(self) -> None:
        for name in self.members:
            self._start(name, members=self.members, joins=False)

    def _turn(self) -> None:
        super()._turn()
        if self._end is None:
            self._look_for_late()
            self._start_waiting()

    def _is_over(self) -> bool:
        if self._end is not None:
            return True
        return self._machine.stage is RunStage.DONE and not set(self._living()) - set(self._values)

    def _stopped(self, reason: str) -> Exception:
        return TrainingError(f"the run stopped: {reason}")

    def _living(self) -> list[str]:
        """Members of the group whose processes run."""
        return [name for name in self.members if name in self._ranks.members and name not in self._released]

    def _look_for_late(self) -> None:
        """A rank that does not stop, or does not carry out a change, is of no use to the others."""
        now_s = self._listening.now_s
        for name, deadline_s in list(self._deadlines.items()):
            if now_s > deadline_s and name in self._deadlines:
                del self._deadlines[name]
                self._tell(Silent(member=name))

    def _events_to_actions(self, event: MemberEvent) -> Iterable[Action]:
        if isinstance(event, Died | Silent | Stalled) and self._machine.stage is RunStage.RUNNING:
            self._history.notice()
        return self._machine.handle(event)

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Abort() | Ask():
                self._history.notice()
                for name in action.members:
                    self._halt(name, action)
            case Regroup():
                self._regroup(action)
            case Restart() | Dismiss():
                if isinstance(action, Dismiss):
                    self._deadlines.clear()
                for name in action.members:
                    self._order(name, action, ticket=action.ticket)
            case Kill() | Release():
                self._deadlines.pop(action.member, None)
                self._released.add(action.member)
                self._ranks.kill(action.member)
            case EndRun():
                self._end = action

    def _halt(self, name: str, action: Abort | Ask) -> None:
        """See `OrderBox.halt`. Nothing is ordered of a process that is gone, which its watch reports."""
        if (actor := self._ranks.get(name)) is None:
            return
        abort = isinstance(action, Abort)
        if abort:
            self._deadlines[name] = self._listening.now_s + self.settings.patience_s
        call = actor.halt.options(concurrency_group="halts").remote(action.ticket, abort)
        self._calls.add(call, done=partial(self._halted, name))

    def _halted(self, name: str, event: Halted | None) -> None:
        if event is not None:
            self._deadlines.pop(name, None)
            self._tell(event)

    def _order(self, name: str, order: Order, *, ticket: int) -> None:
        """See `OrderBox.hand_in`."""
        if (actor := self._ranks.get(name)) is not None:
            self._calls.add(actor.obey.remote(order, ticket), done=ignore)

    def _regroup(self, change: Regroup) -> None:
        self._history.regroup(change)
        order = RegroupOrder(
            change=change,
            processors=tuple(self._processors[name] for name in change.members),
            members=tuple(self._whereabouts[name] for name in change.members),
            token=secrets.token_bytes(TOKEN_BYTES),
        )
        self._deadlines = dict.fromkeys(change.members, self._listening.now_s + self.settings.patience_s)
        for name in change.members:
            self._order(name, order, ticket=change.ticket)

    # -- reports --------------------------------------------------------------------------------------------------

    def _collect(self, name: str, member: Member) -> None:
        call = member.actor.collect.options(concurrency_group="mail").remote()
        self._calls.add(call, done=partial(self._collected, name, member))

    def _collected(self, name: str, member: Member, reports: list[Report]) -> None:
        if self._ranks.members.get(name) is member:
            self._collect(name, member)
            for report in reports:
                self._take(name, report)

    def _gone(self, name: str, _: Member, late: bool) -> None:
        self._deadlines.pop(name, None)
        if name not in self._released:
            self._lost.append(name)
            if name in self._added and name not in self.members:
                how = "gave no sign of life" if late else "died"
                self._history.not_joined[name] = f"{how} before it joined the run"
                print(f"tatami: {name} {how} before it joined the run", file=sys.stderr, flush=True)
            self._tell(Silent(member=name) if late else Died(member=name))

    def _take(self, name: str, report: Report) -> None:
        match report:
            case EnteredLoop():
                self._entered(name, report)
            case Stalled() | Leaving():
                self._tell(report)
            case CarriedOut():
                self._deadlines.pop(name, None)
                self._carried_out(name, report)
            case ScriptEnded():
                self._values[name] = report.value
                self._tell(Ended(member=name))
            case ScriptFailed():
                if name in self.members:
                    self._end, self._failed = (self._end, self._failed) if self._end else (report, name)
                else:
                    self._turn_away(name, report)
            case Said():
                if self._context.on_line is not None:
                    self._context.on_line(name, report.text)
            case WantsLayout():
                self._learn(report.speeds)
                self._tell(report.event)

    def _turn_away(self, name: str, failed: ScriptFailed) -> None:
        """A process that was to join has failed before it was let in: the others do without it."""
        self._history.not_joined[name] = f"its script failed: {type(failed.error).__name__}: {failed.error}"
        print(f"tatami: {name} does not join the run, as its script failed:\n{failed.trace}", file=sys.stderr, flush=True)
        self._tell(Died(member=name))
        self._released.add(name)
        self._ranks.kill(name)

    def _entered(self, name: str, told: EnteredLoop) -> None:
        self._processors[name] = replace(told.processor, name=name)
        place = told.whereabouts.place
        if name not in self._whereabouts and self._context.on_process is not None:
            self._context.on_process(name, place.pid, place.host)
        self._whereabouts[name] = told.whereabouts
        self._links |= told.links
        self._workload, self._stages = told.event.workload, told.stages
        self._tell(told.event)

    def _learn(self, speeds: dict[str, float]) -> None:
        """Plans are made by these speeds from now on, in the unit of those before, which ranks that join have, too."""
        known = {name: self._processors[name].speed for name in speeds if name in self._processors}
        plain = [speed for speed in known.values() if isinstance(speed, int | float)]
        if len(plain) == len(speeds):
            scale = median(plain) / median(speeds.values())
            self._processors |= {name: replace(self._processors[name], speed=scale * speed) for name, speed in speeds.items()}

    def _plan(self, names: tuple[str, ...]) -> Layout | StagedLayout:
        assert self._workload is not None
        cluster = Cluster(processors=tuple(self._processors[name] for name in names), links=self._links)
        stages = None if self._stages is None or self._stages > len(names) else self._stages
        return fastest_plan(self.settings.planner, cluster=cluster, workload=self._workload, stages=stages).layout

    def _carried_out(self, name: str, done: CarriedOut) -> None:
        pending = self._history.pending
        if pending is not None:
            pending.carried_out(done)
        if pending is None or pending.change is None or self._machine.stage is not RunStage.CHANGING:
            self._tell(Laid(member=name, ticket=done.ticket))
            return
        self._history.pending = None  # where all have done it, the next change may begin at once
        self._tell(Laid(member=name, ticket=done.ticket))
        if self._is_laid(done.ticket):
            self._history.done(pending, tiling=self._tiling(pending.change.layout))
        else:
            self._history.pending = pending

    def _is_laid(self, ticket: int) -> bool:
        """Whether the last change that all members have carried out is this one."""
        return self._machine.stage is not RunStage.CHANGING and self._machine.ticket_laid == ticket

    def _changed(self, change: MemberChange) -> None:
        if self._context.on_change is not None:
            with self._watch.elsewhere():
                self._context.on_change(change)

    def _tiling(self, layout: Layout | StagedLayout) -> dict[str, Any] | None:
        if isinstance(layout, StagedLayout):
            return None
        tilings = layout.cut_blocks(self._workload) if self._workload is not None else ()
        return tilings[0].to_dict() if tilings else None

    def _failure(self, failed: ScriptFailed) -> Exception:
        if failed.trace:
            print(failed.trace, file=sys.stderr)
        error, where = failed.error, f"on {self._failed}" + ("" if failed.step is None else f", at step {failed.step}")
        if isinstance(error, RankDiedError) or (isinstance(error, CommError) and self._lost):
            return TrainingError(
                f"{', '.join(self._lost) or 'a rank'} died, and {self._failed} was in a collective that is no part of a step, "
                "which is not repaired. Put what comes between two steps or after the loop into loop.whole(lambda: ...) "
                f"({type(error).__name__}: {error})"
            )
        if isinstance(error, TatamiError):
            if error.args and isinstance(error.args[0], str):
                error.args = (f"{error.args[0]} ({where})", *error.args[1:])
            return error
        if isinstance(error, SystemExit):
            return TrainingError(f"the script ended {where}, with exit code {error.code}; a rank leaves by loop.leave()")
        return TrainingError(f"the script failed {where}: {type(error).__name__}: {error}")
