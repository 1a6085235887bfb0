"""One network, tiled over unequal ranks: `tile`, the model, the Trainer, and re-tiling at work."""

from tatami.datasets.dataset import Data, Samples
from tatami.measure.speeds import Speed, measure_sample_flop, measure_speed, measure_speeds
from tatami.model.model import TiledModel
from tatami.model.tile import tile
from tatami.model.whole_state import check_weights, load_model, load_whole_state_dict, save_model, whole_state_dict
from tatami.partition.blocks import Blocks, find_blocks, workload_of
from tatami.partition.parts.declared import register
from tatami.runtime.phases import IterationPhase, Phases, PhaseTimes
from tatami.runtime.row_messages import Moved
from tatami.runtime.rows import TiledBlock
from tatami.runtime.weight_average import WeightAverage
from tatami.state.moving import move
from tatami.train.batches import AbstractBatches, LocalBatch
from tatami.train.checkpointing import ModelCheckpoint
from tatami.train.data import TrainingData
from tatami.train.evaluating import METRICS, Metric
from tatami.train.preparing import History
from tatami.train.retiling import Check, Retiling
from tatami.train.scheduling import Callback, LRSchedulerConfig
from tatami.train.trainer import Trainer

__all__ = [
    "METRICS",
    "AbstractBatches",
    "Blocks",
    "Callback",
    "Check",
    "Data",
    "History",
    "IterationPhase",
    "LRSchedulerConfig",
    "LocalBatch",
    "Metric",
    "ModelCheckpoint",
    "Moved",
    "PhaseTimes",
    "Phases",
    "Retiling",
    "Samples",
    "Speed",
    "TiledBlock",
    "TiledModel",
    "Trainer",
    "TrainingData",
    "WeightAverage",
    "check_weights",
    "find_blocks",
    "load_model",
    "load_whole_state_dict",
    "measure_sample_flop",
    "measure_speed",
    "measure_speeds",
    "move",
    "register",
    "save_model",
    "tile",
    "whole_state_dict",
    "workload_of",
]
