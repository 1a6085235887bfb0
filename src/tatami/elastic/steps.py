"""The loop of a training written by hand, which goes on where ranks die, leave or join.

    for step in tatami.steps(model, optimizer, count=1000):
        with step:
            x, y = model.local(*batch(step.number))
            loss = loss_function(model(x), y)
            loss.backward()
            step.update(loss)
        if step.is_done:
            print(step.number, step.loss)

A step that a death has disturbed is finished where any rank has all its gradients, and otherwise comes again. Under mpiexec or
torchrun the same loop runs, and ends with the first rank that dies.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch

from tatami.cluster import Cluster
from tatami.comm.rendezvous import Whereabouts
from tatami.elastic.abort_hooks import heed, tell_moments
from tatami.elastic.orders import EnteredLoop, WantsLayout
from tatami.elastic.sections import OpenSection
from tatami.elastic.session import Session, current_session
from tatami.elastic.settings import Moment
from tatami.elastic.speed_watch import SpeedWatch
from tatami.errors import CommError, InputError, warn
from tatami.membership import Entered, Regroup, Unbalanced
from tatami.model.model import TiledModel
from tatami.random_state import random_state, set_random_state
from tatami.runtime.optimizers import check_optimizer
from tatami.runtime.phases import IterationPhase
from tatami.same_steps import num_steps
from tatami.stages.stand_in import StandIn
from tatami.state.mirroring import MirrorTensors
from tatami.state.regroup import common_state, load_common_state, relay, tell_newcomers
from tatami.state.repairing import FitState, Stateful
from tatami.state.training_state import draws_state, refuse_rows, restore_draws
from tatami.train.own_times import OwnTimes

LEAST_SPEED = 0.01
"""Smallest speed, as a fraction of the fastest rank's: a slower rank without a tile would delay every step, and leaves."""

_SETTINGS = 2**13
"""Numbers below it, their squares, and sums of these over thousands of ranks are exact."""


def steps(
    model: TiledModel, optimizer: torch.optim.Optimizer, *, count: int, carry: Mapping[str, Stateful] | None = None
) -> Steps:
    """Training steps 0 to count - 1, each to be used in a `with` block. Collective.

    Args:
        model: from `tatami.tile`.
        optimizer: of its parameters.
        count: how many steps.
        carry: what else has a state that all ranks share, such as a schedule: given to ranks that join.

    Raises:
        ModelError: the optimizer does not work element by element.
        InputError: something else was given than is asked for; `carry` has an optimizer of the model's weights.
    """
    if not isinstance(model, TiledModel):
        raise InputError(f"tatami.steps takes the model that tatami.tile returns, not a {type(model).__name__}")
    if not isinstance(count, int) or count < 0:
        raise InputError(f"count must be a whole number of at least 0, not {count!r}")
    own = {id(parameter) for parameter in model.parameters()}
    if not any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
        raise InputError("the optimizer of tatami.steps has no parameter of the model: make it from model.parameters()")
    for name, each in (carry or {}).items():
        if not (hasattr(each, "state_dict") and hasattr(each, "load_state_dict")):
            raise InputError(f"carry[{name!r}] has no state_dict() and load_state_dict(): {each!r}")
    return Steps(model, optimizer, count=count, carry=carry or {}, session=current_session())


def repairs_of_fit(model: TiledModel, optimizer: torch.optim.Optimizer, state: FitState) -> Steps:
    """For the Trainer, whose updates are steps."""
    return Steps(model, optimizer, count=0, carry={"fit": state}, session=current_session(), put_back=state.put_back)


class Steps:
    """See `steps`."""

    def __init__(
        self,
        model: TiledModel,
        optimizer: torch.optim.Optimizer,
        *,
        count: int,
        carry: Mapping[str, Stateful],
        session: Session | None,
        put_back: Callable[[], None] = lambda: None,
    ) -> None:
        check_optimizer(optimizer)
        refuse_rows(model, {f"carry={{{name!r}: ...}}": thing for name, thing in carry.items()})
        # A shard of the optimizer's state cannot move to another stage.
        self._keeps_stages = model.stage is not None and model.shards_optimizer
        if self._keeps_stages and session is not None and session.assignment.retile and model.comm.rank == 0:
            warn(
                "pipeline stages with a sharded optimizer are not re-tiled yet, so --retile (ElasticSettings.retile) does "
                "nothing: give tatami.tile stages=1 or no sharded_optimizer"
            )
        self.model = model
        self.optimizer = optimizer
        self.session = session
        self.number = 0
        self._count = count
        self._carry = carry
        self._put_back = put_back
        self._mirror = MirrorTensors()
        self._times: OwnTimes | None = None
        self._speeds: SpeedWatch | None = None
        self._before: dict[str, Any] = {}

    def __iter__(self) -> Iterator[RepairedStep]:
        self.enter()
        while self.number < self._count:
            step = self.step()
            yield step
            if not step.is_entered:
                raise InputError(
                    f"step {step.number} was not used in a `with` block, so it would come again forever. Put what is skipped "
                    "inside of the block, or use break"
                )
        self.whole(lambda: None)  # no rank leaves the loop while another may have to come back to it
        self.through()

    @property
    def joins(self) -> bool:
        """Whether this rank joins a run that is under way."""
        return self.session is not None and self.session.joins

    @property
    def returns(self) -> bool:
        """Whether the run goes back to its last checkpoint."""
        return self.session is not None and self.session.returns and self.session.resumes

    def saved(self) -> None:
        """There is a checkpoint of all of training that the script goes on from when it begins again."""
        if self.session is not None:
            self.session.has_checkpoint = True

    def enter(self) -> None:
        """Wait to be let in."""
        if self.session is not None:
            if self.session.is_watched:
                tell_moments(self.model, self.session)
            heed(self.model, self.session)
            self.session.enter(self)

    def through(self) -> None:
        """The loop is behind this rank: its script may end."""
        if self.session is not None:
            self.session.is_through = True

    def step(self) -> RepairedStep:
        """The next one."""
        return RepairedStep(self)

    def whole(self, body: Callable[[], Any]) -> Any:
        """What `body`, a collective such as `tatami.train.whole_state_dict(model)`, returns; again where a rank dies in it."""
        return body() if self.session is None else self.session.section(body)

    def leave(self) -> None:
        """Ask that this rank may leave, as after the notice of a spot instance: it goes between two of the next steps."""
        if self.session is not None:
            self.session.leave()
        else:
            warn("loop.leave() does nothing here: ranks leave in elastic runs alone (tatami run --elastic)")

    # -- for the session ------------------------------------------------------------------------------------------------

    @property
    def step_number(self) -> int:
        return self.number

    def entering(self, group: int | None, *, whereabouts: Whereabouts) -> EnteredLoop:
        """What the run is told of this rank when its script comes to the loop in `group`; see `EnteredLoop`."""
        model, session = self.model, self.session
        assert session is not None
        workload = model.workload if model.staged is None else model.staged.workload
        return EnteredLoop(
            event=Entered(
                member=session.name,
                group=group,
                layout=model.whole_layout,
                workload=workload,
                shards=model.shards_optimizer,
            ),
            whereabouts=whereabouts,
            stages=None if model.staged is None else model.staged.stages,
            processor=replace(model.cluster.processors[model.comm.rank], host=model.comm.hosts[model.comm.rank]),
            links=dict(model.cluster.links),
        )

    def relay(self, change: Regroup, *, name: str, cluster: Cluster) -> Callable[[], None]:
        """Take the rows that `change` gives to this rank, `name`; returns what puts them in place. Collective."""
        model, session = self.model, self.session
        assert session is not None
        put_in_place = relay(model, change, name=name, cluster=cluster, optimizer=self.optimizer, mirror=self._mirror)
        state = tell_newcomers(model.comm, change, self._state)
        if state is not None:
            load_common_state(model, self.optimizer, state["common"])
            self.number = state["number"]
            for key, each in self._carry.items():
                each.load_state_dict(state["carried"][key])

        def put_all_in_place() -> None:
            put_in_place()
            # The tiles lie otherwise: as the watch has decided, or because the members have changed.
            if self._speeds is not None and self._speeds.suits(self.model):
                self._speeds.moved(session.stopped_for_s)
            elif session.assignment.retile and not self._keeps_stages:
                self._times = self._times or OwnTimes(self.model)
                self._speeds = SpeedWatch(self.model, times=self._times)

        return put_all_in_place

    def _state(self) -> dict[str, Any]:
        carried = {key: each.state_dict() for key, each in self._carry.items()}
        return {"common": common_state(self.model, self.optimizer), "carried": carried, "number": self.number}

    # -- for the steps --------------------------------------------------------------------------------------------------

    def keep(self) -> None:
        """Remember what a forward pass changes, beside gradients."""
        model = self.model
        buffers = [each for each in model.module.buffers() if not isinstance(each, StandIn)]
        buffers += [each for each in self._mirror.tensors.values() if not isinstance(each, torch.nn.Parameter)]
        self._before = {
            "buffers": [(each, each.detach().clone()) for each in buffers],
            **draws_state(model),
            "chance": random_state(),
        }

    def put_back(self) -> None:
        """As it was when the step began."""
        model = self.model
        with torch.no_grad():
            for buffer, value in self._before["buffers"]:
                buffer.copy_(value)
        restore_draws(model, self._before)
        set_random_state(self._before["chance"])
        self.optimizer.zero_grad(set_to_none=True)
        model.phases.finish_iteration()
        self._put_back()

    def local_settings(self) -> list[float]:
        """Numbers by which `check_settings` checks that all optimizers have the same settings: 1, a checksum, its square."""
        number = zlib.crc32(repr(self._settings()).encode()) % _SETTINGS
        return [1.0, float(number), float(number**2)]

    def check_settings(self, summed: Sequence[float]) -> None:
        """Hold them against each other.

        Args:
            summed: (3,), what `local_settings` gave, over all ranks.

        Raises:
            InputError: ranks have different ones.
        """
        ranks, numbers, squares = summed
        if ranks * squares != numbers**2:
            raise InputError(
                f"in step {self.number} the ranks' optimizers have different settings; those of {self.model.name} are "
                f"{', '.join(f'{name}={value}' for name, value in self._settings()[0])}. A schedule, or what else changes "
                "them, must be given to ranks that join: tatami.steps(..., carry={'schedule': schedule})"
            )

    def _settings(self) -> list[list[tuple[str, Any]]]:
        return [
            [
                (name, float(value) if isinstance(value, torch.Tensor) else value)
                for name, value in group.items()
                if name != "params"
            ]
            for group in self.optimizer.param_groups
        ]

    def local_report(self) -> list[float]:
        """What travels with the sums of a step; `apply_totals` is given its sum over all ranks."""
        return [] if self._speeds is None else self._speeds.local_report()

    def apply_totals(self, summed: list[float]) -> None:
        """Ask for other tiles where they would be faster, by `summed`.

        A rank that is best left out has no tile then, looks now and then how fast it is, and gets one again when that pays; one
        that is too slow for that asks to leave.
        """
        decision = None if self._speeds is None else self._speeds.apply_totals(summed)
        if decision is None or self.session is None:
            return
        speeds, before, after = decision.speeds, set(self.model.whole_layout.processors), set(decision.layout.processors)
        least = 0.0 if self.model.shards_optimizer else LEAST_SPEED * max(speeds.values())
        leaving = {name for name in self.model.names if name not in after and speeds[name] < least}
        if self.model.name in leaving:
            self.session.leave(because="too slow to be worth its messages")
        elif not leaving and self.model.comm.rank == 0:  # all have decided the same
            told = [f"{name} waits without a tile" for name in sorted(before - after)]
            told += [f"{name} has a tile again" for name in sorted(after - before)]
            because = ", ".join([decision.kind.value, *told])
            event = Unbalanced(member=self.session.name, layout=decision.layout, because=because)
            self.session.report(WantsLayout(event=event, speeds=dict(speeds)))

    def mirror_gradients(self) -> None:
        """Let the neighbour that keeps this rank's units have their gradients, where there is one."""
        change = None if self.session is None else self.session.change
        if change is None or self.session is None or self.session.comm is None:
            return
        name = self.session.name
        keeper = next((mirror.keeper for mirror in change.mirrors if mirror.owner == name), None)
        owner = next((mirror.owner for mirror in change.mirrors if mirror.keeper == name), None)
        if keeper is not None and owner is not None:
            members = change.members
            self._mirror.exchange(self.session.comm, keeper=members.index(keeper), owner=members.index(owner))


class RepairedStep:
    """One step, as a context manager.

    Attributes:
        number: from 0.
        loss: over the global batch; None until it is done.
        is_done: whether the update was made. Where not, the same step comes again.
        is_entered: whether it was used in a `with` block.
    """

    def __init__(self, steps: Steps) -> None:
        self.number = steps.number
        self.loss: float | None = None
        self.is_done = self.is_entered = False
        self._steps = steps
        self._is_updating = False
        self._num_sums = self._num_updates = 0
        self._apply: Callable[[list[float]], object] = lambda _: steps.optimizer.step()

    def __enter__(self) -> Self:
        steps, session = self._steps, self._steps.session
        self.is_entered = True
        self._num_updates = num_steps(steps.optimizer)
        if session is not None:
            session.before_step()
        steps.optimizer.zero_grad(set_to_none=True)
        if session is not None:
            steps.keep()
            session.begin_section(OpenSection(commit=self._commit, roll_back=steps.put_back, admits=True))
            session.at(Moment.BEFORE_FORWARD)
        return self

    def update(self, loss: torch.Tensor | Sequence[torch.Tensor]) -> None:
        """Make the update, when all ranks have all their gradients. The last thing in the `with` block.

        Args:
            loss: a scalar, of this rank's samples, or those of its micro-batches; `loss` becomes that of the global batch.

        Raises:
            InputError: the loss is not a tensor, or those of another number of micro-batches; the update was made already.
        """
        for each in [loss] if isinstance(loss, torch.Tensor | float | int) else loss:
            if not isinstance(each, torch.Tensor):
                raise InputError(f"step.update takes the loss as a tensor, as it was before .item(), not {each!r}")
        self.pass_point(torch.tensor([self._steps.model.own_share(loss)], dtype=torch.float64))

    def pass_point(self, sums: torch.Tensor, *, apply: Callable[[list[float]], object] | None = None) -> None:
        """Sum over the ranks, the loss first, when all have all their gradients; then make the update.

        Args:
            sums: of this rank; a vector of float64, the loss first.
            apply: given the sums over all, makes the update, and sends nothing; None: the optimizer's step.
        """
        if self._is_updating:
            raise InputError(f"step.update was called twice in step {self.number}: call it once, last in the `with` block")
        if num_steps(self._steps.optimizer) != self._num_updates:
            raise InputError(
                f"optimizer.step() was called in step {self.number}, and step.update(loss) makes the optimizer's step itself: "
                "leave optimizer.step() out"
            )
        self._is_updating = True
        self._apply = apply or self._apply
        model, session = self._steps.model, self._steps.session
        self._steps.mirror_gradients()
        self._num_sums = len(sums)
        with model.phases.during(IterationPhase.GRADIENTS):
            if session is not None:
                told = torch.tensor([*self._steps.local_settings(), *self._steps.local_report()], dtype=torch.float64)
                session.pass_point(torch.cat([sums.to(torch.float64), told]))
            else:
                model.comm.allreduce(sums)
        if session is None:
            self._commit(sums.tolist())

    def _commit(self, outcome: list[float]) -> None:
        steps, session = self._steps, self._steps.session
        if session is not None:
            session.at(Moment.BEFORE_UPDATE)
            steps.check_settings(outcome[self._num_sums : self._num_sums + 3])
        steps.model.phases.enter(IterationPhase.UPDATE)
        own, rest = outcome[: self._num_sums], outcome[self._num_sums + 3 :]
        self._apply(own)
        if session is not None:
            session.at(Moment.IN_UPDATE)
        steps.model.phases.finish_iteration()
        steps.number += 1
        self.loss = outcome[0]
        self.is_done = True
        steps.apply_totals(rest)
        if session is not None:
            session.at(Moment.AFTER_UPDATE)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> bool:
        session = self._steps.session
        if error is None:
            if not self._is_updating:
                raise InputError(f"step {self.number} ended without step.update(loss), so nothing was trained by it")
            return False
        if session is None or not isinstance(error, CommError) or session.is_over:
            return False
        self._steps.model.forget_gradients()
        session.repair(error)
        return True
