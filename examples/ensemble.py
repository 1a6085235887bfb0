"""Every rank trains its own network on its own random sample of the digits; at the end they vote. Start it with:

tatami run -n 4 examples/ensemble.py
"""

import torch
from torch import nn

import tatami
from tatami import functions
from tatami.datasets import load

train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
torch.manual_seed(comm.rank)
network = nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
drawn = torch.randint(len(train_data.x), (300,))  # with replacement: a bootstrap sample
x, y = train_data.x[drawn], train_data.y[drawn]

for _ in range(30):
    for samples in torch.split(torch.randperm(len(x)), 64):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(network(x[samples]), y[samples])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()

with torch.no_grad():
    votes = functions.allgather(network(test_data.x).softmax(dim=1), comm)  # the votes of all ranks, on every rank
if comm.rank == 0:
    for rank, vote in enumerate(votes):
        print(f"member {rank}: accuracy {test_data.accuracy(vote, test_data.y)['digit']:.1%}")
    mean = torch.stack(list(votes)).mean(dim=0)
    print(f"ensemble of {comm.size}: accuracy {test_data.accuracy(mean, test_data.y)['digit']:.1%}")
