"""Gradients of replicas of one rank, summed in buckets, which leave while the backward pass computes."""

from collections.abc import Callable
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import nn

import tatami.runtime.overlapped_sums
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, TrainingError
from tatami.gradients import bucketed_sums, buckets
from tatami.tiling import Layout
from tatami.tiling.overlap import LEAST_BYTES
from tatami.train import TiledModel, move, tile
from tatami.workload import WIRES
from tiled_rig import assert_close, simple_layout

pytestmark = pytest.mark.ranks(2, 3)

STEPS, SAMPLES = 6, 8


@pytest.fixture(autouse=True)
def _of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tatami.runtime.overlapped_sums, "LEAST_BYTES", 0)
    monkeypatch.setattr(bucketed_sums, "LEAST_BYTES", 0)


@pytest.fixture
def _are_small(_of_any_size: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the gradients of these networks are."""
    monkeypatch.setattr(bucketed_sums, "LEAST_BYTES", LEAST_BYTES)


def fill(network: nn.Module) -> nn.Module:
    """Threads share torch's own generator."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.normal_(0.0, 0.5, generator=generator)
    return network


class Branching(nn.Module):
    """One branch has part in every other loss only."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.one, self.other = (nn.Linear(5, 5, dtype=torch.float64) for _ in range(3))
        self.takes_other = False
        fill(self)

    def forward(self, x: torch.Tensor) -> Any:
        self.hidden = torch.tanh(self.trunk(x))
        return self.other(self.hidden) if self.takes_other else self.one(self.hidden)


def perceptron() -> nn.Module:
    return fill(nn.Sequential(nn.Linear(5, 6, dtype=torch.float64), nn.ReLU(), nn.Linear(6, 5, dtype=torch.float64)))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, y = torch.randn(2, SAMPLES, 5, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
    return x, y


def flat(size: int) -> Layout:
    return simple_layout(
        *([rank] for rank in range(size)), widths=[2 * (rank + 1) / (size * (size + 1)) for rank in range(size)]
    )


def train(
    model: nn.Module,
    parts: Callable[[torch.Tensor, torch.Tensor], list[tuple[torch.Tensor, torch.Tensor, float]]],
    inner: Branching,
) -> None:
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    for step in range(STEPS):
        inner.takes_other = step % 2 == 1
        optimizer.zero_grad()
        for x, y, scale in parts(*batch(step)):
            torch.autograd.backward(scale * nn.functional.mse_loss(model(x), y))
        optimizer.step()


def expected() -> dict[str, torch.Tensor]:
    plain = Branching()
    train(plain, lambda x, y: [(x, y, 1.0)], plain)
    return plain.state_dict()


def tiled(comm: AbstractCommunicator) -> tuple[TiledModel, Branching]:
    model = tile(Branching(), comm, batch_size=SAMPLES, layout=flat(comm.size), speeds="equal", reduction="mean", quiet=True)
    inner = model.module
    assert isinstance(inner, Branching)
    return model, inner


@pytest.mark.ranks(2, 3, 4)
def test_weights_are_those_of_one_machine_though_a_layer_is_left_out_of_some_steps(comm: AbstractCommunicator) -> None:
    model, inner = tiled(comm)
    train(model, lambda x, y: [(*model.local(x, y), 1.0)], inner)
    assert model._overlapped is not None
    assert model._overlapped._buckets is not None
    found = model.module.state_dict()
    model.close()
    assert_close(found, expected(), what="weights")


def test_gradients_accumulate(comm: AbstractCommunicator) -> None:
    """What is equal on all ranks is not summed again."""
    model, inner = tiled(comm)
    train(model, lambda x, y: [(*model.local(x, y), 0.25), (*model.local(x, y), 0.75)], inner)
    found = model.module.state_dict()
    assert_close(found, expected(), what="weights")


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.usefixtures("_are_small")
def test_few_small_gradients_of_one_host_are_put_aside_at_once(comm: AbstractCommunicator) -> None:
    """Hooks of parameters are not called in a backward pass that begins at the output."""
    model, inner = tiled(comm)
    called = Mock(wraps=model._gradients._on_gradient)
    model._gradients._on_gradient = called  # type: ignore[method-assign]
    train(model, lambda x, y: [(*model.local(x, y), 0.25), (*model.local(x, y), 0.75)], inner)
    called.assert_not_called()
    assert_close(model.module.state_dict(), expected(), what="weights")
    hooked: list[torch.Tensor] = []
    inner.trunk.bias.register_hook(hooked.append)  # type: ignore[no-untyped-call] # sees the sum, so hooks are called again
    model.zero_grad()
    x, y = model.local(*batch(0))
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    called.assert_called()
    torch.testing.assert_close(hooked[0], inner.trunk.bias.grad, rtol=0.0, atol=0.0)


@pytest.mark.usefixtures("_are_small")
def test_what_comes_after_a_pass_that_was_broken_off_is_summed(comm: AbstractCommunicator) -> None:
    """Also a penalty by itself, without a forward pass before it. What was there before the broken pass is there again at
    once, and does not come back when the user has dropped it."""
    model, inner = tiled(comm)
    x, y = model.local(*batch(0))
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    before = {name: each.grad.clone() for name, each in inner.named_parameters() if each.grad is not None}
    loss = nn.functional.mse_loss(model(x), y)
    inner.hidden.register_hook(_fail)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError, match="broken off"):
        torch.autograd.backward(loss)
    for name, gradient in before.items():
        assert torch.equal(inner.get_parameter(name).grad, gradient), name  # type: ignore[arg-type]
    model.zero_grad()
    model(x)
    assert all(parameter.grad is None for parameter in model.parameters())
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    loss = nn.functional.mse_loss(model(x), y)
    inner.hidden.register_hook(_fail)  # type: ignore[no-untyped-call]
    with pytest.raises(KeyError, match="broken off"):
        torch.autograd.backward(loss)
    weight = inner.trunk.weight
    torch.autograd.backward((comm.rank + 1) * weight.square().sum() / 2)
    shares = [len(each) / SAMPLES for each in comm.allgather_object(x)]
    mean = sum(share * (rank + 1) for rank, share in enumerate(shares))
    torch.testing.assert_close(weight.grad, before["trunk.weight"] + mean * weight.detach(), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(inner.one.weight.grad, before["one.weight"], rtol=1e-12, atol=1e-12)


def test_a_model_that_is_moved_to_shared_units_and_back_goes_on(comm: AbstractCommunicator) -> None:
    model = tile(perceptron(), comm, batch_size=SAMPLES, layout=flat(comm.size), speeds="equal", reduction="mean", quiet=True)
    plain, are_used = perceptron(), []
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (model, plain)]
    for step in range(9):
        if step in (3, 6):
            move(model, simple_layout(range(comm.size)) if step == 3 else flat(comm.size), optimizer=optimizers[0])
        for each, optimizer, (x, y) in zip((model, plain), optimizers, (model.local(*batch(step)), batch(step)), strict=True):
            optimizer.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(each(x), y))
            optimizer.step()
        are_used.append(model._overlapped is not None and model._overlapped._buckets is not None)
    assert are_used[:3] == are_used[6:] == [True] * 3
    assert_close(model.module.state_dict(), plain.state_dict(), what="weights")


@pytest.mark.parametrize("passes", [0, 1, 2])
def test_ranks_that_were_given_batches_of_different_sizes_are_told(comm: AbstractCommunicator, passes: int) -> None:
    """Before, when, and after they learn the order of gradients."""
    model, _ = tiled(comm)
    for step in range(passes):
        x, y = batch(step)
        torch.autograd.backward(nn.functional.mse_loss(model(model.local(x)), model.local(y)))
    x, y = (each[: SAMPLES - (comm.rank == 1)] for each in batch(0))
    with pytest.raises(InputError, match="different"):
        torch.autograd.backward(nn.functional.mse_loss(model(model.local(x)), model.local(y)))


def test_a_pass_that_is_broken_off_ends_the_run_once_buckets_have_left(
    comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While the ranks still learn the order of gradients nothing has left, and the pass can be repeated."""
    monkeypatch.setattr(tatami.runtime.overlapped_sums, "usual_bucket_bytes", lambda *_: 8)
    model, inner = tiled(comm)
    x, y = model.local(*batch(0))
    found = []
    for step in range(5):
        model.zero_grad()
        loss = nn.functional.mse_loss(model(x), y)
        if step in (1, 4):
            inner.hidden.register_hook(_fail)  # type: ignore[no-untyped-call]
            with pytest.raises(KeyError, match="broken off"):
                torch.autograd.backward(loss)
            continue
        torch.autograd.backward(loss)
        found.append([parameter.grad for parameter in inner.trunk.parameters()])
    for before, after in zip(found[0], found[1], strict=True):
        torch.testing.assert_close(after, before, rtol=1e-12, atol=1e-12)
    with pytest.raises(TrainingError, match=f"the last backward pass on rank {comm.rank} was broken off"):
        model(x)


def _fail(_: torch.Tensor) -> None:
    raise KeyError("broken off")


@pytest.mark.ranks(2)
def test_nobody_may_watch_links_or_round_meanwhile(comm: AbstractCommunicator) -> None:
    """Then gradients travel after the pass, in messages whose times are known."""
    model, _ = tiled(comm)
    model.link_times.begin()
    x, y = model.local(*batch(0))
    torch.autograd.backward(nn.functional.mse_loss(model(x), y))
    assert model._overlapped is not None
    assert model._overlapped._buckets is None
    assert model.link_times.sent_s


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("wire", WIRES)
def test_half_precision_leaves_early_and_is_rounded_twice(comm: AbstractCommunicator, wire: str) -> None:
    """To the bit: each rank's part as it leaves, and their sum, which was added up in single precision."""
    half = {"bfloat16": torch.bfloat16, "float16": torch.float16}[wire]
    model = tile(
        Branching(), comm, batch_size=SAMPLES, layout=flat(comm.size), speeds="equal", reduction="mean", wire=wire, quiet=True
    )
    for step in range(4):
        x, y = model.local(*batch(step))
        plain = Branching()
        for each in (model, plain):
            each.zero_grad()
            torch.autograd.backward(nn.functional.mse_loss(each(x), y))
        assert model._overlapped is not None
        assert model._overlapped._buckets is not None
        own = [each.grad * (len(x) / SAMPLES) for each in plain.parameters() if each.grad is not None]
        expected = [sum(part.to(half).float() for part in parts) for parts in zip(*comm.allgather_object(own), strict=True)]
        found = [each.grad for each in model.parameters() if each.grad is not None]
        assert all(torch.equal(one, other.to(half).double()) for one, other in zip(found, expected, strict=True))


@pytest.mark.parametrize("wire", [None, torch.bfloat16, torch.float16])
def test_buckets_carry_numbers_of_samples_that_no_float_has(comm: AbstractCommunicator, wire: torch.dtype | None) -> None:
    bucket = buckets.BucketSet(comm, [torch.zeros(3)], bucket_bytes=1 << 20, wire=wire, algorithm=None, has_numbers=True)
    for number in (0, 2**24 + 1, 10**12 - 1):
        bucket.begin_rest(number + comm.rank)
        bucket.wait()
        assert bucket.numbers() == [number + rank for rank in range(comm.size)]
    bucket.close()


@pytest.mark.parametrize(
    ("hosts", "tuned", "gradients", "expected"),
    [("ab", None, 16 << 20, 2 << 20), ("ab", 3 << 20, 1 << 20, 3 << 20), ("aa", None, 1 << 20, 4 << 20)],
)
def test_buckets_between_hosts_are_a_part_of_all_gradients(
    monkeypatch: pytest.MonkeyPatch, hosts: str, tuned: int | None, gradients: int, expected: int
) -> None:
    monkeypatch.setattr(buckets, "tuned_bucket_bytes", lambda _: tuned)
    comm = Mock(hosts=tuple(hosts))
    assert buckets.usual_bucket_bytes(comm, [torch.empty(gradients // 4, device="meta")]) == expected
