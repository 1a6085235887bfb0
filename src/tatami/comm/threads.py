"""Ranks as threads of one process: for tests and notebooks, and for the single rank of a script started by itself."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import TypeVar

import torch

from tatami.clock import Clock, SystemClock
from tatami.comm.ranks import DEFAULT_TIMEOUT_S
from tatami.comm.thread_world import ThreadCommunicator, ThreadWorld
from tatami.errors import InputError

Result = TypeVar("Result")

_this_thread = threading.local()


def thread_communicator() -> ThreadCommunicator | None:
    """The communicator of the rank that runs in this thread; None outside of `run_threads`."""
    return getattr(_this_thread, "communicator", None)


def run_threads(
    body: Callable[[ThreadCommunicator], Result], *, size: int, timeout_s: float = DEFAULT_TIMEOUT_S, clock: Clock | None = None
) -> list[Result]:
    """Run `body` on `size` ranks, each a thread, and return what they returned, in the order of the ranks.

    Raises:
        InputError: `size` is less than 1.
        Exception: what the first rank that failed raised, with a note that names the rank.
    """
    if size < 1:
        raise InputError(f"a world needs at least 1 rank, not {size}")
    world = ThreadWorld(size, clock or SystemClock())
    communicators = [ThreadCommunicator.of_world(world, rank, timeout_s=timeout_s) for rank in range(size)]
    results: dict[int, Result] = {}

    def run_rank(communicator: ThreadCommunicator) -> None:
        _this_thread.communicator = communicator
        # Torch has one thread for the backward passes of a device: a rank that waits there for another rank of the same card
        # would keep that one from coming. So each goes backward in its own thread, as on a CPU.
        torch.autograd.set_multithreading_enabled(False)
        try:
            results[communicator.rank] = body(communicator)
            world.end(communicator.rank, None)
        except BaseException as error:
            world.end(communicator.rank, error)

    threads_before = torch.get_num_threads()
    torch.set_num_threads(max(1, len(os.sched_getaffinity(0)) // size))
    try:
        threads = [
            threading.Thread(target=run_rank, args=(each,), name=f"rank-{each.rank}", daemon=True) for each in communicators
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        torch.set_num_threads(threads_before)
    if world.first_failed is not None:
        error = world.ended[world.first_failed]
        assert error is not None
        error.add_note(f"on rank {world.first_failed} of {size} (threads)")
        raise error
    return [results[rank] for rank in range(size)]


def single_communicator(*, timeout_s: float = DEFAULT_TIMEOUT_S) -> ThreadCommunicator:
    """A world of one rank: the caller."""
    return ThreadCommunicator.of_world(ThreadWorld(1, SystemClock()), 0, timeout_s=timeout_s)
