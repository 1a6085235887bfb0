"""Calls to actors that are under way, what is done when each of them ends, and how vectors get there.

Small vectors are in the message itself, large ones in Ray's object store.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import ray
from ray.exceptions import (
    ActorUnschedulableError,
    ObjectLostError,
    ObjectStoreFullError,
    OutOfDiskError,
    RayActorError,
    RayError,
    RayTaskError,
)

from tatami.engine.ray_start import MESSAGE_BYTES
from tatami.errors import InputError, TrainingError

Handler = Callable[[Any], None]


def ignore(_: Any) -> None:
    """What follows when an actor is gone, which its watch reports: nothing."""


class Calls:
    """Waits for calls; each ends in one of its two handlers, in the thread that waits."""

    def __init__(self) -> None:
        self._pending: dict[Any, tuple[Handler, Handler]] = {}

    def add(self, reference: Any, *, done: Handler, failed: Handler = ignore) -> None:
        """Call `done` with the value, or `failed` with the error where the process or its node is gone."""
        self._pending[reference] = (done, failed)

    def clear(self) -> None:
        self._pending.clear()

    def wait(self, *, timeout_s: float, is_over: Callable[[], bool]) -> None:
        """Hand on what has ended, waiting for at most `timeout_s` where nothing has.

        Raises:
            TrainingError: the user's code failed; InputError and its kin, as the process raised them.
        """
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        if ready:
            ready, _ = ray.wait(list(self._pending), num_returns=len(self._pending), timeout=0)
        for reference in ready:
            done, failed = self._pending.pop(reference, (ignore, ignore))
            if is_over():
                return
            try:
                value = ray.get(reference)
            except (RayActorError, ActorUnschedulableError, ObjectLostError) as error:
                failed(error)
            except RayTaskError as error:
                is_full = isinstance(error.cause, ObjectStoreFullError | OutOfDiskError)
                if isinstance(error.cause, RayError) and not is_full:  # of what it was given: another process is gone
                    failed(error)
                else:
                    raise _of_user(error) from error
            else:
                done(value)


def _of_user(error: RayTaskError) -> Exception:
    cause = error.cause
    if isinstance(cause, InputError):
        return type(cause)(str(cause))
    return TrainingError(f"a worker failed: {type(cause).__name__}: {cause}")


def posted(value: Any, *, size_bytes: int, most_bytes: int = MESSAGE_BYTES) -> Any:
    """What a message is given: the value itself up to `most_bytes`, else a reference to it, which every reader maps."""
    return value if size_bytes <= most_bytes else ray.put(value)


def is_reference(mail: Any) -> bool:
    """Whether it has to be fetched."""
    return isinstance(mail, ray.ObjectRef)


def referenced(mail: Any) -> Any:
    """A reference to it."""
    return mail if is_reference(mail) else ray.put(mail)
