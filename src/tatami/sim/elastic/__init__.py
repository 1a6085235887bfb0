"""Tiled runs that lose and gain machines, rehearsed: repair by the library's own membership, against restarts."""

from tatami.sim.elastic.elastic_setup import LossyRun, LossySetup, MachineEvent, MachineEvents
from tatami.sim.elastic.repair import rehearse_repair
from tatami.sim.elastic.restart import rehearse_restart

__all__ = ["LossyRun", "LossySetup", "MachineEvent", "MachineEvents", "rehearse_repair", "rehearse_restart"]
