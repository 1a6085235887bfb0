"""When to re-tile, and what moves then.

`Retiler()` looks at every iteration and moves when it pays (`tatami.retiling.watching`). DRPM, which looks every R iterations:
Ozawa, Sugaya, Aso: "Parallelizing of a Back Propagation in Heterogeneous Environment Using a Rectangular Partitioning Mapping
Method", IPSJ journal 2005/2006, section 5.
"""

from tatami.retiling.alarms import Alarm, Glance
from tatami.retiling.controller import Controller
from tatami.retiling.decision import Decision, DecisionKind
from tatami.retiling.retiler import Retiler
from tatami.retiling.staged_watching import StagedWatcher
from tatami.retiling.takes import Move, moves
from tatami.retiling.timing import Timing
from tatami.retiling.watching import Watcher

__all__ = [
    "Alarm",
    "Controller",
    "Decision",
    "DecisionKind",
    "Glance",
    "Move",
    "Retiler",
    "StagedWatcher",
    "Timing",
    "Watcher",
    "moves",
]
