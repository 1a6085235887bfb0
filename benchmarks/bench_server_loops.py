"""Training on the parameter server against as many independent loops."""

from __future__ import annotations

import multiprocessing
import statistics
import time
from collections.abc import Iterator
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, Self

import torch
from torch import nn

from bench_server import UNCOUNTED
from tatami.bench.interleaved import machine
from tatami.datasets.digits import load_digits
from tatami.server import BSP, Pool, RunContext, RunSettings, engine, train

_LEAST_COMPUTE_S = 0.05
_TIMES = (1, 2, 4)
"""As many samples as take 50 ms, and more."""
_HIDDEN = 512
_COPIES = 64
_PATIENCE_S = 300.0


def bench_throughput(*, steps: int = 10, blocks: int = 5, workers: int = 2) -> Iterator[dict[str, Any]]:
    """Rounds of BSP and steps of loops on the digits network in turn; a record for JSON for each number of samples.

    Every worker and every loop has the same number of samples. The least is such that a step takes 50 ms or more.

    Args:
        steps: of a block.
    """
    x, y = _digits()
    least = _enough_samples(x, y, most=len(x) // workers // max(_TIMES))
    with engine():
        pool = Pool()
        for samples in (times * least for times in _TIMES):
            yield _throughput(x, y, samples=samples, steps=steps, blocks=blocks, workers=workers, pool=pool)


def _throughput(
    x: torch.Tensor, y: torch.Tensor, *, samples: int, steps: int, blocks: int, workers: int, pool: Pool
) -> dict[str, Any]:
    whole = len(x) // (samples * workers) * samples * workers  # rounds of an epoch's end would be smaller
    loop_s, round_s = [], []
    with _Loops(workers, samples=samples) as loops:
        loops.run(steps=UNCOUNTED)
        for _ in range(blocks):
            loop_s.append(loops.run(steps=steps))
            _, report = train(
                _network,
                nn.CrossEntropyLoss(),
                dataset=(x[:whole], y[:whole]),
                settings=RunSettings(
                    rounds=steps + UNCOUNTED,
                    batch_size=samples * workers,
                    workers=workers,
                    servers=1,
                    spares=0,
                    consistency=BSP(),
                    heartbeat_s=60.0,
                ),
                context=RunContext(pool=pool),
            )
            round_s.append(statistics.mean(report.round_s[UNCOUNTED:]))
    return {
        "what": "throughput",
        "network": f"64-{_HIDDEN}-10",
        "workers": workers,
        "samples_per_worker": samples,
        "steps": steps,
        "loop_step_s": statistics.median(loop_s),
        "loop_step_each_s": loop_s,
        "bsp_round_s": statistics.median(round_s),
        "bsp_round_each_s": round_s,
        "bsp_over_loops": statistics.median(loop / bsp for loop, bsp in zip(loop_s, round_s, strict=True)),
        "machine": machine(),
    }


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 10))


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 digits, over and over: 115,008 samples."""
    digits = load_digits(targets="classes")
    return digits.x.repeat(_COPIES, 1), digits.y.repeat(_COPIES)


def _enough_samples(x: torch.Tensor, y: torch.Tensor, *, most: int) -> int:
    samples = 2048
    while samples < most and _Loop(x, y, samples=samples).seconds(steps=5) < 1.2 * _LEAST_COMPUTE_S:
        samples = samples * 5 // 4
    return min(samples, most)


class _Loop:
    """Plain training, with one thread."""

    def __init__(self, x: torch.Tensor, y: torch.Tensor, *, samples: int) -> None:
        torch.set_num_threads(1)
        torch.manual_seed(0)
        self._x, self._y, self._samples = x, y, samples
        self._model, self._loss_fn = _network(), nn.CrossEntropyLoss()
        self._optimizer = torch.optim.SGD(self._model.parameters(), lr=0.1)
        self._order = torch.randperm(len(x))
        self._step(0)

    def seconds(self, *, steps: int) -> float:
        """Of a step, the mean."""
        start_s = time.perf_counter()
        for step in range(steps):
            self._step(step)
        return (time.perf_counter() - start_s) / steps

    def _step(self, step: int) -> None:
        first = step * self._samples % (len(self._x) - self._samples)
        batch = self._order[first : first + self._samples]
        self._optimizer.zero_grad()
        self._loss_fn(self._model(self._x[batch]), self._y[batch]).backward()
        self._optimizer.step()


class _Loops:
    """Processes that each have a loop; to be used in a `with`."""

    def __init__(self, count: int, *, samples: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._barrier = context.Barrier(count)  # kept: what it is made of goes with it, before they have opened it
        pipes = [context.Pipe() for _ in range(count)]
        self._ends = [here for here, _ in pipes]
        self._processes = [
            context.Process(target=_run_loop, args=(there, self._barrier, samples), daemon=True) for _, there in pipes
        ]

    def __enter__(self) -> Self:
        for process in self._processes:
            process.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        for process in self._processes:
            process.terminate()
            process.join()

    def run(self, *, steps: int) -> float:
        """The mean seconds of a step, while all run."""
        for end in self._ends:
            end.send(steps)
        for end in self._ends:
            if not end.poll(_PATIENCE_S):
                raise TimeoutError(f"a loop did not end {steps} steps within {_PATIENCE_S:.0f} s")
        seconds: list[float] = [end.recv() for end in self._ends]
        return statistics.mean(seconds)


def _run_loop(end: Connection, barrier: Any, samples: int) -> None:
    loop = _Loop(*_digits(), samples=samples)
    while True:
        steps = end.recv()
        barrier.wait(timeout=_PATIENCE_S)
        end.send(loop.seconds(steps=steps))
