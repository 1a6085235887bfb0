"""What ranks do in the tests of the lab: `python lab_job.py sum|train|hold|wait FOLDER`; what they find, they write there."""

import json
import statistics
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lab_rig import HELD, HELD_SAMPLES, holding
from torch import nn

import tatami
from tatami.comm import AbstractCommunicator
from tatami.errors import CommTimeoutError
from tatami.tiling import Layout, Replica

# An iteration of some 0.1 s on each host: what is much shorter than a quota's period does not feel it.
BATCH, INPUTS, HIDDEN, OUTPUTS = 8192, 100, 500, 20
PATIENCE_S = 3.0
MESSAGE_BYTES = 1_250_000  # 0.1 s at 100 Mbit/s


def main() -> None:
    what, folder = sys.argv[1], Path(sys.argv[2])
    comm = tatami.init(timeout_s=1000.0)
    {"sum": add_up, "train": train, "hold": hold, "wait": wait_for_death}[what](comm, folder)


def add_up(comm: AbstractCommunicator, folder: Path) -> None:
    total = torch.tensor([float(comm.rank + 1)])
    comm.allreduce(total)
    report(comm, folder, sum=total.item(), hosts=comm.hosts, local_size=comm.local_size, seconds=message_s(comm))


def message_s(comm: AbstractCommunicator) -> float:
    """Median seconds of a message from rank 0 to rank 1, on rank 0: until its answer is there."""
    message, answer = torch.zeros(MESSAGE_BYTES, dtype=torch.uint8), torch.zeros(1)
    times = []
    for _ in range(5):
        start_s = time.perf_counter()
        if comm.rank == 0:
            comm.send(message, 1)
            comm.recv(answer, 1)
        elif comm.rank == 1:
            comm.recv(message, 0)
            comm.send(answer, 0)
        times.append(time.perf_counter() - start_s)
    comm.barrier()
    return statistics.median(times)


def train(comm: AbstractCommunicator, folder: Path) -> None:
    """Ten iterations, a change that the test makes, and more until the work has gone from the slowed rank to the others."""
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(INPUTS, HIDDEN), nn.Sigmoid(), nn.Linear(HIDDEN, OUTPUTS))
    data = torch.randn(BATCH, INPUTS), torch.rand(BATCH, OUTPUTS)
    plain = plain_losses(network, *data, iterations=5) if comm.rank == 0 else []
    model = tatami.tile(network, comm, batch_size=BATCH, speeds=[1.0, 1.0, 0.5], quiet=True)
    trainer = tatami.Trainer(
        model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss(), retile=tatami.Retiler(every=10, certainty=0.0)
    )
    dataset = torch.utils.data.TensorDataset(*data)
    before = share_of_rank_0(model)
    losses = trainer.fit(dataset, batch_size=BATCH, iterations=10).losses
    if comm.rank == 0:
        (folder / "trained").touch()
        while not (folder / "changed").exists():
            time.sleep(0.02)
    comm.barrier()
    while True:  # until the speeds that it measures tell it of the change; the test's own limit ends what never does
        losses += trainer.fit(dataset, batch_size=BATCH, iterations=10).losses
        if share_of_rank_0(model) < 0.7 * before:
            break
    report(comm, folder, losses=losses, plain=plain, before=before, after=share_of_rank_0(model))


def plain_losses(network: nn.Module, x: torch.Tensor, y: torch.Tensor, *, iterations: int) -> list[float]:
    """Of the plain torch loop."""
    start = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    optimizer, losses = torch.optim.SGD(network.parameters(), lr=0.1), []
    for _ in range(iterations):
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(network(x), y)
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        losses.append(loss.item())
    network.load_state_dict(start)
    return losses


def share_of_rank_0(model: tatami.TiledModel) -> float:
    """The part of the work that the first processor has."""
    areas = [tile.area for tile in model.tiling.tiles if tile.processor == model.names[0]]
    return sum(areas) / (model.tiling.samples * model.tiling.units)


def hold(comm: AbstractCommunicator, folder: Path) -> None:
    """Three steps of a network that may be too large; a rank that is alone does not ask a plan."""
    inputs, hidden, outputs = HELD
    alone = Layout(replicas=(Replica(width=1.0, processors=("p0",), heights=(1.0,)),))

    def network() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(inputs, hidden), nn.Sigmoid(), nn.Linear(hidden, outputs))

    model = tatami.tile(
        network,
        comm,
        batch_size=HELD_SAMPLES,
        speeds=holding(comm.size),
        layout=alone if comm.size == 1 else None,
        reduction="mean",
        optimizer_moments=1,
        quiet=True,
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    x, losses = torch.ones(HELD_SAMPLES, inputs), []
    for _ in range(3):
        optimizer.zero_grad()
        loss = model(model.local(x)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report(comm, folder, losses=losses, units=model.tile.units.size if model.tile is not None else 0)


def wait_for_death(comm: AbstractCommunicator, folder: Path) -> None:
    """All add up, before and after rank 2 is gone; who misses it then asks it alone, and writes down what it was told."""
    number = torch.ones(1)
    comm.allreduce(number)
    (folder / f"up-{comm.rank}").touch()
    while not (folder / "gone").exists():
        time.sleep(0.02)
    comm.timeout_s = PATIENCE_S
    start_s = time.monotonic()
    try:
        comm.allreduce(number)
    except CommTimeoutError as error:
        waited_s = time.monotonic() - start_s
        try:
            comm.recv(number, 2)
        except CommTimeoutError as named:
            report(comm, folder, waited_s=waited_s, said=str(error), named=str(named))
        raise


def report(comm: AbstractCommunicator, folder: Path, **found: Any) -> None:
    (folder / f"rank-{comm.rank}.part").write_text(json.dumps(found), encoding="utf-8")
    (folder / f"rank-{comm.rank}.part").rename(folder / f"rank-{comm.rank}.json")


if __name__ == "__main__":
    main()
