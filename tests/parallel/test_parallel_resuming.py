"""A training loop that is interrupted and resumed sees each sample once, also where workers draw ahead of it."""

from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from tatami.comm import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel import ResumableLoader, SynchronizedSampler
from tatami.testing.worlds import World


class Indices(Dataset[int]):
    """Each item is its index."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index


WORKERS = [0, 2]
"""Worker processes of a DataLoader, which draws four batches ahead for two of them."""


def samplers_of(world: World, *, length: int = 24, share: Any = "all", seed: int = 3) -> list[SynchronizedSampler]:
    """One for each rank. They send nothing once they are made, so that loaders can fork without threads around them."""
    return world(lambda comm: SynchronizedSampler(range(length), comm, share=share, seed=seed))


def loader_of(
    sampler: SynchronizedSampler, *, num_workers: int, batch_size: int | None = 4, drop_last: bool = False
) -> DataLoader[Any]:
    return DataLoader(
        Indices(24),
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        drop_last=drop_last,
        multiprocessing_context="fork" if num_workers else None,
    )


def drawn(batches: Iterable[torch.Tensor]) -> list[int]:
    return [index for batch in batches for index in batch.tolist()]


@pytest.mark.ranks(1, 2)
@pytest.mark.threads_only
@pytest.mark.parametrize("share", ["all", "exact"])
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_run_goes_on_with_each_sample_once_whatever_workers_have_drawn(world: World, share: Any, num_workers: int) -> None:
    """The first epoch is broken off after some batches, or after all of them, and another process goes on from there."""
    orders = samplers_of(world, share=share)
    for rank, order in enumerate(orders):
        first, second = list(order), list(order)
        for num_used in {0, 1, len(first) // 4 - 1, len(first) // 4}:
            loader = ResumableLoader(loader_of(samplers_of(world, share=share)[rank], num_workers=num_workers))
            used, state = [], loader.state_dict()
            for batch in islice(loader, num_used):
                used.append(batch)
                state = loader.state_dict()
            other = samplers_of(world, share=share, seed=8)[rank]
            resumed = ResumableLoader(loader_of(other, num_workers=num_workers))
            resumed.load_state_dict(state)
            assert resumed.state_dict() == state
            seen = drawn(used)
            if len(seen) < len(first):
                assert resumed.epoch == 0
                seen += drawn(resumed)
            assert seen == first
            assert resumed.epoch == 1
            assert drawn(resumed) == second


@pytest.mark.ranks(1)
@pytest.mark.threads_only
@pytest.mark.parametrize("num_workers", WORKERS)
def test_a_loop_that_is_broken_off_goes_on_where_it_was(world: World, num_workers: int) -> None:
    loader = ResumableLoader(loader_of(samplers_of(world)[0], num_workers=num_workers))
    used = drawn(islice(loader, 2))
    assert (len(used), loader.epoch) == (8, 0)
    rest = drawn(loader)
    assert sorted(used + rest) == list(range(24))
    assert loader.epoch == 1


@pytest.mark.ranks(1)
@pytest.mark.threads_only
@pytest.mark.parametrize("num_workers", WORKERS)
def test_what_drop_last_leaves_out_is_over_with_its_epoch(world: World, num_workers: int) -> None:
    sampler = samplers_of(world, length=22)[0]
    loader = ResumableLoader(loader_of(sampler, num_workers=num_workers, drop_last=True))
    states = [loader.state_dict() for _ in loader]
    assert states[-1] == loader.state_dict() == {"epoch": 1, "position": 0, "seed": 3}
    assert [state["position"] for state in states[:-1]] == [4, 8, 12, 16]
    assert len(drawn(loader)) == 20


@pytest.mark.ranks(3)
@pytest.mark.threads_only
def test_a_rank_without_samples_counts_the_same_epochs(world: World) -> None:
    for sampler in samplers_of(world, length=2, share="exact"):
        loader = ResumableLoader(loader_of(sampler, num_workers=0))
        for epoch in range(3):
            assert (loader.epoch, sampler.epoch) == (epoch, epoch)
            assert len(drawn(loader)) == len(sampler)


@pytest.mark.ranks(1)
@pytest.mark.threads_only
def test_a_sampler_that_workers_draw_from_does_not_guess(world: World) -> None:
    sampler = samplers_of(world)[0]
    loader = loader_of(sampler, num_workers=2)
    for number, _ in enumerate(loader):
        with pytest.raises(InputError, match=r"draws samples ahead of the loop(?s:.*)ResumableLoader"):
            sampler.state_dict()
        state = sampler.state_dict(position=4 * number + 4)
        assert (state["epoch"], state["position"]) == ((0, 4 * number + 4) if number < 5 else (1, 0))
    assert len(list(loader)) == 6
    with pytest.raises(InputError, match="position=25 is not between 0 and 24"):
        sampler.state_dict(position=25)

    ahead = loader_of(samplers_of(world)[0], num_workers=2, batch_size=1)
    assert len(list(islice(ahead, 1))) == 1
    with pytest.raises(InputError, match=r"was broken off(?s:.*)ResumableLoader"):
        list(ahead)


def test_a_resumable_loader_needs_to_know_what_a_batch_is(comm: AbstractCommunicator) -> None:
    sampler = SynchronizedSampler(range(6), comm)
    with pytest.raises(InputError, match="draws by a SequentialSampler"):
        ResumableLoader(DataLoader(Indices(6)))
    odd: Any = DataLoader(Indices(6), batch_sampler=_Odd(sampler))
    with pytest.raises(InputError, match="_Odd has no batch_size"):
        ResumableLoader(odd)
    loader = ResumableLoader(loader_of(sampler, num_workers=0, batch_size=None))
    assert len(loader) == 6
    assert sorted(loader) == list(range(6))


class _Odd:
    """Batches of sizes that it alone knows."""

    def __init__(self, sampler: SynchronizedSampler) -> None:
        self.sampler = sampler

    def __iter__(self) -> Iterator[list[int]]:
        return ([index] for index in self.sampler)
