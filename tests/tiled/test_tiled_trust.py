"""What a user may do after `tatami.tile`, or have done before: as on one machine, or refused by name; never another number."""

import copy
import re
import threading
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize, prune

from drawing import Written, one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError, ModelError
from tatami.parallel import DataParallel
from tatami.testing.worlds import World
from tatami.tiling import Layout
from tatami.train import TiledModel, Trainer, WeightAverage, move, tile, whole_state_dict
from tiled_rig import assert_close, gradients, simple_layout, whole_gradients

pytestmark = pytest.mark.ranks(1, 2, 3)

SAMPLES = 12
PRUNE: Any = prune.l1_unstructured  # which torch has no types for
Change = Callable[[Any, int], Any]
"""What happens to the network before a step of this number, on one machine as on each rank."""


class Gate(nn.Module):
    """A gated pair, which is split as a program, with all that may be changed in one; then a pair of linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(6, 8), nn.Linear(6, 8), nn.Linear(8, 6)
        self.slope, self.dropout = nn.LeakyReLU(0.1), nn.Dropout(0.0)
        self.temperature, self.is_squared = 1.0, False
        self.settings = {"scale": 1.0}
        self.register_buffer("warmth", torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        gate = torch.sigmoid(self.gate(x) * self.temperature * self.warmth) * self.settings["scale"]
        gate = gate * gate if self.is_squared else gate
        return x + self.down(self.dropout(self.slope(self.up(x)) * gate))


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gated = Gate()
        self.pair = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.pair(self.gated(x))


@one_at_a_time
def network() -> Network:
    torch.manual_seed(0)
    return Network().double()


def batch(number: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(number)
    return tuple(torch.randn(SAMPLES, width, generator=generator, dtype=torch.float64) for width in (6, 3))  # type: ignore[return-value]


def split(size: int) -> Layout:
    """One replica of all ranks; of three ranks, two replicas, of which one is a rank alone."""
    return simple_layout([0, 1], [2], widths=[0.75, 0.25]) if size == 3 else simple_layout(list(range(size)))


def data(size: int) -> Layout:
    return simple_layout(
        *([rank] for rank in range(size)), widths=[(rank + 1) / (size * (size + 1) / 2) for rank in range(size)]
    )


def tiled(built: nn.Module, comm: AbstractCommunicator, layout: Layout) -> TiledModel:
    return tile(built, comm, batch_size=SAMPLES, sample=batch()[0], layout=layout, speeds="equal", reduction="mean", quiet=True)


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)


def nothing(*_: Any) -> None:
    """As the name says."""


def sgd_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.SGD(parameters, lr=0.1)


@dataclass(frozen=True, kw_only=True)
class Case:
    """A training script.

    Attributes:
        change: what happens before each step.
        refused: the error where ranks share units, or everywhere; None: it is exact.
        before: what happens to the network before it is tiled.
        anywhere: whether it is refused in layouts without shared units as well.
        optimizer: of the network.
    """

    change: Change = field(default=nothing)
    refused: str | None = None
    before: Callable[[Any], Any] = field(default=nothing)
    anywhere: bool = False
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = sgd


def train(model: nn.Module, case: Case, *, steps: int = 9) -> None:
    """An ordinary loop, over global batches where the model is tiled."""
    inner = model.module if isinstance(model, (TiledModel, DataParallel)) else model
    assert isinstance(inner, nn.Module)
    optimizer = case.optimizer(model)
    for step in range(steps):
        case.change(inner, step)
        x, y = batch(step)
        if isinstance(model, (TiledModel, DataParallel)):
            x, y = model.local(x, y)
        known = {id(each) for group in optimizer.param_groups for each in group["params"]}
        if new := [each for each in model.parameters() if id(each) not in known]:
            optimizer.add_param_group({"params": new})
        optimizer.zero_grad()
        loss: Any = F.mse_loss(model(x), y)
        loss.backward()
        optimizer.step()


def at(step: int, change: Callable[[Any], Any]) -> Change:
    return lambda network, now: change(network) if now == step else None


def groups(model: nn.Module) -> torch.optim.Optimizer:
    """As minGPT does: weights of linear layers decay, all others do not."""
    decayed = [module.get_parameter("weight") for module in model.modules() if isinstance(module, nn.Linear)]
    others = [each for each in model.parameters() if all(each is not weight for weight in decayed)]
    options: Any = [{"params": decayed, "weight_decay": 0.1}, {"params": others}]
    return torch.optim.SGD(options, lr=0.1)


def restart(network: Any) -> None:
    generator = torch.Generator().manual_seed(1)
    for module in network.modules():
        if isinstance(module, nn.Linear):
            nn.init.xavier_uniform_(module.weight, generator=generator)


def add_noise(network: nn.Module, step: int) -> None:
    generator = torch.Generator().manual_seed(step)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype))


def clamp_gradient(weight: torch.Tensor) -> None:
    assert weight.grad is not None
    weight.grad.clamp_(-0.01, 0.01)


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return 2.0 * weight


CASES = {
    "nothing": Case(),
    "optimizer groups by module type": Case(optimizer=groups),
    "temperature": Case(
        change=at(2, lambda n: setattr(n.gated, "temperature", 0.5)), refused=r"gated\.temperature was changed"
    ),
    "flag": Case(change=at(2, lambda n: setattr(n.gated, "is_squared", True)), refused=r"gated\.is_squared was changed.*False"),
    "slope": Case(change=at(2, lambda n: setattr(n.gated.slope, "negative_slope", 0.5)), refused=r"slope\.negative_slope"),
    "entry": Case(change=at(2, lambda n: n.gated.settings.update(scale=2.0)), refused=r"gated\.settings was changed"),
    "dropout": Case(change=at(2, lambda n: setattr(n.gated.dropout, "p", 1.0)), refused=r"gated\.dropout\.p was changed"),
    "buffer": Case(change=lambda n, step: n.gated.warmth.fill_(1 / (1 + step))),
    "softmax in a pair": Case(
        change=at(2, lambda n: n.pair.__setitem__(1, nn.Softmax(-1))), refused=r"layer pair\.1 was changed"
    ),
    "ReLU in a pair": Case(change=at(2, lambda n: n.pair.__setitem__(1, nn.ReLU()))),
    "layer of a program": Case(change=at(2, lambda n: setattr(n.gated, "slope", nn.Tanh())), refused=r"layer gated\.slope was"),
    "hook in a program": Case(
        change=at(2, lambda n: n.gated.up.register_forward_hook(lambda *given: 2 * given[2])),
        refused=r"list of hooks of gated\.up",
    ),
    "mixing hook in a pair": Case(
        change=at(2, lambda n: n.pair[1].register_forward_hook(lambda *given: given[2] - given[2].mean(-1, keepdim=True))),
        refused=r"pair\.1 has got a hook",
    ),
    "hook that looks in a pair": Case(
        change=at(2, lambda n: n.pair[1].register_forward_hook(lambda *_: None)), refused=r"pair\.1 has got a hook"
    ),
    "prune": Case(change=at(2, lambda n: PRUNE(n.gated.up, "weight", 0.5)), refused=r"gated\.up"),
    "prune in a pair": Case(
        change=at(2, lambda n: PRUNE(n.pair[0], "weight", 0.5)), refused=r"parameters and buffers of pair\.0"
    ),
    "parametrize in a pair": Case(
        change=at(2, lambda n: parametrize.register_parametrization(n.pair[2], "weight", Doubled())), refused=r"pair\.2"
    ),
    "parametrize": Case(
        change=at(2, lambda n: parametrize.register_parametrization(n.gated.up, "weight", Doubled())), refused=r"gated\.up"
    ),
    "hook of a parameter before": Case(before=lambda n: n.gated.up.weight.register_hook(lambda grad: grad / grad.norm())),
    "hook of a parameter in a pair before": Case(before=lambda n: n.pair[0].weight.register_hook(lambda grad: grad.sign())),
    "hook after accumulation before": Case(
        before=lambda n: n.gated.up.weight.register_post_accumulate_grad_hook(clamp_gradient)
    ),
    "forward-pre hook before": Case(
        before=lambda n: n.gated.down.register_forward_pre_hook(lambda _, given: given[0].softmax(-1))
    ),
    "backward hook before": Case(before=lambda n: n.pair[0].register_full_backward_hook(lambda *given: (2.0 * given[1][0],))),
}


def run(case: Case, built: nn.Module, comm: AbstractCommunicator, layout: Layout, expected: dict[str, torch.Tensor]) -> None:
    model = tiled(built, comm, layout)
    shares = any(len(replica.processors) > 1 for replica in layout.replicas)
    if case.refused is not None and comm.size > 1 and (shares or case.anywhere):
        with pytest.raises((ModelError, InputError), match=case.refused):
            train(model, case)
        return
    train(model, case)
    weights = comm.bcast_object(whole_state_dict(model))
    assert_close({name: weights[name] for name in expected}, expected, what="weights")


def clipped(model: nn.Module) -> torch.optim.Optimizer:
    """An optimizer before whose steps gradients are clipped by hand."""
    optimizer = sgd(model)

    def clip(*_: Any) -> None:
        grads = [each.grad for each in model.parameters() if each.grad is not None]
        largest = max(float(grad.abs().max()) for grad in grads if grad.numel())
        torch._foreach_div_(grads, largest)

    optimizer.register_step_pre_hook(clip)
    return optimizer


@pytest.mark.ranks(2)
def test_after_a_rank_has_joined_all_look_at_the_elements_that_it_looks_at(comm: AbstractCommunicator) -> None:
    model = tiled(network(), comm, split(comm.size))
    first, second = model._weights(), model._weights()
    assert second != first
    model._regroup(cluster=model.cluster)
    assert model._weights() == first


@pytest.mark.ranks(2)
def test_a_number_of_a_class_is_one_of_its_modules(comm: AbstractCommunicator) -> None:
    class Scaled(Gate):
        factor = 1.0

        def forward(self, x: torch.Tensor) -> Any:
            return self.factor * super().forward(x)

    built = network()
    built.gated = Scaled().double()
    model = tiled(built, comm, split(comm.size))
    model(model.local(batch()[0]))
    Scaled.factor = 2.0
    with pytest.raises(ModelError, match=r"Scaled\.factor was changed after the network was tiled: it was 1.0, and is 2.0"):
        model(model.local(batch()[0]))


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("sample", [None, batch()[0]])
def test_hooks_that_were_there_before_are_called_with_whole_tensors(comm: AbstractCommunicator, sample: Any) -> None:
    """Those of layers, of what is between them, and of an encoder whose last layer would be the first one of a pair."""
    built, seen = nn.Sequential(nn.Sequential(nn.Linear(6, 8), nn.Tanh()), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 3)), []
    for inner in (built[0], built[2]):
        inner.register_forward_hook(lambda _, __, found: seen.append((threading.get_ident(), found.shape)))
    layout = split(comm.size)
    model = tile(
        built.double(), comm, batch_size=SAMPLES, sample=sample, layout=layout, reduction="mean", speeds="equal", quiet=True
    )
    x = model.local(batch()[0])
    seen.clear()
    comm.barrier()
    for _ in range(2):
        model(x)
    assert [shape for thread, shape in seen if thread == threading.get_ident()] == [(len(x), 8)] * 4


DRIFTS = {
    "initialization from one seed": Case(change=at(2, restart), refused="is not the same on all ranks"),
    "noise from one seed": Case(change=add_noise, refused="is not the same on all ranks"),
    "norms by hand": Case(optimizer=clipped, refused="is not the same on all ranks"),
}


@pytest.mark.ranks(3)
@pytest.mark.parametrize("name", DRIFTS)
def test_ranks_that_drift_apart_are_found(comm: AbstractCommunicator, name: str) -> None:
    """Tiles of other sizes draw other numbers, and have norms of their own."""
    case, built = DRIFTS[name], network()
    model = tiled(built, comm, split(comm.size))
    with pytest.raises(InputError, match=case.refused):
        train(model, case)


EXTRA = nn.Linear(3, 3).double()
EXTRA.load_state_dict({"weight": torch.full((3, 3), 0.1), "bias": torch.full((3,), 0.1)})
MID_RUN = {
    "added": (at(2, lambda n: n.pair.append(copy.deepcopy(EXTRA))), None),
    "weight norm": (at(2, lambda n: nn.utils.parametrizations.weight_norm(n.pair[2])), "replaced"),
    "frozen": (at(2, lambda n: n.gated.up.requires_grad_(False)), None),
    "pruned": (at(2, lambda n: PRUNE(n.pair[2], "bias", 0.5)), None),
}


@pytest.mark.parametrize("make", [DataParallel, tiled])
@pytest.mark.parametrize("name", MID_RUN)
def test_parameters_that_change_in_mid_run(comm: AbstractCommunicator, make: Any, name: str) -> None:
    """A parameter that is new to the network is summed; one that is frozen has no gradient from then on."""
    change, refused = MID_RUN[name]
    plain, built, case = network(), network(), Case(change=change)
    train(plain, case)
    expected = {key: value.detach().clone() for key, value in plain.state_dict().items()}
    model = tiled(built, comm, data(comm.size)) if make is tiled else DataParallel(copy.deepcopy(built), comm)
    is_refused = refused is not None and make is tiled and comm.size > 1
    if is_refused:
        with pytest.raises((ModelError, InputError), match=refused):
            train(model, case)
        return
    train(model, case)
    weights = model.module.state_dict()
    assert_close({key: weights[key] for key in expected}, expected, what="weights")


@pytest.mark.parametrize("lay", [split, data])
@pytest.mark.parametrize("name", CASES)
def test_it_is_as_on_one_machine_or_refused(world: World, name: str, lay: Callable[[int], Layout]) -> None:
    case, plain, built = CASES[name], network(), network()
    case.before(plain)
    case.before(built)
    train(plain, case)
    expected = {key: value.detach().clone() for key, value in plain.state_dict().items() if "_mask" not in key}
    world(lambda comm: run(case, built, comm, lay(comm.size), expected))


# -- samples that see each other -----------------------------------------------------------------------------------------------


class Coupled(nn.Module):
    """A network whose result for a sample depends on other samples."""

    def __init__(self, couple: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        self.couple = couple

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.couple(self.pair(x))


def with_capacity(h: torch.Tensor) -> torch.Tensor:
    """Each of three experts takes a third of the samples and one more; what comes later is left out."""
    chosen = h.argmax(-1)
    places = torch.stack([(chosen[: place + 1] == expert).sum() for place, expert in enumerate(chosen)])
    return h * (places <= len(h) // 3 + 1).to(h)[:, None]


COUPLED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "less the first": lambda h: h - h[:1],
    "running sum": lambda h: h.cumsum(0),
    "the sample before": lambda h: torch.cat([h[:1], h[1:] + h[:-1]]),
    "over the maximum": lambda h: h / h.abs().max(),
    "more than ten": lambda h: 2 * h if len(h) > 10 else h,
    "experts with capacity": with_capacity,
    "the last": lambda h: h + h[-1:],
    "the first is least": lambda h: 2 * h if (h[:, 0] >= h[0, 0]).all() else h,
}


@pytest.mark.parametrize("name", COUPLED)
def test_samples_that_see_each_other_are_refused(comm: AbstractCommunicator, name: str) -> None:
    with pytest.raises(ModelError, match="depends on the other samples of the batch, or on how many there are"):
        tiled(Coupled(COUPLED[name]), comm, data(comm.size))


def doubled_above(h: torch.Tensor) -> torch.Tensor:
    return 2 * h if h.mean().item() > 1e3 else h


def each_doubled_above(h: torch.Tensor) -> torch.Tensor:
    return torch.stack([2 * row if row.mean().item() > 1e3 else row for row in h])


@pytest.mark.threads_only  # rank 0 warns
@pytest.mark.ranks(1, 2)
@pytest.mark.parametrize("couple", [doubled_above, each_doubled_above, lambda h: h * float(torch.ones(()))])
def test_a_branch_on_a_number_of_several_samples_is_warned_of(
    world: World, couple: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """No sample shows the other branch, so that what it computes cannot be compared."""

    def body(comm: AbstractCommunicator) -> None:
        tiled(Coupled(couple), comm, data(comm.size))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        world(body)
    texts = [str(each.message) for each in found if "several samples" in str(each.message)]
    if couple is doubled_above and world.size > 1:
        (text,) = set(texts)
        assert re.search(r"test_tiled_trust.py:\d+ `return 2 \* h if h\.mean\(\)\.item\(\) > 1e3 else h`", text)
    else:
        assert not texts


# -- losses --------------------------------------------------------------------------------------------------------------------

CLASSES = torch.arange(SAMPLES) % 3
WEIGHTS = torch.tensor([1.0, 2.0, 4.0], dtype=torch.float64)
Loss = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def contrastive(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    alike = (classes[:, None] == classes[None]).to(output)
    return F.binary_cross_entropy_with_logits(output @ output.T, alike)


def masked(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    counts = (classes != 1).to(output)
    return (output.square().sum(1) * counts).sum() / counts.sum()


def in_parts(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    parts = [slice(at, at + 2) for at in range(0, len(classes), 2)]
    return torch.stack([F.cross_entropy(output[part], classes[part], reduction="sum") for part in parts]).sum() / len(classes)


def views(output: torch.Tensor) -> torch.Tensor:
    return torch.cat([output, output**2])


def two_halves(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    one, other = output[: len(output) // 2 * 2].chunk(2)
    return F.mse_loss(one, other)


class Twice(torch.autograd.Function):
    """One of the user's, that takes nothing to other ranks."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad * 2


def behind_a_function(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    loss: torch.Tensor = Twice.apply(F.cross_entropy(output, classes))  # type: ignore[no-untyped-call]
    return loss.sqrt()


def of_columns(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:  # noqa: ARG001
    pairs = output[:, :, None] - output[:, None] + output.roll(1, 1)[..., None]
    return pairs.abs().mean() + output[:, 1:].std(1).mean()


def ordered(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """(samples,): operations that keep the places of what they choose among the classes, and an embedding of the targets."""
    margin = F.relu(output.max(1).values - output.gather(1, classes[:, None])[:, 0] + 1)
    runs = [output.cummax(1).values, output.cummin(1).values, output.sort(1).values, output.topk(2, dim=-1).values]
    chosen = [output.min(1).values, output.median(1).values, output.kthvalue(2, dim=1).values, output.mode(1).values]
    far = (output - F.embedding(classes, torch.eye(3).to(output).requires_grad_())).square().mean(1)
    return sum((each.square().mean(1) for each in runs), margin + far + torch.stack(chosen).sum(0))


def elements_of_each(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    """Operations that couple samples where they go along those, and go along others here."""
    rows = torch.arange(len(output))
    chosen = output[rows, classes] + output[rows][:, torch.tensor([2, 0, 1])].flip(1)[:, 0]
    tables = output[:, :, None] * WEIGHTS + torch.eye(3).to(output)
    spread = torch.linalg.svdvals(tables).square().sum(1) + torch.linalg.slogdet(tables).logabsdet
    normalized = F.layer_norm(output, (3,)).abs().sum(1) + torch.fft.rfft(output, dim=1).abs().sum(1)
    turned = output.T.softmax(0).square().sum(0) + output[:, None].squeeze(1).transpose(0, 1).log_softmax(0)[0]
    value: torch.Tensor = chosen.square() + spread + normalized + turned + output.flatten().view(output.shape).exp().mean(1)
    return value.mean()


LOSSES: dict[str, tuple[Loss, bool]] = {
    "root": (lambda output, classes: output.square().mean().sqrt(), True),  # noqa: ARG005
    "flooding": (lambda output, classes: (F.cross_entropy(output, classes) - 1.2).abs() + 1.2, True),
    "norm": (lambda output, classes: output.norm(), True),  # noqa: ARG005
    "class weights": (lambda output, classes: F.cross_entropy(output, classes, weight=WEIGHTS), True),
    "ignore_index": (lambda output, classes: F.cross_entropy(output, classes, ignore_index=1), True),
    "ignore_index, two axes": (lambda out, classes: F.cross_entropy(out[..., None], classes[:, None], ignore_index=1), True),
    "ignore_index, smoothed": (partial(F.cross_entropy, ignore_index=1, label_smoothing=0.1), True),
    "class weights, smoothed": (partial(F.cross_entropy, weight=WEIGHTS, label_smoothing=0.1), True),
    "masked mean": (masked, True),
    "chosen by a mask": (lambda output, classes: F.cross_entropy(output[classes != 1], classes[classes != 1]), True),
    "mean of what a mask selects": (lambda out, y: out.square().masked_select((y != 1)[:, None]).mean(), True),
    "deviation": (lambda output, classes: output.std(0).mean(), True),  # noqa: ARG005
    "softmax over samples": (lambda output, classes: output.softmax(0).square().sum(), True),  # noqa: ARG005
    "sorted samples": (lambda out, classes: (out.sort(0).values - classes.sort().values[:, None]).square().mean(), True),
    "largest of samples": (lambda output, classes: output.max(0).values.sum(), True),  # noqa: ARG005
    "largest two of samples": (lambda output, classes: output.topk(2, dim=0).values.mean(), True),  # noqa: ARG005
    "running sums over samples": (lambda output, classes: output.cumsum(0).mean(), True),  # noqa: ARG005
    "right in value, not in slope": (lambda out, y: F.cross_entropy(out, y) / F.cross_entropy(out, y).detach(), False),
    "smoothed": (partial(F.cross_entropy, label_smoothing=0.1), True),
    "deviation of each": (lambda output, classes: output.T.std(0).mean() + output.norm(dim=1).mean(), True),  # noqa: ARG005
    "contrastive": (contrastive, True),
    "top-k": (lambda output, classes: F.cross_entropy(output, classes, reduction="none").topk(2).values.mean(), True),
    "square of the mean": (lambda out, y: out.mean(0).square().sum(), True),  # noqa: ARG005
    "distance to the mean": (lambda out, y: (out - out.mean(0)).square().mean(), True),  # noqa: ARG005
    "match of means": (lambda out, y: F.mse_loss(out.mean(0), WEIGHTS), True),  # noqa: ARG005
    "pairs": (lambda out, y: F.softplus(out[:, None] - out[None]).mean(), True),  # noqa: ARG005
    "covariance": (lambda out, y: (torch.einsum("ni,nj->ij", out, out) / len(out)).square().sum(), True),  # noqa: ARG005
    "cosines": (lambda out, y: F.cosine_similarity(out[:, None], out[None], dim=-1).mean(), True),  # noqa: ARG005
    "neighbours": (lambda out, y: F.mse_loss(out, out.roll(1, 0)), True),  # noqa: ARG005
    "two halves": (two_halves, True),
    "root behind a function": (behind_a_function, True),
    "some samples": (lambda out, y: F.cross_entropy(out[1:], y[1:]), True),
    "normalized": (lambda out, y: F.cross_entropy(F.batch_norm(out, None, None, training=True), y), True),
    "of two views": (lambda out, y: F.cross_entropy(views(out) @ views(out).T, torch.arange(2 * len(y))), True),
    "stacked views": (lambda out, y: torch.stack([out, out**2]).flatten(0, 1).std(0).mean(), True),  # noqa: ARG005
    "halves of two views": (lambda out, y: two_halves(views(out), y), True),
    "the other view": (lambda out, y: F.mse_loss(views(out), views(out).roll(len(y), 0)), True),
    "turned around": (lambda out, y: F.mse_loss(out, out.flip(0)), True),  # noqa: ARG005
    "in another order": (lambda out, y: F.mse_loss(out, out[torch.arange(len(out)).roll(1)]), True),  # noqa: ARG005
    "chosen in another order": (lambda out, y: (out * out.index_select(0, torch.arange(len(y)).roll(1))).mean(), True),
    "distance": (lambda out, y: torch.dist(out, WEIGHTS), True),  # noqa: ARG005
    "all distances": (lambda out, y: F.pdist(out).mean(), True),  # noqa: ARG005
    "softmax of a column": (lambda out, y: out[:, 0].softmax(0).square().sum(), True),  # noqa: ARG005
    "softmax of all": (lambda out, y: out.flatten().softmax(0).square().sum(), True),  # noqa: ARG005
    "normalized columns": (lambda out, y: F.layer_norm(out.T, (len(y),)).square().mean(1).sum() + out.abs().mean(), True),
    "singular values": (lambda out, y: torch.linalg.svdvals(out).sum(), True),  # noqa: ARG005
    "frequencies": (lambda out, y: torch.fft.rfft(out, dim=0).abs().mean(), True),  # noqa: ARG005
    "reciprocal root": (lambda out, y: out.square().mean().rsqrt(), True),  # noqa: ARG005
    "quotient of means": (lambda out, y: torch.addcdiv(WEIGHTS[0], F.cross_entropy(out, y), out.square().mean()), True),
    "sums of classes": (lambda out, y: torch.zeros_like(out[:3]).index_add(0, y, out).square().sum(), True),
    "products by classes": (lambda out, y: (F.one_hot(y, 3).to(out).T @ out).square().sum(), True),
    "sum over a number": (lambda output, classes: F.cross_entropy(output, classes, reduction="sum") / (SAMPLES + 1), True),
    "sum": (partial(F.cross_entropy, reduction="sum"), True),
    "sum of squares": (lambda out, y: out.square().mean(1).sum() / 2 + out.exp().mean(), True),  # noqa: ARG005
    "half a sum": (lambda out, y: (out - WEIGHTS).abs().sum() + F.cross_entropy(out, y), True),
    "a mean and 0.3 of a sum": (lambda out, y: F.cross_entropy(out, y) - 0.3 * out.square().sum(1).sum(), True),
    "a mean and a sum of 0.3 of each": (lambda out, y: F.cross_entropy(out, y) + (out.exp() * 0.3).sum(), True),
    "a mean and 0.3 of a sum of some classes": (lambda out, y: out.mean() + 0.3 * out[:, 1:].square().sum(), True),  # noqa: ARG005
    "a mean and 0.3 of a sum of parts": (lambda out, y: out.mean() + 0.3 * out.chunk(2, 1)[0].exp().sum(1).sum(), True),  # noqa: ARG005
    "one by one": (lambda out, y: sum((F.cross_entropy(*each) for each in zip(out, y, strict=True)), torch.zeros(())), True),
    "one by one, by number": (lambda out, y: sum((out[at].exp()[y[at]] for at in range(len(y))), torch.zeros(())), True),
    "product with a mask": (lambda out, y: out.square().sum(1).dot((y != 1).to(out)) / (y != 1).sum(), True),
    "gathered": (lambda out, y: out.gather(0, y[None, :3] % 2).square().mean(), True),
    "softmax of all in a row": (lambda out, y: (out.view(1, -1).softmax(1) * out.view(1, -1)).sum(), True),  # noqa: ARG005
    "histogram": (lambda out, y: (out[..., None] - WEIGHTS).sigmoid().mean((0, 1)).square().sum(), True),  # noqa: ARG005
    "one class to its mean": (lambda out, y: (out.unbind(1)[0] - out.unbind(1)[0].mean()).square().mean(), True),  # noqa: ARG005
    "one sample": (lambda out, y: out[0].square().mean() + out.square().mean(), True),  # noqa: ARG005
    "elements of each": (elements_of_each, True),
    "in parts": (in_parts, True),
    "of each": (lambda out, y: torch.einsum("ni,nj->nij", out, out).square().mean() + out.mean(1).square().mean(), True),  # noqa: ARG005
    "columns": (of_columns, True),
    "largest of classes": (lambda output, classes: ordered(output, classes).mean(), True),
    "columns by a mask": (lambda out, y: out[:, WEIGHTS > 1].square().mean() + out.masked_select(WEIGHTS > 1).mean(), True),  # noqa: ARG005
    "mean": (F.cross_entropy, True),
    "sum over count": (lambda output, classes: F.cross_entropy(output, classes, reduction="sum") / len(output), True),
    "sum of columns' means": (lambda out, y: (out.mean(0).sum() + F.cross_entropy(out, y)) / 5, True),
    "weighted sum": (lambda out, y: (out.square().mean(1) * out.new_full((len(y),), 1 / len(y))).sum(), True),
    "part of a sum": (lambda out, y: out.square().sum() * (2 / len(y)) + out.sum() / 2 / len(y), True),
    "0.3 of a mean": (lambda out, y: 0.3 * (out.square().sum() / len(y)) + (out.exp() / len(y)).sum() * 0.3, True),
    "half of two": (lambda output, classes: (F.cross_entropy(output, classes) + output.square().mean()) / 2, True),
}
FINE = (
    "largest of classes", "columns by a mask", "mean", "sum over count", "half of two", "smoothed", "deviation of each",
    "in parts", "of each", "columns", "elements of each", "halves of two views", "the other view", "sum of columns' means",
    "weighted sum", "part of a sum", "0.3 of a mean",
)  # fmt: skip


@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_that_is_no_mean_of_its_samples_is_refused(comm: AbstractCommunicator, name: str) -> None:
    """By itself where its graph shows it; by `check_loss`, which is asked of the first batch of a training step, always."""
    loss, shows = LOSSES[name]
    built, plain = network(), network()

    def step(model: Any, batch: Any) -> torch.Tensor:
        return loss(model(batch[0]), batch[1])

    model = tiled(built, comm, data(comm.size))
    x, classes = batch()[0], CLASSES
    here = model.local(x, classes)
    is_refused = name not in FINE and comm.size > 1
    trainer = Trainer(model, optimizer=sgd_of, training_step=step, reduction="mean")
    if is_refused:
        with pytest.raises(InputError, match="the loss"):
            model.check_loss(lambda x, classes: loss(model(x), classes), *here)
        if not name.startswith(("class weights", "ignore_index")):  # which the Trainer computes or refuses by itself
            with pytest.raises(InputError, match=r"the loss \(training_step\) is said to be the mean"):
                trainer.fit((x, classes), batch_size=SAMPLES, iterations=1)
    else:
        model.check_loss(lambda x, classes: loss(model(x), classes), *here)
        if name in FINE:
            trainer.fit((x, classes), batch_size=SAMPLES, iterations=1)
    if shows:
        plain.load_state_dict(comm.bcast_object(whole_state_dict(model)))  # the Trainer may have trained
        model.zero_grad()
        value: Any = loss(model(here[0]), here[1])
        with pytest.raises(InputError, match="the loss") if is_refused else nullcontext():
            value.backward()
        if not is_refused:
            torch.autograd.backward(loss(plain(x), classes))
            assert_close(whole_gradients(model), gradients(plain), what="gradients")


def squares(output: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
    return (output - F.one_hot(classes, 3)).square()


def shares(output: torch.Tensor) -> torch.Tensor:
    """A number for each class, from these samples alone."""
    return output.detach().exp().mean(0)


def has_first(output: torch.Tensor) -> bool:
    """Whether these samples begin with the first one of the batch."""
    return bool(torch.isclose(output[0], FIRST, atol=1e-3).all())


FIRST = torch.tensor([0.2973, -0.2703, -0.2364], dtype=torch.float64)
of_positives = F.binary_cross_entropy_with_logits
OF_RANKS: dict[str, tuple[Loss, bool]] = {
    "detached": (lambda out, y: F.cross_entropy(out, y) / F.cross_entropy(out, y).detach(), True),
    "taken by item": (lambda out, y: squares(out, y).mean() * squares(out, y).sum().item(), True),
    "by the reciprocal of a count": (lambda out, y: squares(out, y)[:, 0].sum() * out.detach().exp().sum().reciprocal(), True),
    "by the mean of a soft mask": (lambda out, y: squares(out, y).mean() / out.detach().sigmoid().mean(), True),
    "0.3 of a mean, and a sum": (lambda out, y: 0.3 * squares(out, y).mean() + out.square().sum() / len(y), False),
    "by the same number": (lambda out, y: F.cross_entropy(out, y) * torch.tensor(2.5), False),
    "by a condition": (lambda out, y: F.cross_entropy(out, y) * has_first(out), True),
    "by weights of its classes": (lambda out, y: F.cross_entropy(out, y, shares(out), reduction="none").mean(), True),
    "by weights of positives": (lambda out, y: of_positives(out, squares(out, y).detach(), pos_weight=shares(out)), True),
    "by a quantile": (lambda out, y: F.huber_loss(out, WEIGHTS[y, None] + out.detach(), delta=float(out.std())), True),
    "by its greatest": (lambda out, y: torch.where(out > 0, out / out.detach().max(), squares(out, y)).mean(), True),
    "by a queue": (lambda out, y: F.cross_entropy(out @ out.detach()[:2].T, y % 2), True),
    "by shares of its experts": (lambda out, y: F.cross_entropy(out, y) + (out.mean(0) * shares(out)).sum(), True),
    "more of some": (lambda out, y: squares(out, y)[:, : 1 + has_first(out)].mean(), True),
    "by the same tensors": (lambda out, y: F.cross_entropy(out @ torch.diag(WEIGHTS), y, reduction="none").mean(), False),
    "by its share": (lambda out, y: (squares(out, y) * (WEIGHTS / len(y))).sum(), False),
}


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("make", [DataParallel, tiled])
@pytest.mark.parametrize("name", OF_RANKS)
def test_a_loss_that_ranks_multiply_by_numbers_of_their_own(comm: AbstractCommunicator, name: str, make: Any) -> None:
    """It is found when ranks compare what they know next."""
    loss, is_refused = OF_RANKS[name]
    model = make(network(), comm, *([data(comm.size)] if make is tiled else []))
    x, classes = model.local(batch()[0], CLASSES)
    match = r"the loss .*(multiplies what| takes )|the loss is or adds"
    with pytest.raises(InputError, match=match) if is_refused else nullcontext():
        for _ in range(6):
            model.zero_grad()
            torch.autograd.backward(loss(model(x), classes))


@pytest.mark.ranks(2)
@pytest.mark.threads_only  # rank 0 warns
@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (lambda out, y: squares(out, y).sum() / SAMPLES, "divides a sum over the .* samples of rank 0 by"),
        (lambda out, y: (out.square() * torch.arange(len(y)).double().softmax(0)[:, None]).sum(), "weights that sum to 1"),
        (lambda out, y: (squares(out, y) * ((y + 1.5) / (y + 1.5).mean())[:, None]).mean(), "1 in the mean"),
        (lambda out, y: (out[:, 0] * (y * y - (y * y).double().mean())).mean(), "0 or 1 in the mean"),
        (lambda out, y: F.mse_loss(out, out.detach() - out.detach().mean(0)), "has targets that are 0 in the mean"),  # noqa: ARG005
        (lambda out, y: (out * ((y + 1.5)[:, None] * (WEIGHTS - WEIGHTS.mean()))).square().mean(), None),
        (lambda out, y: (out.square().mean(1) * (y == y[0])).sum() / len(y), None),
        (lambda out, y: (out.square() * WEIGHTS.softmax(0)).sum() / len(y), None),
    ],
)
def test_a_loss_that_is_most_likely_wrong_is_warned_about(world: World, loss: Loss, match: str | None) -> None:
    networks = [network() for _ in range(world.size)]

    def body(comm: AbstractCommunicator) -> None:
        model = tiled(networks[comm.rank], comm, simple_layout([0], [1]))
        for _ in range(3):
            model.zero_grad()
            here, own = model.local(batch()[0], CLASSES)
            torch.autograd.backward(loss(model(here), own))

    with warnings.catch_warnings(record=True) as found:
        warnings.simplefilter("always")
        world(body)
    told = [str(each.message) for each in found if "the loss" in str(each.message)]
    assert len(told) == (match is not None)
    if match is not None:
        assert re.search(match, told[0])


@pytest.mark.ranks(2)
@pytest.mark.parametrize("make", [DataParallel, tiled])
def test_a_gradient_that_is_given_is_a_part_of_the_loss(comm: AbstractCommunicator, make: Any) -> None:
    """Of what each sample gives, ones make their sum, and one over their number makes their mean; of a single number, it is a
    factor. Gradients of a copy of the output are those of the loss."""
    plain, model = network(), make(network(), comm, *([data(comm.size)] if make is tiled else []))
    x, classes = model.local(batch()[0], CLASSES)
    losses = F.cross_entropy(model(x), classes, reduction="none")
    with pytest.raises(InputError, match=r"the loss is or adds a sum over the .* samples"):
        torch.autograd.backward(losses, torch.ones_like(losses))
    model.zero_grad()
    losses = F.cross_entropy(model(x), classes, reduction="none")
    torch.autograd.backward(losses, torch.full_like(losses, 1 / len(losses)))
    output = model(x)
    leaf = output.detach().requires_grad_()
    torch.autograd.backward(F.cross_entropy(leaf, classes), torch.tensor(0.5))
    torch.autograd.backward(output, leaf.grad)
    torch.autograd.backward(F.cross_entropy(plain(batch()[0]), CLASSES), torch.tensor(1.5))
    assert_close(gradients(model.module), gradients(plain), what="gradients")

    def weighed_by_itself() -> None:
        for _ in range(6):
            loss = F.cross_entropy(model(x), classes)
            torch.autograd.backward(loss, loss.detach())

    with pytest.raises(InputError, match=r"the loss of rank 1 multiplies what its samples give by"):
        weighed_by_itself()


def test_micro_batches_that_a_loss_multiplies_by_other_numbers(comm: AbstractCommunicator) -> None:
    """Each loss of a micro-batch is compared with the one in its place in other micro-batches, also on a single replica."""
    plain, model = network(), tiled(network(), comm, simple_layout(list(range(comm.size))).in_micro_batches(2))

    def train(parts: Any, model: Any, factor: Callable[[torch.Tensor], float]) -> None:
        for x, classes in parts:
            output = model(x)
            torch.autograd.backward(F.cross_entropy(output, classes), retain_graph=True)
            torch.autograd.backward(output.square().mean() * factor(output.square().mean()))

    train([(batch()[0], CLASSES)], plain, lambda _: 0.3)
    train(model.micro_batches(batch()[0], CLASSES), model, lambda _: 0.3)
    assert_close(whole_gradients(model), gradients(plain), what="gradients")
    with pytest.raises(InputError, match=r"the loss of micro-batch 1 multiplies what its samples give by .* micro-batch 0 by"):
        train(model.micro_batches(batch()[0], CLASSES), model, torch.Tensor.item)


def test_a_mean_that_is_said_to_be_a_sum(comm: AbstractCommunicator) -> None:
    built, plain = network(), network()
    model = tiled(built, comm, data(comm.size))
    model.reduction = "sum"
    here, classes = model.local(batch()[0], CLASSES)
    is_refused = pytest.raises(InputError, match=r"a mean over the \d+ samples of this rank, and reduction='sum' says")
    with is_refused if comm.size > 1 else nullcontext():
        torch.autograd.backward(model(here).square().mean(1).mean() + model(here)[:, 0].sum())
    model.zero_grad()
    torch.autograd.backward(F.cross_entropy(model(here), classes) * len(classes) / SAMPLES)
    torch.autograd.backward(F.cross_entropy(plain(batch()[0]), CLASSES))
    assert_close(whole_gradients(model), gradients(plain), what="gradients")


def test_losses_that_are_made_of_means_over_the_batch(comm: AbstractCommunicator) -> None:
    """A root, a masked mean and a balance of experts, of means over the global batch."""
    plain, built = network(), network()
    x, counts = batch()[0], (CLASSES != 1).double()

    def loss(output: torch.Tensor, counts: torch.Tensor, over: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        masked_mean = over((output.square().sum(1) * counts).mean()) / over(counts.mean())
        share, likely = over((output > 0).double().mean(0)), over(output.softmax(-1).mean(0))
        middle = over(output.mean(0))  # what samples do with it differs between ranks
        spread = over((output - middle).square().mean()) + over((output * middle).exp().mean())
        return masked_mean + over(output.square().mean()).sqrt() + (share * likely).sum() + spread

    expected: Any = loss(plain(x), counts, lambda mean: mean)
    expected.backward()
    model = tiled(built, comm, split(comm.size))
    here, here_counts = model.local(x, counts)
    value: Any = loss(model(here), here_counts, model.over_batch)
    assert float(value) == pytest.approx(float(expected), rel=1e-12)
    value.backward()
    assert_close(whole_gradients(model), gradients(plain), what="gradients")


@pytest.mark.parametrize(
    "make", [DataParallel, partial(tile, batch_size=SAMPLES, reduction="mean", speeds="equal", quiet=True)]
)
@pytest.mark.parametrize(
    ("loss", "match"),
    [
        (
            lambda net, y: F.cross_entropy(F.embedding(y, net.rows.weight, scale_grad_by_freq=True), y),
            "divides gradients by how",
        ),
        (lambda net, y: F.cross_entropy(net.rows(y), y, ignore_index=1), "divides by .*, the weights of its targets"),
    ],
)
def test_a_network_that_counts_its_samples(comm: AbstractCommunicator, loss: Any, match: str, make: Any) -> None:
    model = make(Written(loss, rows=nn.Embedding(3, 3).double()), comm)
    is_refused = len(getattr(model, "layout", data(comm.size)).replicas) > 1
    with pytest.raises(InputError, match=match) if is_refused else nullcontext():
        model(model.local(CLASSES)).backward()


@pytest.mark.ranks(2)
@pytest.mark.threads_only  # rank 0 warns
@pytest.mark.parametrize("make", [DataParallel, tiled])
def test_a_weight_that_is_trained_outside_of_the_network(world: World, make: Any) -> None:
    networks, outside = [network() for _ in range(world.size)], [nn.Linear(6, 6).double() for _ in range(world.size)]

    def body(comm: AbstractCommunicator) -> None:
        model = make(networks[comm.rank], comm, *([data(comm.size)] if make is tiled else []))
        x, classes = model.local(batch()[0], CLASSES)
        F.cross_entropy(model(outside[comm.rank](x)), classes).backward()  # type: ignore[no-untyped-call]

    with pytest.warns(UserWarning, match=r"a weight of shape \(6.* is in none of the networks which are tiled.* drift apart"):
        world(body)


# -- what moves ----------------------------------------------------------------------------------------------------------------


def test_all_optimizers_and_an_average_move(comm: AbstractCommunicator) -> None:
    """Two optimizers, of which one is given, and a moving average of the weights."""

    def iterate(model: Any, steps: int, makes: list[torch.optim.Optimizer], average: WeightAverage) -> None:
        for step in range(steps):
            x, y = model.local(*batch(step)) if isinstance(model, TiledModel) else batch(step)
            model.zero_grad()
            loss: Any = F.mse_loss(model(x), y)
            loss.backward()
            for each in makes:
                each.step()
            average.step()

    def optimizers(model: nn.Module) -> tuple[list[torch.optim.Optimizer], WeightAverage]:
        first, *rest = model.parameters()
        halves = [first, *rest[::2]], rest[1::2]
        makes = [torch.optim.SGD(halves[0], lr=0.1, momentum=0.9), torch.optim.Adam(halves[1], lr=0.01, eps=1e-3)]
        return makes, WeightAverage(model.parameters(), decay=0.5)

    plain, built = network(), network()
    makes, average = optimizers(plain)
    iterate(plain, 3, makes, average)
    iterate(plain, 3, makes, average)
    with average.applied():
        averaged = {name: value.clone() for name, value in plain.state_dict().items()}
    model = tiled(built, comm, split(comm.size))
    makes, average = optimizers(model)
    iterate(model, 3, makes, average)
    other = simple_layout(list(reversed(range(comm.size))))
    move(model, other, optimizer=makes[0])
    iterate(model, 3, makes, average)
    assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what="weights")
    with average.applied():
        assert_close(comm.bcast_object(whole_state_dict(model)), averaged, what="average")
    with pytest.raises(ModelError, match=r"cannot be copied.*WeightAverage"):
        torch.optim.swa_utils.AveragedModel(model.module)


@pytest.mark.parametrize(
    ("tensor", "match"),
    [
        (nn.Parameter(torch.ones(6, 6, dtype=torch.complex64)), r"odd is complex64.* keep it as torch\.view_as_real\(odd\)"),
        (torch.eye(6).to_sparse(), r"odd is a torch\.sparse_coo tensor.* keep it as odd\.to_dense\(\)"),
    ],
    ids=["complex", "sparse"],
)
def test_tensors_that_ranks_do_not_share_are_refused_by_name(
    comm: AbstractCommunicator, tensor: torch.Tensor, match: str
) -> None:
    network = Network()
    setattr(network, "odd", tensor) if isinstance(tensor, nn.Parameter) else network.register_buffer("odd", tensor)
    with pytest.raises(InputError, match=match):
        tile(network, comm, batch_size=SAMPLES, speeds="equal", reduction="mean", quiet=True)


@pytest.mark.parametrize("takes_samples", [True, False])
def test_slices_are_judged_along_the_axis_of_the_samples(comm: AbstractCommunicator, *, takes_samples: bool) -> None:
    """Of a network that gives (time, samples, features), as its sample shows."""

    class TimeFirst(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(3, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out: torch.Tensor = self.last(torch.tanh(self.first(x)))
            return out.transpose(0, 1)

    x = torch.randn(12, 7, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    built = TimeFirst().double()
    model = tile(built, comm, batch_size=12, sample=x[:2], layout=data(comm.size), speeds="equal", reduction="mean", quiet=True)
    out = model(model.local(x))
    loss: Any = (out[:, 1:] if takes_samples else out[1:]).square().mean() + out.mean(0).exp().mean()
    is_refused = takes_samples and len(model.layout.replicas) > 1
    with pytest.raises(InputError, match=r"samples of this rank by a slice") if is_refused else nullcontext():
        loss.backward()
