"""Batch normalization in tiled networks: over rows that are not samples, by settings that change, and with local statistics."""

import copy
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equal_runs import check_equal, loss_of
from torch import nn

from tatami.batch_statistics import NormSettings, SharedBatch, normalize
from tatami.comm.base import AbstractCommunicator
from tatami.comm.short_sum import ShortSum, Vector
from tatami.errors import CommError, InputError
from tatami.testing.worlds import World
from tatami.train import TiledModel, find_blocks, tile, whole_state_dict, workload_of
from tiled_rig import simple_layout, some_layouts, whole_gradients

pytestmark = pytest.mark.ranks(2, 3)

FEATURES, CHANNELS, TOKENS, SAMPLES, STEPS = 4, 5, 3, 11, 3


class Rows(nn.Module):
    """Normalizes the rows that `rows` makes of (samples, tokens, channels), and gives (samples, outputs)."""

    def __init__(self, rows: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(FEATURES, CHANNELS), nn.BatchNorm1d(CHANNELS), nn.Linear(CHANNELS, 2)
        self.rows = rows

    def forward(self, x: torch.Tensor) -> Any:
        return self.down(torch.tanh(self.rows(self.norm, self.up(x)))).mean(1)


def tokens(norm: nn.Module, h: torch.Tensor) -> Any:
    return norm(h.flatten(0, 1)).view(h.shape)


def views(norm: nn.Module, h: torch.Tensor) -> torch.Tensor:
    one, other = norm(torch.cat((h[:, 0], h[:, 1].sin()))).chunk(2)
    return torch.stack((one, other), 1)


def views_one_by_one(norm: nn.Module, h: torch.Tensor) -> torch.Tensor:
    return torch.stack([norm(view) for view in torch.cat((h[:, 0], h[:, 1].sin())).chunk(2)], 1)


def chosen(norm: nn.Module, h: torch.Tensor) -> torch.Tensor:
    mask = h.detach()[..., 0] > 0.2
    result = torch.zeros_like(h)
    result[mask] = norm(h[mask])
    return result


def draw(step: int) -> torch.Tensor:
    return torch.randn(SAMPLES - step, TOKENS, FEATURES, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1)


def check_norms(
    world: World,
    network: nn.Module,
    draw: Callable[[int], torch.Tensor],
    *,
    change: Callable[[nn.Module, int], object] = lambda _, __: None,
) -> None:
    batches = [(draw(step),) for step in range(STEPS)]
    make = partial(copy.deepcopy, network)
    check_equal(world, make, batches, optimizer=sgd, change=change, options=lambda _: {"sample": draw(0)})


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2, 3, 4)
@pytest.mark.parametrize("rows", [tokens, views, views_one_by_one, chosen])
def test_rows_are_counted_not_samples(world: World, rows: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    torch.manual_seed(0)
    check_norms(world, Rows(rows).double(), draw)


class Convolutions(nn.Module):
    """A pair that is split, with batch normalization inside of it and after it."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(2, 5, 3, bias=False), nn.Conv2d(5, 4, 1, bias=False)
        self.norm, self.other = nn.BatchNorm2d(5), nn.BatchNorm2d(4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.other(self.b(torch.tanh(self.norm(self.a(x)))))


def draw_images(step: int) -> torch.Tensor:
    return 2 + torch.randn(SAMPLES, 2, 4, 4, generator=torch.Generator().manual_seed(step), dtype=torch.float64)


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("changed", [{"momentum": 0.5}, {"eps": 0.3}, {"momentum": None}])
def test_settings_that_change_while_training_are_those_of_the_layer(world: World, changed: dict[str, Any]) -> None:
    def change(module: nn.Module, step: int) -> None:
        for name in ("norm", "other") if step == 1 else ():
            vars(module.get_submodule(name)).update(changed)

    torch.manual_seed(0)
    check_norms(world, Convolutions().double(), draw_images, change=change)


class Ghosts(nn.Module):
    """Normalizes eight samples at a time, as they are cut out or copied."""

    def __init__(self, *, copied: bool) -> None:
        super().__init__()
        self.up, self.norm, self.copied = nn.Linear(FEATURES, CHANNELS), nn.BatchNorm1d(CHANNELS), copied

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.norm(part.clone() if self.copied else part) for part in self.up(x).split(8)])


@pytest.mark.parametrize(
    ("copied", "samples", "error", "message"),
    [
        (False, (8, 8, 8), InputError, "layer norm normalizes 8 rows that are cut out of the 8 samples of this rank"),
        (False, (8, 24, 8), InputError, "layer norm normalizes 8 rows that are cut out of the (8|24) samples of this rank"),
        (True, (8, 24, 8), CommError, "layer norm, (forward|backward) pass, and .* must be called equally often"),
    ],
)
def test_ghost_batch_normalization_is_refused_by_name(
    comm: AbstractCommunicator, copied: bool, samples: tuple[int, ...], error: type[Exception], message: str
) -> None:
    own = samples[: comm.size]
    x = torch.randn(sum(own), FEATURES, generator=torch.Generator().manual_seed(0))
    layout = simple_layout(*([rank] for rank in range(comm.size)), widths=[each / sum(own) for each in own])
    model = tile(Ghosts(copied=copied), comm, batch_size=len(x), speeds="equal", layout=layout, reduction="mean", quiet=True)
    with pytest.raises(error, match=message):
        loss_of(model(model.local(x))).backward()  # type: ignore[no-untyped-call]


def test_gradients_of_each_ranks_own_mean_loss(world: World) -> None:
    """Weighed by `loss_weight` they are those of the mean over the whole batch, on ranks without samples as well."""
    counts = (3, 0, 5)[-world.size :]
    x = draw_images(0)[: sum(counts)]
    slopes = torch.randn(x.shape, generator=torch.Generator().manual_seed(7), dtype=torch.float64)
    whole = nn.BatchNorm2d(2).double()
    leaf = x.clone().requires_grad_()
    (whole(leaf) * slopes).sum(dim=(1, 2, 3)).mean().backward()

    def body(comm: AbstractCommunicator) -> tuple[torch.Tensor, torch.Tensor]:
        here = slice(sum(counts[: comm.rank]), sum(counts[: comm.rank + 1]))
        share = counts[comm.rank] / sum(counts)
        own = x[here].clone().requires_grad_()
        weight, bias = (each.detach().clone().requires_grad_() for each in whole.parameters())
        batch = SharedBatch(sums=ShortSum(comm), name="a", replica=comm.rank, replicas=comm.size, channels=2, loss_weight=share)
        output = normalize(own, weight, bias, settings=NormSettings(None, None, 0.0, whole.eps), batch=batch)
        ((output * slopes[here]).sum() / max(counts[comm.rank], 1)).backward()  # type: ignore[no-untyped-call]
        assert own.grad is not None
        return own.grad * share, torch.stack((weight.grad, bias.grad)) * share  # type: ignore[arg-type]

    ran = world(body)
    torch.testing.assert_close(torch.cat([own for own, _ in ran]), leaf.grad, rtol=1e-10, atol=1e-12)
    both = torch.stack([each.grad for each in whole.parameters() if each.grad is not None])
    torch.testing.assert_close(torch.stack([share for _, share in ran]).sum(0), both, rtol=1e-10, atol=1e-12)


@pytest.mark.threads_only
def test_one_sum_for_each_layer_and_direction(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the traffic describes; in a single replica of all ranks none."""
    ran: Counter[int] = Counter()
    run = ShortSum.run

    def counted(self: ShortSum, label: str) -> Vector:
        ran[id(self)] += 1
        return run(self, label)

    monkeypatch.setattr(ShortSum, "run", counted)
    network = Convolutions()

    def body(comm: AbstractCommunicator) -> None:
        for layout in some_layouts(comm.size):
            model = tile(
                network, comm, batch_size=SAMPLES, sample=draw_images(0).float(), speeds="equal", layout=layout,
                reduction="mean", quiet=True,
            )  # fmt: skip
            loss_of(model(model.local(draw_images(0).float()))).backward()  # type: ignore[no-untyped-call]
            assert ran[id(model._rank.sums)] == len(model.traffic.statistics)
            assert len(model.traffic.statistics) == (4 if len(layout.replicas) > 1 or len(layout.processors) < comm.size else 0)

    world(body)


def test_local_statistics_are_those_of_each_replica_and_running_ones_are_equal_everywhere(world: World) -> None:
    """Outputs are those of the plain network on each replica's samples; running statistics the weighed mean of theirs."""
    torch.manual_seed(0)
    network = Convolutions().double()
    x = draw_images(0)
    replicas = [[0], [1]] if world.size == 2 else [[0], [1, 2]]
    parts = (x[:3], x[3:])
    copies = [copy.deepcopy(network) for _ in parts]
    expected = [each(part) for each, part in zip(copies, parts, strict=True)]
    grads = [
        torch.autograd.grad(loss_of(output) * (len(part) / len(x)), list(each.parameters()))
        for output, part, each in zip(expected, parts, copies, strict=True)
    ]
    gradients = {name: sum(of_parts) for (name, _), *of_parts in zip(network.named_parameters(), *grads, strict=True)}
    running = {
        name: sum(len(part) / len(x) * each.get_buffer(name) for each, part in zip(copies, parts, strict=True))
        for name, buffer in network.named_buffers()
        if buffer.dim()
    }

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor] | None:
        layout = simple_layout(*replicas, widths=[3 / 11, 8 / 11])
        model: TiledModel = tile(
            network, comm, batch_size=len(x), sample=x, speeds="equal", layout=layout, reduction="mean", batch_norm="local"
        )
        assert model.workload.batch_statistics == ()
        output = model(model.local(x))
        index = next(number for number, members in enumerate(replicas) if comm.rank in members)
        torch.testing.assert_close(output.detach(), expected[index].detach(), rtol=1e-10, atol=1e-12)
        loss_of(output).backward()  # type: ignore[no-untyped-call]
        for name, grad in whole_gradients(model).items():
            torch.testing.assert_close(grad, gradients[name], rtol=1e-9, atol=1e-11)
        other = model.module.get_buffer("other.running_var")
        first = comm.bcast_object(other)
        assert torch.equal(first, other)
        return whole_state_dict(model)

    state = world(body)[0]
    assert state is not None
    for name, buffer in running.items():
        torch.testing.assert_close(state[name], buffer, rtol=1e-10, atol=1e-12)
    assert workload_of(network, find_blocks(network, sample=x), samples=11, local_statistics=True).batch_statistics == ()


@pytest.mark.ranks(2)
def test_local_statistics_are_named_as_inexact(comm: AbstractCommunicator, capfd: pytest.CaptureFixture[str]) -> None:
    tile(Convolutions(), comm, batch_size=4, speeds="equal", batch_norm="local")
    if comm.rank == 0:
        assert "batch normalization takes each replica's own statistics (not exact)" in capfd.readouterr().out
    with pytest.raises(InputError, match="batch_norm must be 'global' or 'local', not 'ghost'"):
        tile(Convolutions(), comm, batch_size=4, batch_norm="ghost")  # type: ignore[arg-type]
