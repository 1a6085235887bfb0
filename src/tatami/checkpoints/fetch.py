"""The bytes of a checkpoint, brought to the ranks that need them from the ranks whose disks have them, and verified."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from tatami.checkpoints.choice import Candidate, Source, pick
from tatami.checkpoints.files import ManifestEntry, read_member, step_folder
from tatami.comm.base import AbstractCommunicator
from tatami.comm.objects import bytes_of, tensor_of
from tatami.errors import CheckpointError


def fetch(
    candidate: Candidate, comm: AbstractCommunicator, *, directory: Path, needs: Sequence[Sequence[str]]
) -> tuple[list[bytes] | None, list[str]]:
    """What this rank needs of a checkpoint. Collective.

    Every file is verified by the rank that reads it; where one is damaged, all look for another source of it.

    Args:
        candidate: a complete one.
        directory: of this rank.
        needs: of each rank, names of members.

    Returns:
        the bytes of the members that this rank needs, or None if one of any rank has no good source; and what was damaged.
    """
    members = {member.name: member for member in candidate.manifest.members}
    folder = step_folder(directory, candidate.manifest.step)
    bad: set[Source] = set()
    read: dict[str, bytes] = {}
    problems: list[str] = []
    while True:
        picked = pick(candidate, needs=needs, bad=bad)
        if picked is None:
            return None, problems
        mine = {source.file: members[name] for (_, name), source in picked.items() if source.rank == comm.rank}
        found = comm.allgather_object(_read(folder, mine, read))
        wrong = {Source(rank=rank, file=file): said for rank, each in enumerate(found) for file, said in each.items()}
        if not wrong:
            return _exchange(picked, comm, needs=needs, members=members, read=read), problems
        bad |= wrong.keys()
        problems += [said for said in dict.fromkeys(wrong.values()) if said not in problems]


def _read(folder: Path, files: Mapping[str, ManifestEntry], read: dict[str, bytes]) -> dict[str, str]:
    """Read and verify files of members; returns what is wrong, by file."""
    wrong = {}
    for file, member in files.items():
        if file in read:
            continue
        try:
            read[file] = read_member(folder / file, member)
        except CheckpointError as error:
            wrong[file] = str(error)
    return wrong


def _exchange(
    picked: Mapping[tuple[int, str], Source],
    comm: AbstractCommunicator,
    *,
    needs: Sequence[Sequence[str]],
    members: Mapping[str, ManifestEntry],
    read: Mapping[str, bytes],
) -> list[bytes]:
    """Send what others need of this rank's directory, and receive what this one needs of theirs."""
    requests = []
    came: dict[str, torch.Tensor] = {}
    for (rank, name), source in sorted(picked.items()):
        if source.rank == rank:
            continue
        if source.rank == comm.rank:
            requests.append(comm.isend(tensor_of(read[source.file]), rank))
        if rank == comm.rank:
            came[name] = torch.empty(members[name].size_bytes, dtype=torch.uint8)
            requests.append(comm.irecv(came[name], source.rank))
    for request in requests:
        request.wait()
    return [bytes_of(came[name]) if name in came else read[picked[comm.rank, name].file] for name in needs[comm.rank]]
