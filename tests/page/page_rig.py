"""Records of a run to make pages of."""

import re
from typing import Any

from tatami.cluster import Cluster
from tatami.planning import plan
from tatami.report.page import RecordedRun
from tatami.report.page.record_shapes import PHASES
from tatami.tiling import link_bytes, traffic_of
from tatami.workload import Workload


def tiling_record(iteration: int, speeds: list[float], *, why: str) -> dict[str, Any]:
    cluster, workload = Cluster.from_speeds(speeds), Workload.mlp(20, 120, 10, samples=60)
    tiling = plan("srpm", cluster=cluster, workload=workload).tiling
    names = list(cluster.speeds)
    traffic = traffic_of([tiling], workload=workload, names=names, hosts={name: name for name in names})
    values = {"why": why, "tiling": tiling.to_dict(), "speeds": cluster.speeds, "sent_bytes": link_bytes(traffic)}
    return {"event": "tiling", "iteration": iteration, **values, "native_bytes": 0}


def a_run() -> list[dict[str, Any]]:
    """Four ranks, three re-tilings, a death that is repaired; a loss that was not a number, and a reason that is HTML."""
    courses = [(0, [1.0, 1, 1, 1]), (40, [1, 0.5, 1, 1]), (80, [1, 0.5, 0.25, 1]), (120, [1, 0.5, 0.25, 0.3])]
    records: list[dict[str, Any]] = [{"event": "settings", "net": "20-120-10"}]
    for start, speeds in courses:
        names = [f"p{number}" for number in range(4)]
        if start:
            check = {"decision": "re-map whole", "reason": f"slow </script><b> at {start}", "imbalance": 2.0, "moved_units": 30}
            records.append({"event": "check", "iteration": start, **check, "speeds": dict(zip(names, speeds, strict=True))})
        records.append(tiling_record(start, speeds, why=f"tiling of {start}"))
        for iteration in range(start + 10, start + 41, 10):
            loss = float("nan") if iteration == 20 else 3.0 / iteration
            ranks = {name: {f"{phase}_s": 0.01 * (1 + number) for phase in PHASES} for number, name in enumerate(names)}
            records.append({"event": "phases", "iteration": iteration, "iterations": 10, "ranks": ranks})
            records.append({"event": "train", "iteration": iteration, "epoch": 1, "loss": loss, "samples_per_s": 500.0})
            keep = {"decision": "keep", "reason": "even", "imbalance": 1.1, "moved_units": 0, "speeds": {}}
            records.append({"event": "check", "iteration": iteration, **keep})
    change = {"at_s": 12.34, "reason": "p2 died", "step": 150, "settled": "redone", "members": ["p0", "p1", "p3"]}
    records.append({"event": "members", "iteration": 150, **change, "lost_s": 0.31, "moved_units": 66})
    return records


def recorded(records: list[dict[str, Any]]) -> RecordedRun:
    return RecordedRun(records=tuple(records))


PAYLOAD = "</ScRiPt><!--<script><img src=x onerror=\"document.title='ran'\">'>&amp;\u2028"
"""A name that runs a script where it reaches a page as it is."""


def hostile(value: Any, *, name: str = "") -> Any:
    """`value` with `PAYLOAD` appended to the names of ranks and to every text but those that select what is shown."""
    if isinstance(value, dict):
        return {key + PAYLOAD * bool(re.fullmatch(r"p\d", key)): hostile(each, name=key) for key, each in value.items()}
    if isinstance(value, list):
        return [hostile(each, name=name) for each in value]
    return value + PAYLOAD if isinstance(value, str) and name not in ("event", "decision", "settled") else value
