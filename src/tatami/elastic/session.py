"""One rank of an elastic run, from the inside: it works, stops when it is told to, and carries out changes.

Two threads meet here. The script's thread computes, and parks where its communication breaks or a change is due. The threads
of Ray hand in orders. A rank does nothing about a broken connection by itself: it parks, says so, and waits for its orders.
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from tatami.clock import Clock, SystemClock
from tatami.cluster import Cluster
from tatami.comm.base import AbstractCommunicator
from tatami.comm.elastic import ElasticCommunicator
from tatami.comm.threads import single_communicator
from tatami.comm.torchdist import TorchdistCommunicator
from tatami.elastic.moments import Moment, MomentHook
from tatami.elastic.orders import (
    Assignment,
    CarriedOut,
    EnteredLoop,
    GotStuck,
    HaltAnswer,
    Order,
    RegroupOrder,
    Report,
    WantsToLeave,
)
from tatami.elastic.store import reach_store
from tatami.errors import CommError, InputError, TrainingError
from tatami.membership import Dismiss, Regroup, Restart
from tatami.tiled.repairing import BeginAgain

ORDER_TIMEOUT_S = 900.0
"""For so long a parked rank waits for orders: longer than anything that the run waits for itself."""
_Value = TypeVar("_Value")


class Training(Protocol):
    """What is trained, as the session sees it."""

    @property
    def step_number(self) -> int:
        """Of the step that is open, or comes next."""

    def entering(self, group: int | None) -> EnteredLoop:
        """What the run is told when the script has come to its loop."""

    def relay(self, change: Regroup, *, name: str, cluster: Cluster) -> Callable[[], None]:
        """Collect what `change` gives this rank. Collective. Returns what puts it in place, and sends nothing."""


@dataclass(frozen=True, kw_only=True)
class OpenSection:
    """What is to be done about a section whose body is under way or complete.

    Attributes:
        commit: given the outcome; sends nothing.
        roll_back: forgets the body.
        admits: newcomers may begin here.
    """

    commit: Callable[[Any], None]
    roll_back: Callable[[], None]
    admits: bool


class Session:
    """The rank that this process is.

    Args:
        assignment: what it is.
        hook: see `tatami.elastic.moments`.
        clock: for the report.
    """

    def __init__(self, assignment: Assignment, *, hook: MomentHook | None = None, clock: Clock | None = None) -> None:
        self.assignment = assignment
        self.name = assignment.name
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self.group = assignment.group
        self.sections = 0
        self.entered = False
        self.joins = assignment.joins
        self.returns = False
        self.has_checkpoint = False
        self.is_over = False
        self.is_leaving = False
        self.comm: ElasticCommunicator | None = None
        self._clock = clock or SystemClock()
        self._hook = hook
        self._training: Training | None = None
        self._change: Regroup | None = None
        self._open: OpenSection | None = None
        self._outcome: Any = None
        self._began_s: float | None = None
        self._laying: OpenSection | None = None
        self._is_due = False
        self._was_finished = False
        self._steps_before: int | None = None
        # Shared with Ray's threads, under the condition:
        self._moved = threading.Condition()
        self._ticket = -1
        self._is_parked = False
        self._has_ended = False
        self._is_asked = False
        self._off = threading.Event()
        self._order: Order | None = None
        self._forming: AbstractCommunicator | None = None

    # -- for Ray's threads --------------------------------------------------------------------------------------------

    def halt(self, ticket: int, *, abort: bool) -> HaltAnswer | None:
        """Stop where the rank is (`abort`), or between two steps; returns when it has. None where another order came since."""
        with self._moved:
            if ticket < self._ticket:
                return None
            self._ticket = ticket
            self._order = None  # it was about members that have changed since
            self._is_asked = self._is_asked or not abort
        if abort:
            self._call_off()
        with self._moved:
            self._moved.wait_for(lambda: self._is_parked or self._has_ended or self._ticket > ticket)
            if self._ticket > ticket:
                return None
            admits = self._open is None or self._open.admits
            return HaltAnswer(
                sections=self.sections,
                outcome=self._outcome,
                ended=self._has_ended,
                admits=admits,
                has_checkpoint=self.has_checkpoint,
            )

    def obey(self, order: Order, *, ticket: int) -> None:
        """Hand in an order, which the script's thread carries out when it is parked."""
        if isinstance(order, Restart) and ticket >= self._ticket:
            self._call_off()  # before the order is there: what is formed by it must not be broken
        with self._moved:
            if ticket < self._ticket:
                return
            self._ticket = ticket
            self._order = order
            self._moved.notify_all()

    def _call_off(self) -> None:
        """Break all that this rank communicates by, and what it forms."""
        self._off.set()
        for comm in (self.comm.inner if self.comm is not None else None, self._forming):
            if isinstance(comm, TorchdistCommunicator):
                comm.sever()

    # -- for the script's thread --------------------------------------------------------------------------------------

    def begin(self) -> ElasticCommunicator:
        """Form the first group."""
        # A group of one to begin with: where the first is not formed, the next one is.
        self.comm = ElasticCommunicator(single_communicator(timeout_s=self.assignment.timeout_s), names=(self.name,))
        if len(self.assignment.members) > 1:
            try:
                self.comm.regroup(self._form(self.group, self.assignment.members), names=self.assignment.members)
            except CommError as error:
                self.stuck(error)
                self.begin_again()
        return self.comm

    def begin_again(self) -> None:
        """After `BeginAgain`, or where communication failed before the loop: form the next group."""
        while True:
            with self._moved:
                order = self._order if isinstance(self._order, Restart) else self._await_order()
                if not isinstance(order, Restart):
                    raise TrainingError(f"{self.name} expected to begin again, and was told {type(order).__name__}")
                self._order = None
                self._off = threading.Event()
                self.group = order.group
            assert self.comm is not None
            if order.returns:
                self._forget()
            self._training = None
            old = self.comm.inner
            self.comm.forget()
            try:
                self.comm.regroup(self._form(order.group, order.members), names=order.members)
                _leave(old)
            except CommError as error:
                self.stuck(error)
            else:
                return

    def _forget(self) -> None:
        """The run goes back to its last checkpoint: what this rank holds is dropped."""
        if self._training is not None and not (self.joins or self.returns):
            self._steps_before = self._training.step_number
        self.returns, self.entered, self.joins = True, False, False
        self.sections, self._outcome = 0, None
        self._change = self._open = self._laying = self._began_s = None

    def stuck(self, error: CommError) -> None:
        """Before the loop: communication failed."""
        self.report(GotStuck(group=self.group, reason=f"{type(error).__name__}: {error}"))

    def enter(self, training: Training) -> None:
        """The script has come to its loop: wait to be let in, and take what the run has."""
        if self._training is not None:
            raise InputError(
                "an elastic run has one loop, and this script has come to a second one: train in one loop, or one fit"
            )
        self._training = training
        self.report(training.entering(None if self.joins else self.group))
        self._park_and_obey()
        self.entered = True

    def begin_section(self, section: OpenSection) -> None:
        """Its body begins."""
        self._open = section
        self._began_s = self._clock.now_s()

    def pass_point(self, sums: torch.Tensor) -> None:
        """Sum over the ranks; when it is done all ranks have completed the body. Then commit, with the sums.

        Raises:
            CommError: the point was not passed by this rank.
        """
        assert self.comm is not None
        assert self._open is not None
        self.at(Moment.BEFORE_POINT)
        with self._moved:
            asked = float(self._is_asked and self._open.admits)
        total = torch.cat([sums.to(torch.float64), torch.tensor([asked], dtype=torch.float64)])
        self.comm.allreduce(total)
        is_due = bool(total[-1] > 0)
        self._commit(total[:-1].tolist())
        self._is_due = self._is_due or is_due

    def before_step(self) -> None:
        """Park here if a change is due: what follows the last step is done, so that a newcomer can begin with the next."""
        if self._is_due:
            self._park_and_obey()

    def repair(self, error: BaseException) -> bool:
        """The section that is open has failed: park, and carry out what the run decides. Whether it was finished."""
        self.report(GotStuck(group=self.group, reason=f"{type(error).__name__}: {error}"))
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

    def end(self) -> None:
        """The script has come to its end."""
        with self._moved:
            self._has_ended = True
            self._moved.notify_all()

    def leave(self) -> None:
        """Ask that this rank may leave; it goes between two steps."""
        self.is_leaving = True
        self.report(WantsToLeave())

    def report(self, what: Report) -> None:
        self.reports.put(what)

    def at(self, moment: Moment) -> None:
        """Tell the hook of the tests."""
        if self._hook is not None:
            self._hook(moment, self.name, -1 if self._training is None else self._training.step_number)

    @property
    def is_called_off(self) -> bool:
        """Whether the body that is under way is in vain: a rank has died, and what this rank computes will be done again."""
        return self._off.is_set() and self._open is not None

    @property
    def has_ended(self) -> bool:
        """Whether the script has come to its end."""
        return self._has_ended

    @property
    def is_watched(self) -> bool:
        """Whether there is a hook."""
        return self._hook is not None

    # -- inside ---------------------------------------------------------------------------------------------------------

    def _commit(self, outcome: Any) -> None:
        section, self._open = self._open, None
        assert section is not None
        self.sections += 1
        self._outcome = outcome
        section.commit(outcome)
        self._began_s = None

    def _await_order(self) -> Order:
        """Under the condition. Returns the order, which stays in place."""
        if not self._moved.wait_for(lambda: self._order is not None, timeout=ORDER_TIMEOUT_S):
            raise TrainingError(
                f"{self.name} has waited {ORDER_TIMEOUT_S:.0f} s for orders of the run after its communication broke; is the "
                "process that started the run alive?"
            )
        assert self._order is not None
        return self._order

    def _park_and_obey(self) -> None:
        """Stop, and go on when a change is carried out."""
        noticed_s = self._clock.now_s()
        spent_s = 0.0 if self._began_s is None else noticed_s - self._began_s
        settled = "none"
        while True:
            with self._moved:
                self._is_parked = True
                self._moved.notify_all()
                order = self._await_order()
                self._order, self._is_parked = None, False
                self._is_asked = self._is_due = False
                self._off = threading.Event()
            if isinstance(order, Restart):
                with self._moved:
                    self._order = order
                raise BeginAgain
            if (how := self._settle(order)) != "none":
                settled = how
            if isinstance(order, Dismiss):
                self.is_over = True
                self._was_finished = settled == "finished"
                return
            try:
                self._carry_out(order)
            except CommError as error:
                self._forming = None
                self.report(GotStuck(group=order.change.group, reason=f"{type(error).__name__}: {error}"))
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
                    repair_s=self._clock.now_s() - noticed_s,
                )
            )
            return

    def _settle(self, order: RegroupOrder | Dismiss) -> str:
        """Finish or forget what is open. Says which."""
        told = order.change if isinstance(order, RegroupOrder) else order
        how = "none"
        if self.name in told.finish:
            how = "finished" if self._open is not None and self._open is not self._laying else "none"
            self._commit(told.outcome)
        elif self._open is not None:
            how = "redone" if self._open is not self._laying else "none"
            section, self._open = self._open, None
            section.roll_back()
        self._laying = None
        if isinstance(told, Regroup) and self.name in told.newcomers:
            self.sections = told.sections
        if self.sections != told.sections:
            raise TrainingError(
                f"{self.name} has passed {self.sections} sections, and the run takes it that all have passed {told.sections}; "
                "this is an error of Tatami's"
            )
        return how

    def _carry_out(self, order: RegroupOrder) -> None:
        change = order.change
        training = self._training
        assert training is not None
        assert self.comm is not None
        self.group = change.group
        self.at(Moment.FORMING)
        old = self.comm.inner
        group = self._form(change.group, change.members)
        self.comm.regroup(group, names=change.members)
        self._forming = None
        _leave(old)
        self.at(Moment.TAKING)
        put_in_place = training.relay(change, name=self.name, cluster=Cluster(processors=order.processors))

        def commit(_: Any) -> None:
            put_in_place()
            self._change = change

        self._laying = OpenSection(commit=commit, roll_back=lambda: None, admits=True)
        self._open = self._laying
        self.at(Moment.LAYING)
        self.comm.barrier()
        self._commit(None)
        self._laying = None
        self.at(Moment.LAID)

    @property
    def change(self) -> Regroup | None:
        """The last one that this rank has carried out."""
        return self._change

    def _form(self, group: int, members: tuple[str, ...]) -> AbstractCommunicator:
        """The communicator of a group, whose members all form it now.

        Raises:
            CommError: it was called off, or took too long.
        """
        timeout_s = self.assignment.timeout_s
        if len(members) == 1:
            return single_communicator(timeout_s=timeout_s)
        host, port = self.assignment.store
        rank = members.index(self.name)
        try:
            store = reach_store(host, port, timeout_s=timeout_s)
        except RuntimeError as error:
            raise CommError(f"{self.name} does not reach the store of the run at {host}:{port}: {error}") from error
        self._forming = TorchdistCommunicator(
            store, rank=rank, size=len(members), name=f"group/{group}", timeout_s=timeout_s, off=self._off
        )
        return self._forming


def _leave(group: AbstractCommunicator) -> None:
    if isinstance(group, TorchdistCommunicator):
        group.sever()
        group.close()


_session: list[Session] = []


def current_session() -> Session | None:
    """The rank that this process is; None outside of elastic runs."""
    return _session[0] if _session else None


def set_session(session: Session | None) -> None:
    """Called by the process of a rank before the script begins."""
    _session[:] = [] if session is None else [session]
