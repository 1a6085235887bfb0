"""Links between replicas are watched as ranks are; planners and prices see them as they became."""

from dataclasses import dataclass, field

import numpy as np
import pytest

from tatami.cluster import Cluster, Link, Processor
from tatami.retiling import Decision, Retiler, Watcher
from tatami.retiling.estimates import Estimates
from tatami.retiling.link_watch import watched_messages
from tatami.tiling import Layout, Replica
from tatami.workload import Workload

WORK = Workload.mlp(64, 512, 64, samples=512)
NET = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4)


def hosts(number: int) -> Cluster:
    return Cluster(processors=tuple(Processor(name=f"p{i}", speed=1e9, host=f"h{i}") for i in range(number)), network=NET)


TWO_BY_TWO = Layout(
    replicas=(
        Replica(width=0.5, processors=("p0", "p1"), heights=(0.5, 0.5)),
        Replica(width=0.5, processors=("p2", "p3"), heights=(0.5, 0.5)),
    )
)


def test_the_largest_message_each_way_between_hosts_of_different_replicas_is_watched() -> None:
    found = watched_messages(TWO_BY_TWO, cluster=hosts(4), workload=WORK)
    assert [(each.source, each.dest, each.hosts) for each in found] == [
        (0, 2, ("h0", "h2")),
        (1, 3, ("h1", "h3")),
        (2, 0, ("h0", "h2")),
        (3, 1, ("h1", "h3")),
    ]
    size_bytes = 256 * 128 * 4
    assert found[0].expected_s == pytest.approx(NET.transfer_s(size_bytes), rel=0.01)  # and a few numbers that ride along
    assert watched_messages(TWO_BY_TWO, cluster=Cluster.from_speeds([1.0] * 4), workload=WORK) == ()


@dataclass
class Linked:
    """A run on four hosts of their own whose links take `factors` of the expected times, with noise."""

    watcher: Watcher
    factors: dict[tuple[str, str], float] = field(default_factory=dict)
    noise: float = 0.05
    iteration: int = 0

    def __post_init__(self) -> None:
        self.random = np.random.default_rng(0)

    def go(self, iterations: int) -> list[Decision]:
        found = []
        for _ in range(iterations):
            self.iteration += 1
            values = WORK.work_flop / 1e9 * np.exp(self.noise * self.random.standard_normal(4))
            late_s = [
                each.expected_s * self.factors.get(each.hosts, 1.0) * float(np.exp(self.noise * self.random.standard_normal()))
                # One of the two sides was there first.
                if (each.source < each.dest) == (self.iteration % 2 == 0)
                else -0.01
                for each in self.watcher.links.messages
            ]
            decision = self.watcher.take(self.iteration, values, late_s=late_s)
            if decision is not None:
                found.append(decision)
                if decision.remaps:
                    self.watcher.moved(0.001)
        return found


def linked() -> Linked:
    return Linked(Watcher(Retiler(), cluster=hosts(4), workload=WORK, layout=TWO_BY_TWO, known_speeds=True))


def test_a_link_that_takes_four_times_as_long_is_named_within_four_iterations_and_is_itself_again() -> None:
    random = np.random.default_rng(0)
    known = Estimates(hosts(4), workload=WORK, layout=TWO_BY_TWO)
    watch = known.links

    def go(factor: float, iterations: int) -> list[int]:
        at = []
        for iteration in range(iterations):
            noise = np.exp(0.05 * random.standard_normal(len(watch.messages)))
            late_s = [
                each.expected_s * float(jitter) * (factor if each.hosts == ("h0", "h2") else 1.0)
                for each, jitter in zip(watch.messages, noise, strict=True)
            ]
            changes = known.take(iteration, np.ones(4), late_s=late_s)
            assert {each.link for each in changes} <= {("h0", "h2")}
            at += [iteration + 1 for _ in changes]
        return at

    assert go(1.0, 200) == []
    assert watch.cluster == hosts(4)
    (noticed,) = go(4.0, 100)
    assert noticed <= 4
    assert list(watch.slow_hosts) == ["h0", "h2"]
    assert watch.cluster.link("p0", "p2").bandwidth_bytes_per_s == pytest.approx(NET.bandwidth_bytes_per_s / 4, rel=0.15)
    assert watch.cluster.link("p1", "p3") == NET
    (back,) = go(1.0, 100)
    assert back <= 4
    assert list(watch.slow_hosts) == []
    assert watch.cluster.link("p0", "p2") == NET


def test_messages_that_were_there_already_are_no_samples() -> None:
    known = Estimates(hosts(4), workload=WORK, layout=TWO_BY_TWO)
    for factor in (1.0, 100.0):
        for iteration in range(50):
            assert known.take(iteration, np.ones(4), late_s=[-factor] * len(known.links.messages)) == []


def test_of_both_directions_the_faster_message_counts() -> None:
    links = Estimates(hosts(4), workload=WORK, layout=TWO_BY_TWO).links
    expected_s = np.array([message.expected_s for message in links.messages])
    assert links.pairs == (("h0", "h2"), ("h1", "h3"))
    # Of 0 -> 2, 1 -> 3, 2 -> 0, 3 -> 1.
    assert links.slowness(list(expected_s * [3.0, 5.0, 2.0, -1.0])) == pytest.approx([2.0, 5.0])
    assert np.isnan(links.slowness(list(expected_s * [1.0, -1.0, 1.0, 0.0]))).tolist() == [False, True]
    assert np.isnan(links.slowness([])).all()


def test_the_tiles_are_laid_so_that_a_slow_link_is_not_used() -> None:
    run = linked()
    assert run.go(200) == []
    run.factors[("h0", "h2")] = 20.0
    found = run.go(40)
    (alarm, *_) = run.watcher.alarms
    assert alarm.link == ("h0", "h2")
    assert alarm.iteration <= 210
    assert "the link h0 - h2 takes" in found[0].reason
    assert any(decision.remaps for decision in found)
    assert ("h0", "h2") not in {message.hosts for message in run.watcher.links.messages}


@pytest.mark.parametrize("noise", [0.05, 0.2])
def test_links_that_only_are_noisy_move_nothing(noise: float) -> None:
    run = linked()
    run.noise = noise
    assert not any(decision.remaps for decision in run.go(500))
