"""Pipeline stages on simulated machines: the formula that plans are priced by against passes and hand-overs one by one."""

import json
import random
import statistics
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tatami.cli.app import app
from tatami.cluster import Cluster, Link, Processor
from tatami.errors import PlanError
from tatami.sim.platforms import ClusterPlatform
from tatami.sim.tiling import Change, StagedJob, rehearse_stages, simulate_iteration
from tatami.tiling import Layout, Replica, StagedLayout, StagedPlan, plan_stages, price_stages
from tatami.workload import Workload, gpt_workload


def gpt(*, samples: int = 32, layers: int = 8) -> Workload:
    return gpt_workload(layers=layers, width=384, heads=6, tokens=64, vocabulary=1000, samples=samples)


def cluster(*speeds: float, bandwidth: float = 12.5e6, per_host: int = 1) -> Cluster:
    processors = (Processor(name=f"p{rank}", host=f"h{rank // per_host}", speed=speed) for rank, speed in enumerate(speeds))
    return Cluster(processors=tuple(processors), network=Link(bandwidth_bytes_per_s=bandwidth, latency_s=1e-4))


def took_s(plan: StagedPlan, machines: Cluster) -> float:
    return simulate_iteration(plan, cluster=machines, platform=ClusterPlatform(cluster=machines)).took_s


def test_plans_take_as_long_as_the_formula_says() -> None:
    errors = []
    for seed in range(40):
        draw = random.Random(seed)
        machines = cluster(
            *(10 ** draw.uniform(10, 12.5) for _ in range(draw.randint(2, 6))), bandwidth=draw.choice([12.5e6, 125e6, 1.25e9])
        )
        plan = plan_stages(machines, gpt(samples=draw.choice([16, 32, 64]), layers=draw.choice([4, 8, 12])))
        assert plan is not None
        errors.append(took_s(plan, machines) / plan.iteration_s - 1)
    assert statistics.median(map(abs, errors)) < 0.01
    assert max(errors) < 0.07, errors
    assert min(errors) > -0.07, errors


def test_a_pipeline_whose_stages_keep_too_little_in_flight_stands_still() -> None:
    """What planned pipelines keep is enough: with one micro-batch less in front of a long way they take longer."""
    machines = cluster(1e12, 1e12, 1e12, bandwidth=125e6)
    plan = plan_stages(machines, gpt(), stages=3)
    assert plan is not None
    first, middle, last = plan.in_flight
    assert first > middle > last
    slower = took_s(replace(plan, in_flight=(middle, middle, last)), machines)
    assert slower > 1.05 * took_s(plan, machines)


def test_compute_alone_is_the_arithmetic_of_a_pipeline() -> None:
    """Equal stages, and hand-overs that take no time: (micro-batches + stages - 1) passes."""
    machines = cluster(1e10, 1e10, 1e10, bandwidth=1e12)
    work = gpt(layers=6, samples=24)
    replicas = [Replica(width=1.0, processors=(f"p{rank}",), heights=(1.0,), micro_batches=8) for rank in range(3)]
    layout = StagedLayout(stages=tuple(Layout(replicas=(replica,)) for replica in replicas), cuts=(4, 8))
    plan = price_stages(layout, cluster=machines, workload=work)
    even = replace(plan, ranks=tuple(replace(rank, pass_s=0.3, late_s=0.0, gradients_s=0.0) for rank in plan.ranks))
    assert took_s(even, machines) == pytest.approx((8 + 3 - 1) * 0.3, rel=1e-2)


def test_replicas_wait_for_each_other_and_stages_may_be_shared() -> None:
    machines = cluster(1e11, 1e11, 5e10, 5e10, per_host=2, bandwidth=125e6)
    shared = [
        Layout(replicas=(Replica(width=1.0, processors=names, heights=(0.5, 0.5), micro_batches=4),))
        for names in (("p0", "p1"), ("p2", "p3"))
    ]
    pairs = [(("p0",), ("p2",)), (("p1",), ("p3",))]
    replicas = [
        Layout(
            replicas=tuple(
                Replica(width=width, processors=names, heights=(1.0,), micro_batches=4)
                for width, names in zip((0.5, 0.5), each, strict=True)
            )
        )
        for each in pairs
    ]
    work = gpt()
    cut = len(work.pieces) // 2
    for stages in (shared, replicas):
        plan = price_stages(StagedLayout(stages=tuple(stages), cuts=(cut,)), cluster=machines, workload=work)
        assert took_s(plan, machines) == pytest.approx(plan.iteration_s, rel=0.05)


def job(**options: object) -> StagedJob:
    machines = cluster(1e12, 1e12, 5e11, 5e11, bandwidth=125e6)
    plan = plan_stages(machines, gpt(), stages=4)
    assert plan is not None
    settings = {"cluster": machines, "workload": gpt(), "layout": plan.layout, "stages": 4, **options}
    return StagedJob(platform=ClusterPlatform(cluster=machines), **settings)  # type: ignore[arg-type]


def test_other_stages_are_moved_to_when_a_machine_becomes_slower() -> None:
    slow = (Change(processor="p0", factor=1 / 3, at_iteration=40),)
    stays, moves = (rehearse_stages(job(iterations=120, changes=slow, retiles=retiles)) for retiles in (False, True))
    assert stays.iteration_s[:39] == moves.iteration_s[:39]
    assert not stays.decisions
    assert [decision.kind.value for decision in moves.decisions if decision.remaps] == ["other stages"]
    assert moves.iteration_s[-1] < 0.75 * stays.iteration_s[-1]
    assert moves.total_s < stays.total_s
    assert moves.alarms[0].processor == "p0"
    assert stays.num_simulated == 2, "iterations that are alike are simulated once"


def test_a_time_at_which_a_speed_changes_is_met() -> None:
    steady = rehearse_stages(job(iterations=10)).iteration_s[0]
    found = rehearse_stages(job(iterations=10, changes=(Change(processor="p1", factor=0.5, at_s=4.5 * steady),)))
    assert list(found.iteration_s[:4]) == [steady] * 4
    assert steady < found.iteration_s[4] < found.iteration_s[-1]


def test_jobs_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="at least 1 iteration"):
        job(iterations=0)
    with pytest.raises(PlanError, match="p9"):
        job(changes=(Change(processor="p9", factor=0.5, at_s=1.0),))


@pytest.fixture
def machines_file(tmp_path: Path) -> str:
    lines = ["[network]", 'bandwidth = "1 Gbit/s"', 'latency = "100 us"']
    for rank, speed in enumerate((1e12, 1e12, 5e11)):
        lines += ["[[processors]]", f'name = "p{rank}"', f'host = "h{rank}"', f"speed = {speed}"]
    path = tmp_path / "cluster.toml"
    path.write_text("\n".join(lines), encoding="utf-8")
    return str(path)


GPT = [
    "--model",
    "gpt",
    "--layers",
    "6",
    "--width",
    "192",
    "--heads",
    "6",
    "--tokens",
    "64",
    "--vocabulary",
    "500",
    "--samples",
    "32",
]


def test_the_command_simulates_stages(machines_file: str) -> None:
    command = ["simulate", "tiling", machines_file, *GPT, "--stages", "3", "--iterations", "60", "--json"]
    result = CliRunner().invoke(app, [*command, "--retile", "--slow", "p0:4@iteration:30"])
    assert result.exit_code == 0, result.output
    record = json.loads(result.stdout.splitlines()[-1])
    assert record["iterations"] == 60
    assert record["last_s"] > record["first_s"]
    assert "other stages" in [each["kind"] for each in record["decisions"]]


@pytest.mark.parametrize(
    ("asked", "match"),
    [
        (["--stages", "2"], "give --model gpt"),
        ([*GPT, "--stages", "2", "--planner", "srpm"], "leave out --planner"),
        ([*GPT, "--stages", "2", "--retile", "--every", "5"], "leave out --every"),
        ([*GPT, "--stages", "9"], "9 stages are more than"),
    ],
)
def test_stages_that_cannot_be_are_one_sentence(machines_file: str, asked: list[str], match: str) -> None:
    result = CliRunner().invoke(app, ["simulate", "tiling", machines_file, *asked])
    assert result.exit_code != 0
    assert match in " ".join(result.output.replace("│", " ").split())
