"""Every error Tatami raises on purpose.

Each says what happened, where (rank, peer, operation), the value seen, and what to do about it.

    TatamiError
    ├── InputError (ValueError)                 refused at the boundary, before anything starts or is written
    │   ├── ClusterError                        a cluster description; carries all its problems at once
    │   ├── PlanError                           invalid speeds, sizes or tilings
    │   │   └── MemoryLackError (MemoryError)   a network that does not fit; says who lacks how much, and what would do
    │   ├── ScheduleError                       a collective that cannot be built, or would not deliver
    │   ├── ModelError                          a network that cannot be tiled, or a random layer refused by name
    │   ├── DataError                           a data file; names the line
    │   ├── CheckpointError                     weights of another network, a damaged file
    │   ├── NotGivenError (AttributeError)      an attribute of what was made without the arguments that it follows from
    │   └── OutputExistsError (FileExistsError) an output file that would be overwritten
    ├── MissingExtraError (ImportError)         an optional dependency; names the pip command
    ├── CommError (RuntimeError)                bytes did not move
    │   ├── CommTimeoutError (TimeoutError)     who waited for whom, in what, for how long
    │   ├── RankDiedError (ConnectionError)     a peer ended before its part was done
    │   └── ClosedError                         an operation on a communicator that was closed
    ├── LabError (RuntimeError)                 a cluster on one machine could not be built, changed or taken away
    ├── SimulationError (RuntimeError)          a rehearsal that ended before its end; says what its process wrote last
    └── TrainingError (RuntimeError)            a run that cannot go on
        └── NotFiniteError (ArithmeticError)    a loss that is NaN or infinite: which rank, which iteration
"""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tatami.distribution import pip_command


def shortened(text: str, *, longest: int = 200) -> str:
    """`text` with its middle left out where it is too long to be a part of an error."""
    half = (longest - 3) // 2
    return text if len(text) <= longest else f"{text[:half]}...{text[-half:]}"


def warn(message: str) -> None:
    """A warning that points at the line of the user's program: the nearest one outside of Tatami and torch."""
    level, frame = 2, sys._getframe(1)
    while frame.f_globals.get("__name__", "").split(".")[0] in _INSIDE and frame.f_back is not None:
        level, frame = level + 1, frame.f_back
    warnings.warn(message, stacklevel=level)


_INSIDE = ("tatami", "torch", "contextlib", "functools", "copy", "pickle")


class TatamiError(Exception):
    """The root: `except tatami.errors.TatamiError` catches what Tatami raises on purpose."""

    def __reduce__(self) -> tuple[Callable[..., TatamiError], tuple[object, ...], dict[str, object]]:
        # Exceptions are pickled as a call with their message alone, which those that take more do not survive.
        return rebuilt, (type(self), self.args), dict(vars(self))


def rebuilt(kind: type[TatamiError], args: tuple[object, ...]) -> TatamiError:
    """An error of this class, made without what its constructor asks for."""
    base: Any = kind
    while base.__module__ != "builtins":  # the one whose memory it has: `kind.__new__` may be another's, and refuses
        base = base.__base__
    error: TatamiError = base.__new__(kind, *args)
    error.args = args
    return error


class InputError(TatamiError, ValueError):
    """Input refused at the boundary, before anything is started or written."""


MOST_PROBLEMS = 30
"""Most problems that one error lists."""


class ClusterError(InputError):
    """A cluster description with one or more faults; `problems` holds one line for each, led by its path."""

    def __init__(self, message: str, *, problems: Sequence[str] = ()) -> None:
        self.problems = tuple(problems)
        rest = len(self.problems) - MOST_PROBLEMS
        super().__init__(
            "\n  ".join([message, *self.problems[:MOST_PROBLEMS], *([f"... and {rest} more"] if rest > 0 else [])])
        )


class PlanError(InputError):
    """Invalid speeds, sizes or tilings."""


class MemoryLackError(PlanError, MemoryError):
    """A network that the processors' memory does not hold.

    Attributes:
        lacking_bytes: by name, how much each processor lacks that lacks any.
        fits_sharded: whether they hold it with a sharded optimizer.
    """

    def __init__(self, message: str, *, lacking_bytes: Mapping[str, float], fits_sharded: bool = False) -> None:
        self.lacking_bytes, self.fits_sharded = dict(lacking_bytes), fits_sharded
        super().__init__(message)


class ScheduleError(InputError):
    """A collective that cannot be built for these ranks, or whose schedule would not deliver; names phase, round and step."""


class ModelError(InputError):
    """A network that cannot be tiled exactly; names the layer."""


class DataError(InputError):
    """A data file that is not what it should be; names the file and the line."""


class CheckpointError(InputError):
    """Weights that do not fit this network, or a file that is damaged; names the tensor or the file."""


class NotGivenError(InputError, AttributeError):
    """An attribute that follows from arguments which were not given: `hasattr` is false."""


class OutputExistsError(InputError, FileExistsError):
    """An output file exists already and overwriting was not asked for."""


class MissingExtraError(TatamiError, ImportError):
    """An optional dependency is not installed; the message holds the pip command that installs it."""

    def __init__(self, what: str, *, extra: str, message: str | None = None) -> None:
        self.extra = extra
        super().__init__(message or f"{what} is not installed. Install it with:  {pip_command(extra)}")


class CommError(TatamiError, RuntimeError):
    """Bytes did not move between ranks."""


class CommTimeoutError(CommError, TimeoutError):
    """A wait ended without its message: says who waited for whom, in which operation, for how long."""


class RankDiedError(CommError, ConnectionError):
    """A peer ended before its part of an operation was done; `rank` is the one that died."""

    def __init__(self, message: str, *, rank: int) -> None:
        self.rank = rank
        super().__init__(message)


class ClosedError(CommError):
    """An operation on a communicator that was closed."""


class LabError(TatamiError, RuntimeError):
    """A lab that this machine cannot build, change or take away; says what is missing, and what works instead."""


class SimulationError(TatamiError, RuntimeError):
    """A rehearsal whose process died, or that took too long; the message holds what it wrote last."""


class TrainingError(TatamiError, RuntimeError):
    """A training run that cannot go on."""


class NotFiniteError(TrainingError, ArithmeticError):
    """A loss or gradient became NaN or infinite; `rank` and `iteration` (None: not counted) say where it was first seen."""

    def __init__(self, message: str, *, rank: int, iteration: int | None) -> None:
        self.rank = rank
        self.iteration = iteration
        super().__init__(message)
