"""What the Trainer asks of an elastic run, which `tatami.elastic` gives it: updates that outlive the ranks that die in them."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol, TypeVar

import torch

from tatami.errors import InputError
from tatami.model.model import TiledModel

_Value = TypeVar("_Value")


class BeginAgain(BaseException):
    """Ends a script that is to begin again; no `except Exception` of the user's catches it."""


class Stateful(Protocol):
    """What a newcomer is given the state of, such as a schedule."""

    def state_dict(self) -> dict[str, Any]: ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object: ...


class FitState(Stateful, Protocol):
    """Where a loop is, beside the weights and the optimizer."""

    def put_back(self) -> None:
        """As it was when the update that is under way began."""


class RepairedUpdate(Protocol):
    """An update that is made by all ranks that are left, or comes again.

    Attributes:
        is_done: whether it was made.
    """

    is_done: bool

    def pass_point(self, sums: torch.Tensor, *, apply: Callable[[list[float]], object]) -> None:
        """Sum over the ranks when all have all their gradients; then `apply`, given the sums, which sends nothing."""


class Repairs(Protocol):
    """The loop of one fit.

    Attributes:
        number: of the update that comes next.
    """

    number: int

    @property
    def joins(self) -> bool:
        """Whether this rank joins a run that is under way, and is given the state of the others by `enter`."""

    @property
    def returns(self) -> bool:
        """Whether the run goes back to its last checkpoint, as more ranks have died than the copies hold."""

    def saved(self) -> None:
        """There is a checkpoint of all of training that the script goes on from when it begins again."""

    def enter(self) -> None:
        """Wait to be let in. Once."""

    def step(self) -> AbstractContextManager[RepairedUpdate]:
        """The next update; everything that this rank does for it is inside of the block."""

    def whole(self, body: Callable[[], _Value]) -> _Value:
        """What `body`, a collective, returns; again where a rank dies in it."""

    def through(self) -> None:
        """The loop is behind this rank: its script may end."""


MakeRepairs = Callable[[TiledModel, torch.optim.Optimizer, FitState], Repairs]
_make: list[MakeRepairs] = []


def set_repairs(make: MakeRepairs | None) -> None:
    """Called by the process of a rank before its script begins."""
    _make[:] = [] if make is None else [make]


def repairs_of(model: TiledModel, optimizer: torch.optim.Optimizer, state: FitState) -> Repairs | None:
    """None where the ranks stay the same.

    Raises:
        InputError: they may change, and this process is not of an elastic run that would repair it.
    """
    if not model.comm.changes:
        return None
    if not _make:
        raise InputError(
            "the ranks of this communicator may change, and no elastic run repairs it: start it by `tatami run --elastic`"
        )
    return _make[0](model, optimizer, state)
