"""Links and the cost of messages, measured: between which ranks, and what comes out."""

import itertools

import pytest

from tatami.comm import AbstractCommunicator
from tatami.comm.link_probe import link_ranks, measure_links, measure_message_costs
from tatami.testing.worlds import World


def test_a_link_is_measured_between_the_first_ranks_of_its_hosts() -> None:
    assert link_ranks(("b", "a", "a", "b", "c")) == {
        ("a", "a"): (1, 2),
        ("b", "b"): (0, 3),
        ("a", "b"): (1, 0),
        ("a", "c"): (1, 4),
        ("b", "c"): (0, 4),
    }
    assert link_ranks(("a",)) == {}


@pytest.mark.ranks(1, 2, 3)
def test_every_rank_gets_the_same_links(world: World) -> None:
    def body(comm: AbstractCommunicator) -> object:
        links = measure_links(comm, small_repeats=5, large_repeats=3, large_bytes=1 << 16)
        assert comm.allgather_object(links) == [links] * comm.size
        host = comm.hosts[0]
        assert set(links) == ({(host, host)} if comm.size > 1 else set())
        for link in links.values():
            assert link.latency_s > 0
            assert link.bandwidth_bytes_per_s > 0
        return None

    world(body)


class Slow:
    """A clock on which every look is a second later: that of a rank on a thin link."""

    def __init__(self) -> None:
        self.looks = 0

    def now_s(self) -> float:
        self.looks += 1
        return float(self.looks)

    def sleep(self, duration_s: float) -> None:
        raise AssertionError(f"nothing sleeps {duration_s} s")


@pytest.mark.ranks(2, 3)
def test_a_slow_link_is_measured_by_few_messages(comm: AbstractCommunicator) -> None:
    clock = Slow()
    links = measure_links(comm, large_bytes=1 << 10, clock=clock)
    # A second for both messages of an exchange, whether they come in turn or at once.
    assert {(link.latency_s, link.bandwidth_bytes_per_s) for link in links.values()} == {(0.5, 1024 / (1 - 0.5))}
    assert clock.looks <= 2 * (1 + 2 * 4), "four exchanges of each size, of which the last says that it is the last"


class Cold(Slow):
    """A clock on which the large messages of a new connection take twice as long as later ones."""

    def now_s(self) -> float:
        self.looks += 1
        exchanges = (self.looks - (1 if self.looks < 10 else 2)) // 2  # each size begins with a look more
        return sum(([0.001] * 4 + [0.6, 0.8, 0.8, 0.8, 0.8, 0.4])[:exchanges])


@pytest.mark.ranks(2)
def test_a_new_connection_on_a_slow_link_is_not_taken_for_a_slower_one(comm: AbstractCommunicator) -> None:
    (link,) = measure_links(comm, small_repeats=1, large_repeats=3, large_bytes=1 << 20, clock=Cold()).values()
    assert link.bandwidth_bytes_per_s == pytest.approx((1 << 20) / (0.4 - 0.0005))


class Half:
    """A clock of which the CPU time runs at half the pace: a rank that has half of a core, and works all the time."""

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self.asleep_s = 0.0

    def now_s(self) -> float:
        return next(self._ticks) * 0.01

    def sleep(self, duration_s: float) -> None:
        self.asleep_s += duration_s

    def cpu_s(self) -> float:
        return next(self._ticks) * 0.005


@pytest.mark.ranks(1, 2, 3)
def test_cpu_time_counts_over_the_share_of_a_core(comm: AbstractCommunicator) -> None:
    clock = Half()
    costs = measure_message_costs(comm, repeats=2, clock=clock, cpu_s=clock.cpu_s)
    assert comm.allgather_object(costs) == [costs] * comm.size
    if comm.size == 1:
        assert (costs[0].message_s, costs[0].core_share) == (0.0, 1.0)
        return
    for cost in costs:
        assert cost.core_share == pytest.approx(0.5, rel=0.1)
        # A burst takes two ticks of CPU time, in posting and in taking: of 16 short messages sent and 16 received, or of 8
        # and 8 of 64 KiB, so that one of these takes a 16th of two ticks, and what it takes longer is its bytes.
        assert cost.message_s == pytest.approx(2 * 0.005 / 32 / cost.core_share)
        longer_s = (2 * 0.005 / 16 - 2 * 0.005 / 32) / cost.core_share
        assert cost.copy_bytes_per_s == pytest.approx((64 * 1024 - 8) / longer_s)
    assert clock.asleep_s > 0


class Late(Half):
    """A clock on which every look is 0.3 s later: messages take as long to arrive."""

    def __init__(self) -> None:
        super().__init__()
        self.slept: list[float] = []

    def now_s(self) -> float:
        return next(self._ticks) * 0.3

    def sleep(self, duration_s: float) -> None:
        self.slept.append(duration_s)


@pytest.mark.ranks(2, 3)
def test_messages_have_as_long_to_arrive_as_the_first_ones_took(comm: AbstractCommunicator) -> None:
    clock = Late()
    measure_message_costs(comm, repeats=2, clock=clock, cpu_s=lambda: 0.0)
    assert clock.slept == [0.05, pytest.approx(0.3), pytest.approx(0.3)] * 2, "of short messages, then of long ones"


@pytest.mark.ranks(2)
def test_it_is_measured(comm: AbstractCommunicator) -> None:
    for cost in measure_message_costs(comm, repeats=2):
        assert 0 < cost.message_s < 1
        assert cost.copy_bytes_per_s > 0
        assert 0 < cost.core_share <= 1
