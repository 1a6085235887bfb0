"""A process of Ray's is of no use without Ray's own process on its node, and ends with it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from ray.exceptions import ObjectStoreFullError, OutOfDiskError, RayError


@contextmanager
def tethered() -> Iterator[None]:
    """Around calls of Ray, and nothing of the user's: where they fail, as this node is dying, end the process.

    Ray ends it too, a moment later. Until then a call gives "connection reset by peer" and the like, which must not be
    told as an error of the user's code: that would stop the run, and a process that is gone does not.

    Raises:
        ObjectStoreFullError, OutOfDiskError: of Ray; these do not go away with the process.
    """
    try:
        yield
    except (ObjectStoreFullError, OutOfDiskError):
        raise
    except (RayError, OSError):
        os._exit(1)
