"""Which checkpoint a job goes on from, and from which rank's disk each state comes: decided from what all ranks see."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from tatami.checkpoints.files import Manifest, ManifestEntry, Seen, file_name, step_folder, wrong_size
from tatami.errors import InputError

ReplicaSets = tuple[tuple[int, ...], ...]
"""Every rank in exactly one set; ranks ascend in each, and so do the first ranks of the sets."""


def parse_replica_sets(sets: Sequence[int | Sequence[int]] | None, *, ranks: int) -> ReplicaSets:
    """The sets in order, completed.

    Args:
        sets: ranks that hold the same state, or a single rank; those in none of them form one more set. `[]`: all ranks hold
            the same. None: each rank holds its own.
        ranks: how many there are.

    Raises:
        InputError: a set without ranks, a rank that is not there, or in two sets.
    """
    if sets is None:
        return tuple((rank,) for rank in range(ranks))
    seen: set[int] = set()
    parsed = []
    for given in sets:
        each = (given,) if isinstance(given, int) else tuple(given)
        if not each:
            raise InputError(f"replica_sets {list(sets)}: a set without ranks; leave it out")
        for rank in each:
            if not 0 <= rank < ranks:
                raise InputError(f"replica_sets: there is no rank {rank}; there are ranks 0 to {ranks - 1}")
            if rank in seen:
                raise InputError(f"replica_sets: rank {rank} is named twice; a rank is in one set")
            seen.add(rank)
        parsed.append(tuple(sorted(each)))
    rest = tuple(rank for rank in range(ranks) if rank not in seen)
    return tuple(sorted([*parsed, rest] if rest else parsed))


def set_of(rank: int, sets: ReplicaSets) -> int:
    """The number of the set that `rank` is in."""
    return next(number for number, each in enumerate(sets) if rank in each)


@dataclass(frozen=True, kw_only=True, order=True)
class Source:
    """A file as one rank sees it."""

    rank: int
    file: str


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A checkpoint that some rank has the manifest of.

    Attributes:
        manifest: what it must be.
        sources: of each member, where a file of its size is.
        missing: members of which there is no file anywhere.
        damaged: what was found of files of another size.
    """

    manifest: Manifest
    sources: Mapping[str, tuple[Source, ...]]
    missing: tuple[str, ...]
    damaged: tuple[str, ...]


def candidates(inventories: Sequence[Sequence[Seen]], *, directories: Sequence[Path]) -> list[Candidate]:
    """All checkpoints that there are traces of, the newest first.

    Args:
        inventories: of each rank, what it sees.
        directories: of each rank, for messages.
    """
    manifests = {seen.manifest: None for inventory in inventories for seen in inventory if seen.manifest is not None}
    newest_first = sorted(manifests, key=lambda manifest: manifest.step, reverse=True)
    return [_candidate(manifest, inventories, directories) for manifest in newest_first]


def pick(
    candidate: Candidate, *, needs: Sequence[Collection[str]], bad: Collection[Source]
) -> dict[tuple[int, str], Source] | None:
    """The source of each (rank, member that it needs): its own disk where possible. None: a member has no good source left.

    Args:
        candidate: a complete one.
        needs: of each rank, names of members.
        bad: sources that turned out to be damaged.
    """
    picked = {}
    for rank, names in enumerate(needs):
        for name in names:
            good = [source for source in candidate.sources[name] if source not in bad]
            if not good:
                return None
            picked[rank, name] = min(good, key=lambda source: (source.rank != rank, source.file != file_name(name), source))
    return picked


def _candidate(manifest: Manifest, inventories: Sequence[Sequence[Seen]], directories: Sequence[Path]) -> Candidate:
    sources: dict[str, tuple[Source, ...]] = {}
    missing, damaged = [], []
    for member in manifest.members:
        good, wrong = _files_of(member, manifest.step, inventories, directories)
        sources[member.name] = tuple(good)
        if not good and not wrong:
            missing.append(member.name)
        damaged += wrong
    return Candidate(manifest=manifest, sources=sources, missing=tuple(missing), damaged=tuple(dict.fromkeys(damaged)))


def _files_of(
    member: ManifestEntry, step: int, inventories: Sequence[Sequence[Seen]], directories: Sequence[Path]
) -> tuple[list[Source], list[str]]:
    good, wrong = [], []
    for rank, inventory in enumerate(inventories):
        for seen in inventory:
            if seen.step != step:
                continue
            for file, size_bytes in sorted(seen.files.items()):
                if file != file_name(member.name) and not file.startswith(f"{member.name}.copy-"):
                    continue
                if size_bytes == member.size_bytes:
                    good.append(Source(rank=rank, file=file))
                else:
                    path = step_folder(directories[rank], step) / file
                    wrong.append(wrong_size(path, size_bytes=size_bytes, member=member))
    return good, wrong
