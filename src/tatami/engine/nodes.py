"""The nodes that processes can be started on, which are those that answer, and the choice of one of them."""

from __future__ import annotations

import socket
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import ray

_SHUN_S = 20.0
"""For so long a node is suspect on which a process has died: a frozen node still answers."""
_ANSWER_S = 0.5


class Nodes:
    """Ray's nodes, asked one by one. Ray alone takes 13 to 60 s to see that one is dead, and starts processes there till then.

    Args:
        now_s: seconds, of any origin.
        shuns: start nothing where a process has died lately, if there is another node, though that has processes already.
            Otherwise such a node is the last choice among those that have as few processes: for runs in which nothing waits
            for a process to start, and two on one machine are as slow as half a machine each.
    """

    def __init__(self, *, now_s: Callable[[], float], shuns: bool = True) -> None:
        self._now_s = now_s
        self._shuns = shuns
        self._died_s: dict[str, float] = {}

    def note_death(self, node: str) -> None:
        """A process has died there, and perhaps the node with it."""
        if node:
            self._died_s[node] = self._now_s()

    def sound(self) -> list[str]:
        """Nodes on which to start a process: those where none has died lately come first, or alone if others are shunned."""
        alive = self.alive()
        sound = [node for node in alive if self._now_s() - self._died_s.get(node, -_SHUN_S) >= _SHUN_S]
        if not self._shuns:
            return sound + [node for node in alive if node not in sound]
        return sound or alive

    @staticmethod
    def alive() -> list[str]:
        """Nodes that answer; if none does, those that Ray takes for alive, as this process may be cut off from them."""
        list_nodes: Any = ray.nodes  # without types
        believed: Sequence[dict[str, Any]] = [node for node in list_nodes() if node["Alive"]]
        if len(believed) < 2:
            return [node["NodeID"] for node in believed]
        answering = [node for node in believed if _answers(node["NodeManagerAddress"], node["NodeManagerPort"])]
        return [node["NodeID"] for node in answering or believed]


def choose_node(nodes: Sequence[str], *, taken: Iterable[str], apart_from: Iterable[str] = ()) -> str | None:
    """The node that a process is to be started on; None where there is no choice.

    Args:
        nodes: the best come first where nothing else decides.
        taken: the nodes of the processes that run, one entry for each.
        apart_from: nodes to be avoided, if there is another.
    """
    if len(nodes) < 2:
        return None
    avoided = set(apart_from)
    load = Counter(taken)
    return min(nodes, key=lambda node: (node in avoided, load[node], nodes.index(node)))


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_S):
            return True
    except OSError:
        return False
