"""Data sets dealt out to ranks, orders that ranks agree on, batches that one rank draws for all, and loops that are resumed."""

from collections import Counter, namedtuple
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch.utils.data import DataLoader, Dataset, TensorDataset

from tatami.comm import AbstractCommunicator
from tatami.errors import DataError, InputError
from tatami.parallel import (
    MultiNodeLoader,
    ResumableLoader,
    SynchronizedSampler,
    create_empty_dataset,
    scatter_dataset,
    scatter_index,
)
from tatami.parallel.scattering import share_of
from tatami.testing.worlds import World


class Squares(Dataset[int]):
    """Knows its items without having them."""

    def __init__(self, length: int) -> None:
        self.length = length

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> int:
        return index * index


KINDS: dict[str, Any] = {
    "list": lambda n: [index * index for index in range(n)],
    "array": lambda n: np.arange(n) ** 2,
    "tensor": lambda n: torch.arange(n) ** 2,
    "tensors": lambda n: TensorDataset(torch.arange(n) ** 2, torch.arange(n)),
    "dataset": Squares,
}


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_data_set_is_dealt_out_from_every_root(comm: AbstractCommunicator, kind: str, shuffle: bool) -> None:
    """Sub-sets are equal and as small as can be, and together they are the whole."""
    for root in range(comm.size):
        for length in (0, 1, comm.size, 5 * comm.size - 1):
            whole = KINDS[kind](length) if comm.rank == root else None
            for equal in (True, False):
                part = scatter_dataset(whole, comm, root=root, shuffle=shuffle, seed=length, force_equal_length=equal)
                items = [int(each[0]) if isinstance(each, tuple) else int(each) for each in part]
                assert items == [index * index for index in part.indices]
                everyones = comm.allgather_object(part.indices)
                sizes = [len(each) for each in everyones]
                assert sizes[comm.rank] == len(part)
                assert part.num_samples == length
                assert {each for indices in everyones for each in indices} == set(range(length))
                if equal:
                    assert set(sizes) == {-(-length // comm.size)}
                else:
                    assert sum(sizes) == length
                    assert max(sizes) - min(sizes) <= 1
                if shuffle and length > 15 and not equal:
                    assert [each for indices in everyones for each in indices] != list(range(length))


def test_the_references_numbers_of_scatter_index() -> None:
    shares = [share_of(10, rank=rank, ranks=3, equal=False) for rank in range(3)]
    assert shares == [range(4), range(4, 7), range(7, 10)]
    assert [share_of(10, rank=rank, ranks=3, equal=True) for rank in range(3)] == [range(4), range(3, 7), range(6, 10)]
    assert [list(share_of(1, rank=rank, ranks=4, equal=True)) for rank in range(4)] == [[0]] * 4


@given(num_samples=st.integers(0, 10_000), ranks=st.integers(1, 300), equal=st.booleans())
@example(num_samples=1244, ranks=23, equal=False)  # the reference's cases
@example(num_samples=230945, ranks=237, equal=False)
def test_shares_cover_everything_and_are_alike(num_samples: int, ranks: int, equal: bool) -> None:
    shares = [share_of(num_samples, rank=rank, ranks=ranks, equal=equal) for rank in range(ranks)]
    counted = Counter(index for share in shares for index in share)
    assert set(counted) == set(range(num_samples))
    if equal:
        assert {len(share) for share in shares} == {-(-num_samples // ranks)}
    else:
        assert [index for share in shares for index in share] == list(range(num_samples))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_indices_come_from_the_root_and_move_no_data(comm: AbstractCommunicator) -> None:
    root = comm.size - 1
    found = scatter_index(10 if comm.rank == root else None, comm, root=root, force_equal_length=False)
    assert found == share_of(10, rank=comm.rank, ranks=comm.size, equal=False)


def test_what_can_not_be_dealt_out_is_told_on_all_ranks(comm: AbstractCommunicator) -> None:
    with pytest.raises(DataError, match="rank 0 gave None; it is the root and needs a data set with"):
        scatter_dataset(None, comm)
    with pytest.raises(DataError, match="rank 0 gave a generator"):
        scatter_dataset((each for each in range(3)), comm)
    with pytest.raises(InputError, match="rank 0 gave no number of samples"):
        scatter_index(None, comm)
    with pytest.raises(InputError, match="0 or more samples, not -1"):
        scatter_index(-1, comm)
    if comm.size > 1:
        with pytest.raises(DataError, match=r"the list cannot be sent to rank 1: .*Give each rank the data set"):
            scatter_dataset([lambda: None] * comm.size, comm)
    assert len(scatter_dataset([1], comm)) == 1


def test_a_portion_ends_where_it_ends(comm: AbstractCommunicator) -> None:
    part = scatter_dataset(list(range(2 * comm.size)), comm)
    assert [part[0], part[1], part[-1]] == [2 * comm.rank, 2 * comm.rank + 1, 2 * comm.rank + 1]
    with pytest.raises(IndexError, match="there is no item 2 in this rank's part of 2 items"):
        part[2]
    batches = [each.tolist() for each in DataLoader(part, batch_size=1)]
    assert batches == [[2 * comm.rank], [2 * comm.rank + 1]]


@pytest.mark.parametrize("kind", KINDS)
def test_slices_of_a_portion_are_lists_of_its_items(comm: AbstractCommunicator, kind: str) -> None:
    part = scatter_dataset(KINDS[kind](4 * comm.size), comm)
    items = [index * index for index in part.indices]

    def values(items: list[Any]) -> list[int]:
        return [int(each[0]) if isinstance(each, tuple) else int(each) for each in items]

    for piece in (slice(None), slice(1, 3), slice(None, None, -1), slice(-2, None), slice(2, 99), slice(3, 1)):
        assert values(part[piece]) == items[piece]
    assert values(part[[2, 0, -1]]) == values(part[np.array([2, 0, -1])]) == [items[2], items[0], items[-1]]
    with pytest.raises(IndexError, match="there is no item 4"):
        part[[1, 4]]


@pytest.mark.parametrize("length", [0, 1, 10, 49])
@pytest.mark.parametrize("kind", ["list", "array", "tensor"])
def test_an_empty_data_set_is_as_long(kind: str, length: int) -> None:
    empty = create_empty_dataset(KINDS[kind](length))
    assert len(empty) == length
    assert all(each == () for each in empty)


# -- samplers ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch_size", [4, 7])
def test_batches_are_the_same_on_all_ranks_for_three_epochs(world: World, batch_size: int) -> None:
    def body(comm: AbstractCommunicator) -> list[list[list[int]]]:
        sampler = SynchronizedSampler(range(100), comm, seed=comm.rank)
        loader: Any = DataLoader(Squares(100), batch_size=batch_size, sampler=sampler)
        return [[batch.tolist() for batch in loader] for _ in range(3)]

    first, *others = world(body)
    assert all(other == first for other in others)
    assert first[0] != first[1] != first[2]
    for epoch in first:
        assert sorted(each for batch in epoch for each in batch) == [index * index for index in range(100)]


@pytest.mark.parametrize("share", ["all", "equal", "exact"])
def test_every_epoch_covers_everything_in_another_order(comm: AbstractCommunicator, share: Any) -> None:
    sampler = SynchronizedSampler(range(10), comm, share=share, seed=3)
    orders = []
    for epoch in range(3):
        assert sampler.epoch == epoch
        mine = list(sampler)
        assert len(mine) == len(sampler)
        everyones = comm.allgather_object(mine)
        assert {index for each in everyones for index in each} == set(range(10))
        if share == "exact":
            assert sum(map(len, everyones)) == 10
        if share == "equal":
            assert {len(each) for each in everyones} == {-(-10 // comm.size)}
        if share == "all":
            assert everyones == [everyones[0]] * comm.size
            assert sorted(mine) == list(range(10))
        orders.append(everyones)
    assert orders[0] != orders[1] != orders[2]
    assert list(SynchronizedSampler(range(10), comm, share=share, shuffle=False)) == (
        list(range(10)) if share == "all" else list(share_of(10, rank=comm.rank, ranks=comm.size, equal=share == "equal"))
    )


def test_a_sampler_goes_on_in_the_middle_of_an_epoch(comm: AbstractCommunicator) -> None:
    sampler = SynchronizedSampler(range(20), comm, seed=5)
    list(sampler)
    drawing = iter(sampler)
    seen = [next(drawing) for _ in range(8)]
    other = SynchronizedSampler(range(20), comm, seed=9)
    other.load_state_dict(sampler.state_dict())
    rest = list(other)
    assert rest == list(drawing)
    assert sorted(seen + rest) == list(range(20))
    assert list(other) == list(sampler)
    ahead = SynchronizedSampler(range(20), comm, seed=9)
    ahead.load_state_dict({**sampler.state_dict(position=18), "epoch": 1})
    assert list(ahead) == rest[-2:]


@pytest.mark.ranks(2, 3)
def test_samplers_that_differ_are_told_apart(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match=r"rank 0 has data_source of length 5, rank 1 has data_source of length 6"):
        SynchronizedSampler(range(5 + comm.rank), comm)
    with pytest.raises(InputError, match="no share 'some'; choose one of all, equal, exact"):
        SynchronizedSampler(range(5), comm, share="some")  # type: ignore[arg-type]


# -- one rank's batches for all ----------------------------------------------------------------------------------------------

Pair = namedtuple("Pair", ["x", "y"])


@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("batch_size", [4, 7])
def test_all_ranks_get_the_batches_of_the_root(comm: AbstractCommunicator, batch_size: int, paired: bool) -> None:
    x = torch.randn(30, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    data: Any = TensorDataset(x, torch.arange(30)) if paired else x
    for root in {0, comm.size - 1}:
        generator = torch.Generator().manual_seed(7)
        source: Any = DataLoader(data, batch_size=batch_size, shuffle=True, generator=generator)
        loader = MultiNodeLoader(source if comm.rank == root else None, comm, root=root)
        assert len(loader) == -(-30 // batch_size)
        orders = []
        for epoch in range(2):
            assert loader.epoch == epoch
            batches = list(loader)
            assert len(batches) == len(loader)
            whole = torch.cat([batch[0] for batch in batches] if paired else batches)
            assert whole.dtype == torch.float64
            torch.testing.assert_close(whole.sort(dim=0).values, x.sort(dim=0).values, rtol=0, atol=0)
            orders.append(comm.allgather_object(whole.tolist()))
            assert orders[-1] == [orders[-1][0]] * comm.size
            if paired:
                assert torch.equal(whole, x[torch.cat([batch[1] for batch in batches])])
        assert orders[0] != orders[1]
        loader.close()


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("after", [0, 2, 4])
def test_a_multi_node_loader_goes_on_where_another_was(comm: AbstractCommunicator, after: int) -> None:
    alone = comm.split(comm.rank)
    assert alone is not None

    def fresh() -> MultiNodeLoader:
        data = Squares(10)
        drawn = ResumableLoader(DataLoader(data, batch_size=3, sampler=SynchronizedSampler(data, alone, seed=5)))
        return MultiNodeLoader(drawn if comm.rank == 0 else None, comm)

    straight, broken = fresh(), fresh()
    expected = [[batch.tolist() for batch in straight] for _ in range(2)]
    assert expected[0] != expected[1]
    list(broken)
    for number, _ in enumerate(broken):
        if number + 1 >= after:
            break
    state = broken.state_dict()
    assert comm.allgather_object(state) == [state] * comm.size
    resumed = fresh()
    resumed.load_state_dict(state)
    rest = [batch.tolist() for batch in resumed]
    wanted = expected[1][max(after, 1) :]
    assert rest == (wanted or [batch.tolist() for batch in straight])
    plain = MultiNodeLoader([1, 2] if comm.rank == 0 else None, comm)
    with pytest.raises(DataError, match=r"the loader of rank 0 is a list, which cannot say where it is"):
        plain.state_dict()
    comm.barrier()


def test_batches_may_hold_anything(comm: AbstractCommunicator) -> None:
    batches: list[Any] = [
        {"words": ["one", "two"], "x": torch.ones(2, 0), "n": 3, "mask": torch.tensor([True, False])},
        Pair(torch.arange(3, dtype=torch.int32), (torch.tensor(1.5, dtype=torch.bfloat16), None)),
        [torch.ones(2, 3).t(), torch.ones(2, dtype=torch.complex64), "text"],
        torch.ones(1, dtype=torch.int16),
    ]
    loader = MultiNodeLoader(iter(batches) if comm.rank == 0 else None, comm)
    came = list(loader)
    assert repr(came) == repr(batches)
    assert type(came[1]) is Pair
    with pytest.raises(TypeError, match="the loader of rank 0 has no length"):
        len(loader)
    loader.close()


@pytest.mark.ranks(2, 3)
def test_what_a_loader_raises_is_told_on_all_ranks(comm: AbstractCommunicator) -> None:
    def broken() -> Iterator[int]:
        yield 1
        raise ZeroDivisionError("in the data")

    with pytest.raises(DataError, match="rank 0 gave None; it is the root"):
        MultiNodeLoader(None, comm)
    loader = MultiNodeLoader(broken() if comm.rank == 0 else None, comm)
    with pytest.raises(
        ZeroDivisionError if comm.rank == 0 else DataError,
        match="in the data" if comm.rank == 0 else "the loader of rank 0 failed: ZeroDivisionError: in the data",
    ):
        list(loader)
    unsendable = MultiNodeLoader([lambda: None] if comm.rank == 0 else None, comm)
    with pytest.raises(Exception, match="lambda"):
        list(unsendable)
    loader.close()
    unsendable.close()


@pytest.mark.ranks(1, 2)
def test_seeds_are_those_that_torch_takes(comm: AbstractCommunicator) -> None:
    sampler = SynchronizedSampler(range(20), comm, seed=2**64 - 1)
    assert sorted(sampler) == sorted(sampler) == list(range(20))  # of the second epoch, whose seed is one more
    for seed in (-1, 2**64):
        message = rf"a seed must be a whole number from 0 to 2\*\*64 - 1, not {seed}"
        with pytest.raises(InputError, match=message):
            SynchronizedSampler(range(20), comm, seed=seed)
        with pytest.raises(InputError, match=message):
            scatter_dataset([1, 2, 3], comm, shuffle=True, seed=seed)


class Indices(Squares):
    """Each item is its index."""

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
