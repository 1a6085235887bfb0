"""An end for the few MPI calls that block: a thread that ends the job, and says where, when one does not return in time."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tatami.clock import Clock, SystemClock
from tatami.comm.session import stop_all_ranks

LOOK_S = 0.25
"""How often the thread looks: a timeout comes so much later at most."""


class Watchdog:
    """Watches one thread's blocking calls. Entering and leaving `watch` costs a fraction of a microsecond."""

    def __init__(self, *, clock: Clock | None = None, stop: Callable[[str], object] = stop_all_ranks) -> None:
        self._clock = clock or SystemClock()
        self._stop = stop
        self._watched: tuple[float, Callable[[], str]] | None = None
        self._thread: threading.Thread | None = None

    @contextmanager
    def watch(self, text: str, *, timeout_s: float, findings: Callable[[], str] = str) -> Iterator[None]:
        """End the job with `text`, and what is found out then, if the block takes longer than `timeout_s` seconds."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._look, name="tatami-watchdog", daemon=True)
            self._thread.start()
        self._watched = (
            self._clock.now_s() + timeout_s,
            lambda: " ".join([f"{text} did not return within {timeout_s:.3g} s; all ranks are stopped", findings()]).strip(),
        )
        try:
            yield
        finally:
            self._watched = None

    def _look(self) -> None:
        while True:
            watched = self._watched
            if watched is not None and self._clock.now_s() > watched[0]:
                self._stop(watched[1]())
                return
            self._clock.sleep(LOOK_S)


WATCHDOG = Watchdog()
