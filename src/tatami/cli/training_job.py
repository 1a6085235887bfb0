"""A user's training job, which is checked completely before anything is started or written."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from tatami.cli.options import check_different
from tatami.cli.tasks import Task, check_choice, task_of
from tatami.cli.train_job import TrainJob
from tatami.cluster import Cluster, parse_speeds, read_cluster
from tatami.cluster.cores import memory_here
from tatami.comm.forked import copyable
from tatami.errors import InputError, MissingExtraError
from tatami.outputs import check_folder, check_output
from tatami.report import blank, check_path
from tatami.retiling import Retiler
from tatami.testing.slowdown import Emulation, emulated_factors
from tatami.tiling import DEFAULT_PLANNER, PLANNERS, SrpmPlanner, plan
from tatami.train import check_weights, find_blocks, workload_of
from tatami.units import format_size
from tatami.workload import net_workload

DRPM = "drpm"
OPTIMIZERS = ("adam", "adamw", "sgd")
ITERATIONS = 200
LONGEST = 100_000
"""Maximum number of iterations of a run that stops at a loss."""
_SAMPLES = 4
"""Number of samples used to trace the network."""

OptimizerMaker = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def methods() -> tuple[str, ...]:
    """Return the names of the methods of placing tiles: the planners, and DRPM, which starts without known speeds."""
    return (*PLANNERS, DRPM)


@dataclass(frozen=True, kw_only=True, eq=False)
class Prepared:
    """A job that is ready to start.

    Attributes:
        job: the options, with the name of the data filled in.
        ranks: the number of ranks.
        task: the data, the network and the loss.
        model: the plain network with its initial weights.
        sample: inputs for tracing the network; None if tracing is not needed.
        machines: the ranks' speeds and links; None if none were given.
        emulation: how ranks are slowed; None if they are not.
        batch_size: the global batch size.
        make_optimizer: makes the optimizer for the trainer.
        iterations: the maximum number of iterations; None if epochs limit the run.
        retiler: the rule of re-tiling; None keeps the tiling.
    """

    job: TrainJob
    ranks: int
    task: Task
    model: nn.Module
    sample: torch.Tensor | None
    machines: Cluster | None
    emulation: Emulation | None
    batch_size: int
    make_optimizer: OptimizerMaker
    iterations: int | None
    retiler: Retiler | None

    @property
    def planner(self) -> str:
        return "even" if self.job.method == DRPM else self.job.method


@copyable()
def prepare(job: TrainJob) -> Prepared:
    """Check the job, read its data and build its network. Writes and starts nothing.

    Raises:
        InputError: the job is invalid, each fault with its own message; one of its subclasses for a file, plan or checkpoint.
        MissingExtraError: a package that it needs is not installed.
    """
    check_choice("method", job.method, methods())
    check_choice("optimizer", job.optimizer, OPTIMIZERS)
    machines = _machines(job)
    ranks = job.ranks if job.ranks is not None else machines.size if machines is not None else 1
    task = task_of(job)
    job = replace(job, data=task.data)
    _check_memory(task)
    torch.manual_seed(job.seed)
    model = task.make()
    train = task.train
    batch_size = min(job.batch_size or task.batch_size or train.samples, train.samples)
    is_staged = (job.stages or 1) > 1
    _check_stages(job, is_staged, ranks=ranks, batch_size=batch_size)
    sample = None if (task.is_perceptron and not is_staged) or train.samples < 2 else train.x[:_SAMPLES]
    if task.is_perceptron:
        workload = net_workload(task.net, samples=batch_size)
    else:
        workload = workload_of(model, find_blocks(model, sample=sample), samples=batch_size)
    workload = replace(workload, wire=job.wire, micro_batches=job.micro_batches)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # rank 0 names the processors without work when it plans
        if not is_staged:  # stages are planned when the network is recorded, on the ranks
            plan(
                "even" if job.method == DRPM else job.method,
                cluster=machines or Cluster.from_speeds([1.0] * ranks),
                workload=workload,
            )
    if job.load is not None:
        check_weights(model, job.load)
    return Prepared(
        job=job,
        ranks=ranks,
        task=task,
        model=model,
        sample=sample,
        machines=machines,
        emulation=_emulation(job, machines),
        batch_size=batch_size,
        make_optimizer=_optimizer(job, lr=task.lr),
        iterations=_iterations(job),
        retiler=_retiler(job),
    )


def _check_stages(job: TrainJob, is_staged: bool, *, ranks: int, batch_size: int) -> None:
    if (stages := job.stages or 1) > ranks:
        raise InputError(f"--stages {stages} needs as many ranks, and there are {ranks}: give -n {stages} or fewer stages")
    if (parts := job.micro_batches or 1) > batch_size:
        raise InputError(
            f"--micro-batches {parts} are more than the {batch_size} samples of a batch: give {batch_size} or fewer"
        )
    if is_staged and (job.retile_every is not None or job.method != DEFAULT_PLANNER):
        raise InputError(
            "--stages are planned by the least predicted time, also when --retile plans them again: leave out --method and "
            "--retile-every"
        )


def _retiler(job: TrainJob) -> Retiler | None:
    """Return the rule of re-tiling: DRPM, a dynamic SRPM, re-tiles by SRPM, other methods by the least predicted time."""
    planner = SrpmPlanner.name if job.method in (DRPM, SrpmPlanner.name) else DEFAULT_PLANNER
    if not (job.retile or job.method == DRPM):
        return None
    if job.retile_every is not None:
        return Retiler(every=job.retile_every, planner=planner)
    return Retiler(rule="settling" if job.method == DRPM else "notice", planner=planner)


def check_outputs(job: TrainJob) -> None:
    """Check that everything that the job writes can be written. Called once, by the process that starts the ranks.

    Raises:
        OutputExistsError: a file exists and `force` was not given.
        InputError: a file cannot be written, or is not a regular file, or the picture has an unknown format.
        MissingExtraError: matplotlib or TensorBoard is needed and not installed.
    """
    for path in (job.save, job.log):
        if path is not None:
            check_output(path, force=job.force)
    if job.save is not None and job.save.suffix != ".safetensors":
        raise InputError(f"--save {job.save} is written in the format of safetensors: give it a name that ends in .safetensors")
    check_different({"--save": job.save, "--log": job.log, "--plot": job.plot})
    if job.plot is not None:
        check_path(job.plot, force=job.force)
        blank()
    if job.tensorboard is not None:
        check_folder(job.tensorboard)
        if importlib.util.find_spec("tensorboard") is None:
            raise MissingExtraError("tensorboard", extra="tensorboard")


def _machines(job: TrainJob) -> Cluster | None:
    if job.speeds is not None and job.cluster is not None:
        raise InputError("--speeds and --cluster both give the speeds of the ranks; give one of them")
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
            "--method drpm starts without known speeds, so it does not use --speeds and --cluster. To start from "
            "them and re-tile during training: --retile. To try DRPM on ranks slowed to them: add --emulate"
        )
    return machines


def _emulation(job: TrainJob, machines: Cluster | None) -> Emulation | None:
    if not job.emulate:
        return None
    assert machines is not None
    return emulated_factors(machines.plain_speeds("--emulate"))


def _check_memory(task: Task) -> None:
    with torch.device("meta"):  # shapes without values
        weights_bytes = sum(each.nbytes for each in task.make().parameters())
    memory_bytes = memory_here()
    if weights_bytes > memory_bytes:
        raise InputError(
            f"the weights of {task.asked} take {format_size(weights_bytes, digits=3)}, and this machine has "
            f"{format_size(memory_bytes, digits=3)} of memory; use fewer or narrower layers"
        )


def _optimizer(job: TrainJob, *, lr: float) -> OptimizerMaker:
    if job.momentum is not None and job.optimizer != "sgd":
        raise InputError(f"--momentum is for --optimizer sgd; {job.optimizer} has its own")
    if job.optimizer == "sgd":
        return partial(torch.optim.SGD, lr=0.5 if job.lr is None else job.lr, momentum=job.momentum or 0.0)
    made = torch.optim.Adam if job.optimizer == "adam" else torch.optim.AdamW
    return partial(made, lr=lr if job.lr is None else job.lr)


def _iterations(job: TrainJob) -> int | None:
    if job.iterations is not None or job.epochs is not None:
        return job.iterations
    return LONGEST if job.stop_below is not None else ITERATIONS
