"""Parcels as messages of a communicator."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, final

import torch

from tatami.comm.base import AbstractCommunicator
from tatami.stages.channel import AbstractChannel, Parcel
from tatami.stages.courier import Arrival, Courier


@final
class CommChannel(AbstractChannel):
    """Sends parcels on a communicator that only these stages use.

    Where stages have several ranks, all ranks of a stage have the same tensors. A tensor crosses once: from the first rank of
    one stage to the first rank of the other, which sends it on to the ranks of its stage. Those are usually of one host, where
    that costs a copy, while several ranks that fetch it would share one link.

    Args:
        comm: the ranks.
        ranks_of: for each stage, its ranks in `comm` that compute the samples of this replica.
        waiting: the context in which this rank waits for another stage to send.
        travelling: the context in which it waits for what is on its way.
        wire: to what floating numbers are rounded on their way.
        meanwhile: does a little of other work, as long as there is any; what is received may come in the meantime.
    """

    def __init__(
        self,
        comm: AbstractCommunicator,
        *,
        ranks_of: Sequence[Sequence[int]],
        waiting: Callable[[], AbstractContextManager[Any]] = nullcontext,
        travelling: Callable[[], AbstractContextManager[Any]] = nullcontext,
        wire: torch.dtype | None = None,
        meanwhile: Callable[[], bool] = lambda: False,
    ) -> None:
        self._comm, self._ranks_of, self._meanwhile = comm, ranks_of, meanwhile
        self._waiting, self._travelling = waiting, travelling
        self._courier = Courier(comm, wire=wire)
        self._expected: dict[int, deque[Arrival]] = {}
        """By tag. Parcels of one tag come in the order of the micro-batches in which they are asked for."""

    def send(self, parcel: Parcel, tensor: torch.Tensor | None) -> None:
        sources, targets = self._ends(parcel)
        if self._comm.rank == sources[0]:
            self._courier.send(tensor, targets[0], tag=_tag(parcel))

    def expect(self, parcel: Parcel) -> None:
        sources, targets = self._ends(parcel)
        first, *others = targets
        source, onward = (sources[0], others) if self._comm.rank == first else (first, [])
        arrival = self._courier.expect(source, tag=_tag(parcel), onward=onward)
        self._expected.setdefault(_tag(parcel), deque()).append(arrival)

    def receive(self, parcel: Parcel) -> torch.Tensor | None:
        if not self._expected.get(_tag(parcel)):
            self.expect(parcel)
        arrival = self._expected[_tag(parcel)].popleft()
        while not arrival.is_there and self._meanwhile():
            pass
        what = f"{'the gradient of ' if parcel.backward else ''}value {parcel.value} of micro-batch {parcel.micro_batch}"
        with self._waiting():
            self._courier.wait(arrival, what, sent=True)
        with self._travelling():
            return self._courier.wait(arrival, what)

    def flush(self) -> None:
        self._courier.flush()

    def _ends(self, parcel: Parcel) -> tuple[Sequence[int], Sequence[int]]:
        """The ranks that send, and those that receive."""
        ends = self._ranks_of[parcel.source], self._ranks_of[parcel.target]
        return ends[::-1] if parcel.backward else ends


def _tag(parcel: Parcel) -> int:
    return 2 * parcel.value + int(parcel.backward)
