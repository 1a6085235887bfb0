"""From batches to updates: forward, backward, the sum of the loss over the ranks, clipping, and the optimizer's step.

An update may be over several batches (`accumulate_grad_batches`). Its gradient is that of one batch of all their samples: of
means, each batch counts by its samples, so that a smaller last batch of an epoch does not count for more; where a mean leaves
targets out, by the share of them that counts.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass

import torch
from torch.amp import GradScaler

from tatami.batch import samples_of
from tatami.comm.agreement import problems_of
from tatami.comm.base import AbstractRequest
from tatami.errors import InputError, NotFiniteError
from tatami.inputs import check_at_least
from tatami.model.model import TiledModel
from tatami.runtime.losses import CountedMeans
from tatami.runtime.phases import IterationPhase
from tatami.runtime.precision import Precision, autocast, check_precision
from tatami.state.good_state import GoodState
from tatami.state.repairing import RepairedUpdate
from tatami.train.batches import LocalBatch
from tatami.train.loaded_batches import check_ends
from tatami.train.objective import Objective
from tatami.train.retiling import Retiling


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
        check_at_least(1, accumulate_grad_batches=self.accumulate_grad_batches)
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


@dataclass(kw_only=True)
class _Report:
    """What the ranks tell each other of a batch, while they compute its backward pass or, if they are watched, after it.

    Attributes:
        numbers: of this rank, and once they are there their sums over the ranks: the loss; how many have a loss that is
            not finite; for how many the epoch ends; how many samples' worth of targets were left out; the signals; and what
            `Retiling.local_report` says.
        sums: the same on their way; None where the rank is alone.
        request: of the sums under way; None where there are none.
        value: the loss here.
        counted_before: what `counted` was for the batches before, where the update ends with this one; None where it goes on.
    """

    numbers: list[float]
    sums: torch.Tensor | None
    request: AbstractRequest | None
    value: float
    signals: tuple[str, ...]
    size: int
    samples: int
    counted_before: float | None = None

    @property
    def counted(self) -> float:
        """How many samples' worth of targets were not left out."""
        return self.samples - self.numbers[3]

    @property
    def tells_of_error(self) -> bool:
        """Whether a loss is not finite, no target of the update counts, or the epoch ends on some ranks only."""
        return self.numbers[1] > 0 or self.is_of_nothing or 0 < self.numbers[2] < self.size

    @property
    def is_of_nothing(self) -> bool:
        """Whether the update ends with this batch, and none of its targets counts."""
        return self.counted_before is not None and self.counted_before + self.counted == 0


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
        self._is_checked = False
        model.outside.warns = False  # it is an error here
        self.forget()

    def forget(self) -> None:
        """Begin an update: what was accumulated is left out."""
        self._num_batches = self._samples = self._first_size = 0
        self._loss = self._counted = 0.0
        self._end: Callable[[], dict[str, int]] = dict

    def add(
        self,
        batch: LocalBatch,
        *,
        iteration: int,
        epoch: int,
        batch_number: int,
        signals: Mapping[str, bool],
        update: RepairedUpdate | None = None,
    ) -> bool:
        """Forward and backward over one batch, and the update if it is complete. Collective.

        Args:
            batch: the batch.
            iteration, epoch, batch_number: which this is, for errors.
            signals: what this rank tells the others; the same names on all ranks.
            update: of an elastic run, which makes it where all ranks have come so far; otherwise it is made here.

        Returns:
            Whether the update is complete; `made` tells of it.

        Raises:
            NotFiniteError: on all ranks, the loss is NaN or infinite; the last good parameters are back in the model.
            InputError: the epoch ends on some ranks only; or the loss has a term of weights.
        """
        model, size = self._model, batch.size
        if self._num_batches == 0:
            self._optimizer.zero_grad(set_to_none=True)
            self._first_size = size
        # Where every iteration is watched, its times go with the sum of the loss, which then waits for the gradients; where it
        # is repaired, the sum says that all gradients are there; of micro-batches, the loss is known last.
        is_late = update is not None or (self.retiling is not None and self.retiling.watcher is not None) or model.has_parts
        weight = size / self._first_size if model.reduction == "mean" else 1.0
        value = left_out = 0.0
        report: _Report | None = None
        for part in model.parts(batch.here):
            num_here = samples_of(part)
            counts = model.has_results and model.reduction == "mean" and self._objective.may_leave_out(part)
            counting = CountedMeans() if counts else None
            with autocast(self._settings.precision, self._device), counting or nullcontext():
                check, self._is_checked = None if self._is_checked else model.reduction, True
                loss = self._objective(model, part, check=check)
            if num_here and model.has_results:
                value += loss.item() * (num_here if model.reduction == "mean" else 1.0)
                left_out += counting.left_out(loss) * num_here if counting is not None else 0.0
            if left_out and update is not None and self._settings.gradient_clip_val is not None:
                raise InputError(
                    "this batch leaves targets out (ignore_index), and an elastic run learns how many that are only when it "
                    "has clipped the gradients. Leave gradient_clip_val out, or use a loss with reduction='sum'"
                )
            if not is_late:
                report = self._begin_report(value, batch, left_out=left_out, signals=signals)
            scaled: torch.Tensor = self.scaler.scale(loss if weight == 1.0 else loss * weight)
            scaled.backward()  # type: ignore[no-untyped-call]
        model.outside.refuse("the Trainer")
        is_whole = self._num_batches + 1 >= self._settings.accumulate_grad_batches or batch.is_last
        report = report or self._begin_report(
            value, batch, left_out=left_out, signals=signals, is_sent=update is None or not is_whole
        )
        report.counted_before = self._counted if is_whole else None
        self._samples += size
        self._num_batches += 1
        end = functools.partial(self._end_batch, report, batch, iteration=iteration, epoch=epoch, batch_number=batch_number)
        if not is_whole:
            end()
        elif update is None:
            given = end()
            self._end = lambda: given
            self._weigh(self._first_size, self._counted)
            self._ready_gradients()
            self._step(iteration)
        else:
            self._end = end
            self._weigh(self._first_size, self._samples)
            self._ready_gradients()
            assert report.sums is not None
            update.pass_point(report.sums, apply=functools.partial(self._apply, report, iteration))
        return is_whole

    def made(self) -> Updated:
        """The result of the update that is complete. Raises as `add`."""
        given = self._end()
        mean = self._loss / self._counted if self._model.reduction == "mean" else self._loss
        updated = Updated(loss=mean, samples=self._samples, signals=given)
        self.forget()
        return updated

    def _ready_gradients(self) -> None:
        """What is left to be done about the gradients of all batches together. Collective where they are clipped."""
        self.scaler.unscale_(self._optimizer)
        if self._settings.gradient_clip_val is not None:
            self._model.clip_grad_norm_(self._settings.gradient_clip_val)

    def _weigh(self, samples: float, counted: float) -> None:
        """Make gradients of a mean over so many samples those of the mean over those that count, of all batches together."""
        if self._model.reduction == "mean" and counted != samples:
            stepped = (each for group in self._optimizer.param_groups for each in group["params"])  # a mirror's are beside them
            weighed = dict.fromkeys((*self._model.parameters(), *stepped))
            grads = [parameter.grad for parameter in weighed if parameter.grad is not None]
            if grads:  # none where a stage has no weights
                torch._foreach_mul_(grads, samples / counted)

    def _apply(self, report: _Report, iteration: int, sums: list[float]) -> None:
        """All ranks have all their gradients. Sends nothing; where the sums tell of an error, `made` raises it on all ranks."""
        report.numbers = sums
        if not report.tells_of_error:
            self._weigh(self._samples, self._counted + report.counted)
            self._step(iteration)

    def _step(self, iteration: int) -> None:
        self._good.keep(iteration - 1)
        self.scaler.step(self._optimizer)
        self.scaler.update()

    def _begin_report(
        self, share: float, batch: LocalBatch, *, left_out: float, signals: Mapping[str, bool], is_sent: bool = True
    ) -> _Report:
        """Start the sums over the ranks, if they are to be sent; they travel while backward computes.

        Args:
            share: what this replica adds to the loss: a mean is multiplied by its samples.
        """
        model = self._model
        finite = math.isfinite(share)
        value = share / max(1, model.local_span_size[0]) if model.reduction == "mean" else share
        share, missing = (share if finite else 0.0, left_out) if model.speaks_for_replica else (0.0, 0.0)
        numbers = [share, float(not finite), float(batch.is_last), missing, *map(float, signals.values())]
        if self.retiling is not None:
            numbers += self.retiling.local_report()
        size = model.comm.size
        sums = torch.tensor(numbers, dtype=torch.float64, device="cpu") if size > 1 or not is_sent else None
        request = model.comm.iallreduce(sums) if sums is not None and is_sent else None
        names = tuple(signals)
        return _Report(numbers=numbers, sums=sums, request=request, value=value, signals=names, size=size, samples=batch.size)

    def _end_batch(
        self, report: _Report, batch: LocalBatch, *, iteration: int, epoch: int, batch_number: int
    ) -> dict[str, int]:
        """Add its loss; returns how many ranks gave each signal."""
        comm = self._model.comm
        if report.request is not None and report.sums is not None:
            with self._model.phases.during(IterationPhase.GRADIENTS):
                report.request.wait()
            report.numbers = report.sums.tolist()
        loss, num_bad, _, _, *rest = report.numbers
        given = dict(zip(report.signals, map(int, rest), strict=False))
        if self.retiling is not None:
            self.retiling.apply_totals(rest[len(given) :])
        if num_bad or report.is_of_nothing:
            self._rescue(report.value if num_bad else math.nan, iteration)  # a mean over no target is NaN
        if report.tells_of_error:
            ends = problems_of(comm, "ends" if batch.is_last else None)
            check_ends(ends, size=comm.size, batch=batch_number, epoch=epoch)
            raise InputError(f"a rank that has gone since was given other data: its epoch {epoch} did not end as the others'")
        self._loss += loss
        self._counted += report.counted
        return given

    def _rescue(self, local_loss: float, iteration: int) -> None:
        """The loss is not finite: save the last parameters whose loss was, and say where it happened."""
        comm = self._model.comm
        bad = problems_of(comm, None if math.isfinite(local_loss) else local_loss)
        rank, value = next(iter(bad.items()), (-1, math.nan))  # in an elastic run it may have died since
        saved = self._good.rescue()
        others = f" (and on ranks {sorted(bad)[1:]})" if len(bad) > 1 else ""
        raise NotFiniteError(
            f"the loss is {value} on rank {rank} of {comm.size}{others} in iteration {iteration}; {saved}. "
            "Look for bad samples in that batch, lower the learning rate, or clip gradients (gradient_clip_val)",
            rank=rank,
            iteration=iteration,
        )
