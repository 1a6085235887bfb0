"""Carries out what the membership decides on Ray actors, and tells it what happens to them."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import ray

from tatami.clock import Clock
from tatami.cluster import Cluster, Link, Processor
from tatami.elastic.orders import (
    Assignment,
    CarriedOut,
    EnteredLoop,
    GotStuck,
    HaltAnswer,
    Order,
    RegroupOrder,
    Report,
    Said,
    ScriptEnded,
    ScriptFailed,
    WantsToLeave,
)
from tatami.elastic.pending import PendingChange
from tatami.elastic.rank_process import RankProcess
from tatami.elastic.report import ElasticReport, MemberChange
from tatami.elastic.store import keep_store
from tatami.engine.calls import Calls
from tatami.engine.crew import Crew, Member
from tatami.engine.nodes import Nodes
from tatami.engine.pool import Pool
from tatami.engine.ray_watch import RayWatch
from tatami.engine.silence import Listening, look
from tatami.errors import TatamiError, TrainingError
from tatami.membership import (
    Abort,
    Action,
    Ask,
    Died,
    Dismiss,
    Ended,
    EndRun,
    Entered,
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
from tatami.tiling import Layout, plan
from tatami.workload import Workload

_TICK_S = 0.02


@dataclass(frozen=True, kw_only=True)
class ElasticTerms:
    """How a run is run.

    Attributes:
        ranks: to begin with.
        copies: holders that every unit has at least: 1, or 2.
        planner: that lays out the work after a change; see `tatami.plan`.
        heartbeat_s: a rank that gives no sign of life for longer counts as dead.
        patience_s: so long a rank may take to stop, or to carry out a change.
        timeout_s: so long an operation waits for another rank.
        address: of a Ray cluster; None: Ray is started on this machine.
    """

    ranks: int
    copies: int
    planner: str
    heartbeat_s: float
    patience_s: float
    timeout_s: float
    address: str | None


class ElasticRuntime:
    """One run. `add` and `remove` may be called from `on_change` or another thread's `tell`."""

    def __init__(
        self,
        terms: ElasticTerms,
        *,
        pickled_spec: bytes,
        clock: Clock,
        watch: RayWatch,
        on_change: Callable[[MemberChange], None] | None,
        on_line: Callable[[str, str], None] | None,
        pool: Pool | None,
    ) -> None:
        self.terms = terms
        self.changes: list[MemberChange] = []
        self._spec = ray.put(pickled_spec)
        self._clock = clock
        self._watch = watch
        self._on_change = on_change
        self._on_line = on_line
        self._zero_s = self._began_s = clock.now_s()
        self._host = "127.0.0.1" if terms.address is None else _own_address()
        self._store = keep_store(self._host, timeout_s=terms.timeout_s)
        self._calls = Calls()
        self._listening = Listening(self._began_s, longest_step_s=5 * _TICK_S)
        self._crew = Crew(
            RankProcess,
            calls=self._calls,
            nodes=Nodes(now_s=clock.now_s),
            now_s=self._now_s,
            listening=self._listening,
            heartbeat_s=terms.heartbeat_s,
            pool=pool,
            on_up=self._up,
            on_gone=self._gone,
        )
        self._names = {number: f"p{number}" for number in range(terms.ranks)}
        self._processors: dict[str, Processor] = {}
        self._links: dict[tuple[str, str], Link] = {}
        self._workload: Workload | None = None
        self._machine = Membership(tuple(self._names.values()), plan=self._plan, copies=terms.copies)
        self._values: dict[str, Any] = {}
        self._pending: PendingChange | None = None
        self._has_begun = False
        self._first_tiling: dict[str, Any] | None = None
        self._first_members: tuple[str, ...] = ()
        self._deadlines: dict[str, float] = {}
        self._released: set[str] = set()
        self._end: EndRun | ScriptFailed | None = None

    # -- control --------------------------------------------------------------------------------------------------

    @property
    def members(self) -> tuple[str, ...]:
        """Names, in the order of the ranks."""
        return self._machine.members

    def add(self) -> str:
        """Have one more rank, from the step after its process is up. Returns its name."""
        number = len(self._names)
        self._names[number] = name = f"p{number}"
        self._start(number, members=(name,), joins=True)
        return name

    def remove(self, name: str) -> None:
        """Let a rank go between two steps; no sample and no row is lost."""
        self._tell(Leaving(member=name))

    # -- the run --------------------------------------------------------------------------------------------------

    def run(self) -> dict[str, Any]:
        """To the end of the script; gives what it returned, by member.

        Raises:
            TrainingError: the run cannot go on.
        """
        try:
            for number in range(self.terms.ranks):
                self._start(number, members=self._machine.members, joins=False)
            while not self._is_over():
                self._wait()
        finally:
            self._calls.clear()
            if self._watch.fault is None:
                self._crew.end()
            else:
                self._crew.abandon()
        if isinstance(self._end, EndRun):
            raise TrainingError(f"the run stopped ({self._end.cause.value}): {self._end.reason}")
        if isinstance(self._end, ScriptFailed):
            raise self._failure(self._end)
        return self._values

    def report(self) -> ElasticReport:
        """Of what has happened so far."""
        now_s = self._clock.now_s()
        return ElasticReport(
            startup_s=self._zero_s - self._began_s,
            total_s=now_s - self._zero_s,
            changes=tuple(self.changes),
            first_tiling=self._first_tiling,
            first_members=self._first_members,
        )

    def _is_over(self) -> bool:
        if self._end is not None:
            return True
        return self._machine.stage is RunStage.DONE and not set(self._living()) - set(self._values)

    def _living(self) -> list[str]:
        """Members of the group whose processes run."""
        there = {self._names[number] for number in self._crew.members}
        return [name for name in self.members if name in there and name not in self._released]

    def _wait(self) -> None:
        if self._watch.fault is not None:
            raise TrainingError(f"the run stopped: {self._watch.fault}")
        if self._read(timeout_s=_TICK_S):
            self._listening.advance(self._clock.now_s())
            look([self._crew], now_s=self._listening.now_s, read=self._read)
        if self._end is None:
            self._crew.look_for_lost_starts()
            self._look_for_late()

    def _read(self, *, timeout_s: float = 0.0) -> bool:
        self._calls.wait(timeout_s=timeout_s, is_over=lambda: self._end is not None)
        return self._end is None

    def _look_for_late(self) -> None:
        """A rank that does not stop, or does not carry out a change, is of no use to the others."""
        now_s = self._listening.now_s
        for name, deadline_s in list(self._deadlines.items()):
            if now_s > deadline_s and name in self._deadlines:
                del self._deadlines[name]
                self._tell(Silent(member=name))

    def _tell(self, event: MemberEvent) -> None:
        if isinstance(event, Died | Silent | Stalled) and self._pending is None and self._machine.stage is RunStage.RUNNING:
            self._pending = PendingChange(noticed_s=self._now_s())
        for action in self._machine.handle(event):
            self._carry_out(action)

    def _now_s(self) -> float:
        return self._clock.now_s() - self._zero_s

    # -- actions --------------------------------------------------------------------------------------------------

    def _carry_out(self, action: Action) -> None:
        match action:
            case Abort() | Ask():
                self._pending = self._pending or PendingChange(noticed_s=self._now_s())
                for name in action.members:
                    self._halt(name, action)
            case Regroup():
                self._regroup(action)
            case Restart():
                for name in action.members:
                    self._order(name, action, ticket=action.ticket)
            case Dismiss():
                self._deadlines.clear()
                for name in action.members:
                    self._order(name, action, ticket=action.ticket)
            case Kill() | Release():
                self._deadlines.pop(action.member, None)
                self._released.add(action.member)
                self._crew.kill(self._number(action.member))
            case EndRun():
                self._end = action

    def _halt(self, name: str, action: Abort | Ask) -> None:
        actor = self._crew.get(self._number(name))
        if actor is None:
            return  # its watch tells of that
        abort = isinstance(action, Abort)
        if abort:
            self._deadlines[name] = self._listening.now_s + self.terms.patience_s
        call = actor.halt.options(concurrency_group="halts").remote(action.ticket, abort)
        self._calls.add(call, done=partial(self._halted, name, action.ticket))

    def _halted(self, name: str, ticket: int, answer: HaltAnswer | None) -> None:
        if answer is None:
            return
        self._deadlines.pop(name, None)
        self._tell(
            Halted(
                member=name,
                ticket=ticket,
                sections=answer.sections,
                outcome=answer.outcome,
                ended=answer.ended,
                admits=answer.admits,
                has_checkpoint=answer.has_checkpoint,
            )
        )

    def _regroup(self, change: Regroup) -> None:
        now_s = self._now_s()
        self._pending = self._pending or PendingChange(noticed_s=now_s)
        self._pending.regroup(change, now_s=now_s)
        order = RegroupOrder(change=change, processors=tuple(self._processors[name] for name in change.members))
        self._deadlines = dict.fromkeys(change.members, self._listening.now_s + self.terms.patience_s)
        for name in change.members:
            self._order(name, order, ticket=change.ticket)

    def _order(self, name: str, order: Order, *, ticket: int) -> None:
        actor = self._crew.get(self._number(name))
        if actor is not None:
            self._calls.add(actor.obey.remote(order, ticket), done=lambda _: None)

    # -- processes ------------------------------------------------------------------------------------------------

    def _start(self, number: int, *, members: tuple[str, ...], joins: bool) -> None:
        assignment = Assignment(
            name=self._names[number],
            group=0,
            members=members,
            joins=joins,
            store=(self._host, self._store.port),
            timeout_s=self.terms.timeout_s,
            loopback=self.terms.address is None,
        )
        self._crew.start(number, employ=lambda actor: actor.employ.remote(assignment, self._spec))

    def _up(self, number: int, member: Member) -> None:
        def collect() -> None:
            call = member.actor.collect.options(concurrency_group="mail").remote()
            self._calls.add(call, done=take)

        def take(reports: list[Report]) -> None:
            if self._crew.members.get(number) is member:
                collect()
                for report in reports:
                    self._take(self._names[number], report)

        collect()

    def _gone(self, number: int, member: Member, late: bool) -> None:
        del member
        name = self._names[number]
        self._deadlines.pop(name, None)
        if name in self._released:
            return
        self._tell(Silent(member=name) if late else Died(member=name))

    def _number(self, name: str) -> int:
        return next(number for number, each in self._names.items() if each == name)

    # -- reports --------------------------------------------------------------------------------------------------

    def _take(self, name: str, report: Report) -> None:
        match report:
            case EnteredLoop():
                self._entered(name, report)
            case GotStuck():
                self._tell(Stalled(member=name, group=report.group, reason=report.reason))
            case CarriedOut():
                self._deadlines.pop(name, None)
                self._carried_out(name, report)
            case ScriptEnded():
                self._values[name] = report.value
                self._tell(Ended(member=name))
            case ScriptFailed():
                if name in self.members:
                    self._end = self._end or report
                else:
                    self._turn_away(name, report)
            case Said():
                if self._on_line is not None:
                    self._on_line(name, report.text)
            case WantsToLeave():
                self._tell(Leaving(member=name))

    def _turn_away(self, name: str, failed: ScriptFailed) -> None:
        """A process that was to join has failed before it was let in: the others do without it."""
        print(f"tatami: {name} does not join the run, as its script failed:\n{failed.trace}", file=sys.stderr, flush=True)
        self._tell(Died(member=name))
        self._released.add(name)
        self._crew.kill(self._number(name))

    def _entered(self, name: str, told: EnteredLoop) -> None:
        self._processors[name] = replace(told.processor, name=name)
        self._links |= told.links
        self._workload = told.workload
        self._tell(Entered(member=name, group=told.group, layout=told.layout, workload=told.workload))

    def _plan(self, names: tuple[str, ...]) -> Layout:
        assert self._workload is not None
        cluster = Cluster(processors=tuple(self._processors[name] for name in names), links=self._links)
        return plan(self.terms.planner, cluster=cluster, workload=self._workload).layout

    def _carried_out(self, name: str, done: CarriedOut) -> None:
        pending = self._pending
        if pending is not None:
            pending.carried_out(done)
        if pending is None or pending.change is None or self._machine.stage is not RunStage.CHANGING:
            self._tell(Laid(member=name, ticket=done.ticket))
            return
        self._pending = None  # where all have done it, the next change may begin at once
        self._tell(Laid(member=name, ticket=done.ticket))
        if done.ticket not in self._laid_tickets():
            self._pending = pending
        elif self._has_begun:
            self._note(pending)
        else:
            self._has_begun = True
            self._first_tiling = self._tiling(pending.change.layout)
            self._first_members = pending.change.members
            self._zero_s = self._clock.now_s()

    def _laid_tickets(self) -> tuple[int, ...]:
        """Of the last change that all members have carried out."""
        return () if self._machine.stage is RunStage.CHANGING else (self._machine.ticket_laid,)

    def _note(self, pending: PendingChange) -> None:
        assert pending.change is not None
        change = pending.made(now_s=self._now_s(), tiling=self._tiling(pending.change.layout))
        self.changes.append(change)
        if self._on_change is not None:
            with self._watch.elsewhere():
                self._on_change(change)

    def _tiling(self, layout: Layout) -> dict[str, Any] | None:
        tilings = layout.cut_blocks(self._workload) if self._workload is not None else ()
        return tilings[0].to_dict() if tilings else None

    def _failure(self, failed: ScriptFailed) -> Exception:
        if failed.trace:
            print(failed.trace, file=sys.stderr)
        error = failed.error
        return error if isinstance(error, TatamiError) else TrainingError(f"the script failed: {type(error).__name__}: {error}")


def _own_address() -> str:
    get_node_ip_address: Any = ray.util.get_node_ip_address  # without types
    return str(get_node_ip_address())
