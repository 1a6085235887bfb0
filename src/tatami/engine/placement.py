"""On which node a process is started: as many on each as on the others, and some apart from others."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence


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
