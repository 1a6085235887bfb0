"""The tiled path on a device that is not there: what lies where is checked without a card (see `pretend_device`).

These runs say nothing of CUDA. `tests/test_cuda.py` does, where there is a card.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from pretend_device import DEVICE, PretendDevice, PretendTensor
from tatami.comm import AbstractCommunicator, Op, run_threads
from tatami.comm.transport import Transport
from tatami.errors import InputError
from tatami.runtime.phases import DevicePhases
from tatami.runtime.stopwatch import AbstractStopwatch
from tatami.stages.channel import Parcel
from tatami.stages.comm_channel import CommChannel
from tatami.testing.worlds import World
from tatami.train import IterationPhase, TiledModel, move, tile, whole_state_dict
from tiled_rig import assert_close, copy_of, draw_batches, simple_layout

pytestmark = [pytest.mark.ranks(3), pytest.mark.threads_only]

MIXTURES: dict[str, Callable[[int], Any]] = {
    "all on the device": lambda rank: DEVICE,  # noqa: ARG005
    "the first on the CPU": lambda rank: DEVICE if rank else "cpu",
}


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("norm", [nn.LayerNorm, nn.BatchNorm1d])
def test_a_run_on_a_device_equals_the_plain_one(world: World, mixture: str, norm: Callable[[int], nn.Module]) -> None:
    """Linear pairs, dropout, norms; gradients of six steps, Adam, three re-tilings, clipping, and the whole weights."""
    torch.manual_seed(3)
    network = nn.Sequential(
        nn.Linear(5, 12), nn.Tanh(), nn.Dropout(0.3), nn.Linear(12, 5), norm(5), nn.Linear(5, 9), nn.GELU(),
        nn.Linear(9, 4), nn.Dropout(0.2),
    ).double()  # fmt: skip
    batches = draw_batches(6, size=7, shape=(5,), outputs=4, dtype=torch.float64)

    def train(model: nn.Module, step: Callable[[int, torch.optim.Optimizer], None], clip: Callable[[], Any]) -> None:
        optimizer = torch.optim.Adam(model.parameters(), lr=0.02, eps=1e-5)  # a bias before a norm has no gradient but rounding
        for number, (x, y) in enumerate(batches):
            step(number, optimizer)
            optimizer.zero_grad()
            inputs, targets = model.local(x, y) if isinstance(model, TiledModel) else (x, y)
            nn.functional.mse_loss(model(inputs), targets).backward()  # type: ignore[no-untyped-call]
            clip()
            optimizer.step()

    plain = copy_of(network)
    torch.manual_seed(9)
    train(plain, lambda *_: None, lambda: nn.utils.clip_grad_norm_(plain.parameters(), 0.1))
    torch.manual_seed(9)  # the state that tile() takes over for dropout

    def body(comm: AbstractCommunicator) -> None:
        layouts = [simple_layout([0, 1], [2], widths=[0.6, 0.4]), simple_layout([1], [0, 2], widths=[0.3, 0.7])]
        layouts += [simple_layout([2, 1, 0]), simple_layout([1, 2])]
        with PretendDevice():
            device = MIXTURES[mixture](comm.rank)
            options: dict[str, Any] = {"batch_size": 7, "speeds": "equal", "reduction": "mean", "device": device, "quiet": True}
            model = tile(network, comm, layout=layouts[0], **options)

            def step(number: int, optimizer: torch.optim.Optimizer) -> None:
                if number in (1, 3, 5):
                    move(model, layouts[(number + 1) // 2], optimizer=optimizer)
                large = [each for state in optimizer.state.values() for each in state.values() if each.dim()]
                assert {each.device for each in (*model.parameters(), *large)} == {torch.device(device)}

            train(model, step, lambda: model.clip_grad_norm_(0.1))
            state = comm.bcast_object(whole_state_dict(model))
        assert_close(state, plain.state_dict(), what="the weights")

    world(body)


def test_tensors_of_a_device_and_of_the_cpu_move_to_each_other(comm: AbstractCommunicator) -> None:
    with PretendDevice():
        device = DEVICE if comm.rank else torch.device("cpu")
        for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.int64, torch.bool):
            mine = torch.tensor([comm.rank, 1], dtype=torch.float64).to(dtype).to(device)
            total = mine.clone()
            comm.allreduce(total, op=Op.MAX)
            assert total.device == device
            assert total.tolist() == torch.tensor([2, 1]).to(dtype).tolist()
            every = torch.empty(6, dtype=dtype, device=device)
            comm.allgather(mine, every)
            assert every.tolist() == torch.tensor([0, 1, 1, 1, 2, 1]).to(dtype).tolist()
            room = torch.empty(2, 3, dtype=dtype, device=device).t()[:2, 0]  # not contiguous
            right = comm.irecv(room, (comm.rank - 1) % 3)
            comm.isend(mine, (comm.rank + 1) % 3).wait()
            right.wait()
            assert room.tolist() == torch.tensor([(comm.rank - 1) % 3, 1]).to(dtype).tolist()
            comm.bcast(total[:1], root=2)


def test_ranks_say_where_they_compute_and_parts_know_it(comm: AbstractCommunicator) -> None:
    with PretendDevice():
        assert not comm.on_devices
        route = comm.use_device(DEVICE if comm.rank < 2 else "cpu")
        assert (route.transport, route.why) == (Transport.HOST, "rank 2 of 3 computes on a CPU")
        part = comm.split(0 if comm.rank < 2 else None)
        if part is not None:
            assert part.on_devices
            assert "ranks 0, 1: a device of kind 'maia'" in part.describe()
        assert comm.describe().startswith("3 ranks by threads")


@pytest.mark.ranks(2)
def test_a_tensor_without_values_is_refused(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match="allreduce: a tensor of the device 'meta' has a shape and no values"):
        comm.allreduce(torch.empty(3, device="meta"))


@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("device", "random", "said"),
    [
        ("cuda:7", "plain", "rank 0 of 2: device 'cuda:7': torch finds"),
        (DEVICE, "local", "rank 0 of 2: random='local' seeds"),
        ("gpu", "plain", "rank 0 of 2: "),
    ],
)
def test_what_is_not_done_on_a_device_is_refused_on_all_ranks(
    comm: AbstractCommunicator, device: Any, random: Any, said: str
) -> None:
    network = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))
    with PretendDevice(), pytest.raises(InputError, match=said):
        tile(network, comm, batch_size=4, random=random, device=device if comm.rank == 0 else "cpu")


class Marks(AbstractStopwatch):
    """Every mark is the next second; it is reached when it is read."""

    def __init__(self) -> None:
        self.made, self.read = 0, 0

    def mark(self) -> int:
        self.made += 1
        return self.made * self.made

    def between_s(self, began: int, ended: int) -> float:
        self.read += 1
        return float(ended - began)


def test_phases_of_a_device_are_read_when_the_iteration_ends() -> None:
    marks = Marks()
    phases = DevicePhases(marks)
    for phase in (IterationPhase.FORWARD, IterationPhase.TENSOR_PARALLEL, IterationPhase.BACKWARD, IterationPhase.GRADIENTS):
        phases.enter(phase)
    assert marks.read == 0
    assert phases.computed_s == 3 + 7  # from mark 1 to 4, and from 9 to 16
    with phases.during(IterationPhase.UPDATE):
        assert marks.read == 3
    times = phases.finish_iteration()
    assert (times.forward_s, times.tensor_parallel_s, times.backward_s) == (3, 5, 7)
    assert (times.gradients_s, times.update_s) == (9 + 13, 11)
    assert phases.computed_s == 3 + 7 + 11
    phases.enter(IterationPhase.FORWARD)
    assert phases.finish_iteration().forward_s == 17
    assert phases.last is not None


def test_a_loop_that_never_ends_an_iteration_keeps_few_marks() -> None:
    phases = DevicePhases(Marks())
    for _ in range(3 * 4096):
        phases.enter(IterationPhase.FORWARD)
    assert len(phases._marks) <= 4096
    assert phases.finish_iteration().forward_s == (3 * 4096 + 1) ** 2 - 1, "none was lost"


@pytest.mark.ranks(2)
def test_stages_hand_tensors_of_a_device_over_in_host_memory(comm: AbstractCommunicator) -> None:
    parcel = Parcel(value=3, micro_batch=0, source=0, target=1)
    comm.use_device(MIXTURES["the first on the CPU"](comm.rank))
    with PretendDevice():
        channel = CommChannel(comm, ranks_of=[[0], [1]], wire=torch.bfloat16)
        if comm.rank:
            came: Any = channel.receive(parcel)
            assert (came.device, came.dtype, came.tolist()) == (DEVICE, torch.float32, [[1.0, 2.0]])
            channel.send(replace(parcel, backward=True), came.t())
        else:
            channel.send(parcel, torch.tensor([[1.0, 2.0]], dtype=torch.float32, device="cpu"))
            back: Any = channel.receive(replace(parcel, backward=True))
            assert (back.device.type, back.tolist()) == ("cpu", [[1.0], [2.0]])
        channel.flush()


def test_ranks_as_threads_go_backward_in_their_own_thread() -> None:
    """Torch's thread for a device would be one for all of them, and a rank that waits in it for another would stop both."""
    assert run_threads(lambda _: torch.autograd.is_multithreading_enabled(), size=2) == [False, False]


def test_a_network_is_followed_in_the_precision_of_its_weights_whatever_autocast_says() -> None:
    """Rounding to half precision would let samples seem to depend on each other."""
    seen: dict[int, list[torch.dtype]] = {0: [], 1: []}

    def body(comm: AbstractCommunicator) -> None:
        torch.manual_seed(3)
        network = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 6), nn.LayerNorm(6))
        network[0].register_forward_hook(lambda _, __, out: seen[comm.rank].append(out.dtype))
        with torch.autocast("cpu", torch.bfloat16):
            model = tile(network, comm, batch_size=4, sample=torch.rand(2, 6), speeds="equal", quiet=True)
            assert set(seen[comm.rank]) <= {torch.float32, torch.float64}
            assert seen[comm.rank]
            assert model(model.local(torch.ones(4, 6))).dtype is torch.bfloat16
        model.close()

    run_threads(body, size=2)


def test_a_pretended_device_refuses_what_a_card_would() -> None:
    with PretendDevice():
        x = torch.ones(3, dtype=torch.float32, device=DEVICE)
        assert isinstance(x, PretendTensor)
        assert x.device == DEVICE
        with pytest.raises(RuntimeError, match="tensors on maia:0 and on cpu"):
            x + torch.ones(3)
        y = nn.Parameter(x * 2)
        (y * x).sum().backward()  # type: ignore[no-untyped-call]
        assert y.grad is not None
        assert y.grad.device == DEVICE
        assert y.grad.to("cpu").tolist() == [1, 1, 1]
