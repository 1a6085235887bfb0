"""JSON under a checksum of all that it says, the order of its parts among it: what was changed afterwards is not taken."""

from __future__ import annotations

import hashlib
import json
from typing import Any

_SUM, _CONTENT = "sha256", "content"


def seal(content: dict[str, Any]) -> str:
    """The text of `content`, with its checksum."""
    return json.dumps({_SUM: _checksum(content), _CONTENT: content}, indent=1) + "\n"


def unseal(text: str) -> dict[str, Any]:
    """What `seal` was given.

    Raises:
        ValueError: the text was not made by `seal`, or was changed since.
    """
    sealed = json.loads(text)
    if not isinstance(sealed, dict) or set(sealed) != {_SUM, _CONTENT} or not isinstance(sealed[_CONTENT], dict):
        raise ValueError(f"it must hold {_SUM} and {_CONTENT}, and nothing else")
    content: dict[str, Any] = sealed[_CONTENT]
    if sealed[_SUM] != _checksum(content):
        raise ValueError("its checksum is not that of its content, which was changed since it was written")
    return content


def _checksum(content: dict[str, Any]) -> str:
    # Not with sorted keys: the shards of a checkpoint are put together in the order in which it names them.
    return hashlib.sha256(json.dumps(content, separators=(",", ":")).encode()).hexdigest()
