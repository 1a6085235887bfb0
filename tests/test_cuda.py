"""What only a CUDA device can show. Every test is skipped by name where there is none.

Ranks are threads, all on the first card or some of them on the CPU, so that one card is enough. The last test
starts two processes under NCCL, which takes one rank a card, and needs two.
"""

import copy
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).parent / "tiled"))
sys.path.insert(0, str(Path(__file__).parent / "stages"))

from equal_runs import check_case
from networks import CASES
from stages_rig import CASES as STAGED
from stages_rig import AdamW, Noisy, assert_same, made, plain_run
from stages_rig import tiled as staged_model

from tatami import functions
from tatami.comm import AbstractCommunicator, Op, run_threads
from tatami.comm.transport import Transport
from tatami.parallel import DataParallel
from tatami.retiling import Retiler
from tatami.runtime.phases import DevicePhases
from tatami.testing.worlds import World
from tatami.train import Trainer, measure_speed, move, tile, whole_state_dict
from tatami.workload import Workload
from tiled_rig import simple_layout, staged

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")

CARD = "cuda:0"
MIXTURES: dict[str, Callable[[int], Any]] = {
    "card": lambda rank: CARD,  # noqa: ARG005
    "card and CPU": lambda rank: CARD if rank % 2 == 0 else "cpu",
}


def perceptron(dtype: torch.dtype = torch.float64, *, dropout: float = 0.0) -> nn.Module:
    hidden = [nn.Linear(6, 24), nn.Tanh(), nn.Dropout(dropout), nn.Linear(24, 6)]
    network = nn.Sequential(*hidden, nn.Linear(6, 24), nn.GELU(), nn.Linear(24, 4))
    generator = torch.Generator().manual_seed(3)  # its own: ranks as threads share torch's
    for parameter in network.parameters():
        nn.init.uniform_(parameter, -0.4, 0.4, generator=generator)
    return network.to(dtype)


def data(samples: int = 64, dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.rand(samples, 6, generator=generator, dtype=torch.float64).to(dtype)
    return x, x[:, :4] ** 2


@pytest.mark.threads_only
@pytest.mark.ranks(3)
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", sorted(CASES))
def test_every_kind_of_block_is_exact_on_the_card(world: World, name: str, mixture: str) -> None:
    """In double precision to 1e-10, over five steps and two re-tilings between the ranks."""
    check_case(world, CASES[name], device_of=MIXTURES[mixture])


@pytest.mark.threads_only
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("name", sorted(STAGED))
def test_pipeline_stages_on_the_card_train_as_one_machine(world: World, name: str, mixture: str) -> None:
    case, steps = STAGED[name](), 4

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        layout = staged(
            comm.size, stages=comm.size if name != "lstm" else 2, cuts=(1, 2)[: comm.size - 1 if name != "lstm" else 1]
        )
        model = staged_model(case, comm, layout.in_micro_batches(2), device=MIXTURES[mixture](comm.rank))
        optimizer = AdamW(model.parameters())
        for _ in range(steps):
            optimizer.zero_grad()
            for x, y in model.micro_batches(case.x, case.y):
                torch.autograd.backward(case.loss(model(**x), y))
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
        state = whole_state_dict(model)
        model.close()
        return {name: value.cpu() for name, value in state.items()}

    expected = plain_run(case, steps=steps)
    assert_same(world(body)[0], expected)


noisy = made(Noisy)  # once: ranks as threads share torch's generator


def test_dropout_of_stages_on_card_and_cpu_draws_what_one_machine_draws() -> None:
    def body(comm: AbstractCommunicator, *, stages: int | None) -> tuple[list[float], list[float]]:
        device = MIXTURES["card and CPU"](comm.rank) if stages else "cpu"
        layout = staged(2, stages=2, cuts=(2,), micro_batches=2) if stages else None
        x, y = data()[0], data()[1][:, :3]
        model = tile(noisy(), comm, batch_size=8, sample=x[:4], layout=layout, speeds="equal", device=device, quiet=True)
        model.generator.manual_seed(11)
        trainer = Trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss(), seed=3)
        history = trainer.fit((x, y), batch_size=8, epochs=2, validation=(x, y))
        return history.losses, [each["loss"] for each in history.validation]

    (expected,) = run_threads(partial(body, stages=None), size=1)
    for losses, validation in run_threads(partial(body, stages=2), size=2):
        assert losses == pytest.approx(expected[0], rel=1e-9)
        assert validation == pytest.approx(expected[1], rel=1e-9)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool])
def test_collectives_of_card_and_cpu(dtype: torch.dtype) -> None:
    def body(comm: AbstractCommunicator) -> None:
        device = MIXTURES["card and CPU"](comm.rank)
        mine = torch.tensor([comm.rank, 1]).to(device, dtype)
        every = torch.empty(6, dtype=dtype, device=device)
        comm.allgather(mine, every)
        assert every.tolist() == torch.tensor([0, 1, 1, 1, 2, 1]).to(dtype).tolist()
        comm.allreduce(mine, op=Op.MAX)
        assert mine.tolist() == torch.tensor([2, 1]).to(dtype).tolist()

    run_threads(body, size=3)


def test_ranks_of_one_card_go_through_the_host_with_a_hint() -> None:
    def body(comm: AbstractCommunicator) -> str:
        assert comm.use_device(CARD).transport is Transport.HOST
        return comm.describe()

    assert "share one card" in run_threads(body, size=2)[0]


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("precision", [None, "bf16-mixed", "16-mixed"])
def test_a_trainer_learns_on_the_card(precision: Any, mixture: str) -> None:
    """Under float16 with a scaler, whose decision is the same on all ranks."""

    def body(comm: AbstractCommunicator) -> tuple[list[float], float]:
        device = MIXTURES[mixture](comm.rank)
        model = tile(perceptron(torch.float32), comm, batch_size=32, speeds="equal", device=device, quiet=True)
        make = partial(torch.optim.Adam, lr=0.01)
        trainer = Trainer(model, optimizer=make, loss=nn.MSELoss(), precision=precision, gradient_clip_val=1.0)
        history = trainer.fit(data(dtype=torch.float32), batch_size=32, epochs=20)
        return history.losses, trainer._setup.updates.scaler.get_scale()  # type: ignore[union-attr]

    if precision == "16-mixed" and mixture == "card and CPU":
        pytest.skip("float16 autocast on CPU ranks is torch's, and slow")
    told = run_threads(body, size=2)
    assert told[0] == told[1]
    losses, _ = told[0]
    assert losses[-1] < 0.3 * losses[0]


def test_a_scaler_leaves_the_same_steps_out_on_all_ranks() -> None:
    def body(comm: AbstractCommunicator) -> list[float]:
        model = tile(perceptron(torch.float32), comm, batch_size=8, speeds="equal", reduction="mean", device=CARD, quiet=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        scaler = torch.amp.GradScaler("cuda", init_scale=2.0**14)
        scales = []
        for step in range(4):
            optimizer.zero_grad()
            x, y = model.local(*data(8, torch.float32))
            loss = nn.functional.mse_loss(model(x), y)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
            if step == 1 and comm.rank == 1:
                next(each.grad for each in model.parameters() if each.grad is not None).fill_(float("inf"))
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
        return scales

    told = run_threads(body, size=2)
    assert told[0] == told[1] == [2.0**14, 2.0**13, 2.0**13, 2.0**13]


@pytest.mark.parametrize("optimizer", [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW])
def test_a_move_between_card_and_cpu_is_exact_and_keeps_the_optimizers_state_there(optimizer: Any) -> None:
    def body(comm: AbstractCommunicator) -> None:
        device = MIXTURES["card and CPU"](comm.rank)
        model = tile(perceptron(), comm, batch_size=8, speeds="equal", reduction="mean", device=device, quiet=True)
        stepper = optimizer(model.parameters(), lr=0.01)
        for layout in (simple_layout([0], [1]), simple_layout([1, 0]), simple_layout([1]), simple_layout([0, 1])):
            x, y = model.local(*data(8))
            nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
            stepper.step()
            move(model, layout, optimizer=stepper)
            assert all(parameter.device == model.device for parameter in model.parameters())
            for state in stepper.state.values():
                large = [each for each in state.values() if isinstance(each, torch.Tensor) and each.dim()]
                assert all(each.device == model.device for each in large)

    run_threads(body, size=2)


def test_ranks_retile_while_they_train_on_card_and_cpu() -> None:
    def body(comm: AbstractCommunicator) -> list[float]:
        device = MIXTURES["card and CPU"](comm.rank)
        model = tile(perceptron(), comm, batch_size=64, speeds="equal", device=device, quiet=True)
        trainer = Trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss(), retile=Retiler(every=4))
        return trainer.fit(data(), batch_size=64, epochs=16).losses

    whole = perceptron()
    plain = torch.optim.SGD(whole.parameters(), lr=0.1)
    expected = []
    for _ in range(16):
        plain.zero_grad()
        loss = nn.functional.mse_loss(whole(data()[0]), data()[1])
        loss.backward()  # type: ignore[no-untyped-call]
        plain.step()
        expected.append(float(loss))
    for losses in run_threads(body, size=2):
        assert losses == pytest.approx(expected, rel=1e-9)


def test_phases_of_the_card_add_up_to_what_passed() -> None:
    def body(comm: AbstractCommunicator) -> None:
        model = tile(perceptron(), comm, batch_size=8, speeds="equal", reduction="mean", device=CARD, quiet=True)
        assert isinstance(model.phases, DevicePhases)
        x, y = model.local(*data(8))
        nn.functional.mse_loss(model(x), y).backward()  # type: ignore[no-untyped-call]
        times = model.phases.finish_iteration()
        assert min(times.forward_s, times.backward_s, times.tensor_parallel_s) > 0
        assert model.phases.computed_s == pytest.approx(times.compute_s)

    run_threads(body, size=2)


def test_the_card_is_timed_after_it_has_warmed_up() -> None:
    speed = measure_speed(Workload.mlp(64, 64, 64, samples=64), repeats=3, device=torch.device(CARD))
    assert speed.flop_per_s > 0


def test_the_memory_of_the_card_is_the_cap_of_its_processors() -> None:
    def body(comm: AbstractCommunicator) -> list[int | None]:
        model = tile(perceptron(), comm, batch_size=8, device=MIXTURES["card and CPU"](comm.rank), quiet=True)
        return [each.memory_bytes for each in model.cluster.processors]

    of_card, of_cpu = run_threads(body, size=2)[0]
    assert of_cpu is None
    assert of_card is not None
    assert 0 < of_card <= torch.cuda.get_device_properties(0).total_memory


def test_dropout_on_the_card_draws_what_the_cpu_draws() -> None:
    def body(comm: AbstractCommunicator, *, device: str) -> list[float]:
        model = tile(perceptron(dropout=0.4), comm, batch_size=8, speeds="equal", device=device, quiet=True)
        model.generator.manual_seed(7)
        trainer = Trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), loss=nn.MSELoss())
        return trainer.fit(data(), batch_size=8, epochs=2).losses

    on_card, on_cpu = (run_threads(partial(body, device=device), size=2)[0] for device in (CARD, "cpu"))
    assert on_card == pytest.approx(on_cpu, rel=1e-9)


@pytest.mark.parametrize("mixture", MIXTURES)
@pytest.mark.parametrize("wire", [None, torch.bfloat16])
def test_data_parallel_on_the_card_has_the_gradients_of_the_whole_batch(wire: Any, mixture: str) -> None:
    x, y = data(8, torch.float32)
    whole = perceptron(torch.float32)
    nn.functional.mse_loss(whole(x), y).backward()  # type: ignore[no-untyped-call]

    def body(comm: AbstractCommunicator) -> None:
        device = MIXTURES[mixture](comm.rank)
        model = DataParallel(copy.deepcopy(perceptron(torch.float32)).to(device), comm, wire=wire)
        mine, target = (each.to(device) for each in model.local(x, y))
        nn.functional.mse_loss(model(mine), target).backward()  # type: ignore[no-untyped-call]
        for parameter, expected in zip(model.parameters(), whole.parameters(), strict=True):
            assert parameter.grad is not None
            assert parameter.grad.device == parameter.device
            torch.testing.assert_close(parameter.grad.cpu(), expected.grad, rtol=0, atol=1e-6 if wire is None else 0.01)
        model.close()

    run_threads(body, size=2)


@pytest.mark.parametrize("mixture", MIXTURES)
def test_functions_take_tensors_of_the_card_and_lead_gradients_back_there(mixture: str) -> None:
    def body(comm: AbstractCommunicator) -> None:
        device = MIXTURES[mixture](comm.rank)
        comm.use_device(device)
        x = torch.full((3,), float(comm.rank + 1), device=device, requires_grad=True)
        gathered = functions.allgather(x, comm)
        assert all(each.device == torch.device(device) for each in gathered)
        sum(each.sum() for each in gathered).backward()
        assert x.grad is not None
        assert x.grad.device == torch.device(device)
        assert x.grad.tolist() == [2.0] * 3

    run_threads(body, size=2)


NCCL_SCRIPT = """
import torch, tatami
from torch import nn
comm = tatami.init()
torch.manual_seed(3)
network = nn.Sequential(nn.Linear(6, 24), nn.Tanh(), nn.Linear(24, 4)).double()
x = torch.rand(8, 6, dtype=torch.float64)
expected = torch.autograd.grad(network(x).square().mean(), list(network.parameters()))
model = tatami.tile(network, comm, batch_size=8, speeds="equal", reduction="mean", device="cuda", quiet=True)
assert model.comm.transport.name == "NCCL", model.comm.describe()
here = model.local(x)
model(here).square().mean().backward()
from tatami.train import whole_state_dict
with torch.no_grad():
    for parameter in model.parameters():
        parameter.copy_(parameter.grad)
state = whole_state_dict(model)
if comm.rank == 0:
    for value, wanted in zip(state.values(), expected):
        torch.testing.assert_close(value, wanted, rtol=1e-10, atol=1e-12)
every = torch.empty(3, device=model.device)
model.comm.allgather(torch.ones(comm.rank + 1, device=model.device), every, counts=[1, 2])
assert every.tolist() == [1.0] * 3
"""


def test_two_cards_under_torchrun_go_by_nccl(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("NCCL takes one rank a card, and there is one")
    script = tmp_path / "nccl.py"
    script.write_text(NCCL_SCRIPT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
