"""A training job as the user asked for it, checked whole before anything is started or written."""

from __future__ import annotations

import importlib.util
import os
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import nn

from tatami.cli.train_job import TrainJob
from tatami.cluster import Cluster, parse_speeds, read_cluster
from tatami.datasets import NAMES, Dataset, load
from tatami.datasets.digits import with_shifts
from tatami.errors import InputError, MissingExtraError, shortened
from tatami.outputs import check_folder, check_output
from tatami.report import blank, check_path
from tatami.retiling import Retiler
from tatami.testing.slowdown import Emulation, emulated_factors
from tatami.tiled import check_weights
from tatami.tiling import DEFAULT_PLANNER, PLANNERS, SrpmPlanner, plan
from tatami.units import format_size
from tatami.workload import net_workload, parse_net

DRPM = "drpm"
OPTIMIZERS = ("adam", "adamw", "sgd")
LOSSES = ("mse", "squared-error", "cross-entropy")
DEFAULT_NETS = {"digits": "64-80-10", "nettalk": "203-80-26"}
DEFAULT_LOSSES = {"digits": "cross-entropy", "nettalk": "mse"}
NETTALK_SAMPLES = 1024
"""The classic experiment draws so many of the 146,934 letters."""
ITERATIONS = 200
LONGEST = 100_000
"""Iterations after which a run that waits for its loss to fall gives up."""

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def methods() -> tuple[str, ...]:
    """How the tiles can be placed: by the planners, or by DRPM, which begins without knowledge."""
    return (*PLANNERS, DRPM)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A job that can start.

    Attributes:
        job: as asked for.
        ranks: how many.
        train: what is trained on.
        test: the samples of the accuracy; the training samples where none are held out.
        net: sizes of the layers.
        model: the plain network, as it starts.
        machines: the ranks' speeds and links; None where none were given.
        emulation: how ranks are slowed; None where they are not.
        batch_size: of the global batch.
        make_optimizer, loss: for the trainer.
        loss_name: one of `LOSSES`.
        iterations: after which the run ends at the latest; None where epochs end it.
        retiler: None keeps the tiling.
    """

    job: TrainJob
    ranks: int
    train: Dataset
    test: Dataset
    net: str
    model: nn.Module
    machines: Cluster | None
    emulation: Emulation | None
    batch_size: int
    make_optimizer: OptimizerMaker
    loss: nn.Module
    loss_name: str
    iterations: int | None
    retiler: Retiler | None

    @property
    def planner(self) -> str:
        return "even" if self.job.method == DRPM else self.job.method


def prepare(job: TrainJob) -> Prepared:
    """Check the job, read its data and build its network. Writes and starts nothing.

    Raises:
        InputError: an invalid job, each fault with its own message; one of its kinds for a file, a plan or a checkpoint.
        MissingExtraError: something it needs is not installed.
    """
    _check_choice("method", job.method, methods())
    _check_choice("optimizer", job.optimizer, OPTIMIZERS)
    _check_choice("data set", job.data, NAMES)
    loss = job.loss or DEFAULT_LOSSES[job.data]
    _check_choice("loss", loss, LOSSES)
    machines = _machines(job)
    ranks = job.ranks if job.ranks is not None else machines.size if machines is not None else 1
    train, test = _data(job, loss=loss)
    net = job.net or DEFAULT_NETS[job.data]
    sizes = parse_net(net)
    if (sizes[0], sizes[-1]) != (train.inputs, train.outputs):
        raise InputError(
            f"--net {shortened(net)} has {sizes[0]} inputs and {sizes[-1]} outputs, but {job.data} has {train.inputs} and "
            f"{train.outputs}; write it as {train.inputs}-...-{train.outputs}"
        )
    batch_size = min(job.batch_size or train.samples, train.samples)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 names the processors without work when it plans
        plan(
            "even" if job.method == DRPM else job.method,
            cluster=machines or Cluster.from_speeds([1.0] * ranks),
            workload=net_workload(net, samples=batch_size),
        )
    _check_memory(net, sizes)
    model = _model(sizes, seed=job.seed, scores=loss == "cross-entropy")
    if job.load is not None:
        check_weights(model, job.load)
    return Prepared(
        job=job,
        ranks=ranks,
        train=train,
        test=test,
        net=net,
        model=model,
        machines=machines,
        emulation=_emulation(job, machines),
        batch_size=batch_size,
        make_optimizer=_optimizer(job),
        loss=_loss(loss),
        loss_name=loss,
        iterations=_iterations(job),
        retiler=_retiler(job),
    )


def _retiler(job: TrainJob) -> Retiler | None:
    """DRPM is by its name SRPM done dynamically; any other method is re-tiled by what is predicted to be fastest."""
    planner = SrpmPlanner.name if job.method in (DRPM, SrpmPlanner.name) else DEFAULT_PLANNER
    if not (job.retile or job.method == DRPM):
        return None
    if job.retile_every is not None:
        return Retiler(every=job.retile_every, planner=planner)
    return Retiler(rule="settling" if job.method == DRPM else "notice", planner=planner)


def check_outputs(job: TrainJob) -> None:
    """Whether everything that the job writes can be written. Asked once, by who starts the ranks.

    Raises:
        OutputExistsError: a file exists and `force` was not given.
        InputError: a file cannot be written, or is not a regular file; a kind of picture that is not written.
        MissingExtraError: matplotlib or TensorBoard is needed and not installed.
    """
    for path in (job.save, job.log):
        if path is not None:
            check_output(path, force=job.force)
    if job.plot is not None:
        check_path(job.plot, force=job.force)
        blank()
    if job.tensorboard is not None:
        check_folder(job.tensorboard)
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError("tensorboard", extra="tensorboard")


def _check_choice(what: str, value: str, choices: Iterable[str]) -> None:
    if value not in choices:
        raise InputError(f"there is no {what} {shortened(value)!r}; choose one of: {', '.join(choices)}")


def _machines(job: TrainJob) -> Cluster | None:
    if job.speeds is not None and job.cluster is not None:
        raise InputError("--speeds and --cluster both say how fast the ranks are; give one of them")
    if job.speeds is not None:
        machines = Cluster.from_speeds(parse_speeds(job.speeds, expected=job.ranks))
    elif job.cluster is not None:
        machines = read_cluster(job.cluster)
        if job.ranks is not None and job.ranks != machines.size:
            raise InputError(f"{job.cluster} has {machines.size} processors, but -n {job.ranks} was asked for; leave -n out")
    elif job.emulate:
        raise InputError("--emulate slows the ranks to given speeds, but there are none; add --speeds 1,1,0.5,0.25")
    else:
        return None
    if job.method == DRPM and not job.emulate:
        raise InputError(
            "--method drpm starts from no knowledge of the speeds, so --speeds and --cluster tell it nothing. To start from "
            "them and re-tile while training: --retile. To try DRPM on ranks slowed to them: add --emulate"
        )
    return machines


def _data(job: TrainJob, *, loss: str) -> tuple[Dataset, Dataset]:
    samples = NETTALK_SAMPLES if job.samples is None and job.data == "nettalk" else job.samples
    targets = "classes" if loss == "cross-entropy" else "one_hot"
    dataset = load(job.data, path=job.nettalk, samples=samples, seed=job.seed, targets=targets)
    fraction = job.test_fraction
    if fraction is None:
        fraction = 0.0 if job.data == "nettalk" else 0.2
    train, test = dataset.split(test_fraction=fraction, seed=job.seed) if fraction else (dataset, dataset)
    return with_shifts(train) if job.shifts else train, test


def _emulation(job: TrainJob, machines: Cluster | None) -> Emulation | None:
    if not job.emulate:
        return None
    assert machines is not None
    return emulated_factors([processor.speed for processor in machines.processors])


def _check_memory(net: str, sizes: tuple[int, ...]) -> None:
    weights_bytes = 4 * sum((inputs + 1) * outputs for inputs, outputs in pairwise(sizes))
    memory_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if weights_bytes > memory_bytes:
        raise InputError(
            f"the weights of --net {shortened(net)} take {format_size(weights_bytes, digits=3)}, and this machine has "
            f"{format_size(memory_bytes, digits=3)} of memory; take fewer hidden units"
        )


def _model(sizes: tuple[int, ...], *, seed: int, scores: bool) -> nn.Module:
    """Linear layers with sigmoids between them, and after the last one too unless the loss takes `scores`."""
    torch.manual_seed(seed)
    layers: list[nn.Module] = []
    for inputs, outputs in pairwise(sizes):
        layers += [nn.Linear(inputs, outputs), nn.Sigmoid()]
    return nn.Sequential(*(layers[:-1] if scores else layers))


def _optimizer(job: TrainJob) -> OptimizerMaker:
    if job.momentum is not None and job.optimizer != "sgd":
        raise InputError(f"--momentum is of --optimizer sgd; {job.optimizer} has its own")
    if job.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.5 if job.lr is None else job.lr, momentum=job.momentum or 0.0)
    made = torch.optim.Adam if job.optimizer == "adam" else torch.optim.AdamW
    return partial(made, lr=0.01 if job.lr is None else job.lr)


def _loss(name: str) -> nn.Module:
    if name == "cross-entropy":
        return nn.CrossEntropyLoss()
    return nn.MSELoss(reduction="mean" if name == "mse" else "sum")


def _iterations(job: TrainJob) -> int | None:
    if job.iterations is not None or job.epochs is not None:
        return job.iterations
    return LONGEST if job.stop_below is not None else ITERATIONS
