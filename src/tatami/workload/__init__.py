"""What must be computed."""

from tatami.workload.network import (
    Activation,
    Dense,
    Layer,
    net_layers,
    net_workload,
    network_workload,
    pairing,
    parse_net,
)
from tatami.workload.table1 import Counts, backward_counts, forward_counts, iteration_counts
from tatami.workload.workload import Pair, Workload

__all__ = [
    "Activation",
    "Counts",
    "Dense",
    "Layer",
    "Pair",
    "Workload",
    "backward_counts",
    "forward_counts",
    "iteration_counts",
    "net_layers",
    "net_workload",
    "network_workload",
    "pairing",
    "parse_net",
]
