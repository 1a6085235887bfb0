"""The answer of `tatami plan`: what machines do, what holds a plan back, what it is compared with, and what changes bring."""

from dataclasses import replace
from typing import Any

import pytest

from tatami.cluster import Cluster, Link, OwnLink, Processor
from tatami.errors import InputError
from tatami.planning import answers, compared, questions
from tatami.report import answer_table, blank, draw_answers
from tatami.report.machines import display_names, machine_lines, machine_table
from tatami.report.recommended import obstacles, plan_table, recommendation
from tatami.tiling import AlphaBetaCost, Obstacle, Plan, PlanLimits, compare, limits, plan, timeline
from tatami.workload import Workload, gpt_workload

MLP = Workload.mlp(203, 80, 26, samples=1000)
GPT = gpt_workload(layers=6, width=384, heads=6, tokens=256, vocabulary=512, samples=48)
HOME = Cluster(
    processors=(
        Processor(name="desktop", speed=60e9, memory="16 GiB"),
        Processor(name="laptop", speed=40e9, memory="8 GiB"),
        Processor(name="old", speed=15e9, memory="8 GiB"),
    ),
    network=Link(bandwidth_bytes_per_s=125e6, latency_s=2e-4),
)


def many(speeds: list[float]) -> Cluster:
    return Cluster(processors=tuple(Processor(name=f"c{i}", speed=speed, memory="8 GiB") for i, speed in enumerate(speeds)))


def table_of(found: Plan, cluster: Cluster, *, width: int = 100) -> list[dict[str, str]]:
    times = timeline(found.layout, cluster=cluster, workload=found.workload)
    lines = machine_lines(found, cluster=cluster, times=times)
    table = machine_table(lines, names=display_names(cluster), width=width)
    if width >= 80:
        assert max(map(len, table.to_text().splitlines())) <= width
    return [dict(zip(table.headers, row, strict=True)) for row in table.rows]


def test_each_machine_has_a_line_with_what_it_does() -> None:
    (found,) = compare(["weighted"], cluster=HOME, workload=GPT)
    rows = table_of(found, HOME)
    assert [row["machine"] for row in rows] == ["desktop", "laptop", "old"], "in the order of the cluster"
    assert [row["samples"] for row in rows] == ["25", "17", "6"]
    bars = {row[""] for row in rows}
    assert bars == {"█" * bars.copy().pop().count("█") + "▒" * bars.copy().pop().count("▒")}
    assert all(row["memory"].endswith(" of 8 GiB") for row in rows[1:])
    assert table_of(found, HOME, width=60)[0]["memory"] == f"{100 * found.memory_bytes['desktop'] / 2**34:.0f} %"


def test_micro_batches_are_how_many_of_how_many_samples() -> None:
    (found,) = compare(["weighted"], cluster=HOME, workload=GPT)
    replicas = tuple(replica.in_micro_batches(4) for replica in found.layout.replicas)
    found = replace(found, layout=replace(found.layout, replicas=replicas))
    assert [row["samples"] for row in table_of(found, HOME)] == ["7 + 3 x 6", "5 + 3 x 4", "2 x 2 + 2 x 1"]
    words = recommendation(found, cluster=HOME, width=200)
    assert words.startswith(
        "Recommended: data parallelism over desktop, laptop and old: each computes a share of the 48 samples"
    )
    assert words.endswith(", in 4 micro-batches.")


@pytest.mark.parametrize("width", [80, 120])
def test_similar_machines_share_a_line(width: int) -> None:
    few = many([1e9] * 3 + [3e9] * 61)
    rows = table_of(compare(["weighted"], cluster=few, workload=replace(MLP, samples=64_000))[0], few, width=width)
    assert {row["machine"].split(" like ")[0] for row in rows} == {"61", "3"}
    varied = many([1e9 * (1 + index / 300) for index in range(1000)])
    rows = table_of(compare(["weighted"], cluster=varied, workload=replace(MLP, samples=100_000))[0], varied, width=width)
    assert 2 <= len(rows) <= 12
    assert sum(int(row["machine"].split(" like ")[0]) for row in rows if " like " in row["machine"]) >= 990


def test_names_are_those_of_hosts_without_the_domain_that_all_have() -> None:
    hosts = ("a.lab.org", "b.lab.org")
    cluster = Cluster(processors=tuple(Processor(name=f"p{i}", speed=1.0, host=host) for i, host in enumerate(hosts)))
    assert display_names(cluster) == {"p0": "a", "p1": "b"}
    one = Cluster(processors=tuple(replace(each, host="a") for each in cluster.processors))
    assert display_names(one) == {"p0": "p0", "p1": "p1"}


def found_limits(cluster: Cluster, workload: Workload) -> tuple[Plan, PlanLimits]:
    (found,) = compare(["weighted"], cluster=cluster, workload=workload)
    return found, limits(found, cluster=cluster)


def test_the_obstacles_sum_to_what_is_above_the_ideal() -> None:
    cluster = replace(
        HOME,
        processors=tuple(
            replace(each, spread=0.1, message_s=1e-3, call_s=1e-3, step_s=0.1, copy_bytes_per_s=1e8) for each in HOME.processors
        ),
    )
    found, limit = found_limits(cluster, GPT)
    assert sum(limit.lost_s.values()) == pytest.approx(found.predicted_s - limit.ideal_s)
    assert limit.ideal_s == pytest.approx(GPT.flop(width=1.0, height=1.0) / 115e9)
    assert min(limit.lost_s.values()) >= -1e-9
    assert limit.lost_s[Obstacle.CALLS] == pytest.approx(0.1 + len(GPT.blocks) * 1e-3, rel=0.2)


def test_what_recomputation_takes_is_named() -> None:
    kept, _ = found_limits(HOME, replace(GPT, recompute=False))
    found, limit = found_limits(HOME, replace(GPT, recompute=True))
    assert limit.lost_s[Obstacle.RECOMPUTATION] == pytest.approx(found.predicted_s - kept.predicted_s)
    assert next(obstacles(found, cluster=HOME, found=limit))[0] == "recomputing activations"


@pytest.mark.parametrize(
    ("link", "obstacle", "words"),
    [
        (OwnLink(bandwidth_bytes_per_s=1e6), Obstacle.BANDWIDTH, "bytes on the link of old (8 Mbit/s)"),
        (OwnLink(latency_s=30.0), Obstacle.LATENCY, "latency of the link of old (30 s)"),
    ],
)
def test_the_link_that_holds_a_plan_back_is_named(link: OwnLink, obstacle: Obstacle, words: str) -> None:
    *others, old = HOME.processors
    cluster = replace(HOME, processors=(*others, replace(old, link=link)))
    _, limit = found_limits(cluster, GPT)
    assert max(limit.lost_s, key=lambda each: limit.lost_s[each]) is obstacle
    text = str(compared(["weighted"], cluster=cluster, workload=GPT))
    assert words in text


@pytest.mark.parametrize(("latency", "told"), [(0.4, [0.4]), (0.3, [0.3, 0.04]), (0.04, [])])
def test_what_is_not_named_is_a_line_where_it_is_above_a_tenth(latency: float, told: list[float]) -> None:
    """Calls take 4 % of an iteration, which is not worth a line of its own."""
    found, _ = found_limits(HOME, GPT)
    whole_s = found.predicted_s
    lost_s = {Obstacle.CALLS: 0.04 * whole_s, Obstacle.LATENCY: latency * whole_s}
    limit = PlanLimits(ideal_s=whole_s - sum(lost_s.values()), lost_s=lost_s)
    shown = list(obstacles(found, cluster=HOME, found=limit))
    assert [seconds for _, seconds in shown] == pytest.approx([part * whole_s for part in told])
    assert [words for words, _ in shown] == ["latency of the network between hosts (200 us)", "other"][: len(told)]


def test_plans_that_are_the_same_are_one_row() -> None:
    cluster = Cluster.from_speeds([1.0, 1.0])
    plans = compare(["even", "weighted", "timed"], cluster=cluster, workload=MLP)
    table = plan_table(plans=plans, best=plans[2], weighted=plans[1], alone=None, cluster=cluster)
    assert table.rows[0][:4] == ("one machine alone", "-", "-", "no room")
    assert [row[0] for row in table.rows[1:]] == ["weighted data parallelism,\nrecommended\n(planner even)"]
    assert table.best == 1
    table = plan_table(plans=plans[2:], best=plans[2], weighted=None, alone=None, cluster=cluster)
    assert [row[0] for row in table.rows[2:]] == ["recommended, data parallelism"]


def test_one_machine_alone_is_the_fastest_that_holds_the_network() -> None:
    memory = {"desktop": 2**20, "laptop": 2**40, "old": 2**40}
    small = tuple(replace(each, memory_bytes=memory[each.name]) for each in HOME.processors)
    found = compared(["even"], cluster=replace(HOME, processors=small[1:]), workload=GPT)
    assert found.alone is not None
    assert found.alone.layout.processors == ("laptop",)
    assert found.alone.predicted_s == pytest.approx(GPT.flop(width=1.0, height=1.0) / 40e9)


def test_what_a_link_or_a_machine_would_bring() -> None:
    asked = questions(
        HOME,
        workload=GPT,
        vary=["network.bandwidth=1Gbit/s,10Gbit/s", "processors.old.speed=60e9", "processors.old.link=1Mbit/s", "samples=96"],
        add=["speed=60e9,memory=16GiB,count=2"],
        leave_out=["laptop,old"],
    )
    found = answers(asked)
    same, faster, old, slow, twice, more, alone = found[1:]
    assert found[0].speed_up == same.speed_up == 1.0
    assert found[0].plan == plan(cluster=HOME, workload=GPT)
    assert faster.plan is not None
    assert same.plan is not None
    assert isinstance(faster.plan, Plan)
    assert isinstance(same.plan, Plan)
    assert same.plan.predicted.gradients / faster.plan.predicted.gradients == pytest.approx(10, rel=0.05)
    assert old.speed_up == pytest.approx(160 / 115, rel=0.1)
    assert slow.speed_up is not None
    assert slow.speed_up < 1
    assert twice.speed_up is not None
    assert twice.speed_up > 1, "gradients travel once for twice as many samples"
    assert more.takes_part == ("desktop", "laptop", "old", "new0", "new1")
    assert alone.takes_part == ("desktop",)
    table = answer_table([each.words for each in asked], found, clusters=[each.cluster for each in asked])
    assert table.rows[0][2:] == ("1.00 x", "desktop, laptop, old")
    assert table.rows[6][0] == "with speed=60e9,memory=16GiB,count=2"
    assert table.rows[7][3] == "desktop"
    shared = replace(
        HOME, processors=tuple(replace(each, host="box" if each.name != "old" else "") for each in HOME.processors)
    )
    asked = questions(shared, workload=GPT, leave_out=["laptop"])
    table = answer_table(["", ""], answers(asked), clusters=[each.cluster for each in asked])
    assert [row[3] for row in table.rows] == ["desktop, laptop, old", "desktop, old"], "what they were called before"


def test_what_has_no_room_is_an_answer() -> None:
    asked = questions(HOME, workload=GPT, vary=["processors.desktop.memory=1MiB"], leave_out=["laptop,old"])
    cramped = replace(asked[2].cluster, processors=(replace(HOME.processors[0], memory_bytes=2**20),))
    found = answers([asked[0], replace(asked[2], cluster=cramped)])
    assert found[1].plan is None
    assert answer_table(["a", "b"], found, clusters=[HOME, cramped]).rows[1] == ("b", "no room", "-", "")


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"vary": ["network.bandwith=1"]}, "choose one of network.bandwidth, network.latency, processors.NAME.speed"),
        ({"vary": ["network.bandwidth"]}, "varies nothing: write PATH=VALUE"),
        ({"vary": ["network.bandwidth=5 s"]}, "network.bandwidth: '5 s' is not a bandwidth"),
        ({"vary": ["processors.laptp.speed=1e9"]}, "no processor or host is called 'laptp'; did you mean laptop?"),
        ({"vary": ["processors.old.speed=0"]}, "processors.old.speed: must be > 0, not 0"),
        ({"vary": ["processors.old.memory=0"]}, "processors.old.memory: must be > 0, not 0"),
        ({"vary": ["samples=0"]}, "samples: must be a whole number of at least 1, not '0'"),
        ({"add": ["memory=3GiB"]}, "speed: is missing"),
        ({"add": ["speed=3,memry=3GiB"]}, "memry: unknown key; did you mean memory?"),
        ({"add": ["speed=3,count=x"]}, "count: must be a whole number from 1 to 200,000, not 'x'"),
        ({"add": ["speed"]}, "'speed' needs a value: write key=value"),
        ({"add": ["speed=1,name=old"]}, "'old' is taken already"),
        ({"leave_out": ["desktop,laptop,old"]}, "without desktop, laptop, old no machine is left"),
    ],
)
def test_what_cannot_be_asked_is_refused_with_what_can(arguments: dict[str, list[str]], problem: str) -> None:
    with pytest.raises(InputError) as caught:
        questions(HOME, workload=GPT, **arguments)
    assert problem in str(caught.value)


def test_the_network_of_a_probed_cluster_is_all_its_pairs_and_a_link_of_its_own_replaces_them() -> None:
    link = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3)
    probed = replace(HOME, links={("desktop", "laptop"): link, ("desktop", "old"): link, ("laptop", "old"): link})
    faster, own = (
        each.cluster
        for each in questions(probed, workload=GPT, vary=["network.bandwidth=10Gbit/s", "processors.old.link=1Gbit/s"])[1:]
    )
    assert faster.link("desktop", "old") == Link(bandwidth_bytes_per_s=1.25e9, latency_s=1e-3)
    assert own.link("desktop", "old") == HOME.network
    assert own.link("desktop", "laptop") == link


def test_a_network_that_links_take_precedence_over_is_refused_and_one_that_some_do_is_warned_about() -> None:
    link, own = Link(bandwidth_bytes_per_s=1e8, latency_s=1e-3), OwnLink(bandwidth_bytes_per_s=1e7)
    pair = replace(HOME, links={("desktop", "laptop"): link})
    with pytest.warns(UserWarning, match=r"^network.latency does not change the links in \[\[links\]\] \(desktop - laptop\)"):
        changed = questions(pair, workload=GPT, vary=["network.latency=2ms"])[1].cluster
    assert changed.link("desktop", "laptop") == link
    assert changed.link("desktop", "old").latency_s == 2e-3
    desktop, *others = HOME.processors
    linked = replace(HOME, processors=(desktop, *(replace(each, link=own) for each in others)))
    all_linked = replace(HOME, processors=tuple(replace(each, link=own) for each in HOME.processors))
    pairs = {("desktop", "laptop"): link, ("desktop", "old"): link}
    told = r"^network.bandwidth changes nothing: the links of hosts that have their own \((desktop, )?laptop, old\)"
    for cluster in (all_linked, replace(linked, links=pairs)):
        with pytest.raises(InputError, match=told):
            questions(cluster, workload=GPT, vary=["network.bandwidth=10Gbit/s"])
    with pytest.warns(UserWarning, match=r"does not change the links of hosts that have their own \(laptop, old\), which"):
        questions(linked, workload=GPT, vary=["network.bandwidth=10Gbit/s"])
    assert questions(all_linked, workload=GPT, vary=["network.latency=2ms"])[1].cluster.link("desktop", "old").latency_s == 2e-3
    for path in ("network.bandwidth", "network.latency", "processors.p0.link"):
        with pytest.raises(InputError, match=f"^{path} changes nothing: all ranks are on 'localhost'; give some another host"):
            questions(Cluster.from_speeds([1.0, 2.0]), workload=MLP, vary=[f"{path}=1"])


def test_a_machine_that_is_added_to_probed_ones_has_the_costs_of_the_nearest_in_speed() -> None:
    costs: dict[str, Any] = {"message_s": 1e-4, "copy_bytes_per_s": 1e9, "call_s": 1e-3, "step_s": 2e-3, "spread": 0.1}
    first, *rest = HOME.processors
    probed = replace(HOME, processors=(replace(first, **costs), *rest))
    for text, found in (
        (f"speed={0.9 * first.speed},count=2", costs),
        (f"speed={2 * first.speed},message=3us,spread=0", {**costs, "message_s": 3e-6, "spread": 0.0}),
        (f"speed={min(each.speed for each in rest)}", {"message_s": 0.0, "call_s": 0.0, "spread": None}),
    ):
        asked = questions(probed, workload=GPT, add=[text])[1]
        near = first.name if found["call_s"] else min(rest, key=lambda each: each.speed).name
        assert f"cost new{'0' * ('count' in text)} what they cost {near}, nearest in speed, unless given" in asked.assumed
        for new in asked.cluster.processors[len(HOME.processors) :]:
            assert {name: getattr(new, name) for name in found} == found
    assert questions(HOME, workload=GPT, add=["speed=60e9"])[1].assumed == ""


def test_the_picture_has_a_bar_for_each_question() -> None:
    pytest.importorskip("matplotlib")
    asked = questions(HOME, workload=GPT, leave_out=["old"])
    _, ax = blank()
    draw_answers(ax, [each.words for each in asked], answers(asked))
    assert len(ax.patches) == 2
    assert [label.get_text() for label in ax.get_yticklabels()] == ["no change", "without old"]


def test_relative_speeds_are_said_to_be_a_guess() -> None:
    text = " ".join(str(compared(["even"], cluster=Cluster.from_speeds([1.0, 2.0]), workload=MLP)).split())
    assert "Speeds are relative, and 1 is assumed to be 1 Gflop/s: times and costs of sending are guesses" in text
    given = compared(["even"], cluster=Cluster.from_speeds([1.0, 2.0]), workload=MLP, cost=AlphaBetaCost(flop_per_s=1e9))
    assert "Speeds are relative" not in str(given)
