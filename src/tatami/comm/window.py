"""Windows: memory of one rank that other ranks read and write without its help.

Two kinds, both holding torch tensors where MPI or the host's memory has them, so that nothing is copied:

* `AbstractWindow` (`communicator.window(...)`): remote memory access across any ranks, in epochs of one kind (`Sync`):

      window.enter(ranks)                               once
      window.open(sources=[before], targets=[after])    before the puts of a round
      window.put(tensor, after, start=0)
      window.end(sources=[before], targets=[after])     what the sources put is there, and `tensor` may be changed

* `AbstractSharedWindow` (`communicator.shared_window(...)`): ranks of one host; `of(rank)` is that rank's tensor itself.
  What one rank has written another may read after both have passed a `barrier()`.

Making and closing a window is collective, and so are `barrier` and the epochs of fences. Tensors of a window that was closed
must not be touched: their memory is gone.

Waits are polite and end with an error that says who did not come. The few calls that MPI has in a blocking form only (a fence,
a flush) are entered when all that they need is known to be there; should a peer die just then, a watchdog ends the job and
says so.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch

from tatami.collective import Sync
from tatami.comm.reduction import Op
from tatami.errors import ClosedError, InputError


class AbstractWindow(ABC):
    """One rank's end of a window for puts, gets and accumulates.

    Attributes:
        tensor: (size,) this rank's memory, which the others reach.
        sync: the one kind of epoch that it is for.
    """

    tensor: torch.Tensor
    sync: Sync

    @abstractmethod
    def put(self, tensor: torch.Tensor, target: int, *, start: int) -> None:
        """`tensor` (n,) into elements `start .. start + n` of rank `target`; must stay as it is until the epoch ends."""

    @abstractmethod
    def get(self, out: torch.Tensor, source: int, *, start: int) -> None:
        """Elements `start .. start + n` of rank `source` into `out` (n,), which has them when the epoch has ended."""

    @abstractmethod
    def accumulate(self, tensor: torch.Tensor, target: int, *, start: int, op: Op) -> None:
        """As `put`, but reduced into what is there, atomically by element.

        Raises:
            InputError: a dtype that MPI does not add up: bfloat16, float16.
        """

    @abstractmethod
    def enter(self, ranks: Sequence[int]) -> None:
        """Before the first round of puts among `ranks`: FENCE and LOCK meet."""

    @abstractmethod
    def open(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Before the puts of a round, from `sources` to this rank and from this rank to `targets`. PSCW: post, and start."""

    @abstractmethod
    def end(self, *, sources: Sequence[int], targets: Sequence[int]) -> None:
        """After them: what came in the round has arrived, and what was put may be changed.

        FENCE: all ranks meet. PSCW: complete, and wait. LOCK: flush, then notify the targets by an empty message.
        """

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Collective."""


class AbstractSharedWindow(ABC):
    """One rank's end of a window in the memory of its host.

    Attributes:
        tensor: (size,) this rank's part.
    """

    tensor: torch.Tensor

    @abstractmethod
    def of(self, rank: int) -> torch.Tensor:
        """(size,) the part of `rank`, where it lies."""

    @abstractmethod
    def barrier(self) -> None:
        """Return when all ranks have come; what they wrote before is then visible to all.

        Raises:
            CommTimeoutError: names those who did not come.
        """

    @abstractmethod
    def make_visible(self) -> None:
        """A memory fence, for ranks that signal each other by memory: before the signal is given, and after it was seen."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory back. Collective."""


def check_window(size: int, sync: Sync) -> None:
    """Refuse what no window can be.

    Raises:
        InputError: a negative size, or a synchronisation that cannot order puts.
    """
    if size < 0:
        raise InputError(f"a window holds 0 or more elements, not {size}")
    if not sync.one_sided:
        choices = ", ".join(repr(kind.value) for kind in Sync if kind.one_sided)
        raise InputError(f"sync={sync.value!r} does not synchronise puts; choose one of {choices}")


def check_access(tensor: torch.Tensor, window: torch.Tensor, *, peer: int, ranks: int, start: int, what: str) -> None:
    """Refuse an access that would miss the target's memory.

    Raises:
        InputError: no such rank, another dtype, not contiguous, or outside of the window.
    """
    if not 0 <= peer < ranks:
        raise InputError(f"{what}: there is no rank {peer}; this window has ranks 0 to {ranks - 1}")
    if tensor.dtype != window.dtype:
        raise InputError(f"{what}: the window holds {window.dtype}, the tensor is {tensor.dtype}")
    if not tensor.is_contiguous():
        raise InputError(f"{what}: the tensor must be contiguous; call .contiguous() first")
    if start < 0 or start + tensor.numel() > window.numel():
        raise InputError(
            f"{what}: elements {start} to {start + tensor.numel()} are not all among the {window.numel()} of the window"
        )


def refuse_windows(backend: str) -> InputError:
    """What a communicator without windows says."""
    return InputError(
        f"{backend} has no one-sided communication; the MPI backend has: start the ranks with mpiexec or tatami run"
    )


def check_window_open(closed: bool) -> None:
    """Raises:
    ClosedError: the window was closed.
    """
    if closed:
        raise ClosedError("this window was closed; its memory is gone")
