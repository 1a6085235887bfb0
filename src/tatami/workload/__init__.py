"""What must be computed."""

from tatami.workload.block import ELEMENT_FLOP, Block, Piece, Section
from tatami.workload.gpt import VOCABULARY, gpt_workload
from tatami.workload.linear_pair import Counts, PairSizes, backward_counts, forward_counts, iteration_counts, linear_pair
from tatami.workload.network import (
    Activation,
    Dense,
    Layer,
    as_probed,
    has_blocks_of,
    net_layers,
    net_workload,
    network_workload,
    parse_net,
    partners,
)
from tatami.workload.recomputation import Recomputation, RecomputedLayer, RepeatedLayer
from tatami.workload.workload import WIRES, Workload, check_wire, corners

__all__ = [
    "ELEMENT_FLOP",
    "VOCABULARY",
    "WIRES",
    "Activation",
    "Block",
    "Counts",
    "Dense",
    "Layer",
    "PairSizes",
    "Piece",
    "Recomputation",
    "RecomputedLayer",
    "RepeatedLayer",
    "Section",
    "Workload",
    "as_probed",
    "backward_counts",
    "check_wire",
    "corners",
    "forward_counts",
    "gpt_workload",
    "has_blocks_of",
    "iteration_counts",
    "linear_pair",
    "net_layers",
    "net_workload",
    "network_workload",
    "parse_net",
    "partners",
]
