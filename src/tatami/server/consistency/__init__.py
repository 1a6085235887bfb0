"""How far workers may drift apart: one rule a file."""

from tatami.server.consistency.asp import ASP
from tatami.server.consistency.backup import Backup
from tatami.server.consistency.base import AbstractConsistency
from tatami.server.consistency.bsp import BSP
from tatami.server.consistency.ssp import SSP

__all__ = ["ASP", "BSP", "SSP", "AbstractConsistency", "Backup"]
