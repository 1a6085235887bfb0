"""Two copies of a network; each copy is split into halves on two ranks and trains on half of the samples. Start it with:

tatami run -n 4 examples/dual_parallel.py
"""

import torch
from torch import nn

import tatami
from tatami import functions
from tatami.datasets import load


def build(copy: tatami.comm.AbstractCommunicator) -> tatami.MultiNodeChainList:
    """Return this rank's half of its copy."""
    model = tatami.MultiNodeChainList(copy)
    if copy.rank == 0:
        model.add_link(nn.Sequential(nn.Linear(64, 100), nn.ReLU()), rank_out=1)
    else:
        model.add_link(nn.Sequential(nn.Linear(100, 100), nn.ReLU(), nn.Linear(100, 10)), rank_in=0)
    return model


train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
if comm.size % 2:
    raise SystemExit(f"each copy of this network needs 2 ranks: start an even number of them, not {comm.size}")
copy = comm.split(comm.rank // 2)  # the two ranks of one copy: they have the same samples and different halves
alike = comm.split(comm.rank % 2)  # the ranks with the same half of different copies: they sum their gradients
assert copy is not None
assert alike is not None
torch.manual_seed(copy.rank)  # the same half begins with the same weights
model = build(copy)
optimizer = torch.optim.Adam(model.parameters(), lr=0.005)
for _ in range(30):
    for samples in torch.split(torch.arange(len(train_data.x)), 256):
        mine = samples[alike.rank :: alike.size]
        optimizer.zero_grad()
        if copy.rank == 0:
            model(train_data.x[mine])
            functions.backward()  # this rank has no loss
        else:
            errors = nn.functional.cross_entropy(model(), train_data.y[mine], reduction="sum")
            functions.backward(errors / len(samples))  # this copy's share of the mean over all samples
        for parameter in model.parameters():
            assert parameter.grad is not None
            alike.allreduce(parameter.grad)
        optimizer.step()

with torch.no_grad():
    output = model(test_data.x) if copy.rank == 0 else model()
weights = torch.cat([parameter.detach().reshape(-1) for parameter in model.parameters()])
same = alike.allgather_object(weights.sum().item())
assert len(set(same)) == 1, f"copies differ: {same}"
if comm.rank == 1:
    accuracy = test_data.accuracy(output, test_data.y)["digit"]
    print(f"accuracy {accuracy:.1%}")
    assert accuracy > 0.95
