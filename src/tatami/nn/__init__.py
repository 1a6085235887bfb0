"""Layers that span machines."""

from tatami.nn.batch_norm import MultiNodeBatchNorm
from tatami.nn.chain_list import MultiNodeChainList
from tatami.nn.convert_batch_norm import create_mnbn_model
from tatami.nn.describe import PairNames, describe, find_pairs
from tatami.nn.measure import Speed, measure_sample_flop, measure_speed, measure_speeds
from tatami.nn.n_step_rnn import MultiNodeNStepRNN, create_multi_node_n_step_rnn
from tatami.nn.parallel_conv import ParallelConv
from tatami.nn.phases import Phase, Phases, PhaseTimes
from tatami.nn.state import load_whole_state_dict, whole_state_dict
from tatami.nn.tile import tile
from tatami.nn.tiled import TiledModel

__all__ = [
    "MultiNodeBatchNorm",
    "MultiNodeChainList",
    "MultiNodeNStepRNN",
    "PairNames",
    "ParallelConv",
    "Phase",
    "PhaseTimes",
    "Phases",
    "Speed",
    "TiledModel",
    "create_mnbn_model",
    "create_multi_node_n_step_rnn",
    "describe",
    "find_pairs",
    "load_whole_state_dict",
    "measure_sample_flop",
    "measure_speed",
    "measure_speeds",
    "tile",
    "whole_state_dict",
]
