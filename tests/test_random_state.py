"""Taking the random state of torch, where ranks are threads."""

from __future__ import annotations

import gc

import pytest
import torch

from tatami.random_state import kept_torch_state, torch_state


def test_no_garbage_is_collected_while_torch_holds_its_generator(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, collects = torch.get_rng_state, list[bool]()

    def watched() -> torch.Tensor:
        collects.append(gc.isenabled())
        return raw()

    monkeypatch.setattr(torch, "get_rng_state", watched)
    assert torch.equal(torch_state(), raw())
    assert gc.isenabled()
    gc.disable()
    try:
        torch_state()
        assert not gc.isenabled()
    finally:
        gc.enable()
    assert collects == [False, False]


def test_what_is_drawn_meanwhile_is_as_if_it_were_not() -> None:
    before = torch_state()
    with kept_torch_state():
        torch.rand(3)
    assert torch.equal(torch_state(), before)
