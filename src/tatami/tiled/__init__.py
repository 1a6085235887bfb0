"""One network, tiled over ranks that are not alike: `tile`, the model, the Trainer, and re-tiling at work."""

from tatami.datasets.samples import Data, Samples
from tatami.tiled.batches import Batches
from tatami.tiled.blocks import Blocks, TiledBlock, find_blocks, workload_of
from tatami.tiled.measure import Speed, measure_sample_flop, measure_speed, measure_speeds
from tatami.tiled.model import TiledModel
from tatami.tiled.moving import Moved, move
from tatami.tiled.phases import IterationPhase, Phases, PhaseTimes
from tatami.tiled.retiling import Check, Retiling
from tatami.tiled.state import load_whole_state_dict, whole_state_dict
from tatami.tiled.tile import tile
from tatami.tiled.trainer import History, Trainer
from tatami.tiled.weights import check_weights, load_model, save_model

__all__ = [
    "Batches",
    "Blocks",
    "Check",
    "Data",
    "History",
    "IterationPhase",
    "Moved",
    "PhaseTimes",
    "Phases",
    "Retiling",
    "Samples",
    "Speed",
    "TiledBlock",
    "TiledModel",
    "Trainer",
    "check_weights",
    "find_blocks",
    "load_model",
    "load_whole_state_dict",
    "measure_sample_flop",
    "measure_speed",
    "measure_speeds",
    "move",
    "save_model",
    "tile",
    "whole_state_dict",
    "workload_of",
]
