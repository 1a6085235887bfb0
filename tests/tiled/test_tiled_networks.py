"""Networks that people train, as they come: which blocks are found, and that tiled runs equal plain ones."""

from __future__ import annotations

import random

import pytest
import torch
from networks import CASES, Case, build
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.testing.worlds import World
from tatami.tiled import find_blocks, move, tile, whole_state_dict
from tatami.tiling import Column, Layout
from tiled_rig import assert_close, gradients, whole_gradients

STEPS = 5
SAMPLES = 7


def loss_of(output: torch.Tensor) -> torch.Tensor:
    """A mean over samples with no symmetry that would hide a wrong gradient."""
    flat = output.flatten(1)
    weights = torch.linspace(-1.0, 1.0, flat.shape[1], dtype=flat.dtype)
    return ((flat * weights).sum(1) + flat.square().mean(1)).mean()


def random_layout(size: int, seed: int) -> Layout:
    """Any columns of all ranks, of any width and heights; the same on every rank."""
    draw = random.Random(seed)
    ranks = draw.sample(range(size), size)
    columns: list[list[int]] = [[ranks[0]]]
    for rank in ranks[1:]:
        if draw.random() < 0.4:
            columns.append([rank])
        else:
            columns[-1].append(rank)
    widths = [draw.randint(1, 6) for _ in columns]
    heights = [[draw.randint(1, 6) for _ in column] for column in columns]
    return Layout(
        columns=tuple(
            Column(
                width=width / sum(widths),
                processors=tuple(f"p{rank}" for rank in column),
                heights=tuple(height / sum(each) for height in each),
            )
            for column, width, each in zip(columns, widths, heights, strict=True)
        )
    )


def batches_of(case: Case) -> list[tuple[torch.Tensor, ...]]:
    generator = torch.Generator().manual_seed(5)
    sizes = [SAMPLES] * (STEPS - 1) + [SAMPLES - 3]
    return [case.draw(size, generator) for size in sizes]


def adam(model: nn.Module) -> torch.optim.Adam:
    """With an eps above rounding: the bias of keys has no gradient but rounding, which Adam would otherwise blow up."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-5)


def plain_run(case: Case) -> tuple[list[dict[str, torch.Tensor | None]], dict[str, torch.Tensor], torch.Tensor]:
    """Gradients of every step, parameters and buffers after the last, and the output in evaluation."""
    model = build(case)
    torch.manual_seed(9)
    optimizer = adam(model)
    seen = []
    batches = batches_of(case)
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(*batch)).backward()  # type: ignore[no-untyped-call]
        seen.append(gradients(model))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return seen, model.state_dict(), model(*batches[0])


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_blocks_of_a_network_are_found(name: str) -> None:
    case = CASES[name]
    model = build(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = find_blocks(model, sample=case.draw(3, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "resnet"])
def test_a_tiled_network_equals_the_plain_one(world: World, name: str) -> None:
    check_equal(world, name)


@pytest.mark.threads_only  # each process would follow all of them again
@pytest.mark.parametrize("name", sorted(set(CASES) - {"gpt-dropout", "llama", "resnet"}))
def test_more_tiled_networks_equal_the_plain_ones(world: World, name: str) -> None:
    check_equal(world, name)


def check_equal(world: World, name: str) -> None:
    """Gradients of five steps over two re-tilings, parameters and buffers after them, and evaluation."""
    case = CASES[name]
    expected_grads, expected_state, expected_output = plain_run(case)
    batches = batches_of(case)
    network = build(case)
    torch.manual_seed(9)  # the state that tile() takes over for dropout

    def body(comm: AbstractCommunicator) -> None:
        layouts = [random_layout(comm.size, seed) for seed in range(3)]
        model = tile(network, comm, batch_size=SAMPLES, sample=batches[0], speeds="equal", layout=layouts[0], reduction="mean")
        optimizer = adam(model)
        for step, batch in enumerate(batches):
            if step in (2, 4):
                move(model, layouts[step // 2], optimizer=optimizer)
            optimizer.zero_grad()
            mine = model.local(*batch)
            loss = loss_of(model(*(mine if isinstance(mine, tuple) else (mine,))))
            loss.backward()  # type: ignore[no-untyped-call]
            assert_close(whole_gradients(model), expected_grads[step], what=f"gradients of step {step}")
            optimizer.step()
        state = comm.bcast_object(whole_state_dict(model))
        assert_close(state, expected_state, what="after the last step")
        model.eval()
        with torch.no_grad():
            assert_close({"output": model(*batches[0])}, {"output": expected_output}, what="evaluation")

    world(body)
