"""What became of an elastic run: each change of its members, and what it cost."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tatami.outputs import write_text
from tatami.units import format_duration


@dataclass(frozen=True, kw_only=True)
class MemberChange:
    """One change of the members.

    Attributes:
        at_s: when the run heard of it, since its first step began.
        reason: who died, left or joined.
        step: that was done next.
        settled: what became of the step that was open: "finished", "redone", or "none" where none was; "returned" where all
            holders of some units were gone, and the run went back to its last checkpoint.
        steps_lost: that are done again since that checkpoint.
        members: afterwards.
        halted_s: from then until all had stopped.
        laid_s: from then until all went on.
        lost_s: for which no rank made progress: `laid_s` and, where a step was redone, the time that had gone into it.
        moved_units: that were sent.
        tiling: afterwards, as `Tiling.to_dict` tells it, of the workload's first block; None where it has none.
        stages: afterwards: the ranks of each pipeline stage, over all replicas; none where there are no stages.
    """

    at_s: float
    reason: str
    step: int
    settled: str
    members: tuple[str, ...]
    halted_s: float
    laid_s: float
    lost_s: float
    moved_units: int
    tiling: Mapping[str, Any] | None = None
    steps_lost: int = 0
    stages: tuple[tuple[str, ...], ...] = ()

    def __str__(self) -> str:
        returned = f"comes next and {self.steps_lost} {'step is' if self.steps_lost == 1 else 'steps are'} lost"
        what = {"finished": "was finished", "redone": "is done again", "none": "begins", "returned": returned}[self.settled]
        left = "1 rank goes" if len(self.members) == 1 else f"{len(self.members)} ranks go"
        stages = " > ".join(" ".join(stage) for stage in self.stages)
        where = f", in {len(self.stages)} pipeline stages [{stages}]" if stages else ""
        return (
            f"{self.reason}: step {self.step if self.settled != 'finished' else self.step - 1} {what}, "
            f"{left} on{where} after {format_duration(self.lost_s, digits=3)}"
        )


@dataclass(frozen=True, kw_only=True)
class ElasticReport:
    """The run as a whole.

    Attributes:
        startup_s: until the first step began.
        total_s: from then to the end.
        changes: of the members, in the order of time; not the first formation.
        first_tiling: of the first formation, as in `MemberChange`.
        first_members: of the first formation.
        settings: of the run, as `ElasticSettings` names them.
        not_joined: why ranks that were added were never let in, by name; not those that `control.remove` took back.
    """

    startup_s: float
    total_s: float
    changes: tuple[MemberChange, ...]
    first_tiling: Mapping[str, Any] | None = None
    first_members: tuple[str, ...] = ()
    settings: Mapping[str, Any] | None = None
    not_joined: Mapping[str, str] = field(default_factory=dict)

    @property
    def lost_s(self) -> float:
        """In all changes."""
        return sum(change.lost_s for change in self.changes)

    def save(self, path: Path | str, *, force: bool = False) -> None:
        """Write as JSON.

        Raises:
            OutputExistsError: the file exists and `force` is not given.
        """
        write_text(path, json.dumps(asdict(self), indent=2) + "\n", force=force)
