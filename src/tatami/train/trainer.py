"""The training loop, with what people expect around it. It is the loop one would write by hand, and no more exact."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from torch import nn
from torch.optim.lr_scheduler import LRScheduler

from tatami.batch import samples_of
from tatami.clock import Clock, SystemClock
from tatami.comm.agreement import called_by_all, fail_together, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, MemoryLackError, ModelError
from tatami.inputs import check_at_least, check_seed
from tatami.model.model import TiledModel
from tatami.model.tile import tile as tile_network
from tatami.model.whole_state import load_model, save_model
from tatami.progress import NoProgress, Progress
from tatami.records import Logger, Records, check_loggers
from tatami.retiling import Retiler
from tatami.runtime.losses import Loss, LossReduction
from tatami.runtime.optimizers import check_optimizer, check_parameters, check_shardable
from tatami.runtime.precision import Precision
from tatami.state.good_state import GoodState
from tatami.state.repairing import Repairs, repairs_of
from tatami.train.batches import AbstractBatches
from tatami.train.checkpointing import ModelCheckpoint, TrainingCheckpoints
from tatami.train.data import TrainingData, batches_of, comes_in_batches
from tatami.train.evaluating import Metric, evaluate, metrics_of, predict
from tatami.train.fitting import Fit, Validation
from tatami.train.objective import Objective, TrainingStep, check_keywords
from tatami.train.preparing import History, Limits, TrainingPosition, TrainingSetup
from tatami.train.recording import RunPage
from tatami.train.retiling import Retiling, refuse_elastic
from tatami.train.scheduling import Callbacks, LearningRate, LRSchedulerConfig, MakeScheduler
from tatami.train.updating import Updates, UpdateSettings

_Value = TypeVar("_Value")
_SAMPLES = 4
"""So many samples of the first batch show what a network can be split into; more tell nothing new."""


class Trainer:
    """Trains a tiled model.

    Args:
        model: from `tatami.tile`; or a network, which is tiled with the first batch as its sample when it is first used. Where
            its memory does not fit otherwise, the optimizer is sharded (docs/training.md), which is printed.
        optimizer: makes one from parameters: `functools.partial(torch.optim.SGD, lr=0.5)`; or one of `model.parameters()`.
            Must work element by element.
        loss: (output, target) -> scalar; its `reduction`, "mean" or "sum", is over the global batch. None: the loss is the
            network's own, `output.loss` or `output["loss"]`.
        comm: of a network that is not tiled yet.
        tile: tiles such a network: `functools.partial(tatami.tile, planner="srpm")`, say.
        training_step: (model, batch) -> the loss; in place of `loss`, where a batch is not (inputs, targets).
        target: the key of the targets, where batches are dicts and there is a `loss`.
        reduction: of a loss that does not tell, such as a lambda or the network's own; None: its own, or that of `tatami.tile`.
        scheduler: makes a learning-rate scheduler from the optimizer, or is one; stepped after every epoch, or as
            `LRSchedulerConfig` says.
        retile: re-tile while training; None keeps the tiling.
        accumulate_grad_batches: batches of one update, whose gradient is that of one batch of all their samples.
        precision: "bf16-mixed" or "16-mixed": autocast, as exact as that dtype; None: that of the weights.
        gradient_clip_val: clip gradients by their global 2-norm.
        callbacks: see `Callback`; `tatami.parallel.EarlyStopping` is one.
        checkpoint: when all of training is saved, and where; see `fit(resume=True)`.
        records: where metrics go; only rank 0's is written to.
        loggers: also get the numbers of the records, on rank 0: "wandb", "mlflow", or a function of (numbers by name,
            iteration); in place of `records`, which takes them as well.
        record_every: iterations between two records of the loss.
        report: an .html file: one page of the run (`tatami.report.page`), written when `fit` ends, also by an error; the same
            on all ranks.
        progress: a bar; only rank 0's is shown.
        rescue_dir: where the last good state is saved if the loss stops being finite; of batches of few samples, where copying
            the weights takes more than about 1 % of an update, one of the last ten. None: no copy of it is kept, which saves
            the memory of the weights. If the checkpoint at the end cannot be written, the weights are saved there, too.
        seed: of the shuffling.
        clock: for tests.

    Attributes:
        optimizer: of the tiled model's parameters.
        should_stop: set by a callback on any rank, ends `fit` after the next update, with which the other ranks hear of it;
            at once where it is set at the end of an epoch.
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
        checkpoint: ModelCheckpoint | None = None,
        records: Records | None = None,
        loggers: Sequence[Logger] = (),
        record_every: int = 10,
        report: Path | str | None = None,
        progress: Progress | None = None,
        rescue_dir: Path | str | None = ".",
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        check_seed(seed)
        check_at_least(1, record_every=record_every)
        self._objective = Objective(loss=loss, training_step=training_step, target=target)
        own = model.reduction if isinstance(model, TiledModel) else None
        self._reduction = self._objective.reduction(given=reduction, otherwise=own)
        self._settings = UpdateSettings(
            accumulate_grad_batches=accumulate_grad_batches, precision=precision, gradient_clip_val=gradient_clip_val
        )
        if scheduler is not None and not isinstance(scheduler, LRSchedulerConfig):
            scheduler = LRSchedulerConfig(scheduler=scheduler)
        self._given_optimizer, self._schedule, self._retiler = optimizer, scheduler, retile
        self._callbacks = Callbacks(callbacks)
        check_loggers(loggers)
        if records is not None and loggers:
            raise InputError("records and loggers are both given: give the loggers to Records(..., loggers=...)")
        self._records, self._loggers, self._progress = records, loggers, progress
        self._record_every = record_every
        self._page = RunPage(report) if report is not None else None
        self._rescue_dir = None if rescue_dir is None else Path(rescue_dir)
        self._seed = seed
        self._clock = clock or SystemClock()
        self._position = TrainingPosition()
        self.should_stop = False
        self._checkpoint = checkpoint
        self._checkpoints: TrainingCheckpoints | None = None
        self._setup: TrainingSetup | None = None
        self._repairs: Repairs | None = None
        self._run: Fit | None = None
        used = model.comm if isinstance(model, TiledModel) else comm
        if used is not None and used.changes:
            self._refuse_elastic(used)
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
            is_plain = getattr(tile, "func", tile) is tile_network
            asked = getattr(tile, "keywords", {})
            settings: dict[str, Any] = {}
            knows_stages = retile is None or (retile.knows_stages and not asked.get("sharded_optimizer"))
            if is_plain and not knows_stages and not {"stages", "layout"} & set(asked):
                settings["stages"] = 1
            if is_plain and rescue_dir is None:
                settings["rescue_copy"] = False
            self._tile = functools.partial(tile, model, comm, **settings)

    @property
    def model(self) -> TiledModel:
        """
        Raises:
            InputError: the network is tiled with the first batch, and there was none yet.
        """
        if self._setup is None:
            raise InputError("the network is tiled with the first batch of fit or evaluate; until then there is no tiled model")
        return self._setup.model

    @property
    def iteration(self) -> int:
        """Updates so far."""
        return self._position.iteration

    @property
    def epoch(self) -> int:
        """Epochs so far."""
        return self._position.epoch

    @property
    def batch(self) -> int:
        """Batches of the running epoch so far."""
        return self._position.batch

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
        resume: bool | Path | str | None = None,
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
            resume: True: go on from the newest checkpoint of this Trainer's folder, in mid-epoch, if there is one; or the
                folder of another run. The limits count from the beginning of the `fit` that is gone on with. Where True finds
                none, training begins, and the file of earlier `records` is kept under a free name.

        Raises:
            CheckpointError: on all ranks: the checkpoint is damaged, or of another network or optimizer.
            NotFiniteError: the loss became NaN or infinite; the last good state is saved before.
            InputError: on all ranks, before anything is trained, where they were given different data; names the ranks. Or the
                report cannot be written.
            OutputExistsError: on all ranks, before anything is trained: there is something where the report is to be, or
                records of another run.
        """
        limits = Limits.of(epochs=epochs, iterations=iterations, stop_below=stop_below, max_time=max_time)
        batches = batches_of(data, batch_size=batch_size, seed=self._seed if shuffle else None)
        wanted = metrics_of(metrics)
        if wanted and validation is None:
            raise InputError(f"metrics ({', '.join(wanted)}) are of the validation, and there is none: give fit validation=...")
        self._tile_with(batches)
        model = self.model
        valid = None
        if validation is not None:
            are_lists = batch_size is None and isinstance(data, list) and isinstance(validation, list)  # both of batches
            own_size = None if are_lists or comes_in_batches(validation) else batch_size or model.workload.samples
            valid = Validation(
                batches=batches_of(validation, batch_size=own_size, name="the validation data set"), metrics=wanted
            )
        batches.compare(model.comm)
        facts = {**dataclasses.asdict(limits), "validation": valid is not None, **dataclasses.asdict(self._settings)}
        facts |= {
            "report": self._page is not None,
            "checkpoint": self._checkpoint and dataclasses.replace(self._checkpoint, dirpath=""),
            "resume": bool(resume),
        }
        same_everywhere(model.comm, facts, where="Trainer.fit")
        if self._checkpoint is not None and self._checkpoints is None:
            self._checkpoints = TrainingCheckpoints(self._checkpoint, model)
        setup = self._setup
        assert setup is not None
        self._position.begin_fit()
        setup.good.begin()
        self.should_stop = False
        run = self._run = Fit(
            self,
            setup,
            position=self._position,
            batches=batches,
            limits=limits,
            validation=valid,
            checkpoint=self._checkpoint,
            checkpoints=self._checkpoints,
        )
        self._repairs = repairs = run.repairs = repairs_of(model, self.optimizer, run)
        if repairs is not None and self._checkpoints is not None:
            self._checkpoints.on_whole = repairs.saved
            self._checkpoints.survives = True
        page = self._page.writing(model.comm, setup.records) if self._page is not None else nullcontext()
        with page, fail_together(model.comm):
            run.begin()
            joins, returns = (repairs is not None and repairs.joins), (repairs is not None and repairs.returns)
            has_own = returns and self._checkpoints is not None and self._resume(True, batches)
            if resume and not (has_own or joins):
                self._resume(resume, batches)
            if self._checkpoints is not None and not (joins or returns):
                self._checkpoints.refuse_stray(self._position)
            run.run()
        return run.history

    @called_by_all("Trainer.evaluate")
    def evaluate(
        self, data: TrainingData, *, batch_size: int | None = None, metrics: Mapping[str, Metric] | Sequence[str] | None = None
    ) -> dict[str, float]:
        """The loss and the metrics over all of `data`, the same on every rank. Collective.

        Args:
            data: the same on all ranks.
            batch_size: of the global batches it is cut into; not for data that come in batches.
            metrics: names among `tatami.train.METRICS`, or name -> function of (output, target) that gives a mean over samples.
        """
        wanted, batches = metrics_of(metrics), batches_of(data, batch_size=batch_size)
        self._tile_with(batches)
        precision = self._settings.precision
        return self._whole(lambda: evaluate(self.model, batches, self._objective, metrics=wanted, precision=precision))

    @called_by_all("Trainer.predict")
    def predict(self, data: TrainingData, *, batch_size: int | None = None) -> Any:
        """The outputs of the network for all of `data`, in order, the same on every rank. Collective.

        Args:
            data: the same on all ranks; with or without targets, which are left out.
            batch_size: of the global batches it is cut into; not for data that come in batches.

        Returns:
            (samples, ...) on the CPU, in the structure that the network returns.
        """
        batches = batches_of(data, batch_size=batch_size)
        self._tile_with(batches, inputs=self._objective.predicting)
        return self._whole(lambda: predict(self.model, batches, self._objective, precision=self._settings.precision))

    @called_by_all("Trainer.save")
    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write the ordinary state dict of the plain model as safetensors. Collective.

        Where `path` exists and `force` is not given, that file is kept, the weights are written beside it under a free name,
        and the error says where. See `tatami.train.save_model`.
        """
        self._whole(lambda: save_model(self.model, path, force=force))

    @called_by_all("Trainer.load")
    def load(self, path: Path | str) -> None:
        """Load weights of the plain model, whatever tiling they were trained on. Collective."""
        self._whole(lambda: load_model(self.model, path))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _whole(self, body: Callable[[], _Value]) -> _Value:
        """What `body`, a collective, returns; in an elastic run, again where a rank dies in it."""
        with fail_together(self.model.comm):
            if self._repairs is None:
                return body()
            if self._run is not None and self._run.begins_epoch:
                raise InputError(
                    "a callback calls evaluate, predict, save or load of the Trainer in on_train_epoch_start, which a rank "
                    "that joins an elastic run in mid-epoch goes through alone. Call it in on_train_epoch_end"
                )
            return self._repairs.whole(body)

    def _refuse_elastic(self, comm: AbstractCommunicator) -> None:
        """
        Raises:
            InputError: this Trainer has what does not follow ranks that die or join.
        """
        kept = self._checkpoint is not None and self._checkpoint.copies > 0
        for is_given, what in (
            (self._retiler is not None, "Trainer(retile=...)"),
            (self._page is not None, "Trainer(report=...)"),
            (self._settings.precision == "16-mixed", "Trainer(precision='16-mixed')"),
            (kept, "ModelCheckpoint(copies=...)"),
        ):
            if is_given:
                refuse_elastic(comm, what)

    def _tile_with(self, batches: AbstractBatches, *, inputs: Callable[[Any], Any] | None = None) -> None:
        """Tile the network, where it is not tiled yet, with the first batch as its sample, of which `inputs` makes those."""
        if self._setup is not None:
            return
        first, batch_size = batches.sample(_SAMPLES)
        sample = None
        if self._objective.training_step is None and samples_of(first) > 1:
            args, kwargs = (inputs or self._objective.inputs)(first)
            if isinstance(self._tile.args[0], nn.Module):
                check_keywords(self._tile.args[0], args, kwargs)
            sample = kwargs or args
        tile = functools.partial(self._tile, batch_size=batch_size, sample=sample, reduction=self._reduction)
        try:
            self._take(tile())
            return
        except MemoryLackError as error:
            if not (error.fits_sharded and self._may_shard()):
                raise
            lack = error.with_traceback(None)  # which holds the copy of the network that was tiled
        try:
            model = tile(sharded_optimizer=True, stages=1)
        except (MemoryLackError, ModelError):
            raise lack from None
        if model.comm.rank == 0 and not self._tile.keywords.get("quiet"):
            print(
                "tatami: the optimizer is sharded because there was no room otherwise, so after a step parameter.grad is NaN "
                "outside of a rank's shard. tatami.tile(sharded_optimizer=False) refuses instead (docs/training.md)",
                flush=True,
            )
        self._take(model)

    def _may_shard(self) -> bool:
        """Whether the optimizer's state may be sharded where memory asks for it: what the user said leaves it open."""
        tile: functools.partial[TiledModel] = self._tile
        if tile.func is not tile_network or tile.args[1].changes or {"sharded_optimizer", "layout"} & set(tile.keywords):
            return False
        try:
            assert callable(self._given_optimizer)
            check_shardable(self._given_optimizer([nn.Parameter(torch.zeros(2, 2, device="cpu"))]))
        except Exception:  # what makes it needs the model's own parameters, or it looks at their shape
            return False
        return True

    def _take(self, model: TiledModel) -> None:
        model.reduction = self._reduction
        given = self._given_optimizer
        if not callable(given) and not isinstance(given, torch.optim.Optimizer):
            raise InputError(
                "optimizer must be one of torch's, or what makes one from parameters, as partial(torch.optim.Adam, lr=0.01), "
                f"not {given!r}"
            )
        self.optimizer = given if isinstance(given, torch.optim.Optimizer) else given(model.parameters())
        check_optimizer(self.optimizer)
        check_parameters(self.optimizer, model)
        good = GoodState(model, folder=self._rescue_dir if model.rescue_copy else None)
        retiling = Retiling(model, self.optimizer, retiler=self._retiler) if self._retiler is not None else None
        is_first = model.comm.rank == 0
        writes = is_first or model.comm.changes  # as any rank may become the first
        self._setup = TrainingSetup(
            model=model,
            optimizer=self.optimizer,
            objective=self._objective,
            settings=self._settings,
            updates=Updates(model, self.optimizer, self._objective, settings=self._settings, good=good, retiling=retiling),
            good=good,
            learning_rate=LearningRate(self._schedule, self.optimizer) if self._schedule is not None else None,
            retiling=retiling,
            callbacks=self._callbacks,
            records=(self._records or Records(loggers=self._loggers)) if writes else Records(),
            record_every=self._record_every,
            progress=self._progress if self._progress is not None and is_first else NoProgress(),
            clock=self._clock,
        )

    def _resume(self, resume: Literal[True] | Path | str, batches: AbstractBatches) -> bool:
        """Whether there was a checkpoint."""
        setup = self._setup
        assert setup is not None
        if resume is True:
            if self._checkpoints is None:
                raise InputError("resume=True: the Trainer has no checkpoint=ModelCheckpoint(dirpath=...); or give a path")
            found = self._checkpoints.resume(setup, self._position, batches)
        else:
            elsewhere = TrainingCheckpoints(ModelCheckpoint(dirpath=resume), setup.model)
            elsewhere.on_whole = self._repairs.saved if self._repairs is not None else elsewhere.on_whole
            try:
                found = elsewhere.resume(setup, self._position, batches, needed=True)
            finally:
                elsewhere.close()
        # In an elastic run, others have records of the same file; a run that begins from another one's has its own file.
        if setup.model.comm.rank == 0 and not found:
            setup.records.set_aside()
        elif setup.model.comm.rank == 0 and (resume is True or setup.records.may_overwrite):
            setup.records.resume(iteration=self._position.iteration)
        if found and self._retiler is not None:
            setup.retiling = setup.updates.retiling = Retiling(setup.model, setup.optimizer, retiler=self._retiler)
        return found
