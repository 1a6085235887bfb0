"""Links, measured: between which ranks, and what comes out."""

from __future__ import annotations

import pytest

from tatami.comm import AbstractCommunicator
from tatami.comm.probe import link_ranks, measure_links
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
