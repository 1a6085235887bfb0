"""The tasks of workers on the stage: pull, compute, push, as the coordinator ordered it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass, field
from enum import Enum

from tatami.server import events as ev
from tatami.server.actions import SendTask
from tatami.server.roster import Place, Status
from tatami.server.run_settings import RunSettings
from tatami.sim.server.lifetimes import Fates
from tatami.sim.server.server_setup import ServerSetup
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


class SimulatedTasks:
    """The tasks of all workers on the stage; what they push is told as events.

    Args:
        fates: are told when workers compute.
        places: the coordinator's, by worker.
    """

    def __init__(
        self,
        setup: ServerSetup,
        stage: Stage,
        fates: Fates,
        *,
        settings: RunSettings,
        places: Callable[[], Mapping[int, Place]],
        dead: Set[int],
        servers_up: Set[int],
        tell: Callable[..., None],
    ) -> None:
        self._setup = setup
        self._stage = stage
        self._fates = fates
        self._settings = settings
        self._places = places
        self._dead = dead
        self._servers_up = servers_up
        self._tell = tell
        self._tasks: dict[int, SimulatedTask] = {}
        self._done_fraction: dict[int, float] = {}
        self._computing: set[int] = set()
        self._computed: list[SimulatedTask] = []

    def __bool__(self) -> bool:
        return bool(self._tasks)

    def begin(self, order: SendTask) -> None:
        """A worker begins a task, or what another process has left of it."""
        worker = order.worker
        if (before := self._tasks.pop(worker, None)) is not None:
            before.drop(self._stage)
        if not order.redone:
            self._done_fraction.pop(worker, None)
        done = self._done_fraction.get(worker, 0.0) if self._setup.resume == "continue" else 0.0
        task = SimulatedTask(order=order, host=self._setup.workers[worker], left=1.0 - done)
        self._tasks[worker] = task
        self._computing.add(worker)
        self._fates.takes(worker, order.process)
        if order.process in self._dead:
            return  # it died while the order was under way; the coordinator will hear of it
        self._exchange(task, TaskPart.PULL, then=self._pulled)

    def _exchange(self, task: SimulatedTask, part: TaskPart, *, then: Callable[[SimulatedTask], None]) -> None:
        """Exchange with the servers that stand for all of them; a push goes to every copy."""
        num_servers, num = len(self._setup.servers), self._setup.servers_of_one
        sizes: dict[int, float] = {}
        for piece in range(num):
            shard = (task.order.worker + piece) % num_servers if num < num_servers else piece
            holders = [(shard + copy) % num_servers for copy in range(self._setup.replicas)]
            holders = [holder for holder in holders if holder in self._servers_up]
            for holder in holders if part is TaskPart.PUSH else holders[:1]:
                sizes[holder] = sizes.get(holder, 0.0) + self._setup.model_bytes / num
        if sizes:
            task.exchange(self._stage, part, sizes=sizes, hosts=self._setup.servers, then=then)
            self._fates.hold_back(task.order.worker, task.going.values())

    def _pulled(self, task: SimulatedTask) -> None:
        if task.left <= 0:  # a spare takes over from one that had computed all
            self._has_computed(task)
            return
        duration_s = self._duration_s(task)
        self._fates.computes(task.order.worker, duration_s)  # first: a worker that dies at the end of it has not computed all
        task.compute(self._stage, duration_s=duration_s, then=self._has_computed)

    def _duration_s(self, task: SimulatedTask) -> float:
        return self._setup.task_flop * task.left / self._stage.speeds_flop_per_s[task.host]

    def _has_computed(self, task: SimulatedTask) -> None:
        self._fates.has_computed(task.order.worker)
        task.part = TaskPart.WAIT
        task.left = 0.0
        self._computing.discard(task.order.worker)
        self._computed.append(task)
        self.push()

    def push(self) -> None:
        """Let the workers push that have computed: all together or each at once, as the setup says."""
        together = self._setup.push == "together" and self._setup.consistency.lockstep
        # A worker that has begun is idle only where a process is dead; looking at all 10,000 each time would take long.
        if together and len(self._computing) > len(self._dead):
            return
        if together and any(self._places()[worker].status is Status.BUSY for worker in self._computing):
            return
        ready, self._computed = self._computed, []
        for task in sorted(ready, key=lambda each: each.order.worker) if together else ready:
            self._exchange(task, TaskPart.PUSH, then=self._pushed)

    def _pushed(self, task: SimulatedTask) -> None:
        order, now_s = task.order, self._stage.now_s
        del self._tasks[order.worker]
        self._tell(
            *(
                ev.ShardReceived(at_s=now_s, task=order, shard=shard, server=server)
                for shard, server in self._settings.copies
                if server in order.servers
            )
        )

    def drop_all(self) -> None:
        """Break all tasks off; none of what is computed counts."""
        for worker, task in self._tasks.items():
            self._fates.breaks_off(worker)
            task.drop(self._stage)
        self._tasks.clear()
        self._done_fraction.clear()
        self._computing.clear()
        self._computed.clear()

    def break_off(self, worker: int) -> None:
        """The process that holds a worker's place has died; what it computed is kept for one that resumes the task."""
        self._fates.breaks_off(worker)
        if (task := self._tasks.pop(worker, None)) is not None:
            if task.part is TaskPart.COMPUTE:
                share = (self._stage.now_s - task.began_s) / max(self._duration_s(task), 1e-300)
                task.left *= 1.0 - min(1.0, share)
            self._done_fraction[worker] = 1.0 - task.left
            task.drop(self._stage)
            if task in self._computed:
                self._computed.remove(task)
                self._computing.add(worker)

    def lose_server(self, server: int) -> None:
        """Transfers with a server that died end."""
        for task in list(self._tasks.values()):
            going = task.going.pop(server, None)
            if going is None:
                continue
            self._stage.cancel(going)
            # A pull starts again from another copy; a push that the other copies have is whole without this one.
            if task.part is TaskPart.PULL:
                task.drop(self._stage)
                self._exchange(task, TaskPart.PULL, then=self._pulled)
            elif not task.going:
                self._pushed(task)

    def cut(self, worker: int) -> None:
        """A worker's transfers stand still."""
        if (task := self._tasks.get(worker)) is not None and task.part is not TaskPart.COMPUTE:
            self._fates.hold_back(worker, task.going.values())

    def mend(self, worker: int) -> None:
        """A worker's transfers go on."""
        if (task := self._tasks.get(worker)) is not None and task.part is not TaskPart.COMPUTE:
            for going in task.going.values():
                self._stage.release(going)
