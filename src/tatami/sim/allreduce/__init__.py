"""All-reduces on simulated machines: schedules replayed transfer by transfer, over sizes and grids."""

from tatami.sim.allreduce.cases import Case, grids_of
from tatami.sim.allreduce.job import AllReduceJob, Replayed, replay
from tatami.sim.allreduce.natives import NATIVES, NativeRule, expand
from tatami.sim.allreduce.replay import Replay
from tatami.sim.allreduce.software import Piece, Software
from tatami.sim.allreduce.unshared import MessageRounds, rounds_of
from tatami.sim.allreduce.whole import WholeDoubling

__all__ = [
    "NATIVES",
    "AllReduceJob",
    "Case",
    "MessageRounds",
    "NativeRule",
    "Piece",
    "Replay",
    "Replayed",
    "Software",
    "WholeDoubling",
    "expand",
    "grids_of",
    "replay",
    "rounds_of",
]
