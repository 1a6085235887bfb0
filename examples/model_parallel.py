"""One network with its first half on rank 0 and its second half on rank 1. Start it with:

tatami run -n 2 examples/model_parallel.py
"""

import torch
from torch import nn

import tatami
from tatami import functions
from tatami.datasets import load


def build(comm: tatami.comm.AbstractCommunicator) -> tatami.MultiNodeChainList:
    """Return the layers of this rank."""
    model = tatami.MultiNodeChainList(comm)
    if comm.rank == 0:
        model.add_link(nn.Sequential(nn.Linear(64, 100), nn.ReLU()), rank_out=1)
    elif comm.rank == 1:
        model.add_link(nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)), rank_in=0)
    return model


train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
if comm.size != 2:
    raise SystemExit(f"this network has two halves: start it with 2 ranks, not {comm.size}")
torch.manual_seed(comm.rank)
model = build(comm)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for _ in range(30):
    for samples in torch.split(torch.arange(len(train_data.x)), 128):
        optimizer.zero_grad()
        if comm.rank == 0:
            model(train_data.x[samples])
            functions.backward()  # this rank has no loss
        else:
            functions.backward(nn.functional.cross_entropy(model(), train_data.y[samples]))
        optimizer.step()

with torch.no_grad():
    output = model(test_data.x) if comm.rank == 0 else model()
if comm.rank == 1:
    accuracy = test_data.accuracy(output, test_data.y)["digit"]
    print(f"accuracy {accuracy:.1%}")
    assert accuracy > 0.95
