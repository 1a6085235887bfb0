"""Norms over the units of all ranks, of gradients and weights; and the tiled models here, which functions of torch look for."""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any, Protocol

import torch
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.runtime.phases import IterationPhase, Phases


class WholeNorms:
    """Norms of whole tensors, the same bits on every rank.

    Args:
        comm: all ranks of the tiled model.
        holders: gives the ranks that hold each unit, or each element of a shard, once between them.
        phases: where the time goes.
    """

    def __init__(self, comm: AbstractCommunicator, *, holders: Callable[[], Sequence[int]], phases: Phases) -> None:
        self._comm = comm
        self._holders = holders
        self._phases = phases

    def of(self, tensors: Sequence[torch.Tensor], norm_type: float, *, tiled: Sequence[bool]) -> torch.Tensor:
        """The `norm_type`-norm of each tensor over all its units, however many ranks hold them: (tensors,) float64. Collective.

        Args:
            tensors: the same ones on all ranks, of which each passes what it holds.
            norm_type: as of `torch.linalg.vector_norm`.
            tiled: for each tensor, whether the ranks of a replica hold different units of it; otherwise each has the whole.
        """
        here = [self._here(tensor, norm_type) for tensor in tensors]
        if self._comm.size == 1:
            return torch.tensor(here, dtype=torch.float64, device="cpu")
        holders = self._holders()
        # One row for each holder of units, and a last one for what every rank has whole: rank 0's counts, because
        # ranks of different machines may differ in the last bit. A sum in which all but one are zero changes no bit.
        rows = torch.zeros(len(holders) + 1, len(tensors), dtype=torch.float64, device="cpu")
        for index, (norm, split) in enumerate(zip(here, tiled, strict=True)):
            if split and self._comm.rank in holders:
                rows[holders.index(self._comm.rank), index] = norm
            elif not split and self._comm.rank == 0:
                rows[-1, index] = norm
        with self._phases.during(IterationPhase.GRADIENTS):
            self._comm.allreduce(rows)
        # Of norms of parts, the norm is the norm of the whole; but numbers of elements that are not zero are added up.
        parts = rows[:-1].sum(0) if norm_type == 0 else torch.linalg.vector_norm(rows[:-1], norm_type, dim=0)
        return torch.where(torch.tensor(tiled, dtype=torch.bool, device="cpu"), parts, rows[-1])

    @staticmethod
    def _here(tensor: torch.Tensor, norm_type: float) -> float:
        if tensor.numel() == 0:  # must not change the norm of the others
            return math.inf if norm_type < 0 else 0.0
        return float(torch.linalg.vector_norm(tensor.detach(), norm_type, dtype=torch.float64))


class HoldsTiles(Protocol):
    """A model of which this rank has tiles."""

    @property
    def norms(self) -> WholeNorms: ...

    def tiled_parameters(self) -> Iterable[nn.Parameter]: ...

    def plain_parameters(self) -> Iterable[nn.Parameter]: ...

    def parts_of(self, held: Collection[int], *, is_sharded: bool) -> Iterable[tuple[int, int, int]]: ...


_lock = threading.Lock()
_models: weakref.WeakSet[Any] = weakref.WeakSet()


def register(model: HoldsTiles) -> None:
    """Know `model` for as long as it lives."""
    with _lock:
        _models.add(model)


def models() -> list[HoldsTiles]:
    """The models that are alive; where ranks are threads of one process, those of all of them."""
    with _lock:
        return list(_models)
