"""The whole of it: digits dealt out, an optimizer of many ranks, evaluation, checkpoints, and on from one of them."""

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tatami.checkpoints import MultiNodeCheckpoint
from tatami.comm import AbstractCommunicator
from tatami.datasets import load
from tatami.parallel import (
    EarlyStopping,
    Measured,
    MultiNodeEvaluator,
    MultiNodeOptimizer,
    SynchronizedSampler,
    scatter_dataset,
)
from tatami.testing.worlds import World


class Run:
    """One rank's run, with everything fresh."""

    def __init__(self, comm: AbstractCommunicator, folder: Path, network: nn.Module, *, data: Any) -> None:
        train, test = data
        self.comm = comm
        self.model = deepcopy(network)
        self.optimizer = MultiNodeOptimizer(torch.optim.Adam(self.model.parameters(), lr=0.01), comm, model=self.model)
        self.mine = scatter_dataset(train if comm.rank == 0 else None, comm, shuffle=True, seed=1)
        self.test = scatter_dataset(test if comm.rank == 0 else None, comm, force_equal_length=False)
        generator = torch.Generator().manual_seed(2)
        self.batches = DataLoader(self.mine, batch_size=32, shuffle=True, generator=generator)
        self.checkpoint = MultiNodeCheckpoint(comm.bcast_object(folder), comm, replica_sets=[], keep=3)
        self.stopping = EarlyStopping(comm, mode="max", patience=100)
        self.epoch = 0

    def resume(self) -> None:
        resumed = self.checkpoint.resume()
        assert resumed is not None
        self.model.load_state_dict(resumed.state["model"])
        self.optimizer.load_state_dict(resumed.state["optimizer"])
        self.stopping.load_state_dict(resumed.state["stopping"])
        self.epoch = resumed.step

    def train(self, epochs: int) -> dict[str, float]:
        evaluate = MultiNodeEvaluator(self.measure, self.comm)
        means: dict[str, float] = {}
        for _ in range(epochs):
            self.epoch += 1
            for x, y in self.batches:
                self.optimizer.zero_grad()
                F.cross_entropy(self.model(x), y).backward()  # type: ignore[no-untyped-call]
                self.optimizer.step()
            means = evaluate()
            self.stopping.check(means["accuracy"])
            parts: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "stopping": self.stopping}
            self.checkpoint.save(self.epoch, {name: part.state_dict() for name, part in parts.items()})
        return means

    def measure(self) -> Measured:
        x, y = (torch.stack(each) for each in zip(*self.test, strict=True))
        with torch.no_grad():
            right = self.model(x).argmax(dim=1) == y
        return Measured(values={"accuracy": right.float().mean().item()}, num_samples=len(y))

    def close(self) -> None:
        self.optimizer.close()
        self.checkpoint.close()


@pytest.mark.ranks(2, 3)  # one rank alone has several OpenMP threads, which crawl where the cores are busy
def test_digits_with_all_of_it_and_on_from_a_checkpoint(world: World, folder: Path) -> None:
    train, test = load("digits", targets="classes").split(test_fraction=0.2, seed=0)
    data = TensorDataset(train.x, train.y), TensorDataset(test.x, test.y)
    generator = torch.Generator().manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 100), nn.ReLU(), nn.Linear(100, 10))
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) / 8)

    def body(comm: AbstractCommunicator) -> float:
        first = Run(comm, folder, network, data=data)
        first.train(5)
        second = Run(comm, folder, network, data=data)
        second.resume()
        assert second.epoch == 5
        assert second.stopping.best == first.stopping.best
        for one, other in zip(first.model.parameters(), second.model.parameters(), strict=True):
            assert torch.equal(one, other)
        means = second.train(5)
        everyones = comm.allgather_object([parameter.tolist() for parameter in second.model.parameters()])
        assert everyones == [everyones[0]] * comm.size
        comm.barrier()
        kept = sorted(path.name for path in Path(comm.bcast_object(folder)).iterdir())
        assert kept == [f"step-{step:08d}" for step in (8, 9, 10)]
        comm.barrier()
        first.close()
        second.close()
        return means["accuracy"]

    accuracies = world(body)
    assert accuracies == [accuracies[0]] * world.size
    assert accuracies[0] > 0.95


@pytest.mark.ranks(2)
def test_a_sampler_instead_of_scattering(world: World) -> None:
    """As in the guide: where every rank can read the data, nothing is dealt out."""
    data = load("digits", targets="classes")
    dataset = TensorDataset(data.x, data.y)

    def body(comm: AbstractCommunicator) -> int:
        sampler = SynchronizedSampler(dataset, comm, share="equal")
        batches: Any = DataLoader(dataset, batch_size=100, sampler=sampler)
        return sum(len(y) for _, y in batches)

    assert world(body) == [899, 899]
