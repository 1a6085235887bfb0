"""All-reduces on simulated machines: schedules replayed transfer by transfer, over sizes and grids."""

from tatami.sim.allreduce.allreduce_job import AllReduceJob, Case, Replayed, grids_of, replay
from tatami.sim.allreduce.natives import NATIVES, WholeDoubling, expand
from tatami.sim.allreduce.replay import Replay, num_transfers
from tatami.sim.allreduce.software import Fragment, Software

__all__ = [
    "NATIVES",
    "AllReduceJob",
    "Case",
    "Fragment",
    "Replay",
    "Replayed",
    "Software",
    "WholeDoubling",
    "expand",
    "grids_of",
    "num_transfers",
    "replay",
]
