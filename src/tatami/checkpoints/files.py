"""A folder for each step: data files, each written in one step, and last a manifest that says what all of them must be.

step-00000020/rank-0000.safetensors             the state of rank 0, and of its replicas
step-00000020/rank-0000.copy-0001.safetensors   the same, kept by rank 1
step-00000020/manifest.json                     sizes and checksums of the state of all ranks: the checkpoint is whole
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from tatami.errors import CheckpointError, InputError
from tatami.outputs import write_bytes

MANIFEST = "manifest.json"
FORMAT = 1
_PREFIX = "step-"


@dataclass(frozen=True, kw_only=True)
class ManifestEntry:
    """What the state of one set of replicas must be; `name` is that of its first rank."""

    name: str
    size_bytes: int
    sha256: str


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """A whole checkpoint: the step, the number of ranks that wrote it, and everything that belongs to it.

    Attributes:
        facts: what else it says, as JSON has it.
    """

    step: int
    ranks: int
    members: tuple[ManifestEntry, ...]
    facts: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """One folder as a rank sees it.

    Attributes:
        step: from its name.
        manifest: None where there is none, or a damaged one.
        problem: what is wrong with the manifest.
        files: bytes of each data file.
    """

    step: int
    manifest: Manifest | None
    problem: str | None = None
    files: Mapping[str, int] = field(default_factory=dict)


def step_folder(directory: Path, step: int) -> Path:
    return directory / f"{_PREFIX}{step:08d}"


def file_name(member: str, *, kept_by: int | None = None) -> str:
    """Name of the data file of a member, or of the copy that another rank keeps."""
    return f"{member}.safetensors" if kept_by is None else f"{member}.copy-{kept_by:04d}.safetensors"


def describe(name: str, data: bytes) -> ManifestEntry:
    return ManifestEntry(name=name, size_bytes=len(data), sha256=hashlib.sha256(data).hexdigest())


def write_manifest(folder: Path, manifest: Manifest) -> None:
    """
    Raises:
        OSError: it cannot be written.
    """
    write_bytes(folder / MANIFEST, seal({"format": FORMAT, **asdict(manifest)}).encode(), force=True)


def read_manifest(folder: Path) -> Manifest:
    """
    Raises:
        CheckpointError: it is damaged, or of a format that this version does not know.
        FileNotFoundError: there is none.
    """
    path = folder / MANIFEST
    try:
        body = unseal(path.read_text(encoding="utf-8"))
        if body["format"] != FORMAT:
            raise ValueError(f"its format is {body['format']}, and this version of tatami reads {FORMAT}")
        members = tuple(ManifestEntry(**member) for member in body["members"])
        return Manifest(step=body["step"], ranks=body["ranks"], members=members, facts=body.get("facts", {}))
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is damaged: {error}") from error


def read_member(path: Path, member: ManifestEntry) -> bytes:
    """The bytes of a data file, if they are what the manifest says.

    Raises:
        CheckpointError: they are not; says what was expected and what is there.
    """
    try:
        data = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read: {error.strerror or error}") from error
    if len(data) != member.size_bytes:
        raise CheckpointError(wrong_size(path, size_bytes=len(data), member=member))
    found = hashlib.sha256(data).hexdigest()
    if found != member.sha256:
        raise CheckpointError(f"{path} is corrupt: its SHA-256 should be {member.sha256[:12]}..., and is {found[:12]}...")
    return data


def wrong_size(path: Path, *, size_bytes: int, member: ManifestEntry) -> str:
    how = "is truncated" if size_bytes < member.size_bytes else "is not the file that was written"
    return f"{path} {how}: it should have {member.size_bytes} bytes, and has {size_bytes}"


def scan(directory: Path) -> tuple[Seen, ...]:
    """All step folders that this rank sees, the newest first."""
    found = []
    with contextlib.suppress(FileNotFoundError):
        for folder in directory.iterdir():
            number = folder.name.removeprefix(_PREFIX)
            if folder.name.startswith(_PREFIX) and number.isdecimal() and folder.is_dir():
                found.append(_look(folder, step=int(number)))
    return tuple(sorted(found, key=lambda seen: seen.step, reverse=True))


def remove(directory: Path, step: int) -> None:
    """The manifest first: what is half removed is no checkpoint. Other ranks may remove the same folder."""
    folder = step_folder(directory, step)
    with contextlib.suppress(OSError):
        (folder / MANIFEST).unlink()
    shutil.rmtree(folder, ignore_errors=True)


def _look(folder: Path, *, step: int) -> Seen:
    manifest, problem = None, None
    try:
        manifest = read_manifest(folder)
    except FileNotFoundError:
        pass  # A checkpoint without a manifest was never finished, which is no problem to report.
    except CheckpointError as error:
        problem = str(error)
    files = {}
    for path in folder.glob("*.safetensors"):
        with contextlib.suppress(FileNotFoundError):
            files[path.name] = path.stat().st_size
    return Seen(step=step, manifest=manifest, problem=problem, files=files)


def seal(body: Mapping[str, Any]) -> str:
    """The text of `body`, as JSON, with a checksum of all that it says: what was changed afterwards is not taken."""
    return json.dumps({**body, "sha256": _checksum(body)}, indent=1) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """What `seal` was given.

    Raises:
        ValueError: the text was not made by `seal`, or was changed since.
    """
    body = json.loads(text)
    if not isinstance(body, dict) or not isinstance(expected := body.pop("sha256", None), str):
        raise ValueError("it has no checksum")
    if (found := _checksum(body)) != expected:
        raise ValueError(f"its checksum should be {expected[:12]}..., and is {found[:12]}...")
    return body


def _checksum(body: object) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


class Writing:
    """What a rank writes of a checkpoint: in a thread, while the run goes on; begins when it is made.

    Args:
        name: of the member that this rank writes.
        data: what it writes; None: nothing.

    Attributes:
        member: what was written, when `wait` has returned; None where nothing was.
        written: the files of this rank, whole or not.
    """

    def __init__(self, folder: Path, step: int, name: str, data: bytes | None) -> None:
        self.folder, self.step = folder, step
        self.data = data
        self.member: ManifestEntry | None = None
        self.problem: Exception | None = None
        self.written: list[Path] = []
        self._name = name
        self._thread = threading.Thread(target=self._write, name=f"checkpoint of step {step}")
        self._thread.start()

    @property
    def is_done(self) -> bool:
        return not self._thread.is_alive()

    def wait(self) -> None:
        """
        Raises:
            OSError, InputError: it could not be written.
        """
        self._thread.join()
        if self.problem is not None:
            raise self.problem

    def _write(self) -> None:
        if self.data is None:
            return
        try:
            path = self.folder / file_name(self._name)
            self.written.append(path)
            write_bytes(path, self.data, force=True)
            self.member = describe(self._name, self.data)
        except (OSError, InputError) as error:
            self.problem = error
