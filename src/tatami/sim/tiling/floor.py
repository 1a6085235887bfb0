"""A tiling as what each processor computes and sends in one iteration: the same for every iteration until it is laid anew."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

from tatami.collective import AbstractPattern, Phase, RankGroup, Role, Schedule, Step, Via, build
from tatami.collective.direct import DirectAllGather, DirectReduceScatter
from tatami.sim.tiling.work import NO_STARTUP, Startup, Work, work_of
from tatami.tiling import Tiling, horizontal_messages
from tatami.workload import Workload

DIRECT = "direct"
"""The sum in a column as `tatami.tiled.column_sum` does it where the column is on several hosts: everyone to everyone."""
AUTO = "auto"
"""DIRECT; where a column has more than 16 ranks halving and doubling, which moves as many bytes in 2 k log k messages: the
2 k (k - 1) of 100 ranks take minutes to simulate."""
_MOST_DIRECT = 16
_WHOLE_BYTES = 16 * 1024
"""Its own: up to so much to send, everyone sends the whole."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Traffic(AbstractPattern):
    """Messages in two phases, by rank: (phase, source, target, elements)."""

    messages: tuple[tuple[int, int, int, int], ...]
    _of: dict[tuple[int, int], list[Step]] = field(default_factory=lambda: defaultdict(list), repr=False)

    def __post_init__(self) -> None:
        for phase, source, target, elements in self.messages:
            step = Step(source=source, target=target, start=0, stop=elements, reduce=False, via=Via.MESSAGE)
            self._of[phase, source].append(step)
            self._of[phase, target].append(step)

    @cached_property
    def _num_rounds(self) -> int:
        return 1 + max((phase for phase, *_ in self.messages), default=0)

    @property
    def role(self) -> Role:
        return Role.ALL_REDUCE

    @property
    def title(self) -> str:
        return "horizontal messages"

    def num_rounds(self, members: int) -> int:  # noqa: ARG002 - as many as the messages have phases
        return self._num_rounds

    def steps_of(self, group: RankGroup, *, member: int, round: int) -> Iterator[Step]:
        yield from self._of.get((round, group.ranks[member]), ())


@dataclass(frozen=True, kw_only=True)
class Sum:
    """A schedule, and the rank on the cluster of each of its own ranks."""

    ranks: tuple[int, ...]
    schedule: Schedule

    @cached_property
    def place_of(self) -> dict[int, int]:
        """Which of the schedule's ranks each rank is."""
        return {rank: place for place, rank in enumerate(self.ranks)}


@dataclass(frozen=True, kw_only=True)
class Leg:
    """What a rank computes, and the sum over its column that follows.

    Attributes:
        flop: of this processor.
        backward: whether it is part of compute 2.
        sums: one after the other, each with everyone of the column; none where the rank is alone.
        place: the rank's own in those sums.
    """

    flop: float
    backward: bool
    sums: tuple[Sum, ...]
    place: int


class Floor:
    """One tiling, ready to be replayed.

    Attributes:
        legs: of each rank that has a tile, forward block by block and backward the other way round: every sum over a column
            is a meeting.
        update_flop: compute 3 of each such rank.
        works: of each such rank, as the controller counts them.
        horizontal: the messages across columns; None with one column.
        replicated: the sum of gradients outside of blocks, over all; None where there is nothing to be summed.
    """

    def __init__(
        self,
        tiling: Tiling,
        *,
        tilings: Sequence[Tiling],
        workload: Workload,
        rank_of: Mapping[str, int],
        vertical: str,
        startup: Startup = NO_STARTUP,
    ) -> None:
        """Prepare a tiling.

        Args:
            tiling: the columns, and the samples of each.
            tilings: the same for the units of each block of the workload; none where it has none.
            workload: what is laid out.
            rank_of: the rank of each processor.
            vertical: the sum in a column.
            startup: what each tile costs beyond its area.
        """
        self.tilings = tuple(tilings)
        self.names = {rank_of[tile.processor]: tile.processor for tile in tiling.tiles}
        self.legs: dict[int, tuple[Leg, ...]] = {}
        self.update_flop: dict[int, float] = {}
        self.works: dict[int, float] = {}
        for column in tiling.columns:
            samples = column[0].samples.size
            sums = _ColumnSums(vertical, ranks=[rank_of[tile.processor] for tile in column], samples=samples, workload=workload)
            for place, name in enumerate(tile.processor for tile in column):
                tiles = [each.by_processor[name] for each in tilings]
                work = work_of(tiles, samples=samples, workload=workload, startup=startup)
                self.legs[rank_of[name]] = sums.legs(work, place=place)
                self.update_flop[rank_of[name]] = work.update_flop
                self.works[rank_of[name]] = workload.tile_work([tile.units.size for tile in tiles], samples=samples)
        self.horizontal = self._across(tiling, workload, rank_of) if tilings else None
        everybody = tuple(sorted(self.names))
        self.replicated = None
        if len(tiling.columns) > 1 and workload.replicated_parameters:
            schedule = build("halving_doubling", ranks=len(everybody), size=workload.replicated_parameters)
            self.replicated = Sum(ranks=everybody, schedule=schedule)

    def _across(self, tiling: Tiling, workload: Workload, rank_of: Mapping[str, int]) -> Sum | None:
        num_columns = len(tiling.columns)
        if num_columns == 1:
            return None
        # As `tatami.tiled.horizontal` chooses.
        messages = horizontal_messages(self.tilings, method="direct" if num_columns == 2 else "reduce-scatter")
        everybody = tuple(sorted(self.names))
        place = {rank: index for index, rank in enumerate(everybody)}
        blocks = workload.blocks
        sized = tuple(
            (
                message.phase,
                place[rank_of[message.source]],
                place[rank_of[message.dest]],
                sum(blocks[block].unit_parameters * span.size for block, span in message.spans),
            )
            for message in messages
        )
        size = workload.horizontal_elements
        group = RankGroup(ranks=tuple(range(len(everybody))), start=0, stop=size)
        phase = Phase(groups=(group,), what=Traffic(messages=sized))
        schedule = Schedule(
            algorithm="horizontal", ranks=len(everybody), size=size, phases=(phase,), order="by column", fixed_order=True
        )
        return Sum(ranks=everybody, schedule=schedule)


class _ColumnSums:
    """The sums of one column: one schedule for each size, alike for all its blocks."""

    def __init__(self, vertical: str, *, ranks: Sequence[int], samples: int, workload: Workload) -> None:
        self._vertical = vertical
        self._ranks = tuple(ranks)
        self._element_bytes = workload.element_bytes
        self._schedules: dict[int, Schedule] = {}
        self._sums = [
            (
                self._of(block.forward_elements * samples, block.forward_sums),
                self._of(block.backward_elements * samples, block.backward_sums),
            )
            for block in workload.blocks
        ] or [((), ())]

    def _of(self, elements: int, num_sums: int) -> tuple[Sum, ...]:
        if len(self._ranks) == 1 or not elements or not num_sums:
            return ()
        size = round(elements / num_sums)
        if size not in self._schedules:
            self._schedules[size] = _column_sum(
                self._vertical, ranks=len(self._ranks), size=size, element_bytes=self._element_bytes
            )
        return (Sum(ranks=self._ranks, schedule=self._schedules[size]),) * num_sums

    def legs(self, work: Work, *, place: int) -> tuple[Leg, ...]:
        """Those of one rank; what it computes without a sum between becomes one."""
        there = [(flop, False, forward) for flop, (forward, _) in zip(work.forward, self._sums, strict=True)]
        back = [(flop, True, backward) for flop, (_, backward) in zip(work.backward, self._sums, strict=True)]
        result: list[Leg] = []
        for flop, backward, sums in [*there, *reversed(back)]:
            if result and not result[-1].sums and result[-1].backward == backward:
                flop += result.pop().flop
            result.append(Leg(flop=flop, backward=backward, sums=sums, place=place))
        return tuple(result)


def _column_sum(vertical: str, *, ranks: int, size: int, element_bytes: int) -> Schedule:
    if vertical == AUTO:
        vertical = DIRECT if ranks <= _MOST_DIRECT else "halving_doubling"
    if vertical != DIRECT or ranks == 1:
        return build("ring" if vertical == DIRECT else vertical, ranks=ranks, size=size)
    group = RankGroup(ranks=tuple(range(ranks)), start=0, stop=size)
    phases: tuple[Phase, ...]
    if ranks == 2 or size < ranks or size * element_bytes * (ranks - 1) <= _WHOLE_BYTES:
        messages = tuple((0, source, target, size) for source in range(ranks) for target in range(ranks) if source != target)
        phases = (Phase(groups=(group,), what=Traffic(messages=messages)),)
    else:
        patterns = (DirectReduceScatter(via=Via.MESSAGE), DirectAllGather(via=Via.MESSAGE))
        phases = tuple(Phase(groups=(group,), what=pattern) for pattern in patterns)
    return Schedule(algorithm=DIRECT, ranks=ranks, size=size, phases=phases, order="by rank", fixed_order=True)
