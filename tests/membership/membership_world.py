"""A world of simulated ranks around the real state machine: what happens next is drawn, among all that could happen."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

from tatami.errors import PlanError
from tatami.membership import (
    Abort,
    Ask,
    Died,
    Dismiss,
    EndCause,
    Ended,
    EndRun,
    Entered,
    Halted,
    Held,
    Kill,
    Laid,
    Leaving,
    Membership,
    Regroup,
    Release,
    Restart,
    Silent,
    Stalled,
    Unbalanced,
    takes,
)
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.workload import Piece, Workload

UNITS = 7
PLAIN = Workload.mlp(3, UNITS, 2, samples=9)
PIECES = 4
WORKLOAD = replace(
    PLAIN,
    pieces=tuple(
        Piece(name=f"piece {number}", flop_per_sample=1.0, parameters=1, blocks=((PLAIN.blocks[0], 2),) if number == 1 else ())
        for number in range(PIECES)
    ),
)
"""A block of two pieces, in front of and behind other pieces."""
Row = tuple[int, int, bool]
STEPS = 5


@dataclass
class Rank:
    """One simulated rank. `rows` maps (block, unit, in the mirror) to how often it was updated; all must agree with `steps`."""

    name: str
    stage: str = "door"
    """door, body, posted (waits for the point), parked, ended, dead or frozen"""
    group: int = 0
    sections: int = 0
    steps: int = 0
    outcome: Any = None
    rows: dict[Row, int] = field(default_factory=dict)
    order: Regroup | None = None
    ticket: int = -1
    halting: int | None = None
    asked: bool = False
    stalled: bool = False
    half_done: bool = False

    @property
    def acts(self) -> bool:
        return self.stage not in ("dead", "frozen", "released")


class World:
    """Runs one history; `run` returns how it ended."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        first = tuple(f"p{index}" for index in range(self.random.randint(1, 5)))
        self.copies = self.random.choice([1, 2, 2])
        self.shards = self.random.random() < 0.2
        """Whether the optimizer is sharded: what no rank but the owner has, and is half done where a commit is disturbed."""
        self.machine = Membership(first, plan=self.plan, copies=self.copies)
        self.ranks = {name: Rank(name) for name in first}
        self.posted: dict[tuple[int, int], dict[str, tuple[bool, dict[Row, int], int]]] = {}
        self.broken: set[int] = set()
        self.groups: dict[int, tuple[str, ...]] = {0: first}
        self.mail: list[Callable[[], None]] = []
        self.chaos = self.random.randint(0, 6)
        self.replicas = self.random.choice([1, 2, 3, None])
        self.staged = self.random.choice([0.0, 0.5, 1.0])
        self.stop: EndRun | None = None
        self.saves = self.random.choice([True, False])
        self.saved: int | None = None
        self.returns = 0
        layout = self.plan(first)
        for rank in self.ranks.values():
            self.own(rank, layout)
            self.enter(rank, layout)

    def plan(self, names: tuple[str, ...]) -> Layout | StagedLayout:
        if len(names) > UNITS:
            raise PlanError("more ranks than units")
        if len(names) > 1 and self.random.random() < self.staged:
            return self.stages(names)
        num = min(len(names), self.replicas or self.random.randint(1, len(names)))
        replicas = [names[index::num] for index in range(num)]
        return Layout(
            replicas=tuple(Replica(width=1 / num, processors=each, heights=(1 / len(each),) * len(each)) for each in replicas)
        )

    def stages(self, names: tuple[str, ...]) -> StagedLayout:
        """Replicas of some stages; a rank that is left over shares the units of the last one, or has no place."""
        stages = self.random.randint(2, min(len(names), PIECES))
        replicas = len(names) // stages
        cuts = tuple(sorted(self.random.sample(range(1, PIECES), stages - 1)))
        left = names[stages * replicas :][: self.random.randint(0, 1)]
        places = [[names[replica * stages + stage] for replica in range(replicas)] for stage in range(stages)]
        laid = []
        for stage, own in enumerate(places):
            groups = [
                (name, *(left if (stage, number) == (stages - 1, replicas - 1) else ())) for number, name in enumerate(own)
            ]
            wide = (Replica(width=1 / replicas, processors=own, heights=(1 / len(own),) * len(own)) for own in groups)
            laid.append(Layout(replicas=tuple(wide)))
        return StagedLayout(stages=tuple(laid), cuts=cuts)

    def own(self, rank: Rank, layout: Layout | StagedLayout) -> None:
        """What a rank has to begin with: by what it takes where all is held by one."""
        alone = Held(layout=Layout(replicas=(Replica(width=1.0, processors=("all",), heights=(1.0,)),)))
        found, _ = takes(alone, Held(layout=layout), workload=WORKLOAD, sources=("all",))
        rank.rows = {
            (take.block, unit, False): rank.steps
            for take in found
            if take.dest == rank.name
            for unit in range(take.units.start, take.units.stop)
        }

    # -- messages -----------------------------------------------------------------------------------------------------

    def tell(self, event: Any) -> None:
        """To the machine, some time."""

        def deliver() -> None:
            for action in self.machine.handle(event):
                self.carry_out(action)

        self.mail.append(deliver)

    def send(self, name: str, take: Callable[[Rank], None]) -> None:
        """To a rank, some time."""

        def deliver() -> None:
            rank = self.ranks[name]
            if rank.stage == "frozen":
                self.mail.append(deliver)
            elif rank.acts:
                take(rank)

        self.mail.append(deliver)

    def carry_out(self, action: Any) -> None:
        match action:
            case Abort() | Ask():
                for name in action.members:
                    self.send(name, lambda rank, action=action: self.halt(rank, action))  # type: ignore[misc]
            case Regroup():
                self.groups[action.group] = action.members
                for name in action.members:
                    self.send(name, lambda rank: self.take_order(rank, action))
            case Restart():
                self.groups[action.group] = action.members
                for name in action.members:
                    self.send(name, lambda rank: self.restart(rank, action))
            case Dismiss():
                for name in action.members:
                    self.send(name, lambda rank: self.dismissed(rank, action))
            case Kill():
                self.ranks[action.member].stage = "dead"
            case Release():
                self.ranks[action.member].stage = "released"
            case EndRun():
                self.stop = action

    # -- ranks --------------------------------------------------------------------------------------------------------

    def halt(self, rank: Rank, action: Abort | Ask) -> None:
        if action.ticket < rank.ticket:
            return
        rank.ticket = action.ticket
        rank.halting = action.ticket
        if isinstance(action, Ask):
            rank.asked = True
        else:
            self.broken.add(rank.group)
        self.answer(rank)

    def answer(self, rank: Rank) -> None:
        if rank.halting is not None and rank.stage in ("parked", "ended", "door"):
            ended = rank.stage == "ended"
            self.tell(
                Halted(
                    member=rank.name,
                    ticket=rank.halting,
                    sections=rank.sections,
                    outcome=rank.outcome,
                    ended=ended,
                    admits=rank.steps % 3 != 1,
                    has_checkpoint=self.saved is not None,
                    is_half_done=rank.half_done,
                )
            )
            rank.halting = None

    def take_order(self, rank: Rank, change: Regroup) -> None:
        if change.ticket < rank.ticket:
            return
        rank.ticket = change.ticket
        assert rank.stage in ("parked", "door"), (rank, change)
        if self.shards and rank.stage == "parked":
            assert change.members == self.groups[rank.group], "a rank came or went, and its shard with it"
            assert not rank.half_done
            assert not change.finish
            assert not change.mirrors
        if rank.name in change.finish:
            self.commit(rank, change.outcome)
        if rank.name in change.newcomers:
            rank.sections, rank.steps = change.sections, -1
        assert rank.sections == change.sections, (rank, change)
        rank.order, rank.group, rank.asked, rank.stage, rank.stalled = change, change.group, False, "body", False

    def restart(self, rank: Rank, action: Restart) -> None:
        if action.ticket < rank.ticket:
            return
        rank.ticket, rank.group, rank.stage, rank.halting = action.ticket, action.group, "door", None
        if action.returns:
            assert self.saved is not None or self.shards
            self.returns += 1
            rank.sections, rank.steps, rank.outcome = 0, self.saved or 0, None
            rank.order, rank.asked, rank.stalled, rank.half_done = None, False, False, False
        layout = self.plan_of_group(action.group)
        self.own(rank, layout)
        self.enter(rank, layout)

    def enter(self, rank: Rank, layout: Layout | StagedLayout, *, joins: bool = False) -> None:
        group = None if joins else rank.group
        self.tell(Entered(member=rank.name, group=group, layout=layout, workload=WORKLOAD, shards=self.shards))

    def plan_of_group(self, group: int) -> Layout:
        names = self.groups[group]
        return Layout(replicas=(Replica(width=1.0, processors=names, heights=(1 / len(names),) * len(names)),))

    def dismissed(self, rank: Rank, action: Dismiss) -> None:
        if rank.name in action.finish:
            self.commit(rank, action.outcome)
        assert rank.sections == action.sections
        self.end(rank)

    def end(self, rank: Rank) -> None:
        assert rank.steps == STEPS, rank
        rank.stage = "ended"
        self.tell(Ended(member=rank.name))
        self.answer(rank)

    def park(self, rank: Rank) -> None:
        rank.stage = "parked"
        self.answer(rank)

    def key(self, rank: Rank) -> tuple[int, int]:
        return (rank.group, rank.sections)

    def post(self, rank: Rank) -> None:
        rank.stage = "posted"
        self.posted.setdefault(self.key(rank), {})[rank.name] = (rank.asked, dict(rank.rows), rank.steps)

    def can_pass(self, rank: Rank) -> bool:
        return set(self.posted.get(self.key(rank), {})) == set(self.groups[rank.group])

    def pass_(self, rank: Rank) -> None:
        posted = self.posted[self.key(rank)]
        is_change = rank.order is not None
        change = rank.order
        if self.shards and not is_change and not self.is_whole(rank.group):
            rank.half_done = True
            rank.sections += 1
            self.stall(rank)
            return
        self.commit(rank, None if is_change else f"loss {rank.steps}")
        if change is not None:
            self.tell(Laid(member=rank.name, ticket=change.ticket))
        if any(asked for asked, _, _ in posted.values()):
            self.park(rank)
        elif rank.steps == STEPS:
            self.end(rank)
        else:
            rank.stage = "body"

    def commit(self, rank: Rank, outcome: Any) -> None:
        """What follows a passed point; needs nothing from others but what has come by then."""
        if rank.order is None:
            rank.rows = {row: updates + 1 for row, updates in rank.rows.items()}
            assert outcome == f"loss {rank.steps}", (rank, outcome)
            rank.steps += 1
            if self.saves and self.random.random() < 0.5:
                self.saved = rank.steps - 1  # all have come so far
            assert all(updates == rank.steps for updates in rank.rows.values()), rank
        else:
            change = rank.order
            posted = self.posted[self.key(rank)]
            rows: dict[Row, int] = {}
            for take in (take for take in change.takes if take.dest == rank.name):
                for unit in range(take.units.start, take.units.stop):
                    rows[take.block, unit, take.to_mirror] = posted[take.source][1][take.block, unit, take.from_mirror]
            if rank.steps == -1:
                rank.steps = posted[change.source][2]
            rank.rows, rank.order = rows, None
            assert all(updates == rank.steps for updates in rows.values()), rank
        rank.sections += 1
        rank.outcome = outcome

    # -- chance -------------------------------------------------------------------------------------------------------

    def is_whole(self, group: int) -> bool:
        """Whether its connections hold: nothing was aborted, and all its members live."""
        return group not in self.broken and all(
            self.ranks[name].stage not in ("dead", "released") for name in self.groups[group]
        )

    def moves(self) -> list[Callable[[], None]]:
        found: list[Callable[[], None]] = []
        for rank in self.ranks.values():
            if rank.stage == "frozen":
                found.append(lambda rank=rank: self.tell(Silent(member=rank.name)))  # type: ignore[misc]
            if rank.stage == "body":
                found.append(lambda rank=rank: self.post(rank))  # type: ignore[misc]
            if rank.stage == "posted" and self.can_pass(rank):
                found.append(lambda rank=rank: self.pass_(rank))  # type: ignore[misc]
            if rank.stage in ("body", "posted") and not self.is_whole(rank.group):
                found.append(lambda rank=rank: self.stall(rank))  # type: ignore[misc]
        if self.chaos:
            found.append(self.something)
        return found

    def stall(self, rank: Rank) -> None:
        self.park(rank)
        if not rank.stalled:
            rank.stalled = True
            self.tell(Stalled(member=rank.name, group=rank.group, reason="the link broke"))

    def something(self) -> None:
        """One fault, join or departure."""
        self.chaos -= 1
        living = [rank for rank in self.ranks.values() if rank.acts]
        kind = self.random.choice(["die", "die", "freeze", "leave", "join", "break", "retile"])
        if kind == "join":
            name = f"p{len(self.ranks)}"
            self.ranks[name] = Rank(name)
            self.enter(self.ranks[name], self.plan((name,)), joins=True)
        elif kind == "retile":
            members = self.machine.members
            placed = tuple(name for name in members if name == members[-1] or self.random.random() < 0.7)
            self.tell(Unbalanced(member=members[0], layout=self.plan(placed), because="re-map whole"))
        elif living:
            rank = self.random.choice(living)
            if kind == "die":
                rank.stage = "dead"
                self.tell(Died(member=rank.name))
            elif kind == "freeze":
                rank.stage = "frozen"
            elif kind == "leave":
                self.tell(Leaving(member=rank.name))
            else:
                self.broken.add(rank.group)

    def run(self) -> EndCause | None:
        """To the end: None where the training was completed, the cause where the run stopped by name."""
        for _ in range(20_000):
            choices = self.moves()
            for index in range(len(self.mail)):
                choices.append(lambda index=index: self.mail.pop(index)())  # type: ignore[misc]
            if self.stop is not None:
                assert self.stop.reason
                return self.stop.cause
            going = [rank for rank in self.ranks.values() if rank.acts and rank.stage != "door"]
            if going and all(rank.stage == "ended" for rank in going) and not self.mail:
                return None
            assert choices, f"a hang: {self.machine.stage}, {self.ranks}"
            self.random.choice(choices)()
        raise AssertionError(f"no end: {self.machine.stage}, {self.ranks}")
