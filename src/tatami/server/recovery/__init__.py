"""What is done about a dead worker: one policy a file."""

from tatami.server.recovery.base import AbstractRecovery, Remedy
from tatami.server.recovery.checkpoint import Checkpoint
from tatami.server.recovery.from_servers import FromServers
from tatami.server.recovery.ignore import Ignore

__all__ = ["AbstractRecovery", "Checkpoint", "FromServers", "Ignore", "Remedy"]
