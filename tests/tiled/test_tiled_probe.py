"""A probed cluster: every rank's speed, spread and share of the memory, the same on all ranks."""

from __future__ import annotations

import time

import pytest

from tatami.cluster import Cluster
from tatami.comm import AbstractCommunicator
from tatami.testing.slowdown import Slowdown
from tatami.testing.worlds import World
from tatami.tiled.probe import probe
from tatami.workload import Workload

WORKLOAD = Workload.mlp(20, 16, 5, samples=64)


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_get_the_same_cluster(world: World) -> None:
    def body(comm: AbstractCommunicator) -> Cluster:
        cluster = probe(WORKLOAD, comm, repeats=2)
        assert comm.allgather_object(cluster) == [cluster] * comm.size
        return cluster

    cluster = world(body)[0]
    assert [processor.name for processor in cluster.processors] == [f"p{rank}" for rank in range(world.size)]
    memory = [processor.memory_bytes for processor in cluster.processors]
    assert all(share is not None and share % 2**20 == 0 and share == memory[0] for share in memory)
    assert cluster.links == {}


@pytest.mark.ranks(2)
def test_a_slowed_rank_is_measured_as_slow(world: World) -> None:
    def body(comm: AbstractCommunicator) -> Cluster:
        return probe(WORKLOAD, comm, repeats=3, pace=Slowdown(1.0 + 19.0 * comm.rank, cpu_s=time.thread_time))

    fast, slow = world(body)[0].processors
    assert slow.speed < fast.speed / 3
