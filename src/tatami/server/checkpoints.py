"""The state of a run of the parameter server in the store of `tatami.checkpoints`: each shard is a member of the step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load, save

from tatami.checkpoints.files import Manifest, Seen, describe, file_name, read_member, remove, scan, step_folder, write_manifest
from tatami.errors import CheckpointError, InputError
from tatami.outputs import make_folder, write_bytes
from tatami.server.optimizers import Vector
from tatami.server.saving import Saved
from tatami.server.shard import COUNT, PARAMETERS

KEPT = 2
_DTYPES = (np.float32, np.float64)


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint as read: `snapshots[k]` is that of shard k; `problems` say why newer ones could not be used."""

    saved: Saved
    snapshots: tuple[dict[str, Vector], ...]
    terms: dict[str, Any]
    problems: tuple[str, ...]


def check_directory(directory: Path) -> None:
    """Whether checkpoints can be written there, asked before anything is started.

    Raises:
        InputError: it cannot be made or written to.
    """
    try:
        make_folder(directory)
    except (OSError, InputError) as error:
        raise InputError(f"checkpoints cannot be written to {directory}: {error}") from error


def versions(directory: Path) -> tuple[int, ...]:
    """The versions of which there is a checkpoint, whole or damaged, the oldest first."""
    return tuple(seen.step for seen in reversed(scan(directory)) if not _is_unfinished(seen))


def write(directory: Path, snapshots: Sequence[Mapping[str, Vector]], *, saved: Saved, terms: Mapping[str, Any]) -> Path:
    """Write a checkpoint, whose manifest comes last, and remove all but the newest two.

    Raises:
        OSError: a file cannot be written, for example because the disk is full; the checkpoints before are untouched.
    """
    folder = step_folder(directory, saved.version)
    for seen in scan(directory):
        # Unfinished ones are of a driver that died while writing; the same version was written before a roll-back.
        if _is_unfinished(seen) or seen.step == saved.version:
            remove(directory, seen.step)
    members = []
    try:
        for number, snapshot in enumerate(snapshots):
            name, data = f"shard-{number:04d}", save({name: np.ascontiguousarray(each) for name, each in snapshot.items()})
            write_bytes(folder / file_name(name), data)
            members.append(describe(name, data))
        facts = {"clocks": saved.clocks, "terms": dict(terms)}
        write_manifest(folder, Manifest(step=saved.version, ranks=len(members), members=tuple(members), facts=facts))
    except (OSError, SafetensorError) as error:
        remove(directory, saved.version)
        raise error if isinstance(error, OSError) else OSError(str(error)) from error
    for old in versions(directory)[:-KEPT]:
        remove(directory, old)
    return folder


def read(directory: Path, *, up_to: int | None = None) -> Stored:
    """The newest checkpoint that is whole, of version `up_to` or before.

    Raises:
        CheckpointError: there is no whole checkpoint; says what is wrong with each one found.
    """
    problems: list[str] = []
    for seen in scan(directory):
        if _is_unfinished(seen) or (up_to is not None and seen.step > up_to):
            continue
        folder = step_folder(directory, seen.step)
        try:
            if seen.manifest is None:
                raise CheckpointError(str(seen.problem))
            return _read(folder, seen.manifest, problems=tuple(problems))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError, CheckpointError) as error:
            problems.append(f"{folder} is damaged: {error}")
    raise CheckpointError("\n  ".join([f"there is no whole checkpoint in {directory}", *problems]))


def _is_unfinished(seen: Seen) -> bool:
    return seen.manifest is None and seen.problem is None


def recut(snapshots: Sequence[Mapping[str, Vector]], *, stretches: Sequence[slice]) -> list[dict[str, Vector]]:
    """The same state, in other shards."""
    names = [name for name in snapshots[0] if name != COUNT]
    whole = {name: np.concatenate([snapshot[name] for snapshot in snapshots]) for name in names}
    return [{COUNT: snapshots[0][COUNT], **{name: whole[name][stretch] for name in names}} for stretch in stretches]


def _read(folder: Path, manifest: Manifest, *, problems: tuple[str, ...]) -> Stored:
    if folder != step_folder(folder.parent, manifest.step):
        raise ValueError(f"it holds version {manifest.step}, which is not that of its name")
    snapshots = [load(read_member(folder / file_name(member.name), member)) for member in manifest.members]
    _check_snapshots(snapshots)
    saved = Saved(version=manifest.step, clocks=_clocks(manifest.facts["clocks"]))
    return Stored(saved=saved, snapshots=tuple(snapshots), terms=manifest.facts["terms"], problems=problems)


def _check_snapshots(snapshots: Sequence[Mapping[str, Vector]]) -> None:
    """Whether they can be the shards of one vector of parameters, with one optimizer's state.

    Raises:
        ValueError: they cannot; names the shard and what it holds.
    """
    if not snapshots:
        raise ValueError("it names no shards")
    steps = []
    for number, snapshot in enumerate(snapshots):
        where = f"of shard {number}"
        if not {PARAMETERS, COUNT} <= set(snapshot) or set(snapshot) != set(snapshots[0]):
            expected = ", ".join(sorted({PARAMETERS, COUNT, *snapshots[0]}))
            raise ValueError(f"shard {number} holds {', '.join(sorted(snapshot))}; it must hold {expected}")
        parameters, count = snapshot[PARAMETERS], snapshot[COUNT]
        if parameters.ndim != 1:
            raise ValueError(f"the {PARAMETERS} {where} have shape {parameters.shape}; they must be one vector")
        if parameters.dtype not in _DTYPES:
            raise ValueError(f"the {PARAMETERS} {where} are {parameters.dtype}; they must be float32 or float64")
        if parameters.dtype != snapshots[0][PARAMETERS].dtype:
            others = snapshots[0][PARAMETERS].dtype
            raise ValueError(f"the {PARAMETERS} {where} are {parameters.dtype}, those of the others are {others}")
        for name, vector in snapshot.items():
            is_alike = (vector.shape, vector.dtype) == (parameters.shape, parameters.dtype)
            if name not in (PARAMETERS, COUNT) and not is_alike:
                raise ValueError(
                    f"the {name} {where} is {vector.dtype} of shape {vector.shape}; its {PARAMETERS} are "
                    f"{parameters.dtype} of shape {parameters.shape}"
                )
        if count.shape != (1,) or count.dtype != np.int64 or count[0] < 0:
            raise ValueError(f"the {COUNT} {where} is {count!r}; it must be one whole number of steps")
        steps.append(int(count[0]))
        if steps[-1] != steps[0]:
            raise ValueError(f"shard {number} has taken {steps[-1]} steps, shard 0 has taken {steps[0]}")


def _clocks(listed: Any) -> tuple[tuple[int, int], ...]:
    """The rounds done by each worker. Raises ValueError where they are invalid."""
    clocks: dict[int, int] = {}
    for each in listed:
        if len(each) != 2 or not all(type(number) is int and number >= 0 for number in each):
            raise ValueError(f"{each} must be a worker and its rounds: two whole numbers that are not negative")
        worker, clock = each
        if worker in clocks:
            raise ValueError(f"it names the clock of worker {worker} twice")
        clocks[worker] = clock
    if not clocks:
        raise ValueError("it names no clocks")
    return tuple(clocks.items())
