"""Agreement between ranks: the same everywhere; decided on the root; all or none.

What one rank alone finds wrong, all ranks must hear of, or the others wait for it until their timeouts. Each function here is
collective, moves one small object for each rank, and raises on all ranks or on none.
"""

from __future__ import annotations

import os
import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from itertools import zip_longest
from types import TracebackType
from typing import Any, Final, TypeVar, final

from tatami.comm.ranks import AbstractRanks
from tatami.comm.refusals import is_known_to_all, known_to_all
from tatami.errors import ClosedError, CommError, CommTimeoutError, InputError, RankDiedError, TatamiError, TrainingError

Result = TypeVar("Result")
Trouble = TypeVar("Trouble")

DEBUG_VARIABLE = "TATAMI_DEBUG"
EVERY: Final = 64
"""Passes between two looks of a `Watch`, at the most."""


_CONSEQUENCES = (CommTimeoutError, RankDiedError, ClosedError)
"""Other ranks find these out by themselves."""
_asked: bool | None = None
"""By `debug`; None where it was not called."""


def debugging() -> bool:
    """Whether `debug` or `TATAMI_DEBUG` asks for what costs too much to be looked at in every run: every call, every number."""
    return os.environ.get(DEBUG_VARIABLE, "") not in ("", "0") if _asked is None else _asked


@contextmanager
def debug(enabled: bool = True) -> Iterator[None]:
    """Debug mode, in all threads of this process; all ranks must enter it alike.

    Collectives of `tatami.functions` compare operation, root, shapes and dtypes of all ranks before data move, and so does
    `tatami.comm.all_reduce`; those of a communicator compare their roots. Gradients that are to be averaged over the ranks are
    looked through for NaN and infinities. It costs a small message to each rank for each collective. `TATAMI_DEBUG=1` does it
    for a whole run.
    """
    global _asked
    before, _asked = _asked, enabled
    try:
        yield
    finally:
        _asked = before


def same_everywhere(
    comm: AbstractRanks, facts: Mapping[str, object], *, where: str, error: type[InputError] = InputError
) -> None:
    """Refuse facts that differ between ranks. Collective.

    Args:
        facts: by name; their order counts as well. Two values are the same where `==` says so after they were pickled.
        where: the operation that needs them, for the message.
        error: what to raise.

    Raises:
        InputError: or `error`, on all ranks: names the first rank that differs from rank 0, and the first fact that does.
    """
    if comm.size == 1:
        return
    first, *others = comm.allgather_object(list(facts.items()))
    for rank, theirs in enumerate(others, start=1):
        if theirs != first:
            one, other = next(pair for pair in zip_longest(first, theirs) if pair[0] != pair[1])
            text = f"{where}: rank 0 has {_told(one)}, rank {rank} has {_told(other)}; all ranks must have the same"
            raise known_to_all(error(text))


def decided_on_root(comm: AbstractRanks, decide: Callable[[], Result], *, root: int = 0) -> Result:
    """What `decide` returns on `root`, on all ranks; it is not called on the others. Collective.

    Raises:
        TatamiError, OSError: on all ranks, what `decide` raised on `root`.
        TrainingError: on the other ranks, where that was another error; says which. The root raises the error itself.
    """
    decided, refused = None, None
    if comm.rank == root:
        try:
            decided = decide()
        except CommError:
            raise  # the ranks can no longer tell each other anything
        except Exception as error:
            refused = error
    told, decision = comm.bcast_object((refused and _portable(refused, root), decided), root=root)
    if refused is not None:
        raise known_to_all(refused)
    if told is not None:
        raise known_to_all(told)
    result: Result = decision
    return result


def all_or_none(
    comm: AbstractRanks, action: Callable[[], Result], *, what: str, error: type[TatamiError] = TrainingError
) -> Result:
    """What `action` returns on this rank, if it succeeds on all ranks. Collective.

    Args:
        what: what has happened where it fails, as in "the file could not be written".
        error: what to raise.

    Raises:
        TrainingError: or `error`, on all ranks: names every rank on which `action` failed, and why.
        CommError: of `action`, on this rank alone: the ranks can no longer tell each other anything.
    """
    result: Result | None = None
    problem, cause = None, None
    try:
        result = action()
    except CommError:
        raise
    except Exception as raised:
        problem, cause = _described(raised), raised
    problems = problems_of(comm, problem)
    if problems:
        told = "\n  ".join(f"on rank {rank} of {comm.size}: {each}" for rank, each in problems.items())
        if len(problems) == comm.size > 1 and len(set(problems.values())) == 1:
            told = f"on every rank: {problems[0]}"
        # What is Tatami's own says all by itself.
        raise known_to_all(error(f"{what} {told}")) from (None if isinstance(cause, TatamiError) else cause)
    return result  # type: ignore[return-value]


def problems_of(comm: AbstractRanks, problem: Trouble | None) -> dict[int, Trouble]:
    """By rank, the problem of each rank that has one; the same on all ranks. Collective."""
    return {rank: each for rank, each in enumerate(comm.allgather_object(problem)) if each is not None}


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

    def __init__(self, comm: AbstractRanks, *, only: type[Exception] = Exception) -> None:
        self._comm, self._only = comm, only

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if isinstance(error, self._only):
            announce(self._comm, error)


def announce(comm: AbstractRanks, error: Exception) -> None:
    """End the waits of the other ranks of `comm` with `error`, which ends what this rank does, unless they know it."""
    refusals = comm.refusals
    if refusals is None or comm.size == 1 or comm.changes or comm.is_closed or isinstance(error, _CONSEQUENCES):
        return
    cause: BaseException | None = error
    while cause is not None:
        if is_known_to_all(cause):
            return
        cause = cause.__cause__ or cause.__context__
    refusals.note(error, comm.lineage)
    known_to_all(error)


_BY_ALL = " must be called by all ranks: is it inside of `if comm.rank == 0`?"


@contextmanager
def called_by_all(call: str) -> Iterator[None]:
    """Note what to do where ranks are missing in a collective; `call` is what the user's program calls. Also a decorator."""
    try:
        yield
    except (CommTimeoutError, RankDiedError) as error:
        # Of calls inside of each other the user's is the outermost.
        error.__notes__ = [note for note in getattr(error, "__notes__", ()) if not note.endswith(_BY_ALL)]
        error.add_note(call + _BY_ALL)
        raise


def is_due(number: int) -> bool:
    """Whether a `Watch` compares in pass `number`, from 1 on."""
    return number % EVERY == 0 or number & (number - 1) == 0


class Watch:
    """Compares facts of all ranks now and then: in pass 1, 2, 4, 8, ... and every 64th, by one small message of each rank.

    Args:
        comm: all ranks, which pass equally often.
        always: compare in every pass.
    """

    def __init__(self, comm: AbstractRanks, *, always: bool = False) -> None:
        self._comm, self._always = comm, always
        self._facts: list[tuple[Callable[[], Any], Callable[[list[Any]], None]]] = []
        self._num_passes = 0
        self.is_due = comm.size > 1
        """Whether the ranks compare in the next pass; the same on all ranks."""

    def add(self, own: Callable[[], Any], refuse: Callable[[list[Any]], None]) -> None:
        """Compare one more fact.

        Args:
            own: returns what is compared of this rank, which can be pickled.
            refuse: takes what all ranks returned, in their order, which is the same on all ranks; raises on all or on none.
        """
        self._facts.append((own, refuse))

    def compare(self) -> None:
        """Compare all facts now. Collective. Raises what their `refuse` raise."""
        every_rank = self._comm.allgather_object([own() for own, _ in self._facts])
        for number, (_, refuse) in enumerate(self._facts):
            try:
                refuse([facts[number] for facts in every_rank])
            except TatamiError as error:
                raise known_to_all(error)  # noqa: B904 -- the same error

    def begin_pass(self) -> None:
        """Compare where that is due. Collective."""
        if self.is_due:
            self.compare()
        self.end_pass()

    def end_pass(self) -> None:
        """A pass has begun; what comes now belongs to the next one."""
        self._num_passes += 1
        self.is_due = self._comm.size > 1 and (self._always or is_due(self._num_passes + 1))


def _told(fact: tuple[str, object] | None) -> str:
    return "nothing more" if fact is None else f"{fact[0]} {fact[1]}"


def _described(error: Exception) -> str:
    """Errors of Tatami's and of the operating system say what they are; of others, the class says more than the text."""
    return str(error) if isinstance(error, TatamiError | OSError) else f"{type(error).__name__}: {error}"


def _portable(error: Exception, rank: int) -> Exception:
    """`error` as other ranks can raise it."""
    if isinstance(error, TatamiError | OSError):
        try:
            if type(pickle.loads(pickle.dumps(error))) is type(error):
                return error
        except TypeError:  # a constructor that needs more than the message
            pass
    return TrainingError(f"rank {rank}: {_described(error)}")
