"""Ranks without samples: those of a small last batch, and those that were left out of the tiling."""

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_equal, fixed, local, run
from networks import CASES, Batch, Case, build
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.partition.tracing.capturing import capture
from tatami.partition.tracing.sample import Sample
from tatami.runtime.empty_batch import with_stand_in, without_stand_in
from tatami.testing.worlds import World
from tatami.tiling import Layout
from tatami.train import TiledModel, tile
from tiled_rig import assert_close, gradients, simple_layout, some_layouts, whole_gradients

pytestmark = pytest.mark.threads_only

TOKENS, FEATURES, WIDTH, HEADS = 5, 3, 8, 4
SIZES = (7, 2)
"""The second batch is smaller than there are replicas."""


class NeedsSamples(nn.Module):
    """Reshapes with -1, and looks for the longest sample; gives means over the tokens, all tokens, and a number of its own.

    A sample of zeros has the length 0: its mean is NaN.
    """

    def __init__(self) -> None:
        super().__init__()
        self.up, self.drop = nn.Linear(FEATURES, WIDTH), nn.Dropout(0.3)
        self.norm = nn.BatchNorm1d(WIDTH)
        self.pair = nn.Sequential(nn.Linear(WIDTH, 9), nn.Tanh(), nn.Linear(9, 2))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> dict[str, Any]:
        b, t, _ = x.shape
        y = self.drop(self.up(x).view(b, t, -1, WIDTH // HEADS).flatten(2))
        here = torch.arange(int(lengths.max())) < lengths[:, None]
        mean = (y[:, : here.shape[1]] * here[..., None]).sum(1) / lengths[:, None]
        out = self.pair(self.norm(mean))
        return {"out": out, "tokens": y.reshape(b * t, WIDTH), "scale": self.scale.exp()}


def _draw(samples: int, generator: torch.Generator) -> Batch:
    x = torch.randn(samples, TOKENS, FEATURES, generator=generator, dtype=torch.float64)
    return x, torch.randint(1, TOKENS + 1, (samples,), generator=generator)


CASE = Case(build=NeedsSamples, draw=_draw, blocks=("linear pair",))


def loss_of(output: Any) -> Any:
    if isinstance(output, torch.Tensor):
        return output.square().flatten(1).mean(1).mean()
    return F.mse_loss(output["out"], torch.ones_like(output["out"])) + output["tokens"].square().mean()


def output_of(output: Any) -> torch.Tensor:
    result: torch.Tensor = output if isinstance(output, torch.Tensor) else output["out"]
    return result


def _layouts(size: int) -> list[Layout]:
    """As `some_layouts`, and a first replica that is too narrow for a sample of the small batch."""
    rest = [0.9 / (size - 1)] * (size - 1) if size > 1 else []
    narrow = [simple_layout(*([rank] for rank in range(size)), widths=[0.1, *rest])] if size > 1 else []
    uneven = [simple_layout([0, 1], [2], widths=[0.05, 0.95])] if size == 3 else []
    return [*some_layouts(size), *narrow, *uneven]


def _few_layouts(size: int) -> list[Layout]:
    """One in which a rank is left out, and one in which a replica has no sample of the small batch."""
    every = _layouts(size)
    return [every[2], every[-1]] if size > 1 else every


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize(
    ("case", "sampled"), [(CASE, False), (CASE, True), (CASES["llama"], True)], ids=["by-hand", "sampled", "llama"]
)
def test_a_rank_without_samples_needs_no_code_that_works_without(world: World, case: Case, sampled: bool) -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [case.draw(size, generator) for size in SIZES]

    def evaluated(model: TiledModel, plain: nn.Module) -> None:
        assert model.found.captured is None or not model.found.captured.runs_without_samples
        model.eval()
        plain.eval()
        with torch.no_grad():
            mine = output_of(run(model, local(model, batches[-1])))
            expected = output_of(run(plain, batches[-1]))
        assert len(mine) == model.local_span_size[0]
        told = model.comm.allgather_object((model.tile.replica, mine) if model.tile and model.speaks_for_replica else None)
        replicas = dict(each for each in told if each is not None)
        whole = torch.cat([replicas[index] for index in sorted(replicas)])
        assert_close({"output": whole}, {"output": expected}, what=f"evaluation on {model.layout}")

    check_equal(
        world,
        partial(build, case),
        batches,
        plans=fixed(_few_layouts if sampled else _layouts),
        loss=lambda model, batch: loss_of(run(model, batch)),
        then=evaluated,
        options=lambda _: {"sample": batches[0] if sampled else None},
    )


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["llama", "vit", "mixer"])
def test_a_pass_without_samples_takes_nothing_from_one_that_is_under_way(comm: AbstractCommunicator, name: str) -> None:
    """Between a forward pass and its backward pass, a replica has no sample of another batch: its sums are still to be made."""
    case = CASES[name]
    generator = torch.Generator().manual_seed(5)
    batches = [case.draw(size, generator) for size in (8, 1)]
    plain, network = build(case), build(case)
    loss_of(run(plain, batches[0])).backward()
    model = tile(
        network, comm, batch_size=8, sample=batches[0], speeds="equal", reduction="mean",
        layout=simple_layout([0, 1], [2, 3]), quiet=True,
    )  # fmt: skip
    output = run(model, local(model, batches[0]))
    with torch.no_grad():
        run(model, local(model, batches[1]))
    loss_of(output).backward()
    assert_close(whole_gradients(model), gradients(plain), what="gradients")
    model.close()


def test_a_network_that_runs_without_samples_is_left_to_do_so() -> None:
    generator = torch.Generator().manual_seed(1)
    for case, runs in ((CASE, False), (CASES["llama"], False), (CASES["resnet"], True), (CASES["lstm"], True)):
        captured = capture(build(case), Sample.of(case.draw(3, generator)))
        assert captured.runs_without_samples is runs
    assert capture(build(CASE), Sample.of(CASE.draw(3, generator))).result_axes == (0, 0, None)


def test_a_sample_stands_in_and_its_results_are_none() -> None:
    whole = torch.rand(4, 3)
    none, fresh, seen = whole[2:2], torch.zeros(0, 2, dtype=torch.int64), torch.rand(0, requires_grad=True)
    inputs = with_stand_in({"x": none, "again": none, "fresh": fresh, "seen": seen, "n": 3})
    assert torch.equal(inputs["x"], whole[:1])  # what it was cut from
    assert inputs["again"] is inputs["x"]
    assert torch.equal(inputs["fresh"], torch.zeros(1, 2, dtype=torch.int64))
    assert inputs["n"] == 3
    bad = torch.full((2, 1, 3), torch.nan) * inputs["seen"]
    output = without_stand_in({"time": bad, "loss": bad.sum(), "count": torch.tensor(5), "all": whole}, (1, None, None, None))
    assert output["time"].shape == (2, 0, 3)
    assert (output["loss"].item(), output["count"].item()) == (0.0, 0)
    assert output["all"] is whole
    assert without_stand_in(bad, None).shape == (0, 1, 3)
    (output["time"].sum() + output["loss"]).backward()
    assert seen.grad is not None
    assert seen.grad.shape == (0,)
