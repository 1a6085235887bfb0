"""What a run that is watched says of itself: what became slower, and what was known and lost at each moment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from tatami.retiling.decision import DecisionKind
from tatami.retiling.link_watch import Pair
from tatami.retiling.noticing import Detector


@dataclass(frozen=True, kw_only=True)
class Alarm:
    """A processor, or a link, became slower or faster.

    Attributes:
        processor: its name; empty for a link.
        link: the hosts at its ends; None for a processor.
        iteration: after which it was noticed.
        began: the first iteration that was like this.
        before_s, after_s: seconds per work; of a link, per second that its messages are expected to take.
        error: relative standard error of `after_s`.
    """

    processor: str
    iteration: int
    began: int
    before_s: float
    after_s: float
    error: float
    link: Pair | None = None

    @property
    def name(self) -> str:
        """What became slower or faster."""
        return self.processor if self.link is None else f"the link {' - '.join(self.link)}"

    @property
    def slower(self) -> float:
        """How many times as long it takes."""
        return self.after_s / self.before_s


def alarm_of(detector: Detector, index: int, iteration: int, *, processor: str, link: Pair | None = None) -> Alarm:
    """The alarm of series `index` of a detector, which has just changed."""
    return Alarm(
        processor=processor,
        link=link,
        iteration=iteration,
        began=iteration - int(detector.count[index]) + 1,
        before_s=float(detector.before[index]),
        after_s=float(detector.level[index]),
        error=float(detector.error[index]),
    )


@dataclass(frozen=True, kw_only=True)
class Glance:
    """What was known at one moment, for the picture.

    Attributes:
        iteration: after which.
        speeds: work per second, in the order of the cluster; NaN where nothing was measured.
        loss_s: of each level that could be moved to since the change began.
        price_s: of moving there.
    """

    iteration: int
    speeds: tuple[float, ...]
    loss_s: Mapping[DecisionKind, float]
    price_s: Mapping[DecisionKind, float]


def tell_alarm(alarm: Alarm) -> str:
    """As the log has it."""
    how = f"{alarm.slower:.2f} times as long" if alarm.slower > 1 else f"{alarm.slower:.2f} of its time"
    return f"{alarm.name} takes {how} (+- {alarm.error:.0%}) since iteration {alarm.began}"
