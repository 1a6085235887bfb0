"""The nodes that processes can be started on: those that answer, not those that Ray still believes in."""

from __future__ import annotations

import socket
from collections.abc import Callable, Sequence
from typing import Any

import ray

_SHUN_S = 20.0
"""For so long no process is started where one has died, if there is another node: a frozen node still answers."""
_ANSWER_S = 0.5


class Nodes:
    """Ray's nodes, asked one by one. Ray alone takes 13 to 60 s to see that one is dead, and starts processes there till then.

    Args:
        now_s: seconds, of any origin.
    """

    def __init__(self, *, now_s: Callable[[], float]) -> None:
        self._now_s = now_s
        self._died_s: dict[str, float] = {}

    def note_death(self, node: str) -> None:
        """A process has died there, and perhaps the node with it."""
        if node:
            self._died_s[node] = self._now_s()

    def sound(self) -> list[str]:
        """Those to start a process on: where none has died lately, if there are any."""
        alive = self.alive()
        sound = [node for node in alive if self._now_s() - self._died_s.get(node, -_SHUN_S) >= _SHUN_S]
        return sound or alive

    @staticmethod
    def alive() -> list[str]:
        """Those that answer; those that Ray takes for alive where none does, as this process may be out of their sight."""
        list_nodes: Any = ray.nodes  # without types
        believed: Sequence[dict[str, Any]] = [node for node in list_nodes() if node["Alive"]]
        if len(believed) < 2:
            return [node["NodeID"] for node in believed]
        answering = [node for node in believed if _answers(node["NodeManagerAddress"], node["NodeManagerPort"])]
        return [node["NodeID"] for node in answering or believed]


def _answers(address: str, port: int) -> bool:
    try:
        with socket.create_connection((address, port), timeout=_ANSWER_S):
            return True
    except OSError:
        return False
