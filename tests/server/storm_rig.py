"""Blows on a running parameter server, drawn from a seed: processes are killed and stopped, nodes are taken away."""

import os
import random
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum

from tatami.server.run_control import RunControl
from tatami.testing.faulty import Death


class Target(Enum):
    """Whom a blow hits."""

    WORKER = "worker"
    SPARE = "spare"
    SERVER = "server"
    NODE = "node"


@dataclass(frozen=True, kw_only=True)
class Blow:
    """One blow.

    Attributes:
        version: it is dealt after this commit, once.
        delay_s: so long after it, so that it may hit any phase of a round.
        pick: in [0, 1): which of those that there are.
    """

    version: int
    target: Target
    death: Death
    delay_s: float
    pick: float


def draw_blows(seed: int, *, rounds: int, num: int, targets: tuple[Target, ...], longest_delay_s: float = 0.05) -> list[Blow]:
    """So many blows on a run of `rounds` rounds, the same for the same seed."""
    chance = random.Random(seed)
    return [
        Blow(
            version=chance.randrange(1, rounds),
            target=chance.choice(targets),
            # A process that is stopped is noticed only by its silence, which takes time: one in eight.
            death=chance.choice((Death.KILL,) * 7 + (Death.STOP,)),
            delay_s=chance.choice((0.0, chance.uniform(0, longest_delay_s))),
            pick=chance.random(),
        )
        for _ in range(num)
    ]


class Storm:
    """Deals blows; hand it to `tatami.server.train(on_round=...)`, and call `finish` after the run.

    It spares the last whole copy of a shard: a server or node is hit only while every shard has another one, unless
    `saved` says that checkpoints bring lost shards back.

    Args:
        blows: may fall on the same version.
        saved: whether the run's recovery restores servers from checkpoints.
        kill_node: ends the node of this id, processes and all; None where nodes are left alone.
        spared_nodes: ids of nodes that are not to be hit: that of Ray's head.

    Attributes:
        dealt: blows that hit a process.
    """

    def __init__(
        self,
        blows: list[Blow],
        *,
        saved: bool,
        kill_node: Callable[[str], None] | None = None,
        spared_nodes: frozenset[str] = frozenset(),
    ) -> None:
        self.dealt: list[tuple[Blow, str]] = []
        self._blows = list(blows)
        self._saved = saved
        self._kill_node = kill_node
        self._spared_nodes = spared_nodes
        self._struck_servers: set[int] = set()
        self._timers: list[threading.Timer] = []

    def __call__(self, run: RunControl) -> None:
        due = [blow for blow in self._blows if blow.version <= run.version]
        self._blows = [blow for blow in self._blows if blow not in due]
        for blow in due:
            if blow.target is Target.NODE:
                self._hit_node(run, blow)
            else:
                self._hit_process(run, blow)

    def finish(self) -> None:
        """Stop: blows that were delayed have hit by now, or never will."""
        for timer in self._timers:
            timer.cancel()
            timer.join()

    def _hit_process(self, run: RunControl, blow: Blow) -> None:
        pids = {name: pid for name, pid in sorted(run.pids().items()) if name.startswith(blow.target.value)}
        if not pids or (blow.target is Target.SERVER and not self._has_copies(run)):
            return
        name = list(pids)[int(blow.pick * len(pids))]
        if blow.target is Target.SERVER:
            self._struck_servers.add(pids[name])

        def strike() -> None:
            with suppress(ProcessLookupError):
                os.kill(pids[name], blow.death.value)

        self._deal(blow, name, strike)

    def _hit_node(self, run: RunControl, blow: Blow) -> None:
        nodes = run.nodes()
        there = sorted(set(nodes.values()) - self._spared_nodes)
        if self._kill_node is None or not there or not self._has_copies(run):
            return
        node = there[int(blow.pick * len(there))]
        servers = {int(name.split()[1]) for name, where in nodes.items() if where == node and name.startswith("server")}
        settings = run.coordinator.settings
        holders = [set(settings.holders(shard)) for shard in range(settings.servers)]
        if not self._saved and any(held <= servers for held in holders):
            return
        pids = run.pids()
        self._struck_servers |= {pids[f"server {server}"] for server in servers}
        kill_node = self._kill_node

        def strike() -> None:
            kill_node(node)
            # They would end when they miss Ray's own processes: perhaps after the last round.
            for pid in (pids[name] for name, where in nodes.items() if where == node):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

        self._deal(blow, node, strike)

    def _has_copies(self, run: RunControl) -> bool:
        """Whether all servers are whole, and none of them is hit already without anybody having noticed."""
        if self._saved:
            return True
        pids = {pid for name, pid in run.pids().items() if name.startswith("server")}
        return len(run.coordinator.servers) == run.coordinator.settings.servers and not pids & self._struck_servers

    def _deal(self, blow: Blow, whom: str, strike: Callable[[], None]) -> None:
        self.dealt.append((blow, whom))
        if not blow.delay_s:
            strike()
            return
        timer = threading.Timer(blow.delay_s, strike)
        self._timers.append(timer)
        timer.start()
