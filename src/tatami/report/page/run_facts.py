"""What the page shows, as rows for its charts and tables, and never more of them than fit into it."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Any, TypeVar

from tatami.report.page.reading import RecordedRun
from tatami.report.page.record_shapes import PHASES, STAGE_PHASES
from tatami.tiling import StagedLayout, spans

MOST_POINTS = 1_500
"""Most points of a curve: more than a screen has columns."""
_MOST_ROWS = 6_000
"""Most rows of a chart over ranks or links, for all tilings together."""
_MOST_SPANS = 4_000
"""Most spans of the timeline, for all ranks."""

Row = dict[str, Any]
T = TypeVar("T")


@dataclass(kw_only=True)
class RunFacts:
    """Rows by chart and table.

    Attributes:
        ranks: names, in the order in which they were first seen.
        steps: one for each tiling shown: `iteration`, `why`, `samples`, `units`, `replicas`, `tiles`, and `stages`, which is 0
            where there are none.
        tiles: rectangles: `step`, `rank`, `x1`, `x2` in samples, `y1`, `y2` in units; with stages, in stages.
        stages: of the last tiling, as `StagesDescription.to_dict` has them; None where there are none.
        timeline: of a run with stages, what ranks did in one iteration: `step`, `rank`, `phase`, `number` of the micro-batch,
            `began` and `ended` in milliseconds.
        phases: `step`, `rank`, `phase`, `ms` of an iteration, while that tiling was in force.
        losses: `iteration`, `loss`, `what`.
        rates: `iteration`, `rate` in samples per second.
        speeds: `iteration`, `rank`, `speed` relative to the fastest rank at that time.
        alarms: of a run that is watched: `iteration` after which it was noticed, `what`, `began`, `slower` times, `error`.
        accounts: of such a run: `iteration`, `what` could be moved to, `share` of its price that was lost since the change.
        decisions: those that changed something: `iteration`, `decision`, `reason`, `imbalance`, `moved_units`.
        num_checks: looks at the balance, those that kept the tiling among them.
        deaths: `when`, `what`, `repair`, `lost`.
        links: `step`, `source`, `target`, `size_bytes` of an iteration, as planned.
        native_bytes: by step, of an iteration, what the libraries' own sums send beside.
        notes: what the page says of what it left out.
    """

    ranks: list[str] = field(default_factory=list)
    steps: list[Row] = field(default_factory=list)
    tiles: list[Row] = field(default_factory=list)
    stages: Mapping[str, Any] | None = None
    timeline: list[Row] = field(default_factory=list)
    phases: list[Row] = field(default_factory=list)
    losses: list[Row] = field(default_factory=list)
    rates: list[Row] = field(default_factory=list)
    speeds: list[Row] = field(default_factory=list)
    alarms: list[Row] = field(default_factory=list)
    accounts: list[Row] = field(default_factory=list)
    decisions: list[Row] = field(default_factory=list)
    num_checks: int = 0
    deaths: list[Row] = field(default_factory=list)
    links: list[Row] = field(default_factory=list)
    native_bytes: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)


def thinned(items: Sequence[T], most: int) -> list[T]:
    """At most `most` of them, at even distances, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    if most < 2:
        return [items[-1]]
    return [items[round(index * (len(items) - 1) / (most - 1))] for index in range(most)]


def facts_of(run: RecordedRun) -> RunFacts:
    """
    Args:
        run: what was recorded.
    """
    facts = RunFacts()
    if run.cut_off:
        facts.notes.append("The last line of the records ends in the middle and is left out: the run was killed as it wrote.")
    _add_floors(facts, run.tilings)
    _add_phases(facts, run.of("phases"))
    _add_timeline(facts, run.of("timeline"))
    _add_curves(facts, run)
    _add_speeds(facts, run.of("tiling", "check", "watch"))
    _add_watched(facts, run.of("watch"))
    _add_decisions(facts, run.of("check"))
    facts.deaths = [_death(record) for record in run.of("failure", "members", "error", "warning")]
    return facts


def _kept(facts: RunFacts, items: Sequence[T], most: int, what: str) -> list[T]:
    found = thinned(items, most)
    if len(found) < len(items):
        facts.notes.append(f"Of {len(items):,} {what}, {len(found):,} are shown, at even distances.")
    return found


def _add_floors(facts: RunFacts, tilings: list[Mapping[str, Any]]) -> None:
    largest = max((len(record["tiling"]["tiles"]) for record in tilings), default=1)
    for step, record in enumerate(_kept(facts, tilings, max(2, _MOST_ROWS // largest), "tilings")):
        floor, stages = record["tiling"], 0
        if record.get("stages") is not None:
            layout = StagedLayout.from_dict(record["stages"])
            floor, stages = _storeys(layout, samples=floor["samples"]), len(layout.stages)
        facts.stages = record.get("described")
        tiles = floor["tiles"]
        names = [tile["processor"] for tile in tiles]
        facts.ranks = list(dict.fromkeys([*facts.ranks, *record.get("speeds", {}), *names]))
        facts.steps.append(
            {
                "iteration": record["iteration"],
                "why": record.get("why", ""),
                "samples": floor["samples"],
                "units": floor["units"],
                "replicas": len({tile["replica"] for tile in tiles}),
                "tiles": len(tiles),
                "stages": stages,
            }
        )
        for tile in tiles:
            (x1, x2), (y1, y2) = tile["samples"], tile["units"]
            facts.tiles.append({"step": step, "rank": tile["processor"], "x1": x1, "x2": x2, "y1": y1, "y2": y2})
        sent = record.get("sent_bytes", {})
        rows = [
            {"step": step, "source": source, "target": target, "size_bytes": size}
            for source, targets in sent.items()
            for target, size in targets.items()
        ]
        facts.links += sorted(rows, key=lambda row: -row["size_bytes"])[: max(1, _MOST_ROWS // max(1, len(tilings)))]
        facts.native_bytes.append(record.get("native_bytes", 0))


def _storeys(layout: StagedLayout, *, samples: int) -> Row:
    """As the records have a tiling: samples across, and from one whole number to the next the ranks of a stage."""
    tiles = []
    for number, stage in enumerate(layout.stages):
        for replica, (own, span) in enumerate(zip(stage.replicas, spans(stage.sample_sizes(samples)), strict=True)):
            edges = list(accumulate((height / sum(own.heights) for height in own.heights), initial=float(number)))
            for name, ends in zip(own.processors, pairwise(edges), strict=True):
                tiles.append({"processor": name, "replica": replica, "samples": (span.start, span.stop), "units": ends})
    return {"samples": samples, "units": len(layout.stages), "tiles": tiles}


def _add_timeline(facts: RunFacts, records: list[Mapping[str, Any]]) -> None:
    begins = [step["iteration"] for step in facts.steps] or [0]
    spans_of = [(record["iteration"], name, own) for record in records for name, own in record["ranks"].items()]
    longest = max((len(own) for _, _, own in spans_of), default=1)
    for iteration, name, own in _kept(facts, spans_of, max(2, _MOST_SPANS // longest), "ranks of the timeline"):
        step = max(sum(begin < iteration for begin in begins) - 1, 0)
        for phase, number, began_s, ended_s in own:
            row = {"step": step, "rank": name, "phase": phase, "number": number}
            facts.timeline.append({**row, "began": 1e3 * began_s, "ended": 1e3 * ended_s})


def _add_phases(facts: RunFacts, records: list[Mapping[str, Any]]) -> None:
    """Means over the iterations for which a tiling that is shown, or those after it that are not, was in force."""
    begins = [step["iteration"] for step in facts.steps] or [0]
    num_iterations: dict[tuple[int, str], int] = {}
    spent_s: dict[tuple[int, str, str], float] = {}
    every = [times for record in records for times in record["ranks"].values()]
    shown = [phase for phase in PHASES if any(times.get(f"{phase}_s") for times in every)]
    if not set(shown) & set(STAGE_PHASES):
        shown = [phase for phase in PHASES if phase not in STAGE_PHASES]
    for record in records:
        step = max(sum(begin < record["iteration"] for begin in begins) - 1, 0)
        for name, times in record["ranks"].items():
            num_iterations[step, name] = num_iterations.get((step, name), 0) + record["iterations"]
            for phase in shown:
                key = step, name, phase
                spent_s[key] = spent_s.get(key, 0.0) + times.get(f"{phase}_s", 0.0)
            if name not in facts.ranks:
                facts.ranks.append(name)
    facts.phases = [
        {"step": step, "rank": name, "phase": phase, "ms": 1e3 * seconds / num_iterations[step, name]}
        for (step, name, phase), seconds in spent_s.items()
    ]


def _add_curves(facts: RunFacts, run: RecordedRun) -> None:
    trained = run.of("train", "round")
    for record in _kept(facts, trained, MOST_POINTS, "records of the loss"):
        facts.losses.append({"iteration": record["iteration"], "loss": finite(record["loss"]), "what": "training"})
        if "samples_per_s" in record:
            facts.rates.append({"iteration": record["iteration"], "rate": finite(record["samples_per_s"])})
    for record in _kept(facts, run.of("validation"), MOST_POINTS, "validations"):
        if "loss" in record:
            facts.losses.append({"iteration": record["iteration"], "loss": finite(record["loss"]), "what": "validation"})


def _add_speeds(facts: RunFacts, records: list[Mapping[str, Any]]) -> None:
    known = [record for record in records if record.get("speeds") and max(record["speeds"].values()) > 0]
    most = max(2, _MOST_ROWS // max((len(record["speeds"]) for record in known), default=1))
    for record in _kept(facts, known, most, "estimates of the speeds"):
        top = max(record["speeds"].values())
        for name, speed in record["speeds"].items():
            facts.speeds.append({"iteration": record["iteration"], "rank": name, "speed": finite(speed / top)})


def _add_watched(facts: RunFacts, records: list[Mapping[str, Any]]) -> None:
    made = [
        {"iteration": alarm["at"], **{name: alarm[name] for name in ("what", "began", "slower", "error")}}
        for record in records
        for alarm in record["alarms"]
    ]
    facts.alarms = _kept(facts, made, 200, "alarms")
    for record in _kept(facts, records, MOST_POINTS, "records of what was lost"):
        for kind, price_s in record["price_s"].items():
            if price_s > 0:
                share = finite(record["lost_s"][kind] / price_s)
                facts.accounts.append({"iteration": record["iteration"], "what": kind, "share": share})


def _add_decisions(facts: RunFacts, checks: list[Mapping[str, Any]]) -> None:
    facts.num_checks = len(checks)
    names = ("iteration", "decision", "reason", "imbalance", "moved_units")
    made = [{name: record[name] for name in names} for record in checks if record["decision"] != "keep"]
    facts.decisions = _kept(facts, made, 200, "decisions that changed the tiling")


def _death(record: Mapping[str, Any]) -> Row:
    """A row of the table of deaths and repairs; times in seconds since the run began, where they are known."""
    when = f"iteration {record['iteration']}"
    if "at_s" in record:
        when = f"{record['at_s']:.1f} s, {when}"
    if record["event"] == "failure":
        what = f"{record['who']} ({record['process']}): {record['how']}"
        silent = record.get("silent_s")
        return {"when": when, "what": what, "repair": "", "lost": f"{silent:.2f} s until it was noticed" if silent else ""}
    if record["event"] == "members":
        settled = {"finished": "the open step was finished", "redone": "the open step was done again", "none": ""}
        lost, ranks = record.get("steps_lost"), len(record["members"])
        settled["returned"] = f"{lost} step was done again" if lost == 1 else f"{lost} steps were done again"
        members = f"{ranks} rank goes on" if ranks == 1 else f"{ranks} ranks go on"
        repair = "; ".join(filter(None, [settled.get(record["settled"], ""), members, f"{record['moved_units']} units moved"]))
        return {"when": when, "what": record["reason"], "repair": repair, "lost": f"{record['lost_s']:.2f} s"}
    if record["event"] == "warning":
        return {"when": when, "what": f"warning: {record['message']}", "repair": "", "lost": ""}
    return {"when": when, "what": f"{record['kind']}: {record['message']}", "repair": "the run ended", "lost": ""}


def finite(value: float | None) -> float | None:
    """`value`, or None for what is not a finite number, which JSON has no word for."""
    return value if value is not None and math.isfinite(value) else None
