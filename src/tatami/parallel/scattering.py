"""A data set dealt out to the ranks, each of which gets its own part and no more."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from typing import Any, Generic, TypeVar, overload

import numpy as np
import torch
from torch.utils.data import Dataset, Subset, TensorDataset

from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.errors import DataError, InputError
from tatami.inputs import check_seed

Item = TypeVar("Item")


class Portion(Dataset[Item], Generic[Item]):
    """The part of a data set that one rank has.

    Attributes:
        indices: of its items in the whole set.
        num_samples: of the whole set.
    """

    def __init__(self, items: Any, *, indices: Sequence[int], num_samples: int) -> None:
        """`items[i]` is item `indices[i]` of the whole set."""
        self._items = items
        self.indices = list(indices)
        self.num_samples = num_samples

    def __len__(self) -> int:
        return len(self.indices)

    def __iter__(self) -> Iterator[Item]:
        return (self[index] for index in range(len(self)))

    @overload
    def __getitem__(self, index: int) -> Item: ...

    @overload
    def __getitem__(self, index: slice | Sequence[int] | np.ndarray) -> list[Item]: ...

    def __getitem__(self, index: int | slice | Sequence[int] | np.ndarray) -> Item | list[Item]:
        """An item; a list of them for a slice, or for a list or array of indices, as in ChainerMN."""
        if isinstance(index, slice):
            index = range(*index.indices(len(self)))
        if isinstance(index, Sequence | np.ndarray):
            return [self[int(each)] for each in index]
        if not -len(self) <= index < len(self):
            raise IndexError(f"there is no item {index} in this rank's part of {len(self)} items")
        item: Item = self._items[index % len(self)]
        return item


def share_of(num_samples: int, *, rank: int, ranks: int, equal: bool) -> range:
    """The samples of one rank, one after the other.

    Args:
        num_samples: of all ranks.
        rank: whose part.
        ranks: how many there are.
        equal: all parts have ceil(num_samples / ranks) samples, and overlap where that does not divide evenly. Otherwise each
            sample is in one part, and the first `num_samples % ranks` parts have one more.

    Raises:
        InputError: fewer than 0 samples.
    """
    if num_samples < 0:
        raise InputError(f"a data set has 0 or more samples, not {num_samples}")
    if equal:
        start = num_samples * rank // ranks
        return range(start, start + -(-num_samples // ranks))
    small, more = divmod(num_samples, ranks)
    start = small * rank + min(rank, more)
    return range(start, start + small + (rank < more))


def scatter_index(
    num_samples: int | None, comm: AbstractCommunicator, *, root: int = 0, force_equal_length: bool = True
) -> range:
    """This rank's samples of `num_samples`, which only `root` need know. Collective; no data move.

    Raises:
        InputError: on all ranks, if `root` has no number of samples.
    """

    def number() -> int:
        if num_samples is None:
            raise InputError(f"scatter_index: rank {root} gave no number of samples; it is the root")
        return num_samples

    total = decided_on_root(comm, number, root=root)
    return share_of(total, rank=comm.rank, ranks=comm.size, equal=force_equal_length)


def scatter_dataset(
    dataset: Any,
    comm: AbstractCommunicator,
    *,
    root: int = 0,
    shuffle: bool = False,
    seed: int = 0,
    force_equal_length: bool = True,
) -> Portion[Any]:
    """Deal out the data set of `root`. Collective.

    A list, a tensor or a `TensorDataset` is cut, and each rank is sent its part. Any other data set travels whole, as the
    object that it is (which for files is their names), and each rank takes its items from it.

    Args:
        dataset: of `root`; that of others is not looked at, and may be None.
        comm: the ranks.
        root: the rank that has it.
        shuffle: deal in a random order.
        seed: of the order; that of `root`.
        force_equal_length: all parts have the same length, with items at their borders twice; a loop that calls collectives
            for each batch needs it. Metrics are exact without.

    Raises:
        DataError: on all ranks: no data set of known length on `root`, or one that cannot be sent.
        InputError: on all ranks: a seed that there is not.
        CommTimeoutError, RankDiedError: a rank did not come.
    """
    total = decided_on_root(comm, lambda: _length(dataset, root), root=root)
    order: Sequence[int] = range(total)
    if shuffle:
        generator = torch.Generator().manual_seed(check_seed(comm.bcast_object(seed, root=root)))
        order = torch.randperm(total, generator=generator, dtype=torch.int64, device="cpu").tolist()
    shares = [share_of(total, rank=rank, ranks=comm.size, equal=force_equal_length) for rank in range(comm.size)]
    parts = [[order[index] for index in share] for share in shares]
    mine = parts[comm.rank]
    if comm.rank != root:
        payload, problem = comm.recv_object(root), None
        items = pickle.loads(payload) if payload is not None else None
    else:
        items, problem = _part(dataset, mine), None
        for rank, indices in enumerate(parts):
            if rank == root:
                continue
            payload = None
            try:
                payload = None if problem is not None else pickle.dumps(_part(dataset, indices))
            except Exception as error:  # every exception of the data set: the other ranks wait to be told
                problem = f"the {type(dataset).__name__} cannot be sent to rank {rank}: {type(error).__name__}: {error}"
            comm.send_object(payload, rank)

    def check() -> None:
        if problem is not None:
            raise DataError(f"scatter_dataset: {problem}. Give each rank the data set, and cut it with scatter_index")

    decided_on_root(comm, check, root=root)
    return Portion(items, indices=mine, num_samples=total)


def create_empty_dataset(dataset: Any) -> list[tuple[()]]:
    """As many empty items as `dataset` has: for ranks that take part in every step and get their inputs from others."""
    return [()] * len(dataset)


def _length(dataset: Any, root: int) -> int:
    try:
        return len(dataset)
    except TypeError:
        given = f"a {type(dataset).__name__}" if dataset is not None else "None"
        raise DataError(f"scatter_dataset: rank {root} gave {given}; it is the root and needs a data set with len()") from None


def _part(dataset: Any, indices: Sequence[int]) -> Any:
    """The items of `indices`, cut out where that is cheap."""
    if isinstance(dataset, list | tuple):
        return [dataset[index] for index in indices]
    if isinstance(dataset, torch.Tensor):
        return dataset[torch.tensor(indices, dtype=torch.int64, device="cpu")]
    if isinstance(dataset, np.ndarray):
        return dataset[np.array(indices, dtype=np.int64)]
    if isinstance(dataset, TensorDataset):
        return TensorDataset(*(each[torch.tensor(indices, dtype=torch.int64, device="cpu")] for each in dataset.tensors))
    return Subset(dataset, indices)
