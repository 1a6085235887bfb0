"""Which pairs are found in a network, in what it is written, and which are not taken because they could not be exact."""

from __future__ import annotations

import threading

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tatami.errors import ModelError
from tatami.partition.linear_pairs import PairNames, find_pairs
from tatami.train import find_blocks, workload_of
from tatami.workload import linear_pair


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


def test_a_layer_called_twice_is_in_no_pair() -> None:
    assert find_pairs(CalledTwice()) == ()


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
