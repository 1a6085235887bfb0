"""Ranks that are given different batches are told so, by name, before the gradients of such batches are added up."""

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, Dataset, TensorDataset

from drawing import mlp
from tatami.comm.agreement import DEBUG_VARIABLE
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.runtime.same_batch import numbers_of
from tatami.tiling import Layout
from tatami.train import TiledModel, Trainer
from tiled_rig import assert_close, gradients, simple_layout, tiled, whole_gradients

SAMPLES = 40
SGD = partial(torch.optim.SGD, lr=0.01)
network = partial(mlp, 4, 8, 3)


def one_replica(size: int) -> Layout:
    return simple_layout(list(range(size)))


def one_row(size: int) -> Layout:
    return simple_layout(*([rank] for rank in range(size)))


def batch(samples: int = SAMPLES, *, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(samples, 4, generator=generator, dtype=torch.float64)
    return x, torch.randint(3, (samples,), generator=generator)


def step(model: TiledModel, x: torch.Tensor, y: torch.Tensor) -> None:
    here_x, here_y = model.local(x, y)
    torch.autograd.backward(F.cross_entropy(model(here_x), here_y))


@pytest.mark.ranks(2, 3, 4)
def test_a_loader_with_a_seed_of_its_own_is_found_in_the_first_pass(comm: AbstractCommunicator) -> None:
    built = network()
    last = comm.size - 1
    model = tiled(built, comm, layout=one_replica(comm.size), batch_size=SAMPLES)
    order = torch.Generator().manual_seed(7 if comm.rank == last else 3)
    x, y = next(iter(DataLoader(TensorDataset(*batch()), batch_size=20, shuffle=True, generator=order)))
    with pytest.raises(InputError, match=rf"different batches: rank {last} has other samples than rank 0\. .*same seed"):
        step(model, x, y)
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("passes_before", [0, 2])
def test_batches_of_other_sizes_are_found_in_every_pass(comm: AbstractCommunicator, passes_before: int) -> None:
    """In the third pass no rank asks the others: the sizes have come with the gradients."""
    built = network()
    last = comm.size - 1
    model = tiled(built, comm, layout=one_row(comm.size), batch_size=SAMPLES)
    for _ in range(passes_before):
        step(model, *batch())
    model.zero_grad()
    with pytest.raises(InputError, match=rf"different batches: rank {last} has 39 samples, rank 0 has 40\."):
        step(model, *batch(39 if comm.rank == last else 40))
    assert all(parameter.grad is None for parameter in model.parameters())
    step(model, *batch())


@pytest.mark.ranks(2, 3)
@pytest.mark.threads_only
def test_a_rank_that_leaves_a_backward_pass_out_is_found_in_the_next_sum(comm: AbstractCommunicator) -> None:
    built, last, (x, y) = network(), comm.size - 1, batch()
    model = tiled(built, comm, layout=one_row(comm.size), batch_size=SAMPLES)
    step(model, x, y)
    if comm.rank == last:
        model(model.local(x, y)[0])
    with pytest.raises(InputError, match=rf"rank {last} has gone through another number of forward passes .* than rank 0"):
        step(model, x, y)


@pytest.mark.ranks(2, 4)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_noise_that_replicas_draw_for_themselves_is_refused_in_debug_mode_only(
    comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, debug)
    built = network()
    model = tiled(built, comm, layout=one_row(comm.size), batch_size=SAMPLES)
    x, y = batch()
    x = x + comm.rank
    if debug == "0":
        step(model, x, y)
        return
    with pytest.raises(InputError, match="rank 1 has other samples than rank 0"):
        step(model, x, y)


@pytest.mark.ranks(2, 3)
def test_debug_mode_looks_at_every_number_in_every_pass(comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DEBUG_VARIABLE, "1")
    built = network()
    model = tiled(built, comm, layout=one_replica(comm.size), batch_size=SAMPLES)
    for number in range(7):
        x, y = batch(seed=number)
        if number == 6 and comm.rank == 1:
            y[17] = (y[17] + 1) % 3
        told = pytest.raises(InputError, match="rank 1 has other samples than rank 0") if number == 6 else nullcontext()
        with told:
            step(model, x, y)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.usefixtures("_sums_by_messages")
def test_ranks_compare_in_few_passes_and_what_they_compute_is_the_same(comm: AbstractCommunicator) -> None:
    plain, built = network(), network()
    for number in range(10):
        x, y = batch(seed=number)
        torch.autograd.backward(F.cross_entropy(plain(x), y))
    model = tiled(built, comm, layout=one_row(comm.size), batch_size=SAMPLES)
    asked: list[int] = []
    original = model.comm.allgather_object

    def noting(value: Any) -> list[Any]:
        asked.append(number)
        return original(value)

    model.comm.allgather_object = noting  # type: ignore[method-assign]
    for number in range(10):
        step(model, *batch(seed=number))
    del model.comm.allgather_object
    assert_close(whole_gradients(model), gradients(plain), what="gradients")
    assert asked == ([0, 1, 3, 7] if comm.size > 1 else [])


def test_a_batch_that_is_used_again_is_the_same_one(comm: AbstractCommunicator) -> None:
    built = network()
    model = tiled(built, comm, layout=one_replica(comm.size), batch_size=SAMPLES)
    x, y = model.local(*batch())
    for _ in range(5):
        torch.autograd.backward(F.cross_entropy(model(x), y))


@pytest.mark.ranks(2, 3)
def test_the_trainer_compares_its_data_before_it_trains(comm: AbstractCommunicator) -> None:
    built = network()
    last = comm.size - 1
    mine = 5 if comm.rank == last else 0
    model = tiled(built, comm, layout=one_row(comm.size), batch_size=SAMPLES)
    make = partial(Trainer, model, optimizer=SGD, loss=nn.CrossEntropyLoss())
    trainer = make()
    cases: list[tuple[Any, dict[str, Any], str]] = [
        (batch(seed=mine), {}, f"different data: rank {last} has other samples than rank 0"),
        (batch(SAMPLES + mine), {}, f"different data: rank {last} has 45 samples, rank 0 has 40"),
        (TensorDataset(*batch(SAMPLES + mine)), {}, f"different data: rank {last} has 45 samples, rank 0 has 40"),
        (batch(), {"batch_size": 10 + mine}, f"rank 0 has batch_size 10, rank {last} has batch_size 15"),
        (batch(), {"iterations": 3 + mine}, f"rank 0 has iterations 3, rank {last} has iterations 8"),
    ]
    for data, options, match in cases:
        with pytest.raises(InputError, match=match):
            trainer.fit(data, **{"batch_size": 10, "iterations": 3, **options})
    with pytest.raises(InputError, match=f"rank 0 has seed 0, rank {last} has seed 5"):
        make(seed=mine).fit(batch(), batch_size=10, iterations=3)
    with pytest.raises(InputError, match=f"different data: rank {last} has other samples than rank 0"):
        trainer.evaluate(batch(seed=mine), batch_size=10)
    assert trainer.iteration == 0
    assert len(trainer.fit(batch(), batch_size=10, iterations=3, validation=batch(7)).losses) == 3


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("debug", ["0", "1"])
def test_what_ranks_of_a_replica_fetch_for_themselves_must_be_the_same(
    comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch, debug: str
) -> None:
    """A data set draws its augmentations on every rank; replicas may draw others."""
    monkeypatch.setenv(DEBUG_VARIABLE, debug)
    (x, y), built = batch(), network()

    class Augmented(Dataset[tuple[torch.Tensor, torch.Tensor]]):
        def __init__(self, seed: int) -> None:
            self.generator = torch.Generator().manual_seed(seed)

        def __len__(self) -> int:
            return SAMPLES

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            return x[index] + torch.rand(4, generator=self.generator, dtype=torch.float64), y[index]

    for layout, seed, is_refused in (
        (one_replica(comm.size), 0, False),
        (one_row(comm.size), comm.rank, False),
        (one_replica(comm.size), comm.rank, True),
    ):
        trainer = Trainer(tiled(built, comm, layout=layout, batch_size=20), optimizer=SGD, loss=nn.CrossEntropyLoss())
        refused = pytest.raises(InputError, match="batches: rank 1 has other samples than rank 0")
        with refused if is_refused else nullcontext():
            assert len(trainer.fit(Augmented(seed), batch_size=20, epochs=1).losses) == 2


@pytest.mark.parametrize("whole", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
@pytest.mark.parametrize("shape", [(1,), (40,), (7, 3), (100, 2, 5), (3, 0), (0, 4)])
def test_what_is_compared(shape: tuple[int, ...], dtype: torch.dtype, whole: bool) -> None:
    tensor = (10 * torch.rand(*shape, generator=torch.Generator().manual_seed(0))).to(dtype)
    (numbers,) = numbers_of(shape[0], [tensor], whole=whole).tensors
    assert not numbers.differs(numbers)
    (again,) = numbers_of(shape[0], [tensor.clone()], whole=whole).tensors
    assert not numbers.differs(again)
    (reshaped,) = numbers_of(shape[0], [tensor[..., None]], whole=whole).tensors
    assert numbers.differs(reshaped)
    if tensor.numel():
        (others,) = numbers_of(shape[0], [~tensor if dtype is torch.bool else tensor + 1], whole=whole).tensors
        assert numbers.differs(others)
        assert others.differs(numbers)


@pytest.mark.parametrize("whole", [False, True])
def test_rounding_is_no_difference_and_nan_is_equal_to_nan(whole: bool) -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    x[0, 0] = float("nan")
    x[3, 2] = float("inf")
    rounded = (x.double() * (1 + 1e-9)).float()
    (one,), (two,) = numbers_of(50, [x], whole=whole).tensors, numbers_of(50, [rounded], whole=whole).tensors
    assert not one.differs(two)
    assert not replace(one, form=two.form).differs(two)


def test_all_numbers_are_looked_at_in_debug_mode() -> None:
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(0))
    (first,) = numbers_of(50, [x], whole=True).tensors
    for row, replica in ((0, 1), (17, 3), (49, 5)):
        other = x.clone()
        other[row, replica] += 0.5
        assert first.differs(numbers_of(50, [other], whole=True).tensors[0])
    swapped = x[torch.tensor([1, 0, *range(2, 50)])]
    assert first.differs(numbers_of(50, [swapped], whole=True).tensors[0])
