"""Convolutions whose channels are divided among ranks; all ranks see all samples. Start it with:

tatami run -n 2 examples/parallel_convolution.py
"""

import torch
from torch import nn

import tatami
from tatami import functions
from tatami.datasets import load


def build(comm: tatami.comm.AbstractCommunicator) -> nn.Sequential:
    """Use the dense form, so that the network is the same on any number of ranks; ChainerMN's form is `grouped=True`."""
    torch.manual_seed(0)  # the undivided layers are the same on all ranks
    return nn.Sequential(
        nn.Unflatten(1, (1, 8, 8)),
        tatami.ParallelConv(nn.Conv2d(1, 24, 3, padding=1), comm),
        nn.ReLU(),
        tatami.ParallelConv(nn.Conv2d(24, 48, 3, stride=2, padding=1), comm),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(48 * 4 * 4, 10),
    )


train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
model = build(comm)
divided = {id(each) for module in model if isinstance(module, tatami.ParallelConv) for each in module.parameters()}
alike = [each for each in model.parameters() if id(each) not in divided]
optimizer = torch.optim.Adam(model.parameters(), lr=0.003)
for _ in range(8):
    for samples in torch.split(torch.arange(len(train_data.x)), 128):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(train_data.x[samples]), train_data.y[samples])
        functions.backward(functions.share(loss, comm))  # every rank computes this loss, which must count once
        for parameter in alike:
            assert parameter.grad is not None
            comm.allreduce(parameter.grad)  # each rank has its share of the gradient
        optimizer.step()

with torch.no_grad():
    accuracy = test_data.accuracy(model(test_data.x), test_data.y)["digit"]
if comm.rank == 0:
    divisions = [module.channels for module in model if isinstance(module, tatami.ParallelConv)]
    print(f"channels per rank: {divisions[0]} and {divisions[1]}; accuracy {accuracy:.1%}")
    assert accuracy > 0.95
