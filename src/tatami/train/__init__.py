"""The training loop."""

from tatami.comm.session import add_exception_hook
from tatami.train.batches import Batches, Data, Samples
from tatami.train.checkpoint import check_weights, load_model, save_model
from tatami.train.data_parallel import DataParallel
from tatami.train.early_stopping import EarlyStopping
from tatami.train.evaluating import Measured, MultiNodeEvaluator, gather_evaluation, weighted_means
from tatami.train.moving import Moved, move
from tatami.train.multi_node_checkpoint import MultiNodeCheckpoint, Resumed
from tatami.train.multi_node_loader import MultiNodeLoader
from tatami.train.multi_node_optimizer import MultiNodeOptimizer
from tatami.train.observing import ObservationAggregator
from tatami.train.records import Records
from tatami.train.retiling import Check, Retiling
from tatami.train.sampling import SynchronizedSampler
from tatami.train.scattering import Portion, create_empty_dataset, scatter_dataset, scatter_index
from tatami.train.synchronizing import average_buffers, average_gradients, broadcast_model
from tatami.train.trainer import History, Trainer

__all__ = [
    "Batches",
    "Check",
    "Data",
    "DataParallel",
    "EarlyStopping",
    "History",
    "Measured",
    "Moved",
    "MultiNodeCheckpoint",
    "MultiNodeEvaluator",
    "MultiNodeLoader",
    "MultiNodeOptimizer",
    "ObservationAggregator",
    "Portion",
    "Records",
    "Resumed",
    "Retiling",
    "Samples",
    "SynchronizedSampler",
    "Trainer",
    "add_exception_hook",
    "average_buffers",
    "average_gradients",
    "broadcast_model",
    "check_weights",
    "create_empty_dataset",
    "gather_evaluation",
    "load_model",
    "move",
    "save_model",
    "scatter_dataset",
    "scatter_index",
    "weighted_means",
]
