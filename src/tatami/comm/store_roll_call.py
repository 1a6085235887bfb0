"""The roll call of torch.distributed's ranks: those that wait for long count in the store what they wait in."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, final

from tatami.clock import Clock
from tatami.comm.roll_call import AbstractRollCall, ProcessPlace

_COUNT_EVERY_S = 0.25
_LOOK_S = 0.05


@final
class StoreRollCall(AbstractRollCall):
    """Over a store of torch.distributed that only these ranks use. A rank whose count goes on waits; collective to make."""

    def __init__(self, store: Any, *, rank: int, places: Sequence[ProcessPlace], clock: Clock) -> None:
        super().__init__(rank=rank, places=places)
        self._store = store
        self._clock = clock
        self._lock = threading.Lock()
        self._count = 0
        self._counted_s = float("-inf")
        store.set(str(rank), "0")

    def answer(self, doing: str) -> None:
        with self._lock:
            if self._clock.now_s() < self._counted_s + _COUNT_EVERY_S:
                return
            self._counted_s = self._clock.now_s()
            self._count += 1
            text = f"{self._count} {doing}"
        with suppress(RuntimeError):  # the process that keeps the store has ended
            self._store.set(str(self.rank), text)

    def ask(self, doing: str, *, patience_s: float) -> dict[int, str]:
        found: dict[int, str] = {}
        with suppress(RuntimeError):
            others = [rank for rank in range(len(self.places)) if rank != self.rank]
            before = self._read(others)
            end_s = self._clock.now_s() + patience_s
            while len(found) < len(others) and self._clock.now_s() < end_s:
                self.answer(doing)
                self._clock.sleep(_LOOK_S)
                now = self._read(others)
                found = {rank: text.partition(" ")[2] for rank, text in now.items() if text != before[rank]}
        return found

    def _read(self, ranks: Sequence[int]) -> dict[int, str]:
        return {rank: self._store.get(str(rank)).decode(errors="replace") for rank in ranks}
