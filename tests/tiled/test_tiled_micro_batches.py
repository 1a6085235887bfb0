"""A replica may compute its samples in parts, one after another: gradients, draws and losses are those of one machine."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_fit, in_batches, plain_fit
from torch import nn

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, PlanError, TrainingError
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.train import History, TiledModel, Trainer, move, tile, whole_state_dict
from tiled_rig import simple_layout, some_layouts, tiled

pytestmark = pytest.mark.threads_only

SIZES = (9, 9, 2)
"""The last batch has fewer samples than there are micro-batches."""


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 5), nn.LayerNorm(5), nn.Dropout(0.2), nn.Linear(5, 3)]
    return nn.Sequential(*layers).double()


def in_micro_batches(layout: Layout) -> Layout:
    """The first replica in 3 micro-batches, the second in 1, the third in 2, and so on."""
    return Layout(replicas=tuple(replace(each, micro_batches=(3, 1, 2)[i % 3]) for i, each in enumerate(layout.replicas)))


def batches() -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(5)
    for size in SIZES:
        yield torch.randn(size, 4, generator=generator, dtype=torch.float64), torch.randint(3, (size,), generator=generator)


def loss_of(output: torch.Tensor, y: torch.Tensor, model: nn.Module, reduction: str) -> torch.Tensor:
    """A mean has a penalty on weights as well."""
    loss = F.cross_entropy(output, y, reduction=reduction)
    return loss if reduction == "sum" else loss + 0.1 * sum(each.square().sum() for each in model.parameters())


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{what}: {n}: {m}")  # type: ignore[misc]


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "p"):
            vars(module)["p"] = 0.0


def clamped(parameter: nn.Parameter) -> None:
    """A hook that is not linear, so it must see the gradient of the whole batch."""
    parameter.register_hook(lambda grad: grad.clamp(-0.05, 0.05))  # type: ignore[no-untyped-call]


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loop_over_micro_batches_is_that_over_batches(world: World, reduction: str) -> None:
    plain, built = network(), network()
    torch.manual_seed(9)
    clamped(list(plain.parameters())[-1])
    optimizer, losses = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9), []
    for x, y in batches():
        optimizer.zero_grad()
        loss = loss_of(plain(x), y, plain, reduction)
        loss.backward()  # type: ignore[no-untyped-call]
        losses.append(F.cross_entropy(plain.eval()(x), y, reduction=reduction).item())
        plain.train()
        optimizer.step()
    torch.manual_seed(9)

    def body(comm: AbstractCommunicator) -> None:
        for layout in some_layouts(comm.size):
            model = tiled(built, comm, layout=in_micro_batches(layout), batch_size=SIZES[0], reduction=reduction)
            clamped(list(model.parameters())[-1])
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
            for (x, y), expected in zip(batches(), losses, strict=True):
                optimizer.zero_grad()
                seen, parts = [], 0
                for here_x, here_y in model.micro_batches(x, y):
                    loss = loss_of(model(here_x), here_y, model, reduction)
                    loss.backward()  # type: ignore[no-untyped-call]
                    parts += 1
                    with torch.no_grad():
                        seen.append(F.cross_entropy(model.eval()(here_x), here_y, reduction=reduction))
                    model.train()
                replica = None if model.tile is None else model.layout.replicas[model.tile.replica]
                assert parts == (1 if replica is None else len(replica.micro_batch_sizes(model.local_span_size[0])))
                if not any(len(each.processors) > 1 for each in layout.replicas) or reduction == "sum":
                    assert model.global_loss(seen) == pytest.approx(expected, rel=1e-12)
                optimizer.step()
            assert_equal(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), f"{layout}")

    world(body)


class TimeFirst(nn.Module):
    """Its dropouts see a tensor whose first axis is not the outermost in memory, which a single sample does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3)
        self.dropouts = nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.2)])

    def forward(self, x: torch.Tensor) -> Any:
        y = torch.tanh(self.first(x).transpose(0, 1))
        for dropout in self.dropouts:
            y = torch.tanh(dropout(y))
        return self.last(y.mean(0))


@pytest.mark.ranks(1, 2, 3)
def test_single_samples_of_a_transposed_tensor_draw_as_in_the_batch(world: World) -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(7, 5, 4, generator=generator, dtype=torch.float64), torch.randint(3, (7,), generator=generator)

    @one_at_a_time
    def made() -> nn.Module:
        torch.manual_seed(1)
        return TimeFirst().double()

    plain = made()
    torch.manual_seed(9)
    F.cross_entropy(plain(x), y).backward()  # type: ignore[no-untyped-call]
    expected = {name: parameter.grad for name, parameter in plain.named_parameters()}

    def body(comm: AbstractCommunicator) -> None:
        replicas = tuple(
            Replica(width=1 / comm.size, processors=(f"p{r}",), heights=(1.0,), micro_batches=7) for r in range(comm.size)
        )
        model = tile(
            made(),
            comm,
            layout=Layout(replicas=replicas),
            batch_size=7,
            sample=x[:3],
            reduction="mean",
            speeds="equal",
            quiet=True,
        )
        model.generator.manual_seed(9)
        for here_x, here_y in model.micro_batches(x, y):
            assert len(here_x) == 1
            F.cross_entropy(model(here_x), here_y).backward()  # type: ignore[no-untyped-call]
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(parameter.grad, expected[name.removeprefix("module.")], rtol=1e-12, atol=1e-12)

    world(body)


@pytest.mark.ranks(1, 2, 3)
def test_the_trainer_computes_micro_batches_and_counts_targets_over_all_of_them(world: World) -> None:
    plain, built = network().eval(), network().eval()
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(20, 4, generator=generator, dtype=torch.float64)
    y = torch.randint(3, (20,), generator=generator)
    y[::3] = -100
    make = functools.partial(torch.optim.SGD, lr=0.05)
    batches = in_batches(9, x, y)
    expected = plain_fit(plain, batches, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer=make)

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        without_dropout(model)
        trainer = Trainer(model, optimizer=make, loss=nn.CrossEntropyLoss())
        return trainer.fit((x, y), batch_size=9, epochs=1, shuffle=False)

    def layouts(size: int) -> list[Layout]:
        return [in_micro_batches(layout) for layout in some_layouts(size)]

    check_fit(world, built, expected, fit, layouts=layouts, rel=1e-12, batch_size=9)


@pytest.mark.ranks(1, 2)
def test_what_is_wrong_with_micro_batches_is_refused(comm: AbstractCommunicator) -> None:
    x, y = next(batches())
    layout = in_micro_batches(some_layouts(comm.size)[0])
    model = tiled(network(), comm, layout=layout, batch_size=SIZES[0])
    losses: list[Any] = [F.cross_entropy(model(x), y) for x, y in model.micro_batches(x, y)]
    with pytest.raises(InputError, match=r"backward\(\) of a micro-batch comes after the loop"):
        losses[0].backward()
    with pytest.raises(InputError, match="there are 2 losses, but the last batch had 3 micro-batches"):
        model.global_loss(losses[:2])
    for here_x, here_y in model.micro_batches(x, y):
        F.cross_entropy(model(here_x), here_y).backward()  # type: ignore[no-untyped-call]
        break
    assert all(parameter.grad is None for parameter in model.parameters())
    with pytest.raises(TrainingError, match="was left before its end"):
        next(model.micro_batches(x, y))
    normed = nn.Sequential(nn.Linear(4, 3), nn.BatchNorm1d(3)).double()
    with pytest.raises(PlanError, match="batch normalization takes the statistics of the whole batch"):
        tiled(normed, comm, layout=in_micro_batches(simple_layout([0], *([r] for r in range(1, comm.size)))), batch_size=9)
    sums = tiled(network(), comm, layout=layout, batch_size=SIZES[0], reduction="sum")
    loop = sums.micro_batches(x, y)
    here_x, here_y = next(loop)
    penalised = F.cross_entropy(sums(here_x), here_y, reduction="sum") + next(sums.parameters()).square().sum()
    with pytest.raises(InputError, match="every replica and micro-batch adds that term"):
        penalised.backward()  # type: ignore[no-untyped-call]


@pytest.mark.ranks(2, 3)
def test_the_number_of_micro_batches_changes_with_the_layout(comm: AbstractCommunicator) -> None:
    plain, built = network().eval(), network().eval()
    for x, y in batches():
        F.cross_entropy(plain(x), y).backward()  # type: ignore[no-untyped-call]
    layouts = [
        in_micro_batches(some_layouts(comm.size)[1]),
        some_layouts(comm.size)[0],
        in_micro_batches(some_layouts(comm.size)[0]),
    ]
    model = tiled(built, comm, layout=layouts[0], batch_size=SIZES[0])
    without_dropout(model)
    for layout, (x, y) in zip(layouts, batches(), strict=True):
        move(model, layout, optimizer=None)
        for here_x, here_y in model.micro_batches(x, y):
            F.cross_entropy(model(here_x), here_y).backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        for parameter in model.parameters():
            assert parameter.grad is not None
            parameter.copy_(parameter.grad)
    expected = {name: parameter.grad for name, parameter in plain.named_parameters() if parameter.grad is not None}
    assert_equal(comm.bcast_object(whole_state_dict(model)), expected, "gradients")
