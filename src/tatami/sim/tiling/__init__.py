"""Tilings on simulated machines: iterations replayed, speeds that change, and the library's own controller deciding."""

from tatami.sim.tiling.changes import Change, change_at, draw_trace, read_trace
from tatami.sim.tiling.iteration_plan import Floor
from tatami.sim.tiling.run import TilingRun, rehearse
from tatami.sim.tiling.staged import StagedIteration, StagedJob, rehearse_stages, simulate_iteration
from tatami.sim.tiling.tiling_job import TilingJob
from tatami.sim.tiling.work import Startup, Work, work_of

__all__ = [
    "Change",
    "Floor",
    "StagedIteration",
    "StagedJob",
    "Startup",
    "TilingJob",
    "TilingRun",
    "Work",
    "change_at",
    "draw_trace",
    "read_trace",
    "rehearse",
    "rehearse_stages",
    "simulate_iteration",
    "work_of",
]
