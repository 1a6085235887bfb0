"""What is around the loop: callbacks, early stopping, schedules, limits of time, metrics by name."""

import sys
from collections.abc import Mapping
from datetime import timedelta
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

from drawing import mlp
from hand_clock import HandClock
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel import EarlyStopping
from tatami.records import Records
from tatami.retiling import Retiler
from tatami.testing.worlds import World
from tatami.train import METRICS, Callback, LRSchedulerConfig, ModelCheckpoint, Trainer
from tatami.train.evaluating import accuracy
from tiled_rig import simple_layout, some_layouts, tiled

pytestmark = pytest.mark.ranks(1, 2)

SAMPLES = 24
SGD = partial(torch.optim.SGD, lr=0.2)
network = partial(mlp, 4, 8, 2)


NETWORK = network()


def inputs() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(2, (SAMPLES,), generator=generator)


def trainer_of(comm: AbstractCommunicator, **options: Any) -> Trainer:
    model = tiled(NETWORK, comm, layout=some_layouts(comm.size)[-1], batch_size=8)
    return Trainer(model, **{"optimizer": SGD, "loss": nn.CrossEntropyLoss(), **options})


class Told(Callback):
    """Notes what it is called with."""

    def __init__(self) -> None:
        self.told: list[Any] = []

    def on_fit_start(self, trainer: Any) -> None:
        self.told.append(("fit start", trainer.iteration))

    def on_train_epoch_start(self, trainer: Any) -> None:
        self.told.append(("epoch start", trainer.epoch))

    def on_train_batch_end(self, trainer: Any, loss: float) -> None:
        self.told.append(("update", trainer.iteration, loss))

    def on_retile(self, trainer: Any, check: Any) -> None:
        self.told.append(("retile", trainer.iteration, check.decision.iteration))

    def on_train_epoch_end(self, trainer: Any, values: Mapping[str, float]) -> None:
        self.told.append(("epoch end", trainer.epoch, sorted(values)))

    def on_fit_end(self, trainer: Any) -> None:
        self.told.append(("fit end", trainer.iteration))

    def on_exception(self, trainer: Any, error: BaseException) -> None:  # noqa: ARG002
        self.told.append(("exception", str(error)))


def test_the_hooks_are_called_in_their_order(comm: AbstractCommunicator) -> None:
    told = Told()
    trainer = trainer_of(comm, callbacks=[told], retile=Retiler(every=3))
    history = trainer.fit(inputs(), batch_size=8, epochs=1, validation=inputs(), metrics=["accuracy"])
    assert told.told == [
        ("fit start", 0),
        ("epoch start", 0),
        ("update", 1, history.losses[0]),
        ("update", 2, history.losses[1]),
        ("retile", 3, 3),
        ("update", 3, history.losses[2]),
        ("epoch end", 1, ["accuracy", "loss", "train_loss"]),
        ("fit end", 3),
    ]
    told.told.clear()
    with pytest.raises(InputError, match="a batch must be a pair"):
        trainer.fit(inputs()[0], batch_size=8, epochs=1)
    assert [each[0] for each in told.told] == ["fit start", "epoch start", "exception"]


@pytest.mark.ranks(1, 3)
def test_a_callback_on_any_rank_stops_all(comm: AbstractCommunicator) -> None:
    class Stops(Callback):
        def __init__(self, last: bool) -> None:
            self._last = last

        def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
            trainer.should_stop = self._last and trainer.iteration == 2

    trainer = trainer_of(comm, callbacks=[Stops(comm.rank == comm.size - 1)])
    history = trainer.fit(inputs(), batch_size=8, epochs=4)
    # The wish travels with the loss of the next update.
    assert (len(history.losses), history.stopped) == (3, "callback")


def test_early_stopping_is_wired_in_and_resumed(comm: AbstractCommunicator, tmp_path: Path) -> None:
    for monitor, mode in (("loss", "max"), ("train_loss", "max")):
        stopping = EarlyStopping(comm, monitor=monitor, mode=mode, patience=2)  # type: ignore[arg-type]
        checkpoint = ModelCheckpoint(dirpath=tmp_path / monitor)
        trainer = trainer_of(comm, callbacks=[stopping], checkpoint=checkpoint)
        history = trainer.fit(inputs(), batch_size=SAMPLES, epochs=9, validation=inputs())
        assert (len(history.losses), history.stopped) == (3, "callback")
        again = EarlyStopping(comm, monitor=monitor, mode=mode, patience=2)  # type: ignore[arg-type]
        trainer_of(comm, callbacks=[again], checkpoint=checkpoint).fit(
            inputs(), batch_size=SAMPLES, iterations=3, resume=True, validation=inputs()
        )
        assert again.state_dict() == stopping.state_dict()
        assert again.num_bad == 2
    with pytest.raises(InputError, match="EarlyStopping monitors 'f1', but an epoch gives train_loss, loss"):
        trainer_of(comm, callbacks=[EarlyStopping(comm, monitor="f1")]).fit(
            inputs(), batch_size=8, epochs=1, validation=inputs()
        )


@pytest.mark.ranks(1)
def test_early_stopping_sends_nothing_in_a_trainer() -> None:
    """Where a rank dies between a validation and the next update, nothing is left unrepaired."""
    unusable: Any = None
    stopping, trainer = EarlyStopping(unusable, patience=2), SimpleNamespace(should_stop=False)
    told = []
    for loss in (1.0, 0.5, 0.5, 0.75):
        stopping.on_train_epoch_end(trainer, {"loss": loss})
        told.append(trainer.should_stop)
    assert told == [False, False, False, True]
    assert stopping.state_dict() == {"best": 0.5, "num_bad": 2}


def test_schedules_by_step_by_epoch_and_by_a_plateau(comm: AbstractCommunicator) -> None:
    def rates(**options: Any) -> list[float]:
        seen: list[float] = []

        class Watch(Callback):
            def on_train_batch_end(self, trainer: Any, loss: float) -> None:  # noqa: ARG002
                seen.append(trainer.optimizer.param_groups[0]["lr"])

        trainer = trainer_of(comm, callbacks=[Watch()], **options)
        trainer.fit(inputs(), batch_size=12, epochs=3, validation=inputs())
        return seen

    half = partial(StepLR, step_size=1, gamma=0.5)
    assert rates(scheduler=half) == [0.2, 0.2, 0.1, 0.1, 0.05, 0.05]
    by_step = LRSchedulerConfig(scheduler=half, interval="step", frequency=2)
    assert rates(scheduler=by_step) == [0.2, 0.1, 0.1, 0.05, 0.05, 0.025]
    never_better = partial(ReduceLROnPlateau, mode="max", factor=0.5, patience=0)
    for monitor in ("loss", "train_loss"):
        plateau = LRSchedulerConfig(scheduler=never_better, monitor=monitor)
        assert rates(scheduler=plateau) == [0.2, 0.2, 0.2, 0.2, 0.1, 0.1]
    with pytest.raises(InputError, match="the scheduler monitors 'loss', but there is only train_loss after an epoch"):
        trainer_of(comm, scheduler=never_better).fit(inputs(), batch_size=12, epochs=1)
    model = tiled(NETWORK, comm, layout=some_layouts(comm.size)[0], batch_size=8)
    optimizer = SGD(model.parameters())
    Trainer(model, optimizer=optimizer, loss=nn.CrossEntropyLoss(), scheduler=half(optimizer))
    with pytest.raises(InputError, match="the scheduler is of another optimizer"):
        Trainer(model, optimizer=SGD, loss=nn.CrossEntropyLoss(), scheduler=half(optimizer))


def ticking(rank: int) -> HandClock:
    """A second passes with every look at it, on rank 0; on the others, none."""
    return HandClock(0.0, step_s=1.0 if rank == 0 else 0.0)


@pytest.mark.parametrize("max_time", [20, "20 s", timedelta(seconds=20)])
def test_a_limit_of_time_is_that_of_rank_0(world: World, max_time: Any) -> None:
    def body(comm: AbstractCommunicator) -> int:
        trainer = trainer_of(comm, clock=ticking(comm.rank))
        history = trainer.fit(inputs(), batch_size=8, max_time=max_time)
        assert history.stopped == "time"
        with pytest.raises(InputError, match="max_time must be above 0"):
            trainer.fit(inputs(), batch_size=8, max_time=0)
        return len(history.losses)

    found = world(body)
    assert 3 < found[0] < 12
    assert len(set(found)) == 1


def test_checkpoints_by_time(comm: AbstractCommunicator, tmp_path: Path) -> None:
    checkpoint = ModelCheckpoint(dirpath=tmp_path, train_time_interval="10 s", keep=9)
    trainer_of(comm, clock=ticking(comm.rank), checkpoint=checkpoint).fit(inputs(), batch_size=8, epochs=4)
    comm.barrier()
    assert 3 <= len(list(tmp_path.iterdir())) < 9


@pytest.mark.ranks(1, 3)
def test_metrics_by_name(comm: AbstractCommunicator) -> None:
    x, y = inputs()
    with torch.no_grad():
        output = NETWORK(x)
    targets = F.one_hot(y, 2).double()
    expected = {
        "loss": F.mse_loss(output, targets).item(),
        "mean_squared_error": F.mse_loss(output, targets).item(),
        "mean_absolute_error": F.l1_loss(output, targets).item(),
    }
    trainer = trainer_of(comm)
    found = trainer.evaluate((x, y), batch_size=7, metrics=["accuracy"])
    assert found["accuracy"] == pytest.approx(float((output.argmax(1) == y).double().mean()))
    names = ["mean_squared_error", "mean_absolute_error"]
    by_shape = trainer_of(comm, loss=nn.MSELoss())
    assert by_shape.evaluate((x, targets), batch_size=7, metrics=names) == pytest.approx(expected)
    with pytest.raises(InputError, match=r"metrics \['f1'\]: give a list of names among accuracy, mean_absolute_error"):
        trainer.evaluate((x, y), batch_size=7, metrics=["f1"])


@pytest.mark.parametrize("ignored", [-100, 1])
def test_accuracy_leaves_out_what_the_loss_leaves_out(comm: AbstractCommunicator, ignored: int) -> None:
    """Batches, and ranks, with different numbers of targets that count; one batch, and all of them, with none."""
    x, y = inputs()
    y[:9], y[10] = ignored, ignored
    trainer = trainer_of(comm, loss=nn.CrossEntropyLoss(ignore_index=ignored))
    with torch.no_grad():
        output, counts = NETWORK(x), y != ignored
    expected = float((output.argmax(1) == y)[counts].double().mean())
    found = trainer.evaluate((x, y), batch_size=7, metrics=["accuracy"])
    assert found == pytest.approx({"loss": float(F.cross_entropy(output[counts], y[counts])), "accuracy": expected})
    nothing = trainer.evaluate((x, torch.full_like(y, ignored)), batch_size=7, metrics=["accuracy"])
    assert nothing == pytest.approx({"loss": torch.nan, "accuracy": torch.nan}, nan_ok=True)


def raises(output: torch.Tensor, target: torch.Tensor) -> float:  # noqa: ARG001
    raise ValueError("no such class")


METRICS_OF_ONES_OWN: dict[str, tuple[Any, str]] = {
    "raises": (raises, "failed with ValueError: no such class"),
    "a tensor": (lambda output, target: output, r"gives a Tensor of shape \(\d+, 2\); it must give one number"),  # noqa: ARG005
    "nothing": (lambda output, target: None, "gives a NoneType; it must give one number"),  # noqa: ARG005
    "largest": (lambda output, target: output.max(), "over their halves, so that it is not a mean over samples"),  # noqa: ARG005
    "square of a sum": (lambda output, target: output.sum() ** 2, "so that it is not a mean over samples"),  # noqa: ARG005
    "number of samples": (lambda output, target: len(output), "so that it is not a mean over samples"),  # noqa: ARG005
}


@pytest.mark.parametrize("name", METRICS_OF_ONES_OWN)
def test_a_metric_that_is_no_mean_over_samples_is_refused_by_name(comm: AbstractCommunicator, name: str) -> None:
    metric, match = METRICS_OF_ONES_OWN[name]
    trainer = trainer_of(comm)
    for use in (
        lambda: trainer.evaluate(inputs(), batch_size=20, metrics={"mine": metric}),
        lambda: trainer.fit(inputs(), batch_size=8, epochs=1, validation=inputs(), metrics={"mine": metric}),
    ):
        with pytest.raises(InputError, match=f"the metric 'mine' .*{match}"):
            use()


@pytest.mark.ranks(2, 3)
def test_a_metric_that_fails_on_one_rank_is_refused_on_all(comm: AbstractCommunicator) -> None:
    """In the first batch, or in a later one; the ranks can go on afterwards."""
    model = tiled(NETWORK, comm, layout=simple_layout(*([rank] for rank in range(comm.size))), batch_size=8)
    trainer = Trainer(model, optimizer=SGD, loss=nn.CrossEntropyLoss())
    for batch_size in (SAMPLES, 8):
        calls: list[int] = []

        def fails(output: torch.Tensor, target: torch.Tensor, calls: list[int] = calls) -> Any:
            calls.append(len(output))
            return target if comm.rank == 1 and sum(calls) >= SAMPLES // comm.size else 0.0

        with pytest.raises(InputError, match="the metric 'mine' gives a Tensor"):
            trainer.evaluate(inputs(), batch_size=batch_size, metrics={"mine": fails})
        assert comm.allgather_object(1) == [1] * comm.size


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_mean_over_samples_is_a_metric_in_every_precision(comm: AbstractCommunicator, dtype: torch.dtype) -> None:
    x, y = inputs()
    with torch.no_grad():
        expected = float(NETWORK(x).abs().mean())
    found = trainer_of(comm).evaluate((x, y), batch_size=11, metrics={"size": lambda o, _: o.to(dtype).abs().mean()})
    assert found["size"] == pytest.approx(expected, rel={torch.float64: 1e-10, torch.float32: 1e-5}.get(dtype, 1e-2))


def test_the_axis_of_classes_is_found_or_asked_for() -> None:
    scores = torch.tensor([[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]])
    assert accuracy(scores, torch.tensor([1, 0, 0])) == pytest.approx(2 / 3)
    tokens = torch.zeros(2, 5, 3)
    tokens[..., 1] = 1.0
    assert accuracy(tokens, torch.ones(2, 5, dtype=torch.long)) == 1.0
    assert accuracy(tokens.transpose(1, 2), torch.ones(2, 5, dtype=torch.long)) == 1.0
    with pytest.raises(InputError, match="either axis could be the classes"):
        accuracy(torch.zeros(2, 3, 3), torch.zeros(2, 3))
    with pytest.raises(InputError, match="no axis is one of classes"):
        accuracy(torch.zeros(2, 3), torch.zeros(3))
    with pytest.raises(InputError, match="they must be alike"):
        METRICS["mean_squared_error"](torch.zeros(2, 3), torch.zeros(2))


@pytest.mark.ranks(1)
@pytest.mark.parametrize(
    ("option", "match"),
    [
        ({"record_every": 0}, "record_every must be at least 1, not 0"),
        ({"record_every": 2.5}, "record_every must be a whole number, not 2.5"),
        ({"scheduler": 5}, r"scheduler must be one of torch\.optim\.lr_scheduler, or what makes one .*, not 5"),
        ({"callbacks": [3]}, "callbacks: 3 is not a callback: give objects with some of the hooks on_fit_start, "),
        ({"callbacks": [Callback]}, "callbacks: <class .*Callback'> is not a callback"),
        ({"callbacks": 3}, "callbacks must be a list of callbacks, not 3"),
    ],
)
def test_wrong_options_are_refused_with_what_to_give(comm: AbstractCommunicator, option: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        trainer_of(comm, **option)


def test_loggers_get_the_numbers_of_rank_0(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    logged: list[tuple[str, dict[str, float], int]] = []
    board = SimpleNamespace(run=None, log=lambda numbers, step: logged.append(("wandb", numbers, step)))
    board.init = lambda config: setattr(board, "run", config)
    flow = SimpleNamespace(log_metrics=lambda numbers, step: logged.append(("mlflow", numbers, step)))
    for name, module in (("wandb", board), ("mlflow", flow)):
        monkeypatch.setitem(sys.modules, name, module)

    def body(comm: AbstractCommunicator) -> None:
        loggers = ["wandb", "mlflow", lambda numbers, iteration: logged.append(("own", numbers, iteration))]
        history = trainer_of(comm, loggers=loggers, record_every=2).fit(inputs(), batch_size=8, iterations=4)
        for who in ("wandb", "mlflow", "own") if comm.rank == 0 else ():
            losses = {at: numbers["train/loss"] for name, numbers, at in logged if name == who and "train/loss" in numbers}
            assert losses == {2: history.losses[1], 4: history.losses[3]}
        assert comm.rank or board.run == {}
        with pytest.raises(InputError, match="there is no logger 'tensorflow': give 'wandb', 'mlflow', or a function"):
            trainer_of(comm, loggers=["tensorflow"])
        with pytest.raises(InputError, match=r"give the loggers to Records\(..., loggers=...\)"):
            trainer_of(comm, loggers=loggers, records=Records())

    world(body)
