"""Updates over several batches or micro-batches, in half precision, by a scaler, of frozen and tied weights."""

import functools
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_fit, in_batches, plain_fit, with_shards
from networks import GPT, LowRank, low_rank_gpt
from torch import nn
from torch.amp import GradScaler

from drawing import Written, one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError, PlanError, TrainingError
from tatami.parallel import DataParallel
from tatami.retiling import Retiler
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.train import History, TiledModel, Trainer, move, tile, whole_state_dict
from tiled_rig import assert_close, assert_equal, gradients, simple_layout, some_layouts, tiled

SAMPLES = 23
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)


@one_at_a_time
def network(dtype: torch.dtype = torch.float64) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3), nn.LayerNorm(3), nn.Linear(3, 2)).to(dtype)


def inputs(dtype: torch.dtype = torch.float64) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x.to(dtype), torch.rand(SAMPLES, 2, generator=generator, dtype=torch.float64).to(dtype)


def mse(model: Any, batch: Any, reduction: str = "mean") -> torch.Tensor:
    return F.mse_loss(model(batch[0]), batch[1], reduction=reduction)


@pytest.mark.parametrize("retile", [None, Retiler(every=1)])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_accumulated_batches_are_one_batch_of_all_their_samples(world: World, reduction: str, retile: Retiler | None) -> None:
    """Batches of 5, 5, 5, 5 and 3 in updates of 15 and of 8 samples: the last batch of an epoch ends an update."""
    x, y = inputs()
    make = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
    updates = [(x[start:stop], y[start:stop]) for start, stop in ((0, 15), (15, 23)) * 2]
    expected = plain_fit(network(), updates, loss=partial(mse, reduction=reduction), optimizer=make, clip_norm=0.3)

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        options: Any = {"accumulate_grad_batches": 3, "gradient_clip_val": 0.3, "retile": retile}
        trainer = Trainer(model, optimizer=make, loss=nn.MSELoss(reduction=reduction), **options)
        history = trainer.fit((x, y), batch_size=5, epochs=2, shuffle=False)
        assert (trainer.iteration, trainer.epoch) == (4, 2)
        return history

    check_fit(world, network(), expected, fit, batch_size=5)


@pytest.mark.ranks(1, 2, 3)
def test_bfloat16_by_autocast_is_as_the_plain_loop_up_to_bfloat16(comm: AbstractCommunicator) -> None:
    x, y = inputs(torch.float32)

    def loss(model: Any, batch: Any) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            return mse(model, batch)

    expected, _ = plain_fit(network(torch.float32), [(x, y)] * 4, loss=loss, optimizer=SGD)
    built = network(torch.float32)
    for layout in some_layouts(comm.size):
        model = tiled(built, comm, layout=layout, batch_size=SAMPLES)
        trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), precision="bf16-mixed")
        history = trainer.fit((x, y), batch_size=SAMPLES, epochs=4)
        assert history.losses == pytest.approx(expected, rel=0.02)
        assert all(parameter.dtype == torch.float32 for parameter in model.parameters())
        assert trainer.predict(x, batch_size=SAMPLES).dtype == torch.bfloat16


@pytest.mark.ranks(2, 3)
def test_precision_that_differs_between_ranks_is_refused(comm: AbstractCommunicator) -> None:
    built = network(torch.float32)
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), precision="bf16-mixed" if comm.rank else None)
    with pytest.raises(InputError, match="rank 0 has precision None, rank 1 has precision bf16-mixed"):
        trainer.fit(inputs(torch.float32), batch_size=SAMPLES, epochs=1)
    x, _ = model.local(*inputs(torch.float32))
    with (
        torch.autocast("cpu", dtype=torch.bfloat16, enabled=comm.rank == 1),
        pytest.raises(InputError, match=r"rank 0 computes in the dtype of the weights, rank 1 in torch.bfloat16"),
    ):
        model(x)


@pytest.mark.ranks(1)
def test_settings_that_cannot_be(comm: AbstractCommunicator) -> None:
    built = network()
    model = tiled(built, comm, layout=some_layouts(1)[0], batch_size=SAMPLES)
    for options, match in (
        ({"accumulate_grad_batches": 0}, "accumulate_grad_batches must be at least 1, not 0"),
        ({"precision": "16-true"}, "precision must be 'bf16-mixed', '16-mixed' or None .* not '16-true'"),
        ({"gradient_clip_val": 0.0}, "gradient_clip_val must be above 0, not 0"),
    ):
        with pytest.raises(InputError, match=match):
            Trainer(model, optimizer=SGD, loss=nn.MSELoss(), **options)


def overflowing(model: Any, x: torch.Tensor, y: torch.Tensor, local: Any) -> list[float]:
    """Steps by a scaler; in the second, the gradient of one unit of the first layer overflows, which has its own optimizer."""
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)
    first, *others = model.parameters()
    optimizers = SGD([first]), SGD(others)
    scales = []
    for number in range(4):
        here_x, here_y = local(x, y)
        model.zero_grad()
        loss = F.mse_loss(model(here_x), here_y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if number == 1:
            spoil(model)
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


def spoil(model: Any) -> None:
    """Unit 5 of 8 overflows, wherever it is."""
    if not isinstance(model, TiledModel) or model.sharding is not None:
        getattr(model, "module", model)[0].weight.grad[5] = torch.inf
    elif model.tile is not None and model.tile.units.start <= 5 < model.tile.units.stop:
        model.module[0].weight.grad[5 - model.tile.units.start] = torch.inf  # type: ignore[index]


def test_a_scaler_leaves_the_same_steps_out_on_all_ranks(comm: AbstractCommunicator) -> None:
    """One rank alone has the unit that overflows."""
    plain, (x, y) = network(), inputs()
    scales = overflowing(plain, x, y, lambda *batch: batch)
    assert scales == [256.0, 128.0, 128.0, 256.0]
    built = network()
    for layout, options in with_shards(some_layouts(comm.size)):
        given = {"speeds": "equal", **options}
        model = tile(built, comm, layout=layout, batch_size=SAMPLES, reduction="mean", quiet=True, **given)
        assert overflowing(model, x, y, model.local) == scales
        assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what=f"parameters on {layout}")


@pytest.mark.ranks(1, 2)
def test_float16_by_the_trainer_uses_a_scaler(comm: AbstractCommunicator) -> None:
    built = network(torch.float32)
    x, y = inputs(torch.float32)
    expected, _ = plain_fit(network(torch.float32), [(x, y)] * 4, loss=mse, optimizer=SGD)
    model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
    trainer = Trainer(model, optimizer=SGD, loss=nn.MSELoss(), precision="16-mixed")
    assert trainer.fit((x, y), batch_size=SAMPLES, epochs=4).losses == pytest.approx(expected, rel=0.02)


@pytest.mark.parametrize("kind", ["tied", "low-rank"])
@pytest.mark.ranks(1, 2, 3)
def test_tied_and_frozen_weights_from_the_first_batch(comm: AbstractCommunicator, kind: str) -> None:
    """The Trainer is given the network, which it tiles with its first batch; a GPT, with Adam, in updates of two batches."""

    @one_at_a_time
    def build() -> nn.Module:
        torch.manual_seed(3)
        return (GPT(layers=1) if kind == "tied" else low_rank_gpt()).double()

    text = torch.randint(11, (12, 6), generator=torch.Generator().manual_seed(0))
    target = text.roll(-1, 1)

    def loss_of(output: torch.Tensor, target: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
        return F.cross_entropy(output.flatten(0, 1), target.flatten(), reduction=reduction)

    built, make = build(), partial(torch.optim.Adam, lr=0.01)
    updates = in_batches(8, text, target)
    losses, state = plain_fit(build(), updates, loss=lambda model, batch: loss_of(model(batch[0]), batch[1]), optimizer=make)
    trainer = Trainer(
        built, comm=comm, tile=partial(tile_quietly, equal=True), optimizer=make, loss=loss_of, accumulate_grad_batches=2
    )
    with pytest.raises(InputError, match="tiled with the first batch of fit or evaluate"):
        trainer.model  # noqa: B018
    history = trainer.fit((text, target), batch_size=4, epochs=1, shuffle=False)
    assert history.losses == pytest.approx(losses, rel=1e-10)
    assert {block.facts.kind for block in trainer.model.found.blocks} == {"attention", "linear pair"}
    assert_close(comm.bcast_object(whole_state_dict(trainer.model)), state, what="parameters")
    frozen = [each for each in trainer.model.modules() if isinstance(each, LowRank)]
    assert (len(frozen) > 0) == (kind == "low-rank")


def tile_quietly(network: nn.Module, comm: AbstractCommunicator, *, equal: bool, **options: Any) -> TiledModel:
    from tatami.train import tile

    assert options["sample"] is not None
    return tile(network, comm, speeds="equal" if equal else "measure", quiet=True, **options)


@pytest.mark.ranks(1)
def test_a_network_that_is_not_tiled_needs_ranks_and_what_makes_its_optimizer(comm: AbstractCommunicator) -> None:
    built = network()
    with pytest.raises(InputError, match=r"give the Trainer comm=tatami.init\(\), or what tatami.tile returned"):
        Trainer(built, optimizer=SGD, loss=nn.MSELoss())
    with pytest.raises(InputError, match="give what makes the optimizer"):
        Trainer(built, comm=comm, optimizer=SGD(built.parameters()), loss=nn.MSELoss())


@pytest.mark.filterwarnings("ignore")
@pytest.mark.ranks(1, 2)
def test_compiling_is_refused_where_ranks_meet_in_the_forward_pass(comm: AbstractCommunicator) -> None:
    """One rank alone may compile; `eager` is torch's backend that compiles to what it was given."""
    built, (x, y) = network(), inputs()
    plain = network()
    torch.autograd.backward(F.mse_loss(plain(x), y))
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    here_x, here_y = model.local(x, y)
    compiled = torch.compile(model, backend="eager")
    if comm.size == 1:
        torch.autograd.backward(F.mse_loss(compiled(here_x), here_y))
        assert_close(gradients(model.module), gradients(plain), what="gradients")
        return
    for call in (compiled, torch.compile(lambda x: 2 * model(x), backend="eager")):
        follows = r"torch\.compile follows a tiled model, or DataParallel, into the sums over its ranks"
        with pytest.raises(ModelError, match=follows):
            call(here_x)


@pytest.mark.ranks(1, 2, 3, 4)
def test_transforms_of_torch_func_are_refused_where_ranks_meet(comm: AbstractCommunicator) -> None:
    """A tiled model on one rank alone may be transformed."""
    plain, (x, _) = network(), inputs()
    layouts = [simple_layout(list(range(comm.size))), simple_layout(*([rank] for rank in range(comm.size)))]
    models = [tiled(network(), comm, layout=layout, batch_size=SAMPLES) for layout in layouts]
    for model in (*models, DataParallel(network(), comm)):
        here = model.local(x) if isinstance(model, TiledModel) else x
        transforms: list[Any] = [torch.func.grad, torch.func.jacrev]
        for transform in transforms:
            slope, expected = (transform(lambda x, call=call: call(x).sum()) for call in (model, plain))
            if comm.size == 1 and model in models:
                assert_close({"": slope(here).detach()}, {"": expected(x).detach()}, what="transformed")
                continue
            with pytest.raises(
                ModelError, match=r"a transform of torch\.func .* goes through the forward pass of a TiledModel"
            ):
                slope(here)


SIZES = (9, 9, 2)
"""The last batch has fewer samples than there are micro-batches."""


@one_at_a_time
def dropping() -> nn.Module:
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


def without_dropout(model: nn.Module) -> None:
    for module in model.modules():
        if hasattr(module, "p"):
            vars(module)["p"] = 0.0


def clamped(parameter: nn.Parameter) -> None:
    """A hook that is not linear, so it must see the gradient of the whole batch."""
    parameter.register_hook(lambda grad: grad.clamp(-0.05, 0.05))  # type: ignore[no-untyped-call]


@pytest.mark.threads_only
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loop_over_micro_batches_is_that_over_batches(world: World, reduction: str) -> None:
    plain, built = dropping(), dropping()
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


def time_first(net: Any, x: torch.Tensor) -> Any:
    """Its dropouts see a tensor whose first axis is not the outermost in memory, which a single sample does not show."""
    y = torch.tanh(net.first(x).transpose(0, 1))
    for dropout in net.dropouts:
        y = torch.tanh(dropout(y))
    return net.last(y.mean(0))


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2, 3)
def test_single_samples_of_a_transposed_tensor_draw_as_in_the_batch(world: World) -> None:
    generator = torch.Generator().manual_seed(5)
    x, y = torch.randn(7, 5, 4, generator=generator, dtype=torch.float64), torch.randint(3, (7,), generator=generator)

    @one_at_a_time
    def made() -> nn.Module:
        torch.manual_seed(1)
        return Written(
            time_first, first=nn.Linear(4, 6), last=nn.Linear(6, 3), dropouts=nn.ModuleList([nn.Dropout(0.3), nn.Dropout(0.2)])
        ).double()

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


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2, 3)
def test_the_trainer_computes_micro_batches_and_counts_targets_over_all_of_them(world: World) -> None:
    plain, built = dropping().eval(), dropping().eval()
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


@pytest.mark.threads_only
@pytest.mark.ranks(1, 2)
def test_what_is_wrong_with_micro_batches_is_refused(comm: AbstractCommunicator) -> None:
    x, y = next(batches())
    layout = in_micro_batches(some_layouts(comm.size)[0])
    model = tiled(dropping(), comm, layout=layout, batch_size=SIZES[0])
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
    sums = tiled(dropping(), comm, layout=layout, batch_size=SIZES[0], reduction="sum")
    loop = sums.micro_batches(x, y)
    here_x, here_y = next(loop)
    penalised = F.cross_entropy(sums(here_x), here_y, reduction="sum") + next(sums.parameters()).square().sum()
    with pytest.raises(InputError, match="every replica and micro-batch adds that term"):
        penalised.backward()  # type: ignore[no-untyped-call]


@pytest.mark.threads_only
@pytest.mark.ranks(2, 3)
def test_the_number_of_micro_batches_changes_with_the_layout(comm: AbstractCommunicator) -> None:
    plain, built = dropping().eval(), dropping().eval()
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
