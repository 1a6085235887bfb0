"""A step of training on two ranks of one host, against torch's DistributedDataParallel over gloo:

    tatami run -n 2 benchmarks/one_host.py [--only gpt]

As `tatami bench train`, with a GPT of 25 million weights, and a CNN whose batch normalization takes the statistics of each
rank, as DDP's does. Prints a JSON line for each network.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from typing import Literal

import torch

import tatami
from tatami.bench.train import TrainBenchmark, TrainSubject, bench_train, perceptron
from tatami.cli.bench import subject_of
from tatami.cli.tasks import CharacterGpt, NextTokenLoss, task_of
from tatami.cli.train_job import TrainJob


def large_gpt() -> TrainSubject:
    torch.manual_seed(0)
    x, y = torch.randint(0, 60, (2, 8, 64), generator=torch.Generator().manual_seed(0))
    model = CharacterGpt(characters=60, layers=8, width=512, heads=8, tokens=64)
    return TrainSubject(model=model, x=x, y=y, loss=NextTokenLoss(), sample=x[:2])


SMALL = TrainBenchmark(net="203-80-26", batch_size=4096)
CASES: dict[str, tuple[Callable[[], TrainSubject], Literal["global", "local"]]] = {
    "gpt": (lambda: subject_of(task_of(TrainJob(model="gpt")), 16), "global"),
    "cnn": (lambda: subject_of(task_of(TrainJob(model="cnn")), 64), "global"),
    "cnn, statistics of each rank": (lambda: subject_of(task_of(TrainJob(model="cnn")), 64), "local"),
    "203-80-26": (lambda: perceptron(SMALL), "global"),
    "gpt of 25 M weights": (large_gpt, "global"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", default="", help="networks whose name has this in it")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=1.0, help="approximate length of a timing")
    wanted = parser.parse_args()
    torch.set_num_threads(1)
    comm = tatami.init()
    for name, (make, batch_norm) in CASES.items():
        if wanted.only not in name:
            continue
        subject = make()
        benchmark = TrainBenchmark(
            net=name, batch_size=len(subject.x), rounds=wanted.rounds, seconds=wanted.seconds, batch_norm=batch_norm
        )
        record = bench_train(benchmark, comm, subject=subject)
        if comm.rank == 0:
            print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
