"""Exact: gradients and parameters of a tiled run are those of the plain run, for random networks, batches and layouts."""

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from equal_runs import STEPS, check_equal
from hypothesis import given, settings
from hypothesis import strategies as st

from tatami.testing.worlds import World
from tatami.tiling import Layout
from tiled_rig import (
    EXAMPLES,
    MakeOptimizer,
    Network,
    draw_batches,
    layouts,
    networks,
    optimizers,
    plain_loss,
    property_test,
    uneven_cluster,
)

Batch = tuple[torch.Tensor, ...]


def check_tiled_run(
    world: World,
    network: Network,
    batches: list[Batch],
    *,
    layouts_of_steps: list[Layout],
    optimizer: MakeOptimizer,
    reduction: str,
    dtype: torch.dtype,
    uneven: bool = False,
) -> None:
    """The tiled run, re-tiled wherever `layouts_of_steps` changes, against the plain one."""

    def loss(model: Any, batch: Any) -> torch.Tensor:
        return plain_loss(model(batch[0]), batch[1], reduction)

    changes = zip([None, *layouts_of_steps], layouts_of_steps, strict=False)
    plan = {step: layout for step, (before, layout) in enumerate(changes) if layout is not before}
    check_equal(
        world,
        partial(network.build, dtype),
        batches,
        plans=lambda _: [plan],
        optimizer=lambda model: optimizer(model.parameters()),
        loss=loss,
        options=lambda comm: {"reduction": reduction, "speeds": uneven_cluster(comm.hosts) if uneven else "equal"},
    )


def draw_dtype(data: st.DataObject, network: Network) -> tuple[torch.dtype, Network]:
    """LayerNorm divides by the spread of its inputs: as small as that may be here, single precision is not good for 1e-5."""
    dtype = data.draw(st.sampled_from([torch.float64, torch.float32]), label="dtype")
    return dtype, network if dtype is torch.float64 else replace(network, norm=False)


def batches_of(data: st.DataObject, network: Network, dtype: torch.dtype) -> list[Batch]:
    """Five global batches, 2-d or (batch, time, features); the last may be smaller, even than the number of replicas."""
    size = data.draw(st.integers(1, 11), label="batch size")
    shape = (*data.draw(st.sampled_from([(), (3,)]), label="time"), network.sizes[0])
    batches = draw_batches(STEPS, size=size, shape=shape, outputs=network.sizes[-1], dtype=dtype)
    last = data.draw(st.integers(1, size), label="last batch")
    return [*batches[:-1], (batches[-1][0][:last], batches[-1][1][:last])]


def drawn_layouts(data: st.DataObject, size: int, kind: str) -> list[Layout]:
    """One for each step: the same, or others in mid-run, of other ranks and replicas, or of other heights alone."""
    first = data.draw(layouts(size), label="layout")
    if kind == "one":
        return [first] * STEPS
    if kind == "whole":
        second, third = (data.draw(layouts(size), label="layout") for _ in range(2))
        return [first, first, second, third, third]
    replicas = []
    for replica in first.replicas:
        weights = data.draw(st.lists(st.integers(1, 6), min_size=len(replica.heights), max_size=len(replica.heights)))
        replicas.append(replace(replica, heights=tuple(weight / sum(weights) for weight in weights)))
    second = Layout(replicas=tuple(replicas))
    return [first, first, second, second, first]


@pytest.mark.ranks(1, 2, 3, 4, 6)
@pytest.mark.parametrize("kind", ["one", "whole", "replicas"])
@property_test
@given(network=networks(), name=st.sampled_from(sorted(optimizers(torch.float64))), data=st.data())
def test_tiled_runs_equal_plain_runs(world: World, kind: str, network: Network, name: str, data: st.DataObject) -> None:
    dtype, network = draw_dtype(data, network)
    check_tiled_run(
        world,
        network,
        batches_of(data, network, dtype),
        layouts_of_steps=drawn_layouts(data, world.size, kind),
        optimizer=optimizers(dtype)[name],
        reduction=data.draw(st.sampled_from(["mean", "sum"]), label="reduction"),
        dtype=dtype,
        uneven=data.draw(st.booleans(), label="uneven"),
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
