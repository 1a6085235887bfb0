"""What a rank hears while it computes: that its step is in vain; and what tests hear of it."""

from __future__ import annotations

import torch
from torch import nn

from tatami.elastic.session import Session
from tatami.elastic.settings import Moment
from tatami.errors import CommError
from tatami.model.model import TiledModel
from tatami.runtime.phases import IterationPhase

_MOMENTS = {
    IterationPhase.FORWARD: Moment.FORWARD,
    IterationPhase.TENSOR_PARALLEL: Moment.TENSOR_PARALLEL,
    IterationPhase.BUBBLE: Moment.HANDOVER,
    IterationPhase.BACKWARD: Moment.BACKWARD,
    IterationPhase.GRADIENTS: Moment.GRADIENTS,
}


def heed(model: TiledModel, session: Session) -> None:
    """Stop computing before and behind every layer when the step is called off.

    A rank that is alone in its replica hears of nothing before it has all its gradients: by then a whole iteration would be
    computed in vain.
    """

    def stop(*_: object) -> None:
        if session.is_called_off:
            raise CommError("a rank has died, and the step that this rank was in is done again")

    def stop_backward(_module: nn.Module, _inputs: object, output: object) -> None:
        if isinstance(output, torch.Tensor) and output.requires_grad:
            output.register_hook(stop)  # type: ignore[no-untyped-call]

    for module in model.module.modules():
        module.register_forward_pre_hook(stop)
        module.register_forward_hook(stop_backward)
    model.accept_hooks()


def tell_moments(model: TiledModel, session: Session) -> None:
    """Tell the hook of the tests of every phase."""
    phases = model.phases
    enter = phases.enter

    def enter_and_tell(phase: IterationPhase) -> None:
        enter(phase)
        if phase in _MOMENTS:
            session.at(_MOMENTS[phase])

    phases.enter = enter_and_tell  # type: ignore[method-assign]
