"""What is done about a dead worker."""

from __future__ import annotations

import math
from abc import ABC
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import ClassVar, Literal

from tatami.errors import InputError

YEAR_S = 365 * 24 * 3600.0


class Remedy(Enum):
    """What happens to the task of a worker that died."""

    REDO = "redo"
    """A spare does it again; the round waits."""
    SKIP = "skip"
    """The round closes without it; the spare joins the next."""
    ROLL_BACK = "roll back"
    """All workers and servers return to the last checkpoint."""


class AbstractRecovery(ABC):
    """What is done about a dead worker."""

    remedy: ClassVar[Remedy]
    name: ClassVar[str]


@dataclass(frozen=True, kw_only=True)
class Checkpoint(AbstractRecovery):
    """The state is written every `every` rounds; at a death all workers drop their round, and the rounds since are redone.

    The result is that of the undisturbed run, to the bit. (Method CKPT of Li, Tanimura and Nakada, who write in every round.)

    Args:
        every: rounds between two checkpoints; "daly" takes the interval that wastes least, from what a checkpoint and a round
            are measured to take.
        directory: where checkpoints go; a run's own directory (`train(..., directory=...)`) if None.
        mtbf_s: mean time between two failures of one node, for "daly"; the default is the 3 years of the source.

    Raises:
        InputError: `every` is not a number of rounds >= 1 and not "daly", or `mtbf_s` is not positive.
    """

    every: int | Literal["daly"] = 1
    directory: Path | str | None = None
    mtbf_s: float = 3 * YEAR_S
    remedy: ClassVar[Remedy] = Remedy.ROLL_BACK
    name: ClassVar[str] = "checkpoint"

    def __post_init__(self) -> None:
        if self.every != "daly" and (isinstance(self.every, bool) or not isinstance(self.every, int) or self.every < 1):
            raise InputError(f"Checkpoint(every=...) is a number of rounds >= 1 or 'daly', not {self.every!r}")
        if not 0 < self.mtbf_s < math.inf:
            raise InputError(f"Checkpoint(mtbf_s=...) is a finite number of seconds > 0, not {self.mtbf_s}")

    def interval(self, *, write_s: float | None, round_s: float | None, workers: int) -> int:
        """Rounds between two checkpoints, given what was measured so far (None: nothing yet)."""
        if self.every != "daly":
            return self.every
        if write_s is None or not round_s:
            return 1
        return max(1, round(daly_s(write_s=write_s, mtbf_s=self.mtbf_s / workers) / round_s))


def daly_s(*, write_s: float, mtbf_s: float) -> float:
    """Seconds of work between two checkpoints that waste least.

    Args:
        write_s: to write one checkpoint.
        mtbf_s: of the whole system.

    Source: J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", 2006, eq. 37; its first
    term is Young's sqrt(2 write mtbf).
    """
    if write_s >= 2 * mtbf_s:
        return mtbf_s
    x = write_s / (2 * mtbf_s)
    return math.sqrt(2 * write_s * mtbf_s) * (1 + math.sqrt(x) / 3 + x / 9) - write_s


@dataclass(frozen=True, kw_only=True)
class FromServers(AbstractRecovery):
    """A spare pulls the newest parameters and redoes the dead worker's task; the others wait for it at the end of the round.

    The result is that of the undisturbed run, to the bit. (Method PS of Li, Tanimura and Nakada.)
    """

    remedy: ClassVar[Remedy] = Remedy.REDO
    name: ClassVar[str] = "from-servers"


@dataclass(frozen=True, kw_only=True)
class Ignore(AbstractRecovery):
    """The round closes without the dead worker's update, as the mean over the samples that arrived; a spare joins the next.

    Next to nothing is lost in time; one share of one batch is lost in learning. (Method IGNR of Li, Tanimura and Nakada.)
    """

    remedy: ClassVar[Remedy] = Remedy.SKIP
    name: ClassVar[str] = "ignore"
