"""What one rank refuses ends the waits of the others as well, with the same error; they would wait until their timeouts.

A rank that fails in a block that all ranks go through sends its error to the others (`announce`), by the way on which ranks ask
each other what they do: MPI's small messages, the store of torch.distributed, or the memory that threads share. A rank that
waits looks there from time to time, and raises the failure of another rank on the communicator that it waits on, or on one that
this is a part of.

Ranks may all refuse the same, each by itself, and go on after they have caught it. So failures are counted: the n-th failure of
one rank on a communicator ends the waits only of those that have failed less often there.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar, final

from tatami import errors
from tatami.errors import ClosedError, CommTimeoutError, RankDiedError, TatamiError, TrainingError, rebuilt, shortened

Raised = TypeVar("Raised", bound=BaseException)

LONGEST_TEXT = 1500
"""Characters of an error that are sent. MPI takes a message of that size to a rank that does not receive it."""
GRACE_S = 0.5
"""A wait for a message between processes goes on for so long."""
_CONSEQUENCES = (CommTimeoutError, RankDiedError, ClosedError)
"""Other ranks find these out by themselves."""
_KNOWN = "is_known_to_all_ranks"


class _Ranks(Protocol):
    """The part of a communicator that is needed here."""

    @property
    def size(self) -> int: ...

    @property
    def refusals(self) -> Refusals | None: ...

    @property
    def lineage(self) -> str: ...

    @property
    def changes(self) -> bool: ...

    @property
    def is_closed(self) -> bool: ...


@dataclass(kw_only=True)
class _Failure:
    """A failure: its error, which ranks of the job have ended by it, and when a wait first saw that it needs one of them."""

    error: TatamiError
    ranks: set[int]
    seen_s: float | None = None


class Refusals:
    """The failures that the ranks of a job have sent each other, as far as this rank knows.

    Args:
        send: brings a message to all other ranks, which `receive` it.
        rank: this one, in the job.
        grace_s: a wait goes on for so long, as what a rank sent before it failed may still be under way.
    """

    def __init__(self, send: Callable[[bytes], object], *, rank: int, grace_s: float = 0.0) -> None:
        self._send, self._rank, self._grace_s = send, rank, grace_s
        self._lock = threading.Lock()
        self._num_failed: Counter[str] = Counter()
        self._failures: defaultdict[str, dict[int, _Failure]] = defaultdict(dict)

    def note(self, error: Exception, lineage: str) -> None:
        """This rank fails with `error` on the communicator `lineage`: send it to the others."""
        with self._lock:
            number = self._num_failed[lineage] = self._num_failed[lineage] + 1
            self._failures.get(lineage, {}).pop(number, None)
        is_ours = isinstance(error, TatamiError)
        kind = type(error).__name__ if is_ours else TrainingError.__name__
        text = str(error) if is_ours else f"rank {self._rank}: {type(error).__name__}: {error}"
        facts = {name: fact for name, fact in vars(error).items() if is_ours and isinstance(fact, int | float | None)}
        message = [self._rank, lineage, number, kind, shortened(text, longest=LONGEST_TEXT), facts]
        self._send(json.dumps(message, ensure_ascii=False).encode())

    def receive(self, message: bytes) -> None:
        """Keep the failure of another rank, unless this rank has failed as often."""
        # No pickle: torch's store is open to all users of the machine.
        rank, lineage, number, kind, text, facts = json.loads(message)
        found = vars(errors).get(kind)
        error = rebuilt(found if isinstance(found, type) and issubclass(found, TatamiError) else TrainingError, (text,))
        vars(error).update(facts)
        with self._lock:
            if number > self._num_failed[lineage]:
                self._failures[lineage].setdefault(number, _Failure(error=error, ranks=set())).ranks.add(rank)

    def check(self, lineage: str, needs: Sequence[int] | None, *, now_s: float) -> None:
        """
        Args:
            lineage: the communicator that is waited on.
            needs: the ranks of the job that the wait is for; None: all.
            now_s: the time.

        Raises:
            TatamiError: what one of them failed with on this communicator, or on one that it is a part of.
        """
        if not self._failures:
            return
        with self._lock:
            due = self._due(lineage, needs, now_s)
        if due is not None:
            refused, error = due
            self.note(error, refused)  # those that wait for this rank need to know
            raise known_to_all(error)

    def _due(self, lineage: str, needs: Sequence[int] | None, now_s: float) -> tuple[str, TatamiError] | None:
        for refused, failures in self._failures.items():
            failure = failures.get(self._num_failed[refused] + 1)
            is_part = lineage == refused or lineage.startswith(f"{refused}/")
            if failure is None or not is_part or (needs is not None and failure.ranks.isdisjoint(needs)):
                continue
            failure.seen_s = now_s if failure.seen_s is None else failure.seen_s
            if now_s - failure.seen_s >= self._grace_s:
                return refused, failure.error
        return None


@final
class fail_together:  # noqa: N801 -- used as a function
    """An exception that leaves this block on one rank ends the waits of the other ranks on `comm`, with the same error.

        with fail_together(comm):
            loss = step(batch)      # a rank that raises here, and goes on, would leave the others waiting for it

    All ranks enter the block; what they wait for may be on `comm`, or on parts or duplicates that were made of it. An error of
    Tatami's is raised on the others as it is; of any other, they raise a `TrainingError` that says rank, class and text. Where
    ranks may leave and join (elastic runs), nothing is sent: those that stay go on.

    Args:
        comm: the ranks.
        only: errors that are sent.
    """

    def __init__(self, comm: _Ranks, *, only: type[Exception] = Exception) -> None:
        self._comm, self._only = comm, only

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, self._only):
            announce(self._comm, error)


def announce(comm: _Ranks, error: Exception) -> None:
    """End the waits of the other ranks of `comm` with `error`, which ends what this rank does, unless they know it."""
    refusals = comm.refusals
    if refusals is None or comm.size == 1 or comm.changes or comm.is_closed or isinstance(error, _CONSEQUENCES):
        return
    cause: BaseException | None = error
    while cause is not None:
        if vars(cause).get(_KNOWN):
            return
        cause = cause.__cause__ or cause.__context__
    refusals.note(error, comm.lineage)
    known_to_all(error)


def known_to_all(error: Raised) -> Raised:
    """`error`, which the other ranks have received, or raise at the same place."""
    vars(error)[_KNOWN] = True
    return error


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Note what to do where ranks are missing in a collective; `call` is what the user's program calls. Also a decorator."""
    try:
        yield
    except (CommTimeoutError, RankDiedError) as error:
        error.add_note(f"{call} must be called by all ranks: is it inside of `if comm.rank == 0`?")
        raise
