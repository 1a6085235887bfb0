"""Machines and networks to rehearse on: one kind of platform a file."""

from tatami.sim.platforms.base import RDMA, TCP, AbstractPlatform, Fabric, Wire
from tatami.sim.platforms.fat_tree import FatTree
from tatami.sim.platforms.flat import ClusterPlatform
from tatami.sim.platforms.presets import PRESETS, preset
from tatami.sim.platforms.toml import read_platform
from tatami.sim.platforms.tree import MachineGroup, Tree

__all__ = [
    "PRESETS",
    "RDMA",
    "TCP",
    "AbstractPlatform",
    "ClusterPlatform",
    "Fabric",
    "FatTree",
    "MachineGroup",
    "Tree",
    "Wire",
    "preset",
    "read_platform",
]
