"""What is told of a network: what is split by what, the share that is repeated, and what could not be followed."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import CASES, GPT, Fused
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

import tatami
from tatami.comm.threads import run_threads
from tatami.model.describing import Description, describe, ranges
from tatami.partition import blocks
from tatami.partition.tracing import block_costs, flop_counting, tracing
from tatami.train import find_blocks, workload_of
from tatami.workload import ELEMENT_FLOP


def described(model: nn.Module, sample: torch.Tensor | None = None) -> Description:
    found = find_blocks(model, sample=sample)
    return describe(model, found, workload=workload_of(model, found, samples=32))


def two_heads() -> tuple[nn.Module, torch.Tensor]:
    return GPT(tied=False), torch.randint(11, (4, 6))


def test_shares_of_the_flop_add_up_and_tokens_count() -> None:
    torch.manual_seed(0)
    model, sample = two_heads()
    found = described(model, sample)
    assert {part.kind for part in found.split} == {"attention", "linear pair"}
    total = sum(part.flop_fraction for part in found.split) + found.repeated_fraction
    assert total == pytest.approx(1.0)
    # For each token: 48 hidden units with an activation each; four products of 12 x 12, and scores of 6 tokens.
    shares = {part.kind: part.flop_fraction for part in found.split}
    ratio = 48 * (2 * 2 * 12 + ELEMENT_FLOP) / (2 * 4 * 12 * 12 + 4 * 6 * 12)
    assert shares["linear pair"] / shares["attention"] == pytest.approx(ratio)


def test_what_is_repeated_is_counted_as_what_is_split() -> None:
    """The head and the norm are repeated: their share of all products, and of all elements of other operations."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down, self.head = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 128)

        def forward(self, x: torch.Tensor) -> Any:
            return self.head(F.layer_norm(self.down(torch.relu(self.up(x))), (16,)))

    found = described(Net(), torch.randn(4, 10, 16))
    assert [(part.kind, part.units) for part in found.split] == [("linear pair", 64)]
    # Of six products in the pair, forward and backward, the gradient of the network's input is left out.
    split = 3 * (2 * 2 * 16 * 64 + ELEMENT_FLOP * 64) - 2 * 16 * 64
    repeated = 3 * (2 * 16 * 128 + ELEMENT_FLOP * 16)
    assert found.repeated_fraction == pytest.approx(repeated / (split + repeated), abs=1e-6)
    assert {part.layer: part.parameters for part in found.repeated} == {"Linear": 128 * 17, "biases after a sum": 16}


def test_the_products_of_a_bilinear_layer_are_counted() -> None:
    """A product that is repeated, and one that is split: 2 x 6 x 6 x 8 a sample, its weight's gradient, and 8 activations."""

    class Net(nn.Module):
        def __init__(self, last: nn.Module) -> None:
            super().__init__()
            self.weight, self.last = nn.Parameter(torch.randn(8, 6, 6)), last

        def forward(self, x: torch.Tensor) -> Any:
            return self.last(torch.tanh(F.bilinear(x, x, self.weight)))

    (whole, split) = (described(Net(last), torch.randn(4, 6)) for last in (nn.Identity(), nn.Linear(8, 3, bias=False)))
    assert whole.repeated_fraction == 1.0
    assert [(part.kind, part.units, part.names) for part in split.split] == [("linear pair", 8, ("last, weight",))]
    assert split.repeated_fraction == pytest.approx(0.0, abs=1e-3)
    model, sample = Net(nn.Identity()), torch.randn(4, 6)
    work = workload_of(model, find_blocks(model, sample=sample), samples=1)
    assert work.replicated_flop_per_sample == 2 * (2 * 6 * 6 * 8) + 3 * 8 * ELEMENT_FLOP


@pytest.mark.parametrize("one", [True, False])
@pytest.mark.parametrize(
    ("hidden", "shared", "line"),
    [(9, True, "y = F.scaled_dot_product_attention"), (8, False, "ff, *qkv = self.fused(normed).split")],
)
def test_what_keeps_a_projection_for_all_whole_is_named(hidden: int, shared: bool, line: str, one: bool) -> None:
    """Keys that all heads share; or hidden units that the heads do not divide. Of the outputs no line is to blame."""
    model = Fused(hidden=hidden, shared=shared, one=one)
    found = find_blocks(model, sample=torch.randn(4, 5, 12))
    assert found.stops.keys() == {"fused.weight"}
    assert f"networks.py:{line}" in re.sub(r":\d+ `", ":", found.stops["fused.weight"])
    description = describe(model, found, workload=workload_of(model, found, samples=8))
    (part,) = (part for part in description.repeated if part.names == ("fused",))
    assert part.reason == f"needed whole at {found.stops['fused.weight'].removeprefix('needed whole at ')}"
    text = " ".join(str(description).split())
    assert "nothing in it splits over units" in text
    assert part.reason in text


def test_units_of_a_projection_for_all_are_heads() -> None:
    text = described(Fused(hidden=9), torch.randn(4, 5, 12)).text(width=120)
    assert "1 x attention with perceptron of 3 heads   52 % of the flop  fused, outs.0" in text


def test_frozen_layers_are_counted_and_every_layer_with_much_work_has_a_reason() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.letters, self.cell = nn.Embedding(20, 12), nn.LSTM(12, 24, batch_first=True)
            self.requires_grad_(False)
            self.gpt_layer = CASES["lora"].build().get_submodule("h.0")
            self.unused, self.head = nn.Linear(3, 3), nn.Linear(24, 5)

        def forward(self, x: torch.Tensor) -> Any:
            letters = self.letters(x)
            return self.head(torch.cat((self.gpt_layer(letters), self.cell(letters)[0][..., :12]), -1))

    model = Net()
    found = described(model, torch.randint(20, (4, 6)))
    assert {(part.kind, part.units) for part in found.split} == {("attention", 6), ("linear pair", 48)}
    shares = sum(part.flop_fraction for part in found.split) + sum(part.flop_fraction for part in found.repeated)
    assert f"operations without weights of their own ({100 * (1 - shares):.0f} % of the flop)" in found.text(width=120)
    parts = {name: part for part in found.repeated for name in part.names if part.reason}
    assert parts["gpt_layer.mlp.c_fc.a"].reason == "what sums over its 2 outputs is split along an axis with more weights"
    assert parts["cell"].reason == "every step of a recurrent layer needs its whole state"
    # Of each of 6 letters the products with the weights of the input and of the state, and a copy: all is frozen.
    cell = 2 * 6 * 96 * (12 + 24) + ELEMENT_FLOP * 6 * 12
    assert parts["cell"].flop_fraction == pytest.approx(cell / whole_flop(model), rel=0.01)
    assert (parts["cell"].parameters, parts["cell"].frozen) == (0, 96 * (12 + 24 + 2))
    assert parts["unused"].reason.startswith("it is not called")
    frozen = sum(part.frozen for part in found.repeated)
    assert f"repeated: 185 of 377 trained and {frozen:,} of {found.frozen:,} frozen weights" in found.text(width=120)


def test_equal_layers_with_a_weight_that_stays_whole_are_one_part() -> None:
    """The reason names the layer, of which a large network has dozens."""
    layers = [CASES["lora"].build().get_submodule("h.0") for _ in range(2)]
    found = described(nn.Sequential(nn.Embedding(20, 12), nn.Sequential(*layers)), torch.randint(20, (4, 6)))
    small = [part for part in found.repeated if part.reason.startswith("what is left in ")]
    assert [part.names for part in small] == [("1.0.mlp.c_proj.b", "1.1.mlp.c_proj.b")]
    assert small[0].reason.startswith("what is left in 1.* is less than ")


def whole_flop(model: nn.Module) -> float:
    return workload_of(model, find_blocks(model, sample=torch.randint(20, (4, 6))), samples=1).flop(width=1.0, height=1.0)


def test_the_line_that_puts_features_together_is_named() -> None:
    """A skip connection: what a layer gives is only a part of what the next one takes."""

    class Skipping(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.out = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(16, 3)

        def forward(self, x: torch.Tensor) -> Any:
            both = torch.cat((torch.relu(self.a(x)), torch.tanh(self.b(x))), dim=-1)
            return self.out(both)

    model = Skipping()
    found = find_blocks(model, sample=torch.randn(4, 6))
    assert not found.blocks
    assert found.stops.keys() == {"a.weight", "b.weight"}
    assert all("`both = torch.cat(" in line for line in found.stops.values())


def test_a_line_that_cannot_be_followed_is_named_with_what_to_do() -> None:
    class Looks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> Any:
            h = self.a(x)
            if self.a.weight.sum() > 100:
                h = 2 * h
            return self.b(torch.relu(h))

    found = described(nn.Sequential(Looks(), nn.Linear(8, 4)), torch.randn(4, 8))
    part = found.unfollowed[0]
    assert (part.layer, part.names) == ("Looks", ("0",))
    assert part.reason.startswith("test_tiled_describing.py:")
    assert "`if self.a.weight.sum() > 100:`: torch.export: " in part.reason
    assert "torch.where" in part.hint
    assert "not followed: " in found.summary


def test_a_list_of_layers_each_of_which_is_split_is_not_told_as_experts_that_could_not_be() -> None:
    layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True)
    found = described(nn.Sequential(nn.TransformerEncoder(layer, 2), nn.Linear(8, 3)), torch.randn(4, 5, 8))
    assert {(part.kind, len(part.names)) for part in found.split} == {("attention", 2), ("linear pair", 2)}
    assert found.unfollowed == ()
    assert "not followed" not in str(found)


def test_of_modules_in_each_other_the_innermost_is_told_of() -> None:
    class Branching(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> Any:
            y = self.a(x)
            if self.a.weight.mean() > 0:
                y = torch.tanh(y)
            return self.b(y)

    class Around(nn.Module):
        def __init__(self, inner: nn.Module) -> None:
            super().__init__()
            self.inner = inner

        def forward(self, x: torch.Tensor) -> Any:
            return self.inner(x)

    (part,) = described(Around(Around(Branching())), torch.randn(4, 8)).unfollowed
    assert (part.layer, part.names) == ("Branching", ("inner.inner",))


def test_a_weight_that_is_computed_from_others_is_called_so() -> None:
    normed = torch.nn.utils.parametrizations.weight_norm(nn.Linear(8, 16))
    found = described(nn.Sequential(normed, nn.ReLU(), nn.Linear(16, 8)), torch.randn(4, 8))
    (part,) = found.unfollowed
    assert part.reason == "a weight that is computed from others, as by weight_norm, is not split"
    assert "remove_parametrizations takes it away" in part.hint


@pytest.mark.parametrize("width", [80, 120])
def test_its_lines_fit_a_terminal(width: int) -> None:
    model, sample = two_heads()
    for found in (described(model, sample), described(model), described(nn.LSTM(4, 8))):
        lines = found.text(width=width).splitlines()
        assert lines
        assert max(map(len, lines)) <= width


def test_names_that_differ_in_numbers_are_one_and_are_said_once() -> None:
    names = [f"h.{layer}.mlp.{part}" for layer in range(12) for part in (0, 1)]
    assert ranges(names) == "h.0-11.mlp.0-1"
    assert ranges(["a.0.w", "a.2.w", "b", ""]) == "a.0.w, a.2.w, b, the network itself"
    assert ranges(["b", "b"]) == "b"
    assert ranges(["a.0", "a.0", "a.1", "b", "b"]) == "a.0-1, b"


def test_a_tiled_model_tells_it_and_tile_prints_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    model, sample = two_heads()
    (told,) = run_threads(lambda comm: tatami.tile(model, comm, batch_size=8, sample=sample, speeds="equal").describe(), size=1)
    assert told == described(model, sample)
    first, second = capsys.readouterr().out.splitlines()
    assert first == f"tatami: {told.summary}"
    assert "of the flop" in first
    assert "heads" in first
    assert second.startswith("tatami: timed lays 8 samples")


@pytest.mark.parametrize("sample", [None, torch.zeros(4, 6)])
def test_the_workload_lists_every_sum_of_batch_statistics(sample: torch.Tensor | None) -> None:
    """Two numbers for each channel and their count, split or not; a layer in evaluation mode sums nothing."""
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 5), nn.BatchNorm1d(5), nn.BatchNorm1d(5))
    model[4].eval()
    work = workload_of(model, find_blocks(model, sample=sample), samples=8)
    assert work.batch_statistics == (17, 11)
    model.eval()  # the whole network: it will train later
    assert workload_of(model, find_blocks(model, sample=sample), samples=8).batch_statistics == (17, 11, 11)


FROZEN: dict[str, Callable[[str, float], bool]] = {
    "nothing": lambda _name, _place: False,
    "the first half": lambda _name, place: place < 0.5,
    "all but the last": lambda _name, place: place < 0.8,
    "biases": lambda name, _place: "bias" in name,
}


@pytest.mark.parametrize("frozen", FROZEN)
@pytest.mark.parametrize("name", ["gpt-untied-by-hand", "geglu", "resnet", "mixer"])
def test_products_are_counted_as_torch_counts_them(name: str, frozen: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward and backward: frozen weights have no gradient, and what is in front of all trained weights needs none."""
    for module in (blocks, block_costs, flop_counting):
        monkeypatch.setattr(module, "ELEMENT_FLOP", 0)
    monkeypatch.setattr(tracing._TRACED, "_known", [])  # facts of equal modules, which count elements
    model, (sample,) = CASES[name].build().double(), CASES[name].draw(4, torch.Generator().manual_seed(0))
    weights = [(key, each) for key, each in model.named_parameters() if each.requires_grad]
    for place, (key, each) in enumerate(weights):
        each.requires_grad_(not FROZEN[frozen](key, place / len(weights)))
    work = workload_of(model, find_blocks(model, sample=sample), samples=4)
    with FlopCounterMode(display=False) as counted:
        torch.autograd.backward(model(sample).sum())
    assert work.flop(width=1.0, height=1.0) == pytest.approx(counted.get_total_flops(), rel=1e-6)
