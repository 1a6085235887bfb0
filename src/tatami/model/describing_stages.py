"""The stages of a model for people, and for the records: who computes which pieces, what crosses the cuts, and memory."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import permutations
from typing import Any

from tatami.model.model_stage import ModelStage
from tatami.report.staged import piece_words
from tatami.report.tables import table_of
from tatami.report.words import wrapped
from tatami.tiling import StagedPlan
from tatami.units import format_size

_LEAST_PIECES = 12
"""Characters that the names of pieces keep where the line is too long."""


@dataclass(frozen=True, kw_only=True)
class StagesDescription:
    """The stages of a model.

    Attributes:
        plan: who computes what, for which samples, in how many micro-batches, and the memory that is planned for it.
        in_flight: for each stage, how many micro-batches it keeps the activations of.
        sentences: what one sample hands from stage to stage, and which weights several stages hold.
    """

    plan: StagedPlan
    in_flight: tuple[int, ...]
    sentences: tuple[str, ...]

    @property
    def shares_units(self) -> bool:
        """Whether several ranks of a replica share the units of a stage."""
        return any(len(replica.processors) > 1 for stage in self.plan.layout.stages for replica in stage.replicas)

    def to_dict(self) -> dict[str, Any]:
        """For the records; stages and replicas are counted from 1 there."""
        return {
            "ranks": [
                {
                    "rank": rank.processor,
                    "stage": rank.stage + 1,
                    "replica": rank.replica + 1,
                    "pieces": piece_words(self.plan, rank.first, rank.stop),
                    "samples": rank.samples,
                    "micro_batches": rank.micro_batches,
                    "in_flight": min(self.in_flight[rank.stage], rank.micro_batches),
                    "memory_bytes": round(rank.memory_bytes),
                    "memory_given_bytes": rank.memory_given_bytes,
                }
                for rank in self.plan.ranks
            ],
            "sentences": list(self.sentences),
        }

    def text(self, *, width: int) -> str:
        """A table of the ranks, and sentences on what crosses, in lines of at most `width` characters."""
        layout = self.plan.layout
        several = layout.num_replicas > 1
        rows = [
            {
                "stage": f"{each['stage']}",
                **({"replica": f"{each['replica']}"} if several else {}),
                "rank": each["rank"],
                "pieces": each["pieces"],
                "samples": f"{each['micro_batches']} x {-(-each['samples'] // each['micro_batches'])}",
                "in flight": f"{each['in_flight']}",
                "memory": _memory(each["memory_bytes"], each["memory_given_bytes"]),
            }
            for each in self.to_dict()["ranks"]
        ]
        used = sum(2 + max(len(name), *(len(row[name]) for row in rows)) for name in rows[0] if name != "pieces")
        room = max(_LEAST_PIECES, width - used - 2)
        rows = [{**row, "pieces": _shortened(row["pieces"], room)} for row in rows]
        title = f"{len(layout.stages)} pipeline stages" + f" of {layout.num_replicas} replicas" * several
        table = table_of(f"{title}:", rows, texts=("rank", "pieces"))
        lines = [line.removeprefix("  ") for line in table.to_text().splitlines()]  # no row is marked as the best one
        return "\n".join([lines[0], *lines[2:], wrapped(" ".join(self.sentences), width=width)])


def describe_stages(stage: ModelStage) -> StagesDescription:
    """Describe the stages of the model that `stage` is a part of; the same on every rank."""
    assert stage.plan is not None
    sentences = []
    for (source, target), (forward, back) in _crossing_bytes(stage).items():
        returned = _size(back) if back else "nothing"
        sentences.append(f"Stage {source + 1} hands {_size(forward)} a sample to stage {target + 1}, and gets {returned} back.")
    for name, holders in _tied(stage).items():
        sentences.append(f"Stages {', '.join(str(each + 1) for each in holders)} hold {name}, and sum its gradients.")
    if names := stage.plan.recomputes:
        sentences.append(f"Of {', '.join(names)} activations are computed once more in the backward pass.")
    return StagesDescription(plan=stage.plan, in_flight=stage.in_flight, sentences=tuple(sentences))


def handed_bytes(stage: ModelStage) -> dict[str, dict[str, int]]:
    """What the ranks of a model hand to the other stages in an iteration, and send of the gradients of tied weights.

    Returns:
        For each processor that sends, for each that receives, bytes.
    """
    plan = stage.plan
    assert plan is not None
    ranks: dict[tuple[int, int], list[str]] = {}
    samples: dict[int, int] = {}
    for rank in plan.ranks:
        ranks.setdefault((rank.stage, rank.replica), []).append(rank.processor)
        samples[rank.replica] = rank.samples
    elements = dict(each for piece in plan.workload.pieces for each in piece.shared)
    found: dict[str, dict[str, int]] = {}

    def add(source: int, target: int, replica: int, size_bytes: float) -> None:
        senders = ranks[source, replica]
        for place, receiver in enumerate(ranks[target, replica] if size_bytes else ()):
            own = found.setdefault(senders[place % len(senders)], {})
            own[receiver] = own.get(receiver, 0) + round(size_bytes)

    for replica, number in samples.items():
        for (source, target), (forward, back) in _crossing_bytes(stage).items():
            add(source, target, replica, forward * number)
            add(target, source, replica, back * number)
        for name, holders in _tied(stage).items():
            for one, other in permutations(holders, 2):
                add(one, other, replica, elements.get(name, 0) * plan.workload.wire_bytes)
    return found


def _crossing_bytes(stage: ModelStage) -> dict[tuple[int, int], tuple[float, float]]:
    """Bytes of a sample by the stages that send and receive: what is handed over, and its gradients, which come back."""
    assert stage.plan is not None
    program, workload = stage.staging.program, stage.plan.workload
    found: dict[tuple[int, int], tuple[float, float]] = {}
    for each in sorted(stage.staging.handovers, key=lambda each: (each.source, each.target)):
        size = program.values[each.value].size_bytes / program.samples
        if each.requires_grad:
            size *= workload.wire_bytes / workload.element_bytes
        forward, back = found.get((each.source, each.target), (0.0, 0.0))
        found[each.source, each.target] = forward + size, back + size * each.requires_grad
    return found


def _tied(stage: ModelStage) -> dict[str, list[int]]:
    """The weights that several stages hold, and these stages."""
    holders: dict[str, list[int]] = {}
    for number, names in enumerate(stage.staging.parameters):
        for name in names:
            holders.setdefault(name, []).append(number)
    return {name: stages for name, stages in holders.items() if len(stages) > 1}


def _memory(kept_bytes: int, given_bytes: int | None) -> str:
    kept = format_size(kept_bytes, digits=3)
    return kept if given_bytes is None else f"{kept} of {format_size(given_bytes, digits=3)}"


def _size(size_bytes: float) -> str:
    return format_size(round(size_bytes), digits=3)


def _shortened(words: str, room: int) -> str:
    """The first and the last piece, each cut in the middle where both have no room."""
    if len(words) <= room:
        return words
    ends = words.split(" - ")
    each = (room - 3 * (len(ends) - 1)) // len(ends)
    head = each // 2 - 1
    return " - ".join(end if len(end) <= each else f"{end[:head]}..{end[head + 2 - each :]}" for end in ends)
