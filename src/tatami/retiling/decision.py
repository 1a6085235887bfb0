"""What a check of the balance decided, and how the log tells it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum

from tatami.tiling import Layout, StagedLayout, Tiling

SHOWN_SPEEDS = 8
"""A log line names the speeds of so many processors at most."""


class DecisionKind(Enum):
    """What happens to the tiling."""

    KEEP = "keep"
    SAMPLES = "shift samples"
    REPLICAS = "re-map replicas"
    WHOLE = "re-map whole"
    LEAVE = "leave one out"
    STAGES = "other stages"


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a rule says about one situation.

    Attributes:
        kind: keep, or re-map how much.
        why: what was compared with what; a clause with numbers.
        layout: the layout to use from now on (for `KEEP` the one in force).
        speeds: work per second of every processor, as estimated.
        ratio: shortest over longest time as measured; None where nothing could be compared.
        settled: the balance is good, as far as can be told.
    """

    kind: DecisionKind
    why: str
    layout: Layout
    speeds: Mapping[str, float]
    ratio: float | None
    settled: bool = False


@dataclass(frozen=True, kw_only=True)
class Decision:
    """The answer to one check. Equal inputs give equal decisions, bit for bit, on every rank.

    Attributes:
        kind: keep, or re-map how much.
        iteration: after which iteration.
        layout: the layout to use from now on.
        speeds: estimated work per second of every processor of the cluster.
        ratio: shortest over longest time as the rule measured it; None where nothing could be compared.
        predicted: shortest over longest compute time to expect from `layout`.
        reason: the log line.
    """

    kind: DecisionKind
    iteration: int
    layout: Layout | StagedLayout
    speeds: Mapping[str, float]
    ratio: float | None
    predicted: float
    reason: str

    @property
    def remaps(self) -> bool:
        """Whether anything moves."""
        return self.kind is not DecisionKind.KEEP

    def __str__(self) -> str:
        return self.reason


def tell(verdict: Verdict, *, check: int, iteration: int, old: Tiling, new: Tiling, moved: int, predicted: float) -> str:
    """The log line: what was seen, what was decided, with what expectation.

    Args:
        verdict: of the rule.
        check: which check, from 1.
        old: the tiling so far.
        new: the tiling from now on.
        moved: rows of units that a rank receives.
        predicted: shortest over longest compute time to expect of `new`.
    """
    head = f"check {check} (iteration {iteration}): {verdict.why}: {verdict.kind.value}"
    if verdict.kind is DecisionKind.KEEP:
        return head
    before, after = len(old.replicas), len(new.replicas)
    replicas = f"{before} -> {after} replicas" if before != after else f"{after} replica{'s' if after > 1 else ''}"
    held = sum(tile.units.size for tile in new.tiles)
    return (
        f"{head}; speeds {tell_speeds(verdict.speeds)}; {replicas}; {moved} of {held} unit rows move; "
        f"compute min/max {predicted:.2f} expected"
    )


def tell_speeds(speeds: Mapping[str, float]) -> str:
    """Speeds relative to the fastest: `p0 1.00 p1 0.50`; of many processors the first few."""
    top = max(speeds.values())
    shown = " ".join(f"{name} {speed / top:.2f}" for name, speed in list(speeds.items())[:SHOWN_SPEEDS])
    return shown if len(speeds) <= SHOWN_SPEEDS else f"{shown} ... ({len(speeds)} in all)"
