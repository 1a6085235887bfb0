"""The parameter server that keeps training when machines die."""

from typing import TYPE_CHECKING

from tatami.lazy import lazy_names
from tatami.server.consistency import ASP, BSP, SSP, Backup
from tatami.server.recovery import Checkpoint, FromServers, Ignore

if TYPE_CHECKING:
    from tatami.engine.crew import Pool
    from tatami.engine.ray_engine import engine
    from tatami.report.server_run import Failure, RunReport
    from tatami.server.optimizers import SGD, Adam
    from tatami.server.run_context import RunContext
    from tatami.server.run_control import RunControl
    from tatami.server.run_settings import RunSettings, TaskPhase
    from tatami.server.training import resume, train

__all__ = [
    "ASP",
    "BSP",
    "SGD",
    "SSP",
    "Adam",
    "Backup",
    "Checkpoint",
    "Failure",
    "FromServers",
    "Ignore",
    "Pool",
    "RunContext",
    "RunControl",
    "RunReport",
    "RunSettings",
    "TaskPhase",
    "engine",
    "resume",
    "train",
]

# The decisions are pure; what brings torch and Ray is imported when it is first asked for.
if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these
    __getattr__ = lazy_names(
        __name__,
        {
            "tatami.engine.crew": ("Pool",),
            "tatami.engine.ray_engine": ("engine",),
            "tatami.server.optimizers": ("SGD", "Adam"),
            "tatami.server.run_context": ("RunContext",),
            "tatami.server.run_settings": ("RunSettings", "TaskPhase"),
            "tatami.report.server_run": ("Failure", "RunReport"),
            "tatami.server.run_control": ("RunControl",),
            "tatami.server.training": ("resume", "train"),
        },
    )
