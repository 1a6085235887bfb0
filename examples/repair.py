"""Learns digits on three ranks, one of which is killed in the middle of a step; the others continue with the same numbers.

tatami run --elastic -n 3 examples/repair.py
"""

import os
import signal

import torch
from torch import nn

import tatami
from tatami.datasets import load
from tatami.train import whole_state_dict

data = load("digits")
comm = tatami.init()
torch.manual_seed(0)
network = nn.Sequential(nn.Linear(64, 200), nn.Tanh(), nn.Linear(200, 10))
model = tatami.tile(network, comm, batch_size=len(data.x), speeds="equal", reduction="mean", quiet=True)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
loss_function = nn.CrossEntropyLoss()

loop = tatami.steps(model, optimizer, count=40)
for step in loop:
    with step:
        x, y = model.local(data.x, data.y)
        loss = loss_function(model(x), y)
        if step.number == 20 and model.name == "p1":
            os.kill(os.getpid(), signal.SIGKILL)  # a machine dies without notice
        loss.backward()
        step.update(loss)
    if step.is_done and comm.rank == 0 and step.number % 10 == 9:
        print(f"step {step.number + 1}: loss {step.loss:.6f} on {comm.size} ranks")

weights = loop.whole(lambda: whole_state_dict(model))
if comm.rank == 0:
    network.load_state_dict(weights)
    print(", ".join(f"{name} {share:.1%}" for name, share in data.accuracy(network(data.x), data.y).items()))
