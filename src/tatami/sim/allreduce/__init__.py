"""All-reduces on simulated machines: schedules replayed transfer by transfer, over sizes and grids."""

from tatami.sim.allreduce.allreduce_job import AllReduceJob, Replayed, replay
from tatami.sim.allreduce.cases import Case, grids_of
from tatami.sim.allreduce.natives import NATIVES, NativeRule, WholeDoubling, expand
from tatami.sim.allreduce.replay import Replay
from tatami.sim.allreduce.software import Fragment, Software

__all__ = [
    "NATIVES",
    "AllReduceJob",
    "Case",
    "Fragment",
    "NativeRule",
    "Replay",
    "Replayed",
    "Software",
    "WholeDoubling",
    "expand",
    "grids_of",
    "replay",
]
