"""What an iteration costs a rank however small its tile is: the calls of its layers, of the backward pass and of the update."""

from __future__ import annotations

import statistics

import torch
from torch import nn

from tatami.clock import NO_PACE, Clock, Pace, SystemClock
from tatami.comm.base import AbstractCommunicator
from tatami.comm.threads import single_communicator
from tatami.tiled.tile import tile

_BLOCKS = 4
_SAMPLES = 2
_ITERATIONS = 20


def measure_calls(
    comm: AbstractCommunicator, *, repeats: int = 5, clock: Clock | None = None, pace: Pace = NO_PACE
) -> list[float]:
    """Seconds for each block of an iteration, and once more (`Processor.call_s`); the same list on all ranks. Collective.

    Timed on all ranks at once, on a perceptron of a few blocks that is so small that it computes nothing.

    Args:
        comm: the ranks.
        repeats: timings to take the median of; one more, which warms up, is not counted.
        clock, pace: see `tatami.clock`.
    """
    clock = clock or SystemClock()
    layers = [layer for _ in range(_BLOCKS) for layer in (_linear(), nn.Sigmoid(), _linear())]
    comm.barrier()  # ranks may be threads of one process, all of which torch.fx disturbs while it traces
    alone = single_communicator(timeout_s=60.0)
    model = tile(nn.Sequential(*layers), alone, batch_size=_SAMPLES, speeds="equal", reduction="mean", quiet=True)
    comm.barrier()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    inputs, outputs = (torch.zeros(_SAMPLES, 2, dtype=torch.float32, device="cpu") for _ in range(2))
    timings = []
    for _ in range(repeats + 1):
        start_s = clock.now_s()
        for _ in range(_ITERATIONS):
            pace.begin()
            x, y = model.local(inputs, outputs)
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            pace.end()
        timings.append((clock.now_s() - start_s) / _ITERATIONS)
    model.close()
    return list(comm.allgather_object(statistics.median(timings[1:]) / (_BLOCKS + 1)))


def _linear() -> nn.Module:
    """Of zeros: weights that are drawn would change what the user's program draws next."""
    layer = nn.Linear(2, 2, dtype=torch.float32, device="meta").to_empty(device="cpu")
    for parameter in layer.parameters():
        nn.init.zeros_(parameter)
    return layer
