"""Tables of the evaluation, from the records that `benchmarks/evaluation.py` keeps (one mapping for each JSON line)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from statistics import median
from typing import Any

from paper.setting import RIVALS
from tatami.report.measured_rounds import MOST_GAMMA
from tatami.report.tables import Table
from tatami.units import format_bandwidth, format_duration

Record = Mapping[str, Any]

METHODS: Mapping[str, str] = {
    "even": "even",
    "h": "H",
    "h-rev": "H_rev",
    "weighted": "weighted data-parallel",
    "srpm": "SRPM",
    "srpm-merged": "SRPM, small groups removed",
    "timed": "least predicted time",
    "timed-bfloat16": "least predicted time, bfloat16 sent",
    "drpm": "DRPM",
    "drpm-speeds": "DRPM, speeds known",
    "drpm-timed": "DRPM by predicted time",
    "drpm-timed-speeds": "DRPM by predicted time, speeds known",
    "ddp": "DDP, even batches",
    "ddp-weighted": "DDP, weighted batches",
    "ddp-weighted-float16": "DDP, weighted batches, float16 sent",
}
"""What methods are called, in the order in which they are shown."""
PARTS: Mapping[str, str] = {
    "compute": "compute",
    "waiting": "waiting",
    "tensor_parallel": "tensor-parallel sums",
    "gradients": "gradient sums",
    "overhead": "overhead",
}
"""Of an iteration: what they are called, by the names of their records."""


def measured(records: Iterable[Record], **wanted: Any) -> list[Record]:
    """The measured iterations whose fields are as `wanted`; of a method with a choice of replicas, only the fastest."""
    chosen = [
        each for each in records if each["record"] == "iteration" and all(each[name] == value for name, value in wanted.items())
    ]
    best: dict[tuple[Any, ...], Record] = {}
    for each in chosen:
        key = tuple(each[name] for name in ("part", "condition", "num", "net", "bandwidth_bytes_per_s", "method"))
        if key not in best or each["iteration_s"] < best[key]["iteration_s"]:
            best[key] = each
    order = list(METHODS)
    return sorted(best.values(), key=lambda each: (order.index(each["method"]), each["num"]))


def efficiency_table(records: Sequence[Record], *, condition: str, net: str) -> Table:
    """Fig. 11 as numbers: gamma of every method for every N, with its spread; in brackets the share of time spent computing."""
    found = measured(records, part="efficiency", condition=condition, net=net)
    sizes = sorted({each["num"] for each in found})
    gamma = {(each["method"], each["num"]): _gamma(each) for each in found}
    methods = [name for name in METHODS if any((name, num) in gamma for num in sizes)]
    rows = [(METHODS[name], *(gamma.get((name, num), "-") for num in sizes)) for name in methods]
    return Table(
        title=f"efficiency gamma, {_network(found)}, condition {condition}",
        headers=("method", *(f"N = {num}" for num in sizes)),
        rows=tuple(rows),
        numbers=frozenset(range(1, len(sizes) + 1)),
    )


def _gamma(record: Record) -> str:
    """With its spread and, in brackets, the share of the time in which ranks computed; "-" where it cannot be."""
    if record["efficiency"] is None or record["efficiency"] > MOST_GAMMA:
        return "-"
    spread = f" ±{record['efficiency_spread']:.2f}" if "efficiency_spread" in record else ""
    computing = f" ({record['computing']:.2f})" if record.get("computing") is not None else ""
    return f"{record['efficiency']:.2f}{spread}{computing}"


def breakdown_table(records: Sequence[Record], *, condition: str, net: str, num: int) -> Table:
    """Where an iteration's time goes, as the mean over the ranks."""
    found = measured(records, part="efficiency", condition=condition, net=net, num=num)
    rows = [
        (
            METHODS[each["method"]],
            "+".join(map(str, each["replicas"])),
            format_duration(each["iteration_s"], digits=3),
            *(format_duration(each["breakdown"][f"{part}_s"], digits=3) for part in PARTS),
        )
        for each in found
        if "breakdown" in each
    ]
    return Table(
        title=f"an iteration, mean of the ranks; {_network(found)}, condition {condition}, N = {num}",
        headers=("method", "k(c)", "iteration", *PARTS.values()),
        rows=tuple(rows),
        numbers=frozenset(range(2, 8)),
    )


def rivals_table(records: Sequence[Record]) -> Table:
    """Iterations per second, and ours over torch's, for every rate of the links."""
    rows = []
    for rate in sorted({each["bandwidth_bytes_per_s"] for each in records if each["part"] == "rivals"}):
        found = measured(records, part="rivals", bandwidth_bytes_per_s=rate)
        seconds = {each["method"]: each["iteration_s"] for each in found}
        rows += [
            (
                format_bandwidth(rate),
                METHODS[name],
                f"{1 / own_s:.2f}",
                *(f"{seconds[rival] / own_s:.2f} x" if rival in seconds else "-" for rival in RIVALS),
            )
            for name, own_s in seconds.items()
        ]
    return Table(
        title="against DistributedDataParallel over gloo, in turn in the same processes",
        headers=("links", "method", "iterations/s", "against DDP,\neven", "against DDP,\nweighted", "weighted,\nfloat16"),
        rows=tuple(rows),
        numbers=frozenset({2, 3, 4, 5}),
    )


def course_table(records: Sequence[Record]) -> Table:
    """What each setting of DRPM did: when it re-mapped, how fast it was before and after the change of speed."""
    found = [each for each in records if each["record"] == "course"]
    rows = []
    for each in found:
        seconds, half = each["iteration_s"], _middle(each)
        moves = [
            f"{check['iteration']} ({check['kind'].rpartition(' ')[2]})" for check in each["checks"] if check["kind"] != "keep"
        ]
        rows.append(
            (
                each["contestant"],
                ", ".join(moves) or "-",
                format_duration(median(seconds[max(0, half - 10) : half]), digits=3),
                f"{each['efficiency_before']:.2f}",
                format_duration(median(seconds[-10:]), digits=3),
                format_duration(each["total_s"], digits=3),
            )
        )
    return Table(
        title="courses of DRPM",
        headers=(
            "setting",
            "re-mapped after",
            "iteration,\nbefore",
            "gamma,\nbefore",
            "iteration,\nat the end",
            "whole\ncourse",
        ),
        rows=tuple(rows),
        numbers=frozenset({2, 3, 4, 5}),
    )


def model_table(records: Sequence[Record]) -> Table:
    """How far the predicted iteration is from the measured one, for every network and method."""
    found = predicted(records)
    groups: dict[tuple[str, str], list[float]] = {}
    for each in found:
        error = each["predicted_s"] / each["iteration_s"] - 1
        groups.setdefault((each["net"], each["method"]), []).append(error)
        groups.setdefault((each["net"], "all"), []).append(error)
    rows = []
    for net in sorted({net for net, _ in groups}, reverse=True):
        for method in (*METHODS, "all"):
            errors = groups.get((net, method))
            if errors:
                rows.append(
                    (
                        net,
                        METHODS.get(method, "all"),
                        str(len(errors)),
                        f"{100 * median(map(abs, errors)):.1f} %",
                        f"{100 * median(errors):+.1f} %",
                        f"{100 * max(errors, key=abs):+.1f} %",
                    )
                )
    return Table(
        title="predicted against measured iteration time",
        headers=("network", "method", "tilings", "median\nsize of error", "median\nerror", "farthest"),
        rows=tuple(rows),
        numbers=frozenset({2, 3, 4, 5}),
    )


def predicted(records: Iterable[Record]) -> list[Record]:
    """Measured iterations of tilings that stayed as they were, which is what a prediction is of."""
    return [
        each
        for each in records
        if each["record"] == "iteration" and "predicted_s" in each and not each["remapped_while_measured"]
    ]


def _network(found: Sequence[Record]) -> str:
    return f"{found[0]['net']}, {found[0]['samples']} samples" if found else "nothing measured"


def _middle(course: Record) -> int:
    step = course["step"]
    return len(course["iteration_s"]) if step is None else int(step["after_iteration"])
