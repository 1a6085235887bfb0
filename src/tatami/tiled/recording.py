"""What the Trainer records of a run: losses, where the time of each rank went, the tilings and why they changed."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tatami.comm.agreement import decided_on_root
from tatami.comm.base import AbstractCommunicator
from tatami.errors import TatamiError
from tatami.page import RecordedRun, check_page, write_page
from tatami.records import Records
from tatami.tiled.model import TiledModel
from tatami.tiled.phases import PhaseTimes
from tatami.tiled.retiling import Check
from tatami.tiling import link_bytes
from tatami.tiling.traffic import sent_bytes


class RunRecorder:
    """The records of one call of `fit`. All ranks call it alike; rank 0 writes.

    Args:
        model: that is trained.
        records: of rank 0.
        every: iterations between two records of losses and phases.
    """

    def __init__(self, model: TiledModel, records: Records, *, every: int) -> None:
        self._model, self._records, self._every = model, records, every
        self._spent_s: dict[str, float] = {}
        self._num_spent = 0
        self._is_wanted = False

    def begin(self, *, iteration: int) -> None:
        """Agree on whether there is anything to record, and tell of the first tiling. Collective."""
        self._is_wanted = self._model.comm.bcast_object(self._records.wanted)
        self._tell_tiling(iteration, why="at the start", speeds=self._model.cluster.speeds)

    def iterated(self, check: Check | None, *, iteration: int, epoch: int, loss: float, samples_per_s: float) -> None:
        """After every iteration. Collective where `every` of them are full, or the tiling changes."""
        if not self._is_wanted:
            return
        self._add(self._model.phases.last)
        is_due = iteration % self._every == 0
        if is_due or (check is not None and check.moved is not None):
            self._tell_phases(iteration)  # of one tiling each
        if check is not None:
            self._tell_check(check, iteration)
        if is_due:
            self._records.write(
                "train", iteration=iteration, values={"epoch": epoch, "loss": loss, "samples_per_s": samples_per_s}
            )

    def ended(self, stopped: str, *, iteration: int) -> None:
        """`fit` has come to its end; `stopped` says by which limit."""
        self._records.write("end", iteration=iteration, values={"stopped": stopped})

    def failed(self, error: BaseException, *, iteration: int) -> None:
        """An error ends the run, perhaps on this rank alone."""
        self._records.write("error", iteration=iteration, values={"kind": type(error).__name__, "message": str(error)})

    # -- inside --------------------------------------------------------------------------------------------------------

    def _add(self, times: PhaseTimes | None) -> None:
        if times is None:
            return
        for name, seconds in asdict(times).items():
            self._spent_s[name] = self._spent_s.get(name, 0.0) + seconds
        self._num_spent += 1

    def _tell_phases(self, iteration: int) -> None:
        told = self._model.comm.gather_object(self._spent_s)
        if told is not None and self._num_spent:
            ranks = dict(zip(self._model.names, told, strict=True))
            self._records.write("phases", iteration=iteration, values={"iterations": self._num_spent, "ranks": ranks})
        self._spent_s, self._num_spent = {}, 0

    def _tell_check(self, check: Check, iteration: int) -> None:
        decision = check.decision
        values = {
            "decision": decision.kind.value,
            "reason": decision.reason,
            "imbalance": check.imbalance,
            "moved_units": check.moved.num_units if check.moved else 0,
            "speeds": dict(decision.speeds),
        }
        self._records.write("check", iteration=iteration, values=values)
        if check.moved is not None:
            self._tell_tiling(iteration, why=decision.reason, speeds=decision.speeds)

    def _tell_tiling(self, iteration: int, *, why: str, speeds: Any) -> None:
        if not self._records.wanted:
            return
        traffic = self._model.traffic
        native = [each for each in traffic.sums if any(phase.num_rounds == 0 for phase in each.schedule.phases)]
        values = {
            "why": why,
            "tiling": self._model.tiling.to_dict(),
            "speeds": dict(speeds),
            "sent_bytes": link_bytes(traffic),
            "native_bytes": sum(map(sent_bytes, native)),
        }
        self._records.write("tiling", iteration=iteration, values=values)


class RunPage:
    """The page of a Trainer's runs, which rank 0 writes whenever `fit` ends, also where an error ends it.

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
        decided_on_root(comm, lambda: check_page(self._path, force=self._is_ours))
        if comm.rank == 0 and records.kept is None:
            records.kept = []
        try:
            yield
        finally:
            if comm.rank == 0 and records.kept:
                self._write(records.kept)

    def _write(self, kept: list[dict[str, Any]]) -> None:
        """A page that cannot be written is no reason to lose what was trained, nor to leave the other ranks alone."""
        try:
            write_page(RecordedRun(records=tuple(kept)), self._path, title=self._path.stem, force=self._is_ours)
            self._is_ours = True
        except (TatamiError, OSError) as error:
            warnings.warn(f"the report {self._path} was not written: {error}", stacklevel=2)
