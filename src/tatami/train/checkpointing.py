"""Checkpoints of all of training: written in shards, in the background; read by any number of ranks, on any tiling."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from tatami.checkpoints import MultiNodeCheckpoint
from tatami.checkpoints.state_codec import State
from tatami.errors import CheckpointError, InputError, warn
from tatami.inputs import check_at_least
from tatami.model.model import TiledModel
from tatami.runtime.weight_average import averages_of
from tatami.state.training_state import (
    Assembly,
    common_state,
    draws_state,
    refuse_rows,
    restore_draws,
    restore_layout,
    shard_of,
)
from tatami.train.batches import AbstractBatches
from tatami.train.preparing import TrainingPosition, TrainingSetup
from tatami.units import parse_duration


@dataclass(frozen=True, kw_only=True)
class ModelCheckpoint:
    """When the state of training is saved, and where; the words are Lightning's.

    Attributes:
        dirpath: of this rank; shared between ranks or not.
        every_n_train_steps: updates from one checkpoint to the next.
        every_n_epochs: the same in epochs; where no interval is given, every epoch. What ends `fit` is saved in any case.
        train_time_interval: "10 min", seconds, or a `timedelta`, by the clock of rank 0.
        keep: how many are kept.
        copies: on how many other ranks' disks each shard is kept beside its own, where disks are not shared.
    """

    dirpath: Path | str
    every_n_train_steps: int | None = None
    every_n_epochs: int | None = None
    train_time_interval: str | float | timedelta | None = None
    keep: int = 2
    copies: int = 0

    def __post_init__(self) -> None:
        check_at_least(1, every_n_train_steps=self.every_n_train_steps, every_n_epochs=self.every_n_epochs)
        if self.interval_s is not None and self.interval_s <= 0:
            raise InputError(f"train_time_interval must be above 0, not {self.train_time_interval}")

    @property
    def interval_s(self) -> float | None:
        given = self.train_time_interval
        return given.total_seconds() if isinstance(given, timedelta) else None if given is None else parse_duration(given)

    def is_due(self, position: TrainingPosition) -> bool:
        """After an update."""
        return self.every_n_train_steps is not None and position.iteration % self.every_n_train_steps == 0

    def is_due_after_epoch(self, position: TrainingPosition) -> bool:
        """After an epoch that ends at `position`."""
        every = self.every_n_epochs
        if every is None:
            every = 1 if self.every_n_train_steps is None and self.train_time_interval is None else None
        return every is not None and position.epoch % every == 0


class TrainingCheckpoints:
    """Saves and resumes one run of training. All methods are collective but `is_written`.

    Args:
        settings: where, and how many are kept.
        model: its ranks.

    Attributes:
        on_whole: called where there is one to go on from.
        survives: one that cannot be written is left out with a warning, but for the last: the run, an elastic one, goes on.

    Raises:
        InputError: the folder cannot be written to; says on which rank.
    """

    survives: bool = False

    def __init__(self, settings: ModelCheckpoint, model: TiledModel) -> None:
        self._store = MultiNodeCheckpoint(settings.dirpath, model.comm, copies=settings.copies, keep=settings.keep)
        self._settings = settings
        self._group = model.comm.group
        self._comm = model.comm
        self._has_begun = False
        self._last: int | None = None
        self.on_whole: Callable[[], None] = lambda: None

    @property
    def is_written(self) -> bool:
        """Whether this rank has written its part of what is under way."""
        return self._store.is_written

    @property
    def is_under_way(self) -> bool:
        """Whether there is one to be finished; one that ranks began which have changed since is left as it is, and is none."""
        return self._has_begun and self._group == self._comm.group

    def begin(self, setup: TrainingSetup, position: TrainingPosition, batches: AbstractBatches) -> None:
        """Save in the background; what was under way is finished before.

        Raises:
            CheckpointError: on all ranks, one could not write the one before.
        """
        self.finish()
        self._store.begin(position.iteration, _state(setup, position, batches))
        self._has_begun = True
        self._last = position.iteration

    def finish(self, *, needed: bool = False, then: str = "the run goes on without this checkpoint") -> None:
        """Wait for what is under way.

        Args:
            needed: raise as `begin`, also where the run would survive it.
            then: what follows where it survives it, for the warning.
        """
        if self._group != self._comm.group:
            self._store.regroup()
            self._group, self._has_begun, self._last = self._comm.group, False, None
        if self._has_begun:
            self._has_begun = False
            try:
                self._store.finish()
            except CheckpointError as error:
                if needed or not self.survives:
                    raise
                self._last = None
                if self._comm.rank == 0:
                    warn(f"{error}; {then}")
            else:
                self.on_whole()

    def is_saved(self, position: TrainingPosition) -> bool:
        """Whether the last update is in a checkpoint."""
        return self._last == position.iteration

    def refuse_stray(self, position: TrainingPosition) -> None:
        """Refuse a folder with later checkpoints of another run.

        Raises:
            CheckpointError: on all ranks.
        """
        self._store.refuse_stray(position.iteration)

    def resume(
        self, setup: TrainingSetup, position: TrainingPosition, batches: AbstractBatches, *, needed: bool = False
    ) -> bool:
        """Go on from the newest checkpoint, and print from where; False where there is none.

        Nothing is changed where it cannot be loaded.

        Args:
            setup, position, batches: of the run.
            needed: raise where there is none.

        Raises:
            CheckpointError: on all ranks: there is none and one is needed; it is damaged, or of another network, optimizer, or
                data.
        """
        found = self._store.resume(assemble=lambda states: _assembled(states, setup, batches))
        if found is None:
            if needed:
                raise CheckpointError(f"there is no checkpoint in {self._settings.dirpath}")
            self._tell(f"there is no checkpoint in {self._settings.dirpath} yet; training begins")
            return False
        assembly, common, own = found.state
        assembly.commit()
        restore_progress(setup, position, common)
        batches.seek(own)
        self._last = position.iteration
        self.on_whole()
        epochs = f"{position.epoch:,} epoch{'s' if position.epoch != 1 else ''}"
        within = f" and {position.batch:,} batch{'es' if position.batch != 1 else ''} of the next" if position.batch else ""
        self._tell(
            f"going on from the checkpoint in {self._settings.dirpath}, after {position.iteration:,} updates: {epochs}{within}"
        )
        return True

    def _tell(self, message: str) -> None:
        if self._comm.rank == 0:
            print(f"tatami: {message}", flush=True)

    def close(self) -> None:
        """Leave the other ranks; the checkpoints stay."""
        self._store.close()


def _state(setup: TrainingSetup, position: TrainingPosition, batches: AbstractBatches) -> State:
    """What this rank writes. The first rank writes what is the same on all of them."""
    model, optimizer = setup.model, setup.optimizer
    common = None
    averages = averages_of(model.parameters())
    shared = common_state(model, optimizer, averages)
    if model.comm.rank == 0:
        common = {**shared, **progress_state(setup, position), "data": _facts(setup, batches)}
    return {"common": common, "shard": shard_of(model, optimizer, averages), "own": batches.position()}


def progress_state(setup: TrainingSetup, position: TrainingPosition) -> State:
    """How far training has come, with all that has a state except the weights and the optimizer; the same on all ranks.

    Raises:
        InputError: a callback has the state of an optimizer of the weights, which differs between ranks.
    """
    callbacks = setup.callbacks.state_dict()
    refuse_rows(setup.model, {f"the state_dict of callback {kind}": state for kind, state in callbacks})
    return {
        "position": dataclasses.asdict(position),
        **draws_state(setup.model),
        "scaler": setup.updates.scaler.state_dict(),
        "learning_rate": setup.learning_rate.state_dict() if setup.learning_rate is not None else None,
        "callbacks": callbacks,
    }


def _facts(setup: TrainingSetup, batches: AbstractBatches) -> dict[str, Any]:
    """What must be alike for an epoch to be gone on with."""
    accumulate = setup.settings.accumulate_grad_batches
    return {"samples": batches.num_samples, "accumulate_grad_batches": accumulate, **batches.facts()}


def _assembled(
    states: Iterator[State], setup: TrainingSetup, batches: AbstractBatches
) -> tuple[Assembly, Mapping[str, Any], Mapping[str, Any]]:
    """The weights for this rank's tile, what all ranks have alike, and what is this rank's own."""
    model = setup.model
    first = next(states)
    common, own = first["common"], first["own"]
    facts = _facts(setup, batches)
    if common["position"]["batch"] and common["data"] != facts:
        was = common["data"]
        other = [key for key in {**was, **facts} if facts.get(key) != was.get(key)]
        if "shuffle" in other and "seed" in other:
            other.remove("seed")  # which follows from it
        theirs = "up to the loader"
        changed = ", ".join(f"{key} is {facts.get(key, theirs)} (was {was.get(key, theirs)})" for key in other)
        raise CheckpointError(
            f"it was saved within an epoch, which can only go on as it began: {changed}. Give Trainer and fit what they were "
            "given then"
        )
    if setup.learning_rate is not None and common["learning_rate"] is not None:
        setup.learning_rate.check(common["learning_rate"])
    restore_layout(model, setup.optimizer, common)
    assembly = Assembly(model, setup.optimizer, averages_of(model.parameters()), common=common)
    assembly.take(first["shard"])
    for rank, state in enumerate(states, start=1):
        assembly.take(state["shard"])
        if rank == model.comm.rank:
            own = state["own"]
    assembly.check()
    return assembly, common, own


def restore_progress(setup: TrainingSetup, position: TrainingPosition, common: Mapping[str, Any]) -> None:
    """What `progress_state` returned, on whatever ranks."""
    for name, value in common["position"].items():
        setattr(position, name, value)
    restore_draws(setup.model, common)
    if common["scaler"]:  # otherwise it was written without one
        setup.updates.scaler.load_state_dict(common["scaler"])
    if setup.learning_rate is not None and common["learning_rate"] is not None:
        setup.learning_rate.load_state_dict(common["learning_rate"])
    elif (setup.learning_rate is None) != (common["learning_rate"] is None) and setup.model.comm.rank == 0:
        was, now = ("with", "without") if setup.learning_rate is None else ("without", "with")
        warn(f"the checkpoint was written {was} a scheduler, and the run goes on {now} one: its learning rates are others now")
    setup.callbacks.load_state_dict(common["callbacks"], says=setup.model.comm.rank == 0)
