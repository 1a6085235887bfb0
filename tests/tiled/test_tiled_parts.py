"""Modules that run with some of their units: what may be registered, mixtures, split logits, and pairs of linear layers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import CASES as NETWORKS
from networks import LARGE, Experts, build
from torch import nn

from drawing import Written
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError
from tatami.partition.linear_pairs import PairNames, find_pairs
from tatami.partition.parts.split_logits import SplitLogits, split_logits
from tatami.runtime.context import ModuleContext, RankContext
from tatami.runtime.phases import Phases
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.tiling import Span
from tatami.train import find_blocks, register, tile, workload_of
from tatami.workload import linear_pair
from tiled_rig import simple_layout

ROWS, TIME, CLASSES, WIDTH = 3, 4, 11, 5
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
LOSSES: dict[str, Loss] = {
    "cross-entropy": lambda logits, y: F.cross_entropy(logits.view(-1, CLASSES), y.view(-1)),
    "shifted": lambda logits, y: F.cross_entropy(
        logits[:, :-1].reshape(-1, logits.size(-1)), y[:, 1:].reshape(-1), ignore_index=2, reduction="sum"
    ),
    "scaled, summed": lambda logits, y: nn.CrossEntropyLoss(reduction="sum")(logits.flatten(0, 1) * 0.5, y.flatten()),
    "not flattened": lambda logits, y: F.cross_entropy(logits.transpose(1, 2), y),
    "smoothed": lambda logits, y: F.cross_entropy(logits.flatten(0, 1), y.flatten(), label_smoothing=0.1),
    "anything": lambda logits, y: (
        (logits.softmax(-1) ** 2).sum() + logits[..., 3].sum() + (logits * logits).mean() + 0 * y[0, 0]
    ),
}


@pytest.mark.threads_only
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("name", sorted(LOSSES))
def test_losses_of_split_logits_are_those_of_whole_ones(comm: AbstractCommunicator, name: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(ROWS, TIME, WIDTH, dtype=torch.float64, generator=generator)
    weight = torch.rand(CLASSES, WIDTH, dtype=torch.float64, generator=generator)
    target = torch.randint(CLASSES, (ROWS, TIME), generator=generator)
    target[0, 0] = -100 if name != "smoothed" else 0
    own_x, own_weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    expected = LOSSES[name](F.linear(own_x, own_weight), target)
    expected.backward()  # type: ignore[no-untyped-call]
    assert own_x.grad is not None
    assert own_weight.grad is not None
    wanted_x, wanted_weight = own_x.grad, own_weight.grad
    cuts = {2: [0, 6, CLASSES], 3: [0, 0, 4, CLASSES]}[comm.size]  # of three ranks, one has no class
    span = Span(cuts[comm.rank], cuts[comm.rank + 1])
    replica = ReplicaComm(Phases())
    replica.meet(comm)
    rank = RankContext(replica=replica, comm=comm, generator=torch.Generator())
    part, given = weight[span.slice()].clone().requires_grad_(), x.clone().requires_grad_()
    logits = split_logits(F.linear(given, part), CLASSES, ModuleContext(rank=rank, units=[lambda: span]))
    assert isinstance(logits, SplitLogits)
    assert logits.shape == (ROWS, TIME, CLASSES)
    loss = LOSSES[name](logits, target)
    loss.backward()  # type: ignore[no-untyped-call]
    torch.testing.assert_close(loss, expected.detach(), rtol=1e-12, atol=0)
    torch.testing.assert_close(part.grad, wanted_weight[span.slice()], rtol=1e-11, atol=1e-14)
    assert given.grad is not None
    replica.sum_(given.grad)
    torch.testing.assert_close(given.grad, wanted_x, rtol=1e-11, atol=1e-14)
    for changed in (lambda: logits.add_(1.0), lambda: logits.__setitem__((..., 0), 1.0)):
        with pytest.raises(ModelError, match="is changed in place"):
            changed()


@pytest.mark.ranks(2)
def test_the_vocabulary_of_a_gpt_stays_split_in_training(comm: AbstractCommunicator) -> None:
    case = NETWORKS["vocabulary"]
    network = build(case)
    (text,) = case.draw(4, torch.Generator().manual_seed(2))
    assert isinstance(text, torch.Tensor)
    whole = F.cross_entropy(network(text).flatten(0, 1), text.flatten())
    layout = simple_layout([0, 1])
    model = tile(network, comm, batch_size=4, sample=text, speeds="equal", layout=layout, reduction="mean")
    logits = model(model.local(text))
    assert isinstance(logits, SplitLogits)
    assert logits.part.shape[-1] == LARGE // 2
    torch.testing.assert_close(F.cross_entropy(logits.flatten(0, 1), text.flatten()), whole, rtol=1e-12, atol=0)
    with torch.no_grad():
        assert type(model(text)) is torch.Tensor
    rows = [rows.tensor.shape for rows in model.block_rows()[0]]
    assert rows == [(LARGE // 2, 12)]  # one weight, under two names


class Shared(nn.Module):
    """A mixture with an expert that all tokens use: it is no sum over the experts alone."""

    def __init__(self) -> None:
        super().__init__()
        self.mixture = Experts(6, 3)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> Any:
        result: torch.Tensor = self.experts[1](self.experts[0](x))
        return result + self.mixture(x)


def test_modules_that_look_like_experts_and_are_none_are_not_split() -> None:
    found = find_blocks(Shared(), sample=torch.rand(4, 3, 6))
    assert {block.facts.name for block in found.blocks} == {"mixture"}
    assert "not the sum" in found.reasons[""]


class Odd(nn.Module):
    def __init__(self, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.units = 4
        self.up, self.down = nn.Linear(3, 8), nn.Linear(8, 3)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.dropout(self.up(x))).view(*x.shape[:-1], self.units, 2)
        return self.down(hidden.flatten(-2)) if hidden.sum().item() < 1e9 else x


CUT = {"up.weight": 0, "up.bias": 0, "down.weight": 1}


@pytest.mark.parametrize(
    ("declared", "match"),
    [
        ({"units": "num"}, "has no attribute 'num'"),
        ({"cut": {"left.weight": 0}}, r"has no tensor 'left.weight'; it has down.bias, down.weight"),
        ({"cut": {**CUT, "down.bias": 0}, "once": []}, r"has down.bias of shape \(3,\), whose axis 0 is not 1 x 4 units"),
        ({"once": ["bias"]}, "has no tensor 'bias'"),
        ({"scaled": ["training"]}, "is no multiple of its 4 units"),
    ],
)
def test_what_cannot_be_registered_is_refused_by_name(declared: dict[str, object], match: str) -> None:
    register(Odd, **{"units": "units", "cut": CUT, "once": ["down.bias"], **declared})  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=match):
        find_blocks(nn.Sequential(Odd()), sample=torch.rand(4, 3))


def test_what_was_registered_is_believed_only_after_its_test() -> None:
    register(Odd, units="units", cut=CUT)  # the bias would be added by every rank
    found = find_blocks(nn.Sequential(Odd()), sample=torch.rand(4, 3))
    assert not found.blocks
    assert "not the sum" in found.reasons["0"]
    register(Odd, units="units", cut=CUT, once=["down.bias"])
    found = find_blocks(nn.Sequential(Odd()), sample=torch.rand(4, 3))
    assert [(block.facts.units, block.facts.unit_parameters) for block in found.blocks] == [(4, 2 * 3 + 2 + 2 * 3)]
    found = find_blocks(nn.Sequential(Odd(dropout=0.5)), sample=torch.rand(4, 3))
    assert not found.blocks
    assert "draws random numbers" in found.reasons["0"]
    register(Odd, units="units", cut={**CUT, "down.weight": -1}, once=["down.bias"])
    assert len(find_blocks(nn.Sequential(Odd()), sample=torch.rand(4, 3)).blocks) == 1


@pytest.mark.parametrize(
    ("module", "declared", "match"),
    [
        (Odd, {"cut": {}}, "without a tensor that is cut"),
        (Odd, {"units": 4}, "units is the attribute of Odd that says how many units it has, a name, not 4"),
        (Odd, {"once": "down.bias"}, r"once is a list of names, so write \['down.bias'\]"),
        (Odd, {"once": ["up.bias"]}, "Odd was registered with up.bias both in cut and in once"),
        ("Odd", {}, "takes a class of modules, not 'Odd'"),
    ],
)
def test_what_register_does_not_take(module: Any, declared: dict[str, Any], match: str) -> None:
    with pytest.raises(ModelError, match=match):
        register(module, **{"units": "units", "cut": CUT, **declared})


def pair(first: str, second: str, *dropouts: str, others: tuple[str, ...] = ()) -> PairNames:
    return PairNames(first=first, second=second, dropouts=dropouts, others=others)


class Layers(nn.Module):
    """Three linear layers for forward passes of many kinds."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 8), nn.Linear(8, 4), nn.Linear(4, 4)


class FunctionalChain(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(self.b(2 * F.leaky_relu(F.gelu(self.a(x)), 0.1) - 1))
        return result


class HiddenUsedTwice(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.a(x))
        result: torch.Tensor = self.c(torch.relu(self.b(hidden))) + hidden.mean()
        return result


class CalledTwice(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(torch.relu(self.b(torch.tanh(self.a(self.b(torch.tanh(self.a(x))))))))
        return result


class WeightReadElsewhere(Layers):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.c(torch.relu(self.b(torch.tanh(self.a(x))))), self.a.weight.norm()


class NotElementwise(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.c(torch.relu(self.b(torch.softmax(self.a(x), -1))))
        return result


class Gated(Layers):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up = self.a(x)
        result: torch.Tensor = self.c(torch.sin(self.b(torch.sigmoid(up) * up)))
        return result


class Tied(Layers):
    def __init__(self) -> None:
        super().__init__()
        self.d = nn.Linear(4, 8)
        self.d.weight = self.a.weight
        self.e = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.e(self.d(self.c(torch.tanh(self.b(torch.tanh(self.a(x)))))))
        return result


class Untraceable(nn.Module):
    """The forward pass depends on the data, which fx can not follow."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(4, 8), nn.Dropout(0.1), nn.ReLU(), nn.Linear(8, 4), nn.Softmax(-1), nn.Linear(4, 3), nn.Linear(3, 2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.net(x)
        return result if result.sum() > 0 else -result


@pytest.mark.parametrize(
    ("model", "pairs"),
    [
        (nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 2)), [pair("0", "1")]),
        (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Dropout(0.5), nn.Linear(8, 2)), [pair("0", "3", "2", others=("1",))]),
        (nn.Sequential(*(nn.Linear(4, 4) for _ in range(5))), [pair("0", "1"), pair("2", "3")]),
        (
            nn.Sequential(nn.Sequential(nn.Linear(4, 8), nn.Tanh()), nn.Sequential(nn.Linear(8, 2))),
            [pair("0.0", "1.0", others=("0.1",))],
        ),
        (FunctionalChain(), [pair("a", "b")]),
        (HiddenUsedTwice(), [pair("b", "c")]),
        (WeightReadElsewhere(), [pair("b", "c")]),
        (NotElementwise(), [pair("b", "c")]),
        (Gated(), [pair("b", "c")]),
        (Tied(), [pair("b", "c")]),
        (CalledTwice(), []),
        (Untraceable(), [pair("net.0", "net.3", "net.1", others=("net.2",)), pair("net.5", "net.6")]),
        (
            nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 8)), nn.Tanh(), nn.Linear(8, 4), nn.Linear(4, 2)),
            [pair("2", "3")],
        ),
    ],
    ids=lambda value: type(value).__name__,
)
def test_pairs(model: nn.Module, pairs: list[PairNames]) -> None:
    assert list(find_pairs(model)) == pairs


def evaluating(net: nn.Module) -> bool:
    return not net.training


def without_gradients(net: nn.Module) -> bool:  # noqa: ARG001
    return not torch.is_grad_enabled()


@pytest.mark.parametrize("is_other", [evaluating, without_gradients])
@pytest.mark.parametrize(
    ("other", "pairs"),
    [
        (lambda net, x: net.b(net.a(x).softmax(-1)), []),
        (lambda net, x: net.a(x), []),
        (lambda net, x: net.b(net.a(x)), [pair("a", "b")]),
        (lambda _, x: x, [pair("a", "b")]),
    ],
)
def test_a_pair_is_one_in_evaluation_and_without_gradients(
    is_other: Callable[[nn.Module], bool], other: Callable[[Any, torch.Tensor], torch.Tensor], pairs: list[PairNames]
) -> None:
    def forward(net: Any, x: torch.Tensor) -> Any:
        return other(net, x) if is_other(net) else net.b(torch.relu(net.a(x)))

    model = Written(forward, a=nn.Linear(4, 8), b=nn.Linear(8, 4))
    assert list(find_pairs(model)) == pairs
    assert all(module.training for module in model.modules())


def test_layers_with_hooks_stay_as_they_are() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 2))
    model[0].register_forward_hook(lambda *_: None)
    assert find_pairs(model) == (pair("2", "4", others=("3",)),)


def test_dropouts_of_other_kinds_are_refused() -> None:
    class Locked(nn.Dropout):
        pass

    with pytest.raises(ModelError, match=r"layer 1 \(Locked\) draws random numbers"):
        find_blocks(nn.Sequential(nn.Linear(4, 8), Locked(), nn.Linear(8, 4)))


def test_the_workload_counts_what_is_tiled_and_what_is_replicated() -> None:
    model = nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 5, bias=False), nn.Linear(5, 3)).double()
    workload = workload_of(model, find_blocks(model), samples=10)
    assert workload.blocks == (linear_pair(4, 8, 5, unit_bias=True, input_gradient=True),)
    assert workload.replicated_parameters == 8 + 15 + 3
    assert workload.replicated_flop_per_sample == 6 * 15
    assert (workload.samples, workload.element_bytes) == (10, 8)


def test_the_first_pair_needs_no_input_gradient_and_half_precision_travels_in_single() -> None:
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4), nn.Tanh(), nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
    workload = workload_of(model.bfloat16(), find_blocks(model), samples=3)
    assert [each.backward_elements for each in workload.blocks] == [0, 4]
    assert workload.element_bytes == 4


class AnotherThreadMeanwhile(Layers):
    """While its forward pass is followed, another thread computes with modules of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        other = nn.Sequential(nn.Linear(2, 2), nn.Tanh())
        said: list[torch.Tensor] = []
        thread = threading.Thread(target=lambda: said.append(other(torch.ones(1, 2))))
        thread.start()
        thread.join()
        assert len(said) == 1  # an error here, and the pair is not found
        assert type(said[0]) is torch.Tensor
        result: torch.Tensor = self.b(torch.relu(self.a(x)))
        return result


def test_other_threads_compute_with_their_modules_while_a_network_is_followed() -> None:
    assert find_pairs(AnotherThreadMeanwhile()) == (pair("a", "b"),)
