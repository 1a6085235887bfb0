"""A hand-written loop around a tiled model works like one around the plain model, whatever it does."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from equal_runs import SAMPLES, check_loop
from torch import nn

from drawing import Written, one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.testing.worlds import World
from tatami.train import move, whole_state_dict
from tiled_rig import assert_close, optimizers, simple_layout, some_layouts, tiled


def x_of(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@one_at_a_time
def mlp(seed: int = 1) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 3)).double()


def test_a_second_backward_through_the_same_graph_is_refused_as_ever(comm: AbstractCommunicator) -> None:
    model = tiled(mlp(), comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    loss = model(model.local(x_of(SAMPLES, 4))).square().mean()
    loss.backward()
    with pytest.raises(RuntimeError, match="second time"):
        loss.backward()


class Outputs(nn.Module):
    """Two pairs of different units, outputs in a dict, one of them an input of the other."""

    @one_at_a_time
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.one = nn.Sequential(nn.Linear(4, 9), nn.Sigmoid(), nn.Linear(9, 4))
        self.two = nn.Sequential(nn.Linear(4, 2), nn.Tanh(), nn.Linear(2, 4))
        self.only_third = nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> dict[str, Any]:
        hidden = self.one(x) + shift
        return {"hidden": hidden, "rest": (self.two(hidden), [self.only_third(hidden)]), "name": "outputs"}


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_outputs_in_dicts_and_tuples_and_inputs_by_keyword(world: World, reduction: str) -> None:
    def loop(model: Any, local: Any) -> None:
        out = model(x=local(x_of(SAMPLES, 4)), shift=0.5)
        assert out["name"] == "outputs"
        loss = getattr(out["hidden"].square(), reduction)() + getattr(out["rest"][0].sin(), reduction)()
        loss.backward()  # the third output takes no part: no gradient, as in the plain model

    check_loop(world, lambda: Outputs().double(), loop, reduction=reduction)


def test_outputs_may_be_objects(world: World) -> None:
    def loop(model: Any, local: Any) -> None:
        model(local(x_of(SAMPLES, 4))).logits.square().mean().backward()

    check_loop(world, lambda: Written(lambda net, x: SimpleNamespace(logits=net.pair(x)), pair=mlp()), loop)


def test_outputs_may_be_changed_in_place(world: World) -> None:
    def loop(model: Any, local: Any) -> None:
        x, y = local(x_of(SAMPLES, 4), x_of(SAMPLES, 3, seed=3))
        out = model(x)
        out -= y
        out.square().mean().backward()

    check_loop(world, mlp, loop)


def test_parameters_that_share_a_gradient_tensor_are_each_summed_once(world: World) -> None:
    """For one sample, `shift`, `again` and the pair's output have one gradient tensor: summing must not change it."""

    class Shifted(nn.Module):
        @one_at_a_time
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.before = nn.Linear(4, 4)
            self.pair = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
            self.shift = nn.Parameter(torch.rand(1, 4))
            self.again = nn.Parameter(torch.rand(1, 4))

        def forward(self, x: torch.Tensor) -> Any:
            return self.pair(self.before(x)) + self.shift + self.again

    def loop(model: Any, local: Any) -> None:
        model(local(x_of(SAMPLES, 4))).square().sum().backward()
        model(local(x_of(1, 4))).square().sum().backward()

    check_loop(world, lambda: Shifted().double(), loop, reduction="sum")


def test_frozen_after_tiling_and_thawed_again(world: World) -> None:
    def loop(model: Any, local: Any) -> None:
        x = local(x_of(SAMPLES, 4))
        for parameter in model.parameters():
            parameter.requires_grad_(False)
        last = list(model.parameters())[-1]
        last.requires_grad_(True)
        model(x).square().mean().backward()
        for parameter in model.parameters():
            parameter.requires_grad_(True)
        model(x).square().mean().backward()

    check_loop(world, mlp, loop)


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_inputs_get_the_gradient_of_the_global_loss(comm: AbstractCommunicator, reduction: str, frozen: bool) -> None:
    """Also where no parameter has one. By `torch.autograd.grad` they get the slopes of what each sample gives."""
    built = mlp().requires_grad_(not frozen)
    whole = x_of(SAMPLES, 3, 4).requires_grad_()
    (slopes,) = torch.autograd.grad(mlp()(whole).square().sum(), whole)
    loss: torch.Tensor = getattr(mlp()(whole).square(), reduction)()
    loss.backward()  # type: ignore[no-untyped-call]
    assert whole.grad is not None
    expected = whole.grad
    for layout in some_layouts(comm.size):
        model = tiled(built, comm, layout=layout, batch_size=SAMPLES, reduction=reduction)
        span = model.local_span(SAMPLES).slice()
        x = model.local(x_of(SAMPLES, 3, 4)).clone().requires_grad_()
        getattr(model(x).square(), reduction)().backward()
        assert_close({"x": x.grad}, {"x": expected[span]}, what=f"{layout}")
        is_open = model(model.local(x_of(SAMPLES - 3, 3, 4)))  # a pass in which ranks have other shares
        moved = 1.0 * model.local(x_of(SAMPLES, 3, 4)).clone().requires_grad_()
        (slope,) = torch.autograd.grad(model(moved).square().sum(), moved)
        assert_close({"slope": slope}, {"slope": slopes[span]}, what=f"{layout}, {is_open.shape}")


def test_without_gradients_a_replica_computes_whatever_it_shares(comm: AbstractCommunicator) -> None:
    expected = mlp()(x_of(5, 4)).detach()
    built = mlp()
    model = tiled(built, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
    if model.tile is None:
        return
    with torch.no_grad():
        assert_close({"out": model(x_of(5, 4))}, {"out": expected}, what="output")


def test_layers_shared_by_name_stay_shared(world: World) -> None:
    """One dropout under two names and one parameter under two names of one module."""

    class Shared(nn.Module):
        @one_at_a_time
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(2)
            self.pair = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 4))
            self.drop = nn.Dropout(0.5)
            self.same_drop = self.drop
            self.scale = nn.Parameter(torch.rand(4))
            self.same_scale = self.scale

        def forward(self, x: torch.Tensor) -> Any:
            return self.same_drop(self.pair(self.drop(x)) * self.scale) * self.same_scale

    def loop(model: Any, local: Any) -> None:
        model(local(x_of(SAMPLES, 4))).square().mean().backward()

    check_loop(world, lambda: Shared().double(), loop, seed=12)


@pytest.mark.ranks(2, 3, 4)
def test_retiling_between_accumulated_passes_and_with_an_old_loss_alive(comm: AbstractCommunicator) -> None:
    """A loss that is still alive holds on to autograd's accumulators of the parameters as they were before the re-tiling."""
    plain = mlp()
    steps = optimizers(torch.float64)["adam"](plain.parameters())
    for seed in range(3):
        steps.zero_grad()
        plain(x_of(SAMPLES, 4, seed=seed)).square().mean().backward()
        plain(x_of(SAMPLES, 4, seed=seed + 10)).square().mean().backward()
        steps.step()
    built = mlp()
    layouts = some_layouts(comm.size)
    model = tiled(built, comm, layout=layouts[-1], batch_size=SAMPLES)
    steps = optimizers(torch.float64)["adam"](model.parameters())
    identities = [id(parameter) for parameter in model.parameters()]
    alive = []
    for seed in range(3):
        steps.zero_grad()
        loss = model(model.local(x_of(SAMPLES, 4, seed=seed))).square().mean()
        loss.backward()
        alive.append(loss)
        move(model, layouts[seed % len(layouts)], optimizer=steps)
        model(model.local(x_of(SAMPLES, 4, seed=seed + 10))).square().mean().backward()
        steps.step()
    assert identities == [id(parameter) for parameter in model.parameters()]
    assert [id(p) for group in steps.param_groups for p in group["params"]] == identities
    assert {int(steps.state[p]["step"]) for p in model.parameters()} == {3}
    assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what="parameters")


@pytest.mark.ranks(2, 3, 4)
def test_a_rank_that_is_left_out_holds_no_rows(comm: AbstractCommunicator) -> None:
    model = tiled(mlp(), comm, layout=simple_layout(list(range(comm.size))), batch_size=SAMPLES)
    move(model, simple_layout(list(range(1, comm.size))), optimizer=None)
    if comm.rank == 0:
        assert model.tile is None
        assert [rows.tensor.numel() for rows in model.block_rows()[0]] == [0, 0, 0]


def test_the_given_model_is_not_changed_and_may_be_of_any_dtype(comm: AbstractCommunicator) -> None:
    mine = mlp(comm.rank)
    before = {name: value.clone() for name, value in mine.state_dict().items()}
    model = tiled(mine, comm, layout=some_layouts(comm.size)[-1], batch_size=SAMPLES)
    assert all(torch.equal(before[name], value) for name, value in mine.state_dict().items())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float64}
    whole = comm.bcast_object(whole_state_dict(model))
    assert_close(whole, mlp(0).state_dict(), what="everyone starts from rank 0")
