"""What went wrong in ChainerMN, found by running it: each hung there or gave a wrong gradient, and gives the right one here."""

import math
import subprocess
import sys
import time
from typing import Any

import pytest
import torch
from operations import OPERATIONS

from tatami import functions
from tatami.clock import SystemClock
from tatami.comm import AbstractCommunicator
from tatami.errors import CommTimeoutError, RankDiedError
from tatami.functions import channel
from tatami.functions.outbox import Outbox, Unsent
from tatami.testing.worlds import World

pytestmark = pytest.mark.ranks(2)


def scalar(value: float) -> torch.Tensor:
    return torch.tensor(value, dtype=torch.float64, requires_grad=True)


def grad_of(x: torch.Tensor) -> float:
    assert x.grad is not None
    return x.grad.item()


@pytest.mark.parametrize("second_first", [False, True])
@pytest.mark.parametrize("tags", [(0, 0), (5, 4_000_000_000)])
def test_two_sends_do_not_swap_their_gradients(comm: AbstractCommunicator, second_first: bool, tags: tuple[int, int]) -> None:
    """Those with tags are received in the other order."""
    if comm.rank == 0:
        z1, z2 = scalar(1), scalar(2)
        functions.send(z1, comm, dest=1, tag=tags[0])
        functions.send(z2, comm, dest=1, tag=tags[1])
        functions.backward()
        assert (grad_of(z1), grad_of(z2)) == (10, 100)
        return
    came = {number: functions.recv(comm, source=0, tag=tags[number - 1]) for number in ((2, 1) if any(tags) else (1, 2))}
    y1, y2 = came[1], came[2]
    assert (y1.item(), y2.item()) == (1, 2)
    (100 * y2 + 10 * y1 if second_first else 10 * y1 + 100 * y2).backward()


def test_the_manuals_two_sends(comm: AbstractCommunicator) -> None:
    """`pseudo_connect(phi1, phi2)`, then backward of that: it never came to the second send."""
    if comm.rank == 0:
        z1, z2 = scalar(1), scalar(2)
        phi1 = functions.send(z1, comm, dest=1)
        phi2 = functions.send(z2, comm, dest=1, delegate=phi1)
        (psi,) = functions.pseudo_connect(phi1, phi2)
        psi.backward()  # type: ignore[no-untyped-call]
        assert (grad_of(z1), grad_of(z2)) == (20, 10)
        return
    y1 = functions.recv(comm, source=0)
    y2 = functions.recv(comm, source=0, delegate=y1)
    (10 * y1 * y2).backward()


@pytest.mark.parametrize("in_a_tuple", [False, True])
def test_a_received_tensor_that_reaches_no_loss_sends_zeros(comm: AbstractCommunicator, in_a_tuple: bool) -> None:
    if comm.rank == 0:
        used, unused = scalar(1), scalar(2)
        for sent in [(used, unused)] if in_a_tuple else [used, unused]:
            functions.send(sent, comm, dest=1)
        functions.backward()
        assert (grad_of(used), grad_of(unused)) == (3, 0)
        return
    y = functions.recv(comm, source=0)[0] if in_a_tuple else functions.recv(comm, source=0)
    if not in_a_tuple:
        functions.recv(comm, source=0)
    (3 * y).backward()


@pytest.mark.ranks(2, 3, 4)
def test_unused_outputs_of_collectives(comm: AbstractCommunicator) -> None:
    x, z = scalar(1), scalar(2)
    gathered = functions.allgather(x, comm)
    exchanged = functions.alltoall([z] * comm.size, comm)
    if comm.rank == 0:
        (gathered[1] + exchanged[1]).backward()
    else:
        functions.backward()
    assert (grad_of(x), grad_of(z)) == (1.0 if comm.rank == 1 else 0.0,) * 2


@pytest.mark.ranks(2, 3, 4)
def test_bcast_of_what_was_gathered(comm: AbstractCommunicator) -> None:
    """Without a delegate: the bcast on the other ranks must bring backward to their gather."""
    x, size = scalar(comm.rank + 1), comm.size
    parts = functions.gather(x, comm)
    y = functions.bcast(torch.stack(parts).prod() if comm.rank == 0 else None, comm)
    ((comm.rank + 1) * y).backward()
    assert grad_of(x) == pytest.approx(size * (size + 1) / 2 * math.factorial(size) / (comm.rank + 1))


def test_a_send_after_everything_the_loss_needs(comm: AbstractCommunicator) -> None:
    """The loss of rank 1 knows nothing of its last send, which its first input reaches as well."""
    if comm.rank == 0:
        x = scalar(2)
        functions.send(x, comm, dest=1)
        (5 * functions.recv(comm, source=1)).backward()
        assert grad_of(x) == 3 * 2 * 2 + 5 * 4 * 2**3
        return
    y = functions.recv(comm, source=0)
    h = y**2
    functions.send(h**2, comm, dest=0)
    (3 * h).backward()


def test_a_local_loss_leaves_the_chain_alone(comm: AbstractCommunicator) -> None:
    x, w = scalar(3), scalar(4)
    functions.send(x, comm, dest=1 - comm.rank)
    y = functions.recv(comm, source=1 - comm.rank)
    (w**2).backward()  # type: ignore[no-untyped-call]
    assert grad_of(w) == 8
    (2 * y).backward()
    assert grad_of(x) == 2


@pytest.mark.ranks(3)
def test_ranks_without_a_loss(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = scalar(2)
        functions.send(x, comm, dest=1)
        functions.backward()
        assert grad_of(x) == 4 * 2**3
        return
    if comm.rank == 1:
        functions.send(functions.recv(comm, source=0) ** 2, comm, dest=2)
        functions.backward()
        return
    (functions.recv(comm, source=1) ** 2).backward()


@pytest.mark.ranks(2, 3, 4)
def test_a_replicated_loss_is_shared(comm: AbstractCommunicator) -> None:
    x = scalar(comm.rank + 1)
    loss = torch.stack(functions.allgather(x, comm)).prod()
    functions.share(loss, comm).backward()  # type: ignore[no-untyped-call]
    assert grad_of(x) == pytest.approx(math.factorial(comm.size) / (comm.rank + 1))


def test_what_needs_no_gradient_gets_none(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        functions.send(torch.ones(2), comm, dest=1)
        functions.backward()
        return
    y = functions.recv(comm, source=0)
    w = scalar(1)
    (w * y).sum().backward()
    assert grad_of(w) == 2
    assert bool(y.requires_grad) is False


@pytest.mark.parametrize("without", [0, 1])
def test_one_side_without_gradients(comm: AbstractCommunicator, without: int) -> None:
    x = scalar(3)
    with torch.set_grad_enabled(comm.rank != without):
        if comm.rank == 0:
            functions.send(x, comm, dest=1)
        else:
            y = functions.recv(comm, source=0)
            assert y.item() == 3
            assert not y.requires_grad
    functions.backward()
    assert (None if x.grad is None else x.grad.item()) == (None if without == 0 or comm.rank else 0.0)


def test_two_communicators_run_backward_in_the_mirrored_order(comm: AbstractCommunicator) -> None:
    other = comm.split(0)
    assert other is not None
    a, b = scalar(1), scalar(2)
    ya = functions.allreduce(a, comm)
    yb = functions.allreduce(b, other)
    (10 * ya + yb if comm.rank == 0 else yb + 10 * ya).backward()
    other.close()
    assert (grad_of(a), grad_of(b)) == (20, 2)


def test_graphs_can_be_retained(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = scalar(2)
        functions.send(x**2, comm, dest=1)
        delegate = functions.send(x**3, comm, dest=1)
        delegate.backward(retain_graph=True)  # type: ignore[no-untyped-call]
        delegate.backward()  # type: ignore[no-untyped-call]
        functions.send(x, comm, dest=1)
        functions.backward()
        assert grad_of(x) == 4 + 40 + 1
        return
    y = functions.recv(comm, source=0)
    functions.recv(comm, source=0)
    y.backward(retain_graph=True)
    (10 * y).backward()
    functions.recv(comm, source=0).backward()


def test_pseudo_connect_is_the_identity() -> None:
    x, n = torch.randn(4, 5, requires_grad=True, dtype=torch.float64), torch.tensor([1, 2])
    delegate = torch.randn(3, 2, requires_grad=True, dtype=torch.float64)
    y, m = functions.pseudo_connect(delegate, x, n)
    assert torch.equal(y, x)
    assert torch.equal(m, n)
    (2 * y).sum().backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(x.grad, torch.full_like(x, 2))
    torch.testing.assert_close(delegate.grad, torch.zeros_like(delegate))
    assert torch.autograd.gradcheck(lambda d, x: functions.pseudo_connect(d, x), (delegate, x))
    assert torch.equal(functions.pseudo_connect(None, x)[0], x)


def test_backward_to_some_inputs_visits_all_the_same(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = scalar(2)
        functions.send(x**2, comm, dest=1)
        functions.backward()
        assert grad_of(x) == 12
        return
    w = scalar(3)
    y = functions.recv(comm, source=0)
    torch.autograd.backward(w * y, inputs=[w])
    assert grad_of(w) == 4


@pytest.mark.ranks(3)
@pytest.mark.threads_only
@pytest.mark.parametrize("answers", [True, False])
def test_a_rank_that_has_done_its_part_may_end_while_others_wait(
    world: World, monkeypatch: pytest.MonkeyPatch, answers: bool
) -> None:
    """Rank 0 waits for rank 1 so long that it looks at what the others say, when rank 2 has ended already."""
    monkeypatch.setattr(channel, "REPORT_AFTER_S", 0.02)

    def body(comm: Any) -> float | None:
        if not answers and comm.rank == 0:
            comm.timeout_s = 1.0
        if comm.rank == 0:
            x = scalar(2)
            functions.send(x, comm, dest=1)
            if answers:
                functions.backward()
                return grad_of(x)
            with pytest.raises(CommTimeoutError, match=r"By then rank 2 had ended\."):
                functions.backward()
            return None
        if comm.rank == 1:
            functions.send(functions.recv(comm, source=0) ** 2, comm, dest=2)
            while 2 not in comm.world.ended:
                time.sleep(0.01)
            time.sleep(0.2)
            if answers:
                functions.backward()
            else:
                time.sleep(3.0)
            return None
        (functions.recv(comm, source=1) ** 2).backward()
        return None

    assert world(body)[0] == (4 * 2**3 if answers else None)


@pytest.mark.parametrize("is_report", [True, False])
def test_only_a_report_may_be_left_by_a_rank_that_has_ended(is_report: bool) -> None:
    def ended() -> bool:
        raise RankDiedError("rank 1 ended without taking part", rank=1)

    outbox = Outbox([], rank=0, policy=channel.POLITE, clock=SystemClock())
    chunk: Any = None
    for test in (ended, lambda: True):
        outbox.add(Unsent([test], chunk, (), [], "send", is_report=is_report))
    if is_report:
        outbox.clear()
        assert outbox.num_unsent == 0
        return
    with pytest.raises(RankDiedError):
        outbox.clear()
    assert outbox.num_unsent == 2


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", ["bcast", "scatter", "gather", "allgather", "alltoall"])
def test_a_loss_of_this_ranks_own_part_alone(comm: AbstractCommunicator, name: str) -> None:
    """It never left the rank, and still plain backward comes to the collective."""
    x, rank, size = scalar(comm.rank + 1), comm.rank, comm.size
    parts = [x * (each + 1) for each in range(size)]
    outputs: Any = functions.gather(x, comm) if name == "gather" else OPERATIONS[name].call(x, comm, 0, lambda *_: parts)
    own = outputs if isinstance(outputs, torch.Tensor) else outputs[rank if len(outputs) == size else 0]
    (10 * own).backward()
    first = {"bcast": 10.0 * size, "scatter": 10.0 * size * (size + 1) / 2, "gather": 10.0}
    each = {"allgather": 10.0, "alltoall": 10.0 * (rank + 1)}
    assert (0.0 if x.grad is None else x.grad.item()) == each.get(name, first.get(name, 0.0) if rank == 0 else 0.0)


def test_adding_to_a_delegate_in_place_changes_no_other(comm: AbstractCommunicator) -> None:
    if comm.rank == 0:
        x = scalar(2)
        loss = functions.send(x, comm, dest=1)
        loss += 1
        second = functions.send(x, comm, dest=1)
        value = second.item()
        functions.backward()
        assert (value, grad_of(x)) == (0.0, 2.0)
        return
    (functions.recv(comm, source=0) + functions.recv(comm, source=0)).backward()


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
