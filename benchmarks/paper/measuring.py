"""What every rank of a lab does for the evaluation: measure the machines, train alone, and then all contestants in turn.

Starting ranks is slow under small quotas, so one job measures everything about one test bed in the same processes.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from statistics import fmean, median
from typing import Any

from paper.breakdown import breakdown, mean_breakdown
from paper.contestants import AbstractContestant, PaperTask, Rival, Serial, Tiled, make_task, start_rivals
from paper.setting import ORACLE, RIVALS, EvaluationJob, SlowTrace, method, paper_efficiency
from tatami.clock import SystemClock
from tatami.cluster import Cluster, Processor
from tatami.comm.base import AbstractCommunicator
from tatami.comm.link_probe import MessageCost, measure_links, measure_message_costs, without_messages
from tatami.measure.speeds import measure_sample_flop, measure_speeds
from tatami.model.overheads import measure_overheads
from tatami.report import EfficiencyRound, efficiency
from tatami.tiling import AlphaBetaCost, Layout, with_speeds
from tatami.tiling.speeds import at_paces
from tatami.workload import Workload, net_workload, parse_net

ASK = "ask"
"""Beside the records: a file that asks the lab for a host's other speed; the lab takes it away when that is done."""
_REPEAT_S = 0.4
"""Of one timing of a speed: many periods of a quota."""
_WARM_UP = 3
"""Iterations before the first trace: connections and buffers, which else only the first course would pay."""
_PROBE_S = 0.04
"""Of one large message, so that links of any rate are measured in the same time."""


class Measuring:
    """One rank of a job. Every method is collective."""

    def __init__(self, job: EvaluationJob, comm: AbstractCommunicator, *, records: Path) -> None:
        self._job = job
        self._comm = comm
        self._records = records
        self._clock = SystemClock()
        self._alone: Serial | None = None
        workload: Workload = net_workload(job.net, samples=job.samples)
        self._task: PaperTask = make_task(parse_net(job.net), samples=job.samples, workload=workload, seed=job.seed)

    def run(self) -> None:
        """Measure what the job asks for; rank 0 writes a record for each finding."""
        job = self._job
        self.cluster = self._probe()
        self.serial_s = [] if job.traces else self._serial(job.serial_s)
        self._say(
            "test bed",
            speeds_asked=[processor.speed for processor in job.cluster.processors],
            speeds_flop_per_s=[processor.speed for processor in self.cluster.processors],
            serial_s=self.serial_s,
            sample_flop=self._task.workload.sample_flop,
            latency_s=self.cluster.network.latency_s,
            slowest_link_bytes_per_s=self.cluster.network.bandwidth_bytes_per_s,
        )
        if job.traces:
            self._make(ORACLE).run(_WARM_UP)
            for trace in job.traces:
                # What the machine has for the lab drifts, and a lab runs for many minutes.
                self.cluster = replace(self.cluster, processors=self._processors(measure_message_costs(self._comm)))
                for name in trace.contestants:
                    self._traced(name, trace)
            return
        if job.course:
            for name in job.contestants:
                self._course(name)
            return
        if any(name in RIVALS for name in job.contestants):
            start_rivals(self._comm, interface="eth0")
        self._blocks({name: self._make(name) for name in job.contestants})

    # -- the machines -----------------------------------------------------------------------------------------------------

    def _probe(self) -> Cluster:
        """As `tatami probe` measures it, with fewer and smaller messages: all links of a lab in seconds."""
        comm = self._comm
        sample_flop = measure_sample_flop(self._task.workload, comm, repeats=3, repeat_s=_REPEAT_S)
        self._task = replace(self._task, workload=replace(self._task.workload, sample_flop=sample_flop))
        costs = measure_message_costs(comm)
        processors = self._processors(costs)
        size_bytes = round(_PROBE_S / 2 * self._job.bandwidth_bytes_per_s)
        links = measure_links(comm, small_repeats=15, large_repeats=3, large_bytes=size_bytes)
        links = without_messages(links, comm.hosts, [each.message_s for each in costs])
        slowest = min(links.values(), key=lambda link: link.bandwidth_bytes_per_s)
        return Cluster(processors=processors, network=slowest, links=links)

    def _processors(self, costs: Sequence[MessageCost]) -> tuple[Processor, ...]:
        """The machines at the speeds that they have now."""
        speeds = measure_speeds(self._task.workload, self._comm, repeat_s=_REPEAT_S)
        own = measure_overheads(self._comm, costs)
        return tuple(
            Processor(
                name=f"p{rank}",
                speed=speed.flop_per_s,
                spread=speed.spread,
                host=host,
                message_s=each.message_s,
                call_s=each.call_s,
                step_s=each.step_s,
                copy_bytes_per_s=cost.copy_bytes_per_s,
            )
            for rank, (speed, cost, each, host) in enumerate(zip(speeds, costs, own, self._comm.hosts, strict=True))
        )

    def _serial(self, least_s: float) -> list[float]:
        """Seconds of an iteration of every rank alone. All at once: each has its own quota, and they fit on the machine."""
        if self._alone is None:
            self._alone = Serial(self._task)
            self._alone.run(1)
        self._comm.barrier()
        start_s = self._clock.now_s()
        times, spent_s = 0, 0.0
        while spent_s < least_s:
            self._alone.run(1)
            times += 1
            spent_s = self._clock.now_s() - start_s
        return list(self._comm.allgather_object(spent_s / times))

    # -- contestants ------------------------------------------------------------------------------------------------------

    def _make(self, name: str) -> AbstractContestant:
        if name in RIVALS:
            return Rival(name, self._task, self._comm, cluster=self.cluster)
        return Tiled(name, self._task, self._comm, cluster=self.cluster)

    def _blocks(self, contestants: Mapping[str, AbstractContestant]) -> None:
        """Blocks of iterations of all contestants in turn."""
        job, comm = self._job, self._comm
        for contestant in contestants.values():
            contestant.run(job.settle if isinstance(contestant, Tiled) and contestant.dynamic else 2)
        block_s: dict[str, list[float]] = {name: [] for name in contestants}
        alone_s: list[list[float]] = []
        settled = {name: len(each.checks) if isinstance(each, Tiled) else 0 for name, each in contestants.items()}
        for each in contestants.values():
            if isinstance(each, Tiled):
                each.iterations.clear()
        for _ in range(job.rounds):
            for name, contestant in contestants.items():
                comm.barrier()
                start_s = self._clock.now_s()
                contestant.run(job.repeats)
                block_s[name].append((self._clock.now_s() - start_s) / job.repeats)
            # In turn with the iterations: at another moment the same hosts would have other speeds.
            alone_s.append(self._serial(job.serial_s / job.rounds))
        for name, contestant in contestants.items():
            rounds_s = [max(ranks) for ranks in zip(*comm.allgather_object(block_s[name]), strict=True)]
            iteration_s = median(rounds_s)
            self._say(
                "iteration",
                contestant=name,
                method=method(name),
                iteration_s=iteration_s,
                rounds_s=rounds_s,
                **self._efficiency(contestant, rounds_s=rounds_s, alone_s=alone_s),
                efficiency_paper=paper_efficiency(iteration_s, serial_s=self.serial_s),
                **(self._of_tiled(contestant, settled=settled[name]) if isinstance(contestant, Tiled) else {}),
            )

    def _efficiency(
        self, contestant: AbstractContestant, *, rounds_s: Sequence[float], alone_s: Sequence[Sequence[float]]
    ) -> dict[str, Any]:
        """Gamma and its spread, and the share of the time in which ranks computed; no figure where it cannot be. Collective."""
        compute_s: list[tuple[float, ...]] = [()] * len(rounds_s)
        if isinstance(contestant, Tiled):
            own = [each.times.compute_s for each in contestant.iterations]
            mine = [fmean(own[at : at + self._job.repeats]) for at in range(0, len(own), self._job.repeats)]
            compute_s = list(zip(*self._comm.allgather_object(mine), strict=True))
        found = efficiency(
            [
                EfficiencyRound(iteration_s=iteration_s, alone_s=tuple(alone), compute_s=compute)
                for iteration_s, alone, compute in zip(rounds_s, alone_s, compute_s, strict=True)
            ]
        )
        return {
            "efficiency": None if found.problem else found.gamma,
            "efficiency_spread": found.spread,
            "efficiency_problem": found.problem,
            "computing": found.computing,
        }

    def _of_tiled(self, contestant: Tiled, *, settled: int) -> dict[str, Any]:
        iterations = self._comm.allgather_object(contestant.iterations)
        parts = breakdown(iterations, replicas=contestant.replicas)
        return {
            **self._laid(contestant.model.layout),
            "breakdown": mean_breakdown(parts).to_dict(),
            "breakdown_of_ranks": [part.to_dict() for part in parts],
            "checks": _told(contestant),
            "remapped_while_measured": sum(check.decision.remaps for check in contestant.checks[settled:]),
        }

    def _laid(self, layout: Layout) -> dict[str, Any]:
        cost = AlphaBetaCost().price(layout, cluster=self.cluster, workload=self._task.workload)
        return {
            "replicas": [len(replica.processors) for replica in layout.replicas],
            "layout": layout.to_dict(),
            "predicted_s": cost.total,
            "predicted": {"compute_s": cost.compute, "tensor_parallel_s": cost.tensor_parallel, "gradients_s": cost.gradients},
        }

    def _course(self, name: str) -> None:
        """One contestant from its beginning, iteration by iteration, with a change of speed in the middle."""
        job = self._job
        contestant = self._make(name)
        assert isinstance(contestant, Tiled)
        self._comm.barrier()
        step = job.step
        before = job.course if step is None else step.after_iteration
        contestant.run(before)
        if step is not None:
            self._ask(step.host, step.speed)
            contestant.run(job.course - before)
        walls = self._comm.allgather_object([each.wall_s for each in contestant.iterations])
        iteration_s = [max(ranks) for ranks in zip(*walls, strict=True)]
        self._say(
            "course",
            contestant=name,
            iteration_s=iteration_s,
            total_s=sum(iteration_s),
            efficiency_before=paper_efficiency(median(iteration_s[before - 10 : before]), serial_s=self.serial_s),
            checks=_told(contestant),
            step=None if step is None else {"after_iteration": before, "host": step.host, "speed": step.speed},
            **self._laid(contestant.model.layout),
        )
        if step is not None:
            self._ask(step.host, next(each.speed for each in job.cluster.processors if each.host == step.host))

    def _traced(self, name: str, trace: SlowTrace) -> None:
        """One contestant through all changes of the trace; its moves count, the lab's own work does not."""
        job = self._job
        contestant = self._make(name)
        assert isinstance(contestant, Tiled)
        contestant.sums_loss = True
        first = {each.host: each.speed for each in job.cluster.processors}
        factors = dict.fromkeys(first, 1.0)
        done, spent_s, moved_s = 0, 0.0, 0.0
        for change in (*trace.changes, None):
            stop = job.course if change is None else change.after_iteration
            self._comm.barrier()
            begun_s = self._clock.now_s()
            contestant.run(stop - done)
            spent_s, done = spent_s + self._clock.now_s() - begun_s, stop
            if change is None:
                break
            self._ask(change.host, change.speed)
            factors[change.host] = change.speed / first[change.host]
            if name == ORACLE:
                begun_s = self._clock.now_s()
                contestant.lay(self._at(factors))
                moved_s += self._clock.now_s() - begun_s
        walls = self._comm.allgather_object([each.wall_s for each in contestant.iterations])
        computed = self._comm.allgather_object([round(each.times.compute_s, 4) for each in contestant.iterations])
        self._say(
            "traced",
            seed=trace.seed,
            contestant=name,
            speeds_flop_per_s=[processor.speed for processor in self.cluster.processors],
            total_s=max(self._comm.allgather_object(spent_s + moved_s)),
            told_moves_s=max(self._comm.allgather_object(moved_s)),
            iteration_s=[round(max(ranks), 4) for ranks in zip(*walls, strict=True)],
            compute_s=computed,
            trace=[asdict(change) for change in trace.changes],
            checks=_told(contestant),
            **self._laid(contestant.model.layout),
        )
        for host, factor in factors.items():
            if factor != 1.0:
                self._ask(host, first[host])

    def _at(self, factors: Mapping[str, float]) -> Cluster:
        """The machines as measured, their speeds times these, by host."""
        asked = {each.name: factors[each.host] for each in self._job.cluster.processors}
        speeds = {name: speed * asked[name] for name, speed in self.cluster.speeds.items()}
        return with_speeds(at_paces(self.cluster, asked), speeds)

    def _ask(self, host: str, speed: float) -> None:
        """Another speed for a host; returns when it has it."""
        if self._comm.rank == 0:
            path = self._records.with_suffix(f".{ASK}")
            half = path.with_suffix(".half")
            half.write_text(f"{host} {speed!r}", encoding="utf-8")
            half.rename(path)
            while path.exists():
                time.sleep(0.005)
        self._comm.barrier()

    def _say(self, kind: str, **values: Any) -> None:
        if self._comm.rank == 0:
            job = self._job
            head = {"record": kind, "part": job.part, "condition": job.condition, "num": job.num}
            head |= {"net": job.net, "samples": job.samples, "bandwidth_bytes_per_s": job.bandwidth_bytes_per_s}
            with self._records.open("a", encoding="utf-8") as file:
                file.write(json.dumps({**head, **values}) + "\n")


def _told(contestant: Tiled) -> list[dict[str, Any]]:
    return [
        {
            "iteration": check.decision.iteration,
            "kind": check.decision.kind.value,
            "ratio": check.decision.ratio,
            "reason": check.decision.reason,
        }
        for check in contestant.checks
    ]
