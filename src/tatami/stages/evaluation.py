"""The stages of evaluation, where a network does other operations than in training.

Weights stay where training has them, so the program of evaluation is cut in front of the first operation that reads weights of
the next stage, or as little before it as can be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from tatami.errors import ModelError
from tatami.stages.program import ForwardOperation, ForwardProgram, Staging, obstacle_of


def evaluation_of(staging: Staging, program: ForwardProgram) -> Staging:
    """The evaluation of a network, cut where its training is.

    Args:
        staging: its training.
        program: its forward pass in evaluation.

    Raises:
        ModelError: a stage would need weights that it has not, or data would flow from a later stage to an earlier one.
    """
    trained = staging.program
    if [each.name for each in trained.operations] == [each.name for each in program.operations]:
        return Staging(program=program, cuts=staging.cuts, also_updated=staging.updated)
    places = {key: number for number, key in _weighed(program.operations)}
    cuts: list[int] = []
    for cut in staging.cuts:
        behind = (places[key] for number, key in _weighed(trained.operations) if number >= cut and key in places)
        latest = min(behind, default=len(program.operations) - 1)
        earliest = max((number + 1 for number, _ in _weighed(program.operations[:latest])), default=1)
        fits = (each for each in range(latest, earliest - 1, -1) if obstacle_of(program, each) is None)
        cuts.append(next(fits, latest))
    if cuts[0] < 1 or cuts != sorted(set(cuts)):
        raise ModelError("reads weights of later stages before those of earlier ones")
    found = Staging(program=program, cuts=tuple(cuts), also_updated=staging.updated)
    for stage, (own, needed) in enumerate(zip(_weights(staging), _weights(found), strict=True)):
        if not needed <= own:
            raise ModelError(f"reads weights in stage {stage} that it has not ({', '.join(sorted(needed - own)[:3])})")
    return found


def _weighed(operations: tuple[ForwardOperation, ...]) -> Iterator[tuple[int, tuple[object, ...]]]:
    """The numbers of the operations that read weights, and what each is called: the first, second, ... that reads these."""
    counts = Counter[object]()
    for each in operations:
        if each.parameters:
            counts[each.parameters] += 1
            yield each.number, (each.parameters, counts[each.parameters])


def _weights(staging: Staging) -> list[set[str]]:
    return [{*parameters, *buffers} for parameters, buffers in zip(staging.parameters, staging.buffers, strict=True)]
