"""The training loop, with what people expect around it. It is the loop one would write by hand, and no more exact."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from torch import nn

from tatami.clock import Clock, SystemClock
from tatami.comm.agreement import problems_of, same_everywhere
from tatami.comm.base import AbstractRequest
from tatami.datasets.samples import Data
from tatami.errors import InputError, NotFiniteError
from tatami.inputs import check_finite, check_seed
from tatami.outputs import free_name
from tatami.progress import NoProgress, Progress
from tatami.records import Records
from tatami.retiling import Retiler
from tatami.tiled.batches import Batches, check_data
from tatami.tiled.losses import Loss, LossReduction, reduction_of, setting_of
from tatami.tiled.model import TiledModel
from tatami.tiled.optimizers import check_optimizer
from tatami.tiled.phases import IterationPhase
from tatami.tiled.retiling import Check, Retiling
from tatami.tiled.weights import load_model, save_model, write_model

logger = logging.getLogger(__name__)

Metric = Callable[[torch.Tensor, torch.Tensor], float]


@dataclass(kw_only=True)
class History:
    """What a call of `fit` did.

    Attributes:
        losses: of every iteration: the loss over the global batch, before the update.
        iteration_s: of every iteration, as rank 0 saw it.
        checks: every look at the balance.
        validation: of every epoch, where validation data were given.
        stopped: why it ended.
    """

    losses: list[float] = field(default_factory=list)
    iteration_s: list[float] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    validation: list[dict[str, float]] = field(default_factory=list)
    stopped: Literal["epochs", "iterations", "loss"] = "epochs"


class Trainer:
    """Trains a tiled model.

    Args:
        model: from `tatami.tile`.
        optimizer: makes one from parameters: `functools.partial(torch.optim.SGD, lr=0.5)`; or one of `model.parameters()`.
            Must work element by element.
        loss: (output, target) -> scalar; its `reduction`, "mean" or "sum", is over the global batch.
        reduction: of a loss that does not tell, such as a lambda; None: its own, or that of `tatami.tile`.
        scheduler: makes a learning-rate scheduler from the optimizer; stepped after every epoch.
        retile: re-tile while training; None keeps the tiling.
        clip_norm: clip gradients by their global 2-norm.
        records: where metrics go; only rank 0's is written to.
        record_every: iterations between two records of the loss.
        progress: a bar; only rank 0's is shown.
        rescue_dir: where the last good state is saved if the loss stops being finite.
        seed: of the shuffling.
        clock: for tests.
    """

    def __init__(
        self,
        model: TiledModel,
        *,
        optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer] | torch.optim.Optimizer,
        loss: Loss,
        reduction: LossReduction | None = None,
        scheduler: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler] | None = None,
        retile: Retiler | None = None,
        clip_norm: float | None = None,
        records: Records | None = None,
        record_every: int = 10,
        progress: Progress | None = None,
        rescue_dir: Path | str = ".",
        seed: int = 0,
        clock: Clock | None = None,
    ) -> None:
        check_seed(seed)
        model.reduction = reduction_of(loss, given=reduction, otherwise=model.reduction)
        self.model = model
        self.optimizer = optimizer if isinstance(optimizer, torch.optim.Optimizer) else optimizer(model.parameters())
        check_optimizer(self.optimizer)
        _check_parameters(self.optimizer, model)
        self.loss = loss
        self._ignored_target = setting_of(loss, "ignore_index")
        self._scheduler = scheduler(self.optimizer) if scheduler is not None else None
        self._retiling = Retiling(model, self.optimizer, retiler=retile) if retile is not None else None
        self._clip_norm = clip_norm
        self._records = records if records is not None and model.comm.rank == 0 else Records()
        self._record_every = record_every
        self._progress = progress if progress is not None and model.comm.rank == 0 else NoProgress()
        self._rescue_dir = Path(rescue_dir)
        self._seed = seed
        self._clock = clock or SystemClock()
        self._good: dict[str, torch.Tensor] = {}
        self._good_tilings = model.tilings
        self._good_iteration = 0
        self.iteration = 0
        self.epoch = 0

    def fit(
        self,
        data: Data,
        *,
        batch_size: int,
        epochs: int | None = None,
        iterations: int | None = None,
        shuffle: bool = True,
        stop_below: float | None = None,
        validation: Data | None = None,
        metrics: Mapping[str, Metric] | None = None,
    ) -> History:
        """Train until the first of `epochs`, `iterations` and `stop_below` is reached. Collective.

        Args:
            data: the same on all ranks; each reads its own samples.
            batch_size: of the global batch; as many as there are samples makes it full-batch gradient descent.
            epochs: passes over the data.
            iterations: updates.
            shuffle: draw a new order for each epoch (from `seed`); makes no difference to full batches and is left out there.
            stop_below: end as soon as the loss of an iteration is below this.
            validation: evaluated after every epoch.
            metrics: of the validation, see `evaluate`.

        Raises:
            NotFiniteError: the loss became NaN or infinite; the last good state is saved before.
            InputError: on all ranks, before anything is trained, where they were given different data; names the ranks.
        """
        if epochs is None and iterations is None and stop_below is None:
            raise InputError("say when to stop: epochs, iterations or stop_below")
        if stop_below is not None:
            check_finite(stop_below, name="stop_below")
        for name, count in (("epochs", epochs), ("iterations", iterations)):
            if count is not None and count < 1:
                raise InputError(f"{name} must be at least 1, not {count}")
        for each in (data, validation):
            if each is not None:
                check_data(each)
        if validation is not None and _size(validation) == 0:
            raise InputError("the validation data set is empty")
        batches = Batches(data, batch_size=batch_size, seed=self._seed if shuffle and batch_size < _size(data) else None)
        batches.compare(self.model.comm)
        facts = {"epochs": epochs, "iterations": iterations, "stop_below": stop_below, "validation": validation is not None}
        same_everywhere(self.model.comm, facts, where="Trainer.fit")
        total = _total_samples(batches, epochs=epochs, iterations=iterations)
        history = History()
        last_epoch = None if epochs is None else self.epoch + epochs
        self.model.train()
        self._progress.start("training", total=total)
        try:
            while not self._fit_epoch(batches, history, iterations=iterations, stop_below=stop_below):
                self.epoch += 1
                if self._scheduler is not None:
                    self._scheduler.step()
                if validation is not None:
                    self._validate(validation, batch_size, metrics, history)
                if self.epoch == last_epoch:
                    break
        finally:
            self._progress.finish()
        return history

    def evaluate(self, data: Data, *, batch_size: int, metrics: Mapping[str, Metric] | None = None) -> dict[str, float]:
        """The loss and the metrics over all of `data`, the same on every rank. Collective.

        Args:
            data: the same on all ranks.
            batch_size: of the global batches it is cut into.
            metrics: name -> function of (output, target) that gives a mean over samples.
        """
        named: dict[str, Metric] = dict(metrics or {})
        model = self.model
        sums = torch.zeros(1 + len(named), dtype=torch.float64)
        batches = Batches(data, batch_size=batch_size, seed=None)
        batches.compare(model.comm)
        was_training = model.training
        model.eval()
        with torch.no_grad():
            for _, x, y in batches.epoch(0, model):
                output = model(x)
                if not model.speaks_for_column or len(y) == 0:
                    continue
                self._check_targets(y)
                weight = len(y) if model.reduction == "mean" else 1
                sums[0] += self.loss(output, y).item() * weight
                for index, metric in enumerate(named.values(), start=1):
                    sums[index] += metric(output, y) * len(y)
        model.train(was_training)
        model.comm.allreduce(sums)
        means = (sums / batches.num_samples).tolist()
        loss = means[0] if model.reduction == "mean" else sums[0].item()
        return {"loss": loss, **dict(zip(named, means[1:], strict=True))}

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

    def _fit_epoch(self, batches: Batches, history: History, *, iterations: int | None, stop_below: float | None) -> bool:
        """One pass over the data; True if training is to end here."""
        for size, x, y in batches.epoch(self.epoch, self.model):
            start_s = self._clock.now_s()
            loss = self._step(size, x, y)
            self.iteration += 1
            check = self._retile()
            spent_s = self._clock.now_s() - start_s
            history.losses.append(loss)
            history.iteration_s.append(spent_s)
            self._record(history, check, loss=loss, size=size)
            if stop_below is not None and loss < stop_below:
                history.stopped = "loss"
                return True
            if iterations is not None and len(history.losses) >= iterations:
                history.stopped = "iterations"
                return True
        return False

    def _step(self, size: int, x: torch.Tensor, y: torch.Tensor) -> float:
        """One update; returns the loss over the global batch."""
        model = self.model
        self._check_targets(y)
        self.optimizer.zero_grad(set_to_none=True)
        local_loss = self.loss(model(x), y)
        report = self._begin_report(local_loss, size=size, num_here=len(y))
        local_loss.backward()  # type: ignore[no-untyped-call]
        loss = self._end_report(report)
        if self._clip_norm is not None:
            model.clip_grad_norm_(self._clip_norm)
        self._keep_good_state()
        self.optimizer.step()
        return loss

    def _begin_report(
        self, local_loss: torch.Tensor, *, size: int, num_here: int
    ) -> tuple[torch.Tensor, AbstractRequest | None, float]:
        """Start summing the loss over the ranks; it travels while backward computes."""
        model = self.model
        value = local_loss.item() if num_here else 0.0
        weight = num_here / size if model.reduction == "mean" else 1.0
        finite = math.isfinite(value)
        share = value * weight if finite and model.speaks_for_column else 0.0
        sums = torch.tensor([share, 0.0 if finite else 1.0], dtype=torch.float64)
        request = model.comm.iallreduce(sums) if model.comm.size > 1 else None
        return sums, request, value

    def _end_report(self, report: tuple[torch.Tensor, AbstractRequest | None, float]) -> float:
        sums, request, value = report
        if request is not None:
            with self.model.phases.during(IterationPhase.HORIZONTAL):
                request.wait()
        loss, num_bad = sums.tolist()
        if num_bad:
            self._rescue(value)
        return float(loss)

    def _rescue(self, local_loss: float) -> None:
        """The loss is not finite: save the last parameters whose loss was, and say where it happened."""
        model = self.model
        iteration = self.iteration + 1
        bad = problems_of(model.comm, None if math.isfinite(local_loss) else local_loss)
        rank, value = next(iter(bad.items()))
        saved = "there was no good state yet to save"
        if self._good and self._good_tilings is model.tilings:
            with torch.no_grad():
                torch._foreach_copy_(list(self._state().values()), list(self._good.values()))
            path = free_name(self._rescue_dir / f"last-good-{self._good_iteration:06d}.safetensors")
            path = write_model(model, path, force=False, strict=False)
            saved = f"the last good state, after iteration {self._good_iteration}, is in {path} and in the model"
        others = f" (and on ranks {sorted(bad)[1:]})" if len(bad) > 1 else ""
        raise NotFiniteError(
            f"the loss is {value} on rank {rank} of {model.comm.size}{others} in iteration {iteration}; {saved}. "
            "Look for bad samples in that batch, lower the learning rate, or clip gradients (clip_norm)",
            rank=rank,
            iteration=iteration,
        )

    def _keep_good_state(self) -> None:
        """Keep a copy of the parameters with which the loss was finite: a step with a bad gradient can not be undone."""
        state = self._state()
        self._good_iteration = self.iteration
        if self._good and self._good_tilings is self.model.tilings:
            torch._foreach_copy_(list(self._good.values()), list(state.values()))
        else:
            self._good = {name: tensor.clone() for name, tensor in state.items()}
            self._good_tilings = self.model.tilings

    def _state(self) -> dict[str, torch.Tensor]:
        return {name: tensor.detach() for name, tensor in self.model.module.state_dict().items()}

    def _retile(self) -> Check | None:
        if self._retiling is None:
            self.model.phases.finish_iteration()
            return None
        good = {parameter: self._good[name] for name, parameter in self.model.module.named_parameters()}
        check = self._retiling.step(companions=good)
        self._good_tilings = self.model.tilings
        return check

    def _check_targets(self, y: torch.Tensor) -> None:
        """Refuse targets that a mean leaves out: it divides by what is left, of which a rank knows only its part."""
        ignored = self._ignored_target
        if ignored is None or self.model.reduction != "mean" or y.is_floating_point():
            return
        if bool((y == ignored).any()):
            raise InputError(
                f"rank {self.model.comm.rank} has targets equal to ignore_index ({ignored}): their mean divides by the number "
                "of the others, so the ranks' means do not make up the global one. Use reduction='sum'"
            )

    def _record(self, history: History, check: Check | None, *, loss: float, size: int) -> None:
        rate = size / max(history.iteration_s[-1], 1e-9)
        self._progress.advance(size, fields={"loss": f"{loss:.4g}"})
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
        if self.iteration % self._record_every == 0:
            self._records.write(
                "train", iteration=self.iteration, values={"epoch": self.epoch, "loss": loss, "samples_per_s": rate}
            )

    def _validate(self, validation: Data, batch_size: int, metrics: Mapping[str, Metric] | None, history: History) -> None:
        values = self.evaluate(validation, batch_size=batch_size, metrics=metrics)
        history.validation.append(values)
        self._records.write("validation", iteration=self.iteration, values={"epoch": self.epoch, **values})


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


def _size(data: Data) -> int:
    return len(data[0]) if isinstance(data, tuple) else len(data)


def _total_samples(batches: Batches, *, epochs: int | None, iterations: int | None) -> int | None:
    totals = []
    if epochs is not None:
        totals.append(epochs * batches.num_samples)
    if iterations is not None:
        full, rest = divmod(iterations, len(batches))
        totals.append(full * batches.num_samples + rest * batches.batch_size)
    return min(totals) if totals else None
