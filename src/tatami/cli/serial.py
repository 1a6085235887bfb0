"""What one iteration takes on one core alone: what the efficiency of a parallel run is measured by."""

from __future__ import annotations

import copy
import statistics
import time

import torch

from tatami.cli.job import Prepared
from tatami.comm import AbstractCommunicator

REPEATS = 7


def serial_iteration_s(prepared: Prepared, comm: AbstractCommunicator) -> float:
    """The median time of an ordinary PyTorch iteration over the whole batch, on rank 0, while the others wait. Collective.

    In CPU time of one thread, as `tatami.testing.Slowdown` counts it: other programs on this machine do not enter.
    """
    measured = _measure(prepared) if comm.rank == 0 else None
    return float(comm.bcast_object(measured))


def _measure(prepared: Prepared) -> float:
    model = copy.deepcopy(prepared.model)
    optimizer = prepared.make_optimizer(model.parameters())
    x, y = prepared.train.x[: prepared.batch_size], prepared.train.y[: prepared.batch_size]
    seconds = []
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for _ in range(REPEATS + 1):
        start_s = time.thread_time()
        optimizer.zero_grad()
        prepared.loss(model(x), y).backward()
        optimizer.step()
        seconds.append(time.thread_time() - start_s)
    torch.set_num_threads(threads)
    return statistics.median(seconds[1:])
