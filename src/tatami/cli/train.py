"""`tatami train`: train one network on unequal ranks."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from tatami.cli.options import check_device, epilog, takes
from tatami.cli.terminal import show_json
from tatami.cli.train_job import TrainJob

if TYPE_CHECKING:
    from tatami.cli.training import TrainingOutcome
    from tatami.cli.training_job import Prepared
    from tatami.comm import AbstractCommunicator

EPILOG = epilog(
    "tatami train -n 4 --net 64-400-10",
    "tatami train --model gpt --text FILE -n 3",
    "tatami train -n 4 --speeds 1,1,0.5,0.25 --emulate --method drpm --plot course.png",
    "tatami train --data nettalk --nettalk FILE --net 203-80-26 -n 6 --speeds 1,1.5,2,2.5,3,3.5 --method srpm",
    "tatami train --data nettalk --nettalk FILE --optimizer sgd --lr 0.002 --loss squared-error --stop-below 1000",
    "mpiexec -n 4 tatami train",
    "torchrun --nproc-per-node 4 -m tatami train",
)


@takes(TrainJob)
def train(job: TrainJob) -> None:
    """Train one network on unequal ranks, each with a tile in proportion to its speed.

    The result equals that of one machine, up to rounding, for every tiling. --speeds gives the speeds that the planner assumes;
    --emulate also slows the ranks to them. Everything is checked before anything is started or written.
    """
    from tatami.cli.ranks import check_backend, num_started, on_ranks
    from tatami.cli.training_job import check_outputs, prepare

    check_backend(job.backend)
    check_device(job.device, hosts=job.hosts)
    job = replace(job, ranks=job.ranks or num_started())
    prepared = prepare(job)

    if num_started() is None:
        check_outputs(job)
    on_ranks(partial(_train_rank, prepared), ranks=prepared.ranks, backend=job.backend, hosts=job.hosts)


def _train_rank(prepared: Prepared, comm: AbstractCommunicator) -> TrainingOutcome:
    from tatami.cli.ranks import log_on_rank_0, progress_of
    from tatami.cli.training import plot_course, show_outcome, tell_emulation, train
    from tatami.cli.training_job import check_outputs

    job = prepared.job
    log_on_rank_0(comm)
    if comm.rank == 0:
        check_outputs(job)
        tell_emulation(prepared)
    outcome = train(prepared, comm, progress=progress_of(comm))
    if comm.rank != 0:
        return outcome
    if job.plot is not None:
        plot_course([(job.method, outcome)], job.plot, every=max(1, len(outcome.history.losses) // 50), force=job.force)
    if job.as_json:
        show_json({"ranks": comm.size, "net": prepared.task.net, "data": job.data, "method": job.method, **outcome.to_dict()})
    else:
        show_outcome(prepared, outcome)
    return outcome
