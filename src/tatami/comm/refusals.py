"""What one rank refuses ends the waits of the others as well, with the same error; they would wait until their timeouts.

A rank that fails in a block that all ranks go through sends its error to the others (`tatami.comm.agreement.announce`), by the
way on which ranks ask each other what they do: MPI's small messages, the store of torch.distributed, or the memory that threads
share. A rank that waits looks there from time to time, and raises the failure of another rank on the communicator that it waits
on, or on one that this is a part of.

Ranks may all refuse the same, each by itself, and go on after they have caught it. So failures are counted: the n-th failure of
one rank on a communicator ends the waits only of those that have failed less often there.
"""

from __future__ import annotations

import json
import threading
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from tatami import errors
from tatami.errors import TatamiError, TrainingError, rebuilt, shortened

Raised = TypeVar("Raised", bound=BaseException)

LONGEST_TEXT = 1500
"""Characters of an error that are sent. MPI takes a message of that size to a rank that does not receive it."""
GRACE_S = 0.5
"""A wait for a message between processes goes on for so long."""
_KNOWN = "is_known_to_all_ranks"


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


def is_known_to_all(error: BaseException) -> bool:
    """Whether `known_to_all` was called for it."""
    return bool(vars(error).get(_KNOWN))


def known_to_all(error: Raised) -> Raised:
    """`error`, which the other ranks have received, or raise at the same place."""
    vars(error)[_KNOWN] = True
    return error
