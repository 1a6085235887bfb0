"""An update over several batches, in half precision, by a scaler, of frozen and of tied weights: as in the plain loop."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_fit, in_batches, plain_fit, with_shards
from networks import GPT, LowRank, low_rank_gpt
from torch import nn
from torch.amp import GradScaler

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError
from tatami.retiling import Retiler
from tatami.testing.worlds import World
from tatami.train import History, TiledModel, Trainer, tile, whole_state_dict
from tiled_rig import assert_close, gradients, some_layouts, tiled

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


def overflowing(model: Any, optimizer: Any, x: torch.Tensor, y: torch.Tensor, local: Any) -> list[float]:
    """Steps by a scaler; in the second, the gradient of one unit of the first layer overflows."""
    scaler = GradScaler("cpu", init_scale=256.0, growth_interval=2)
    scales = []
    for number in range(4):
        here_x, here_y = local(x, y)
        optimizer.zero_grad()
        loss = F.mse_loss(model(here_x), here_y)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        if number == 1:
            spoil(model)
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
    scales = overflowing(plain, SGD(plain.parameters()), x, y, lambda *batch: batch)
    assert scales == [256.0, 128.0, 128.0, 256.0]
    built = network()
    for layout, options in with_shards(some_layouts(comm.size)):
        given = {"speeds": "equal", **options}
        model = tile(built, comm, layout=layout, batch_size=SAMPLES, reduction="mean", quiet=True, **given)
        assert overflowing(model, SGD(model.parameters()), x, y, model.local) == scales
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
        with pytest.raises(ModelError, match=r"torch\.compile follows a tiled model into the sums over its ranks"):
            call(here_x)
