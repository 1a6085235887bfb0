"""How vectors get from one process to another: small ones lie in the message itself, large ones in Ray's object store."""

from __future__ import annotations

from typing import Any

import ray

from tatami.engine.ray_start import MESSAGE_BYTES


def posted(value: Any, *, size_bytes: int, most_bytes: int = MESSAGE_BYTES) -> Any:
    """What a message is given: the value itself up to `most_bytes`, else a reference to it, which every reader maps."""
    return value if size_bytes <= most_bytes else ray.put(value)


def is_reference(mail: Any) -> bool:
    """Whether it has to be fetched."""
    return isinstance(mail, ray.ObjectRef)


def referenced(mail: Any) -> Any:
    """A reference to it."""
    return mail if is_reference(mail) else ray.put(mail)
