"""Batch normalization over ranks, against torch's over the whole batch."""

from copy import deepcopy
from typing import Any

import pytest
import torch
from torch import nn

from tatami import batch_statistics, functions
from tatami.comm import AbstractCommunicator
from tatami.errors import CommError, InputError
from tatami.parallel import MultiNodeBatchNorm
from tatami.testing.worlds import World

CHANNELS = 3
SPACES: dict[str, tuple[tuple[int, ...], type[nn.BatchNorm1d | nn.BatchNorm2d | nn.BatchNorm3d]]] = {
    "plain": ((), nn.BatchNorm1d),
    "1d": ((4,), nn.BatchNorm1d),
    "2d": ((2, 3), nn.BatchNorm2d),
    "3d": ((2, 1, 3), nn.BatchNorm3d),
}
SAMPLES = {"equal": (4, 4, 4, 4), "uneven": (4, 12, 1, 7), "some empty": (3, 0, 5, 0)}
SETTINGS: dict[str, dict[str, Any]] = {
    "as it comes": {},
    "no affine": {"affine": False},
    "no running statistics": {"track_running_stats": False},
    "mean of all batches": {"momentum": None},
    "neither": {"affine": False, "track_running_stats": False, "eps": 0.1},
}
STEPS = 3


def draw(shape: tuple[int, ...], *, seed: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def part(counts: tuple[int, ...], rank: int) -> slice:
    return slice(sum(counts[:rank]), sum(counts[: rank + 1]))


def check_against_whole_batch(
    world: World, *, space: str, counts: tuple[int, ...], settings: dict[str, Any], dtype: torch.dtype, atol: float
) -> None:
    """Training steps, whose losses are each rank's part of one sum, then an evaluation."""
    counts = counts[: world.size]
    dims, kind = SPACES[space]
    whole = kind(CHANNELS, **settings, dtype=dtype)
    if whole.affine:
        whole.weight.data = draw((CHANNELS,), seed=1, dtype=dtype)
        whole.bias.data = draw((CHANNELS,), seed=2, dtype=dtype)
    start = deepcopy(whole.state_dict())
    batches = [1 + 3 * draw((sum(counts), CHANNELS, *dims), seed=10 + i, dtype=dtype) for i in range(STEPS + 1)]
    weights = draw(tuple(batches[0].shape), seed=3, dtype=dtype)
    xs = [batch.clone().requires_grad_() for batch in batches]
    outputs = [whole(x) for x in xs[:STEPS]]
    torch.stack([(output**2 * weights).sum() for output in outputs]).sum().backward()  # type: ignore[no-untyped-call]
    whole.eval()
    evaluated = whole(batches[STEPS]).detach()

    def body(comm: AbstractCommunicator) -> dict[str, Any]:
        mine = part(counts, comm.rank)
        norm = MultiNodeBatchNorm(CHANNELS, comm, **settings, dtype=dtype)
        norm.load_state_dict(start)
        local = [batch[mine].clone().requires_grad_() for batch in batches]
        got = []
        for x in local[:STEPS]:
            output = norm(x)
            (output**2 * weights[mine]).sum().backward()
            got.append(output.detach())
        norm.eval()
        with torch.no_grad():
            got.append(norm(local[STEPS]))
        return {
            "outputs": got,
            "x": [x.grad for x in local[:STEPS]],
            "parameters": {name: each.grad for name, each in norm.named_parameters()},
            "buffers": dict(norm.named_buffers()),
        }

    ran = world(body)
    close: dict[str, Any] = {"rtol": atol, "atol": atol}
    for i, expected in enumerate([*[output.detach() for output in outputs], evaluated]):
        torch.testing.assert_close(torch.cat([each["outputs"][i] for each in ran]), expected, **close)
    for i in range(STEPS):
        torch.testing.assert_close(torch.cat([each["x"][i] for each in ran]), xs[i].grad, **close)
    for name, parameter in whole.named_parameters():
        torch.testing.assert_close(torch.stack([each["parameters"][name] for each in ran]).sum(0), parameter.grad, **close)
    for each in ran:
        torch.testing.assert_close(each["buffers"], dict(whole.named_buffers()), **close)
        assert all(torch.equal(each["buffers"][name], ran[0]["buffers"][name]) for name in each["buffers"])


@pytest.mark.parametrize("samples", sorted(SAMPLES))
@pytest.mark.parametrize("space", sorted(SPACES))
def test_it_is_that_of_the_whole_batch(world: World, space: str, samples: str) -> None:
    check_against_whole_batch(world, space=space, counts=SAMPLES[samples], settings={}, dtype=torch.float64, atol=1e-10)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("settings", sorted(SETTINGS))
def test_all_settings(world: World, settings: str) -> None:
    check_against_whole_batch(world, space="2d", counts=(0, 4, 3), settings=SETTINGS[settings], dtype=torch.float64, atol=1e-10)


@pytest.mark.ranks(1, 3)
@pytest.mark.threads_only
@pytest.mark.parametrize("elements", [1, 25])
def test_a_large_batch_is_gone_through_in_parts(world: World, monkeypatch: pytest.MonkeyPatch, elements: int) -> None:
    """Of one sample and of two, the last of which may be of one."""
    monkeypatch.setattr(batch_statistics, "_PART_ELEMENTS", elements)
    monkeypatch.setattr(batch_statistics, "_FEW_ELEMENTS", 0)
    check_against_whole_batch(world, space="1d", counts=SAMPLES["uneven"], settings={}, dtype=torch.float64, atol=1e-9)


def test_batches_small_and_large_before_one_backward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's own layer takes the small ones, and its backward pass refuses running statistics that have changed."""
    monkeypatch.setattr(batch_statistics, "_FEW_ELEMENTS", 100)
    batches = [draw((samples, CHANNELS, 3), seed=samples, dtype=torch.float64) for samples in (4, 40, 5, 50)]
    alone = batch_statistics.SharedBatch(sums=None, name="layer", channels=CHANNELS)
    found = []
    for is_plain in (True, False):
        layer = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
        outputs = [layer(x) if is_plain else batch_statistics.run_layer(layer, x, batch=lambda: alone) for x in batches]
        torch.autograd.backward([each.pow(3).mean() for each in outputs])
        found.append([*(parameter.grad for parameter in layer.parameters()), *layer.buffers()])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


@pytest.mark.ranks(2, 4)
def test_single_precision(world: World) -> None:
    check_against_whole_batch(world, space="2d", counts=SAMPLES["uneven"], settings={}, dtype=torch.float32, atol=1e-5)


@pytest.mark.ranks(2)
def test_the_references_case_that_was_wrong(world: World) -> None:
    """ChainerMN with 4 and 12 samples: outputs off by 0.3, and other running variances on each rank."""
    x = draw((16, CHANNELS), seed=5, dtype=torch.float32) + torch.arange(16.0).view(-1, 1)
    whole = nn.BatchNorm1d(CHANNELS)
    expected = whole(x).detach()

    def body(comm: AbstractCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
        norm = MultiNodeBatchNorm(CHANNELS, comm)
        output = norm(x[:4] if comm.rank == 0 else x[4:]).detach()
        assert norm.running_var is not None
        return output, norm.running_var

    ran = world(body)
    assert (torch.cat([output for output, _ in ran]) - expected).abs().max() < 1e-6
    for _, variance in ran:
        torch.testing.assert_close(variance, whole.running_var, rtol=1e-6, atol=0)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-3), (torch.float64, 1e-12)])
def test_a_mean_far_from_zero_keeps_its_variance(comm: AbstractCommunicator, dtype: torch.dtype, rtol: float) -> None:
    """The mean of squares minus the square of the mean would leave nothing of it in the precision of the values."""
    x = 4096 + draw((12, CHANNELS), seed=6, dtype=torch.float64)
    expected = x.var(0)
    norm = MultiNodeBatchNorm(CHANNELS, comm, momentum=1.0, dtype=dtype)
    norm(x.to(dtype)[part((3, 7, 2), comm.rank)])
    assert norm.running_var is not None
    variance = norm.running_var.double()
    torch.testing.assert_close(variance, expected, rtol=rtol, atol=0)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("parameters", [torch.float32, None])
def test_half_precision_normalizes_in_single(world: World, dtype: torch.dtype, parameters: torch.dtype | None) -> None:
    x = draw((10, CHANNELS, 4), seed=7, dtype=dtype)
    expected = nn.BatchNorm1d(CHANNELS)(x.float())

    def body(comm: AbstractCommunicator) -> torch.Tensor:
        norm = MultiNodeBatchNorm(CHANNELS, comm).to(parameters or dtype)
        output: torch.Tensor = norm(x[part((3, 7), comm.rank)])
        output.sum().backward()  # type: ignore[no-untyped-call]
        assert output.dtype == dtype
        assert norm.weight.grad is not None
        assert norm.weight.grad.dtype == norm.weight.dtype
        return output.detach()

    torch.testing.assert_close(torch.cat(world(body)), expected.to(dtype), rtol=1e-2, atol=1e-2)


@pytest.mark.ranks(2, 3)
def test_a_gradient_penalty_through_it(world: World) -> None:
    counts = (4, 1, 3)[: world.size]
    x = draw((sum(counts), CHANNELS), seed=8, dtype=torch.float64)
    weights = draw(tuple(x.shape), seed=9, dtype=torch.float64)
    whole = nn.BatchNorm1d(CHANNELS, dtype=torch.float64)
    leaf = x.clone().requires_grad_()
    (slope,) = torch.autograd.grad((whole(leaf) ** 3 * weights).sum(), leaf, create_graph=True)
    (slope**2).sum().backward()  # type: ignore[no-untyped-call]

    def body(comm: AbstractCommunicator) -> tuple[torch.Tensor, torch.Tensor | None]:
        mine = part(counts, comm.rank)
        norm = MultiNodeBatchNorm(CHANNELS, comm, dtype=torch.float64)
        local = x[mine].clone().requires_grad_()
        (slope,) = functions.grad((norm(local) ** 3 * weights[mine]).sum(), local, create_graph=True)
        functions.backward((slope**2).sum())
        assert local.grad is not None
        return local.grad, norm.weight.grad

    ran = world(body)
    torch.testing.assert_close(torch.cat([grad for grad, _ in ran]), leaf.grad, rtol=1e-10, atol=1e-10)
    share = torch.stack([grad for _, grad in ran if grad is not None]).sum(0)
    torch.testing.assert_close(share, whole.weight.grad, rtol=1e-10, atol=1e-10)


def test_no_samples_at_all_change_nothing(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(CHANNELS, comm)
    x = torch.zeros(0, CHANNELS, 2, requires_grad=True)
    output = norm(x)
    output.sum().backward()
    assert output.shape == (0, CHANNELS, 2)
    assert [each.tolist() for each in norm.buffers()] == [[0] * CHANNELS, [1] * CHANNELS, 1]
    assert x.grad is not None
    assert norm.weight.grad is not None
    assert not norm.weight.grad.any()


def test_bad_input(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(CHANNELS, comm)
    with pytest.raises(InputError, match=rf"on rank {comm.rank}: input has the shape \(4, 2\); give \(samples, 3, \.\.\.\)"):
        norm(torch.zeros(4, 2))
    with pytest.raises(InputError, match=r"input has the shape \(3,\)"):
        norm(torch.zeros(3))
    with pytest.raises(InputError, match="all ranks together have one value for each channel, which has no variance"):
        norm(torch.zeros(int(comm.rank == 0), CHANNELS))
    with pytest.raises(InputError, match="num_features must be at least 1, not 0"):
        MultiNodeBatchNorm(0, comm)


@pytest.mark.ranks(2)
def test_other_channels_on_another_rank(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(2 + comm.rank, comm)
    with pytest.raises(CommError, match=f"rank {1 - comm.rank} has {3 - comm.rank} channels and rank {comm.rank} has"):
        norm(torch.zeros(4, 2 + comm.rank))


def test_its_state_and_its_copies(comm: AbstractCommunicator) -> None:
    norm = MultiNodeBatchNorm(CHANNELS, comm)
    assert list(norm.state_dict()) == list(nn.BatchNorm2d(CHANNELS).state_dict())
    twin = deepcopy(norm)
    assert twin.comm is comm
    assert twin.weight is not norm.weight
