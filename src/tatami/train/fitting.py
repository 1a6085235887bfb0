"""The loop of one call of `Trainer.fit`: batches, updates, epochs, and what happens between them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from tatami.errors import CheckpointError, InputError
from tatami.random_state import random_state, set_random_state
from tatami.state.repairing import BeginAgain, RepairedUpdate, Repairs
from tatami.train.batches import AbstractBatches, LocalBatch
from tatami.train.checkpointing import ModelCheckpoint, TrainingCheckpoints, progress_state, restore_progress
from tatami.train.evaluating import Metric, evaluate
from tatami.train.preparing import History, Limits, TrainingPosition, TrainingSetup
from tatami.train.recording import RunRecorder
from tatami.train.retiling import Check
from tatami.train.updating import Updated

_STOP, _TIME, _WRITTEN, _DUE = "callback", "time", "written", "due"
"""What the ranks tell each other with every batch."""
_Value = TypeVar("_Value")


@dataclass(frozen=True, kw_only=True)
class Validation:
    """What is evaluated after every epoch."""

    batches: AbstractBatches
    metrics: Mapping[str, Metric]


class Fit:
    """One call of `fit`.

    Args:
        trainer: what callbacks are given.
        position: where it is; changed.
        limits: when it ends.
        validation: after every epoch; None: none.
        checkpoint, checkpoints: when the state is saved, and how; None: never.

    Attributes:
        repairs: of an elastic run, in which ranks come and go.
        begins_epoch: whether `on_train_epoch_start` is being called.
    """

    def __init__(
        self,
        trainer: Any,
        setup: TrainingSetup,
        *,
        position: TrainingPosition,
        batches: AbstractBatches,
        limits: Limits,
        validation: Validation | None,
        checkpoint: ModelCheckpoint | None,
        checkpoints: TrainingCheckpoints | None,
    ) -> None:
        self._trainer, self._setup, self._position = trainer, setup, position
        self._batches, self._limits, self._validation = batches, limits, validation
        self._checkpoint, self._checkpoints = checkpoint, checkpoints
        self._begun_s = self._saved_s = setup.clock.now_s()
        self._wants_checkpoint = self._has_joined = False
        self._recorder = RunRecorder(setup.model, setup.records, every=setup.record_every, whole=self.whole)
        self._kept: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
        self.repairs: Repairs | None = None
        self.begins_epoch = False
        self.history = History()

    def begin(self) -> None:
        """Call `on_fit_start`, which may make what has a part in the checkpoint that is resumed."""
        call = self._setup.callbacks.call
        try:
            call("on_fit_start", self._trainer)
        except BaseException as error:
            call("on_exception", self._trainer, error)
            raise

    def run(self) -> None:
        """Train until a limit is reached. Collective."""
        call = self._setup.callbacks.call
        self._setup.model.train()
        self._setup.progress.start("training", total=self._total_samples())
        try:
            joins = False
            if self.repairs is not None:
                joins = self.repairs.joins
                self._batches.begin_again()
                self.repairs.number = self._position.iteration
                self.repairs.enter()
            if not joins:
                self._recorder.begin(iteration=self._position.iteration)
            while not self._has_ended():
                if self._epoch() or self._end_epoch():
                    break
            self.whole(self._save_last)  # and no rank leaves the loop while another may have to come back to it
            if self.repairs is not None:
                self.repairs.through()
            self._recorder.ended(self.history.stopped, iteration=self._position.iteration)
            call("on_fit_end", self._trainer)
        except BeginAgain:
            raise
        except BaseException as error:
            self._recorder.failed(error, iteration=self._position.iteration)
            call("on_exception", self._trainer, error)
            raise
        finally:
            self._setup.updates.forget()
            self._setup.progress.finish()

    # -- where ranks come and go ---------------------------------------------------------------------------------------

    def whole(self, body: Callable[[], _Value]) -> _Value:
        """What `body`, a collective, returns; in an elastic run, again where a rank dies in it."""
        return body() if self.repairs is None else self.repairs.whole(body)

    def put_back(self) -> None:
        """As it was when the update that is under way began."""
        position, data = self._kept
        for name, value in position.items():
            setattr(self._position, name, value)
        self._setup.updates.forget()
        self._batches.seek(data)

    def state_dict(self) -> dict[str, Any]:
        """For a rank that joins."""
        return {
            **progress_state(self._setup, self._position),
            "data": self._batches.position(),
            "spent_s": self._setup.clock.now_s() - self._begun_s,
            "is_recorded": self._recorder.is_wanted,
            "wants_checkpoint": self._wants_checkpoint,
        }

    def load_state_dict(self, state: dict[str, Any], /) -> None:
        restore_progress(self._setup, self._position, state)
        self._batches.seek(state["data"])
        self._begun_s = self._setup.clock.now_s() - state["spent_s"]
        self._recorder.joins(is_wanted=state["is_recorded"])
        self._has_joined = True
        self._wants_checkpoint = state["wants_checkpoint"]

    # -- inside --------------------------------------------------------------------------------------------------------

    def _has_ended(self) -> bool:
        """Whether a limit was reached by whole epochs or updates, perhaps by the run that is gone on with."""
        limits, position = self._limits, self._position
        if limits.iterations is not None and position.iteration - position.begun_iteration >= limits.iterations:
            self.history.stopped = "iterations"
            return True
        return limits.epochs is not None and position.epoch - position.begun_epoch >= limits.epochs

    def _epoch(self) -> bool:
        """What is left of an epoch; True if training is to end here."""
        setup, position = self._setup, self._position
        self._call_epoch_start()
        start_s = setup.clock.now_s()
        for updated, ends_epoch in self._updates():
            position.iteration += 1
            check = self._retile()
            self.history.losses.append(updated.loss)
            self.history.iteration_s.append(setup.clock.now_s() - start_s)
            self.history.num_samples.append(updated.samples)
            position.epoch_loss += updated.loss * (updated.samples if setup.model.reduction == "mean" else 1)
            position.epoch_samples += updated.samples
            if setup.learning_rate is not None:
                setup.learning_rate.step("step", {"train_loss": updated.loss})
            self._record(check, updated)
            self._look_after_checkpoints(updated, ends_epoch=ends_epoch)
            if self._is_over(updated):
                return True
            start_s = setup.clock.now_s()
        return False

    def _call_epoch_start(self) -> None:
        """Call `on_train_epoch_start`, also of an epoch that began before this run was resumed or this rank joined.

        What callbacks draw, count and set in the optimizer there is in the state that was taken over already: it is put back.
        """
        setup, has_begun, groups = self._setup, self._position.batch > 0 or self._has_joined, self._setup.optimizer.param_groups
        drawn, kept = random_state(), copy.deepcopy(setup.callbacks.state_dict()) if has_begun else []
        settings = [{key: value for key, value in group.items() if key != "params"} for group in groups]
        self._has_joined, self.begins_epoch = False, True
        setup.callbacks.call("on_train_epoch_start", self._trainer)
        self.begins_epoch = False
        if has_begun:
            set_random_state(drawn)
            setup.callbacks.load_state_dict(kept, says=False)
            for group, before in zip(groups, settings, strict=False):
                group.update(before)

    def _updates(self) -> Iterator[tuple[Updated, bool]]:
        """The updates of what is left of an epoch, each with whether the epoch ends with it."""
        repairs, updates = self.repairs, self._setup.updates
        if repairs is None:
            for batch in self._drawn():
                if self._add(batch):
                    yield updates.made(), batch.is_last
            return
        drawn: Iterator[LocalBatch] | None = None
        is_last = False
        ends_epoch = self._position.batch > 0 and self._position.batch == self._batches.num_batches
        while not ends_epoch:
            with repairs.step() as update:
                self._kept = dataclasses.asdict(self._position), self._batches.position()
                drawn = drawn or self._drawn()
                for batch in drawn:
                    is_last = batch.is_last
                    if self._add(batch, update):
                        break
                else:
                    raise InputError("the data gave no batch, though the epoch had not ended: every pass must give the same")
            if update.is_done:
                if ends_epoch := is_last:
                    next(drawn, None)  # let it see its end
                yield updates.made(), ends_epoch
            else:
                drawn = None  # of the batches as they were cut for the ranks of before

    def _drawn(self) -> Iterator[LocalBatch]:
        """The batches of what is left of an epoch, as far as the limits go."""
        position, limits, most = self._position, self._limits, None
        if limits.iterations is not None:
            left = limits.iterations - (position.iteration - position.begun_iteration)
            most = left * self._setup.settings.accumulate_grad_batches
        return self._batches.epoch(position.epoch, self._setup.model, skip=position.batch, most=most)

    def _add(self, batch: LocalBatch, update: RepairedUpdate | None = None) -> bool:
        """Whether the update is complete."""
        position = self._position
        position.batch += 1
        return self._setup.updates.add(
            batch,
            iteration=position.iteration + 1,
            epoch=position.epoch,
            batch_number=position.batch,
            signals=self._signals(),
            update=update,
        )

    def _end_epoch(self) -> bool:
        """True if a callback wants to stop."""
        setup, position = self._setup, self._position
        samples = position.epoch_samples if setup.model.reduction == "mean" else 1
        values = {"train_loss": position.epoch_loss / samples}
        position.epoch += 1
        position.begin_epoch()
        if self._validation is not None:
            found = self.whole(self._validate)
            self.history.validation.append(found)
            self._recorder.write("validation", iteration=position.iteration, values={"epoch": position.epoch, **found})
            values |= found
        if setup.learning_rate is not None:
            setup.learning_rate.step("epoch", values)
        stops = False
        if len(setup.callbacks):
            setup.callbacks.call("on_train_epoch_end", self._trainer, values)
            stops = any(self.whole(lambda: setup.model.comm.allgather_object(self._trainer.should_stop)))
        if self._checkpoint is not None and (self._wants_checkpoint or self._checkpoint.is_due_after_epoch(position)):
            self._save()
        if stops:
            self.history.stopped = "callback"
        return stops

    def _validate(self) -> dict[str, float]:
        setup, validation = self._setup, self._validation
        assert validation is not None
        return evaluate(
            setup.model, validation.batches, setup.objective, metrics=validation.metrics, precision=setup.settings.precision
        )

    def _is_over(self, updated: Updated) -> bool:
        limits, history = self._limits, self.history
        if limits.stop_below is not None and updated.loss < limits.stop_below:
            history.stopped = "loss"
        elif self._has_ended():
            pass
        elif updated.signals[_STOP]:
            history.stopped = "callback"
        elif updated.signals[_TIME]:
            history.stopped = "time"
        else:
            return False
        return True

    def _signals(self) -> dict[str, bool]:
        """What this rank tells the others with a batch; times are by the clock of rank 0."""
        is_first, now_s = self._setup.model.comm.rank == 0, self._setup.clock.now_s()
        limit_s = self._limits.max_time_s
        interval_s = self._checkpoint.interval_s if self._checkpoint is not None else None
        return {
            _STOP: bool(self._trainer.should_stop),
            _TIME: is_first and limit_s is not None and now_s - self._begun_s >= limit_s,
            _WRITTEN: self._checkpoints is not None and self._checkpoints.is_written,
            _DUE: is_first and interval_s is not None and now_s - self._saved_s >= interval_s,
        }

    def _look_after_checkpoints(self, updated: Updated, *, ends_epoch: bool) -> None:
        if self._checkpoints is None or self._checkpoint is None:
            return
        if updated.signals[_WRITTEN] == self._setup.model.comm.size and self._checkpoints.is_under_way:
            self.whole(self._checkpoints.finish)
        if self._checkpoint.is_due(self._position) or updated.signals[_DUE]:
            if ends_epoch:
                self._wants_checkpoint = True  # after the validation, so that it is not saved twice
            else:
                self._save()

    def _save_last(self) -> None:
        if self._checkpoints is not None:
            self._checkpoints.finish(then="the end of training is saved next")
            if self._checkpoints.is_saved(self._position):
                return
            self._checkpoints.begin(self._setup, self._position, self._batches)
            try:
                self._checkpoints.finish(needed=True)
            except CheckpointError as error:
                error.args = (f"{error}; {self._setup.good.save(self._position.iteration)}",)
                raise

    def _save(self) -> None:
        checkpoints = self._checkpoints
        assert checkpoints is not None
        self.whole(lambda: checkpoints.begin(self._setup, self._position, self._batches))
        self._wants_checkpoint = False
        self._saved_s = self._setup.clock.now_s()

    def _retile(self) -> Check | None:
        setup = self._setup
        if setup.retiling is None:
            if self.repairs is None:
                setup.model.phases.finish_iteration()
            return None
        check = setup.retiling.step(companions=setup.good.companions())
        setup.good.moved()
        return check

    def _record(self, check: Check | None, updated: Updated) -> None:
        setup, position, history = self._setup, self._position, self.history
        setup.progress.advance(updated.samples, fields={"loss": f"{updated.loss:.4g}"})
        self._recorder.iterated(
            check,
            iteration=position.iteration,
            epoch=position.epoch,
            loss=updated.loss,
            num_samples=updated.samples,
            seconds=history.iteration_s[-1],
            watcher=setup.retiling.watcher if setup.retiling is not None else None,
        )
        if check is not None:
            history.checks.append(check)
            setup.callbacks.call("on_retile", self._trainer, check)
        setup.callbacks.call("on_train_batch_end", self._trainer, updated.loss)

    def _total_samples(self) -> int | None:
        """Samples of the whole call, if the number is known."""
        batches, limits, position = self._batches, self._limits, self._position
        samples, batch_size, num_batches = batches.num_samples, batches.batch_size, batches.num_batches
        if samples is None or batch_size is None or num_batches is None:
            return None
        totals = []
        if limits.epochs is not None:
            epochs = limits.epochs - (position.epoch - position.begun_epoch)
            totals.append(epochs * samples - position.batch * batch_size)
        if limits.iterations is not None:
            left = limits.iterations - (position.iteration - position.begun_iteration)
            full, rest = divmod(left * self._setup.settings.accumulate_grad_batches, num_batches)
            totals.append(full * samples + min(rest * batch_size, samples))
        return max(0, min(totals)) if totals else None
