"""Exact: gradients and parameters of a tiled run are those of the plain run, for random networks, batches and layouts."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.testing.worlds import World
from tatami.tiled import move, whole_state_dict
from tatami.tiling import Layout
from tiled_rig import (
    MakeOptimizer,
    Network,
    assert_close,
    draw_batches,
    gradients,
    layouts,
    networks,
    optimizers,
    plain_loss,
    tiled,
    whole_gradients,
)

STEPS = 5
IS_PROCESS = any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK"))
EXAMPLES = 6 if IS_PROCESS else 20
"""Ranks that are threads have gone through all of them; what is left to show is that ranks that are processes do the same."""
property_test = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
Batch = tuple[torch.Tensor, torch.Tensor]


def plain_run(
    model: nn.Module, batches: list[Batch], *, optimizer: MakeOptimizer, reduction: str
) -> tuple[list[dict[str, torch.Tensor | None]], dict[str, torch.Tensor]]:
    """Gradients of every step, and the parameters after the last, of a single process. Dropout draws from seed 9."""
    torch.manual_seed(9)
    steps = optimizer(model.parameters())
    seen = []
    for x, y in batches:
        steps.zero_grad()
        plain_loss(model(x), y, reduction).backward()  # type: ignore[no-untyped-call]
        seen.append(gradients(model))
        steps.step()
    return seen, model.state_dict()


def check_tiled_run(
    world: World,
    network: Network,
    batches: list[Batch],
    *,
    layouts_of_steps: list[Layout],
    optimizer: MakeOptimizer,
    reduction: str,
    dtype: torch.dtype,
    bucket_bytes: int | None = None,
    uneven: bool = False,
) -> None:
    """The tiled run, re-tiled wherever `layouts_of_steps` changes, against the plain one."""
    expected_grads, expected_state = plain_run(network.build(dtype), batches, optimizer=optimizer, reduction=reduction)
    built = network.build(dtype)
    torch.manual_seed(9)  # the state that tile() takes over for dropout

    def body(comm: AbstractCommunicator) -> None:
        layout = layouts_of_steps[0]
        model = tiled(
            built, comm, layout=layout, batch_size=len(batches[0][0]), reduction=reduction, bucket_bytes=bucket_bytes,
            uneven=uneven,
        )  # fmt: skip
        steps = optimizer(model.parameters())
        for step, (x, y) in enumerate(batches):
            if layouts_of_steps[step] is not layout:
                layout = layouts_of_steps[step]
                move(model, layout, optimizer=steps)
            steps.zero_grad()
            here_x, here_y = model.local(x, y)
            loss = plain_loss(model(here_x), here_y, reduction)
            loss.backward()  # type: ignore[no-untyped-call]
            assert_close(whole_gradients(model), expected_grads[step], what=f"gradients of step {step} on rank {comm.rank}")
            steps.step()
        state = comm.bcast_object(whole_state_dict(model))
        assert_close(state, expected_state, what=f"parameters after {STEPS} steps")

    world(body)


def draw_dtype(data: st.DataObject, network: Network) -> tuple[torch.dtype, Network]:
    """LayerNorm divides by the spread of its inputs: as small as that may be here, single precision is not good for 1e-5."""
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), label="dtype")
    return dtype, network if dtype is torch.float64 else replace(network, norm=False)


def batches_of(data: st.DataObject, network: Network, dtype: torch.dtype) -> list[Batch]:
    """Five global batches, 2-d or (batch, time, features); the last may be smaller, even than the number of columns."""
    size = data.draw(st.integers(1, 11), label="batch size")
    shape = (*data.draw(st.sampled_from([(), (3,)]), label="time"), network.sizes[0])
    batches = draw_batches(STEPS, size=size, shape=shape, outputs=network.sizes[-1], dtype=dtype)
    last = data.draw(st.integers(1, size), label="last batch")
    return [*batches[:-1], (batches[-1][0][:last], batches[-1][1][:last])]


@pytest.mark.ranks(1, 2, 3, 4, 5, 6)
@property_test
@given(network=networks(), name=st.sampled_from(sorted(optimizers(torch.float64))), data=st.data())
def test_tiled_runs_equal_plain_runs(world: World, network: Network, name: str, data: st.DataObject) -> None:
    dtype, network = draw_dtype(data, network)
    layout = data.draw(layouts(world.size), label="layout")
    check_tiled_run(
        world,
        network,
        batches_of(data, network, dtype),
        layouts_of_steps=[layout] * STEPS,
        optimizer=optimizers(dtype)[name],
        reduction=data.draw(st.sampled_from(["mean", "sum"]), label="reduction"),
        dtype=dtype,
        bucket_bytes=data.draw(st.sampled_from([None, 1]), label="bucket bytes"),
        uneven=data.draw(st.booleans(), label="uneven"),
    )


@pytest.mark.ranks(2, 3, 4, 5, 6)
@property_test
@given(network=networks(), data=st.data())
def test_whole_retilings_in_mid_run_change_nothing(world: World, network: Network, data: st.DataObject) -> None:
    dtype, network = draw_dtype(data, network)
    first, second, third = (data.draw(layouts(world.size), label="layout") for _ in range(3))
    check_tiled_run(
        world,
        network,
        batches_of(data, network, dtype),
        layouts_of_steps=[first, first, second, third, third],
        optimizer=optimizers(dtype)[data.draw(st.sampled_from(sorted(optimizers(dtype))), label="optimizer")],
        reduction=data.draw(st.sampled_from(["mean", "sum"]), label="reduction"),
        dtype=dtype,
        bucket_bytes=data.draw(st.sampled_from([None, 1]), label="bucket bytes"),
    )


@pytest.mark.ranks(2, 3, 4, 5, 6)
@property_test
@given(network=networks(), data=st.data())
def test_column_retilings_in_mid_run_change_nothing(world: World, network: Network, data: st.DataObject) -> None:
    first = data.draw(layouts(world.size), label="layout")
    columns = []
    for column in first.columns:
        weights = data.draw(st.lists(st.integers(1, 6), min_size=len(column.heights), max_size=len(column.heights)))
        columns.append(replace(column, heights=tuple(weight / sum(weights) for weight in weights)))
    second = Layout(columns=tuple(columns))
    check_tiled_run(
        world,
        network,
        batches_of(data, network, torch.float64),
        layouts_of_steps=[first, first, second, second, first],
        optimizer=optimizers(torch.float64)[data.draw(st.sampled_from(["momentum", "adam"]), label="optimizer")],
        reduction="mean",
        dtype=torch.float64,
    )


@pytest.mark.ranks(2, 3, 4)
@settings(property_test, max_examples=EXAMPLES // 2)
@given(network=networks(), data=st.data())
def test_bfloat16_is_sane(world: World, network: Network, data: st.DataObject) -> None:
    # Smooth: at a kink, rounding decides which way the gradient goes.
    network = replace(network, norm=False, activations=tuple(name.replace("relu", "tanh") for name in network.activations))
    layout = data.draw(layouts(world.size), label="layout")
    check_tiled_run(
        world,
        network,
        batches_of(data, network, torch.bfloat16),
        layouts_of_steps=[layout] * STEPS,
        optimizer=optimizers(torch.bfloat16)["sgd"],
        reduction="mean",
        dtype=torch.bfloat16,
    )
