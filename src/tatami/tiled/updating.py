"""From batches to updates: forward, backward, the sum of the loss over the ranks, clipping, and the optimizer's step.

An update may be over several batches (`accumulate_grad_batches`). Its gradient is that of one batch of all their samples: of
means, each batch counts by its samples, so that a smaller last batch of an epoch does not count for more.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch.amp import GradScaler

from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractRequest
from tatami.errors import InputError, NotFiniteError
from tatami.tiled.batch import samples_of
from tatami.tiled.batches import LocalBatch
from tatami.tiled.good_state import GoodState
from tatami.tiled.loaded_batches import check_ends
from tatami.tiled.model import TiledModel
from tatami.tiled.objective import Objective
from tatami.tiled.phases import IterationPhase
from tatami.tiled.precision import Precision, autocast, check_precision
from tatami.tiled.retiling import Retiling

StopReason = Literal["callback", "time"]
_REASONS: tuple[StopReason, ...] = get_args(StopReason)


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """How an update is made; the same on all ranks.

    Attributes:
        accumulate_grad_batches: batches whose gradients make up one update; the last one of an epoch may have fewer.
        precision: of the products, see `Precision`; None: that of the weights.
        gradient_clip_val: the largest global 2-norm of the gradients that is left as it is; None: no clipping.
    """

    accumulate_grad_batches: int = 1
    precision: Precision | None = None
    gradient_clip_val: float | None = None

    def __post_init__(self) -> None:
        if self.accumulate_grad_batches < 1:
            raise InputError(f"accumulate_grad_batches must be at least 1, not {self.accumulate_grad_batches}")
        if self.gradient_clip_val is not None and not self.gradient_clip_val > 0:
            raise InputError(f"gradient_clip_val must be above 0, not {self.gradient_clip_val}")
        check_precision(self.precision)


@dataclass(frozen=True, kw_only=True)
class Updated:
    """An update that was made.

    Attributes:
        loss: over the samples of its batches, before it.
        samples: of all its batches.
        stop: why a rank has asked to stop, the same on all ranks; None where none has.
    """

    loss: float
    samples: int
    stop: StopReason | None


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What the ranks tell each other of a batch, while they compute its backward pass or, if they are watched, after it.

    The loss; how many ranks have a loss that is not finite; for how many the epoch ends; how many ask to stop, by reason; and
    what `Retiling.told` says.
    """

    sums: torch.Tensor
    request: AbstractRequest | None
    value: float


class Updates:
    """Makes the updates of one model.

    Args:
        model: tiled.
        optimizer: of its parameters.
        objective: the loss of a batch.
        settings: how an update is made.
        good: where the last good parameters are kept.
        retiling: what wants to know of every iteration; None where nothing does.
    """

    def __init__(
        self,
        model: TiledModel,
        optimizer: torch.optim.Optimizer,
        objective: Objective,
        *,
        settings: UpdateSettings,
        good: GoodState,
        retiling: Retiling | None = None,
    ) -> None:
        self._model, self._optimizer, self._objective = model, optimizer, objective
        self._settings, self._good, self._retiling = settings, good, retiling
        self._device = next(model.parameters()).device
        self.scaler = GradScaler(self._device.type, enabled=settings.precision == "16-mixed")
        self.forget()

    def forget(self) -> None:
        """Begin an update: what was accumulated is left out."""
        self._num_batches = self._samples = self._first_size = 0
        self._loss = 0.0
        self._stop: StopReason | None = None

    def add(self, portion: LocalBatch, *, iteration: int, epoch: int, batch: int, stop: StopReason | None) -> Updated | None:
        """Forward and backward over one batch, and the update if it is complete. Collective.

        Args:
            portion: the batch.
            iteration, epoch, batch: which this is, for errors.
            stop: why this rank asks to stop, if it does.

        Raises:
            NotFiniteError: on all ranks, the loss is NaN or infinite; the last good parameters are back in the model.
            InputError: the epoch ends on some ranks only.
        """
        model, size = self._model, portion.size
        if self._num_batches == 0:
            self._optimizer.zero_grad(set_to_none=True)
            self._first_size = size
        num_here = samples_of(portion.here)
        self._objective.check_targets(portion.here, reduction=model.reduction, rank=model.comm.rank)
        with autocast(self._settings.precision, self._device):
            loss = self._objective(model, portion.here)
        # Where every iteration is watched, its times go with the sum of the loss, which then waits for the gradients.
        watched = self._retiling is not None and self._retiling.watcher is not None
        report = None if watched else self._begin_report(loss, portion, num_here=num_here, stop=stop)
        weight = size / self._first_size if model.reduction == "mean" else 1.0
        scaled: torch.Tensor = self.scaler.scale(loss if weight == 1.0 else loss * weight)
        scaled.backward()  # type: ignore[no-untyped-call]
        report = report or self._begin_report(loss, portion, num_here=num_here, stop=stop)
        value = self._end_report(report, portion, iteration=iteration, epoch=epoch, batch=batch)
        self._loss += value * (size if model.reduction == "mean" else 1.0)
        self._samples += size
        self._num_batches += 1
        if self._num_batches < self._settings.accumulate_grad_batches and not portion.is_last:
            return None
        self._update(iteration)
        mean = self._loss / self._samples if model.reduction == "mean" else self._loss
        updated = Updated(loss=mean, samples=self._samples, stop=self._stop)
        self.forget()
        return updated

    def _update(self, iteration: int) -> None:
        model, settings = self._model, self._settings
        if model.reduction == "mean" and self._samples != self._first_size:
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(grads, self._first_size / self._samples)
        self.scaler.unscale_(self._optimizer)
        if settings.gradient_clip_val is not None:
            model.clip_grad_norm_(settings.gradient_clip_val)
        self._good.keep(iteration - 1)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def _begin_report(
        self, local_loss: torch.Tensor, portion: LocalBatch, *, num_here: int, stop: StopReason | None
    ) -> _Report:
        """Start the sums over the ranks; they travel while backward computes."""
        model = self._model
        value = local_loss.item() if num_here else 0.0
        weight = num_here / portion.size if model.reduction == "mean" else 1.0
        finite = math.isfinite(value)
        share = value * weight if finite and model.speaks_for_column else 0.0
        told = [share, float(not finite), float(portion.is_last), *(float(stop == reason) for reason in _REASONS)]
        if self._retiling is not None:
            told += self._retiling.told()
        sums = torch.tensor(told, dtype=torch.float64)
        request = model.comm.iallreduce(sums) if model.comm.size > 1 else None
        return _Report(sums=sums, request=request, value=value)

    def _end_report(self, report: _Report, portion: LocalBatch, *, iteration: int, epoch: int, batch: int) -> float:
        comm = self._model.comm
        if report.request is not None:
            with self._model.phases.during(IterationPhase.HORIZONTAL):
                report.request.wait()
        loss, num_bad, num_ends, *rest = report.sums.tolist()
        num_stops = rest[: len(_REASONS)]
        if self._retiling is not None:
            self._retiling.heard(rest[len(_REASONS) :])
        if num_bad:
            self._rescue(report.value, iteration)
        if 0 < num_ends < comm.size:
            check_ends(problems_of(comm, "ends" if portion.is_last else None), size=comm.size, batch=batch, epoch=epoch)
        self._stop = self._stop or next((reason for reason, num in zip(_REASONS, num_stops, strict=True) if num), None)
        return float(loss)

    def _rescue(self, local_loss: float, iteration: int) -> None:
        """The loss is not finite: save the last parameters whose loss was, and say where it happened."""
        comm = self._model.comm
        bad = problems_of(comm, None if math.isfinite(local_loss) else local_loss)
        rank, value = next(iter(bad.items()))
        saved = self._good.rescue()
        others = f" (and on ranks {sorted(bad)[1:]})" if len(bad) > 1 else ""
        raise NotFiniteError(
            f"the loss is {value} on rank {rank} of {comm.size}{others} in iteration {iteration}; {saved}. "
            "Look for bad samples in that batch, lower the learning rate, or clip gradients (gradient_clip_val)",
            rank=rank,
            iteration=iteration,
        )
