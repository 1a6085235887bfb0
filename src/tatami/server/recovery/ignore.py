"""IGNR: the round goes on without the dead."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from tatami.server.recovery.base import AbstractRecovery, Remedy


@dataclass(frozen=True, kw_only=True)
class Ignore(AbstractRecovery):
    """The round closes without the dead worker's update, as the mean over the samples that arrived; a spare joins the next.

    Next to nothing is lost in time; one share of one batch is lost in learning. (Method IGNR of Li, Tanimura and Nakada.)
    """

    remedy: ClassVar[Remedy] = Remedy.SKIP
    name: ClassVar[str] = "ignore"
