"""Layers that span machines."""

from tatami.nn.describe import PairNames, describe, find_pairs
from tatami.nn.measure import Speed, measure_speed, measure_speeds
from tatami.nn.phases import Phase, Phases, PhaseTimes
from tatami.nn.state import load_whole_state_dict, whole_state_dict
from tatami.nn.tile import tile
from tatami.nn.tiled import TiledModel

__all__ = [
    "PairNames",
    "Phase",
    "PhaseTimes",
    "Phases",
    "Speed",
    "TiledModel",
    "describe",
    "find_pairs",
    "load_whole_state_dict",
    "measure_speed",
    "measure_speeds",
    "tile",
    "whole_state_dict",
]
