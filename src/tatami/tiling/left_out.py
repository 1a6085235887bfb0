"""A layout, and which processors are left out of it for which reason."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

from tatami.cluster import Cluster
from tatami.tiling.layout import Layout
from tatami.units import format_size
from tatami.workload import Workload

_MOST_NAMED = 8


class Reason(Enum):
    """Why a processor is left out."""

    REPEATED = "too little memory for what every processor repeats"
    NO_WORK = "too slow for one sample and one unit"
    SPEED = "too slow to make an iteration shorter"
    MEMORY = "too little memory to make an iteration shorter"
    SAMPLES = "whole samples cannot be divided further"
    LINK = "sending takes longer than the work saves"
    MESSAGES = "messages and calls take longer than the work saves"


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """A layout, and which processors are left out of it.

    Attributes:
        layout: of all others.
        reasons: by the name of each processor that is left out, those first that were left out first.
    """

    layout: Layout
    reasons: Mapping[str, Reason] = field(default_factory=dict)

    @property
    def left_out(self) -> tuple[str, ...]:
        """The names of the processors that are left out."""
        return tuple(self.reasons)


def warnings_of(planner: str, fitted: Fitted, *, cluster: Cluster, workload: Workload) -> Iterator[str]:
    """A sentence for each reason for which processors are left out."""
    for reason in Reason:
        names = [name for name, each in fitted.reasons.items() if each is reason]
        if names:
            yield f"{planner} leaves out {_named(names, cluster)}: {_why(reason, names, cluster=cluster, workload=workload)}"


def _named(names: list[str], cluster: Cluster) -> str:
    """The processors; a host in place of its processors where all of several are among them."""
    members: dict[str, list[str]] = {}
    for processor in cluster.processors:
        members.setdefault(processor.host, []).append(processor.name)
    several = len(members) > 1
    gone, told = set(names), []
    for name in names:
        host = cluster.host_of[name]
        own = members[host]
        if not several or len(own) == 1 or not gone.issuperset(own):
            told.append(name)
        elif own[0] in gone and host not in told:
            told.append(host)
    more = f" and {len(told) - _MOST_NAMED} more" if len(told) > _MOST_NAMED else ""
    return ", ".join(told[:_MOST_NAMED]) + more


def _why(reason: Reason, names: list[str], *, cluster: Cluster, workload: Workload) -> str:
    if reason is Reason.REPEATED:
        size = format_size(round(least_bytes(workload)), digits=3)
        return f"not enough memory for what every processor repeats, {size}. Plan without them, or give them more"
    if reason is Reason.NO_WORK:
        given = any(cluster.by_name[name].memory_bytes is not None for name in names)
        why = "too slow, or with too little memory," if given else "too slow"
        return (
            f"{why} for one of {workload.samples} samples and one of {workload.units} units beside the others. Plan without "
            "them, or give more samples"
        )
    because = {
        Reason.SPEED: "they are too slow beside the others to save time",
        Reason.MEMORY: "they have too little memory for a share that would save time",
        Reason.SAMPLES: f"{workload.samples} whole samples cannot be divided further",
        Reason.LINK: "what travels over their link would take longer than their work saves",
        Reason.MESSAGES: "their messages and calls would take longer than their work saves",
    }[reason]
    return f"an iteration is predicted to be shorter without, as {because}. The planner srpm takes all"


def least_bytes(workload: Workload) -> float:
    """What a processor keeps that has one sample and one unit of the smallest block."""
    workload = workload.recomputing if workload.may_recompute else workload
    units = [
        workload.unit_state_bytes(block) + block.unit_activation_bytes + block.sample_activation_bytes
        for block in workload.blocks
    ]
    return workload.replicated_state_bytes + workload.replicated_activation_bytes + min(units, default=0.0)
