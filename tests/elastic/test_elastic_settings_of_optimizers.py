"""Ranks whose optimizers have come apart are told so; and what a loop says where ranks do not leave."""

import os
import signal
import time
from collections.abc import Iterator

import pytest
import torch
from torch import nn

import tatami
from tatami.comm import AbstractCommunicator, run_threads
from tatami.elastic.steps import Steps, steps
from tatami.engine.ray_start import uninterrupted
from tatami.errors import InputError


def loops(*rates: float) -> list[Steps]:
    def body(comm: AbstractCommunicator) -> list[Steps]:
        found = []
        for rate in rates:
            model = tatami.tile(nn.Linear(2, 2), comm, batch_size=4, speeds="equal", reduction="mean", quiet=True)
            found.append(steps(model, torch.optim.SGD(model.parameters(), lr=rate), count=1))
        return found

    return run_threads(body, size=1)[0]


def test_settings_that_differ_are_named() -> None:
    alike, same, other = loops(0.1, 0.1, 0.2)
    both = [a + b for a, b in zip(alike.local_settings(), same.local_settings(), strict=True)]
    alike.check_settings(both)
    apart = [a + b for a, b in zip(alike.local_settings(), other.local_settings(), strict=True)]
    for loop, rate in ((alike, 0.1), (other, 0.2)):
        with pytest.raises(InputError, match=rf"different settings; those of p0 are lr={rate}, .*carry="):
            loop.check_settings(apart)


def test_leaving_where_ranks_do_not_leave_warns() -> None:
    (loop,) = loops(0.1)
    with pytest.warns(UserWarning, match=r"loop.leave\(\) does nothing here"):
        loop.leave()


@pytest.fixture
def _is_interruptible() -> Iterator[None]:
    """What runs in the background of a shell ignores it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_is_interruptible")
def test_an_interrupt_waits_for_the_end() -> None:
    ray = pytest.importorskip("ray")
    went_on = []

    def interrupted() -> None:
        with uninterrupted(ray):
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.05)
            went_on.append(True)

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert went_on
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
