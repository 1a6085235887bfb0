"""Digits on four workers, two of which are killed on purpose; the result is the same as if they had lived, to the bit.

python examples/survive_a_kill.py
"""

from __future__ import annotations

import os
import signal

import torch
from sklearn.datasets import load_digits
from torch import nn

from tatami import server

ROUNDS = 60
digits = load_digits()
dataset = (torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target))
loss_fn = nn.CrossEntropyLoss()


def model_fn() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 10))


def kill_somebody(run: server.Runtime) -> None:
    """Called after every round."""
    if run.version in (20, 40):
        victim = f"worker {run.version // 20}"
        print(f"round {run.version}: {victim} is killed")
        os.kill(run.pids()[victim], signal.SIGKILL)


def main() -> None:
    finals = []
    for on_round in (None, kill_somebody):
        model, report = server.train(
            model_fn,
            loss_fn,
            dataset=dataset,
            rounds=ROUNDS,
            workers=4,
            servers=2,
            spares=1,
            optimizer=server.SGD(lr=0.5, momentum=0.9),
            recovery=server.FromServers(),
            on_round=on_round,
        )
        accuracy = (model(dataset[0]).argmax(dim=1) == dataset[1]).float().mean().item()
        print(f"{report.rounds} rounds in {report.seconds:.1f} s, loss {report.losses[-1]:.4f}, accuracy {accuracy:.3f}")
        for failure in report.failures:
            print(f"  {failure.who} {failure.how} in round {failure.round}, {failure.lost_s or 0:.2f} s lost")
        finals.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    print("the same parameters, to the bit:", torch.equal(*finals))


if __name__ == "__main__":
    main()
