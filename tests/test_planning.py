"""`tatami.plan`: planners side by side for a network, without a rank."""

import re
import warnings
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import tatami
from tatami.cluster import Cluster, Processor, write_cluster
from tatami.comm import AbstractCommunicator
from tatami.comm.threads import run_threads
from tatami.errors import InputError, MemoryLackError, PlanError
from tatami.planning import answers, compared, questions
from tatami.tiling import PLANNERS, Layout, Plan, StagedLayout, StagedPlan
from tatami.train import find_blocks, workload_of
from tatami.workload import Block, Piece, Workload, gpt_workload

SPEEDS = [1.0, 0.5, 0.25]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(203, 80), nn.Sigmoid(), nn.Linear(80, 26))


def test_a_network_is_planned_as_tile_would() -> None:
    model = net()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    found = tatami.plan(model, speeds=SPEEDS, batch_size=1024)
    work = workload_of(model, find_blocks(model), samples=1024)
    assert [plan.planner for plan in found.plans] == list(PLANNERS)
    assert found.workload == work
    for plan in found.plans:
        assert plan == tatami.plan(plan.planner, cluster=Cluster.from_speeds(SPEEDS), workload=work)
    assert found.best.predicted_s == min(plan.predicted_s for plan in found.plans)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_it_prints_the_table_of_the_command_and_what_is_split() -> None:
    cluster = Cluster(processors=tuple(Processor(name=f"m{i}", speed=1.0, host=f"h{i}", memory_bytes=2**30) for i in range(2)))
    found = tatami.plan(net(), cluster=cluster, batch_size=64)
    text = str(found)
    assert text.splitlines()[0].startswith("Sequential: split over units: 1 x linear pair of 80 hidden units; ")
    for part in found.report(everything=True):
        assert (part if isinstance(part, str) else part.to_text()) in text
    assert " ".join(text.split()).endswith(found.advice)
    assert "Recommended: h0 alone" in text or "over h0 and h1" in text


def test_a_sample_finds_more_than_pairs() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    without = tatami.plan(layer, speeds=SPEEDS, batch_size=12)
    found = tatami.plan(layer, speeds=SPEEDS, batch_size=12, sample=torch.randn(4, 3, 8), planners=["timed"])
    assert without.workload.blocks == ()
    assert {block.kind for block in found.workload.blocks} == {"attention", "linear pair"}


def test_pipeline_stages_of_a_sampled_network_are_those_that_tile_finds() -> None:
    network = nn.Sequential(*[nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64)) for _ in range(6)])
    machines = Cluster(processors=tuple(Processor(name=f"m{index}", speed=1e9, memory_bytes=300_000) for index in range(3)))
    sample = torch.randn(4, 64)
    found = tatami.plan(network, cluster=machines, batch_size=16, sample=sample)
    assert isinstance(found.recommended, StagedPlan)

    def laid(comm: AbstractCommunicator) -> Layout | StagedLayout:
        return tatami.tile(network, comm, batch_size=16, sample=sample, speeds=machines, quiet=True).whole_layout

    assert run_threads(laid, size=3) == [found.recommended.layout] * 3
    with pytest.raises(MemoryLackError):
        tatami.plan(network, cluster=machines, batch_size=16)


class Looking(nn.Module):
    """Cannot be recorded: what it computes depends on a value."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        return y if y.sum() > -1e9 else -y


def test_why_there_are_no_stages_is_in_the_summary() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the value, which each rank would read of its own samples
        found = tatami.plan(Looking(), speeds=SPEEDS, batch_size=12, sample=torch.randn(4, 8))
    assert found.staged is None
    assert found.workload.pieces == ()
    assert re.search(r"; without pipeline stages: .*looks at a value that (sum|gt) computes", found.summary), found.summary


def test_a_workload_needs_no_torch_and_has_its_own_batch(tmp_path: Path) -> None:
    work = Workload.mlp(203, 80, 26, samples=1024)
    cluster = Cluster.from_speeds(SPEEDS)
    assert tatami.plan(work, cluster=cluster) == compared(None, cluster=cluster, workload=work)
    path = tmp_path / "cluster.toml"
    write_cluster(cluster, path)
    assert tatami.plan(work, cluster=path) == tatami.plan(work, cluster=str(path)) == tatami.plan(work, cluster=cluster)
    assert tatami.plan("srpm", cluster=path, workload=work) == tatami.plan("srpm", cluster=cluster, workload=work)
    assert tatami.plan(work, cluster=cluster, batch_size=64).workload.samples == 64
    faster = tatami.plan(work, cluster=cluster, speeds=[1, 1, 1], planners=["weighted"])
    assert faster.plans[0].tiling.replicas[2][0].samples.size == 341


def test_a_planner_in_the_place_of_a_network_gives_its_plan() -> None:
    plan = tatami.plan("srpm", cluster=Cluster.from_speeds(SPEEDS), workload=Workload.mlp(203, 80, 26, samples=1024))
    assert isinstance(plan, Plan)


def test_what_cannot_be_planned_is_refused_with_what_to_do() -> None:
    work = Workload.mlp(4, 8, 2, samples=16)
    with pytest.raises(PlanError, match="which machines"):
        tatami.plan(work)
    with pytest.raises(InputError, match=r"batch_size must be a whole number, not 2\.5"):
        tatami.plan(net(), speeds=SPEEDS, batch_size=2.5)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match=r"planners=\[\] names none: leave it out to compare all"):
        tatami.plan(net(), speeds=SPEEDS, batch_size=4, planners=[])
    with pytest.raises(PlanError, match="Give batch_size"):
        tatami.plan(net(), speeds=SPEEDS)
    with pytest.raises(PlanError, match="'srpm' is a planner, and needs a cluster and a workload"):
        tatami.plan("srpm", speeds=SPEEDS)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="in place of the network"):
        tatami.plan(net(), speeds=SPEEDS, batch_size=4, workload=work)  # type: ignore[call-overload]
    with pytest.raises(InputError, match=r"takes a network .*not list"):
        tatami.plan([1, 2], speeds=SPEEDS, batch_size=4)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="a Cluster or the path of a cluster file, not dict"):
        tatami.plan(work, cluster={})  # type: ignore[call-overload]
    with pytest.raises(PlanError, match="speeds by name go with a cluster"):
        tatami.plan(work, speeds={"p0": 1.0})
    with pytest.raises(PlanError, match=r"^speeds must be a number > 0 for each rank, not 2$"):
        tatami.plan(work, speeds=2)  # type: ignore[call-overload]
    with pytest.raises(PlanError, match=r"^speeds must be a number > 0 for each rank; speeds\[1\] must be .*, not \[1\]$"):
        tatami.plan(work, speeds=[1, [1]])  # type: ignore[list-item]


def test_stages_are_tried_before_lack_of_memory_is_told() -> None:
    """Four machines that each hold a third of the network, which has no blocks to divide."""
    pieces = tuple(Piece(name=f"{index}", flop_per_sample=1e6, parameters=10**5) for index in range(4))
    work = Workload(samples=8, replicated_parameters=4 * 10**5, replicated_flop_per_sample=4 * 10**6, pieces=pieces)
    machines = Cluster(processors=tuple(Processor(name=f"p{index}", speed=1e9, memory_bytes=27 * 10**5) for index in range(4)))
    found = tatami.plan(work, cluster=machines)
    assert not found.plans
    assert isinstance(found.recommended, StagedPlan)
    assert len(found.recommended.layout.stages) == 4
    assert "no room" in str(found)
    with pytest.raises(MemoryLackError):
        tatami.plan(replace(work, pieces=()), cluster=machines)
    with pytest.raises(MemoryLackError, match="3 pipeline stages find no room"):
        compared(None, cluster=machines, workload=work, stages=3)
    (asked, more) = answers(questions(machines, workload=work, leave_out=["p0"]))
    assert isinstance(asked.plan, StagedPlan)
    assert len(asked.takes_part) == 4
    assert more.plan is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("letters", [96, 600], ids=["repeated", "split"])
def test_the_closed_form_of_a_gpt_is_what_is_found_of_the_examples_network(letters: int, tied: bool) -> None:
    """The classes of examples/nanogpt.py, and `tatami plan --model gpt`: field by field, except for the pieces of stages,
    and for when memory is fullest: the closed form takes all gradients and all activations to be there at once."""
    example = Path(__file__).parent.parent / "examples" / "nanogpt.py"
    names: dict[str, Any] = {"__name__": "nanogpt"}
    exec(example.read_text().split("\ncomm = ")[0], names)
    names["LETTERS"] = range(letters)
    network = names["GPT"]()
    if tied:
        network.head = nn.Linear(names["WIDTH"], letters, bias=False)
        network.head.weight = network.letters.weight
    sample = torch.randint(letters, (4, names["TOKENS"]))
    found = tatami.plan(network, speeds=[1.0], batch_size=64, sample=sample, planners=["even"]).workload
    closed = gpt_workload(
        layers=names["LAYERS"], width=names["WIDTH"], heads=names["HEADS"], tokens=names["TOKENS"], vocabulary=letters,
        tied=tied, samples=64,
    )  # fmt: skip
    assert Counter(found.blocks) == Counter(closed.blocks)
    assert closed.backward_moments == ((1.0, 1.0),)
    assert of_layers(found) == of_layers(closed)
    assert found.recomputation is not None
    assert closed.recomputation is not None
    again = replace(closed.recomputation, layers=found.recomputation.layers)  # their blocks stand in another order
    found = replace(found, blocks=(), pieces=(), backward_moments=closed.backward_moments)
    assert found == replace(closed, blocks=(), pieces=(), recomputation=again)


def of_layers(workload: Workload) -> list[tuple[float, Counter[Block]]]:
    """What each layer leaves behind beside its units, and its blocks."""
    layers = () if workload.recomputation is None else workload.recomputation.layers
    return [(layer.beside_bytes, Counter(workload.blocks[index] for index in layer.blocks)) for layer in layers]
