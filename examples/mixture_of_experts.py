"""A mixture with one expert on each rank; a gate sends every sample to the rank of its expert. Start it with:

tatami run -n 4 examples/mixture_of_experts.py
"""

import torch
import torch.nn.functional as F
from torch import nn

import tatami
from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.datasets import load
from tatami.parallel import Measured, SynchronizedSampler, broadcast_model, weighted_means

BATCH_SIZE = 64
WIDTH = 32


class Experts(nn.Module):
    """Adds to each sample the output of its chosen expert; the expert of this rank serves the samples of all ranks."""

    def __init__(self, comm: AbstractCommunicator) -> None:
        super().__init__()
        self.comm = comm
        self.gate = nn.Linear(WIDTH, comm.size)
        self.expert = nn.Sequential(nn.Linear(WIDTH, 64), nn.ReLU(), nn.Linear(64, WIDTH))
        self.counts = torch.zeros(comm.size)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Map (samples, width) to the same shape, and return the imbalance of the experts: 1 if chosen equally often."""
        weights = self.gate(x).softmax(dim=1)
        weight, choice = weights.max(dim=1)
        self.counts = torch.bincount(choice, minlength=self.comm.size)
        order = choice.argsort()
        came = functions.alltoall(torch.split(x[order], self.counts.tolist()), self.comm)
        made = self.expert(torch.cat(came))
        back = functions.alltoall(torch.split(made, [len(each) for each in came]), self.comm)
        result = torch.zeros_like(x).index_copy(0, order, torch.cat(back))
        imbalance = self.comm.size * (self.counts / max(1, len(x)) * weights.mean(dim=0)).sum()
        return x + weight.unsqueeze(1) * result, imbalance


train_data, test_data = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
comm = tatami.init()
torch.manual_seed(comm.rank)
before, experts, after = nn.Linear(64, WIDTH), Experts(comm), nn.Linear(WIDTH, 10)
shared = nn.ModuleList([before, experts.gate, after])  # every rank has these; each expert is on one rank
broadcast_model(shared, comm)
optimizer = torch.optim.Adam([*shared.parameters(), *experts.expert.parameters()], lr=0.005)
sampler = SynchronizedSampler(train_data.x, comm, share="equal", seed=1)


def outputs(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden, imbalance = experts(F.relu(before(x)))
    return after(hidden), imbalance


for _ in range(15):
    for samples in torch.split(torch.tensor(list(sampler)), BATCH_SIZE):
        optimizer.zero_grad()
        output, imbalance = outputs(train_data.x[samples])
        loss = F.cross_entropy(output, train_data.y[samples]) + 0.2 * imbalance
        functions.share(loss, comm).backward()  # type: ignore[no-untyped-call]  # the shares of all ranks add up to one loss
        for parameter in shared.parameters():
            assert parameter.grad is not None
            comm.allreduce(parameter.grad)  # an expert already has its whole gradient, which came with the samples
        optimizer.step()

mine = torch.arange(len(test_data.x))[comm.rank :: comm.size]
with torch.no_grad():
    output = outputs(test_data.x[mine])[0]
accuracy = test_data.accuracy(output, test_data.y[mine])["digit"]
means = weighted_means(Measured(values={"accuracy": accuracy}, num_samples=len(mine)), comm)
comm.allreduce(experts.counts)
if comm.rank == 0:
    shares = ", ".join(f"{each:.0%}" for each in (experts.counts / len(test_data.x)).tolist())
    print(f"the experts serve {shares} of the samples; accuracy {means['accuracy']:.1%}")
