"""Modules that run with some of their units as they are: what may be registered, mixtures, and logits that stay split."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from networks import CASES as NETWORKS
from networks import LARGE, Experts, build
from torch import nn

from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError
from tatami.partition.parts.split_logits import SplitLogits, split_logits
from tatami.runtime.context import ModuleContext, RankContext
from tatami.runtime.phases import Phases
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.tiling import Span
from tatami.train import find_blocks, register, tile
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
