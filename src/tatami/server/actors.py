"""The processes of a run, as Ray actors: thin shells around a learner and a shard server. Needs Ray."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import ray
import torch
from ray import cloudpickle

from tatami.server.actions import ApplyShard, SendTask, SumShard
from tatami.server.learner import Course, Data, Learner, LossFn, ModelFn, cut, signature
from tatami.server.optimizers import AbstractOptimizer, Vector
from tatami.server.phases import PhaseHook, TaskPhase
from tatami.server.protocol import Protocol
from tatami.server.shard import ShardServer

_PULL_PAUSE_S = 0.1


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every worker is told once."""

    model_fn: ModelFn
    loss_fn: LossFn
    course: Course
    protocol: Protocol
    hook: PhaseHook | None


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What came of a task: the (shard, server) that took its update; `pulled` is False where a server went away."""

    loss: float
    samples: int
    received: tuple[tuple[int, int], ...]
    pulled: bool = True


class WorkerProcess:
    """Computes the tasks that it is sent; before the first it stands by."""

    def __init__(self, process: int, pickled_job: bytes, data: Data) -> None:
        torch.set_num_threads(1)
        self._process = process
        self._job: Job = cloudpickle.loads(pickled_job)
        self._learner = Learner(self._job.model_fn(), loss_fn=self._job.loss_fn, data=data, course=self._job.course)
        self._pulled: tuple[int, int] | None = None

    def describe(self) -> tuple[int, str, str]:
        """Process id, node, and the signature of the model."""
        return os.getpid(), ray.get_runtime_context().get_node_id(), signature(self._learner.model)

    def watch(self, pause_s: float) -> None:
        """A sign of life after `pause_s`; runs beside the task, and fails at once when the process ends."""
        time.sleep(pause_s)

    def work(self, task: SendTask, pulls: Sequence[Sequence[Any]], servers: Mapping[int, Any]) -> Outcome:
        """Pull, compute, push. `pulls[k]` are references to shard k, one for each copy."""
        self._hook(TaskPhase.PULL, task)
        if not self._pull(task, pulls):
            time.sleep(_PULL_PAUSE_S)  # the death of a server is about to be told
            return Outcome(loss=math.nan, samples=0, received=(), pulled=False)
        self._hook(TaskPhase.BEFORE_COMPUTE, task)
        gradient, loss, samples = self._learner.gradient(round_=task.round, worker=task.worker, members=task.members)
        self._hook(TaskPhase.COMPUTE, task)
        if not math.isfinite(loss):
            return Outcome(loss=loss, samples=samples, received=())
        received = self._push(task, gradient, samples=samples, servers=servers)
        self._hook(TaskPhase.AFTER_PUSH, task)
        return Outcome(loss=loss, samples=samples, received=received)

    def _pull(self, task: SendTask, pulls: Sequence[Sequence[Any]]) -> bool:
        key = (task.attempt, task.version)
        if self._pulled == key:
            return True
        parts = []
        for copies in pulls:
            part = next((got for got in (_get(copy) for copy in copies) if got is not None), None)
            if part is None:
                return False
            parts.append(part)
        self._learner.load(parts)
        self._pulled = key
        return True

    def _push(
        self, task: SendTask, gradient: Vector, *, samples: int, servers: Mapping[int, Any]
    ) -> tuple[tuple[int, int], ...]:
        calls: list[tuple[int, int, Any]] = []
        received: dict[tuple[int, int], bool] = {}
        names = {"worker": task.worker, "process": task.process, "round_": task.round, "attempt": task.attempt}
        for shard, stretch in enumerate(cut(len(gradient), shards=self._job.protocol.shards)):
            update = ray.put(gradient[stretch])  # once, however many copies of the shard there are
            for server in self._job.protocol.holders(shard):
                if server in servers:
                    calls.append((shard, server, servers[server].stage.remote(shard, update, samples=samples, **names)))
            if self._job.hook is not None and shard == 0:
                received |= {(shard, server): bool(_get(call)) for shard, server, call in calls}
                self._hook(TaskPhase.BETWEEN_SHARDS, task)
        received |= {(shard, server): bool(_get(call)) for shard, server, call in calls}
        return tuple(place for place, taken in received.items() if taken)

    def _hook(self, phase: TaskPhase, task: SendTask) -> None:
        if self._job.hook is not None:
            self._job.hook(phase, task.process, task.round)


class ServerProcess:
    """Holds shards; gives references to their parameters, which workers map without a copy."""

    def __init__(
        self,
        numbers: Sequence[int],
        optimizer: AbstractOptimizer,
        clip_norm: float | None,
        whole_batch: int | None,
        *first: Vector,
    ) -> None:
        shards = dict(zip(numbers, first, strict=True))
        self._shards = ShardServer(shards, optimizer=optimizer, clip_norm=clip_norm, whole_batch=whole_batch)

    def describe(self) -> tuple[int, str, str]:
        return os.getpid(), ray.get_runtime_context().get_node_id(), ""

    def watch(self, pause_s: float) -> None:
        """As that of a worker."""
        time.sleep(pause_s)

    def stage(self, shard: int, update: Vector, *, worker: int, process: int, round_: int, attempt: int, samples: int) -> bool:
        names = {"worker": worker, "process": process, "round_": round_, "attempt": attempt}
        return self._shards.stage(shard, update, samples=samples, **names)

    def sum(self, order: SumShard) -> float:
        return self._shards.squared_norm(order.shard, order.contributions)

    def apply(self, order: ApplyShard) -> list[Any]:
        parameters = self._shards.apply(
            order.shard,
            order.contributions,
            version=order.version,
            squared_norm=order.squared_norm,
            clocks=order.clocks,
        )
        return [ray.put(parameters)]

    def parameters(self, shard: int) -> list[Any]:
        return [ray.put(self._shards.parameters(shard))]

    def snapshot(self, shard: int) -> dict[str, Vector]:
        return self._shards.snapshot(shard)

    def load(
        self, shard: int, snapshot: Mapping[str, Vector], *, attempt: int, clocks: tuple[tuple[int, int], ...]
    ) -> list[Any]:
        return [ray.put(self._shards.load(shard, snapshot, attempt=attempt, clocks=clocks))]


def _get(reference: Any) -> Any:
    """What it refers to; None where that went with its process."""
    try:
        return ray.get(reference)
    except (ray.exceptions.RayActorError, ray.exceptions.ObjectLostError):
        return None
