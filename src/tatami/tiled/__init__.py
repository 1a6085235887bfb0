"""One network, tiled over ranks that are not alike: `tile`, the model, the Trainer, and re-tiling at work."""

from tatami.datasets.dataset import Data, Samples
from tatami.tiled.averaging import WeightAverage
from tatami.tiled.batches import AbstractBatches, LocalBatch
from tatami.tiled.blocks import Blocks, find_blocks, workload_of
from tatami.tiled.carrying import Moved
from tatami.tiled.checkpointing import ModelCheckpoint
from tatami.tiled.data import TrainingData
from tatami.tiled.evaluating import METRICS, Metric
from tatami.tiled.measure import Speed, measure_sample_flop, measure_speed, measure_speeds
from tatami.tiled.model import TiledModel
from tatami.tiled.moving import move
from tatami.tiled.parts.declared import register
from tatami.tiled.phases import IterationPhase, Phases, PhaseTimes
from tatami.tiled.retiling import Check, Retiling
from tatami.tiled.scheduling import Callback, LRSchedulerConfig
from tatami.tiled.setup import History
from tatami.tiled.state import check_weights, load_model, load_whole_state_dict, save_model, whole_state_dict
from tatami.tiled.tile import tile
from tatami.tiled.tiled_block import TiledBlock
from tatami.tiled.trainer import Trainer

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
