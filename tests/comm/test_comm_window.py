"""Windows: what is put, got, accumulated and shared arrives, under every synchronisation; and what is refused."""

import threading

import pytest
import torch

from tatami.clock import SystemClock
from tatami.collective import Sync
from tatami.comm import AbstractCommunicator, Op
from tatami.comm.memory_barrier import CounterBarrier
from tatami.comm.session import Watchdog
from tatami.comm.wait import wait_policy
from tatami.comm.window import AbstractWindow
from tatami.errors import ClosedError, CommTimeoutError, InputError


def epoch(window: AbstractWindow, comm: AbstractCommunicator, *, put: object) -> None:
    """One epoch in which every rank puts to the next one."""
    after, before = (comm.rank + 1) % comm.size, (comm.rank - 1) % comm.size
    assert callable(put)
    window.enter(range(comm.size))
    window.open(sources=[before], targets=[after])
    put(after)
    window.end(sources=[before], targets=[after])


@pytest.mark.parametrize("sync", [Sync.FENCE, Sync.PSCW, Sync.LOCK], ids=lambda sync: sync.value)
@pytest.mark.ranks(2, 3, 4)
def test_puts_gets_and_accumulates_arrive(comm: AbstractCommunicator, sync: Sync) -> None:
    before, after = (comm.rank - 1) % comm.size, (comm.rank + 1) % comm.size
    window = comm.window(8, torch.float32, sync=sync)
    assert window.tensor.tolist() == [0.0] * 8
    for run in range(3):
        values = torch.full((3,), 10.0 * run + comm.rank)
        epoch(window, comm, put=lambda to, values=values: window.put(values, to, start=2))
        assert window.tensor.tolist() == [0, 0, *[10.0 * run + before] * 3, 0, 0, 0]
        comm.barrier()
    window.tensor.fill_(100.0)
    comm.barrier()
    added = torch.full((2,), comm.rank + 1.0)
    epoch(window, comm, put=lambda to: window.accumulate(added, to, start=6, op=Op.SUM))
    assert window.tensor.tolist() == [100.0] * 6 + [101.0 + before] * 2
    comm.barrier()
    got = torch.empty(2)
    epoch(window, comm, put=lambda to: window.get(got, to, start=6))
    assert got.tolist() == [101.0 + comm.rank] * 2, after
    comm.barrier()
    window.close()


@pytest.mark.ranks(2)
def test_a_window_over_memory_there_is(comm: AbstractCommunicator) -> None:
    memory = torch.arange(6.0)
    window = comm.window(6, torch.float32, sync=Sync.FENCE, memory=memory)
    assert window.tensor.data_ptr() == memory.data_ptr()
    epoch(window, comm, put=lambda to: window.put(torch.tensor([7.0 + comm.rank]), to, start=0))
    assert memory.tolist() == [8.0 - comm.rank, 1, 2, 3, 4, 5]
    window.close()


@pytest.mark.ranks(1, 2, 3, 4)
def test_shared_windows_show_everyones_tensor(comm: AbstractCommunicator) -> None:
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        window = comm.shared_window(1001, dtype)
        for run in range(20):
            window.tensor.fill_(comm.rank + run)
            window.barrier()
            assert [int(window.of(rank)[1000]) for rank in range(comm.size)] == [rank + run for rank in range(comm.size)]
            window.barrier()
        window.close()
    empty = comm.shared_window(0, torch.float32)
    assert empty.of(comm.size - 1).shape == (0,)
    empty.close()


@pytest.mark.ranks(2)
def test_what_a_window_refuses(comm: AbstractCommunicator) -> None:
    with pytest.raises(InputError, match="0 or more elements, not -1"):
        comm.window(-1, torch.float32)
    with pytest.raises(InputError, match="'barrier' does not synchronise puts; choose one of 'fence', 'pscw', 'lock'"):
        comm.window(4, torch.float32, sync=Sync.BARRIER)
    window = comm.window(4, torch.float32, sync=Sync.PSCW)
    with pytest.raises(InputError, match="no rank 2"):
        window.put(torch.ones(1), 2, start=0)
    with pytest.raises(InputError, match="elements 3 to 5 are not all among the 4"):
        window.put(torch.ones(2), 0, start=3)
    with pytest.raises(InputError, match=r"holds torch.float32, the tensor is torch.float64"):
        window.get(torch.ones(2, dtype=torch.float64), 0, start=0)
    with pytest.raises(InputError, match="contiguous"):
        window.put(torch.ones(4)[::2], 0, start=0)
    window.close()
    with pytest.raises(ClosedError, match="closed"):
        window.put(torch.ones(1), 0, start=0)


@pytest.mark.ranks(2)
def test_a_source_that_never_completes_is_named(comm: AbstractCommunicator) -> None:
    impatient = comm.split(0)
    assert impatient is not None
    impatient.timeout_s = 5.0  # the window is made within it, too
    window = impatient.window(4, torch.float32, sync=Sync.PSCW)
    if comm.rank == 0:
        with pytest.raises(CommTimeoutError, match="rank 1"):
            window.open(sources=[], targets=[1])
    comm.barrier()


def test_a_counter_barrier_names_who_did_not_come() -> None:
    memory = memoryview(bytearray(24)).cast("q")
    counters = [memory[rank : rank + 1] for rank in range(3)]
    timeout_s = 800.0
    barriers = [
        CounterBarrier(
            counters,
            rank=rank,
            policy=wait_policy(ranks_on_host=3, cores=1, environ={}),
            timeout_s=lambda: timeout_s,
            clock=SystemClock(),
            visible=lambda: None,
            polls=0,
        )
        for rank in range(3)
    ]
    threads = [threading.Thread(target=barrier.wait) for barrier in barriers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert memory.tolist() == [1, 1, 1]
    timeout_s = 0.2
    with pytest.raises(CommTimeoutError, match=r"shared barrier on rank 1 of 3 timed out after .* ranks 0, 2 did not join"):
        barriers[1].wait()


def test_the_watchdog_ends_what_does_not_return_and_nothing_else() -> None:
    said: list[str] = []
    ended = threading.Event()

    def stop(text: str) -> None:
        said.append(text)
        ended.set()

    dog = Watchdog(stop=stop)
    with dog.watch("a quick call", timeout_s=100.0):
        pass
    with dog.watch("flush towards rank 3", timeout_s=0.05, findings=lambda: "(Rank 3 computes.)"):
        assert ended.wait(800)
    assert said == ["flush towards rank 3 did not return within 0.05 s; all ranks are stopped (Rank 3 computes.)"]
