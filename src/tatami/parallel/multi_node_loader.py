"""Batches that one rank draws and all ranks get: from a DataLoader, a generator, or any source that only that rank can read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sized
from dataclasses import dataclass
from typing import Any, cast

import torch

from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.comm.checked import DTYPES
from tatami.errors import CommError, DataError
from tatami.functions.structure import mapped


@dataclass(frozen=True, slots=True)
class _Slot:
    """Where a tensor of a batch was taken out, to travel as it lies in memory."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class MultiNodeLoader:
    """Iterates over the batches of one rank, on all ranks; they begin and end an epoch together. Collective.

    A batch is a tensor, or tuples, lists and dicts of tensors and other objects, nested; dtypes are kept.

    Attributes:
        epoch: how many passes have ended.
    """

    def __init__(self, loader: Iterable[Any] | None, comm: AbstractCommunicator, *, root: int = 0) -> None:
        """
        Args:
            loader: of `root`; that of others is not looked at, and may be None.
            comm: the ranks.
            root: the rank that draws.

        Raises:
            DataError: on all ranks, if `root` has none.
        """
        private = comm.duplicate()
        self._comm, self._root, self._loader = private, root, loader
        self._length = decided_on_root(self._comm, lambda: _length(loader, root), root=root)
        can = hasattr(loader, "state_dict") and hasattr(loader, "load_state_dict")
        self.is_resumable: bool = private.bcast_object(can, root=root)
        """Whether the loader of `root` can say where it is."""
        self.epoch = 0

    def __len__(self) -> int:
        """Batches of an epoch.

        Raises:
            TypeError: the root's loader does not know.
        """
        if self._length is None:
            raise TypeError(f"the loader of rank {self._root} has no length")
        return self._length

    def __iter__(self) -> Iterator[Any]:
        """
        Raises:
            DataError: on all ranks but `root`, what its loader raised there; says so.
        """
        if self._comm.rank == self._root:
            yield from self._draw()
        else:
            yield from self._receive()
        self.epoch += 1

    def state_dict(self) -> dict[str, Any]:
        """Where this loader is, for `load_state_dict`; the same on all ranks, also in the middle of an epoch. Collective.

        Raises:
            DataError: on all ranks, the root's loader has no `state_dict()`, as `ResumableLoader` has.
        """
        return {"epoch": self.epoch, "loader": decided_on_root(self._comm, self._loader_state, root=self._root)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state_dict` returned. Raises as it does."""

        def load() -> None:
            self._loader_state()
            cast("Any", self._loader).load_state_dict(state["loader"])

        decided_on_root(self._comm, load, root=self._root)
        self.epoch = state["epoch"]

    def _loader_state(self) -> Any:
        if not hasattr(self._loader, "state_dict"):
            raise DataError(
                f"the loader of rank {self._root} is a {type(self._loader).__name__}, which cannot say where it is; give "
                "MultiNodeLoader a tatami.parallel.ResumableLoader"
            )
        return cast("Any", self._loader).state_dict()

    def close(self) -> None:
        """Leave the other ranks."""
        self._comm.close()

    def _draw(self) -> Iterator[Any]:
        assert self._loader is not None
        try:
            for batch in self._loader:
                tensors: list[torch.Tensor] = []
                header = _taken_apart(batch, tensors)
                self._comm.bcast_object(("batch", header), root=self._root)
                for tensor in tensors:
                    self._comm.bcast(tensor, root=self._root)
                yield batch
        except CommError:
            raise
        except Exception as error:
            self._comm.bcast_object(("error", f"{type(error).__name__}: {error}"), root=self._root)
            raise
        self._comm.bcast_object(("end", None), root=self._root)

    def _receive(self) -> Iterator[Any]:
        while True:
            kind, content = self._comm.bcast_object(None, root=self._root)
            if kind == "end":
                return
            if kind == "error":
                raise DataError(f"the loader of rank {self._root} failed: {content}")
            yield mapped(content, lambda leaf: self._arrive(leaf) if isinstance(leaf, _Slot) else leaf)

    def _arrive(self, slot: _Slot) -> torch.Tensor:
        tensor = torch.empty(slot.shape, dtype=slot.dtype, device="cpu")
        self._comm.bcast(tensor, root=self._root)
        return tensor


def _taken_apart(value: Any, tensors: list[torch.Tensor]) -> Any:
    """`value` with each tensor that ranks can send replaced by its slot."""

    def take(leaf: Any) -> Any:
        if not (isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.dtype in DTYPES):
            return leaf
        tensors.append(leaf.detach().contiguous())
        return _Slot(shape=tuple(leaf.shape), dtype=leaf.dtype)

    return mapped(value, take)


def _length(loader: Any, root: int) -> int | None:
    if not isinstance(loader, Iterable):
        raise DataError(f"MultiNodeLoader: rank {root} gave {loader!r}; it is the root, and draws the batches of all ranks")
    try:
        return len(cast("Sized", loader))
    except TypeError:
        return None
