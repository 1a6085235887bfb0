"""States on disk: a folder for each step, written so that it is whole or no checkpoint, checked when it is read."""

from typing import TYPE_CHECKING

from tatami.lazy import lazy_names

if TYPE_CHECKING:
    from tatami.checkpoints.multi_node_checkpoint import MultiNodeCheckpoint, Resumed

__all__ = ["MultiNodeCheckpoint", "Resumed"]

if not TYPE_CHECKING:
    __getattr__ = lazy_names(__name__, {"tatami.checkpoints.multi_node_checkpoint": ("MultiNodeCheckpoint", "Resumed")})
