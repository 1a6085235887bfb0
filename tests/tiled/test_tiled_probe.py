"""A probed cluster: every rank's speed, spread and share of the memory, the same on all ranks."""

import warnings

import pytest
import torch
from torch import nn

from tatami.cluster import NETWORK_LINK, Cluster
from tatami.comm import AbstractCommunicator
from tatami.errors import PlanError
from tatami.model.cluster_probe import probe
from tatami.testing.slowdown import Slowdown
from tatami.testing.worlds import World
from tatami.train import tile
from tatami.workload import Workload
from tiled_rig import Placed

WORKLOAD = Workload.mlp(20, 16, 5, samples=64)


@pytest.mark.ranks(1, 2, 3)
def test_all_ranks_get_the_same_cluster(world: World) -> None:
    def body(comm: AbstractCommunicator) -> Cluster:
        before = torch.get_rng_state()
        cluster = probe(WORKLOAD, comm, repeats=2)
        assert torch.equal(torch.get_rng_state(), before), "what the program draws next is what it would have drawn"
        assert comm.allgather_object(cluster) == [cluster] * comm.size
        return cluster

    cluster = world(body)[0]
    assert [processor.name for processor in cluster.processors] == [f"p{rank}" for rank in range(world.size)]
    memory = [processor.memory_bytes for processor in cluster.processors]
    assert all(share is not None and share % 2**20 == 0 and share == memory[0] for share in memory)
    assert cluster.links == {}


class Machine:
    """A clock, and the CPU time of a thread on it: a pass takes 1 s of both, whatever else this machine does."""

    def __init__(self, factor: float) -> None:
        self.time_s = self.used_s = 0.0
        self._slowdown = Slowdown(factor, clock=self, cpu_s=lambda: self.used_s)

    def now_s(self) -> float:
        return self.time_s

    def sleep(self, duration_s: float) -> None:
        self.time_s += duration_s

    def begin(self) -> None:
        self._slowdown.begin()

    def end(self) -> None:
        self.time_s += 1.0
        self.used_s += 1.0
        self._slowdown.end()


@pytest.mark.ranks(2)
def test_a_slowed_rank_is_measured_as_slow(world: World) -> None:
    def body(comm: AbstractCommunicator) -> Cluster:
        machine = Machine(1.0 + 19.0 * comm.rank)
        return probe(WORKLOAD, comm, repeats=3, clock=machine, pace=machine, cpu_s=lambda: machine.used_s)

    fast, slow = world(body)[0].processors
    assert slow.speed == pytest.approx(fast.speed / 20, rel=1e-3)  # figures are rounded
    assert (slow.spread, fast.spread) == (0.0, 0.0)
    # However many blocks it has, and whatever it sends, an iteration takes 1 s.
    assert (fast.step_s, slow.step_s) == pytest.approx((1.0, 20.0), rel=1e-3)
    assert [(each.call_s, each.message_s) for each in (fast, slow)] == [(0.0, 0.0)] * 2


@pytest.mark.ranks(2, 3, 4)
def test_between_hosts_it_is_measured_what_messages_cost_and_within_one_nothing_is(world: World) -> None:
    def body(comm: AbstractCommunicator) -> tuple[Cluster, Cluster, Cluster]:
        apart = Placed(comm, hosts=tuple(f"host-{rank}" for rank in range(comm.size)))
        found = []
        for ranks, given in ((apart, None), (comm, None), (apart, [1.0] * comm.size)):
            network = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 8))
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # which of them are worth their messages depends on the machine
                model = tile(network, ranks, batch_size=64, speeds=given or "measure", reduction="mean", quiet=True)
            found.append(model.cluster)
        return found[0], found[1], found[2]

    results = world(body)
    assert all(result == results[0] for result in results)
    apart, together, given = results[0]
    names = tuple(f"host-{rank}" for rank in range(world.size))
    assert tuple(each.host for each in apart.processors) == tuple(each.host for each in given.processors) == names
    assert all(each.message_s > 0 for each in apart.processors)
    assert apart.network != NETWORK_LINK
    assert not together.messages_known
    assert not given.messages_known
    assert given.network == NETWORK_LINK


@pytest.mark.ranks(1)
def test_a_net_that_the_workload_is_not_of_is_refused_before_anything_is_measured(comm: AbstractCommunicator) -> None:
    with pytest.raises(PlanError, match="net='20-17-5' is not what the workload is of"):
        probe(WORKLOAD, comm, net="20-17-5")
    with pytest.raises(PlanError, match="has no hidden layer"):
        probe(WORKLOAD, comm, net="20-17")
