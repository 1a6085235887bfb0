"""One rank of an elastic run, from the inside: it works, stops when it is told to, and carries out changes.

The script's thread computes, and parks where its communication breaks or a change is due. A rank does nothing about a broken
connection by itself: it parks, says so, and waits for its orders.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from typing import Protocol, TypeVar

import torch

from tatami.clock import Clock, SystemClock
from tatami.cluster import Cluster
from tatami.comm.elastic import ElasticCommunicator
from tatami.comm.rendezvous import Whereabouts
from tatami.elastic.forming import Connections
from tatami.elastic.order_box import OrderBox
from tatami.elastic.orders import Assignment, CarriedOut, EnteredLoop, RegroupOrder, Report
from tatami.elastic.sections import OpenSection, Sections
from tatami.elastic.settings import Moment, MomentHook
from tatami.errors import CommError, InputError
from tatami.membership import Dismiss, Halted, Leaving, Regroup, Restart, Stalled
from tatami.state.repairing import BeginAgain

_Value = TypeVar("_Value")


class Training(Protocol):
    """What is trained, as the session sees it."""

    @property
    def step_number(self) -> int:
        """Number of the step that is open, or comes next."""

    def entering(self, group: int | None, *, whereabouts: Whereabouts) -> EnteredLoop:
        """What the run is told when the script has come to its loop; see `EnteredLoop`."""

    def relay(self, change: Regroup, *, name: str, cluster: Cluster) -> Callable[[], None]:
        """Collect what `change` gives this rank. Collective. Returns what puts it in place, and sends nothing."""


class Session:
    """The rank that this process is.

    Args:
        assignment: what it is.
        hook: see `tatami.elastic.settings`.
        clock: for the report.

    Attributes:
        box: where Ray's threads hand in orders.
        change: the last one of the members that this rank has carried out.
        is_through: its loop has come to its end, so that its script may end, too.
    """

    def __init__(self, assignment: Assignment, *, hook: MomentHook | None = None, clock: Clock | None = None) -> None:
        self.assignment = assignment
        self.name = assignment.name
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.group = 0
        self.entered = False
        self.joins = assignment.joins
        self.returns = self.resumes = False
        self.has_checkpoint = False
        self.is_over = False
        self.is_through = False
        self.is_leaving = False
        self.is_watched = hook is not None
        self._clock = clock or SystemClock()
        self._hook = hook
        self._training: Training | None = None
        self.change: Regroup | None = None
        self._is_due = False
        self._was_finished = False
        self._stopped_s = 0.0
        self._steps_before: int | None = None
        self._sections = Sections(self.name, clock=self._clock)
        self._connections = Connections(assignment)
        self.box = OrderBox(self.name, where=self._where, sever=self._connections.sever)

    @property
    def step(self) -> int | None:
        """The step that is open, or comes next; None before the loop."""
        return None if self._training is None else self._training.step_number

    @property
    def comm(self) -> ElasticCommunicator | None:
        """To the members that are there now; None before the first group."""
        return self._connections.comm

    def _where(self, ticket: int, ended: bool) -> Halted:
        return Halted(
            member=self.name,
            ticket=ticket,
            sections=self._sections.passed,
            outcome=self._sections.outcome,
            ended=ended,
            admits=self._sections.admits,
            has_checkpoint=self.has_checkpoint,
            is_half_done=self._sections.is_half_done,
        )

    # -- for the script's thread --------------------------------------------------------------------------------------

    def begin(self) -> ElasticCommunicator:
        """Form the first group."""
        comm = self._connections.begin()
        if len(self.assignment.members) > 1:
            try:
                self._connections.form(self.group, members=self.assignment.members, off=self.box.off)
            except CommError as error:
                self.stuck(error)
                self.begin_again()
        return comm

    def begin_again(self) -> None:
        """After `BeginAgain`, or where communication failed before the loop: form the next group."""
        while True:
            order = self.box.restart()
            self.group = order.group
            assert self.comm is not None
            if order.returns:
                # The run goes back to its last checkpoint: what this rank holds is dropped.
                if self._training is not None and not (self.joins or self.returns):
                    self._steps_before = self._training.step_number
                self.returns, self.entered, self.joins = True, False, False
                self.resumes = order.resumes
                self._sections.forget()
                self.change = None
            self._training = None
            self.comm.forget()
            try:
                self._connections.form(order.group, members=order.members, off=self.box.off)
            except CommError as error:
                self.stuck(error)
            else:
                return

    def stuck(self, error: BaseException) -> None:
        """Tell that communication failed."""
        self.report(Stalled(member=self.name, group=self.group, reason=f"{type(error).__name__}: {error}"))

    def enter(self, training: Training) -> None:
        """The script has come to its loop: wait to be let in, and take what the run has."""
        if self._training is not None:
            raise InputError(
                "an elastic run has one loop, and this script has come to a second one: train in one loop, or one fit"
            )
        self._training = training
        self.report(training.entering(None if self.joins else self.group, whereabouts=self._connections.whereabouts))
        self._park_and_obey()
        self.entered = True

    def begin_section(self, section: OpenSection) -> None:
        """Its body begins."""
        self._sections.begin(section)

    def pass_point(self, sums: torch.Tensor) -> None:
        """Sum over the ranks; when it is done all ranks have completed the body. Then commit, with the sums.

        Raises:
            CommError: the point was not passed by this rank.
        """
        assert self.comm is not None
        self.at(Moment.BEFORE_POINT)
        asked = float(self.box.is_asked and self._sections.admits)
        total = torch.cat([sums.to(torch.float64), torch.tensor([asked], dtype=torch.float64)])
        self.comm.allreduce(total)
        is_due = bool(total[-1] > 0)
        self._sections.commit(total[:-1].tolist())
        self._is_due = self._is_due or is_due

    def before_step(self) -> None:
        """Park here if a change is due: what follows the last step is done, so that a newcomer can begin with the next."""
        if self._is_due:
            self._park_and_obey()

    def repair(self, error: BaseException) -> bool:
        """The section that is open has failed: park, and carry out what the run decides. Whether it was finished."""
        self.stuck(error)
        self._park_and_obey()
        return self._was_finished

    def section(self, body: Callable[[], _Value]) -> _Value:
        """A collective that is no step, such as an evaluation: done again where a death has disturbed it."""
        if not self.entered or self.is_over:
            return body()
        while True:
            self.begin_section(OpenSection(commit=lambda _: None, roll_back=lambda: None, admits=False))
            try:
                value = body()
                self.pass_point(torch.zeros(1, dtype=torch.float64))
            except CommError as error:
                if self.repair(error):
                    return value
            else:
                return value

    def leave(self, *, because: str = "") -> None:
        """Ask that this rank may leave; it goes between two steps."""
        self.is_leaving = True
        self.report(Leaving(member=self.name, because=because))

    def report(self, what: Report) -> None:
        self.reports.put(what)

    def at(self, moment: Moment) -> None:
        """Tell the hook of the tests."""
        if self._hook is not None:
            self._hook(moment, self.name, -1 if self.step is None else self.step)

    def close(self) -> None:
        """The run is over."""
        self._connections.close()

    @property
    def stopped_for_s(self) -> float:
        """Since this rank stopped for the change that it is carrying out."""
        return self._clock.now_s() - self._stopped_s

    @property
    def is_called_off(self) -> bool:
        """Whether the body that is under way is in vain: a rank has died, and what this rank computes will be done again."""
        return self.box.off.is_set() and self._sections.open is not None

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _park_and_obey(self) -> None:
        """Stop, and go on when a change is carried out."""
        noticed_s = self._stopped_s = self._clock.now_s()
        spent_s = self._sections.spent_s(noticed_s)
        settled = "none"
        while True:
            order = self.box.park()
            self._is_due = False
            if isinstance(order, Restart):
                raise BeginAgain
            told = order.change if isinstance(order, RegroupOrder) else order
            if (how := self._sections.settle(told)) != "none":
                settled = how
            if isinstance(order, Dismiss):
                self.is_over = True
                self._was_finished = settled == "finished"
                return
            try:
                self._carry_out(order)
            except CommError as error:
                self.stuck(error)
                continue
            self._was_finished = settled == "finished"
            assert self._training is not None
            step, before, self._steps_before = self._training.step_number, self._steps_before, None
            self.returns = False
            self.report(
                CarriedOut(
                    ticket=order.change.ticket,
                    step=step,
                    settled=settled if before is None else "returned",
                    steps_lost=0 if before is None else before - step,
                    spent_s=spent_s if settled == "redone" else 0.0,
                )
            )
            return

    def _carry_out(self, order: RegroupOrder) -> None:
        change = order.change
        training = self._training
        assert training is not None
        assert self.comm is not None
        self.group = change.group
        self.at(Moment.FORMING)
        self._connections.form(change.group, members=change.members, off=self.box.off, there=order.members, token=order.token)
        self.at(Moment.TAKING)
        put_in_place = training.relay(change, name=self.name, cluster=Cluster(processors=order.processors))

        def commit(_: object) -> None:
            put_in_place()
            self.change = change

        self._sections.begin_change(commit)
        self.at(Moment.LAYING)
        self.comm.barrier()
        self._sections.commit(None)
        self.at(Moment.LAID)


_session: list[Session] = []


def current_session() -> Session | None:
    """The rank that this process is; None outside of elastic runs."""
    return _session[0] if _session else None


def set_session(session: Session | None) -> None:
    """Called by the process of a rank before the script begins."""
    _session[:] = [] if session is None else [session]
