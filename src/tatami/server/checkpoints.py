"""Checkpoints as folders of safetensors and JSON: written whole or not at all, checksummed, the one before kept."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError
from safetensors.numpy import load_file, save

from tatami.errors import CheckpointError, InputError
from tatami.outputs import make_folder, sync_folder, write_bytes, write_text
from tatami.server.optimizers import Vector
from tatami.server.saving import Saved
from tatami.server.seal import seal, unseal
from tatami.server.shard import COUNT, PARAMETERS

MANIFEST = "manifest.json"
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
    return tuple(int(folder.name.removeprefix("version-")) for folder in _folders(directory))


def write(directory: Path, snapshots: Sequence[Mapping[str, Vector]], *, saved: Saved, terms: Mapping[str, Any]) -> Path:
    """Write a checkpoint in one step, and remove all but the newest two.

    Raises:
        OSError: a file cannot be written, for example because the disk is full; the checkpoints before are untouched.
    """
    final = _folder(directory, saved.version)
    for part in directory.glob(".part-*"):  # of a driver that died while writing; a directory is of one run
        shutil.rmtree(part, ignore_errors=True)
    part = directory / f".part-{saved.version:08d}"
    part.mkdir(parents=True)
    try:
        sums = {}
        for number, snapshot in enumerate(snapshots):
            file = part / f"shard-{number:04d}.safetensors"
            write_bytes(file, save({name: np.ascontiguousarray(value) for name, value in snapshot.items()}))
            sums[file.name] = _checksum(file)
        manifest = {"version": saved.version, "clocks": saved.clocks, "files": sums, "terms": dict(terms)}
        write_text(part / MANIFEST, seal(manifest))
        if final.exists():  # of a run before a roll-back to a checkpoint older than it
            shutil.rmtree(final)
        part.rename(final)
        sync_folder(directory)
    except SafetensorError as error:
        raise OSError(str(error)) from error
    finally:
        shutil.rmtree(part, ignore_errors=True)
    for old in _folders(directory)[:-KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return final


def read(directory: Path, *, up_to: int | None = None) -> Stored:
    """The newest checkpoint that is whole, of version `up_to` or before.

    Raises:
        CheckpointError: there is no whole checkpoint; says what is wrong with each one found.
    """
    problems: list[str] = []
    for folder in reversed(_folders(directory)):
        if up_to is not None and int(folder.name.removeprefix("version-")) > up_to:
            continue
        try:
            return _read(folder, problems=tuple(problems))
        except (OSError, ValueError, KeyError, TypeError, SafetensorError, RecursionError) as error:
            problems.append(f"{folder} is damaged: {error}")
    raise CheckpointError("\n  ".join([f"there is no whole checkpoint in {directory}", *problems]))


def recut(snapshots: Sequence[Mapping[str, Vector]], *, stretches: Sequence[slice]) -> list[dict[str, Vector]]:
    """The same state, in other shards."""
    names = [name for name in snapshots[0] if name != COUNT]
    whole = {name: np.concatenate([snapshot[name] for snapshot in snapshots]) for name in names}
    return [{COUNT: snapshots[0][COUNT], **{name: whole[name][stretch] for name in names}} for stretch in stretches]


def _read(folder: Path, *, problems: tuple[str, ...]) -> Stored:
    try:
        manifest = unseal((folder / MANIFEST).read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{MANIFEST}: {error}") from error
    snapshots = []
    for name, expected in manifest["files"].items():
        if _checksum(folder / name) != expected:
            raise ValueError(f"the checksum of {name} is wrong")
        snapshots.append(load_file(folder / name))
    _check_snapshots(snapshots)
    saved = Saved(version=manifest["version"], clocks=_clocks(manifest["clocks"]))
    if folder != _folder(folder.parent, saved.version):
        raise ValueError(f"it holds version {saved.version}, which is not that of its name")
    return Stored(saved=saved, snapshots=tuple(snapshots), terms=manifest["terms"], problems=problems)


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


def _folder(directory: Path, version: int) -> Path:
    return directory / f"version-{version:08d}"


def _folders(directory: Path) -> list[Path]:
    return sorted(each for each in directory.glob("version-*") if each.name.removeprefix("version-").isdecimal())


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
