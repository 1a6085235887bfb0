"""Moments in a rank's life that tests hook into."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum


class Moment(Enum):
    """What a rank is about to do."""

    BEFORE_FORWARD = "before forward"
    FORWARD = "forward"
    VERTICAL = "vertical"
    BACKWARD = "backward"
    HORIZONTAL = "horizontal"
    BEFORE_POINT = "before the point"
    BEFORE_UPDATE = "before the update"
    IN_UPDATE = "in the update"
    AFTER_UPDATE = "after the update"
    FORMING = "forming a group"
    TAKING = "taking rows"
    LAYING = "before all have their rows"
    LAID = "after the change"


MomentHook = Callable[[Moment, str, int], None]
"""Called in the rank's process with the moment, the member's name, and the number of the step."""
