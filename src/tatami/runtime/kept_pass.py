"""What the layers of a tiled model ask for in a forward pass, brought back where a checkpoint is computed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch

from tatami.runtime.context import RankContext
from tatami.runtime.local_draws import LocalDrawing
from tatami.runtime.recomputing import Restore
from tatami.runtime.tensor_parallel import ReplicaComm


def kept_pass(
    rank: RankContext,
    *,
    replica: ReplicaComm,
    generator: torch.Generator,
    draws: Any,
    of_stage: Callable[[], AbstractContextManager[Any]],
) -> Restore:
    """Keep what layers ask for now.

    Args:
        rank: which batch is announced, and which samples of it are here.
        replica: whether this rank takes part in its sums.
        generator: of random layers.
        draws: what other random operations draw from, if they draw by themselves.
        of_stage: brings back what the pipeline stage keeps.
    """
    facts, is_silent, state = vars(rank).copy(), replica.is_silent, generator.get_state()
    again = draws.copy() if isinstance(draws, LocalDrawing) else None

    @contextmanager
    def restore() -> Iterator[None]:
        before = vars(rank).copy(), replica.is_silent, generator.get_state()
        vars(rank).update(facts)
        replica.is_silent = is_silent
        generator.set_state(state)
        try:
            with of_stage(), nullcontext() if again is None else again.copy():
                yield
        finally:
            vars(rank).update(before[0])
            replica.is_silent = before[1]
            generator.set_state(before[2])

    return restore
