"""Whether a tiled network trains as the plain one: gradients, weights and outputs of five steps over two re-tilings."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import torch
from networks import Batch, Case, build
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.testing.worlds import World
from tatami.tiled import TiledModel, move, tile, whole_state_dict
from tatami.tiled.batch import on_device
from tatami.tiling import Column, Layout
from tiled_rig import assert_close, gradients, whole_gradients

STEPS = 5
SAMPLES = 7


def loss_of(output: Any) -> torch.Tensor:
    """A mean over samples with no symmetry that would hide a wrong gradient.

    Of Hugging Face's outputs the logits are taken: their losses are computed in single precision.
    """
    flat = logits_of(output).flatten(1)
    weights = torch.linspace(-1.0, 1.0, flat.shape[1], dtype=flat.dtype, device=flat.device)
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


def run(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def logits_of(output: Any) -> torch.Tensor:
    result: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return result


def local(model: TiledModel, batch: Batch) -> Batch:
    """This rank's samples of it."""
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    mine = model.local(*tensors)
    parts = mine if isinstance(mine, tuple) else (mine,)
    return dict(zip(batch, parts, strict=True)) if isinstance(batch, dict) else parts


def batches_of(case: Case) -> list[Batch]:
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
        loss_of(run(model, batch)).backward()  # type: ignore[no-untyped-call]
        seen.append(gradients(model))
        optimizer.step()
    model.eval()
    with torch.no_grad():
        return seen, model.state_dict(), logits_of(run(model, batches[0]))


def check_equal(
    world: World,
    case: Case,
    *,
    device_of: Callable[[int], Any] = lambda rank: None,  # noqa: ARG005
) -> None:
    """Gradients of five steps over two re-tilings, parameters and buffers after them, and evaluation.

    Args:
        world: of ranks.
        case: the network.
        device_of: rank -> the device that it computes on; None: the CPU.
    """
    expected_grads, expected_state, expected_output = plain_run(case)
    batches = batches_of(case)
    network = build(case)
    torch.manual_seed(9)  # the state that tile() takes over for dropout

    def body(comm: AbstractCommunicator) -> None:
        layouts = [random_layout(comm.size, seed) for seed in range(3)]
        device = device_of(comm.rank)
        model = tile(
            network, comm, batch_size=SAMPLES, sample=batches[0], speeds="equal", layout=layouts[0], reduction="mean",
            device=device, quiet=True,
        )  # fmt: skip
        assert all(parameter.device == model.device for parameter in model.parameters())
        assert device is None or model.device == torch.device(device)
        optimizer = adam(model)
        for step, batch in enumerate(batches):
            if step in (2, 4):
                move(model, layouts[step // 2], optimizer=optimizer)
            optimizer.zero_grad()
            loss = loss_of(run(model, local(model, batch)))
            loss.backward()  # type: ignore[no-untyped-call]
            assert_close(whole_gradients(model), expected_grads[step], what=f"gradients of step {step}")
            optimizer.step()
        state = comm.bcast_object(whole_state_dict(model))
        assert_close(state, expected_state, what="after the last step")
        model.eval()
        with torch.no_grad():
            output = logits_of(run(model, on_device(batches[0], model.device))).to("cpu")
            assert_close({"output": output}, {"output": expected_output}, what="evaluation")

    world(body)
