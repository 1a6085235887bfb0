"""The parameter server that keeps training when machines die."""

from importlib import import_module
from typing import TYPE_CHECKING

from tatami.server.consistency import ASP, BSP, SSP, Backup
from tatami.server.recovery import Checkpoint, FromServers, Ignore

if TYPE_CHECKING:
    from tatami.engine.pool import Pool
    from tatami.engine.ray_engine import engine
    from tatami.server.optimizers import SGD, Adam
    from tatami.server.phases import TaskPhase
    from tatami.server.report import Failure, RunReport
    from tatami.server.run_context import RunContext
    from tatami.server.run_control import RunControl
    from tatami.server.run_settings import RunSettings
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
_HOMES = {
    "SGD": "tatami.server.optimizers",
    "Adam": "tatami.server.optimizers",
    "Failure": "tatami.server.report",
    "Pool": "tatami.engine.pool",
    "RunContext": "tatami.server.run_context",
    "RunReport": "tatami.server.report",
    "RunSettings": "tatami.server.run_settings",
    "RunControl": "tatami.server.run_control",
    "TaskPhase": "tatami.server.phases",
    "engine": "tatami.engine.ray_engine",
    "resume": "tatami.server.training",
    "train": "tatami.server.training",
}


if not TYPE_CHECKING:  # a type checker would take every misspelt name for one of these

    def __getattr__(name: str) -> object:
        if name not in _HOMES:
            raise AttributeError(f"module 'tatami.server' has no attribute {name!r}; it has {', '.join(__all__)}")
        value = getattr(import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
