"""Means that leave targets out (`ignore_index`): exact over all ranks, or refused by name."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_fit, plain_fit
from networks import GPT, VOCABULARY
from torch import nn

from drawing import mlp
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, NotFiniteError
from tatami.testing.worlds import World
from tatami.train import History, TiledModel, Trainer, find_blocks, tile
from tiled_rig import simple_layout, some_layouts

SAMPLES, BATCH, TOKENS = 14, 7, 6
SGD = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
Step = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def table() -> dict[str, torch.Tensor]:
    """Of the first batch the second half is left out; of the others a part that differs from sample to sample."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (SAMPLES, TOKENS), generator=generator)
    labels = torch.where(torch.rand(text.shape, generator=generator) < torch.rand(SAMPLES, 1, generator=generator), -100, text)
    labels[3:BATCH] = -100
    return {"idx": text, "labels": labels}


class OwnLoss(nn.Module):
    """A GPT that predicts the next token, and takes the loss itself, as those of Hugging Face do. It is followed whole.

    It does not run without samples: of none, torch cannot tell what -1 stands for.
    """

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.gpt = GPT(layers=1)

    def forward(self, idx: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        logits = self.gpt(idx.view(len(idx), -1))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()), "logits": logits}


def network() -> nn.Module:
    return OwnLoss().double()


def by_hand(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    logits = model(**batch)["logits"][:, :-1]
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("step", [None, by_hand], ids=["own loss", "by hand"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_means_over_the_targets_that_count_are_those_of_one_machine(world: World, accumulate: int, step: Step | None) -> None:
    data, plain = table(), network()
    updates = [
        {key: value[start : start + BATCH * accumulate] for key, value in data.items()}
        for start in range(0, SAMPLES, BATCH * accumulate)
    ]
    expected = plain_fit(plain, updates, loss=lambda model, batch: model(**batch)["loss"], optimizer=SGD)
    evaluated = plain(**data)["loss"].item()

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        trainer = Trainer(model, optimizer=SGD, training_step=step, accumulate_grad_batches=accumulate)
        history = trainer.fit(data, batch_size=BATCH, epochs=1, shuffle=False)
        assert trainer.evaluate(data, batch_size=5)["loss"] == pytest.approx(evaluated, rel=1e-10)
        return history

    check_fit(world, network(), expected, fit, batch_size=BATCH, sample=data)


def test_the_loss_inside_of_a_followed_network_is_counted_too() -> None:
    class Gated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.gate, self.up, self.down = nn.Linear(4, 8), nn.Linear(4, 8), nn.Linear(8, 3)

        def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.down(self.up(x) * F.silu(self.gate(x))), labels, ignore_index=1)

    found = find_blocks(Gated(), sample=(torch.rand(4, 4), torch.arange(4) % 3))
    assert [block.facts.kind for block in found.blocks] == ["gated pair"]
    graph = found.followed[""].training.local.graph
    assert any(getattr(node.target, "__name__", "") == "mean_loss" for node in graph.graph.nodes)


@pytest.mark.ranks(2, 3)
def test_a_loop_written_by_hand_is_told_that_its_mean_would_be_wrong(comm: AbstractCommunicator) -> None:
    built = mlp(4, 6, 3)
    x, y = drawn(), torch.tensor([0, -100, 2, 1, 0, 2])
    replicas, replica = simple_layout(*([rank] for rank in range(comm.size))), simple_layout(range(comm.size))
    model = tile(built, comm, batch_size=6, speeds="equal", layout=replicas, reduction="mean")
    with pytest.raises(InputError, match=r"holds -100, which losses leave out.*reduction='sum'"):
        model.local(x, y)
    model.local(x, y.clamp(min=0))
    tile(built, comm, batch_size=6, speeds="equal", layout=replica, reduction="mean").local(x, y)
    tile(built, comm, batch_size=6, speeds="equal", layout=replicas, reduction="sum").local(x, y)


def drawn() -> torch.Tensor:
    return torch.rand(6, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def penalised(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(output, target) + output.square().mean()


@pytest.mark.ranks(1, 2)
def test_what_cannot_be_exact_is_refused_by_name(comm: AbstractCommunicator, tmp_path: Path) -> None:
    built = mlp(4, 6, 3)
    x, y = drawn(), torch.arange(6) % 3
    weighted = partial(F.cross_entropy, weight=torch.ones(3, dtype=torch.float64))

    def fit(target: torch.Tensor, **how: Any) -> None:
        model = tile(built, comm, batch_size=6, speeds="equal", layout=some_layouts(comm.size)[0], reduction="mean")
        Trainer(model, optimizer=SGD, rescue_dir=tmp_path, **how).fit((x, target), batch_size=6, epochs=1)

    fit(y, loss=penalised)
    with pytest.raises(InputError, match="made of a mean that leaves targets out"):
        fit(torch.where(y == 1, -100, y), loss=penalised)
    with pytest.raises(InputError, match="with class weights divides by the weights of the samples that a rank sees"):
        fit(y, training_step=lambda model, batch: weighted(model(batch[0]), batch[1]))
    with pytest.raises(NotFiniteError, match="the loss is nan on rank 0"):
        fit(torch.full_like(y, -100), loss=nn.CrossEntropyLoss())
