"""Platforms: what files and presets say, and what is wrong with them."""

from dataclasses import replace
from pathlib import Path

import pytest
from sim_rig import Transfers, ends

from tatami.cluster import Cluster, Link, OwnLink, Processor
from tatami.errors import ClusterError, InputError
from tatami.sim.platforms import RDMA, ClusterPlatform, FatTree, MachineGroup, Tree, Wire, preset, read_platform
from tatami.sim.tiling import Change, draw_trace, read_trace

WIRE = Wire(bandwidth_bytes_per_s=1e8, latency_s=1e-3)
TWO_CLUSTERS = """
name = "two clusters"
fabric = "rdma"
backbone = { bandwidth = "0.5 TB/s", latency = "500 us" }

[[groups]]
name = "cluster{i}"
count = 2
backbone = { bandwidth = "5 GB/s", latency = "500 us" }

[[groups.groups]]
name = "node{i}"
count = 3
speed = "1 Gflop/s"
cores = 2
link = { bandwidth = "125 MB/s", latency = "50 us", duplex = true }

[[groups]]
name = "store"
link = { bandwidth = "1 GB/s", latency = "10 us" }
"""


def test_groups_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "two.toml").write_text(TWO_CLUSTERS)
    platform = read_platform(tmp_path / "two.toml")
    assert isinstance(platform, Tree)
    assert list(platform.hosts) == [*(f"cluster{cluster}/node{node}" for cluster in (0, 1) for node in (0, 1, 2)), "store"]
    nodes = platform.groups[0].groups[0]
    assert (nodes.speed_flop_per_s, nodes.cores) == (1e9, 2)
    assert nodes.link == Wire(bandwidth_bytes_per_s=125e6, latency_s=50e-6, duplex=True)
    assert platform.fabric is RDMA
    said = [(part.what.strip(), part.count) for part in platform.parts]
    assert said == [("backbone", 1), ("cluster{i}", 2), ("backbone", 2), ("node{i}", 6), ("link", 6), ("store", 1), ("link", 1)]


def test_every_fault_of_a_file_with_its_path(tmp_path: Path) -> None:
    text = TWO_CLUSTERS.replace('"125 MB/s"', "-1").replace("count = 2", "count = 0").replace('"1 Gflop/s"', "0")
    (tmp_path / "bad.toml").write_text(text.replace('name = "store"', 'nam = "store"').replace('"rdma"', '"pigeon"'))
    with pytest.raises(ClusterError) as caught:
        read_platform(tmp_path / "bad.toml")
    problems = "\n".join(caught.value.problems)
    for part in (
        "fabric: must be one of tcp, rdma, not 'pigeon'",
        "groups[0].count: must be a whole number from 1 to 200,000, not 0",
        "groups[0].groups[0].speed: must be > 0, not 0",
        "groups[0].groups[0].link.bandwidth: must be > 0, not -1",
        "groups[1].name: is missing",
        "groups[1].nam: unknown key; did you mean name?",
    ):
        assert part in problems


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("groups = []", "groups: there is none"),
        ("groups = 3", "groups: must be a list of tables: head each with double brackets"),
        ("groups = [1]", "groups[0]: must be a table, not 1"),
        ('[[groups]]\nname = "a"\nlink = 3', "groups[0].link: must be a table, not 3"),
        ('[[groups]]\nname = "a"\nlink = { bandwidth = 1e6, fat = 3 }', "groups[0].link.fat: must be true or false, not 3"),
        ('[[groups]]\nname = "a"\n[backbone]\nlatency = 1', "backbone.bandwidth: is missing"),
        (
            '[[groups]]\nname = "a"\nspeed = 1\n[[groups.groups]]\nname = "b"',
            "groups[0]: speed and cores are of machines; this holds groups",
        ),
        (
            "".join(f'[[{".".join(["groups"] * depth)}]]\nname = "a"\n' for depth in range(1, 22)),
            "groups are nested more than 20 deep",
        ),
    ],
)
def test_what_is_no_group_is_refused_where_it_is(tmp_path: Path, text: str, problem: str) -> None:
    (tmp_path / "bad.toml").write_text(text)
    with pytest.raises(ClusterError) as caught:
        read_platform(tmp_path / "bad.toml")
    assert problem in caught.value.problems


def test_an_unreachable_host_is_named() -> None:
    with pytest.raises(ClusterError, match=r"island/node0: is unreachable"):
        Tree(
            name="t",
            groups=(
                MachineGroup(name="node", count=2, link=WIRE),
                MachineGroup(name="island", groups=(MachineGroup(name="node", count=2),)),
            ),
        )


def test_a_backbone_is_passed_once() -> None:
    duplex = Wire(bandwidth_bytes_per_s=1e8, latency_s=0.0, duplex=True)
    with pytest.raises(ClusterError, match=r"backbone: cannot be duplex"):
        Tree(name="t", backbone=duplex, groups=(MachineGroup(name="node", count=2, link=WIRE),))


def test_names_must_differ() -> None:
    with pytest.raises(ClusterError, match=r"the name 'node1' is taken already"):
        Tree(name="t", groups=(MachineGroup(name="node", count=2, link=WIRE), MachineGroup(name="node1", link=WIRE)))


@pytest.mark.parametrize("bandwidth", [-1.0, 0.0, float("nan"), float("inf")])
def test_a_wire_has_a_bandwidth(bandwidth: float) -> None:
    with pytest.raises(ClusterError, match="bandwidth of a link must be a finite number > 0"):
        Wire(bandwidth_bytes_per_s=bandwidth, latency_s=0.0)


def test_an_unknown_preset_lists_the_known() -> None:
    with pytest.raises(InputError, match=r"no preset 'paper'; there are: oakforest-like, paper-server-10k"):
        preset("paper")
    with pytest.raises(InputError, match="multiple of it, not 150"):
        preset("paper-server-10k", nodes=150)


def test_the_papers_platform() -> None:
    platform = preset("paper-server-10k")
    assert len(platform.hosts) == 10_100
    assert platform.hosts[0] == "cluster0/worker0"
    assert platform.hosts[-1] == "servers/server99"


def test_a_fat_tree_has_full_bisection() -> None:
    """Everybody to somebody far away at once takes as long as one alone; the path has four cables."""
    tree = FatTree(name="t", nodes=48, link=Wire(bandwidth_bytes_per_s=1e9, latency_s=1e-6, duplex=True))
    all_at_once = tuple((node, (node + 24) % 48, 1e9) for node in range(48))
    found = ends(Transfers(platform=tree, sends=all_at_once))
    assert list(found.times.values()) == pytest.approx([1 + 4e-6] * 48, rel=1e-9)
    near = ends(Transfers(platform=tree, sends=((0, 1, 1e9),)))
    assert near.times[("send", 0)] == pytest.approx(1 + 2e-6, rel=1e-9)


def test_oakforest_of_any_size() -> None:
    platform = preset("oakforest-like", nodes=8208, latency_s=1e-6)
    assert isinstance(platform, FatTree)
    assert (platform.switches, platform.per_switch, len(platform.hosts)) == (342, 24, 8208)


CLUSTER = Cluster(
    processors=(
        Processor(name="a0", speed=1.0, host="a"),
        Processor(name="a1", speed=2.0, host="a"),
        Processor(name="b0", speed=4.0, host="b"),
        Processor(name="c0", speed=4.0, host="c"),
    ),
    local=Link(bandwidth_bytes_per_s=1e9, latency_s=1e-6),
    network=Link(bandwidth_bytes_per_s=1e8, latency_s=1e-4),
)
SLOW = Link(bandwidth_bytes_per_s=1e7, latency_s=1e-3)


@pytest.mark.parametrize("own", [None, OwnLink(bandwidth_bytes_per_s=2e7), OwnLink(latency_s=7e-4)])
@pytest.mark.parametrize("links", [{}, {("a", "b"): SLOW}])
def test_a_cluster_is_simulated_with_its_own_links(links: dict[tuple[str, str], Link], own: OwnLink | None) -> None:
    *others, last = CLUSTER.processors
    cluster = replace(CLUSTER, processors=(*others, replace(last, link=own)), links=links)
    platform = ClusterPlatform(cluster=cluster)
    assert list(platform.hosts) == ["a0", "a1", "b0", "c0"]
    assert list(platform.speeds_flop_per_s) == [1.0, 2.0, 4.0, 4.0]
    for source, target in ((0, 1), (0, 2), (2, 0), (1, 3), (2, 3)):
        found = ends(Transfers(platform=platform, sends=((source, target, 1e7),)))
        names = (platform.hosts[source], platform.hosts[target])
        assert found.times[("send", 0)] == pytest.approx(cluster.link(*names).transfer_s(1e7), rel=1e-9)


def test_two_processors_share_their_machines_way_out() -> None:
    platform = ClusterPlatform(cluster=CLUSTER)
    found = ends(Transfers(platform=platform, sends=((0, 2, 1e7), (1, 3, 1e7))))
    assert list(found.times.values()) == pytest.approx([1e-4 + 0.2] * 2, rel=1e-9)


def test_links_that_were_probed_pair_by_pair_share_their_machines_cards() -> None:
    """Each pair alone has its own rate; two transfers out of one machine have its card's together, and one each way its own."""
    fast, faster = (Link(bandwidth_bytes_per_s=rate, latency_s=1e-4) for rate in (1e8, 1.2e8))
    links = {("a", "b"): fast, ("a", "c"): faster, ("b", "c"): fast}
    cluster = Cluster(processors=CLUSTER.processors, local=CLUSTER.local, network=SLOW, links=links)
    platform = ClusterPlatform(cluster=cluster)
    for sends, expected_s in (
        (((0, 2, 1.2e7),), [0.12]),
        (((0, 3, 1.2e7),), [0.10]),
        (((0, 2, 1.2e7), (0, 3, 1.2e7)), [0.20, 0.20]),
        (((2, 0, 1.2e7), (3, 0, 1.2e7)), [0.20, 0.20]),
        (((0, 2, 1.2e7), (2, 0, 1.2e7), (3, 1, 1.2e7)), [0.12, 0.20, 0.20]),
    ):
        found = ends(Transfers(platform=platform, sends=sends))
        times = [found.times["send", index] for index in range(len(sends))]
        assert times == pytest.approx([1e-4 + each for each in expected_s], rel=1e-6)


def test_a_trace_is_read(tmp_path: Path) -> None:
    file = tmp_path / "trace.csv"
    file.write_text("# of a Tuesday\nwhen,processor,slower\niteration:30, p0, 2\n2s,p1,4\n\niteration:60,p0,1\n")
    assert read_trace(file) == (
        Change(processor="p0", factor=0.5, at_iteration=30),
        Change(processor="p1", factor=0.25, at_s=2.0),
        Change(processor="p0", factor=1.0, at_iteration=60),
    )


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "must begin with the line when,processor,slower"),
        ("iteration:30,p0,2\n", "must begin with the line when,processor,slower"),
        ("when,processor,slower\niteration:30,p0\n", "line 2 of the trace .* not 'iteration:30,p0'"),
        ("when,processor,slower\niteration:x,p0,2\n", "line 2"),
        ("when,processor,slower\niteration:3,p0,0\n", "line 2"),
    ],
)
def test_what_is_no_trace_is_refused_with_its_line(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "trace.csv"
    file.write_text(text)
    with pytest.raises(InputError, match=words):
        read_trace(file)
    with pytest.raises(InputError, match="cannot read the trace"):
        read_trace(tmp_path / "none.csv")


def test_a_drawn_trace_follows_from_its_seed_and_every_slowdown_begins_and_ends() -> None:
    names = [f"p{rank}" for rank in range(50)]
    drawn = draw_trace(names, iterations=1000, seed=3)
    assert drawn == draw_trace(names, iterations=1000, seed=3)
    assert drawn != draw_trace(names, iterations=1000, seed=4)
    # Once in 1,000 iterations, of which some are slow already.
    assert 30 <= sum(change.factor < 1 for change in drawn) <= 60
    for name in names:
        own = [change for change in drawn if change.processor == name]
        assert [change.factor == 1.0 for change in own] == [bool(index % 2) for index in range(len(own))]
        assert [change.at_iteration for change in own] == sorted(change.at_iteration or 0 for change in own)
