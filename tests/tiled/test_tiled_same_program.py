"""Layers with the same program are traced once; a layer that differs in anything its trace depends on is traced by itself."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from equal_runs import check_case
from networks import Batch, Case
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils import _pytree as pytree

from tatami.partition.blocks import find_blocks
from tatami.partition.tracing import tracing
from tatami.partition.tracing.exporting import FollowedProgram, ModuleCall, export
from tatami.partition.tracing.same_program import structure_of
from tatami.testing.worlds import World

FACTOR = {"now": 2.0}
"""What a layer may compute with that is no attribute of it."""


class Layer(nn.Module):
    """A gated perceptron whose forward pass reads one of many things, by `reads`."""

    def __init__(self, index: int, reads: str, config: SimpleNamespace) -> None:
        super().__init__()
        self.first, self.drop, self.last = nn.Linear(6, 10), nn.Dropout(0.2), nn.Linear(10, 6)
        self.gate = nn.Linear(6, 10)
        self.register_buffer("mask", torch.ones(10))
        self.index, self.reads, self.config, self.gated, self._scale = index, reads, config, False, 1.0
        self.act: Callable[[torch.Tensor], torch.Tensor] = torch.relu
        self.table = [1.0, 1.0]
        self.constant = np.ones(2)

    def factor(self) -> Any:
        match self.reads:
            case "index":
                return 1.0 / (self.index + 1)
            case "kind of the layer":
                return 2.0 if self.config.kinds[self.index] == "sliding" else 1.0
            case "configuration":
                return self.config.factor
            case "private number":
                return self._scale
            case "list":
                return self.table[1]
            case "constant array":
                return float(self.constant[1])
            case "dict of the module":
                return vars(self)["_scale"]
            case "buffer":
                return self.mask
            case "global":
                return FACTOR["now"]
            case "which layer it is":
                return 3.0 if self.config.first[0] is self else 1.0
        return 1.0

    def forward(self, x: torch.Tensor) -> Any:
        h = self.act(self.gate(x)) * self.first(x)
        h = h * torch.sigmoid(h) if self.gated else h
        return x + self.last(self.drop(h * self.factor()))


class Frozen(nn.Dropout):
    """It stays in the mode that it is in."""

    def train(self, mode: bool = True) -> Frozen:  # noqa: ARG002
        return self


class Net(nn.Module):
    def __init__(self, reads: str = "nothing") -> None:
        super().__init__()
        config = SimpleNamespace(kinds=["full", "sliding"], factor=2.0, first=[])
        self.embedding = nn.Linear(6, 6)
        self.layers = nn.ModuleList(Layer(index, reads, config) for index in range(2))
        config.first.append(self.layers[0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embedding(x)
        for layer in self.layers:
            x = layer(x)
        return x


def other_class(layer: Any) -> None:
    layer.drop = Frozen(0.2)
    layer.drop.training = False


def nothing(layer: Any) -> None:
    del layer


Change = Callable[[Any], object]
DIFFERENT: dict[str, tuple[str, Change]] = {
    "flag": ("nothing", lambda layer: setattr(layer, "gated", True)),
    "dropout": ("nothing", lambda layer: setattr(layer.drop, "p", 0.5)),
    "index": ("index", nothing),
    "kind of the layer": ("kind of the layer", nothing),
    "private number": ("private number", lambda layer: setattr(layer, "_scale", 3.0)),
    "dict of the module": ("dict of the module", lambda layer: setattr(layer, "_scale", 3.0)),
    "list": ("list", lambda layer: setattr(layer, "table", [1.0, 4.0])),
    "constant array": ("constant array", lambda layer: setattr(layer, "constant", np.array([1.0, 5.0]))),
    "configuration": (
        "configuration",
        lambda layer: setattr(layer, "config", SimpleNamespace(**{**vars(layer.config), "factor": 7.0})),
    ),
    "function": ("nothing", lambda layer: setattr(layer, "act", torch.tanh)),
    "closure": ("nothing", lambda layer: setattr(layer, "act", lambda h: 2.0 * torch.relu(h))),
    "class inside": ("nothing", other_class),
    "frozen weight": ("nothing", lambda layer: layer.first.weight.requires_grad_(False)),
    "which layer it is": ("which layer it is", nothing),
}
SAME: dict[str, tuple[str, Change]] = {
    "all": ("nothing", nothing),
    "index that is not read": ("nothing", lambda layer: setattr(layer, "_scale", 3.0)),
    "values of a buffer": ("buffer", lambda layer: setattr(layer, "mask", torch.linspace(0.0, 1.0, 10))),
    "global": ("global", nothing),
}


def programs(net: Net) -> list[Any]:
    """What was found of each layer, after it was compared in both modes with what the layer computes."""
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(3))
    found = find_blocks(net, sample=x)
    assert sorted(found.followed) == ["layers.0", "layers.1"], found.reasons
    for name, each in found.followed.items():
        layer = net.get_submodule(name)
        for training in (True, False):
            layer.train(training)
            program = each.mode(training).program
            tensors = dict(layer.named_parameters(remove_duplicate=False)) | dict(layer.named_buffers())
            torch.manual_seed(5)
            expected = layer(x)
            torch.manual_seed(5)
            (actual,) = program.graph(*(tensors[tensor] for tensor in program.tensors), x)
            torch.testing.assert_close(actual, expected)
    return list(found.followed.values())


@pytest.mark.parametrize("name", [*DIFFERENT, *SAME])
def test_layers_share_a_program_where_they_differ_in_nothing_that_is_read(name: str) -> None:
    reads, change = {**DIFFERENT, **SAME}[name]
    net = Net(reads)
    change(net.layers[1])
    first, second = programs(net)
    assert (first is second) == (name in SAME)


def test_a_program_is_not_used_after_a_global_that_it_was_made_with_has_changed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = programs(Net("global"))
    monkeypatch.setitem(FACTOR, "now", 5.0)
    after = programs(Net("global"))
    assert after[0] is not before[0]


def test_what_many_layers_fail_with_is_found_out_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    traced = []
    compute = tracing._followed

    def counted(module: nn.Module, *rest: Any) -> Any:
        traced.append(module)
        return compute(module, *rest)

    monkeypatch.setattr(tracing._TRACED, "_compute", counted)

    class Branching(nn.Module):
        def __init__(self, index: int) -> None:
            super().__init__()
            self.first, self.last, self.index = nn.Linear(6, 10), nn.Linear(10, 6), index

        def forward(self, x: torch.Tensor) -> Any:
            h = self.last(torch.relu(self.first(x)))
            return x + (h if self.first.weight.sum() > self.index else 2 * h)

    net = nn.Sequential(nn.Linear(6, 6), *(Branching(index) for index in range(5)))
    found = find_blocks(net, sample=torch.randn(4, 6))
    assert sum(isinstance(module, Branching) for module in traced) == 2
    assert len({found.reasons[str(index)] for index in range(1, 6)}) == 1


def test_inputs_and_weights_that_are_shared_are_a_structure_of_their_own() -> None:
    x, layer = torch.randn(2, 6), nn.Bilinear(6, 6, 3)
    calls = [ModuleCall(args=args, kwargs={}, sample_axes=(0, 0)) for args in ((x, x), (x, x.clone()))]
    assert structure_of(layer, calls[0]) != structure_of(layer, calls[1])
    tied, other = (nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)) for _ in range(2))
    tied[1].weight = tied[0].weight
    call = ModuleCall(args=(x,), kwargs={}, sample_axes=(0,))
    assert structure_of(tied, call) != structure_of(other, call)


def scaled_by_index() -> nn.Module:
    net = Net("index")
    net.layers[1].drop.p = 0.4  # type: ignore[union-attr]
    return net


def rows(samples: int, generator: torch.Generator) -> Batch:
    return (torch.randn(samples, 6, generator=generator, dtype=torch.float64),)


@pytest.mark.threads_only
def test_layers_that_nearly_are_the_same_equal_the_plain_ones(world: World) -> None:
    check_case(world, Case(build=scaled_by_index, draw=rows, blocks=("gated pair",) * 2))


RECURRENT: dict[str, Callable[[], nn.Module]] = {
    "lstm": lambda: nn.LSTM(3, 4, num_layers=2, bidirectional=True, batch_first=True),
    "lstm with projections": lambda: nn.LSTM(3, 4, proj_size=2, batch_first=True),
    "gru": lambda: nn.GRU(3, 4, bidirectional=True, batch_first=True),
    "rnn": lambda: nn.RNN(3, 4, num_layers=2, bias=False, batch_first=True),
    "rnn with relu": lambda: nn.RNN(3, 4, nonlinearity="relu", batch_first=True),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_a_recurrent_layer_is_one_operation_for_any_number_of_steps(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    layer = RECURRENT[name]()
    looked_at: list[object] = []
    dispatch = FakeTensorMode.dispatch

    def counted(mode: FakeTensorMode, function: Any, *others: Any, **kwargs: Any) -> Any:
        looked_at.append(function)
        return dispatch(mode, function, *others, **kwargs)

    monkeypatch.setattr(FakeTensorMode, "dispatch", counted)

    def program_of(steps: int) -> tuple[FollowedProgram, int]:
        looked_at.clear()
        program = export(layer, ModuleCall(args=(torch.randn(5, steps, 3),), kwargs={}, sample_axes=(0,)))
        return program, len(looked_at)

    program, operations = program_of(6)
    assert operations == program_of(12)[1], "torch alone goes through all steps"
    for shape in ((5, 6, 3), (2, 9, 3)):
        x = torch.randn(shape)
        found, expected = tracing._run(layer, program, x), layer(x)
        for one, other in zip(pytree.tree_leaves(found), pytree.tree_leaves(expected), strict=True):
            assert torch.equal(one, other)
    steps = torch.export.export(layer, (torch.randn(5, 6, 3),), strict=False).run_decompositions()
    assert len(steps.graph.nodes) > len(program.graph.graph.nodes), "elsewhere torch has what it always has"
