"""Collectives made of messages over TCP: in one go and in pieces, in several rounds, at once, and where ranks disagree."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import count
from typing import Any, cast

import pytest
import torch
import torch.distributed as dist
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tatami.comm import Op, mesh_collectives
from tatami.comm.tcp import TcpCommunicator
from tatami.errors import CommError, CommTimeoutError

pytestmark = pytest.mark.skipif(not dist.is_available(), reason="this build of torch has no torch.distributed")
_LIMIT_S = 60.0
_names = count()


@contextmanager
def _ranks(size: int) -> Iterator[Callable[[Callable[[TcpCommunicator], Any]], list[Any]]]:
    """Ranks as threads of this process, over TCP: what each returns."""
    store, name = cast(Any, dist).HashStore(), f"ranks {next(_names)}"
    with ThreadPoolExecutor(size) as pool:
        comms = list(
            pool.map(lambda rank: TcpCommunicator(store, rank=rank, size=size, name=name, timeout_s=_LIMIT_S), range(size))
        )
        try:
            yield lambda body: list(pool.map(body, comms))
        finally:
            for comm in comms:
                comm.close()


def _values(rank: int, num: int, dtype: torch.dtype) -> torch.Tensor:
    return (torch.arange(num) * 7 + rank * 13).remainder(101).to(dtype)


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    size=st.integers(1, 4),
    num=st.integers(0, 70),
    dtype=st.sampled_from([torch.float64, torch.int32, torch.uint8]),
    op=st.sampled_from(list(Op)),
    root=st.integers(0, 3),
)
def test_sums_and_broadcasts_in_pieces(size: int, num: int, dtype: torch.dtype, op: Op, root: int) -> None:
    root %= size
    given = [_values(rank, num, dtype) for rank in range(size)]
    stacked = torch.stack(given)
    expected = {Op.SUM: stacked.sum(0).to(dtype), Op.MAX: stacked.amax(0), Op.MIN: stacked.amin(0)}[op]

    def body(comm: TcpCommunicator) -> None:
        mine = given[comm.rank].clone()
        comm.allreduce(mine, op=op)
        assert torch.equal(mine, expected)
        mine = given[comm.rank].clone()
        comm.reduce(mine, root=root, op=op)
        assert torch.equal(mine, expected if comm.rank == root else given[comm.rank])
        mine = given[comm.rank].clone()
        comm.bcast(mine, root=root)
        assert torch.equal(mine, given[root])
        counts = [(num + comm.size - 1 - rank) // comm.size for rank in range(comm.size)]
        part = torch.empty(counts[comm.rank], dtype=dtype)
        comm.reduce_scatter(given[comm.rank], part, counts=counts, op=op)
        assert torch.equal(part, torch.split(expected, counts)[comm.rank])

    with pytest.MonkeyPatch.context() as patch, _ranks(size) as run:
        patch.setattr(mesh_collectives, "_FEW_BYTES", 16)
        patch.setattr(mesh_collectives, "_ROOM_BYTES", 64)
        run(body)


def test_many_megabytes() -> None:
    num = 3_000_001

    def body(comm: TcpCommunicator) -> None:
        mine = _values(comm.rank, num, torch.float64)
        comm.allreduce(mine)
        assert torch.equal(mine, torch.stack([_values(rank, num, torch.float64) for rank in range(comm.size)]).sum(0))

    with _ranks(3) as run:
        run(body)


def test_collectives_that_are_under_way_together_end_in_any_order() -> None:
    def body(comm: TcpCommunicator) -> None:
        vectors = [torch.full((num,), float(comm.rank + at)) for at, num in enumerate((200_000, 5, 90_000))]
        requests = [comm.iallreduce(vector) for vector in vectors]
        for request in requests if comm.rank else reversed(requests):
            request.wait()
        for at, vector in enumerate(vectors):
            assert torch.equal(vector, torch.full_like(vector, 3.0 * at + 3.0))

    with _ranks(3) as run:
        run(body)


def test_ranks_that_give_different_sizes_are_told() -> None:
    def body(comm: TcpCommunicator) -> str:
        with pytest.raises(CommError) as raised:
            comm.allreduce(torch.zeros(3 + comm.rank))
        return str(raised.value)

    with _ranks(2) as run:
        few, many = run(body)
    assert few.startswith("allreduce on rank 0 of 2: 16 bytes came where 12 were expected; shapes and dtypes must agree")
    assert many.startswith("allreduce on rank 1 of 2: 12 bytes came where 16 were expected; shapes and dtypes must agree")


def test_who_did_not_join_is_named() -> None:
    def body(comm: TcpCommunicator) -> str:
        if comm.rank == 1:
            return ""
        comm.timeout_s = 0.2
        with pytest.raises(CommTimeoutError) as raised:
            comm.allreduce(torch.ones(200_000))
        return str(raised.value)

    with _ranks(3) as run:
        first, _, last = run(body)
    assert first.startswith("allreduce on rank 0 of 3 timed out after 0.2 s: rank 1 did not join.")
    assert last.startswith("allreduce on rank 2 of 3 timed out after 0.2 s: rank 1 did not join.")


def test_a_part_is_closed_at_once() -> None:
    def body(comm: TcpCommunicator) -> None:
        for _ in range(20):
            part = comm.split(0)
            assert part is not None
            part.close()
        assert comm.allgather_object(comm.rank) == [0, 1, 2]

    with _ranks(3) as run:
        run(body)
