"""What a recovery policy decides."""

from __future__ import annotations

from abc import ABC
from enum import Enum
from typing import ClassVar


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
