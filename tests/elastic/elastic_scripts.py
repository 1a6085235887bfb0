"""What the ranks of the tests run, and the plain run that they are compared with."""

import functools
import os
import random
import signal
import time
from collections.abc import Iterable
from typing import Any

import torch
from torch import fx, nn

import tatami
from tatami.clock import SystemClock
from tatami.elastic.session import current_session
from tatami.elastic.settings import Moment
from tatami.elastic.steps import Steps, steps
from tatami.records import Records
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.train import Callback, LRSchedulerConfig, TiledModel, WeightAverage, whole_state_dict

STEPS = 6
SAMPLES = 12
LAYOUTS = {
    1: Layout(replicas=(Replica(width=1.0, processors=("p0", "p1", "p2"), heights=(0.4, 0.35, 0.25)),)),
    2: Layout(
        replicas=(
            Replica(width=0.6, processors=("p0", "p1"), heights=(0.55, 0.45)),
            Replica(width=0.4, processors=("p2",), heights=(1.0,)),
        )
    ),
    3: Layout(replicas=tuple(Replica(width=1 / 3, processors=(f"p{i}",), heights=(1.0,)) for i in range(3))),
}


def network() -> nn.Module:
    """With what a forward pass changes besides gradients: running statistics, and random numbers."""
    torch.manual_seed(3)
    return nn.Sequential(
        nn.BatchNorm1d(5), nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 4), nn.Dropout(0.25), nn.Linear(4, 2)
    ).to(torch.float64)


def normalizing_network() -> nn.Module:
    """Its running statistics are of units."""
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(5, 16), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 2)).to(torch.float64)


def batch(number: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 + number)
    x = torch.randn(SAMPLES, 5, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 2, generator=generator, dtype=torch.float64)


def optimizer_of(module: nn.Module, kind: str) -> torch.optim.Optimizer:
    return optimizer_of_parameters(module.parameters(), kind=kind)


def optimizer_of_parameters(parameters: Iterable[nn.Parameter], *, kind: str) -> torch.optim.Optimizer:
    if kind == "adam":
        return torch.optim.Adam(parameters, lr=0.02)
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def take(step: Any, model: TiledModel) -> None:
    x, y = model.local(*batch(step.number))
    loss = nn.functional.mse_loss(model(x), y) if len(y) else (model(x) * 0).sum()
    loss.backward()
    step.update(loss)


def take_in(step: Any, average: WeightAverage) -> None:
    if step.is_done:
        average.step()


def with_averages(loop: Steps, average: WeightAverage) -> dict[str, torch.Tensor]:
    """The whole weights, and their averages."""
    whole: dict[str, torch.Tensor] = loop.whole(lambda: whole_state_dict(loop.model))
    with average.applied():
        averaged = loop.whole(lambda: whole_state_dict(loop.model))
    return whole | {f"average of {name}": value for name, value in averaged.items()}


def train(replicas: int, kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run by every rank of an elastic run, and by a single process that has none."""
    comm = tatami.init()
    torch.manual_seed(11)
    layout = LAYOUTS[replicas] if comm.size == 3 else None
    made, sample = (normalizing_network(), batch(0)[0][:2]) if kind == "normalizing" else (network(), None)
    model: TiledModel = tatami.tile(
        made, comm, batch_size=SAMPLES, sample=sample, layout=layout, speeds="equal", reduction="mean", quiet=True
    )
    optimizer, average = optimizer_of(model, kind), WeightAverage(model.parameters(), decay=0.5)
    losses: dict[int, float] = {}
    loop = steps(model, optimizer, count=count)
    for step in loop:
        with step:
            take(step, model)
        if step.is_done:
            assert step.loss is not None
            losses[step.number] = step.loss
            average.step()
    return list(losses.values()), with_averages(loop, average)


def train_in_disorder(replicas: int, kind: str, leaver: tuple[str, int]) -> tuple[list[float], dict[str, torch.Tensor]]:
    """As `train`, for more steps; one rank asks to leave in a step, and the first rank tells of every step.

    Args:
        replicas: how many; 0: two pipeline stages, wherever there are two ranks.
    """
    comm = tatami.init()
    torch.manual_seed(11)
    layout = None
    if 0 < replicas <= comm.size:
        parts = [[f"p{rank}" for rank in range(index, comm.size, replicas)] for index in range(replicas)]
        each = [Replica(width=1 / replicas, processors=tuple(part), heights=(1 / len(part),) * len(part)) for part in parts]
        layout = Layout(replicas=tuple(each))
    options: Any = {"layout": layout} if replicas else {"stages": 2, "sample": batch(0)[0][:2]}
    model = tatami.tile(network(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True, **options)
    optimizer, average = optimizer_of(model, kind), WeightAverage(model.parameters(), decay=0.5)
    losses: dict[int, float] = {}
    loop = steps(model, optimizer, count=2 * STEPS)
    for step in loop:
        if (model.name, step.number) == leaver:
            loop.leave()
        with step:
            take(step, model)
        if step.is_done:
            assert step.loss is not None
            losses[step.number] = step.loss
            average.step()
            if model.comm.rank == 0:
                print(f"step {step.number}", flush=True)
    return list(losses.values()), with_averages(loop, average)


STAGED = StagedLayout(
    stages=tuple(
        Layout(
            replicas=(
                Replica(width=0.6, processors=(f"p{stage}",), heights=(1.0,), micro_batches=2),
                Replica(width=0.4, processors=(f"p{2 + stage}",), heights=(1.0,), micro_batches=2),
            )
        )
        for stage in range(2)
    ),
    cuts=(2,),
)
"""Two replicas of two stages."""


def staged_network() -> nn.Module:
    torch.manual_seed(3)
    layers = [nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 8), nn.Dropout(0.25), nn.Tanh(), nn.Linear(8, 6), nn.Linear(6, 2)]
    return nn.Sequential(*layers).to(torch.float64)


def train_in_stages(
    stages: int | None, until: int | None = None, *, count: int = STEPS, slow: bool = False, shards: bool = False
) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Run by every rank of an elastic run, and by a single process that has none.

    Args:
        stages: how many, where there are as many ranks; None: as `STAGED` has it.
        until: ends with the second step of so many ranks; None: after `count` steps.
        slow: machines are a million times slower than planned, and p1 is slower still after some steps; ends with the second
            step of other stages.
        shards: the optimizer is sharded; there are never other stages then.
    """
    comm: Any = tatami.init()
    torch.manual_seed(11)
    options: Any = {"layout": STAGED} if stages is None else {"stages": stages, "micro_batches": 2}
    clock = Ticking(seed=0)
    clock.tick_s = 0.0
    options |= {"sample": batch(0)[0][:2], "speeds": "equal", "clock": clock if slow else SystemClock()}
    options["sharded_optimizer"] = shards
    model = tatami.tile(staged_network(), comm, batch_size=SAMPLES, reduction="mean", quiet=True, **options)
    optimizer = optimizer_of(model, "adam")
    losses: dict[int, float] = {}
    first, left = model.whole_layout, 2
    loop = steps(model, optimizer, count=1000 if (slow and not shards) or until else count)
    for step in loop:
        with step:
            parts = []
            for x, y in model.micro_batches(*batch(step.number)):
                out = model(x)
                if slow and model.stage is not None and model.stage.plan is not None:
                    (planned_s,) = (each.compute_s for each in model.stage.plan.ranks if each.processor == model.name)
                    slower = 4e6 if model.name == "p1" and step.number >= 10 else 1e6
                    clock.sleep(slower * planned_s * (1 + 0.01 * (step.number % 3)))
                parts.append(nn.functional.mse_loss(out, y) if len(y) else (out * 0).sum())
                parts[-1].backward()
            step.update(parts)
        if step.is_done:
            assert step.loss is not None
            losses[step.number] = step.loss
            if model.comm.rank == 0:
                num_stages = 1 if model.stage is None else len(model.stage.layout.stages)
                print(f"step {step.number} in {num_stages} stages", flush=True)
            left -= model.comm.size == until or (slow and model.whole_layout != first)
            if not left:
                break
    return list(losses.values()), loop.whole(lambda: whole_state_dict(model))


class Passes(nn.Module):
    """Counts forward passes, and passes back; in one of them it computes until the run has called the step off."""

    def __init__(self, waits_in: tuple[int, str] | None) -> None:
        super().__init__()
        self.forward_passes, self.backward_passes, self._waits_in = 0, 0, waits_in

    def forward(self, x: Any) -> Any:
        if isinstance(x, fx.Proxy):
            return x
        self.forward_passes += 1
        if self._waits_in == (self.forward_passes, "forward"):
            wait_until_called_off()
        return Back.apply(x, self)  # type: ignore[no-untyped-call]

    def count_back(self) -> None:
        self.backward_passes += 1
        if self._waits_in == (self.backward_passes, "backward"):
            wait_until_called_off()


class Back(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, passes: Passes) -> torch.Tensor:
        ctx.passes = passes
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        ctx.passes.count_back()
        return grad, None


def wait_until_called_off() -> None:
    session = current_session()
    assert session is not None
    while not session.is_called_off:
        time.sleep(0.001)


def train_and_count(where: str) -> list[tuple[int, int]]:
    """Passes of the first and last layer, in replicas of one rank: no message until a rank has all its gradients."""
    comm = tatami.init()
    first, last = (Passes((3, where) if index == (where == "backward") else None) for index in range(2))
    layers = [first, nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 2), last]
    network = nn.Sequential(nn.Linear(5, 5), *layers).to(torch.float64)
    model = tatami.tile(network, comm, batch_size=SAMPLES, layout=LAYOUTS[3], speeds="equal", reduction="mean", quiet=True)
    optimizer = optimizer_of(model, "sgd")
    for step in steps(model, optimizer, count=STEPS):
        with step:
            x, y = model.local(*batch(step.number))
            loss = nn.functional.mse_loss(model(x), y)
            torch.autograd.backward(loss)
            step.update(loss)
    return [(each.forward_passes, each.backward_passes) for each in model.module.modules() if isinstance(each, Passes)]


def train_until_alone() -> tuple[int, dict[str, torch.Tensor]]:
    """Two ranks, then three, then two, then one, which ends: at every change of their number the next one is asked for."""
    comm = tatami.init()
    torch.manual_seed(11)
    model = tatami.tile(network(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True)
    optimizer, average = optimizer_of(model, "sgd"), WeightAverage(model.parameters(), decay=0.5)
    loop = steps(model, optimizer, count=100_000)
    seen: list[int] = []
    for step in loop:
        with step:
            time.sleep(0.02)  # the work of a larger network
            take(step, model)
        take_in(step, average)
        size = model.comm.size
        if size not in seen[-1:]:
            seen.append(size)
            if model.comm.rank == 0:
                print(f"there are {size} ranks", flush=True)
            if model.name == "p2" and size == 2:
                os.kill(os.getpid(), signal.SIGTERM)  # the notice of a spot instance
        if size == 1:
            break
    return loop.number, with_averages(loop, average)


class Ticking:
    """A clock that goes on by some `tick_s` whenever it is read: computing takes what the script says, on any machine."""

    def __init__(self, seed: int) -> None:
        self.tick_s = 1.0
        self._now_s = 0.0
        self._random = random.Random(seed)

    def now_s(self) -> float:
        self._now_s += self.tick_s * self._random.uniform(0.97, 1.03)
        return self._now_s

    def sleep(self, duration_s: float) -> None:
        self._now_s += duration_s


def ticking() -> tuple[str, Ticking, TiledModel, torch.optim.Optimizer, WeightAverage]:
    """A rank whose clock the script moves: its name, the clock, the model of three ranks, its optimizer, and an average."""
    comm: Any = tatami.init()
    torch.manual_seed(11)
    own = comm.names[comm.rank]
    clock = Ticking(seed=int(own[1:]))
    model = tatami.tile(
        network(), comm, batch_size=SAMPLES, layout=LAYOUTS[3], speeds="equal", reduction="mean", quiet=True, clock=clock
    )
    return own, clock, model, optimizer_of(model, "sgd"), WeightAverage(model.parameters(), decay=0.5)


def train_while_others_slow_down() -> tuple[int, dict[str, torch.Tensor]]:
    """Three ranks, of which the second has a third of its speed from step 40 on, and the third next to none from step 90 on."""
    own, clock, model, optimizer, average = ticking()
    loop = steps(model, optimizer, count=2000)
    for step in loop:
        slower = {"p1": 3.0 if step.number >= 40 else 1.0, "p2": 1000.0 if step.number >= 90 else 1.0}
        clock.tick_s = slower.get(own, 1.0) * model.local_work / (SAMPLES * model.workload.units)
        with step:
            take(step, model)
        take_in(step, average)
        if model.comm.size == 2:
            break
    return loop.number, with_averages(loop, average)


def train_while_one_is_slow_for_a_while() -> tuple[int, dict[str, torch.Tensor]]:
    """Three ranks, of which the third has a twentieth of its speed from step 40 on, until it has had no tile for 200 steps."""
    own, clock, model, optimizer, average = ticking()
    loop = steps(model, optimizer, count=4000)
    without = 0
    for step in loop:
        slower = 20.0 if own == "p2" and step.number >= 40 and without < 200 else 1.0
        share = model.local_work / (SAMPLES * model.workload.units) if model.tile is not None else 1.0
        clock.tick_s = slower * share
        with step:
            take(step, model)
        take_in(step, average)
        has_tile = "p2" in model.layout.processors
        if has_tile and without:
            break
        without += not has_tile
    return loop.number, with_averages(loop, average)


TURNS_JOINERS_AWAY = """
import pathlib
import sys
import time

import torch

import tatami

comm = tatami.init()
if comm.size == 1:
    raise ValueError("there is no data on this machine")
model = tatami.tile(
    torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2)),
    comm, batch_size=8, speeds="equal", reduction="mean", quiet=True,
)
loop = tatami.steps(model, torch.optim.SGD(model.parameters(), lr=0.1), count=100_000)
for step in loop:
    with step:
        time.sleep(0.02)  # the work of a larger network
        x, y = model.local(torch.ones(8, 4), torch.ones(8, 2))
        loss = torch.nn.functional.mse_loss(model(x), y) if len(y) else (model(x) * 0).sum()
        loss.backward()
        step.update(loss)
    if step.number == 0 and comm.rank == 0:
        print("the first step is done", flush=True)
    if loop.whole(lambda: comm.bcast_object(pathlib.Path(sys.argv[1]).exists())):
        break
print("the end", flush=True)
"""
"""A script for `tatami run --elastic -n 2`: ranks that join fail, and the others go on until a file is there."""


def fit(
    replicas: int,
    data: str = "tensors",
    folder: str | None = None,
    count: int = STEPS,
    *,
    shards: bool = False,
    log: str | None = None,
) -> tuple[Any, ...]:
    """All that a Trainer does besides: accumulating, clipping, a schedule, epochs with a validation, shuffled data.

    In so many replicas, or, of 0, in two pipeline stages.
    """
    comm = tatami.init()
    torch.manual_seed(11)
    options: Any = {"layout": LAYOUTS.get(replicas) if comm.size == 3 else None}
    if not replicas:
        options = {"stages": 2, "sample": batch(0)[0][:2]}
    options["sharded_optimizer"] = shards
    model = tatami.tile(network(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True, **options)
    trainer = trainer_of(model, folder=folder, log=log)
    history = trainer.fit(data_of(data), iterations=count, validation=batch(1), batch_size=size_of(data))
    return (
        history.losses,
        history.validation,
        trainer.predict(batch(2)[0], batch_size=SAMPLES),
        trainer.optimizer.param_groups[0]["lr"],
    )


def fit_leaving_out(replicas: int) -> tuple[list[float], torch.Tensor]:
    """Classes, of which a third does not count."""
    comm = tatami.init()
    torch.manual_seed(11)
    layout = LAYOUTS[replicas] if comm.size == 3 else None
    model = tatami.tile(network(), comm, batch_size=SAMPLES, layout=layout, speeds="equal", reduction="mean", quiet=True)
    trainer = tatami.Trainer(
        model, optimizer=functools.partial(optimizer_of_parameters, kind="sgd"), loss=nn.CrossEntropyLoss(), seed=5
    )
    x, y = (torch.cat(parts) for parts in zip(*(batch(10 + number) for number in range(4)), strict=True))
    targets = torch.where(y[:, 1] > 0.4, -100, (y[:, 0] > 0).long())
    history = trainer.fit((x, targets), iterations=STEPS, batch_size=SAMPLES)
    return history.losses, trainer.predict(batch(2)[0], batch_size=SAMPLES)


def fit_until_joined(log: str | None = None, data: str = "tensors") -> tuple[Any, ...]:
    """Two ranks, and three updates more when there is a third."""
    comm = tatami.init()
    torch.manual_seed(11)
    model = tatami.tile(network(), comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True)
    until = _UntilJoined()
    trainer = trainer_of(model, until, log=log)
    history = trainer.fit(data_of(data), iterations=100_000, validation=batch(1), batch_size=size_of(data))
    trained = trainer.iteration, history.losses, history.validation
    return *trained, trainer.predict(batch(2)[0], batch_size=SAMPLES), trainer.optimizer.param_groups[0]["lr"], until.seen


class OwnRecords(Records):
    """All ranks have them, of the same file, which only one may cut."""

    def __init__(self, path: str, model: TiledModel) -> None:
        super().__init__(path)
        self._model = model

    def resume(self, *, iteration: int) -> None:
        assert self._model.comm.rank == 0
        super().resume(iteration=iteration)


def trainer_of(model: TiledModel, *callbacks: Any, folder: str | None = None, log: str | None = None) -> tatami.Trainer:
    return tatami.Trainer(
        model,
        records=None if log is None else OwnRecords(log, model),
        record_every=1,
        optimizer=functools.partial(optimizer_of_parameters, kind="adam"),
        loss=nn.MSELoss(),
        scheduler=LRSchedulerConfig(
            scheduler=functools.partial(torch.optim.lr_scheduler.ExponentialLR, gamma=0.9), interval="step"
        ),
        accumulate_grad_batches=2,
        gradient_clip_val=0.3,
        callbacks=callbacks,
        checkpoint=None if folder is None else tatami.train.ModelCheckpoint(dirpath=folder, every_n_train_steps=1),
        seed=5,
    )


def data_of(kind: str) -> Any:
    """Four batches an epoch, the last of which is smaller; the order is drawn."""
    data = tuple(torch.cat(parts)[:40] for parts in zip(*(batch(10 + number) for number in range(4)), strict=True))
    if kind == "tensors":
        return data
    return torch.utils.data.DataLoader(torch.utils.data.TensorDataset(*data), batch_size=SAMPLES, shuffle=True)


def size_of(kind: str) -> int | None:
    return SAMPLES if kind == "tensors" else None


class _UntilJoined(Callback):
    def __init__(self) -> None:
        self.left = 3
        self.seen = 0

    def on_train_batch_end(self, trainer: tatami.Trainer, loss: float) -> None:
        del loss
        time.sleep(0.02)  # the work of a larger network
        self.seen += 1
        if self.seen == trainer.iteration == 2 and trainer.model.comm.rank == 0:
            print("two updates", flush=True)
        self.left -= trainer.model.comm.size == 3
        trainer.should_stop = self.left <= 0

    def state_dict(self) -> dict[str, int]:
        return {"left": self.left}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.left = state["left"]


class Killer:
    """Ends, or stops, members at given moments, each once: as a hook."""

    def __init__(self, *faults: tuple[str, Moment, int], how: int = signal.SIGKILL) -> None:
        self._faults = faults
        self._how = how

    def __call__(self, moment: Moment, name: str, step: int) -> None:
        if (name, moment, step) in self._faults:
            os.kill(os.getpid(), self._how)


class KillerOfAll:
    """Ends some members at one moment: each waits for the others, and none is repaired before all are dead."""

    def __init__(self, names: tuple[str, ...], moment: Moment, step: int, *, folder: str) -> None:
        self._names, self._when, self._folder = names, (moment, step), folder

    def __call__(self, moment: Moment, name: str, step: int) -> None:
        if name in self._names and (moment, step) == self._when:
            marks = [os.path.join(self._folder, each) for each in self._names]
            open(marks[self._names.index(name)], "w").close()
            while not all(map(os.path.exists, marks)):
                time.sleep(0.001)
            os.kill(os.getpid(), signal.SIGKILL)


def plain(kind: str, count: int) -> tuple[list[float], dict[str, torch.Tensor]]:
    """The undisturbed run of one process."""
    return train(0, kind, count)
