"""The sum over a replica of several hosts: what an all-reduce gives, the same bits everywhere."""

import pytest
import torch

from tatami.comm.base import AbstractCommunicator
from tatami.runtime.vector_sum import VectorSum
from tatami.tiling.traffic import sum_algorithm

pytestmark = pytest.mark.mpi


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("size", [0, 1, 3, 1000, 100_003])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_sums_are_those_of_all_ranks_and_the_same_bits_on_each(
    comm: AbstractCommunicator, size: int, dtype: torch.dtype
) -> None:
    replica = VectorSum(comm)
    for turn in range(3):  # rooms are used again
        vectors = [
            torch.rand(size, generator=torch.Generator().manual_seed(10 * turn + rank), dtype=dtype)
            for rank in range(comm.size)
        ]
        mine = vectors[comm.rank].clone()
        replica.sum_(mine)
        expected = vectors[0].clone()
        for vector in vectors[1:]:
            expected += vector
        if sum_algorithm(comm.hosts) == "native":  # a library adds up in an order of its own, here (0 + 1) + (2 + 3)
            ulp = torch.finfo(dtype).eps
            torch.testing.assert_close(mine, expected, rtol=comm.size * ulp, atol=0)
        else:
            assert torch.equal(mine, expected)
        assert all(torch.equal(mine, other) for other in comm.allgather_object(mine))
