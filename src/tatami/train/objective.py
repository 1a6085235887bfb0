"""From a batch to its loss: what of a batch the network is called with, what is the target, and who computes the loss."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils import _pytree as pytree

from tatami.batch import cut_batch, samples_of
from tatami.errors import InputError
from tatami.partition.tracing.mixing import Judged, outputs_to_judge, refuse_other_loss
from tatami.partition.tracing.restore_state import unchanged
from tatami.runtime.losses import IGNORED, Loss, LossReduction, check_reduction, reduction_of, setting_of
from tatami.tiling import Span

TrainingStep = Callable[[Any, Any], torch.Tensor]
"""(model, batch) -> the loss over the samples of the batch, a scalar."""


@dataclass(frozen=True, kw_only=True)
class Objective:
    """How the loss of a batch comes about. One of `loss` and `training_step`, or neither: then it is the network's own.

    Attributes:
        loss: (output, target) -> scalar.
        training_step: (model, batch) -> scalar; does everything itself.
        target: the key of the target where a batch is a dict.
    """

    loss: Loss | None = None
    training_step: TrainingStep | None = None
    target: str | None = None

    def __post_init__(self) -> None:
        if self.loss is not None and self.training_step is not None:
            raise InputError("give the Trainer a loss or a training_step, which computes the loss itself, not both")

    def reduction(self, *, given: LossReduction | None, otherwise: LossReduction | None) -> LossReduction:
        """What it does with samples; see `reduction_of`.

        Raises:
            InputError: nothing tells.
        """
        if self.loss is not None:
            return reduction_of(self.loss, given=given, otherwise=otherwise)
        named = given or otherwise
        if named is None:
            what = "a training_step" if self.training_step is not None else "the network's own loss"
            raise InputError(
                f"{what} does not tell whether it takes the mean or the sum over the samples of a batch. Give the Trainer "
                "reduction='mean' or reduction='sum'"
            )
        check_reduction(named)
        return named

    def __call__(self, model: Any, batch: Any, *, check: LossReduction | None = None) -> torch.Tensor:
        """The loss of `batch` (samples_here, ...), a scalar.

        Args:
            check: what it is said to do with samples, where that is to be looked at.

        Raises:
            InputError: it does something else.
        """
        if self.training_step is not None:
            step = self.training_step
            if check is not None and model.stage is None:  # of stages, only the last one has a loss to look at
                model.check_loss(lambda part: step(model, part), batch, what="training_step")
            return _scalar(self.training_step(model, batch), "training_step returned")
        output = self.run(model, batch)
        if check is not None and self.loss is not None:
            self._check(self.loss, check, output, batch)
        return self.judge(output, batch)

    def _check(self, loss: Loss, reduction: LossReduction, output: Any, batch: Any) -> None:
        """A loss of the user's own shows what it is on the samples of this rank, judged in two parts."""
        target, samples = self.target_of(batch), samples_of(batch)
        tensors = [leaf for leaf in pytree.tree_leaves((output, target)) if isinstance(leaf, torch.Tensor) and leaf.dim()]
        is_plain = all(type(each) is torch.Tensor and each.shape[0] == samples for each in tensors)
        if setting_of(loss, "reduction") is not None or samples < 2 or not is_plain:
            return

        def of(span: Span) -> Judged:
            part, leaves = outputs_to_judge(cut_batch(output, span, samples=samples))
            with unchanged(loss) if isinstance(loss, torch.nn.Module) else nullcontext():
                return loss(part, cut_batch(target, span, samples=samples)), leaves

        what = getattr(loss, "__name__", type(loss).__name__)
        refuse_other_loss(of, samples=samples, reduction=reduction, what=what, counts=True)

    def run(self, model: Any, batch: Any) -> Any:
        """The network's output for the inputs of `batch`."""
        args, kwargs = self.inputs(batch)
        try:
            return model(*args, **kwargs)
        except TypeError:
            check_keywords(getattr(model, "module", model), args, kwargs)
            raise

    def judge(self, output: Any, batch: Any) -> torch.Tensor:
        """The loss of an output."""
        if self.loss is not None:
            return _scalar(self.loss(output, self.target_of(batch)), "the loss is")
        own = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if own is None:
            raise InputError(
                f"the network returns a {type(output).__name__} without a `loss`; give the Trainer loss=... (output, target), "
                "or training_step=... (model, batch)"
            )
        return _scalar(own, "the network's `loss` is")

    def inputs(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What the network is called with: all of the batch but the target, which is there where there is a `loss`."""
        if isinstance(batch, Mapping):
            drop = self._target_key(batch) if self.loss is not None else None
            return (), {key: value for key, value in batch.items() if key != drop}
        parts: Any = batch
        if self.loss is not None:
            parts, _ = self._split(batch)
        elif isinstance(batch, torch.Tensor):
            parts = (batch,)
        if len(parts) == 1 and isinstance(parts[0], Mapping):
            return (), dict(parts[0])
        if len(parts) == 1 and isinstance(parts[0], tuple | list):
            return tuple(parts[0]), {}
        return tuple(parts), {}

    def predicting(self, batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """As `inputs`, of data that may come without targets: a tensor, or a dict without the target's key."""
        if isinstance(batch, torch.Tensor):
            return (batch,), {}
        if isinstance(batch, Mapping):
            return (), {key: value for key, value in batch.items() if key != self.target}
        return ((batch[0],), {}) if len(batch) == 1 else self.inputs(batch)

    def target_of(self, batch: Any) -> Any:
        """The target of a batch: under its key, or last; the whole batch where there is no `loss` that needs one."""
        if self.loss is None and self.target is None:
            return batch
        return batch[self._target_key(batch)] if isinstance(batch, Mapping) else self._split(batch)[1]

    @property
    def ignored(self) -> int:
        """The target that the loss leaves out."""
        found = setting_of(self.loss, "ignore_index") if self.loss is not None else None
        return found if isinstance(found, int) else IGNORED

    def may_leave_out(self, batch: Any) -> bool:
        """Whether a mean may leave some of these targets out; False only where that is certain."""
        if self.loss is None:
            return True
        y, ignored = self.target_of(batch), setting_of(self.loss, "ignore_index")
        if isinstance(y, torch.Tensor) and y.is_floating_point():
            return False
        if ignored is None or not isinstance(y, torch.Tensor):
            return True
        if ignored < 0 and y.numel():
            return int(y.min()) < 0  # a class is not
        return bool((y == ignored).any())

    def _target_key(self, batch: Mapping[str, Any]) -> str:
        if self.target is None or self.target not in batch:
            keys = ", ".join(map(str, batch))
            said = "say which of them is the target" if self.target is None else f"none of them is target={self.target!r}"
            raise InputError(f"a batch is a dict of {keys}; {said}: Trainer(..., target='labels')")
        return self.target

    def _split(self, batch: Any) -> tuple[tuple[Any, ...], Any]:
        if not isinstance(batch, tuple | list) or len(batch) < 2:
            raise InputError(
                f"a batch must be a pair (inputs, targets) for the loss, not a {type(batch).__name__}"
                f"{f' of {len(batch)}' if isinstance(batch, tuple | list) else ''}; or give the Trainer training_step=... "
                "(model, batch)"
            )
        return tuple(batch[:-1]), batch[-1]


def check_keywords(network: torch.nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
    """
    Raises:
        InputError: a batch is a dict whose keys are not arguments of the network.
    """
    if not kwargs:
        return
    try:
        inspect.signature(type(network).forward).bind(network, *args, **kwargs)
    except TypeError as error:
        raise InputError(
            f"a batch is a dict, so the network is called with {', '.join(kwargs)} by name, and {type(network).__name__} "
            f"does not take them: {error}. Name the keys as its arguments, give pairs (inputs, targets), or a training_step"
        ) from None


def _scalar(loss: Any, what: str) -> torch.Tensor:
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = f" of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else ""
        raise InputError(f"{what} a {type(loss).__name__}{shape}; the loss must be a tensor of one element")
    return loss
