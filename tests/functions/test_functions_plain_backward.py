"""`loss.backward()` as torch has it comes to all that was communicated, and touches nothing else in the process."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

from tatami import functions
from tatami.comm import AbstractCommunicator
from tatami.testing.worlds import World


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def grad_of(x: torch.Tensor) -> float:
    assert x.grad is not None
    return x.grad.item()


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["bcast", "scatter", "gather", "allgather", "alltoall"])
def test_a_loss_of_this_ranks_own_part_alone(world: World, name: str) -> None:
    """It never left the rank, and still plain backward comes to the collective."""

    def body(comm: AbstractCommunicator) -> float:
        x = scalar(comm.rank + 1)
        to_each = [x * (rank + 1) for rank in range(comm.size)]
        own: torch.Tensor | None
        if name == "bcast":
            own = functions.bcast(x if comm.rank == 0 else None, comm)
        elif name == "scatter":
            own = functions.scatter(to_each if comm.rank == 0 else None, comm)
        elif name == "gather":
            own = functions.gather(x, comm)[0] if comm.rank == 0 else functions.gather(x, comm)
        elif name == "allgather":
            own = functions.allgather(x, comm)[comm.rank]
        else:
            own = functions.alltoall(to_each, comm)[comm.rank]
        (10 * own).backward()
        return 0.0 if x.grad is None else x.grad.item()

    size = world.size
    first = {"bcast": 10.0 * size, "scatter": 10.0 * size * (size + 1) / 2, "gather": 10.0}
    each = {"allgather": [10.0] * size, "alltoall": [10.0 * (rank + 1) for rank in range(size)]}
    assert world(body) == each.get(name, [first.get(name, 0.0)] + [0.0] * (size - 1))


@pytest.mark.ranks(2)
def test_adding_to_a_delegate_in_place_changes_no_other(world: World) -> None:
    def body(comm: AbstractCommunicator) -> tuple[float, float] | None:
        if comm.rank == 0:
            x = scalar(2)
            loss = functions.send(x, comm, dest=1)
            loss += 1
            second = functions.send(x, comm, dest=1)
            value = second.item()
            functions.backward()
            return value, grad_of(x)
        (functions.recv(comm, source=0) + functions.recv(comm, source=0)).backward()
        return None

    assert world(body)[0] == (0.0, 2.0)


def test_torch_is_wrapped_by_the_first_use_and_only_once() -> None:
    """In a process of its own: importing changes nothing, and a wrapper that somebody put there is kept inside."""
    script = """
import torch
from tatami import functions
from tatami.comm.threads import run_threads
from tatami.functions.joining import install

plain, seen = torch.autograd.backward, []
def somebodys(*args):
    seen.append(1)
    return plain(*args)
torch.autograd.backward = somebodys

def body(comm):
    x = torch.ones(1, requires_grad=True)
    y = functions.sendrecv(x, comm, dest=1 - comm.rank, source=1 - comm.rank)
    functions.send(y, comm, dest=1 - comm.rank)
    functions.recv(comm, source=1 - comm.rank)
    (3 * y).sum().backward()
    return x.grad.item()

assert torch.autograd.backward is somebodys
assert run_threads(body, size=2) == [3.0, 3.0]
ours = torch.autograd.backward
assert ours is not somebodys and ours.__wrapped__ is somebodys
install()
assert run_threads(body, size=2) == [3.0, 3.0]
assert torch.autograd.backward is ours
assert len(seen) == 4
w = torch.ones(2, requires_grad=True)
(w * w).sum().backward()
assert w.grad.tolist() == [2.0, 2.0]
print("fine")
"""
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=800, check=False)
    assert ended.stdout == "fine\n", ended.stderr


@pytest.mark.ranks(2)
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device; run it with --world=torchrun")
def test_cuda_tensors_travel_where_the_backend_has_them(world: World) -> None:
    if world.kind != "torchrun":
        pytest.skip("CUDA tensors are moved by torch.distributed alone")

    def body(comm: AbstractCommunicator) -> float:
        x = torch.full((3,), 2.0, device="cuda", requires_grad=True)
        y = functions.sendrecv({"y": x**2}, comm, dest=1 - comm.rank, source=1 - comm.rank)["y"]
        assert y.device.type == "cuda"
        functions.allreduce(5 * y, comm).sum().backward()
        assert x.grad is not None
        assert x.grad.device.type == "cuda"
        return x.grad.sum().item()

    assert world(body) == [3 * 2 * 5 * 4.0] * 2
