"""The membership of an elastic run as a pure state machine: events in, actions out.

No Ray, no torch, no clock: the runtime executes it on real processes, the rehearsal on simulated ones. The rule that makes a
repaired run exact, without undoing anything: a rank passes the point of a section only when all ranks have completed its body.
So at a death, if any survivor has passed, all others have what they need, and commit too; if none has, all do the section again
under the new layout. After every change all members have passed the same number of sections.

Where the optimizer is sharded, a member that goes takes the only copy of its shard along, and a commit sends weights: all go
back to the last checkpoint then, or to the beginning, and members that join wait for that.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import Enum

from tatami.errors import InputError, PlanError
from tatami.membership import actions as act
from tatami.membership import events as ev
from tatami.membership.actions import Action, EndCause
from tatami.membership.copies import Held, Lost, mirrors_of, takes
from tatami.tiling import Layout, StagedLayout
from tatami.workload import Workload

MOST_STALLS = 3
"""Changes in a row that are due to broken connections between members that all live. After so many the run stops."""


class RunStage(Enum):
    """What the members are at."""

    STARTING = "starting"
    RUNNING = "running"
    ASKING = "asking"
    HALTING = "halting"
    CHANGING = "changing"
    DONE = "done"


THE_RUN_BEGINS = "the run begins"
"""The reason of the first group, where nothing else has happened."""


class Membership:
    """Call `handle` with each event in the order they are seen, and carry out the actions in their order.

    Args:
        members: that the run begins with, in the order of their ranks; they form group 0 at first.
        plan: gives the layout for these members; may raise `PlanError`.
        copies: holders that every unit has at least, where there are as many ranks: 1 or 2.

    Attributes:
        stage: what the members are at.
        members: of the group, in the order of their ranks.
        held: who holds which units; None before the first section.
        group: the number of the group of connections.
        sections: that all members had passed at the last change.
        ticket_laid: of the last change that all members have carried out.
    """

    def __init__(
        self, members: Sequence[str], *, plan: Callable[[tuple[str, ...]], Layout | StagedLayout], copies: int = 2
    ) -> None:
        if copies not in (1, 2):
            raise InputError(f"copies must be 1 or 2, not {copies}: a unit has one holder in each replica, or one and a mirror")
        self.stage = RunStage.STARTING
        self.members = tuple(members)
        self.held: Held | None = None
        self.group = 0
        self.sections = 0
        self.ticket_laid = -1
        self._workload: Workload | None = None
        self._shards = False
        self._is_broken = False
        self._plan = plan
        self._copies = copies
        self._alive = set(members)
        self._entered: set[str] = set()
        self._gone: set[str] = set()
        self._waiting: list[str] = []
        self._leaving: set[str] = set()
        self._wanted: Layout | StagedLayout | None = None
        self._outcome: object = None
        self._ended: set[str] = set()
        self._ticket = 0
        self._awaited: set[str] = set()
        self._halted: dict[str, ev.Halted] = {}
        self._change: act.Regroup | None = None
        self._stalls = 0
        self._has_checkpoint = False
        self._returns = False
        self._reasons: list[str] = []
        self._broken: list[str] = []
        self._actions: list[Action] = []

    @property
    def wants_change(self) -> bool:
        """Whether there are members to be let in or out."""
        return bool(self._waiting and not self._shards) or bool(self._leaving & set(self.members))

    @property
    def _why(self) -> str:
        """What led to a change; connections that broke are told of only where no member is gone that broke them."""
        return ", ".join(self._reasons or self._broken)

    def handle(self, event: ev.MemberEvent) -> tuple[Action, ...]:
        """What is to be done about `event`, in this order; nothing once the run is over."""
        self._actions = []
        # What is still heard of a member that is gone was said before.
        if self.stage is not RunStage.DONE and event.member not in self._gone:
            self._take(event)
        return tuple(self._actions)

    # -- events -----------------------------------------------------------------------------------------------------

    def _take(self, event: ev.MemberEvent) -> None:
        match event:
            case ev.Entered():
                self._enter(event)
            case ev.Leaving():
                self._let_go(event.member, f", {event.because}" if event.because else "")
            case ev.Unbalanced():
                # Once the members change, there is a new plan for them anyway.
                if self.stage is RunStage.RUNNING and set(event.layout.processors) <= set(self.members):
                    self._wanted = event.layout
                    self._reasons.append(event.because)
                    self._ask()
            case ev.Died():
                self._lose(event.member, f"{event.member} died")
            case ev.Silent():
                if event.member in self._alive:
                    self._do(act.Kill(member=event.member))
                self._lose(event.member, f"{event.member} gave no sign of life")
            case ev.Stalled():
                self._stall(event)
            case ev.Halted():
                if event.ticket == self._ticket and event.member in self._awaited:
                    self._awaited.discard(event.member)
                    self._halted[event.member] = event
                    self._has_checkpoint = self._has_checkpoint or event.has_checkpoint
                    if not self._awaited:
                        self._decide()
            case ev.Laid():
                if event.ticket == self._ticket and event.member in self._awaited and self.stage is RunStage.CHANGING:
                    self._awaited.discard(event.member)
                    self._see_whether_laid()
            case ev.Ended():
                self._ended.add(event.member)
                if not set(self.members) & self._alive - self._ended:
                    self.stage = RunStage.DONE

    def _enter(self, event: ev.Entered) -> None:
        if event.group is not None:
            # Where it has been told to begin again since, it will say so again.
            if self.stage is RunStage.STARTING and event.group == self.group:
                self._entered.add(event.member)
                self.held = self.held or Held(layout=event.layout)
                self._workload, self._shards = event.workload, event.shards
                self._see_whether_started()
            return
        self._alive.add(event.member)
        self._waiting.append(event.member)
        if not self._shards:  # it would have no shard: it waits until all begin again
            self._reasons.append(f"{event.member} joined")
            self._ask()

    def _see_whether_started(self) -> None:
        if self._entered >= set(self.members):
            self._halted = {each: ev.Halted(member=each, ticket=self._ticket, sections=0) for each in self.members}
            goes_on = "the run goes on from its last checkpoint" if self._has_checkpoint else "the run begins again"
            self._reasons.append(goes_on if self._returns else THE_RUN_BEGINS)
            self._returns = False
            self._decide()

    def _let_go(self, member: str, because: str) -> None:
        if member not in self._alive or member in self._leaving:
            return
        if member in self._waiting:  # it has nothing yet
            self._waiting.remove(member)
            self._forget(member)
            self._do(act.Release(member=member))
            return
        self._leaving.add(member)
        self._reasons.append(f"{member} leaves{because}")
        self._ask()

    def _lose(self, member: str, reason: str) -> None:
        was_here = member in self._alive
        self._forget(member)
        if not was_here:
            return
        if member in self._waiting:
            self._waiting.remove(member)
            return
        self._reasons.append(reason)
        self._stalls = 0  # what has broken there was this member's
        if self.stage is RunStage.STARTING:
            self._begin_again()
        elif member in self._ended and not set(self.members) & self._alive - self._ended:
            self.stage = RunStage.DONE
        else:
            self._abort()

    def _forget(self, member: str) -> None:
        self._alive.discard(member)
        self._leaving.discard(member)
        self._gone.add(member)

    def _begin_again(self) -> None:
        self.members = tuple(each for each in self.members if each in self._alive)
        self._entered.clear()
        self.held = None
        self.group += 1
        if not self.members:
            self._stop(EndCause.NO_MEMBERS, f"{self._why}, and no rank is left to begin with")
            return
        self._ticket += 1
        goes_on = {"returns": self._returns, "resumes": self._returns and self._has_checkpoint}
        self._do(act.Restart(ticket=self._ticket, group=self.group, members=self.members, **goes_on))

    def _return(self, reason: str) -> None:
        """What is held is lost, or half done: all that are left, and those that wait, begin again at the last checkpoint."""
        for name in self._leaving & self._alive:
            self._forget(name)
            self._do(act.Release(member=name))
        self.members, self._waiting = (*self.members, *self._waiting), []
        self.sections, self._halted, self._stalls, self._is_broken = 0, {}, 0, False
        self._reasons[:] = [reason]
        self.stage, self._returns = RunStage.STARTING, True
        self._begin_again()

    def _stop_or_return(self, reason: str) -> None:
        """No member is left."""
        if self._has_checkpoint and self._waiting:
            self._return(reason)
        else:
            self._stop(EndCause.NO_MEMBERS, reason)

    def _stall(self, event: ev.Stalled) -> None:
        if event.group != self.group or event.member not in self._alive or self.stage in (RunStage.HALTING, RunStage.DONE):
            return  # what it tells of is being repaired already
        self._stalls += 1
        self._broken.append(f"{event.member} could not go on: {event.reason}")
        if self.stage is RunStage.STARTING:
            if self._stalls > MOST_STALLS:
                self._stop(EndCause.STALLED, self._broken[-1])
            else:
                self._begin_again()
        elif self._stalls > MOST_STALLS:
            what = f"{self._stalls} times in a row connections broke between members that all live"
            self._stop(EndCause.STALLED, f"{what}; the last: {self._broken[-1]}. Look at the network between the hosts")
        else:
            self._abort()

    # -- halting ----------------------------------------------------------------------------------------------------

    def _ask(self) -> None:
        if self.stage is RunStage.RUNNING:
            self.stage = RunStage.ASKING
            self._await()
            self._do(act.Ask(members=self._living(), ticket=self._ticket))

    def _abort(self) -> None:
        self.stage, self._is_broken = RunStage.HALTING, True
        self._await()
        if not self._awaited:
            self._stop_or_return(f"{self._why}, and no rank is left that holds the network")
            return
        self._do(act.Abort(members=self._living(), ticket=self._ticket))

    def _await(self) -> None:
        """From now on only answers to a new order count."""
        self._ticket += 1
        self._awaited = set(self._living())
        self._halted = {}

    def _living(self) -> tuple[str, ...]:
        """Members of the group, and those that a change under way has let in."""
        names = self.members if self._change is None else (*self.members, *self._change.newcomers)
        return tuple(name for name in dict.fromkeys(names) if name in self._alive)

    # -- changing ---------------------------------------------------------------------------------------------------

    def _decide(self) -> None:
        """All have stopped: settle what is open, and say how it goes on."""
        change, self._change = self._change, None
        if change is not None:
            # A death in the middle of a change. The change ends in a section of its own, which follows the same rule: if any
            # has passed it, all have their rows, and the new layout holds; if none has, it was never there, and its newcomers
            # wait again.
            if any(told.sections > change.sections for told in self._halted.values()):
                self._adopt(change)  # some have committed it, so all can
            else:
                self._waiting = [*(name for name in change.newcomers if name in self._alive), *self._waiting]
                self._halted = {name: told for name, told in self._halted.items() if name in self.members}
        if not self._halted:
            self._stop_or_return(f"{self._why}, and no rank is left that holds the network")
            return
        # Not less than was decided before: those that had passed may have died before the others were told to finish.
        # Example: a death in section 8. Survivors a, b and c have passed 8, 7 and 7: a has the sums, so that everyone had
        # completed the body, the dead one too. b and c are given the outcome and commit (`finish`), and section 9 is next. With
        # 7, 7 and 7 no member has committed anything, and all do section 8 again. 8, 7 and 6 cannot be: no member passes 8
        # before all have completed its body, and so passed 7.
        passed = max(self.sections, *(told.sections for told in self._halted.values()))
        finish = tuple(name for name, told in self._halted.items() if told.sections == passed - 1)
        self._outcome = next((told.outcome for told in self._halted.values() if told.sections == passed), self._outcome)
        outcome = self._outcome
        late = [name for name, told in self._halted.items() if told.sections < passed - 1]
        if late:
            where = ", ".join(f"{name} has passed {told.sections}" for name, told in sorted(self._halted.items()))
            self._stop(EndCause.OUT_OF_STEP, f"ranks are more than one section apart: {where}; this is an error of Tatami's")
            return
        if passed > self.sections + 1:
            self._stalls = 0  # it did get on since the last change
        if any(told.ended for told in self._halted.values()):
            going = tuple(name for name, told in self._halted.items() if not told.ended)
            self.stage = RunStage.DONE
            self._do(act.Dismiss(ticket=self._ticket, members=going, finish=finish, sections=passed, outcome=outcome))
            return
        is_half_done = any(each.is_half_done for each in self._halted.values())
        if self._shards and (self._is_broken or is_half_done or finish or self._leaving & set(self.members)):
            self._return(f"{self._why}, and each shard of the optimizer's state has one holder")
            return
        self.sections = passed
        self._lay(finish, outcome)

    def _lay(self, finish: tuple[str, ...], outcome: object) -> None:
        assert self.held is not None
        assert self._workload is not None
        here = tuple(name for name in self.members if name in self._alive)
        going = tuple(name for name in here if name in self._leaving)
        # What follows a step that is only now finished is still to be done, and a newcomer would be given the state before it.
        admits = not finish and all(told.admits for told in self._halted.values())
        newcomers = tuple(self._waiting) if admits and not self._shards else ()
        staying = (*(name for name in here if name not in self._leaving), *newcomers)
        if not staying:
            self._stop(EndCause.NO_MEMBERS, f"{self._why}, and no rank is left")
            return
        laid = self._layout(staying)
        if laid is None:
            return
        after = Held(layout=laid, mirrors=mirrors_of(laid, copies=1 if self._shards else self._copies))
        # Those that leave are asked for rows only where no other rank has them; otherwise they can go at once.
        kept = tuple(name for name in here if name not in self._leaving)
        found, lost = takes(self.held, after, workload=self._workload, sources=kept)
        members = staying
        if (lost or not kept) and going:
            found, lost = takes(self.held, after, workload=self._workload, sources=here)
            members = (*staying, *going)
        else:
            for name in going:
                self._forget(name)
                self._do(act.Release(member=name))
        if lost and self._has_checkpoint:
            self._return(self._what_is_lost(lost, advises=False))
            return
        if lost:
            self._stop(EndCause.UNITS_LOST, self._what_is_lost(lost))
            return
        self.group += 1
        self._ticket += 1
        self._change = act.Regroup(
            ticket=self._ticket,
            group=self.group,
            members=members,
            sections=self.sections,
            finish=tuple(name for name in finish if name in members),
            outcome=outcome,
            newcomers=newcomers,
            source=(kept or going)[0],
            layout=after.layout,
            mirrors=after.mirrors,
            takes=found,
            reason=self._why or "to let members go",
        )
        self._waiting = [name for name in self._waiting if name not in newcomers]
        self._reasons, self._broken = [], []
        self.stage = RunStage.CHANGING
        self._awaited = set(members)
        self._do(self._change)

    def _layout(self, staying: tuple[str, ...]) -> Layout | StagedLayout | None:
        assert self.held is not None
        wanted, self._wanted = self._wanted, None
        is_same = set(staying) == set(self.members)
        if wanted is not None and is_same and set(wanted.processors) <= set(staying):
            return wanted
        placed = set(self.held.layout.processors)
        if placed == set(staying) or (is_same and placed <= set(staying)):  # some members may have no tile
            return self.held.layout  # it is as good as it was
        try:
            return self._plan(staying)
        except PlanError as error:
            self._stop(EndCause.CANNOT_PLAN, f"{self._why}; for those that are left there is no plan: {error}")
            return None

    def _see_whether_laid(self) -> None:
        if self._awaited:
            return
        assert self._change is not None
        self._adopt(self._change)
        self.ticket_laid = self._change.ticket
        self._change = None
        self.sections += 1
        self.stage = RunStage.RUNNING
        if self.wants_change:
            self._ask()

    def _adopt(self, change: act.Regroup) -> None:
        self.members = change.members
        self.held = Held(layout=change.layout, mirrors=change.mirrors)

    def _what_is_lost(self, lost: Sequence[Lost], *, advises: bool = True) -> str:
        what = "; ".join(f"{self._named(each)}, held by {' and '.join(each.held_by)}" for each in lost) + ","
        if not advises:
            return f"{self._why}, with which {what} are lost"
        advice = "copies=2 survives the death of one rank at a time"
        if self._copies > 1:
            advice = "A layout of more replicas survives more: tatami.tile(layout=...)"
        return f"{self._why}, with which {what} are lost. {advice}; a checkpoint (Trainer(checkpoint=...)) survives all of them"

    def _named(self, lost: Lost) -> str:
        assert self._workload is not None
        if (piece := lost.block - len(self._workload.blocks)) >= 0:
            return f"piece {piece} ({self._workload.pieces[piece].name})"
        return f"units {lost.units.start} to {lost.units.stop - 1} of block {lost.block}"

    def _stop(self, cause: EndCause, reason: str) -> None:
        self.stage = RunStage.DONE
        self._do(act.EndRun(cause=cause, reason=reason))

    def _do(self, action: Action) -> None:
        self._actions.append(action)
