"""The training loop."""

from tatami.train.batches import Batches, Data, Samples
from tatami.train.checkpoint import check_weights, load_model, save_model
from tatami.train.data_parallel import DataParallel
from tatami.train.moving import Moved, move
from tatami.train.multi_node_checkpoint import MultiNodeCheckpoint, Resumed
from tatami.train.records import Records
from tatami.train.retiling import Check, Retiling
from tatami.train.trainer import History, Trainer

__all__ = [
    "Batches",
    "Check",
    "Data",
    "DataParallel",
    "History",
    "Moved",
    "MultiNodeCheckpoint",
    "Records",
    "Resumed",
    "Retiling",
    "Samples",
    "Trainer",
    "check_weights",
    "load_model",
    "move",
    "save_model",
]
