"""PS: the servers are the checkpoint."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tatami.server.recovery.base import AbstractRecovery, Remedy


@dataclass(frozen=True, kw_only=True)
class FromServers(AbstractRecovery):
    """A spare pulls the newest parameters and redoes the dead worker's task; the others wait for it at the end of the round.

    The result is that of the undisturbed run, to the bit. (Method PS of Li, Tanimura and Nakada.)
    """

    remedy: ClassVar[Remedy] = Remedy.REDO
    name: ClassVar[str] = "from-servers"
