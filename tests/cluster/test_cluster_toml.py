"""Cluster files: what is written is read back, groups unfold, and every fault of a file is named at once."""

import math
import os
import re
import tempfile
import warnings
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import tatami.cluster.toml
from tatami.cluster import (
    LOCAL_LINK,
    NETWORK_LINK,
    Cluster,
    Link,
    OwnLink,
    Processor,
    cluster_toml,
    read_cluster,
    write_cluster,
)
from tatami.cluster.tables import ClusterFile, HostsLinkTable, NetworkTable, ProcessorTable
from tatami.errors import ClusterError, OutputExistsError, PlanError
from tatami.workload import parse_net

EXAMPLE = Path(__file__).parents[2] / "examples" / "cluster.toml"
NAMES = st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]), min_size=1, max_size=8).filter(
    lambda name: name.strip() != ""
)
LINKS = st.builds(
    Link, bandwidth_bytes_per_s=st.floats(1e-3, 1e15), latency_s=st.floats(0, 60) | st.sampled_from([0.0, 50e-6, 1e-3])
)


OWN_LINKS = st.builds(OwnLink, bandwidth_bytes_per_s=st.none() | st.floats(1e-3, 1e15), latency_s=st.floats(0, 60)) | st.builds(
    OwnLink, bandwidth_bytes_per_s=st.floats(1e-3, 1e15)
)
COSTS = st.just(0.0) | st.floats(1e-9, 1e3)


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    hosts = draw(st.lists(NAMES, min_size=1, max_size=4, unique=True))
    names = draw(st.lists(NAMES, min_size=1, max_size=6, unique=True))
    own = draw(st.dictionaries(st.sampled_from(hosts), OWN_LINKS))
    homes = {name: draw(st.sampled_from(hosts)) for name in names}
    speeds = draw(st.sampled_from([st.floats(1e-12, 9e5), st.floats(1e6, 1e24)]))  # relative, or in flop/s
    processors = tuple(
        Processor(
            name=name,
            speed=draw(speeds),
            host=homes[name],
            link=own.get(homes[name]),
            memory_bytes=draw(st.none() | st.integers(1, 2**50)),
            spread=draw(st.none() | st.floats(0, 10)),
            message_s=draw(COSTS),
            copy_bytes_per_s=draw(st.just(math.inf) | st.floats(1e-3, 1e15)),
            call_s=draw(COSTS),
            step_s=draw(COSTS),
        )
        for name in names
    )
    used = st.sampled_from(sorted({processor.host for processor in processors}))
    pairs = st.tuples(used, used).map(lambda pair: (min(pair), max(pair)))
    return Cluster(
        processors=processors,
        local=draw(LINKS),
        network=draw(LINKS),
        links=draw(st.dictionaries(pairs, LINKS, max_size=3)),
        sample_flop=draw(st.dictionaries(st.sampled_from(["203-80-26", "4-8-16-2"]), st.floats(0, 1e9))),
    )


def problems_of(text: str) -> tuple[str, ...]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        path.write_text(text, encoding="utf-8")
        with pytest.raises(ClusterError) as caught:
            read_cluster(path)
        assert str(path) in str(caught.value)
        return caught.value.problems


@given(clusters())
def test_what_is_written_is_read_as_an_equal_cluster(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "cluster.toml")
        write_cluster(cluster, path)
        assert read_cluster(path) == cluster


@pytest.mark.parametrize(
    ("table", "network"),
    [
        ('bandwidth = "100 Mbit/s"', Link(bandwidth_bytes_per_s=12.5e6, latency_s=NETWORK_LINK.latency_s)),
        ('latency = "2 ms"', Link(bandwidth_bytes_per_s=NETWORK_LINK.bandwidth_bytes_per_s, latency_s=2e-3)),
    ],
)
def test_what_a_link_does_not_say_is_as_usual(tmp_path: Path, table: str, network: Link) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(f'[network]\n{table}\n[[processors]]\nname = "a"\nspeed = 1\n')
    cluster = read_cluster(path)
    assert cluster.network == network
    assert cluster.local == LOCAL_LINK


def test_an_empty_link_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text('[local]\n[[processors]]\nname = "a"\nspeed = 1\n')
    with pytest.raises(ClusterError, match="give it a bandwidth or a latency"):
        read_cluster(path)


def test_the_example() -> None:
    cluster = read_cluster(EXAMPLE)
    assert [(p.name, p.host, p.speed, p.spread) for p in cluster.processors] == [
        ("old0", "cpu0", 1.0, None),
        ("old1", "cpu1", 1.0, None),
        ("old2", "cpu2", 1.0, None),
        ("old3", "cpu3", 1.0, None),
        ("new0", "tower", 2.5, 0.03),
        ("new1", "tower", 2.5, 0.03),
    ]
    assert cluster.by_name["new1"].memory_bytes == 24 * 2**30
    assert cluster.link("old0", "old1") == Link(bandwidth_bytes_per_s=125e6, latency_s=50e-6)
    assert cluster.link("new0", "old0") == Link(bandwidth_bytes_per_s=1.25e9, latency_s=20e-6)
    assert cluster.link("new0", "new1") == Link(bandwidth_bytes_per_s=5e9, latency_s=5e-6)


def test_text_as_a_person_would_write_it() -> None:
    cluster = Cluster(processors=(Processor(name="a", speed=1.5, memory_bytes=2**30),))
    assert cluster_toml(cluster) == (
        '[local]\nbandwidth = "40 Gbit/s"\nlatency = "5 us"\n\n[network]\nbandwidth = "1 Gbit/s"\nlatency = "50 us"\n\n'
        '[[processors]]\nname = "a"\nspeed = 1.5\nhost = "a"\nmemory = "1 GiB"\n'
    )


def test_numbers_are_si_and_links_may_be_left_out(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(
        "[network]\nbandwidth = 1e4\nlatency = 0.5\n[[processors]]\nname = 'n'\nspeed = '2 Gflop/s'\nmemory = 1048576\ncount=2"
    )
    cluster = read_cluster(path)
    assert cluster.local == LOCAL_LINK
    assert cluster.network == Link(bandwidth_bytes_per_s=1e4, latency_s=0.5)
    assert cluster.processors == tuple(Processor(name=name, speed=2e9, memory_bytes=2**20) for name in ("n0", "n1"))


ONE = '[[processors]]\nname = "a"\nspeed = 1\n'
HOMES = """
[[processors]]
name = "desktop"
speed = 60e9
[[processors]]
name = "laptop{i}"
speed = 40e9
count = 2
"""


def test_a_processor_without_a_host_is_a_host_of_its_own(tmp_path: Path) -> None:
    """They were all on one before, and [network] was never used; files that may rely on it are warned of."""
    path = tmp_path / "cluster.toml"
    path.write_text(HOMES)
    with pytest.warns(UserWarning, match="which network desktop, laptop0, laptop1 are: each is taken for a host of its own"):
        cluster = read_cluster(path)
    assert [each.host for each in cluster.processors] == ["desktop", "laptop0", "laptop1"]
    assert cluster.link("laptop0", "laptop1") == NETWORK_LINK
    slow = Link(bandwidth_bytes_per_s=6.25e6, latency_s=50e-6)
    for more in ('host = "laptop"\n', 'link = "50 Mbit/s"\n', '[network]\nbandwidth = "50 Mbit/s"\nlatency = "50 us"\n'):
        path.write_text(HOMES + more)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            cluster = read_cluster(path)
        assert cluster.link("laptop0", "laptop1") == (LOCAL_LINK if "host" in more else slow)
        assert cluster.link("desktop", "laptop1") == (NETWORK_LINK if "host" in more else slow)


def test_a_link_of_its_own_is_written_as_it_was_read(tmp_path: Path) -> None:
    for text in ('"50 Mbit/s"', '{ bandwidth = "50 Mbit/s", latency = "5 ms" }', '{ latency = "5 ms" }'):
        path = tmp_path / "cluster.toml"
        path.write_text(f'[[processors]]\nname = "a"\nspeed = 1\nlink = {text}\n')
        assert f"link = {text}\n" in cluster_toml(read_cluster(path))
    with pytest.raises(ClusterError, match=r"processors\[1\].link: another processor of host 'h' has another link"):
        Cluster(
            processors=tuple(
                Processor(name=f"p{i}", speed=1.0, host="h", link=OwnLink(latency_s=seconds))
                for i, seconds in enumerate((0.0, 1.0))
            )
        )


def test_links_of_hosts_without_processors_are_left_out(tmp_path: Path) -> None:
    cluster = Cluster(processors=(Processor(name="a", speed=1.0, host="h"),), links={("g", "h"): NETWORK_LINK})
    write_cluster(cluster, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml").links == {}


def test_all_faults_at_once_each_with_its_path() -> None:
    problems = problems_of(
        """
        netwrk = 3
        local = 5
        [[processors]]
        name = "a"
        speed = -1
        [[processors]]
        name = "a"
        sped = 2
        memory = "24 GB/s"
        [[processors]]
        name = ""
        speed = nan
        count = 0
        spread = "2 %"
        host = "h"
        link = { bandwith = "1 Gbit/s", latency = -1 }
        [[links]]
        hosts = ["b", "h"]
        bandwidth = 0
        latency = "5 m"
        [[links]]
        hosts = ["h"]
        latency = 1
        [[networks]]
        net = "203-80"
        sample = -1
        [[networks]]
        net = "203-80-26"
        sample = "37 kflop"
        [[networks]]
        net = "203-80-26"
        sample = "38 kflop"
        """
    )
    starts = [
        "processors[0].speed: must be > 0, not -1",
        "processors[1].speed: is missing",
        "processors[1].memory: '24 GB/s' is not a size in bytes: unknown unit 'GB/s' (did you mean GB",
        "processors[1].sped: unknown key; did you mean speed?",
        "processors[1].name: 'a' is taken already, by processors[0]",
        "processors[2].name: must be a text of 1 to 255 characters, not ''",
        "processors[2].speed: must be a finite number > 0, not nan",
        "processors[2].count: must be a whole number from 1 to 200,000, not 0",
        "processors[2].spread: must be a number >= 0, relative to the speed",
        "local: must be a table, not 5",
        "links[0].bandwidth: must be > 0, not 0",
        "links[0].latency: '5 m' is not a duration: unknown unit 'm' (did you mean ms or min?)",
        "processors[2].link.bandwith: unknown key; did you mean bandwidth?",
        "processors[2].link.latency: must be >= 0, not -1",
        "links[0].hosts[0]: no processor is on 'b'; known are a, h",
        "links[1].bandwidth: is missing",
        "links[1].hosts: must be a list of 2 host names",
        "networks[0].net: must be the sizes of a network, such as 203-80-26, not '203-80'",
        "networks[0].sample: must be >= 0, not -1",
        "networks[2].net: '203-80-26' is there already",
        "netwrk: unknown key; did you mean network?",
    ]
    for start in starts:
        assert sum(problem.startswith(start) for problem in problems) == 1, start
    assert len(problems) == len(starts)


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("", "processors: is missing"),
        ("processors = []", "processors: there is none"),
        ('[processors]\nname = "a"', "processors: must be a list of tables: head each with double brackets"),
        ("processors = [3]", "processors[0]: must be a table, not 3"),
        ('[[processors]]\nname = "a"\nspeed = true', "processors[0].speed: must be a number > 0"),
        ('[[processors]]\nname = "a"\nspeed = 0', "processors[0].speed: must be > 0, not 0"),
        (f'[[processors]]\nname = "a"\nspeed = 1{"0" * 400}', "processors[0].speed: must be a finite number > 0, not inf"),
        ("[[processors]]\nname = 4\nspeed = 1", "processors[0].name: must be a text of 1 to 255 characters, not 4"),
        ('[[processors]]\nname = "a"\nspeed = 1e308', "processors[0].speed: must be from 1e-12 to 1e+24, not 1e+308"),
        (
            '[[processors]]\nname = "a"\nspeed = "1e200 flop/s"',
            "processors[0].speed: must be at most 1,000,000,000 Pflop/s, not",
        ),
        ('[[processors]]\nname = "a"\nspeed = "1e-20"', "processors[0].speed: must be from 1e-12 to 1e+24, not 1e-20"),
        (ONE + "count = 1000000000", "processors[0].count: must be a whole number from 1 to 200,000, not 1000000000"),
        (
            ONE + 'count = 150000\n[[processors]]\nname = "b"\nspeed = 1\ncount = 150000',
            "processors: 300,000 are too many; at most 200,000",
        ),
        (
            f'[[processors]]\nname = "{"n" * 300}"\nspeed = 1',
            "processors[0].name: must be a text of 1 to 255 characters, not 'nnn",
        ),
        (
            '[[processors]]\nname = "a\\u001B[2J"\nspeed = 1',
            r"processors[0].name: must have no control characters, such as a new line, but is 'a\x1b[2J'",
        ),
        (ONE + 'host = "b\\nc"', r"processors[0].host: must have no control characters, such as a new line, but is 'b\nc'"),
        (ONE + 'memory = "1e30 GB"', "processors[0].memory: must be at most 8,192 PiB, not '1e30 GB'"),
        (ONE + "[local]\nbandwidth = 1e308\nlatency = 0", "local.bandwidth: must be at most 8,000,000 Tbit/s, not 1e+308"),
        (ONE + "[local]\nlatency = 1e308", "local.latency: must be at most 31,710 y, not 1e+308"),
        (
            ONE + '[network]\nbandwidth = "1 Gbit/s"\nlatency = "1 w"',
            "network: the latency of a link must be at most 60 s, not 604800 s",
        ),
        (
            ONE + "[network]\nbandwidth = '1e-9 B/s'\nlatency = 0",
            "network: the bandwidth of a link must be from 0.001 to 1e+18 bytes/s, not 1e-09",
        ),
        (
            '[[processors]]\nname = "a"\ncount = 2\nspeed = 1\n[[processors]]\nname = "a1"\nspeed = 1',
            "processors[1].name: 'a1' is taken already, by processors[0]",
        ),
        (
            ONE + 'host = "h"\n' + '[[links]]\nhosts = ["h", "h"]\nbandwidth = 1e6\nlatency = 0\n' * 2,
            "links[1].hosts: this pair is taken already, by links[0]",
        ),
        (
            ONE
            + 'host = "h"\nlink = "1 Gbit/s"\n'
            + '[[processors]]\nname = "b"\nspeed = 1\nhost = "h"\n'
            + '[[processors]]\nname = "c"\nspeed = 1\nhost = "h"\nlink = "2 Gbit/s"',
            "processors[2].link: 'h' has another link, by processors[0]",
        ),
        (ONE + "memory = 8", "processors[0].memory: 8 without a unit is 8 bytes: write '8 GiB' or '8 MiB'"),
        (ONE + "memory = '8'", "processors[0].memory: 8 without a unit is 8 bytes: write '8 GiB' or '8 MiB'"),
        (ONE + "memory = -8", "processors[0].memory: must be > 0, not -8"),
        (ONE + "memory = '-8 GiB'", "processors[0].memory: must be > 0, not -8 GiB"),
        (ONE + "memory = 0", "processors[0].memory: must be > 0, not 0"),
        (ONE + "link = 9999", "processors[0].link: 9999 without a unit is 9999 bytes/s: write '9999 Mbit/s' or '9999 Gbit/s'"),
        (
            ONE + "[network]\nbandwidth = 1000",
            "network.bandwidth: 1000 without a unit is 1000 bytes/s: write '1000 Mbit/s' or '1000 Gbit/s'",
        ),
        (
            ONE + '[[processors]]\nname = "b"\nspeed = 5e11',
            "processors[0].speed: 1 flop/s next to 500 Gflop/s: write '1 Gflop/s' or another unit, or relative speeds for all",
        ),
        (ONE + "link = {}", "processors[0].link: give it a bandwidth or a latency"),
        (ONE + 'link = "1 GB"', "processors[0].link: '1 GB' is not a bandwidth"),
        (ONE + 'link = { latency = "2 d" }', "processors[0].link: the latency of a link must be"),
    ],
)
def test_one_fault(text: str, problem: str) -> None:
    (only,) = problems_of(text)
    assert only.startswith(problem)


def test_of_very_many_faults_the_first_are_told(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    links = "".join(f'[[links]]\nhosts = ["x{i}", "y{i}"]\nbandwidth = 1e6\nlatency = 0\n' for i in range(1000))
    path.write_text('[[processors]]\nname = "a"\nspeed = 1\nhost = "h"\n' + links)
    with pytest.raises(ClusterError) as caught:
        read_cluster(path)
    assert len(caught.value.problems) == 2000
    *_, last_told, end = str(caught.value).splitlines()
    assert len(str(caught.value).splitlines()) == 32
    assert last_told == "  links[14].hosts[1]: no processor is on 'y14'; known are h"
    assert end == "  ... and 1970 more"


def test_a_file_that_is_no_toml(tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    with pytest.raises(ClusterError, match=r"cannot read the cluster file .*cluster.toml: No such file"):
        read_cluster(path)
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match=r"it is not text in UTF-8 \(byte 0\)"):
        read_cluster(path)
    path.write_text("a = " + 5000 * "[" + 5000 * "]")
    with pytest.raises(ClusterError, match=r"cluster\.toml is not TOML that can be read: its values are nested too deeply"):
        read_cluster(path)
    path.write_text("a = " + 5000 * "1")
    with pytest.raises(ClusterError, match=r"cluster\.toml is not TOML: Exceeds the limit"):
        read_cluster(path)
    path.write_bytes(b"n" * (8 * 2**20 + 1))
    with pytest.raises(ClusterError, match="it has 8 MiB, and no such file has more than 8 MiB"):
        read_cluster(path)
    os.mkfifo(tmp_path / "fifo.toml")
    for special, kind in ((Path("/dev/zero"), "device"), (tmp_path, "directory"), (tmp_path / "fifo.toml", "FIFO")):
        with pytest.raises(ClusterError, match=f"cannot read the cluster file {special}: it is a {kind}; give a regular file"):
            read_cluster(special)
    path.write_text("[local\n")
    with pytest.raises(ClusterError, match=r"cluster.toml is not TOML: .*line 1"):
        read_cluster(path)


def test_an_existing_file_is_kept_unless_forced(tmp_path: Path) -> None:
    path = tmp_path / "new" / "cluster.toml"
    one, two = Cluster.from_speeds([1.0]), Cluster.from_speeds([1.0, 2.0])
    write_cluster(one, path)
    with pytest.raises(OutputExistsError, match=r"cluster.toml exists already; .*--force"):
        write_cluster(two, path)
    assert read_cluster(path) == one
    write_cluster(two, path, force=True)
    assert read_cluster(path) == two
    assert [file.name for file in path.parent.iterdir()] == ["cluster.toml"]


def test_the_example_explains_every_key_and_can_be_read() -> None:
    example = Path(__file__).parents[2] / "examples" / "cluster.toml"
    assert read_cluster(example).size == 6
    for text in (example.read_text(encoding="utf-8"), tatami.cluster.toml.__doc__ or ""):
        keys = set(re.findall(r"^(?:# )?(\w+) = ", text, re.MULTILINE)) | set(re.findall(r"^\[+(\w+)", text, re.MULTILINE))
        tables = (ClusterFile, HostsLinkTable, ProcessorTable, NetworkTable)
        assert keys == {field.name for table in tables for field in fields(table)}


@pytest.mark.parametrize("net", ["-".join(["1"] * 1001), "1000000000-2-3", "4-0-2", "4-2", "4-٣-2", "4--2"])
def test_a_file_names_no_network_that_could_not_be_planned(net: str, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match="network"):
        parse_net(net)
    file = tmp_path / "c.toml"
    write_cluster(replace(Cluster.from_speeds([1.0]), sample_flop={"4-1-2": 2.0}), file)
    file.write_text(file.read_text().replace("4-1-2", net))
    with pytest.raises(ClusterError, match="must be the sizes of a network"):
        read_cluster(file)


def test_networks_of_many_layers_and_many_networks_are_read(tmp_path: Path) -> None:
    deep = "-".join(["100000000"] * 1000)
    known = {deep: 1.0} | {f"4-{units}-2": 2.0 for units in range(1, 30_001)}
    cluster = replace(Cluster.from_speeds([1.0]), sample_flop=known)
    write_cluster(cluster, tmp_path / "c.toml")
    assert read_cluster(tmp_path / "c.toml").sample_flop == known
    with pytest.raises(ClusterError, match=r"sample_flop\['4-2-1'\]: must be a finite number >= 0, not -1"):
        replace(cluster, sample_flop={"4-2-1": -1})
