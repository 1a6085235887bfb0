"""Processes that outlive a run: the next one has them at once, without starting Python and loading torch again."""

from __future__ import annotations

from collections import defaultdict
from contextlib import suppress
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError

_DISMISS_S = 5.0


class Pool:
    """Keeps the processes of runs that have ended; hand the same pool to the next `train`. Ends with Ray at the latest."""

    def __init__(self) -> None:
        self._idle: dict[tuple[str, str], list[Any]] = defaultdict(list)

    def take(self, kind: str, *, node: str | None) -> Any:
        """An idle process on this node, on any if None; None where there is none."""
        for (of_kind, on_node), actors in self._idle.items():
            if of_kind != kind or (node is not None and on_node != node):
                continue
            while actors:
                actor = actors.pop()
                with suppress(RayError):
                    ray.get(actor.dismiss.remote(), timeout=_DISMISS_S)  # it may have died meanwhile
                    return actor
        return None

    def give(self, actor: Any, *, kind: str, node: str) -> bool:
        """Keep a process, if it has nothing to do any more; whether it is kept."""
        try:
            ray.get(actor.dismiss.remote(), timeout=_DISMISS_S)
        except (RayError, GetTimeoutError):
            return False
        self._idle[kind, node].append(actor)
        return True

    def close(self) -> None:
        """End them all."""
        for actors in self._idle.values():
            for actor in actors:
                with suppress(RayError, ValueError):
                    ray.kill(actor, no_restart=True)
        self._idle.clear()
