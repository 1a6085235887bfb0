"""Iteration after iteration, with checks, moves and changes of speed between them.

After each iteration the simulator waits until the last rank has ended it, and then lets all ranks begin the next with the lead
that it had: nothing is under way in between, so this changes nothing but the stage's clock, and `now_s` corrects it. Once
an iteration has gone like the one before, to the rank, the next ones do too, until a check is due or a speed changes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tatami.retiling import Alarm, Controller, Decision, Glance, Timing, Watcher, moves
from tatami.retiling.timing import PROBE_EVERY
from tatami.sim.stage import Stage, Then, play
from tatami.sim.tiling.changes import Speeds
from tatami.sim.tiling.iteration import Iteration, Times
from tatami.sim.tiling.iteration_plan import Floor
from tatami.sim.tiling.tiling_job import TilingJob
from tatami.tiling import AlphaBetaCost, Layout, Tiling

_TOGETHER = 1e-9
"""Relative: two iterations that differ by less are alike."""
_LEAST_S = 3e-9
"""The stage tells no times apart that are nearer than 1e-9 s."""


@dataclass(frozen=True, kw_only=True)
class TilingRun:
    """The result of a simulated tiled run.

    Attributes:
        total_s: of all iterations, checks and moves.
        iteration_s: from the end of the iteration before (or of its check) until the last rank's; of every iteration.
        compute_s: the longest and the shortest local compute of every iteration.
        decisions: of the checks.
        move_s: of each decision, what moving took.
        tilings: at the end.
        bytes_moved: by all ranks together.
        num_simulated: iterations that were not left out.
        alarms, glances: of the `Watcher`; empty with another rule.
    """

    total_s: float
    iteration_s: tuple[float, ...]
    compute_s: tuple[tuple[float, float], ...]
    decisions: tuple[Decision, ...]
    move_s: tuple[float, ...]
    tilings: tuple[Tiling, ...]
    bytes_moved: float
    num_simulated: int
    alarms: tuple[Alarm, ...] = ()
    glances: tuple[Glance, ...] = ()


class TilingPlay:
    """The state of one run of `job` on `stage`."""

    def __init__(self, stage: Stage, job: TilingJob) -> None:
        self._stage = stage
        self._job = job
        self._cluster = job.cluster
        self._workload = job.workload
        self._speeds = Speeds(job.true_flop_per_s, changes=job.changes)
        self._controller: Controller | Watcher | None = None
        if job.retiler is not None:
            self._controller = (Watcher if job.retiler.watches else Controller)(
                job.retiler, cluster=job.cluster, workload=job.workload, layout=job.layout, known_speeds=job.known_speeds
            )
        self._window: dict[int, list[Timing]] = defaultdict(list)
        self._last: dict[int, Times] | None = None
        self._iteration = 0
        self._since_s = 0.0
        self._ahead_s = 0.0
        self._skipped_bytes = 0.0
        self._bytes_before = 0.0
        self.floor = self._laid(job.layout)
        self.iteration_s: list[float] = []
        self.compute_s: list[tuple[float, float]] = []
        self.decisions: list[Decision] = []
        self.move_s: list[float] = []
        self.num_simulated = 0

    @property
    def now_s(self) -> float:
        """The run's own time."""
        return self._stage.now_s + self._ahead_s

    @property
    def result(self) -> TilingRun:
        """The result of the run, once it has ended."""
        watcher = self._controller if isinstance(self._controller, Watcher) else None
        return TilingRun(
            total_s=self._since_s,
            iteration_s=tuple(self.iteration_s),
            compute_s=tuple(self.compute_s),
            decisions=tuple(self.decisions),
            move_s=tuple(self.move_s),
            tilings=self.floor.tilings,
            bytes_moved=self._stage.bytes_moved + self._skipped_bytes,
            num_simulated=self.num_simulated,
            alarms=tuple(watcher.alarms) if watcher else (),
            glances=tuple(watcher.glances) if watcher else (),
        )

    def start(self) -> None:
        """Begin with all ranks at once."""
        self._next(dict.fromkeys(self.floor.names, 0.0))

    def _laid(self, layout: Layout) -> Floor:
        cost = AlphaBetaCost(flop_per_s=self._job.flop_per_s)
        return Floor(
            layout,
            workload=self._workload,
            cluster=self._cluster,
            speeds=self._job.true_flop_per_s,
            startup=self._job.startup,
            buckets=cost.buckets(layout, cluster=self._cluster, workload=self._workload),
        )

    def _next(self, leads_s: dict[int, float]) -> None:
        """Begin the next iteration, each rank so long after the first."""
        if self._iteration == self._job.iterations:
            return
        self._iteration += 1
        self.num_simulated += 1
        self._speeds.begin(self._iteration)
        self._bytes_before = self._stage.bytes_moved
        now_s = self._stage.now_s
        begin_s = {rank: now_s + lead_s for rank, lead_s in leads_s.items()}
        Iteration(
            self._stage,
            self.floor,
            speeds=self._speeds,
            begin_s=begin_s,
            ahead_s=self._ahead_s,
            software=self._job.software,
            done=self._ended,
        )

    def _ended(self, times: dict[int, Times]) -> None:
        now_s = self.now_s
        self._note(times, took_s=now_s - self._since_s)
        last, self._last = self._last, times
        self._since_s = now_s
        if last is not None and self._job.skip and _alike(times, last):
            self._leave_out(times, took_s=self.iteration_s[-1])
        first_s = min(each.ended_s for each in times.values())
        leads_s = {rank: each.ended_s - first_s for rank, each in times.items()}
        if self._controller is not None and self._controller.due(self._iteration):
            decision = self._controller.observe(self._iteration, [each for own in self._window.values() for each in own])
            if decision is not None:
                self._carry_out(decision)
                return
        # The rank that ended first begins again now, on the stage's clock: the run's own is taken back to when it ended.
        # Example: ranks end at 9 s and 10 s on both clocks. On the stage it is 10 s, and they begin again at 10 s and 11 s,
        # which in the run is 9 s and 10 s: it is one second behind the stage from now on.
        self._ahead_s -= max(leads_s.values())
        self._next(leads_s)

    def _note(self, times: dict[int, Times], *, took_s: float) -> None:
        self.iteration_s.append(took_s)
        tiled = {rank: times[rank] for rank in self.floor.works}
        spent_s = [each.compute_s for each in tiled.values()]
        self.compute_s.append((max(spent_s), min(spent_s)))
        if self._controller is None:
            return
        if isinstance(self._controller, Watcher):
            self._window.clear()
            self._probe_left_out()
        for rank, each in tiled.items():
            window = self._window[rank]
            window.append(
                Timing(
                    processor=self.floor.names[rank],
                    iteration=self._iteration,
                    t1_s=each.t1_s,
                    t2_s=each.backward_s,
                    compute_s=each.compute_s,
                    work=self.floor.works[rank],
                )
            )
            del window[: -self._controller.retiler.window]

    def _probe_left_out(self) -> None:
        """Ranks without a tile look now and then how fast they are; that costs the others nothing."""
        if self._iteration % PROBE_EVERY:
            return
        for name in self._cluster.by_name:
            rank = self._cluster.rank_of[name]
            if self.floor.works.get(rank, 0) > 0:
                continue
            took_s = self._speeds.finish_s(name, work_flop=self._workload.work_flop, begin_s=self.now_s) - self.now_s
            timing = Timing(processor=name, iteration=self._iteration, t1_s=took_s, t2_s=0.0, compute_s=took_s, work=1.0)
            self._window[rank] = [timing]

    def _leave_out(self, times: dict[int, Times], *, took_s: float) -> None:
        """Go on to the last iteration before something happens, as if each had been like this one."""
        stop: float = min(self._job.iterations, self._speeds.next_iteration - 1)
        if self._controller is not None:
            every = 1 if self._controller.retiler.watches else self._controller.retiler.every
            stop = min(stop, -(-self._iteration // every) * every)
        change_s = self._speeds.next_s(self._since_s - 2 * took_s)
        used_bytes = self._stage.bytes_moved - self._bytes_before
        while self._iteration < stop and self.now_s + 2 * took_s < change_s:
            self._iteration += 1
            self._ahead_s += took_s
            self._skipped_bytes += used_bytes
            self._note(times, took_s=took_s)
        self._since_s = self.now_s

    def _carry_out(self, decision: Decision) -> None:
        """What the controller says; that the ranks told each other their times took no time here."""
        self.decisions.append(decision)
        began_s = self.now_s

        def go_on() -> None:
            self.move_s.append(self.now_s - began_s)
            self._since_s = self.now_s
            self._last = None
            if isinstance(self._controller, Watcher) and decision.remaps:
                self._controller.moved(self.move_s[-1])
            self._next(dict.fromkeys(self.floor.names, 0.0))

        if not decision.remaps or self._controller is None:
            go_on()
            return
        before = self.floor.tilings
        self._window.clear()
        self.floor = self._laid(self._controller.layout)
        self._move(before, go_on)

    def _move(self, before: Sequence[Tiling], then: Then) -> None:
        """Send what each rank lacks, all at once."""
        sizes: dict[tuple[int, int], int] = defaultdict(int)
        rank_of = self._cluster.rank_of
        for block, old, new in zip(self._workload.blocks, before, self.floor.tilings, strict=True):
            unit_bytes = block.unit_parameters * self._workload.element_bytes * (1 + self._job.state_copies)
            for move in moves(old, new):
                sizes[rank_of[move.source], rank_of[move.dest]] += move.units.size * unit_bytes
        self._stage.send_all([(*pair, size_bytes) for pair, size_bytes in sizes.items()], then)


def _alike(times: dict[int, Times], last: dict[int, Times]) -> bool:
    """Whether every rank took as long for everything, and began as long after the others."""
    shifts = [times[rank].began_s - last[rank].began_s for rank in times]
    if max(shifts) - min(shifts) > _LEAST_S:
        return False
    for rank, each in times.items():
        other = last[rank]
        for name in ("forward_s", "tensor_parallel_s", "backward_s", "gradients_s", "update_s"):
            one, two = getattr(each, name), getattr(other, name)
            if abs(one - two) > _LEAST_S + _TOGETHER * max(one, two):
                return False
    return True


def rehearse(job: TilingJob) -> TilingRun:
    """Simulate a tiled run."""

    def act(stage: Stage) -> Callable[[], TilingRun]:
        run = TilingPlay(stage, job)
        run.start()
        return lambda: run.result

    return play(job.platform, act)
