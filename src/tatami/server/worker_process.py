"""The process of a worker, as a Ray actor: a thin shell around a learner."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import ray
import torch
from ray import cloudpickle
from ray.exceptions import ActorUnschedulableError, GetTimeoutError, ObjectLostError, RayActorError, RayError, RayTaskError

from tatami.datasets.dataset import Data
from tatami.engine.calls import is_reference, posted
from tatami.engine.processes import Identity, WatchedProcess, identity, tethered
from tatami.server.actions import Contribution, SendTask
from tatami.server.learner import Course, Learner, LossFn, ModelFn, signature
from tatami.server.optimizers import Vector
from tatami.server.pieces import cut, parcel
from tatami.server.run_settings import PhaseHook, RunSettings, TaskPhase

_PULL_PAUSE_S = 0.1
_HEDGE_S = 1.0
"""Before another copy is asked for too: Ray takes 13 s to say that the node of the first is gone."""


_LEAST_PATIENCE_S = 4.0
"""How long a server's answer is waited for at first, for servers that die and send nothing; doubled where it was too short."""


@dataclass(frozen=True, kw_only=True)
class WorkerSpec:
    """What every worker is sent once."""

    model_fn: ModelFn
    loss_fn: LossFn
    course: Course
    settings: RunSettings
    hook: PhaseHook | None


@dataclass(frozen=True, kw_only=True)
class TaskOutcome:
    """The result of a task: the (shard, server) pairs that took its update; `pulled` is False where a server went away."""

    loss: float
    samples: int
    received: tuple[tuple[int, int], ...]
    pulled: bool = True


class WorkerProcess(WatchedProcess):
    """Computes the tasks that it is sent; before the first it stands by."""

    def __init__(self) -> None:
        torch.set_num_threads(1)
        # torch does much for the first time in its first backward pass: a spare has that behind it.
        torch.nn.Linear(1, 1)(torch.ones(1, 1)).sum().backward()
        self._process = -1
        self._spec: WorkerSpec | None = None
        self._learner: Learner | None = None
        self._servers: Mapping[int, Any] = {}
        self._pulled: tuple[int, int] | None = None
        self._patience_s = 0.0

    def employ(self, process: int, pickled_spec: bytes, data: Any) -> Identity:
        """Stand by for a run, as its process number `process`."""
        self._process = process
        self._spec = spec = cloudpickle.loads(pickled_spec)
        self._learner = Learner(spec.model_fn(), loss_fn=spec.loss_fn, data=unpacked(data), course=spec.course)
        self._pulled = None
        self._patience_s = max(_LEAST_PATIENCE_S, 2 * spec.settings.heartbeat_s)
        return identity(model=signature(self._learner.model))

    def dismiss(self) -> None:
        """Let go of the run."""
        self._spec, self._learner, self._servers = None, None, {}

    def meet(self, servers: Mapping[int, Any]) -> None:
        """From now on these are the servers."""
        self._servers = servers

    def work(self, task: SendTask, pulls: Sequence[Sequence[Any]]) -> TaskOutcome:
        """Pull, compute, push. `pulls[k]` are copies of shard k, or references to them."""
        assert self._learner is not None
        self._hook(TaskPhase.PULL, task)
        with tethered():
            pulled = self._pull(task, pulls)
        if not pulled:
            time.sleep(_PULL_PAUSE_S)  # the death of a server is about to be told
            return TaskOutcome(loss=math.nan, samples=0, received=(), pulled=False)
        self._hook(TaskPhase.BEFORE_COMPUTE, task)
        gradient, loss, samples = self._learner.gradient(round_=task.round, worker=task.worker, members=task.members)
        self._hook(TaskPhase.COMPUTE, task)
        if not math.isfinite(loss):
            return TaskOutcome(loss=loss, samples=samples, received=())
        with tethered():
            received = self._push(task, gradient, samples=samples)
        self._hook(TaskPhase.AFTER_PUSH, task)
        return TaskOutcome(loss=loss, samples=samples, received=received)

    def _pull(self, task: SendTask, pulls: Sequence[Sequence[Any]]) -> bool:
        assert self._learner is not None
        key = (task.attempt, task.version)
        if self._pulled == key:
            return True
        parts = []
        # All shards come at once, each over its server's link, while the first is waited for.
        if len(first := [copies[0] for copies in pulls if copies and is_reference(copies[0])]) > 1:
            ray.wait(first, num_returns=len(first), timeout=_HEDGE_S)
        for copies in pulls:
            if (part := self._get_any(copies)) is None:
                return False
            parts.append(part)
        self._learner.load(parts)
        self._pulled = key
        return True

    def _push(self, task: SendTask, gradient: Sequence[Vector], *, samples: int) -> tuple[tuple[int, int], ...]:
        assert self._spec is not None
        settings = self._spec.settings
        calls: dict[tuple[int, int], Any] = {}
        contribution = Contribution(worker=task.worker, process=task.process, round=task.round)
        size = sum(len(piece) for piece in gradient)
        for shard, stretch in enumerate(cut(size, shards=settings.servers)):
            parts = parcel(gradient, stretch=stretch)
            update = posted(parts, size_bytes=sum(part.nbytes for part in parts))  # one, for all copies of the shard
            for server in settings.holders(shard):
                if server in task.servers and server in self._servers:
                    stage = self._servers[server].stage
                    calls[shard, server] = stage.remote(shard, update, contribution, task.attempt, samples)
            if self._spec.hook is not None and shard == 0:
                for call in calls.values():
                    self._get(call)
                self._hook(TaskPhase.BETWEEN_SHARDS, task)
        # All at once: each waits for the slowest, and none for a server that hangs longer than the others do.
        ray.wait(list(calls.values()), num_returns=len(calls), timeout=self._patience_s)
        return tuple(place for place, call in calls.items() if self._get(call))

    def _get_any(self, copies: Sequence[Any]) -> Any:
        """The first of these that comes; None where none does."""
        for copy in copies:
            if not is_reference(copy):
                return copy
        if len(copies) == 1:
            return self._get(copies[0])
        ready, missing = ray.wait(list(copies[:1]), timeout=_HEDGE_S) if len(copies) > 1 else ([], [])
        missing = list(copies) if not ready else [copy for copy in copies if copy not in ready]
        deadline_s = time.monotonic() + self._patience_s
        while ready or missing:
            for reference in ready:
                if (part := self._get(reference)) is not None:
                    return part
            left_s = max(0.0, deadline_s - time.monotonic())
            ready, missing = ray.wait(missing, timeout=left_s) if missing else ([], [])
            if not ready:
                break
        if missing:
            self._patience_s *= 2  # the server may have died silently, or the link may be slow
        return None

    def _get(self, reference: Any) -> Any:
        """What it refers to; None where that went with its process, or does not come."""
        try:
            return ray.get(reference, timeout=self._patience_s)
        except GetTimeoutError:
            self._patience_s *= 2  # as above
            return None
        except (RayActorError, ActorUnschedulableError, ObjectLostError):
            return None
        except RayTaskError as error:
            if isinstance(error.cause, RayError):
                return None
            raise

    def _hook(self, phase: TaskPhase, task: SendTask) -> None:
        if self._spec is not None and self._spec.hook is not None:
            self._spec.hook(phase, task.process, task.round)


def packed(data: Data) -> Any:
    """A data set as it is shared among the processes of a node: tensors as arrays, which all of them map without a copy."""
    if isinstance(data, tuple) and all(isinstance(each, torch.Tensor) and _has_array(each) for each in data):
        return tuple(each.detach().numpy() for each in data)
    return data


def unpacked(data: Any) -> Data:
    """What `packed` was given."""
    if isinstance(data, tuple) and all(isinstance(each, np.ndarray) for each in data):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # the arrays are read-only, and batches are copies of them
            x, y = (torch.from_numpy(each) for each in data)
        return x, y
    return data  # type: ignore[no-any-return]


def _has_array(tensor: torch.Tensor) -> bool:
    return tensor.device.type == "cpu" and tensor.layout is torch.strided and tensor.dtype is not torch.bfloat16
