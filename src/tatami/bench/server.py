"""The parameter server against what the machine can do: memory copies, and training loops that know nothing of each other."""

from __future__ import annotations

import multiprocessing
import os
import statistics
import threading
import time
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from tatami.bench.interleaved import machine
from tatami.bench.weight import Weight, no_loss
from tatami.errors import InputError
from tatami.server import BSP, SGD, Runtime
from tatami.server.training import train

MB = 1_000_000
_COPY_BYTES = 100 * MB
_LEAST_COMPUTE_S = 0.05
_HIDDEN = 512


@dataclass(frozen=True, kw_only=True)
class ServerBenchmark:
    """What is measured.

    Attributes:
        size_bytes: of the parameters that one round moves.
        rounds: to take the median of; the first two are not counted.
    """

    size_bytes: int = 100 * MB
    workers: int = 4
    servers: int = 2
    rounds: int = 10

    def __post_init__(self) -> None:
        if self.rounds < 3:
            raise InputError(f"rounds must be at least 3, as the first two are not counted; not {self.rounds}")

    @property
    def copies(self) -> dict[str, int]:
        """Bytes that must be copied in a round, wherever the parts are and whoever does it."""
        each = self.workers * self.size_bytes
        return {
            "gradients into shared memory": each,
            "gradients read and summed": each,
            "parameters into shared memory": self.size_bytes,
            "parameters into the models": each,
        }


def bench_round(benchmark: ServerBenchmark) -> dict[str, Any]:
    """Time rounds in which nothing is computed, beside the bare copies; a record for JSON."""
    elements = benchmark.size_bytes // 4
    before = copy_bytes_per_s()
    began_s = time.perf_counter()
    first_s: list[float] = []

    def note(_: Runtime) -> None:
        if not first_s:
            first_s.append(time.perf_counter())

    _, report = train(
        lambda: Weight(elements),
        no_loss,
        dataset=(torch.zeros(benchmark.workers, 1), torch.zeros(benchmark.workers, 1)),
        rounds=benchmark.rounds,
        batch_size=benchmark.workers,
        workers=benchmark.workers,
        servers=benchmark.servers,
        spares=0,
        optimizer=SGD(lr=0.1),
        heartbeat_s=60.0,
        on_round=note,
    )
    rate = (before + copy_bytes_per_s()) / 2
    round_s = statistics.median(report.round_s[2:])
    needed = sum(benchmark.copies.values())
    return {
        "what": "round",
        "size_bytes": benchmark.size_bytes,
        "workers": benchmark.workers,
        "servers": benchmark.servers,
        "rounds": benchmark.rounds - 2,
        "round_median_s": round_s,
        "round_s": list(report.round_s),
        "copies_bytes": benchmark.copies,
        "copy_bytes_per_s": rate,
        "bare_copies_s": needed / rate,
        "round_over_bare_copies": round_s * rate / needed,
        "start_to_first_round_s": first_s[0] - began_s - report.reached_s[1],
        "machine": machine(),
    }


def copy_bytes_per_s(*, repeats: int = 5) -> float:
    """Bytes copied in a second by as many threads as there are cores: what the machine does with nothing else to do."""
    cores = len(os.sched_getaffinity(0))
    pairs = [(np.zeros(_COPY_BYTES, dtype=np.uint8), np.ones(_COPY_BYTES, dtype=np.uint8)) for _ in range(cores)]
    for target, source in pairs:
        np.copyto(target, source)

    def copy(target: np.ndarray[Any, Any], source: np.ndarray[Any, Any]) -> None:
        for _ in range(repeats):
            np.copyto(target, source)

    threads = [threading.Thread(target=copy, args=pair) for pair in pairs]
    start_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return cores * repeats * _COPY_BYTES / (time.perf_counter() - start_s)


def bench_throughput(*, steps: int = 30, workers: int = 2) -> dict[str, Any]:
    """Rounds of BSP beside as many loops that know nothing of each other, on the digits network; a record for JSON.

    Every worker and every loop has the same number of samples, so many that a step takes 50 ms or more.
    """
    x, y = _digits()
    samples = _enough_samples(x, y)
    alone = [_loops(workers, samples=samples, steps=steps)]
    _, report = train(
        _network,
        nn.CrossEntropyLoss(),
        dataset=(x, y),
        rounds=steps + 2,
        batch_size=samples * workers,
        workers=workers,
        servers=1,
        spares=0,
        consistency=BSP(),
        heartbeat_s=60.0,
    )
    alone.append(_loops(workers, samples=samples, steps=steps))
    loop_s, round_s = statistics.mean(alone), statistics.mean(report.round_s[2:])
    return {
        "what": "throughput",
        "network": f"64-{_HIDDEN}-10",
        "workers": workers,
        "samples_per_worker": samples,
        "steps": steps,
        "loop_step_s": loop_s,
        "loop_step_each_s": alone,
        "bsp_round_s": round_s,
        "bsp_over_loops": loop_s / round_s,
        "machine": machine(),
    }


def _network() -> nn.Module:
    return nn.Sequential(nn.Linear(64, _HIDDEN), nn.Tanh(), nn.Linear(_HIDDEN, 10))


def _digits() -> tuple[torch.Tensor, torch.Tensor]:
    """The 1,797 digits, over and over: 57,504 samples."""
    try:
        from sklearn.datasets import load_digits
    except ImportError as error:
        raise InputError("this benchmark needs scikit-learn: pip install 'tatami[data]'") from error
    digits = load_digits()
    x = torch.tensor(digits.data, dtype=torch.float32) / 16
    return x.repeat(32, 1), torch.tensor(digits.target).repeat(32)


def _enough_samples(x: torch.Tensor, y: torch.Tensor) -> int:
    samples = 2048
    while samples < len(x) // 4 and _step_s(x, y, samples=samples, steps=5) < 1.2 * _LEAST_COMPUTE_S:
        samples = samples * 5 // 4
    return samples


def _step_s(x: torch.Tensor, y: torch.Tensor, *, samples: int, steps: int) -> float:
    """Seconds of a step of the plain loop, with one thread."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, loss_fn = _network(), nn.CrossEntropyLoss()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    order = torch.randperm(len(x))
    start_s = 0.0
    for step in range(steps + 2):
        if step == 2:
            start_s = time.perf_counter()
        first = step * samples % (len(x) - samples)
        batch = order[first : first + samples]
        optimizer.zero_grad()
        loss_fn(model(x[batch]), y[batch]).backward()
        optimizer.step()
    return (time.perf_counter() - start_s) / steps


def _loops(count: int, *, samples: int, steps: int) -> float:
    """The mean seconds of a step, where so many processes run the loop at the same time."""
    context = multiprocessing.get_context("spawn")
    barrier, results = context.Barrier(count), context.Queue()
    processes = [context.Process(target=_loop, args=(barrier, results, samples, steps)) for _ in range(count)]
    for process in processes:
        process.start()
    seconds: list[float] = [results.get(timeout=600) for _ in processes]
    for process in processes:
        process.join()
    return statistics.mean(seconds)


def _loop(barrier: Any, results: Any, samples: int, steps: int) -> None:
    x, y = _digits()
    barrier.wait(timeout=300)
    results.put(_step_s(x, y, samples=samples, steps=steps))
