"""Messages that have come and that were not asked for yet, by their identity; there may not be any number of them."""

from __future__ import annotations

from collections import deque

import torch

from tatami.functions.message import Head, Label, MessageKind
from tatami.units import format_size

MOST_KEPT = 10_000
MOST_KEPT_BYTES = 4 * 1024**3

Key = tuple[int, int, int]
"""Kind, tag, number: what a message is asked for by. The tag of a collective or an answer is 0."""


class ReceivedMessage:
    """What came."""

    __slots__ = ("head", "label", "peer", "tensors")

    def __init__(self, peer: int, head: Head, label: Label, tensors: list[torch.Tensor]) -> None:
        self.peer = peer
        self.head = head
        self.label = label
        self.tensors = tensors

    @property
    def key(self) -> Key:
        head = self.head
        return head.kind, head.tag if head.kind == MessageKind.POINT_TO_POINT else 0, head.number

    @property
    def size_bytes(self) -> int:
        """Size of its tensors in bytes."""
        return sum(self.label.content.sizes)


class Inbox:
    """What one rank keeps.

    Attributes:
        by_peer: for each rank its messages, those with the same key in the order in which they came.
    """

    def __init__(self, *, rank: int, size: int) -> None:
        self.by_peer: list[dict[Key, deque[ReceivedMessage]]] = [{} for _ in range(size)]
        self._rank = rank
        self._num_kept = 0
        self._kept_bytes = 0

    @property
    def is_full(self) -> bool:
        """Whether one more would be too many."""
        return self._num_kept >= MOST_KEPT or self._kept_bytes >= MOST_KEPT_BYTES

    def put(self, message: ReceivedMessage) -> str | None:
        """Keep `message`; returns what is wrong where there are too many now."""
        self.by_peer[message.peer].setdefault(message.key, deque()).append(message)
        self._num_kept += 1
        self._kept_bytes += message.size_bytes
        if self._num_kept <= MOST_KEPT and self._kept_bytes <= MOST_KEPT_BYTES:
            return None
        return (
            f"rank {self._rank} keeps {self._num_kept} messages of {format_size(self._kept_bytes)} that have come and that it "
            f"has not asked for, the last one from rank {message.peer}, sent at {message.label.location.decode()}. Is every "
            "send received, and does every rank run backward?"
        )

    def pop(self, peer: int, key: Key) -> ReceivedMessage:
        """The first message of this key, of which there is one."""
        kept = self.by_peer[peer]
        queue = kept[key]
        message = queue.popleft()
        if not queue:
            del kept[key]
        self._num_kept -= 1
        self._kept_bytes -= message.size_bytes
        return message
