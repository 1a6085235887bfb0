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


class Floor:
    """One tiling, ready to be replayed.

    Attributes:
        work: of each rank that has a tile.
        areas: samples x units of each such rank, as the controller counts them.
        vertical: of each rank, the sum in its column and its place there; None where it is alone.
        exchanges: sums in a column in each iteration.
        horizontal: the messages across columns; None with one column.
        replicated: the sum of gradients outside of blocks, over all; None where there is nothing to be summed.
    """

    def __init__(
        self,
        tilings: Sequence[Tiling],
        *,
        workload: Workload,
        rank_of: Mapping[str, int],
        vertical: str,
        startup: Startup = NO_STARTUP,
    ) -> None:
        first = tilings[0]
        self.tilings = tuple(tilings)
        self.names = {rank_of[tile.processor]: tile.processor for tile in first.tiles}
        self.work: dict[int, Work] = {}
        self.areas: dict[int, float] = {}
        for rank, name in self.names.items():
            self.work[rank] = work_of([tiling.by_processor[name] for tiling in tilings], workload=workload, startup=startup)
            self.areas[rank] = float(first.by_processor[name].area)
        self.exchanges = workload.vertical_exchanges
        self.vertical: dict[int, tuple[Sum, int] | None] = {}
        for column in first.columns:
            ranks = tuple(rank_of[tile.processor] for tile in column)
            elements = round(workload.vertical_elements * column[0].samples.size / first.samples / self.exchanges)
            column_sum = Sum(
                ranks=ranks,
                schedule=_column_sum(vertical, ranks=len(ranks), size=elements, element_bytes=workload.element_bytes),
            )
            alone = len(ranks) == 1 or elements == 0
            self.vertical |= {rank: None if alone else (column_sum, place) for place, rank in enumerate(ranks)}
        self.horizontal = self._across(tilings, workload, rank_of)
        everybody = tuple(sorted(self.names))
        self.replicated = None
        if len(first.columns) > 1 and workload.replicated_parameters:
            schedule = build("halving_doubling", ranks=len(everybody), size=workload.replicated_parameters)
            self.replicated = Sum(ranks=everybody, schedule=schedule)

    def _across(self, tilings: Sequence[Tiling], workload: Workload, rank_of: Mapping[str, int]) -> Sum | None:
        num_columns = len(tilings[0].columns)
        if num_columns == 1:
            return None
        # As `tatami.tiled.horizontal` chooses.
        messages = horizontal_messages(tilings, method="direct" if num_columns == 2 else "reduce-scatter")
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
