"""When to re-tile, and what moves then: DRPM.

Ozawa, Sugaya, Aso: "Parallelizing of a Back Propagation in Heterogeneous Environment Using a Rectangular Partitioning Mapping
Method", IPSJ journal 2005/2006, section 5.
"""

from tatami.retiling.controller import Controller
from tatami.retiling.decision import Decision, DecisionKind
from tatami.retiling.moves import Move, moved_bytes, moves
from tatami.retiling.retiler import Retiler
from tatami.retiling.timing import Timing

__all__ = ["Controller", "Decision", "DecisionKind", "Move", "Retiler", "Timing", "moved_bytes", "moves"]
