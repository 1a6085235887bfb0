"""What the Trainer records of a run: losses, where the time of each rank went, the tilings and why they changed."""

from __future__ import annotations

import math
import os
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.errors import OutputExistsError, TatamiError, warn
from tatami.model.describing_stages import describe_stages, handed_bytes
from tatami.model.model import TiledModel
from tatami.records import Records
from tatami.report.page import AT_THE_START, RecordedRun, check_page, write_page
from tatami.retiling import StagedWatcher, Watcher
from tatami.runtime.phases import PhaseSpan, PhaseTimes
from tatami.tiling import at_tiles, link_bytes
from tatami.tiling.traffic import sent_bytes
from tatami.train.retiling import Check

_STEADY = 3
"""The first iterations take longer: the third is the first whose timeline is kept."""
_SEEN = 1 / 2000
"""Stretches of the timeline that are a smaller part of it are not recorded."""


class RunRecorder:
    """The records of one call of `fit`. All ranks call it alike; rank 0 writes.

    Args:
        records: of rank 0.
        every: iterations between two records of losses and phases.
        whole: makes a collective; in an elastic run, again where a rank dies in it.

    Attributes:
        is_wanted: whether anything is recorded; the same on all ranks.
    """

    def __init__(self, model: TiledModel, records: Records, *, every: int, whole: Callable[[Callable[[], Any]], Any]) -> None:
        self._model, self._records, self._every, self._whole = model, records, every, whole
        self._spent_s: dict[str, float] = {}
        self._num_spent = 0
        self._num_samples, self._seconds = 0, 0.0  # since the last record of the loss
        self._watched_to = 0
        self._names: tuple[str, ...] | None = None
        self._laid_at = 0
        self._has_timeline = self._traces = False
        self._writes = False
        self.is_wanted = False

    def begin(self, *, iteration: int) -> None:
        """Agree on whether there is anything to record, and tell of the first tiling. Collective.

        Raises:
            OutputExistsError: on all ranks: there are records of another run.
        """

        def is_wanted() -> bool:
            self._records.refuse_existing()
            return self._records.wanted

        self.is_wanted = self._whole(lambda: decided_on_root(self._model.comm, is_wanted))
        self._names, self._writes = self._model.names, self._model.comm.rank == 0
        self._tell_processes(iteration)
        self._tell_tiling(iteration, why=AT_THE_START, speeds=self._speeds())
        self._trace_next(iteration)

    def joins(self, *, is_wanted: bool) -> None:
        """This rank has joined a run whose other ranks have begun."""
        self.is_wanted, self._names = is_wanted, ()

    def iterated(
        self,
        check: Check | None,
        *,
        iteration: int,
        epoch: int,
        loss: float,
        num_samples: int,
        seconds: float,
        watcher: Watcher | StagedWatcher | None = None,
    ) -> None:
        """After every iteration. Collective where `every` of them are full, or the tiling changes."""
        if not self.is_wanted:
            return
        self._num_samples += num_samples
        self._seconds += seconds
        before, self._names = self._names, self._model.names
        if before is None or before == self._names:
            self._add(self._model.phases.last)
        else:
            self._tell_members(before, iteration)
        is_due = iteration % self._every == 0
        if is_due or (check is not None and check.moved is not None):
            self._tell_phases(iteration)  # of one tiling each
        if watcher is not None and (is_due or check is not None):
            self._tell_watched(watcher, iteration)
        if check is not None:
            decision = check.decision
            values = {
                "decision": decision.kind.value,
                "reason": decision.reason,
                "imbalance": check.imbalance,
                "moved_units": check.moved.num_units if check.moved else 0,
                "speeds": dict(decision.speeds),
            }
            self.write("check", iteration=iteration, values=values)
            if check.moved is not None:
                self._tell_tiling(iteration, why=decision.reason, speeds=decision.speeds)
        if self._model.stage is not None:
            self._tell_timeline(iteration)
            self._trace_next(iteration)
        if is_due:
            rate = self._num_samples / max(self._seconds, 1e-9)
            self._num_samples, self._seconds = 0, 0.0
            self.write("train", iteration=iteration, values={"epoch": epoch, "loss": loss, "samples_per_s": rate})

    def ended(self, stopped: str, *, iteration: int) -> None:
        """`fit` has come to its end; `stopped` says by which limit."""
        self.write("end", iteration=iteration, values={"stopped": stopped})

    def failed(self, error: BaseException, *, iteration: int) -> None:
        """An error ends the run, perhaps on this rank alone."""
        self.write("error", iteration=iteration, values={"kind": type(error).__name__, "message": str(error)})

    def write(self, event: str, *, iteration: int, values: dict[str, Any]) -> None:
        """On rank 0, which in an elastic run may be another one than before; not of a run that this rank was not let into."""
        if self.is_wanted and self._model.comm.rank == 0:
            if not self._writes:
                self._writes = True
                if not self._records.wanted:
                    warn(
                        "the records of this run end here: the rank that wrote them is gone, and this one, rank 0 now, was "
                        "given none. Give Records(...) on every rank; rank 0 alone writes"
                    )
                self._records.resume(iteration=iteration)  # where the first rank of before has written to the same file
            self._records.write(event, iteration=iteration, values=values)

    # -- inside --------------------------------------------------------------------------------------------------------

    def _add(self, times: PhaseTimes | None) -> None:
        if times is None:
            return
        for name, seconds in vars(times).items():
            self._spent_s[name] = self._spent_s.get(name, 0.0) + seconds
        self._num_spent += 1

    def _tell_phases(self, iteration: int) -> None:
        """Ranks that have joined may have been there for fewer iterations: all are told for as many as rank 0 was."""
        model = self._model
        names, told = self._whole(lambda: (model.names, model.comm.gather_object((self._num_spent, self._spent_s))))
        if told is not None and self._num_spent:
            ranks = {
                name: {phase: seconds * self._num_spent / num for phase, seconds in spent_s.items()}
                for name, (num, spent_s) in zip(names, told, strict=True)
                if num
            }
            self.write("phases", iteration=iteration, values={"iterations": self._num_spent, "ranks": ranks})
        self._spent_s, self._num_spent = {}, 0

    def _trace_next(self, iteration: int) -> None:
        """With pipeline stages, the last iteration before the first record of phases is traced. Collective.

        The ranks' clocks may differ by anything: times count from a barrier, which they leave at about the same time.
        """
        number, due = iteration + 1 - self._laid_at, (iteration + 1) % self._every == 0
        model = self._model
        if model.stage is not None and self.is_wanted and due and number >= _STEADY and not self._has_timeline:
            self._whole(model.comm.barrier)
            model.phases.trace()
            self._traces = True

    def _tell_timeline(self, iteration: int) -> None:
        """What each rank did when in the iteration that was traced; stretches that are too short to be seen are left out."""
        if not self._traces:
            return
        self._traces, self._has_timeline = False, True
        model = self._model
        names, told = self._whole(lambda: (model.names, model.comm.gather_object(model.phases.spans)))
        if told is not None:
            least_s = _SEEN * max((span.ended_s for spans in told for span in spans), default=0.0)
            ranks = {name: _seen(spans, least_s) for name, spans in zip(names, told, strict=True)}
            self.write("timeline", iteration=iteration, values={"ranks": ranks})

    def _tell_members(self, before: tuple[str, ...], iteration: int) -> None:
        """In an elastic run ranks have come or gone. What was spent under the tiling of before is of no use any more."""
        self._spent_s, self._num_spent = {}, 0
        now = self._model.names
        gone, come = [name for name in before if name not in now], [name for name in now if name not in before]
        why = [f"{', '.join(names)} {what}" for names, what in ((gone, "gone"), (come, "joined")) if names]
        self._tell_processes(iteration)
        self._tell_tiling(iteration, why="; ".join(why), speeds=self._speeds())

    def _tell_processes(self, iteration: int) -> None:
        """Which process each rank is, for those who want to look at one, or end it. Collective."""
        if self.is_wanted:
            comm, own = self._model.comm, f"{os.getpid()} on {socket.gethostname()}"
            names, told = self._whole(lambda: (self._model.names, comm.gather_object(own)))
            if told is not None:
                self.write("processes", iteration=iteration, values={"ranks": dict(zip(names, told, strict=True))})

    def _speeds(self) -> dict[str, float]:
        model = self._model
        return dict(at_tiles(model.cluster, model.layout, workload=model.workload).speeds)

    def _tell_watched(self, watcher: Watcher | StagedWatcher, iteration: int) -> None:
        """What is known of the speeds, what was lost against what moving costs, and the alarms since the last time."""
        if not self._records.wanted or not watcher.glances:
            return
        glance = watcher.glances[-1]
        fresh = [alarm for alarm in watcher.alarms if alarm.iteration > self._watched_to]
        if glance.iteration <= self._watched_to and not fresh:
            return
        self._watched_to = iteration
        speeds = zip(self._model.names, glance.speeds, strict=True)
        values = {
            "speeds": {name: speed for name, speed in speeds if math.isfinite(speed)},
            "lost_s": {kind.value: loss_s for kind, loss_s in glance.loss_s.items()},
            "price_s": {kind.value: price_s for kind, price_s in glance.price_s.items()},
            "num_alarms": len(watcher.alarms),
            "alarms": [
                {"what": each.name, "at": each.iteration, "began": each.began, "slower": each.slower, "error": each.error}
                for each in fresh
            ],
        }
        self._records.write("watch", iteration=iteration, values=values)

    def _tell_tiling(self, iteration: int, *, why: str, speeds: Any) -> None:
        model, self._laid_at, self._has_timeline = self._model, iteration, False
        stage = model.stage
        if not (self._records.wanted or (stage is not None and self.is_wanted)):
            return
        traffic = model.traffic
        native = [each for each in traffic.sums if any(phase.num_rounds == 0 for phase in each.schedule.phases)]
        values = {
            "why": why,
            "tiling": model.tiling.to_dict(),
            "speeds": dict(speeds),
            "sent_bytes": link_bytes(traffic),
            "native_bytes": sum(map(sent_bytes, native)),
        }
        if stage is not None:
            index = -1 if stage.index is None else stage.index
            own = (index, values["sent_bytes"], values["native_bytes"])
            told = self._whole(lambda: model.comm.gather_object(own)) or []
            of_stages = {number: (sent, size) for number, sent, size in told}
            values |= {
                "stages": stage.layout.to_dict(),
                "described": describe_stages(stage).to_dict(),
                "sent_bytes": _added([handed_bytes(stage), *(sent for sent, _ in of_stages.values())]),
                "native_bytes": sum(size for _, size in of_stages.values()),
            }
        self.write("tiling", iteration=iteration, values=values)


def _seen(spans: Sequence[PhaseSpan], least_s: float) -> list[list[Any]]:
    """Phase, micro-batch (from 1), beginning and end of what can be seen; what was interrupted for less is one stretch."""
    found: list[list[Any]] = []
    for span in spans:
        if span.ended_s - span.began_s < least_s:
            continue
        facts = [span.phase.value, span.micro_batch + 1]
        if found and found[-1][:2] == facts and span.began_s - found[-1][3] < least_s:
            found[-1][3] = round(span.ended_s, 6)
        else:
            found.append([*facts, round(span.began_s, 6), round(span.ended_s, 6)])
    return found


def _added(parts: Sequence[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Bytes by sender and receiver, of several kinds together."""
    found: dict[str, dict[str, int]] = {}
    for part in parts:
        for source, targets in part.items():
            for target, size in targets.items():
                own = found.setdefault(source, {})
                own[target] = own.get(target, 0) + size
    return found


class RunPage:
    """The page of a Trainer's runs, which rank 0 writes whenever `fit` ends, also by an error where it is left the time.

    Args:
        path: an .html file, which may not exist before the first `fit`.
    """

    def __init__(self, path: Path | str) -> None:
        self._path = Path(path)
        self._is_ours = False

    @contextmanager
    def writing(self, comm: AbstractCommunicator, records: Records) -> Iterator[None]:
        """Collective.

        Raises:
            OutputExistsError, InputError, MissingExtraError: on all ranks, before anything is done: it cannot be written.
        """
        decided_on_root(comm, self._check)
        if comm.rank == 0 and records.kept is None:
            records.kept = []
        try:
            yield
        finally:
            if comm.rank == 0 and records.kept:
                self._write(records.kept)

    def _check(self) -> None:
        try:
            check_page(self._path, force=self._is_ours)
        except OutputExistsError as error:
            raise OutputExistsError(
                f"{self._path} exists already; give Trainer(report=...) another name, or remove it"
            ) from error

    def _write(self, kept: list[dict[str, Any]]) -> None:
        """A page that cannot be written is no reason to lose what was trained, nor to leave the other ranks alone."""
        try:
            write_page(RecordedRun(records=tuple(kept)), self._path, title=self._path.stem, force=self._is_ours)
            self._is_ours = True
        except (TatamiError, OSError) as error:
            warn(f"the report {self._path} was not written: {error}")
