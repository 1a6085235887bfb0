"""How much learning `Ignore` costs:  python benchmarks/ignore_gap.py

Four workers train the digits network for 50 rounds, with 10 seeds; each worker-round ends in a death with a probability of
0, 1, 5 or 10 %, before its push. The loss over all samples afterwards is compared with that of the undisturbed run of the same
seed. The coordinator, learner and shards are those of real runs, driven in one process, so that deaths fall exactly where they
are drawn. Writes benchmarks/results/ignore_gap.jsonl: the command, a line for each share of deaths, and prints the table.
"""

from __future__ import annotations

import json
import random
import statistics
from pathlib import Path
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import nn

from tatami.bench.interleaved import machine
from tatami.server import SGD, Ignore
from tatami.server import actions as act
from tatami.server import events as ev
from tatami.server.coordinator import Coordinator
from tatami.server.learner import Course, Learner
from tatami.server.optimizers import Vector
from tatami.server.pieces import cut, parcel
from tatami.server.run_settings import RunSettings
from tatami.server.shard import ShardServer

RESULTS = Path(__file__).parent / "results" / "ignore_gap.jsonl"
SHARES = (0.0, 0.01, 0.05, 0.10)
SEEDS = range(10)
ROUNDS, WORKERS, BATCH_SIZE = 50, 4, 256
OPTIMIZER = SGD(lr=0.1, momentum=0.9)


def trained(seed: int, share: float, data: tuple[torch.Tensor, torch.Tensor]) -> tuple[float, int]:
    """The loss over all samples after the run, and how many workers died in it."""
    torch.manual_seed(seed)
    model, loss_fn = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10)), nn.CrossEntropyLoss()
    course = Course(samples=len(data[0]), batch_size=BATCH_SIZE, seed=seed)
    learner = Learner(model, loss_fn=loss_fn, data=data, course=course)
    settings = RunSettings(rounds=ROUNDS, workers=WORKERS, servers=1, spares=1, restarts=ROUNDS * WORKERS, recovery=Ignore())
    coordinator, server = Coordinator(settings), ShardServer({0: learner.parameters}, optimizer=OPTIMIZER)
    chance, deaths = random.Random(f"{seed}/{share}"), 0
    events: list[ev.Event] = [ev.Started(at_s=0.0)]
    while events:
        for action in coordinator.handle(events.pop(0)):
            match action:
                case act.SendTask():
                    if chance.random() < share:
                        deaths += 1
                        events.append(ev.ProcessDied(at_s=0.0, process=action.process))
                    else:
                        events.append(_push(action, learner, server))
                case act.StartSpare():
                    events.insert(0, ev.SpareReady(at_s=0.0, process=action.process))
                case act.ApplyShard():
                    server.apply(action)
                    events.append(ev.ShardApplied(at_s=0.0, order=action))
                case act.FetchResult():
                    events.append(ev.ResultFetched(at_s=0.0, order=action))
                case act.Finish():
                    pass
                case _:
                    raise AssertionError(f"nothing of this kind is expected here: {action}")
    learner.load([server.parameters(0)])
    with torch.no_grad():
        return float(loss_fn(model(data[0]), data[1])), deaths


def _push(task: act.SendTask, learner: Learner, server: ShardServer) -> ev.ShardReceived:
    learner.load([server.parameters(0)])
    gradient, _, samples = learner.gradient(round_=task.round, worker=task.worker, members=task.members)
    size = sum(map(len, gradient))
    update: list[Vector] = [part.copy() for part in parcel(gradient, stretch=cut(size, shards=1)[0])]
    contribution = act.Contribution(worker=task.worker, process=task.process, round=task.round)
    server.stage(0, update, contribution=contribution, attempt=task.attempt, samples=samples)
    return ev.ShardReceived(at_s=0.0, task=task, shard=0, server=0)


def main() -> None:
    torch.set_num_threads(1)
    digits = load_digits()
    data = (torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
    calm = {seed: trained(seed, 0.0, data)[0] for seed in SEEDS}
    lines: list[dict[str, Any]] = [{"command": "python benchmarks/ignore_gap.py"}]
    for share in SHARES:
        runs = {seed: trained(seed, share, data) for seed in SEEDS}
        gaps = [runs[seed][0] - calm[seed] for seed in SEEDS]
        line: dict[str, Any] = {
            "deaths_share": share,
            "network": "64-64-10",
            "rounds": ROUNDS,
            "workers": WORKERS,
            "batch_size": BATCH_SIZE,
            "optimizer": repr(OPTIMIZER),
            "seeds": len(SEEDS),
            "deaths": [runs[seed][1] for seed in SEEDS],
            "loss_mean": statistics.mean(loss for loss, _ in runs.values()),
            "undisturbed_loss_mean": statistics.mean(calm.values()),
            "gap_mean": statistics.mean(gaps),
            "gap_stdev": statistics.stdev(gaps),
            "gaps": gaps,
            "machine": machine(),
        }
        lines.append(line)
        relative = line["gap_mean"] / line["undisturbed_loss_mean"]
        print(
            f"{share:4.0%}: {statistics.mean(line['deaths']):5.1f} deaths a run, loss {line['loss_mean']:.5f}, "
            f"gap {line['gap_mean']:+.5f} +- {line['gap_stdev']:.5f} ({relative:+.2%})"
        )
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    print(RESULTS)


if __name__ == "__main__":
    main()
