"""Data parallelism: every rank has the whole network and its own samples. Start it with one of:

tatami run -n 2 examples/data_parallel.py
torchrun --nproc-per-node 2 examples/data_parallel.py
"""

import torch
from torch import nn

import tatami
from tatami.datasets import load

train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
network = nn.Sequential(nn.Linear(64, 200), nn.ReLU(), nn.Linear(200, 10))
model = tatami.DataParallel(network, comm)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for _ in range(30):
    for samples in torch.split(torch.arange(len(train_data.x)), 256):
        mine = samples[comm.rank :: comm.size]
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train_data.x[mine]), train_data.y[mine])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
if comm.rank == 0:
    print(f"accuracy {test_data.accuracy(network(test_data.x), test_data.y)['digit']:.1%}")
