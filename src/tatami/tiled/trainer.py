"""The training loop, with what people expect around it. It is the loop one would write by hand, and no more exact."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tatami.clock import Clock, SystemClock
from tatami.comm.agreement import same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.inputs import check_seed
from tatami.progress import NoProgress, Progress
from tatami.records import Records
from tatami.retiling import Retiler
from tatami.tiled.batch import samples_of
from tatami.tiled.batches import AbstractBatches
from tatami.tiled.callbacks import Callbacks
from tatami.tiled.data import TrainingData, batches_of, comes_in_batches
from tatami.tiled.evaluating import evaluate, predict
from tatami.tiled.good_state import GoodState
from tatami.tiled.history import History
from tatami.tiled.limits import Limits
from tatami.tiled.losses import Loss, LossReduction
from tatami.tiled.metrics import Metric, metrics_of
from tatami.tiled.model import TiledModel
from tatami.tiled.objective import Objective, TrainingStep
from tatami.tiled.optimizers import check_optimizer
from tatami.tiled.precision import Precision
from tatami.tiled.retiling import Check, Retiling
from tatami.tiled.scheduling import LearningRate, LRSchedulerConfig, MakeScheduler
from tatami.tiled.tile import tile as tile_network
from tatami.tiled.updating import StopReason, Updated, Updates, UpdateSettings
from tatami.tiled.weights import load_model, save_model

_SAMPLES = 4
"""So many samples of the first batch show what a network can be split into; more tell nothing new."""


class Trainer:
    """Trains a tiled model.

    Args:
        model: from `tatami.tile`; or a network, which is tiled with the first batch as its sample when it is first used.
        optimizer: makes one from parameters: `functools.partial(torch.optim.SGD, lr=0.5)`; or one of `model.parameters()`.
            Must work element by element.
        loss: (output, target) -> scalar; its `reduction`, "mean" or "sum", is over the global batch. None: the loss is the
            network's own, `output.loss` or `output["loss"]`.
        comm: of a network that is not tiled yet.
        tile: tiles such a network: `functools.partial(tatami.tile, planner="srpm")`, say.
        training_step: (model, batch) -> the loss; in the place of `loss`, where a batch is not (inputs, targets).
        target: the key of the targets, where batches are dicts and there is a `loss`.
        reduction: of a loss that does not tell, such as a lambda or the network's own; None: its own, or that of `tatami.tile`.
        scheduler: makes a learning-rate scheduler from the optimizer, or is one; stepped after every epoch, or as
            `LRSchedulerConfig` says.
        retile: re-tile while training; None keeps the tiling.
        accumulate_grad_batches: batches of one update, whose gradient is that of one batch of all their samples.
        precision: "bf16-mixed" or "16-mixed": autocast, as exact as that dtype; None: that of the weights.
        gradient_clip_val: clip gradients by their global 2-norm.
        callbacks: see `Callback`; `tatami.parallel.EarlyStopping` is one.
        records: where metrics go; only rank 0's is written to.
        record_every: iterations between two records of the loss.
        progress: a bar; only rank 0's is shown.
        rescue_dir: where the last good state is saved if the loss stops being finite.
        seed: of the shuffling.
        clock: for tests.

    Attributes:
        iteration: updates so far.
        epoch: epochs so far.
        batch: batches of the running epoch so far.
        should_stop: set by a callback on any rank, ends `fit` after the update.
    """

    def __init__(
        self,
        model: TiledModel | nn.Module,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer,
        loss: Loss | None = None,
        comm: AbstractCommunicator | None = None,
        tile: Callable[..., TiledModel] = tile_network,
        training_step: TrainingStep | None = None,
        target: str | None = None,
        reduction: LossReduction | None = None,
        scheduler: MakeScheduler | LRScheduler | LRSchedulerConfig | None = None,
        retile: Retiler | None = None,
        accumulate_grad_batches: int = 1,
        precision: Precision | None = None,
        gradient_clip_val: float | None = None,
        callbacks: Sequence[Any] = (),
        records: Records | None = None,
        record_every: int = 10,
        progress: Progress | None = None,
        rescue_dir: Path | str = ".",
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        check_seed(seed)
        self._objective = Objective(loss=loss, training_step=training_step, target=target)
        own = model.reduction if isinstance(model, TiledModel) else None
        self._reduction = self._objective.reduction(given=reduction, otherwise=own)
        self._settings = UpdateSettings(
            accumulate_grad_batches=accumulate_grad_batches, precision=precision, gradient_clip_val=gradient_clip_val
        )
        self._given_optimizer, self._given_scheduler, self._retiler = optimizer, scheduler, retile
        self._callbacks = Callbacks(callbacks)
        self._given_records, self._given_progress = records, progress
        self._record_every = record_every
        self._rescue_dir = Path(rescue_dir)
        self._seed = seed
        self._clock = clock or SystemClock()
        self.iteration = 0
        self.epoch = 0
        self.should_stop = False
        self._begin_epoch()
        self._model: TiledModel | None = None
        if isinstance(model, TiledModel):
            self._take(model)
        elif comm is None:
            raise InputError("the network is not tiled: give the Trainer comm=tatami.init(), or what tatami.tile returned")
        elif isinstance(optimizer, torch.optim.Optimizer):
            raise InputError(
                "the network is not tiled yet, and its parameters will be new ones: give what makes the optimizer, as "
                "partial(torch.optim.SGD, lr=0.5), or tile the network first"
            )
        else:
            self._tile = functools.partial(tile, model, comm)

    @property
    def model(self) -> TiledModel:
        """
        Raises:
            InputError: the network is tiled with the first batch, and there was none yet.
        """
        if self._model is None:
            raise InputError("the network is tiled with the first batch of fit or evaluate; until then there is no tiled model")
        return self._model

    def fit(
        self,
        data: TrainingData,
        *,
        batch_size: int | None = None,
        epochs: int | None = None,
        iterations: int | None = None,
        max_time: str | float | timedelta | None = None,
        shuffle: bool = True,
        stop_below: float | None = None,
        validation: TrainingData | None = None,
        metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    ) -> History:
        """Train until the first of `epochs`, `iterations`, `max_time` and `stop_below` is reached. Collective.

        Args:
            data: the same on all ranks, see `TrainingData`. Of what can be indexed, each rank reads its own samples only.
            batch_size: of the global batch; as many as there are samples makes it full-batch gradient descent. Not for
                data that come in batches.
            epochs: passes over the data.
            iterations: updates.
            max_time: "90 min", seconds, or a `timedelta`; by the clock of rank 0, after an update.
            shuffle: draw a new order for each epoch (from `seed`) of data that can be indexed; makes no difference to full
                batches and is left out there.
            stop_below: end as soon as the loss of an iteration is below this.
            validation: evaluated after every epoch.
            metrics: of the validation, see `evaluate`.

        Raises:
            NotFiniteError: the loss became NaN or infinite; the last good state is saved before.
            InputError: on all ranks, before anything is trained, where they were given different data; names the ranks.
        """
        limits = Limits.of(epochs=epochs, iterations=iterations, stop_below=stop_below, max_time=max_time)
        batches = batches_of(data, batch_size=batch_size, seed=self._seed if shuffle else None)
        wanted = metrics_of(metrics)
        self._tile_with(batches)
        model = self.model
        valid = None
        if validation is not None:
            own_size = None if comes_in_batches(validation) else batch_size or model.workload.samples
            valid = batches_of(validation, batch_size=own_size, name="the validation data set")
        batches.compare(model.comm)
        facts = {**dataclasses.asdict(limits), "validation": valid is not None, **dataclasses.asdict(self._settings)}
        same_everywhere(model.comm, facts, where="Trainer.fit")
        history = History()
        run = _Run(batches=batches, limits=limits, history=history, begun_s=self._clock.now_s())
        last_epoch = None if epochs is None else self.epoch + epochs
        self.should_stop = False
        self._begin_epoch()
        model.train()
        self._progress.start("training", total=self._total_samples(batches, limits))
        try:
            self._callbacks.call("on_fit_start", self)
            while not self._fit_epoch(run):
                if self._end_epoch(run, valid, wanted) or self.epoch == last_epoch:
                    break
            self._callbacks.call("on_fit_end", self)
        except BaseException as error:
            self._callbacks.call("on_exception", self, error)
            raise
        finally:
            self._updates.forget()
            self._progress.finish()
        return history

    def evaluate(
        self,
        data: TrainingData,
        *,
        batch_size: int | None = None,
        metrics: Mapping[str, Metric] | Sequence[str] | None = None,
    ) -> dict[str, float]:
        """The loss and the metrics over all of `data`, the same on every rank. Collective.

        Args:
            data: the same on all ranks.
            batch_size: of the global batches it is cut into; not for data that come in batches.
            metrics: names among `tatami.tiled.METRICS`, or name -> function of (output, target) that gives a mean over samples.
        """
        wanted, batches = metrics_of(metrics), batches_of(data, batch_size=batch_size)
        self._tile_with(batches)
        return self._evaluate(batches, wanted)

    def predict(self, data: TrainingData, *, batch_size: int | None = None) -> Any:
        """The outputs of the network for all of `data`, in order, the same on every rank. Collective.

        Args:
            data: the same on all ranks; with or without targets, which are left out.
            batch_size: of the global batches it is cut into; not for data that come in batches.

        Returns:
            (samples, ...) on the CPU, in the structure that the network returns.
        """
        batches = batches_of(data, batch_size=batch_size)
        self._tile_with(batches)
        return predict(self.model, batches, self._objective, precision=self._settings.precision)

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the ordinary state dict of the plain model as safetensors. Collective.

        Where `path` exists and `force` is not given, that file is kept, the weights are written beside it under a free name,
        and the error says where. See `tatami.tiled.save_model`.
        """
        save_model(self.model, path, force=force)

    def load(self, path: Path | str) -> None:
        """Load weights of the plain model, whatever tiling they were trained on. Collective."""
        load_model(self.model, path)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _tile_with(self, batches: AbstractBatches) -> None:
        """Tile the network, where it is not tiled yet, with the first batch as its sample."""
        if self._model is not None:
            return
        first, batch_size = batches.sample(_SAMPLES)
        sample = None
        if self._objective.training_step is None and samples_of(first) > 1:
            args, kwargs = self._objective.inputs(first)
            sample = kwargs or args
        self._take(self._tile(batch_size=batch_size, sample=sample, reduction=self._reduction))

    def _take(self, model: TiledModel) -> None:
        self._model = model
        model.reduction = self._reduction
        given = self._given_optimizer
        self.optimizer = given if isinstance(given, torch.optim.Optimizer) else given(model.parameters())
        check_optimizer(self.optimizer)
        _check_parameters(self.optimizer, model)
        schedule = self._given_scheduler
        if schedule is not None and not isinstance(schedule, LRSchedulerConfig):
            schedule = LRSchedulerConfig(scheduler=schedule)
        self._learning_rate = LearningRate(schedule, self.optimizer) if schedule is not None else None
        self._retiling = Retiling(model, self.optimizer, retiler=self._retiler) if self._retiler is not None else None
        self._good = GoodState(model, folder=self._rescue_dir)
        self._updates = Updates(
            model, self.optimizer, self._objective, settings=self._settings, good=self._good, retiling=self._retiling
        )
        is_first = model.comm.rank == 0
        self._records = self._given_records if self._given_records is not None and is_first else Records()
        self._progress = self._given_progress if self._given_progress is not None and is_first else NoProgress()

    def _fit_epoch(self, run: _Run) -> bool:
        """What is left of an epoch; True if training is to end here."""
        limits, history = run.limits, run.history
        most = None
        if limits.iterations is not None:
            most = (limits.iterations - len(history.losses)) * self._settings.accumulate_grad_batches
        self._callbacks.call("on_train_epoch_start", self)
        start_s = self._clock.now_s()
        for portion in run.batches.epoch(self.epoch, self.model, skip=self.batch, most=most):
            self.batch += 1
            updated = self._updates.add(
                portion, iteration=self.iteration + 1, epoch=self.epoch, batch=self.batch, stop=self._wish(run)
            )
            if updated is None:
                continue
            self.iteration += 1
            check = self._retile()
            now_s = self._clock.now_s()
            history.losses.append(updated.loss)
            history.iteration_s.append(now_s - start_s)
            self._epoch_loss += updated.loss * (updated.samples if self.model.reduction == "mean" else 1)
            self._epoch_samples += updated.samples
            if self._learning_rate is not None:
                self._learning_rate.step("step", {"train_loss": updated.loss})
            self._record(history, check, updated)
            if self._is_over(run, updated):
                return True
            start_s = self._clock.now_s()
        return False

    def _begin_epoch(self) -> None:
        self.batch = 0
        self._epoch_loss, self._epoch_samples = 0.0, 0

    def _is_over(self, run: _Run, updated: Updated) -> bool:
        limits, history = run.limits, run.history
        if limits.stop_below is not None and updated.loss < limits.stop_below:
            history.stopped = "loss"
        elif limits.iterations is not None and len(history.losses) >= limits.iterations:
            history.stopped = "iterations"
        elif updated.stop is not None:
            history.stopped = updated.stop
        else:
            return False
        return True

    def _end_epoch(self, run: _Run, valid: AbstractBatches | None, metrics: Mapping[str, Metric]) -> bool:
        """True if a callback wants to stop."""
        samples = self._epoch_samples if self.model.reduction == "mean" else 1
        values = {"train_loss": self._epoch_loss / samples}
        self.epoch += 1
        self._begin_epoch()
        if valid is not None:
            found = self._evaluate(valid, metrics)
            run.history.validation.append(found)
            self._records.write("validation", iteration=self.iteration, values={"epoch": self.epoch, **found})
            values |= found
        if self._learning_rate is not None:
            self._learning_rate.step("epoch", values)
        if not len(self._callbacks):
            return False
        self._callbacks.call("on_train_epoch_end", self, values)
        if not any(self.model.comm.allgather_object(self.should_stop)):
            return False
        run.history.stopped = "callback"
        return True

    def _wish(self, run: _Run) -> StopReason | None:
        """Why this rank would stop."""
        limit_s = run.limits.max_time_s
        if limit_s is not None and self.model.comm.rank == 0 and self._clock.now_s() - run.begun_s >= limit_s:
            return "time"
        return "callback" if self.should_stop else None

    def _evaluate(self, batches: AbstractBatches, metrics: Mapping[str, Metric]) -> dict[str, float]:
        return evaluate(self.model, batches, self._objective, metrics=metrics, precision=self._settings.precision)

    def _retile(self) -> Check | None:
        if self._retiling is None:
            self.model.phases.finish_iteration()
            return None
        check = self._retiling.step(companions=self._good.companions())
        self._good.moved()
        return check

    def _record(self, history: History, check: Check | None, updated: Updated) -> None:
        rate = updated.samples / max(history.iteration_s[-1], 1e-9)
        self._progress.advance(updated.samples, fields={"loss": f"{updated.loss:.4g}"})
        if check is not None:
            history.checks.append(check)
            self._records.write(
                "check",
                iteration=self.iteration,
                values={
                    "decision": check.decision.kind.value,
                    "reason": check.decision.reason,
                    "imbalance": check.imbalance,
                    "moved_units": check.moved.num_units if check.moved else 0,
                },
            )
            self._callbacks.call("on_retile", self, check)
        if self.iteration % self._record_every == 0:
            self._records.write(
                "train", iteration=self.iteration, values={"epoch": self.epoch, "loss": updated.loss, "samples_per_s": rate}
            )
        self._callbacks.call("on_train_batch_end", self, updated.loss)

    def _total_samples(self, batches: AbstractBatches, limits: Limits) -> int | None:
        """That `fit` will go through, where that is known."""
        samples, batch_size, num_batches = batches.num_samples, batches.batch_size, batches.num_batches
        if samples is None or batch_size is None or num_batches is None:
            return None
        totals = []
        if limits.epochs is not None:
            totals.append(limits.epochs * samples)
        if limits.iterations is not None:
            full, rest = divmod(limits.iterations * self._settings.accumulate_grad_batches, num_batches)
            totals.append(full * samples + min(rest * batch_size, samples))
        return min(totals) if totals else None


@dataclass(kw_only=True)
class _Run:
    """One call of `fit` under way.

    Attributes:
        batches: of the data.
        limits: when it ends.
        history: what it did so far.
        begun_s: when, by the Trainer's clock.
    """

    batches: AbstractBatches
    limits: Limits
    history: History
    begun_s: float


def _check_parameters(optimizer: torch.optim.Optimizer, model: TiledModel) -> None:
    """Refuse an optimizer of other parameters: it would change nothing of this model.

    Raises:
        InputError: it has parameters that are not the model's.
    """
    own = {id(parameter) for parameter in model.parameters()}
    num_other = sum(id(each) not in own for group in optimizer.param_groups for each in group["params"])
    if num_other:
        raise InputError(
            f"the optimizer has {num_other} parameters that are not the tiled model's, which are new ones; make it from "
            "model.parameters() after model = tatami.tile(...), or give what makes it: partial(torch.optim.SGD, lr=0.5)"
        )
