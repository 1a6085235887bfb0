"""Checkpoints of a job of many ranks, from which it goes on after any of their files, or disks, are lost.

    checkpoint = MultiNodeCheckpoint("checkpoints", comm, replica_sets=[])     # []: all ranks hold the same state
    resumed = checkpoint.resume()
    if resumed is not None:
        model.load_state_dict(resumed.state["model"])
        optimizer.load_state_dict(resumed.state["optimizer"])
    for step in range(resumed.step if resumed else 0, 1000):
        ...
        if step % 100 == 99:
            checkpoint.save(step + 1, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})

Directories may be one on a shared disk, or each rank's own. Nothing is removed but what newer checkpoints have replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch

from tatami.checkpoints.choice import Candidate, candidates, parse_replica_sets, set_of
from tatami.checkpoints.fetch import fetch
from tatami.checkpoints.files import (
    MANIFEST,
    Manifest,
    ManifestEntry,
    Writing,
    file_name,
    remove,
    scan,
    step_folder,
    write_manifest,
)
from tatami.checkpoints.parts import check_replicas, units_in
from tatami.checkpoints.state_codec import State, decode, encode
from tatami.comm.agreement import all_or_none, same_everywhere
from tatami.comm.base import AbstractCommunicator
from tatami.comm.objects import bytes_of, tensor_of
from tatami.errors import CheckpointError, CommError, InputError, warn
from tatami.inputs import check_at_least
from tatami.outputs import make_folder, write_bytes

Result = TypeVar("Result")

DISK_TIMEOUT_S = 600.0
"""How long ranks wait for the slowest disk."""


@dataclass(frozen=True, kw_only=True)
class Resumed:
    """What a job goes on from.

    Attributes:
        step: that it was saved at.
        state: of this rank; tensors are on the CPU.
        ranks: how many had saved it.
        skipped: what was wrong with newer checkpoints, and with files of this one that others stood in for.
    """

    step: int
    state: State
    ranks: int
    skipped: tuple[str, ...]


class _DamagedError(Exception):
    """A member of a checkpoint has no good source left."""


class MultiNodeCheckpoint:
    """Saves and finds the state of all ranks. All methods are collective but `is_written`.

    Args:
        directory: of this rank; shared between ranks or not.
        comm: the ranks.
        replica_sets: ranks that hold the same state, of which the first writes it for all: see `parse_replica_sets`.
            `[]`: all do. None: each rank has its own.
        copies: on how many other ranks' directories each state is kept beside its own: those of the next ranks.
        keep: how many checkpoints are kept.
        timeout_s: how long ranks wait for the slowest disk.

    Raises:
        InputError: replica sets that are invalid, or that differ between ranks; a directory that cannot be written to (says on
            which rank).
    """

    def __init__(
        self,
        directory: Path | str,
        comm: AbstractCommunicator,
        *,
        replica_sets: Sequence[int | Sequence[int]] | None = None,
        copies: int = 0,
        keep: int = 2,
        timeout_s: float = DISK_TIMEOUT_S,
    ) -> None:
        self._comm = comm.duplicate()
        self._directory = Path(directory)
        self._found: frozenset[int] = frozenset()
        self._writing: Writing | None = None
        same_everywhere(self._comm, {"replica_sets": replica_sets}, where="MultiNodeCheckpoint")
        self.retain(copies=copies, keep=keep)
        self._replica_sets = replica_sets
        self.regroup()
        self._comm.timeout_s = timeout_s
        self._together("checkpoints cannot be written", lambda: make_folder(self._directory))

    def retain(self, *, copies: int, keep: int) -> None:
        """Change how many copies, and how many checkpoints, are kept. Raises `InputError` as the constructor. Collective."""
        size = self._comm.size
        same_everywhere(self._comm, {"copies": copies, "keep": keep}, where="MultiNodeCheckpoint")
        if not 0 <= copies < size:
            raise InputError(f"copies={copies} for {size} ranks; choose 0 to {size - 1} other ranks to keep one")
        check_at_least(1, keep=keep)
        self._copies, self._keep = copies, keep

    def regroup(self) -> None:
        """The ranks of the communicator are others than before. What they were writing is left as it is, no checkpoint."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            with contextlib.suppress(OSError, InputError):
                writing.wait()
        self._sets = parse_replica_sets(self._replica_sets, ranks=self._comm.size)
        self._directories: list[Path] = self._comm.allgather_object(self._directory)

    def save(self, step: int, state: State) -> Path:
        """Keep `state` as that of `step`; returns the folder. Older checkpoints are removed when this one is whole.

        Args:
            step: of the run, from 0; may be one that there is already, which is then replaced.
            state: dicts, lists and tuples of tensors, numbers, strings and None. Of replicas, that of the first rank is kept.

        Raises:
            CheckpointError: on all ranks, if one could not write (says which, and why); older checkpoints are untouched. State
                that cannot be kept (says where), and a directory with later checkpoints of another run.
        """
        self.begin(step, state)
        return self.finish()

    def begin(self, step: int, state: State) -> None:
        """As `save`, in the background: `state` is copied now, and may change when this returns.

        It is a checkpoint when `finish` has returned. Only one is written at a time: one before is finished here.
        """
        if self._writing is not None:
            self.finish()
        data = self._encoded(step, state)
        folder = step_folder(self._directory, step)
        # Of a checkpoint that is replaced, what is half new must not count as whole.
        self._together("could not be written", lambda: (folder / MANIFEST).unlink(missing_ok=True), step=step)
        self._writing = Writing(folder, step, _member_name(self._comm.rank), data)

    @property
    def is_written(self) -> bool:
        """Whether this rank has nothing left to write, so that `finish` waits for other ranks only."""
        return self._writing is None or self._writing.is_done

    def finish(self) -> Path:
        """Wait until all ranks have written what was begun, and make it a checkpoint; returns the folder.

        Raises:
            CheckpointError: as `save`.
        """
        writing = self._writing
        if writing is None:
            raise InputError("finish: no checkpoint was begun")
        self._writing = None
        step, folder = writing.step, writing.folder
        try:
            self._together("could not be written", writing.wait, step=step)
            members = tuple(each for each in self._comm.allgather_object(writing.member) if each is not None)
            if self._copies:
                self._together("could not be written", lambda: self._copy(writing, members), step=step)
            manifest = Manifest(step=step, ranks=self._comm.size, members=members)
            self._together("could not be written", lambda: write_manifest(folder, manifest), step=step)
        except CheckpointError:
            for path in (folder / MANIFEST, *writing.written):
                with contextlib.suppress(OSError):
                    path.unlink()
            with contextlib.suppress(OSError):
                folder.rmdir()
            raise
        self._remove_replaced(step)
        return folder

    def resume(
        self,
        *,
        reshard: Callable[[list[State]], State] | None = None,
        assemble: Callable[[Iterator[State]], State] | None = None,
    ) -> Resumed | None:
        """The newest checkpoint that is whole, whatever rank's directory its files are in; None where there is none at all.

        Of one of which files are missing or damaged, copies are used where there are any. One that cannot be used even so is
        left out, with a warning of rank 0 that names the file and the step.

        Args:
            reshard: makes the state of this rank from those of all sets of replicas, where there are more or fewer sets now.
            assemble: as `reshard`, but the states come one after the other, so that only one of them is in memory at a time.
                May be called again where a file turns out to be damaged.

        Raises:
            CheckpointError: on all ranks: there are checkpoints and none is whole (says what each lacks); it is of another
                number of ranks that do not hold the same.
        """
        if reshard is not None and assemble is None:
            assemble = lambda states: reshard(list(states))  # noqa: E731
        # Every rank must come to the same decision, as `fetch` below is collective. So all of them walk the same list, the
        # newest candidate first, made of what all ranks have found.
        inventories = self._comm.allgather_object(scan(self._directory))
        found = candidates(inventories, directories=self._directories)
        known = {candidate.manifest.step for candidate in found}
        unread = {seen.problem: seen.step for each in inventories for seen in each if seen.problem and seen.step not in known}
        skipped = [(step, problem) for problem, step in unread.items()]
        for candidate in found:
            step = candidate.manifest.step
            folder = step_folder(self._directories[0], step)
            problems = [f"{folder / file_name(name)} is missing, and no rank has a copy" for name in candidate.missing]
            problems += candidate.damaged
            try:
                if candidate.missing:
                    raise _DamagedError
                state = self._load(candidate, problems, assemble)
            except _DamagedError:
                skipped += [(step, problem) for problem in problems]
                continue
            newer = [f"step {each}: {problem}" for each, problem in sorted(skipped, reverse=True) if each > step]
            if newer:
                self._warn("\n  ".join([f"the checkpoint of step {step} is used, as newer ones are damaged:", *newer]))
            for problem in problems:
                self._warn(f"{problem}; a copy is used")
            self._found = frozenset(seen.step for each in inventories for seen in each)
            return Resumed(step=step, state=state, ranks=candidate.manifest.ranks, skipped=(*newer, *problems))
        if skipped:
            lacks = [f"step {each}: {problem}" for each, problem in sorted(skipped, reverse=True)]
            raise CheckpointError("\n  ".join([f"no checkpoint in {self._directory} is whole:", *lacks]))
        return None

    def refuse_stray(self, step: int) -> None:
        """Refuse a directory in which another run has saved a later step than this, which is where this run begins.

        Raises:
            CheckpointError: on all ranks.
        """
        self._together("checkpoints cannot be saved", lambda: self._refuse_stray(step))

    def close(self) -> None:
        """Leave the other ranks; the checkpoints stay."""
        self._comm.close()

    def _warn(self, message: str) -> None:
        if self._comm.rank == 0:
            warn(message)

    # -- saving ----------------------------------------------------------------------------------------------------------

    def _encoded(self, step: int, state: State) -> bytes | None:
        """What this rank has to write, if anything."""
        me = self._comm.rank

        def encode_mine() -> bytes | None:
            check_at_least(0, step=step)
            self._refuse_stray(step)
            return encode(state) if any(each[0] == me for each in self._sets) else None

        data = self._together("cannot be saved", encode_mine, step=step)
        steps, units = zip(*self._comm.allgather_object((step, units_in(state))), strict=True)
        if len(set(steps)) > 1:
            raise InputError(f"save: the ranks are at different steps: {list(steps)}")
        check_replicas(units, sets=self._sets)
        return data

    def _refuse_stray(self, step: int) -> None:
        later = [seen.step for seen in scan(self._directory) if seen.step > step and seen.manifest is not None]
        if stray := [each for each in later if each not in self._found]:
            raise InputError(
                f"{self._directory} has a checkpoint of step {stray[0]} that this run knows nothing of; call resume() "
                "before the first save (of a Trainer: fit(..., resume=True)), or choose another directory"
            )

    def _copy(self, writing: Writing, members: Sequence[ManifestEntry]) -> None:
        """The copies that this rank keeps for others, and those that others keep for it."""
        me = self._comm.rank
        problem: Exception | None = None
        by_name = {member.name: member for member in members}
        copies = [
            (each[0], (each[0] + distance) % self._comm.size) for each in self._sets for distance in range(1, self._copies + 1)
        ]
        data = writing.data or b""
        requests = [self._comm.isend(tensor_of(data), keeper) for owner, keeper in copies if owner == me]
        for owner, keeper in copies:
            if keeper == me:
                member = by_name[_member_name(owner)]
                copy = torch.empty(member.size_bytes, dtype=torch.uint8)
                self._comm.recv(copy, owner)
                path = writing.folder / file_name(member.name, kept_by=me)
                try:
                    writing.written.append(path)
                    write_bytes(path, bytes_of(copy), force=True)
                except (OSError, InputError) as error:  # the others still wait for the copies that this rank sends
                    problem = problem or error
        for request in requests:
            request.wait()
        if problem is not None:
            raise problem

    def _remove_replaced(self, step: int) -> None:
        seen = scan(self._directory)
        # Not every rank's own directory need have the manifest of what is whole.
        theirs = self._comm.allgather_object([each.step for each in seen if each.step <= step and each.manifest is not None])
        kept = sorted({number for numbers in theirs for number in numbers})[-self._keep :]
        for each in seen:
            is_older = each.step < step and each.step not in kept
            is_of_before_the_resume = each.step > step and each.step in self._found
            if is_older or is_of_before_the_resume:
                remove(self._directory, each.step)

    # -- resuming --------------------------------------------------------------------------------------------------------

    def _load(self, candidate: Candidate, problems: list[str], assemble: Callable[[Iterator[State]], State] | None) -> State:
        """The state of this rank; what was damaged joins `problems`.

        Raises:
            _DamagedError: on all ranks, a member that any rank needs has no good source.
        """
        step = candidate.manifest.step
        if assemble is None:
            (blob,) = self._fetch(candidate, self._needs(candidate.manifest), problems)
            return self._together("could not be loaded", partial(decode, blob), step=step)

        def states() -> Iterator[State]:
            for member in candidate.manifest.members:
                (blob,) = self._fetch(candidate, [[member.name]] * self._comm.size, problems)
                yield decode(blob)

        # All ranks must fetch all members, also one on which `assemble` has failed.
        each, result, failed = states(), None, None
        try:
            result = assemble(each)
        except (_DamagedError, CommError):
            raise
        except Exception as error:
            failed = error
        for _ in each:
            pass  # Only the fetching counts: a rank that stopped here would leave the others waiting for its part.

        def settled() -> State:
            if failed is not None:
                raise failed
            return result

        return self._together("could not be loaded", settled, step=step)

    def _fetch(self, candidate: Candidate, needs: list[list[str]], problems: list[str]) -> list[bytes]:
        blobs, damaged = fetch(candidate, self._comm, directory=self._directory, needs=needs)
        problems += [each for each in damaged if each not in problems]
        if blobs is None:
            raise _DamagedError
        return blobs

    def _needs(self, manifest: Manifest) -> list[list[str]]:
        """The members that each rank needs.

        Raises:
            CheckpointError: another number of sets, and nothing that makes this one's state from theirs.
        """
        names = [member.name for member in manifest.members]
        if len(names) != len(self._sets):
            raise CheckpointError(
                f"{step_folder(self._directory, manifest.step)} was saved by {manifest.ranks} ranks with {len(names)} "
                f"different states; this job has {self._comm.size} ranks with {len(self._sets)}. Start as many as then, "
                "say which ranks hold the same state (replica_sets), or make the new states from the old ones "
                "(resume(reshard=...))"
            )
        return [[names[set_of(rank, self._sets)]] for rank in range(self._comm.size)]

    # -- all ranks or none -----------------------------------------------------------------------------------------------

    def _together(self, what: str, action: Callable[[], Result], *, step: int | None = None) -> Result:
        """Do it on all ranks; if it fails on one, all raise what happened there."""
        what = f"the checkpoint of step {step} {what}" if step is not None else what
        return all_or_none(self._comm, action, what=what, error=CheckpointError)


def _member_name(rank: int) -> str:
    return f"rank-{rank:04d}"
