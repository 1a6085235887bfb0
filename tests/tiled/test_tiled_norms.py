"""Norms of gradients and weights: torch's own functions see the units of all ranks, and clip as on one machine."""

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from equal_runs import SAMPLES, check_loop
from networks import CASES, build
from torch import nn

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import CommError, TrainingError
from tatami.runtime import torch_norms
from tatami.testing.worlds import World
from tatami.tiling import Layout
from tatami.train import TiledModel, move
from tiled_rig import simple_layout, some_layouts, tiled


@one_at_a_time
def network() -> nn.Module:
    torch.manual_seed(1)
    layers = [nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 5), nn.LayerNorm(5), nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3)]
    return nn.Sequential(*layers, nn.Linear(3, 3)).double()


def layers_of(model: nn.Module) -> nn.Sequential:
    layers = model.module if isinstance(model, TiledModel) else model
    assert isinstance(layers, nn.Sequential)
    return layers


def backward(model: Any, local: Callable[[torch.Tensor], torch.Tensor], *, times: float = 1.0) -> None:
    x = torch.randn(SAMPLES, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    torch.autograd.backward(times * model(local(x)).square().mean())


def clip_of(model: Any, way: str) -> Callable[..., Any]:
    """That of a tiled model, or torch's for its parameters."""
    if way == "model" and isinstance(model, TiledModel):
        return model.clip_grad_norm_
    return partial(torch.nn.utils.clip_grad_norm_, model.parameters())


def clip_norm(parameters: Any, max_norm: float, **options: Any) -> Any:
    """torch's function as it is when it is called: Tatami has replaced it by then."""
    return torch.nn.utils.clip_grad_norm_(parameters, max_norm, **options)


def clip_by(model: nn.Module, **options: Any) -> Any:
    return clip_norm(model.parameters(), 0.01, **options)


def clip_by_model(model: Any, norm_type: float) -> Any:
    return clip_of(model, "model")(0.01, norm_type)


def as_on_one_machine(world: World, use: Callable[[Any], Any], *, retile: bool = False) -> None:
    """`use(model)` after a backward pass returns the same number, and leaves the same gradients, as on the plain model."""

    def loop(model: Any, local: Callable[..., Any]) -> float:
        if retile and isinstance(model, TiledModel):
            layouts = [each for each in some_layouts(model.comm.size) if model.sharding is None or each.deepest == 1]
            move(model, layouts[-1], optimizer=None)
        backward(model, local)
        return float(use(model))

    check_loop(world, network, loop)


CLIPS: dict[str, Callable[[Any], Any]] = {
    **{
        f"norm {norm_type}, foreach {foreach}": partial(clip_by, norm_type=norm_type, foreach=foreach)
        for norm_type, foreach in [
            *((1.0, None), (2.0, None), (2.0, False), (2.0, True), (3.5, None)),
            *((math.inf, False), (math.inf, True), (-math.inf, True), (0.0, None)),
        ]
    },
    **{
        f"norm {norm_type} of the model": partial(clip_by_model, norm_type=norm_type)
        for norm_type in (1.0, 2.0, 3.5, math.inf, -math.inf, 0.0)
    },
    "some parameters": lambda model: sum(clip_norm(layers_of(model)[layer].parameters(), 0.01) for layer in (-1, 2)),
    "one tensor": lambda model: clip_norm(next(layers_of(model)[0].parameters()), 0.01),
    "value": lambda model: torch.nn.utils.clip_grad_value_(model.parameters(), 0.01) or 1.0,
}


@pytest.mark.parametrize("how", CLIPS)
def test_clipping(world: World, how: str) -> None:
    as_on_one_machine(world, CLIPS[how])


@pytest.mark.parametrize("max_norm", [1e-3, 1e3])
def test_clipping_after_a_retiling(world: World, max_norm: float) -> None:
    as_on_one_machine(world, lambda model: clip_norm(model.parameters(), max_norm), retile=True)


@pytest.mark.skipif(not hasattr(torch.nn.utils, "get_total_norm"), reason="this torch has no get_total_norm")
@pytest.mark.parametrize("what", ["gradients", "weights"])
@pytest.mark.parametrize(("norm_type", "foreach"), [(1.0, True), (2.0, None), (math.inf, True)])
def test_get_total_norm(world: World, what: str, norm_type: float, foreach: bool | None) -> None:
    def norm(model: nn.Module) -> torch.Tensor:
        tensors = [each.grad if what == "gradients" else each.detach() for each in model.parameters()]
        given = list(model.parameters()) if what == "weights" else tensors
        return torch.nn.utils.get_total_norm([each for each in given if each is not None], norm_type, foreach=foreach)

    as_on_one_machine(world, norm)


@pytest.mark.parametrize("way", ["torch", "model"])
@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_norms_that_are_not_finite(comm: AbstractCommunicator, way: str, bad: float) -> None:
    built = network()

    def clip(*, strict: bool) -> float:
        if way == "model":
            return model.clip_grad_norm_(0.01, error_if_nonfinite=strict)
        return torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, error_if_nonfinite=strict).item()

    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    backward(model, model.local)
    first = model.tiled_parameters()[0].grad
    assert first is not None
    if comm.rank == 0:
        first[0, 0] = bad
    before = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    with pytest.raises(TrainingError if way == "model" else RuntimeError, match=r"cannot be clipped"):
        clip(strict=True)
    for parameter, was in zip(model.parameters(), before, strict=True):
        assert parameter.grad is not None
        assert torch.equal(parameter.grad.nan_to_num(), was.nan_to_num())
    assert not math.isfinite(clip(strict=False))
    comm.barrier()


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", ["llama", "resnet"])
@pytest.mark.parametrize("way", ["torch", "model"])
def test_networks_of_many_kinds_of_blocks(world: World, name: str, way: str) -> None:
    inputs = CASES[name].draw(SAMPLES, torch.Generator().manual_seed(5))
    assert isinstance(inputs, tuple)

    def loop(model: Any, local: Callable[..., Any]) -> None:
        mine = local(*inputs)
        torch.autograd.backward(model(*(mine if isinstance(mine, tuple) else (mine,))).square().mean())
        clip_of(model, way)(0.01)

    def layouts(size: int) -> list[Layout]:
        return [simple_layout(list(range(size))), simple_layout([0], list(range(1, size)))]

    check_loop(world, partial(build, CASES[name]), loop, layouts=layouts, sample=inputs)


@pytest.mark.ranks(2, 3, 4)
def test_clipping_is_one_exchange_and_none_without_tiles(comm: AbstractCommunicator) -> None:
    built = network()
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    backward(model, model.local)
    calls = []
    original = model.comm.allreduce

    def noting(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        original(*args, **kwargs)

    model.comm.allreduce = noting  # type: ignore[method-assign]
    torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01, foreach=False)
    assert len(calls) == 1
    model.clip_grad_norm_(0.01)
    assert len(calls) == 2
    torch.nn.utils.clip_grad_norm_(nn.Linear(2, 2).parameters(), 0.01)
    torch.nn.utils.clip_grad_value_(model.parameters(), 0.01)
    assert len(calls) == 2


@pytest.mark.ranks(2)
@pytest.mark.threads_only
def test_a_norm_that_one_rank_alone_asks_for_ends_with_an_error(comm: AbstractCommunicator) -> None:
    built = network()
    model = tiled(built, comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES)
    backward(model, model.local)
    model.comm.timeout_s = 0.2
    if comm.rank == 0:
        with pytest.raises(CommError):
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    comm.barrier()


def test_a_torch_that_clips_in_another_way_is_told_of(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(parameters: Any, max_norm: float) -> torch.Tensor:  # noqa: ARG001
        return torch.tensor(1.0)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", other)
    monkeypatch.delattr(torch.nn.utils.clip_grad, torch_norms._SORT)
    with pytest.warns(UserWarning, match=r"torch 2.* in a way that is not known here.*Call model.clip_grad_norm_ instead"):
        torch_norms.watch_norms()
