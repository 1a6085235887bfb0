"""Training states of many ranks, on disk: written in one step, checked when read."""

from tatami.checkpoints.multi_node_checkpoint import MultiNodeCheckpoint, Resumed

__all__ = ["MultiNodeCheckpoint", "Resumed"]
