"""Tensors of one kind arrive in the order in which they were sent, whenever they come."""

import itertools
from collections.abc import Callable
from typing import Any

import torch

from tatami.stages.courier import Courier

TAG = 3
FIRST, SECOND = torch.tensor([1.0, 1.0]), torch.tensor([2.0, 2.0])


class Request:
    """A receive; its message is one that was sent before it was posted, and may come while others are looked at."""

    def __init__(self, come: Callable[[], bool]) -> None:
        self._come = come

    def test(self) -> bool:
        return self._come()


class Network:
    """Hands messages of a tag to the receives of this tag in their order; message n has come at look `comes[n]`."""

    rank, timeout_s, device = 0, 1.0, None

    def __init__(self, comes: tuple[int, ...]) -> None:
        self.looks = 0
        self._comes = comes
        self._posted: dict[int, int] = {}

    def irecv(self, out: torch.Tensor, source: int, *, tag: int) -> Request:  # noqa: ARG002
        place = self._posted.get(tag, 0)
        self._posted[tag] = place + 1
        is_header = tag % 2 == 0

        def come() -> bool:
            self.looks += 1
            if self.looks <= self._comes[2 * place + (not is_header)]:
                return False
            tensor = (FIRST, SECOND)[place]
            out.copy_(torch.tensor([1, 1, 2, *[0] * 7]) if is_header else tensor)
            return True

        return Request(come)


def test_a_tensor_that_comes_during_a_look_is_not_taken_for_the_one_before_it() -> None:
    for comes in itertools.product(range(4), repeat=4):
        network: Any = Network(comes)
        courier = Courier(network)
        courier._wake = lambda: None  # type: ignore[method-assign]  # this test looks, not a thread
        arrivals = [courier.expect(1, tag=TAG) for _ in range(2)]
        for _ in range(20):
            courier._look()
        for arrival, tensor in zip(arrivals, (FIRST, SECOND), strict=True):
            assert arrival.tensor is not None
            assert torch.equal(arrival.tensor, tensor), comes
