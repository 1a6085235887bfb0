"""One worker's task on the stage: pull, compute, push, as the coordinator ordered it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from tatami.server.actions import SendTask
from tatami.sim.stage import Going, Stage


class TaskPart(Enum):
    """The parts of a task, in their order."""

    PULL = "pull"
    COMPUTE = "compute"
    WAIT = "wait"
    PUSH = "push"


@dataclass(eq=False, slots=True, kw_only=True)
class SimulatedTask:
    """Attributes:
    order: what the coordinator asked for.
    host: where.
    left: of the work, 1 for all of it.
    part: the one that goes on now.
    began_s: when that began.
    going: the transfers that are under way, by the server at their other end; the computation by -1.
    """

    order: SendTask
    host: int
    left: float
    part: TaskPart = TaskPart.PULL
    began_s: float = 0.0
    going: dict[int, Going] = field(default_factory=dict)

    def exchange(
        self,
        stage: Stage,
        part: TaskPart,
        *,
        sizes: dict[int, float],
        hosts: tuple[int, ...],
        then: Callable[[SimulatedTask], None],
    ) -> None:
        """Pull from servers, or push to them: `sizes` in bytes by server; `then` when all is there."""
        self.part, self.began_s = part, stage.now_s
        for server, size_bytes in sizes.items():
            self._move(stage, server, size_bytes=size_bytes, host=hosts[server], then=then)

    def _move(self, stage: Stage, server: int, *, size_bytes: float, host: int, then: Callable[[SimulatedTask], None]) -> None:
        def moved() -> None:
            del self.going[server]
            if not self.going:
                then(self)

        source, target = (host, self.host) if self.part is TaskPart.PULL else (self.host, host)
        self.going[server] = stage.send(source, target, size_bytes=size_bytes, then=moved)

    def compute(self, stage: Stage, *, duration_s: float, then: Callable[[SimulatedTask], None]) -> None:
        """Compute what is left of the work; a timer, as no machine is shared, and ten thousand of them are cheap."""

        def computed() -> None:
            self.going.clear()
            then(self)

        self.part, self.began_s = TaskPart.COMPUTE, stage.now_s
        self.going[-1] = stage.after(duration_s, computed)

    def drop(self, stage: Stage) -> None:
        """Break the task off: its transfers and its computation end."""
        for going in self.going.values():
            stage.cancel(going)
        self.going.clear()
