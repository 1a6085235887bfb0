"""Checkpoints as folders of safetensors and JSON: written whole or not at all, checksummed, the one before kept."""

from __future__ import annotations

import hashlib
import json
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
from tatami.server.shard import COUNT

MANIFEST = "manifest.json"
KEPT = 2


@dataclass(frozen=True, kw_only=True)
class Stored:
    """A checkpoint as read: `snapshots[k]` is that of shard k; `problems` tell of newer ones that could not be used."""

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
    """Those of which there is a checkpoint, whole or not, the oldest first."""
    return tuple(int(folder.name.removeprefix("version-")) for folder in _folders(directory))


def write(directory: Path, snapshots: Sequence[Mapping[str, Vector]], *, saved: Saved, terms: Mapping[str, Any]) -> Path:
    """Write a checkpoint in one step, and remove all but the newest two.

    Raises:
        OSError: the disk is full, or the like; the checkpoints before are untouched.
    """
    final = directory / f"version-{saved.version:08d}"
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
        write_text(part / MANIFEST, json.dumps(manifest, indent=1))
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
        CheckpointError: there is none; says what is wrong with each that is there.
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
    manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
    snapshots = []
    for name, expected in manifest["files"].items():
        if _checksum(folder / name) != expected:
            raise ValueError(f"the checksum of {name} is wrong")
        snapshots.append(load_file(folder / name))
    clocks = tuple((int(worker), int(clock)) for worker, clock in manifest["clocks"])
    saved = Saved(version=manifest["version"], clocks=clocks)
    return Stored(saved=saved, snapshots=tuple(snapshots), terms=manifest["terms"], problems=problems)


def _folders(directory: Path) -> list[Path]:
    return sorted(each for each in directory.glob("version-*") if each.name.removeprefix("version-").isdecimal())


def _checksum(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()
