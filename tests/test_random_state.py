"""Taking the random state of torch, where ranks are threads."""

from __future__ import annotations

import gc

import torch

from tatami.random_state import kept_torch_state, torch_state


class Watched(torch.Generator):
    """Says whether garbage is collected when it gives its state."""

    collects: list[bool]

    def get_state(self) -> torch.Tensor:
        self.collects.append(gc.isenabled())
        return super().get_state()


def test_no_garbage_is_collected_while_torch_holds_a_generator() -> None:
    generator = Watched()
    generator.collects = []
    assert torch.equal(torch_state(generator), generator.get_state())
    assert generator.collects == [False, True]
    assert torch.equal(torch_state(), torch.get_rng_state())
    gc.disable()
    try:
        torch_state()
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_what_is_drawn_meanwhile_is_as_if_it_were_not() -> None:
    before = torch_state()
    with kept_torch_state():
        torch.rand(3)
    assert torch.equal(torch_state(), before)
