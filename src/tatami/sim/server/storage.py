"""Where checkpoints are written and read: in every node, or in a store that all share over the network."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tatami.sim.server.server_setup import ServerSetup
from tatami.sim.stage import Stage


class SimulatedStorage:
    """Times writing and reading; one checkpoint at a time is written."""

    def __init__(self, setup: ServerSetup, stage: Stage) -> None:
        self._where = setup.checkpoints
        self._stage = stage
        self._writing = False
        self._waiting: list[Callable[[], None]] = []

    def write(self, hosts: Sequence[int], *, then: Callable[[], None]) -> None:
        """Write one on every host. `then` when the run may go on: when all is written, or begun where no worker waits."""
        if self._writing:
            self._waiting.append(lambda: self.write(hosts, then=then))
            return
        self._writing = True

        def written() -> None:
            self._writing = False
            waiting, self._waiting = self._waiting, []
            if self._where.waits:
                then()
            for each in waiting:
                each()

        self._move(hosts, reads=False, then=written)
        if not self._where.waits:
            then()

    def read(self, hosts: Sequence[int], *, then: Callable[[], None]) -> None:
        """Read the last checkpoint back on every host, once it is written."""
        if self._writing:
            self._waiting.append(lambda: self.read(hosts, then=then))
            return
        self._move(hosts, reads=True, then=then)

    def _move(self, hosts: Sequence[int], *, reads: bool, then: Callable[[], None]) -> None:
        store = self._where.store
        if not store or not hosts:
            self._stage.after(self._where.local_s if hosts else 0.0, then)
            return
        left = len(hosts)

        def moved() -> None:
            nonlocal left
            left -= 1
            if not left:
                then()

        for index, host in enumerate(hosts):
            keeper = store[index % len(store)]
            source, target = (keeper, host) if reads else (host, keeper)
            self._stage.send(source, target, size_bytes=self._where.size_bytes, then=moved)
