"""From batches to updates: forward, backward, the sum of the loss over the ranks, clipping, and the optimizer's step.

An update may be over several batches (`accumulate_grad_batches`). Its gradient is that of one batch of all their samples: of
means, each batch counts by its samples, so that a smaller last batch of an epoch does not count for more; where a mean leaves
targets out, by the share of them that counts.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.amp import GradScaler

from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractRequest
from tatami.errors import InputError, NotFiniteError
from tatami.tiled.batch import samples_of
from tatami.tiled.batches import LocalBatch
from tatami.tiled.counted_means import CountedMeans
from tatami.tiled.good_state import GoodState
from tatami.tiled.loaded_batches import check_ends
from tatami.tiled.model import TiledModel
from tatami.tiled.objective import Objective
from tatami.tiled.phases import IterationPhase
from tatami.tiled.precision import Precision, autocast, check_precision
from tatami.tiled.retiling import Retiling


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
        signals: by name, how many ranks gave it; the same on all ranks.
    """

    loss: float
    samples: int
    signals: Mapping[str, int]


@dataclass(frozen=True, kw_only=True)
class _Report:
    """What the ranks tell each other of a batch, while they compute its backward pass or, if they are watched, after it.

    Attributes:
        sums: over the ranks: the loss; how many have a loss that is not finite; for how many the epoch ends; how many samples'
            worth of targets were left out; the signals; and what `Retiling.told` says.
        request: of the sums under way; None where the rank is alone.
        value: the loss here.
        signals: their names.
    """

    sums: torch.Tensor
    request: AbstractRequest | None
    value: float
    signals: tuple[str, ...]


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
        self._settings, self._good, self.retiling = settings, good, retiling
        self._device = next(model.parameters()).device
        self.scaler = GradScaler(self._device.type, enabled=settings.precision == "16-mixed")
        self.forget()

    def forget(self) -> None:
        """Begin an update: what was accumulated is left out."""
        self._num_batches = self._samples = self._first_size = 0
        self._loss = self._counted = 0.0

    def add(
        self, batch: LocalBatch, *, iteration: int, epoch: int, batch_number: int, signals: Mapping[str, bool]
    ) -> Updated | None:
        """Forward and backward over one batch, and the update if it is complete. Collective.

        Args:
            batch: the batch.
            iteration, epoch, batch_number: which this is, for errors.
            signals: what this rank tells the others; the same names on all ranks.

        Raises:
            NotFiniteError: on all ranks, the loss is NaN or infinite; the last good parameters are back in the model.
            InputError: the epoch ends on some ranks only.
        """
        model, size = self._model, batch.size
        if self._num_batches == 0:
            self._optimizer.zero_grad(set_to_none=True)
            self._first_size = size
        num_here = samples_of(batch.here)
        counting = CountedMeans() if model.reduction == "mean" and self._objective.may_leave_out(batch.here) else None
        with autocast(self._settings.precision, self._device), counting or nullcontext():
            loss = self._objective(model, batch.here)
        left_out = counting.left_out(loss) * num_here if counting is not None else 0.0
        # Where every iteration is watched, its times go with the sum of the loss, which then waits for the gradients.
        watched = self.retiling is not None and self.retiling.watcher is not None
        report = None if watched else self._begin_report(loss, batch, num_here=num_here, left_out=left_out, signals=signals)
        weight = size / self._first_size if model.reduction == "mean" else 1.0
        scaled: torch.Tensor = self.scaler.scale(loss if weight == 1.0 else loss * weight)
        scaled.backward()  # type: ignore[no-untyped-call]
        report = report or self._begin_report(loss, batch, num_here=num_here, left_out=left_out, signals=signals)
        value, counted, given = self._end_report(report, batch, iteration=iteration, epoch=epoch, batch_number=batch_number)
        self._loss += value
        self._counted += counted
        self._samples += size
        self._num_batches += 1
        if self._num_batches < self._settings.accumulate_grad_batches and not batch.is_last:
            return None
        self._update(iteration)
        mean = self._loss / self._counted if model.reduction == "mean" else self._loss
        updated = Updated(loss=mean, samples=self._samples, signals=given)
        self.forget()
        return updated

    def _update(self, iteration: int) -> None:
        model, settings = self._model, self._settings
        if model.reduction == "mean" and self._counted != self._first_size:
            grads = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            torch._foreach_mul_(grads, self._first_size / self._counted)
        self.scaler.unscale_(self._optimizer)
        if settings.gradient_clip_val is not None:
            model.clip_grad_norm_(settings.gradient_clip_val)
        self._good.keep(iteration - 1)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def _begin_report(
        self, local_loss: torch.Tensor, batch: LocalBatch, *, num_here: int, left_out: float, signals: Mapping[str, bool]
    ) -> _Report:
        """Start the sums over the ranks; they travel while backward computes."""
        model = self._model
        value = local_loss.item() if num_here else 0.0
        weight = num_here if model.reduction == "mean" else 1.0
        finite = math.isfinite(value)
        share, missing = (value * weight if finite else 0.0, left_out) if model.speaks_for_column else (0.0, 0.0)
        told = [share, float(not finite), float(batch.is_last), missing, *map(float, signals.values())]
        if self.retiling is not None:
            told += self.retiling.told()
        sums = torch.tensor(told, dtype=torch.float64)
        request = model.comm.iallreduce(sums) if model.comm.size > 1 else None
        return _Report(sums=sums, request=request, value=value, signals=tuple(signals))

    def _end_report(
        self, report: _Report, batch: LocalBatch, *, iteration: int, epoch: int, batch_number: int
    ) -> tuple[float, float, dict[str, int]]:
        """The loss, of means times their samples; how many samples' worth of targets count; how many ranks gave each signal."""
        comm = self._model.comm
        if report.request is not None:
            with self._model.phases.during(IterationPhase.HORIZONTAL):
                report.request.wait()
        loss, num_bad, num_ends, left_out, *rest = report.sums.tolist()
        given = dict(zip(report.signals, map(int, rest), strict=False))
        if self.retiling is not None:
            self.retiling.heard(rest[len(given) :])
        if num_bad or left_out == batch.size:
            self._rescue(report.value if num_bad else math.nan, iteration)  # a mean over no target is NaN
        if 0 < num_ends < comm.size:
            ends = problems_of(comm, "ends" if batch.is_last else None)
            check_ends(ends, size=comm.size, batch=batch_number, epoch=epoch)
        return float(loss), batch.size - left_out, given

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
