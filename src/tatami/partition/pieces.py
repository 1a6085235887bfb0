"""A network as consecutive pieces, which pipeline stages can share out: recorded once, over a sample."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from tatami.errors import ModelError
from tatami.partition.blocks import FOLLOWING, Blocks, copies_untrained, without_blocks
from tatami.partition.exactness import RandomDraws
from tatami.partition.tracing.flop_counting import PassFlop
from tatami.partition.tracing.restore_state import unchanged
from tatami.partition.tracing.sample import Sample
from tatami.partition.tracing.saved_activations import Keeping, forward_alone
from tatami.runtime.precision import without_autocast
from tatami.stages.evaluation import evaluation_of
from tatami.stages.program import ForwardOperation, ForwardProgram, Staging, obstacle_of
from tatami.stages.recording import record
from tatami.workload import Block, Piece, RepeatedLayer

_WIDER = 1.5
"""A cut at which more crosses than so many times the least nearby is no place to cut at."""
_NEARBY = 16
"""Fraction of the program, on both sides of a cut, in which the least is looked for: one of so many."""
_SMALL = 2e-4
"""A piece of less than this fraction of all work is joined with the next one."""


@dataclass(frozen=True, kw_only=True)
class RecordedNetwork:
    """A network's forward pass in training, and where stages may begin.

    Attributes:
        program: what the forward pass does.
        pieces: what of it stages share out, in its order.
        firsts: for each piece, its first operation.
        obstacle: why it cannot be cut somewhere else; empty where it can be cut everywhere.
        evaluated: what the forward pass does in evaluation, where that is something else; or why that is not known.
    """

    program: ForwardProgram
    pieces: tuple[Piece, ...]
    firsts: tuple[int, ...]
    obstacle: str = ""
    evaluated: ForwardProgram | ModelError | None = None

    def evaluation(self, staging: Staging) -> Staging | ModelError | None:
        """The stages of evaluation, where they are not those of training; or why there are none."""
        if not isinstance(self.evaluated, ForwardProgram):
            return self.evaluated
        try:
            return evaluation_of(staging, self.evaluated)
        except ModelError as error:
            return error

    def refuse_few(self, stages: int) -> None:
        """
        Raises:
            ModelError: there are fewer pieces than stages.
        """
        if stages > len(self.pieces):
            names = ", ".join(piece.name for piece in self.pieces[:8])
            raise ModelError(
                f"{stages} stages are more than the {len(self.pieces)} that this network can be divided into ({names})"
                f"{f'. It cannot be cut elsewhere: {self.obstacle}' if self.obstacle else ''}"
            )

    def pieces_with(self, found: Blocks, facts: Sequence[Block]) -> tuple[Piece, ...]:
        """The pieces, with the blocks that several ranks of a stage can share, and the layers that they can compute once more.

        Args:
            found: what of the network is tiled where there are no stages.
            facts: what planners know of it (`Workload.blocks`).
        """
        ranges: dict[str, tuple[int, int]] = {}
        for call in self.program.calls:
            first, stop = ranges.get(call.module, (call.first, call.stop))
            ranges[call.module] = min(first, call.first), max(stop, call.stop)
        known = iter(facts)
        fact_of = [next(known) if block.begins else None for block in found.blocks]
        own: dict[int, list[tuple[Block, int]]] = {}
        for _, modules, indices in found.groups:
            called = [ranges[name] for name in modules if name in ranges]
            if not called:
                continue
            first = bisect_right(self.firsts, min(each for each, _ in called)) - 1
            last = bisect_left(self.firsts, max(each for _, each in called)) - 1
            for index in indices:
                if (fact := fact_of[index]) is not None:
                    own.setdefault(first, []).append((fact, last - first + 1))
        layers: dict[int, list[RepeatedLayer]] = {}
        for name in found.layers:
            if name not in ranges or found.captured is None:
                continue
            called = [(call.first, call.stop) for call in self.program.calls if call.module == name]
            operations = [each for first, stop in called for each in self.program.operations[first:stop]]
            begin, end = (bisect_right(self.firsts, at) - 1 for at in (ranges[name][0], ranges[name][1] - 1))
            layer = RepeatedLayer(
                name=name,
                pieces=end - begin + 1,
                kept_bytes=sum(each.kept_bytes for each in operations) / self.program.samples,
                input_bytes=found.captured.layers[name].input_bytes,
                flop=sum(each.flop for each in operations) / self.program.samples,
            )
            layers.setdefault(begin, []).append(layer)
        return tuple(
            replace(piece, blocks=tuple(own.get(place, ())), layers=tuple(layers.get(place, ())))
            for place, piece in enumerate(self.pieces)
        )

    def staging(self, cuts: Sequence[int]) -> Staging:
        """The program, cut in front of these pieces.

        Raises:
            ModelError: it cannot be cut there.
        """
        self.refuse_few(len(cuts) + 1)
        if max(cuts, default=0) >= len(self.pieces):
            names = ", ".join(f"{place} {piece.name}" for place, piece in enumerate(self.pieces[:8]))
            raise ModelError(f"this layout is cut in front of piece {max(cuts)}, and the network's pieces are {names}")
        return Staging(program=self.program, cuts=tuple(self.firsts[cut] for cut in cuts))


def exact_pieces(model: nn.Module, found: Blocks, sample: Any, *, random: RandomDraws = "plain") -> RecordedNetwork:
    """`record_network`, of a network that stages compute exactly.

    Raises:
        ModelError: stages could not compute it exactly, or its forward pass cannot be recorded.
    """
    without_blocks(model, found, random=random)
    return record_network(model, Sample.of(sample))


def record_network(model: nn.Module, sample: Sample) -> RecordedNetwork:
    """Run `model` forward in training, and leave it as it was."""
    program = replace(_recorded(model, sample), samples=sample.samples)
    firsts, obstacle = _firsts(program)
    pieces = _pieces(model, program, firsts, samples=sample.samples)
    evaluated: ForwardProgram | ModelError | None = _evaluated(model, sample)
    if isinstance(evaluated, ForwardProgram) and _does(evaluated) == _does(program):
        evaluated = None
    return RecordedNetwork(program=program, pieces=pieces, firsts=firsts, obstacle=obstacle, evaluated=evaluated)


def _recorded(model: nn.Module, sample: Sample, *, training: bool = True) -> ForwardProgram:
    def run(keeping: Keeping) -> ForwardProgram:
        flop = PassFlop()
        with FOLLOWING, unchanged(model), without_autocast(), torch.enable_grad(), keeping.watched(), flop:
            model.train(training)
            return record(model, sample.args, sample.kwargs, meter=lambda: (flop.flop, float(keeping.size_bytes)))

    return forward_alone([*model.parameters(), *model.buffers()], run)


def _evaluated(model: nn.Module, sample: Sample) -> ForwardProgram | ModelError:
    try:
        return _recorded(model, sample, training=False)
    except Exception as error:  # whatever the user's forward pass raises in evaluation, which is perhaps never asked for
        return ModelError(f"fails on the sample: {type(error).__name__}: {error}")


def _does(program: ForwardProgram) -> object:
    operations = [
        (each.name, each.module, each.reads, each.makes, each.parameters, each.buffers, each.changes, each.reach)
        for each in program.operations
    ]
    calls = [(each.module, each.first, each.stop, each.returns, each.looks) for each in program.calls]
    return operations, calls, program.returns


def _firsts(program: ForwardProgram) -> tuple[tuple[int, ...], str]:
    """The first operation of every piece, and what the first obstacle to other cuts is."""
    work = [0.0]
    for operation in program.operations:
        work.append(work[-1] + operation.flop)
    least = _SMALL * work[-1]
    # What is in front of, or behind, a cut must be worth a stage: the numbers that a network returns are often few.
    crossing = [own if least < work[cut] < work[-1] - least else 0.0 for cut, own in enumerate(program.crossing_bytes())]
    reach = max(8, len(crossing) // _NEARBY)
    thin, obstacle = [], ""
    for cut in range(1, len(crossing)):
        near = [each for each in crossing[max(1, cut - reach) : cut + reach + 1] if each]
        if 0 < crossing[cut] <= _WIDER * min(near, default=0):
            problem = obstacle_of(program, cut)
            thin += [cut] if problem is None else []
            obstacle = obstacle or problem or ""
    firsts = [0]
    for cut in thin:
        is_small = work[cut] - work[firsts[-1]] <= least
        if not is_small:
            firsts.append(cut)
        elif len(firsts) > 1 and crossing[cut] <= crossing[firsts[-1]]:
            firsts[-1] = cut  # what is computed between them is next to nothing: the later cut, where less crosses
    return tuple(firsts), obstacle


def _pieces(model: nn.Module, program: ForwardProgram, firsts: Sequence[int], *, samples: int) -> tuple[Piece, ...]:
    staging = Staging(program=program, cuts=tuple(firsts[1:]))
    trained = {name: each.numel() for name, each in model.named_parameters() if each.requires_grad}
    frozen = {
        name: float(each.numel() * each.element_size() * copies_untrained(each))
        for name, each in (*model.named_parameters(), *model.named_buffers())
        if name not in trained
    }
    crossing = program.crossing_bytes()
    readers = Counter(name for names in staging.parameters for name in names)
    linear = {name for name, module in model.named_modules() if type(module) is nn.Linear}
    found = []
    for index, (first, stop) in enumerate(zip(firsts, (*firsts[1:], len(program.operations)), strict=True)):
        operations = program.operations[first:stop]
        names = (*staging.parameters[index], *staging.buffers[index])
        found.append(
            Piece(
                name=_name(program, first, stop),
                flop_per_sample=3 * sum(each.flop for each in operations) / samples,
                late_flop_per_sample=sum(each.flop for each in operations if _is_late(each, linear, trained)) / samples,
                parameters=sum(trained.get(name, 0) for name in names),
                largest_parameters=max((trained.get(name, 0) for name in names), default=0),
                frozen_bytes=sum(frozen.get(name, 0.0) for name in names),
                activation_bytes_per_sample=sum(each.kept_bytes for each in operations) / samples,
                crossing_bytes_per_sample=crossing[first] / samples if first else 0.0,
                shared=tuple((name, trained[name]) for name in names if name in trained and readers[name] > 1),
            )
        )
    return tuple(found)


def _is_late(operation: ForwardOperation, linear: set[str], trained: Mapping[str, int]) -> bool:
    """Whether the product that gives its weight's gradient, which is as large as that of the forward pass, comes late."""
    return operation.module and operation.name in linear and not trained.keys().isdisjoint(operation.parameters)


def _name(program: ForwardProgram, first: int, stop: int) -> str:
    """The outermost module that begins and ends inside of a piece, or else its first operation."""
    inside = (call.module for call in program.calls if first <= call.first < call.stop <= stop)
    return next(inside, program.operations[first].name)
