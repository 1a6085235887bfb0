"""Losses of tiled models: who computes them, means that leave targets out, and terms that read weights outside of forward."""

import re
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import SAMPLES, check_fit, plain_fit
from networks import GPT, VOCABULARY
from torch import nn

from drawing import mlp, one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, NotFiniteError
from tatami.runtime.losses import reduction_of, setting_of
from tatami.testing.worlds import World
from tatami.tiling import Layout
from tatami.train import History, TiledModel, Trainer, find_blocks, move, tile
from tiled_rig import assert_close, gradients, simple_layout, some_layouts, tiled, whole_gradients

SGD = partial(torch.optim.SGD, lr=0.01)
network = partial(mlp, 4, 6, 3)


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 4, generator=generator, dtype=torch.float64)
    return x, torch.randn(SAMPLES, 3, generator=generator, dtype=torch.float64)


def summed(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().sum()


def tells_sum(output: torch.Tensor, target: torch.Tensor, reduction: str = "sum") -> torch.Tensor:
    return F.mse_loss(output, target, reduction=reduction)


class OwnLoss(nn.Module):
    def forward(self, output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return summed(output, target)


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (nn.MSELoss(), "mean"),
        (nn.MSELoss(reduction="sum"), "sum"),
        (F.mse_loss, "mean"),
        (F.cross_entropy, "mean"),
        (partial(F.cross_entropy, reduction="sum"), "sum"),
        (partial(partial(F.mse_loss, reduction="sum")), "sum"),
        (partial(F.mse_loss), "mean"),
        (partial(nn.L1Loss(reduction="sum")), "sum"),
        (nn.KLDivLoss(reduction="batchmean"), "mean"),
        (partial(F.kl_div, reduction="batchmean"), "mean"),
        (tells_sum, "sum"),
        (partial(tells_sum, reduction="mean"), "mean"),
    ],
)
def test_losses_that_tell(loss: Any, expected: str) -> None:
    assert reduction_of(loss, given=None, otherwise=None) == expected
    assert reduction_of(loss, given=None, otherwise="sum" if expected == "mean" else "mean") == expected
    with pytest.raises(InputError, match=f"reduces by '{expected}', but the Trainer was given"):
        reduction_of(loss, given="sum" if expected == "mean" else "mean", otherwise=None)


@pytest.mark.parametrize("loss", [summed, lambda x, y: (x - y).square().sum(), OwnLoss(), partial(summed)])
def test_losses_that_do_not_tell(loss: Any) -> None:
    name = re.escape(getattr(getattr(loss, "func", loss), "__name__", "OwnLoss"))
    with pytest.raises(InputError, match=rf"the loss {name} does not tell whether.*Give the Trainer reduction='mean' or"):
        reduction_of(loss, given=None, otherwise=None)
    assert reduction_of(loss, given="sum", otherwise="mean") == "sum"
    assert reduction_of(loss, given=None, otherwise="mean") == "mean"


@pytest.mark.parametrize(
    ("loss", "given", "match"),
    [
        (partial(F.mse_loss, size_average=False), None, "torch's old size_average; give reduction="),
        (partial(F.mse_loss, reduce=False), None, "torch's old reduce; give reduction="),
        (partial(F.mse_loss, reduction="batchmean"), None, "'mean' or 'sum', not by 'batchmean'"),
        (nn.MSELoss(reduction="none"), None, "'mean' or 'sum', not by 'none'"),
        (summed, "total", "reduction must be 'mean' or 'sum', as the loss function's own, not 'total'"),
    ],
)
def test_losses_that_can_not_be(loss: Any, given: Any, match: str) -> None:
    with pytest.raises(InputError, match=match):
        reduction_of(loss, given=given, otherwise="mean")


def test_the_targets_that_a_functional_loss_leaves_out_are_known() -> None:
    assert setting_of(F.cross_entropy, "ignore_index") == -100
    assert setting_of(partial(F.cross_entropy, ignore_index=3), "ignore_index") == 3
    assert setting_of(F.mse_loss, "ignore_index") is None


@pytest.mark.parametrize("told", ["nothing", "trainer", "tile"])
def test_a_lambda_in_the_trainer(world: World, told: str) -> None:
    expected = plain_fit(network(), [batch()], loss=lambda model, batch: summed(model(batch[0]), batch[1]), optimizer=SGD)

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        make = partial(Trainer, model, optimizer=SGD, loss=lambda output, target: summed(output, target))
        if told == "nothing":
            with pytest.raises(InputError, match="the loss <lambda> does not tell"):
                make()
        history = make(reduction=None if told == "tile" else "sum").fit(batch(), batch_size=SAMPLES, iterations=1)
        assert model.reduction == "sum"
        return history

    check_fit(world, network(), expected, fit, reduction="sum" if told == "tile" else None)


@pytest.mark.parametrize("told", [None, "sum", "mean"])
def test_a_loop_written_by_hand_goes_backward_only_where_it_is_known(comm: AbstractCommunicator, told: str | None) -> None:
    plain, (x, y) = network(), batch()
    torch.autograd.backward(F.mse_loss(plain(x), y, reduction=told or "mean"))
    built = network()
    for layout in some_layouts(comm.size):
        model = tiled(built, comm, layout=layout, batch_size=SAMPLES, reduction=told)
        here_x, here_y = model.local(x, y)
        if told is None:
            with torch.no_grad():
                model(here_x)
            loss = F.mse_loss(model(here_x), here_y)
            with pytest.raises(InputError, match=r"does not know whether the loss.*Give tatami.tile reduction='mean' or"):
                torch.autograd.backward(loss)
            assert all(parameter.grad is None for parameter in model.parameters())
            model.reduction = "mean"
        torch.autograd.backward(F.mse_loss(model(here_x), here_y, reduction=told or "mean"))
        assert_close(whole_gradients(model), gradients(plain), what=f"gradients on {layout}")
        with pytest.raises(InputError, match="reduction must be 'mean' or 'sum'"):
            model.reduction = "none"  # type: ignore[assignment]


def variance(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) + torch.relu(1 - output.std(0)).mean()


def contrast(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    del target
    return F.cross_entropy(output @ output.T, torch.arange(len(output)))


def masked(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    mask = (target > 0).double()
    return ((output - target).square() * mask).sum() / mask.sum()


def penalized(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(output, target) + 0.1 * output.abs().mean()


@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize(
    ("loss", "reduction", "is_taken"),
    [
        (variance, "mean", False),
        (contrast, "mean", False),
        (masked, "mean", False),
        (summed, "mean", False),
        (lambda output, target: F.mse_loss(output, target) / F.mse_loss(output, target).item(), "mean", False),
        (penalized, "sum", False),
        (penalized, "mean", True),
        (summed, "sum", True),
    ],
)
def test_a_loss_of_ones_own_is_tried_on_the_first_batch(
    comm: AbstractCommunicator, loss: Any, reduction: Any, is_taken: bool
) -> None:
    trainer = Trainer(tiled(network(), comm, layout=some_layouts(comm.size)[0], batch_size=SAMPLES),
                      optimizer=SGD, loss=loss, reduction=reduction)  # fmt: skip
    if is_taken:
        assert trainer.fit(batch(), batch_size=SAMPLES, epochs=1).losses
        return
    with pytest.raises(InputError, match=f"is said to be the {reduction} over the samples of a batch, and is not"):
        trainer.fit(batch(), batch_size=SAMPLES, epochs=1)


TEXTS, BATCH, TOKENS = 14, 7, 6
MOMENTUM = partial(torch.optim.SGD, lr=0.2, momentum=0.9)
Step = Callable[[Any, dict[str, torch.Tensor]], torch.Tensor]


def table() -> dict[str, torch.Tensor]:
    """Of the first batch the second half is left out; of the others a part that differs from sample to sample."""
    generator = torch.Generator().manual_seed(1)
    text = torch.randint(VOCABULARY, (TEXTS, TOKENS), generator=generator)
    labels = torch.where(torch.rand(text.shape, generator=generator) < torch.rand(TEXTS, 1, generator=generator), -100, text)
    labels[3:BATCH] = -100
    return {"idx": text, "labels": labels}


class GptLoss(nn.Module):
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


def gpt() -> nn.Module:
    return GptLoss().double()


def by_hand(model: Any, batch: dict[str, torch.Tensor]) -> Any:
    logits = model(**batch)["logits"][:, :-1]
    return nn.CrossEntropyLoss()(logits.flatten(0, 1), batch["labels"][:, 1:].flatten())


@pytest.mark.parametrize("step", [None, by_hand], ids=["own loss", "by hand"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_means_over_the_targets_that_count_are_those_of_one_machine(world: World, accumulate: int, step: Step | None) -> None:
    data, plain = table(), gpt()
    updates = [
        {key: value[start : start + BATCH * accumulate] for key, value in data.items()}
        for start in range(0, TEXTS, BATCH * accumulate)
    ]
    expected = plain_fit(plain, updates, loss=lambda model, batch: model(**batch)["loss"], optimizer=MOMENTUM)
    evaluated = plain(**data)["loss"].item()

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        trainer = Trainer(model, optimizer=MOMENTUM, training_step=step, accumulate_grad_batches=accumulate)
        history = trainer.fit(data, batch_size=BATCH, epochs=1, shuffle=False)
        assert trainer.evaluate(data, batch_size=5)["loss"] == pytest.approx(evaluated, rel=1e-10)
        return history

    check_fit(world, gpt(), expected, fit, batch_size=BATCH, sample=data)


def test_the_mean_over_samples_of_a_divergence(comm: AbstractCommunicator) -> None:
    """In the Trainer, which is not told that it is a mean, and in a loop of one's own."""
    plain, loss = nn.Sequential(mlp(4, 6, 3), nn.LogSoftmax(-1)), nn.KLDivLoss(reduction="batchmean")
    built, (x, y) = nn.Sequential(mlp(4, 6, 3), nn.LogSoftmax(-1)), batch()
    y = y.softmax(-1)
    updates = [(x[:4], y[:4]), (x[4:], y[4:])]
    options: dict[str, Any] = {"batch_size": 4, "layout": some_layouts(comm.size)[-1], "speeds": "equal"}
    model = tile(built, comm, **options, reduction="mean")
    loss(model(model.local(updates[0])[0]), model.local(updates[0])[1]).backward()
    loss(plain(updates[0][0]), updates[0][1]).backward()
    assert_close(whole_gradients(model), gradients(plain), what="gradients")
    expected = plain_fit(plain, updates, loss=lambda model, batch: loss(model(batch[0]), batch[1]), optimizer=SGD)
    history = Trainer(tile(built, comm, **options), optimizer=SGD, loss=loss).fit(updates, epochs=1)
    assert history.losses == pytest.approx(expected[0], rel=1e-10)


@pytest.mark.ranks(1, 2, 3)
def test_a_batch_none_of_whose_targets_counts_has_no_part_in_its_update(comm: AbstractCommunicator, tmp_path: Path) -> None:
    """It is an error only where the whole update has no target that counts."""
    plain, built = mlp(4, 6, 3), mlp(4, 6, 3)
    x, y = torch.cat([drawn() - 0.3 * number for number in range(5)]), torch.arange(30) % 3
    y[6:18], y[20] = -100, -100
    updates = [(x[:12], y[:12]), (x[12:24], y[12:24]), (x[24:], y[24:])]
    expected = plain_fit(plain, updates, loss=lambda model, batch: F.cross_entropy(model(batch[0]), batch[1]), optimizer=SGD)

    def fit(target: torch.Tensor) -> History:
        model = tile(built, comm, batch_size=6, speeds="equal", layout=some_layouts(comm.size)[-1], reduction="mean")
        trainer = Trainer(
            model, optimizer=SGD, loss=nn.CrossEntropyLoss(), accumulate_grad_batches=2, rescue_dir=tmp_path / str(comm.rank)
        )
        return trainer.fit((x, target), batch_size=6, epochs=1, shuffle=False)

    assert fit(y).losses == pytest.approx(expected[0], rel=1e-10)
    with pytest.raises(NotFiniteError, match=r"the loss is nan on rank 0 .* in iteration 2"):
        fit(torch.cat([y[:12], torch.full((12,), -100), y[24:]]))


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
        Trainer(model, optimizer=MOMENTUM, rescue_dir=tmp_path, **how).fit((x, target), batch_size=6, epochs=1)

    fit(y, loss=penalised)
    with pytest.raises(InputError, match="made of a mean that leaves targets out"):
        fit(torch.where(y == 1, -100, y), loss=penalised)
    with pytest.raises(InputError, match="with class weights divides by the weights of the samples that a rank sees"):
        fit(y, training_step=lambda model, batch: weighted(model(batch[0]), batch[1]))
    with pytest.raises(NotFiniteError, match="the loss is nan on rank 0"):
        fit(torch.full_like(y, -100), loss=nn.CrossEntropyLoss())


ROWS = 8


@one_at_a_time
def pair(outputs: int = 2) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, outputs)).double()


def data() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    x, y = (torch.randn(ROWS, n, generator=generator, dtype=torch.float64) for n in (3, 2))
    return x, y


def one_replica(size: int) -> Layout:
    return simple_layout(range(size))


def replicas(size: int) -> Layout:
    return simple_layout(*([rank] for rank in range(size)))


def squares(model: Any) -> torch.Tensor:
    total = torch.zeros((), dtype=torch.float64)
    for parameter in model.parameters():
        total = total + parameter.square().sum()
    return total


def trainer(comm: AbstractCommunicator, layout: Layout, term: Callable[[Any], torch.Tensor], reduction: Any) -> Trainer:
    def step(model: Any, batch: Any) -> torch.Tensor:
        x, y = batch
        return nn.functional.mse_loss(model(x), y, reduction=reduction) + 0.1 * term(model)

    model = tiled(pair(), comm, layout=layout, batch_size=ROWS, reduction=reduction)
    return Trainer(model, optimizer=SGD, training_step=step, reduction=reduction)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(
    ("term", "told"),
    [
        (squares, r"reads 0\.weight outside of .* the loss of the Trainer would be wrong"),
        (lambda model: next(model.parameters()).norm(), r"reads 0\.weight outside of .* the gradient of a norm"),
    ],
)
def test_the_trainer_refuses_a_term_of_weights_that_ranks_share(comm: AbstractCommunicator, term: Any, told: str) -> None:
    run = trainer(comm, one_replica(comm.size), term, "mean")
    with pytest.raises(InputError, match=told):
        run.fit(data(), batch_size=ROWS, iterations=3)
    comm.barrier()  # the ranks are still in step


@pytest.mark.ranks(1, 2, 3)
def test_where_each_rank_has_all_weights_a_term_of_them_is_exact(comm: AbstractCommunicator) -> None:
    def loss(model: nn.Module, batch: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        return nn.functional.mse_loss(model(batch[0]), batch[1]) + 0.1 * squares(model)

    expected, _ = plain_fit(pair(), [data()] * 3, loss=loss, optimizer=SGD)
    run = trainer(comm, replicas(comm.size), squares, "mean")
    assert run.fit(data(), batch_size=ROWS, iterations=3, shuffle=False).losses == pytest.approx(expected, rel=1e-12)
    if comm.size > 1:
        move(run.model, one_replica(comm.size), optimizer=run.optimizer)
        with pytest.raises(InputError, match="the loss of the Trainer would be wrong"):
            run.fit(data(), batch_size=ROWS, iterations=1)


@pytest.mark.ranks(2)
def test_a_sum_over_samples_would_count_the_term_once_for_each_replica(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match=r"\(training_step\) is said to be the sum over the samples of a batch, and is not"):
        trainer(comm, replicas(2), squares, "sum").fit(data(), batch_size=ROWS, iterations=1)


@pytest.mark.ranks(2)
def test_a_term_that_begins_late_is_found_too(comm: AbstractCommunicator) -> None:
    passes = 0

    def late(model: Any) -> torch.Tensor:
        nonlocal passes
        passes += 1
        return squares(model) if passes > 20 else torch.zeros((), dtype=torch.float64)

    run = trainer(comm, one_replica(2), late, "mean")
    with pytest.raises(InputError, match="the loss of the Trainer would be wrong"):
        run.fit(data(), batch_size=ROWS, iterations=70)
    assert 20 < run.iteration <= 51
    comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.threads_only
@pytest.mark.parametrize("terms", [False, True])
def test_a_loop_of_ones_own_is_warned_once_and_only_of_such_terms(world: World, terms: bool) -> None:
    def body(comm: AbstractCommunicator) -> None:
        x, y = data()
        model = tiled(pair(), comm, layout=one_replica(2), batch_size=ROWS, reduction="mean")
        for number in range(12):
            here_x, here_y = model.local(x, y)
            loss = nn.functional.mse_loss(model(here_x), here_y)
            if number % 3 == 1:  # two forward passes before one backward pass
                loss = loss + model(here_x).square().mean()
            torch.autograd.backward(loss + (0.1 * squares(model) if terms else 0.0))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        world(body)
    told = [str(each.message) for each in caught if "outside of the network" in str(each.message)]
    assert len(told) == int(terms)
    assert all("the gradient of a sum over elements is exact" in each for each in told)


@pytest.mark.ranks(2, 3)
def test_a_loss_is_judged_by_the_model_that_made_its_outputs(comm: AbstractCommunicator) -> None:
    """The norm of a batch is refused where ranks see parts of it, but not by another model that is alive as well."""
    x, _ = data()
    other = tiled(pair(), comm, layout=replicas(comm.size), batch_size=ROWS, reduction="mean")
    other(other.local(x)).square().mean().backward()
    with pytest.raises(InputError, match="the loss takes"):
        other(other.local(x)).square().mean().sqrt().backward()
    model, plain = tiled(pair(), comm, layout=one_replica(comm.size), batch_size=ROWS, reduction="mean"), pair()
    model(model.local(x)).square().mean().sqrt().backward()
    torch.autograd.backward(plain(x).square().mean().sqrt())
    assert_close(whole_gradients(model), gradients(plain), what="gradients")


@pytest.mark.ranks(2)
@pytest.mark.parametrize("samples", [2, 3])
def test_a_rank_with_a_single_sample_refuses_no_mean(comm: AbstractCommunicator, samples: int) -> None:
    """What a sample gives alone, and what a batch gives, have the same form there."""
    x, _ = data()
    model, plain = tiled(pair(1), comm, layout=replicas(2), batch_size=samples, reduction="mean"), pair(1)
    torch.autograd.backward(nn.functional.softplus(-plain(x[:samples])).mean())
    torch.autograd.backward(nn.functional.softplus(-model(model.local(x[:samples]))).mean())
    for mine, own in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, own.grad, rtol=1e-12, atol=1e-14)
