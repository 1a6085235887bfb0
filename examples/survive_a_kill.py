"""Learns digits on four workers, two of which are killed on purpose; the result equals the undisturbed run's, to the bit.

python examples/survive_a_kill.py [NETTALK_CORPUS]    (with the corpus file: 1,024 letters of NETtalk instead)
"""

from __future__ import annotations

import os
import signal
import sys

import torch
from torch import nn

from tatami import server
from tatami.datasets.load import load

ROUNDS = 60
data = load("nettalk", path=sys.argv[1], samples=1024) if len(sys.argv) > 1 else load("digits")
INPUTS, OUTPUTS = data.x.shape[1], data.outputs
# Digits are one of ten; NETtalk's letters have several features at once.
loss_fn: nn.Module = nn.CrossEntropyLoss() if data.name == "digits" else nn.BCEWithLogitsLoss()


def model_fn() -> nn.Module:
    return nn.Sequential(nn.Linear(INPUTS, 80), nn.Tanh(), nn.Linear(80, OUTPUTS))


def kill_a_worker(run: server.RunControl) -> None:
    """Kill a worker in rounds 20 and 40; it is called after every round."""
    if run.version in (20, 40):
        victim = f"worker {run.version // 20}"
        print(f"round {run.version}: {victim} is killed")
        os.kill(run.pids()[victim], signal.SIGKILL)


def main() -> None:
    finals = []
    for on_round in (None, kill_a_worker):
        model, report = server.train(
            model_fn,
            loss_fn,
            dataset=(data.x, data.y),
            settings=server.RunSettings(
                rounds=ROUNDS,
                workers=4,
                servers=2,
                spares=1,
                optimizer=server.SGD(lr=0.5, momentum=0.9),
                recovery=server.FromServers(),
            ),
            context=server.RunContext(
                on_round=on_round,
            ),
        )
        accuracy = ", ".join(f"{name} {share:.3f}" for name, share in data.accuracy(model(data.x), data.y).items())
        print(f"{report.rounds} rounds in {report.seconds:.1f} s, loss {report.losses[-1]:.4f}, {accuracy}")
        for failure in report.failures:
            print(f"  {failure.who} {failure.how} in round {failure.round}, {failure.lost_s or 0:.2f} s lost")
        finals.append(torch.cat([parameter.detach().flatten() for parameter in model.parameters()]))
    print("parameters equal to the bit:", torch.equal(*finals))


if __name__ == "__main__":
    main()
