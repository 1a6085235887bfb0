"""The gradient engine: whatever a loss is made of, and however often `backward` is called, weights are those of one machine.

Every case is one training iteration, written once for plain networks, tiled ones, DataParallel and MultiNodeOptimizer, and run
several times with batches of different sizes; weights must agree to 1e-12 on 1 to 4 ranks, on uneven shares, replicas and
tiles, with ranks left out or without samples.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from equal_runs import check_fit, in_batches, plain_fit
from torch import nn
from torch.utils.checkpoint import checkpoint

from drawing import one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import InputError
from tatami.parallel import DataParallel, MultiNodeOptimizer
from tatami.testing.worlds import World
from tatami.tiling import spans, whole_shares
from tatami.train import History, TiledModel, Trainer, whole_state_dict
from tiled_rig import assert_equal, some_layouts, tiled

SIZES = (7, 7, 3)
Cut = Callable[..., Any]
"""(model, *tensors) -> this rank's samples of them."""


class Net(nn.Module):
    """Two pairs with a norm between them, whose activations a hook can catch, and a parameter for the loss alone."""

    def __init__(self, width: int = 4, *, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Dropout(dropout), nn.Linear(6, 5))
        self.middle = nn.LayerNorm(5)
        self.second = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, width))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.middle(self.first(x)))


class Cell(nn.Module):
    """One step of a recurrent network: two inputs, of which one is the output of the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.pair = nn.Sequential(nn.Linear(8, 6), nn.Tanh(), nn.Linear(6, 4))

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> Any:
        return torch.tanh(self.pair(torch.cat((x, state), 1)))


class Checkpointed(Net):
    """Activations are computed again in the backward pass, dropout and batch normalization included."""

    def __init__(self, *, reentrant: bool, draws: bool = True) -> None:
        super().__init__(dropout=0.4 if draws else 0.0)
        self.reentrant = reentrant
        self.norm = nn.BatchNorm1d(5, track_running_stats=False) if draws else nn.Identity()

    def forward(self, x: torch.Tensor) -> Any:
        hidden: Any = self.middle(self.norm(checkpoint(self.first, x, use_reentrant=self.reentrant)))
        return checkpoint(self.second, hidden, use_reentrant=self.reentrant) * self.scale


class Tied(nn.Module):
    """One weight under two names, outside of pairs, and one frozen and one unused parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.out.weight = self.into.weight
        self.pair, self.unused = Net().first, nn.Linear(2, 2)
        self.back = nn.Linear(5, 4).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.out(torch.tanh(self.back(self.pair(self.into(x)))))


def inner(model: Any) -> Any:
    return getattr(model, "module", model)


def mse(model: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return F.mse_loss(model(x), y)


class Caught:
    """The activations that a forward hook catches."""

    def __init__(self, module: nn.Module) -> None:
        self.handle = module.register_forward_hook(self)

    def __call__(self, _module: nn.Module, _args: Any, output: torch.Tensor) -> None:
        self.values = output


@dataclass(frozen=True)
class Run:
    """Networks in training, plain or tiled."""

    models: Sequence[Any]
    cut: Cut
    optimizers: Sequence[Any]

    @property
    def model(self) -> Any:
        return self.models[0]


# -- the cases: one iteration each, up to the optimizers' steps ----------------------------------------------------------------


def gan(run: Run, x: torch.Tensor, z: torch.Tensor) -> None:
    generator, critic = run.models
    z, x = run.cut(generator, z), run.cut(critic, x)
    fake = generator(z)
    run.optimizers[1].zero_grad()
    (F.softplus(-critic(x)).mean() + F.softplus(critic(fake.detach())).mean()).backward()  # type: ignore[no-untyped-call]
    run.optimizers[1].step()
    run.optimizers[0].zero_grad()
    F.softplus(-critic(fake)).mean().backward()  # type: ignore[no-untyped-call]
    run.optimizers[0].step()


def chained(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    encoder, decoder = run.models
    x, y = run.cut(encoder, x), run.cut(decoder, y)
    F.mse_loss(decoder(encoder(x)), y).backward()  # type: ignore[no-untyped-call]


def twice(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    x, y = run.cut(run.model, x, y)
    F.mse_loss(run.model(run.model(x)), y).backward()  # type: ignore[no-untyped-call]


def stepped(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    x, y = run.cut(run.model, x, y)
    state = torch.zeros_like(x)
    loss = torch.zeros((), dtype=x.dtype)
    for number in range(4):
        state = run.model(x + number, state)
        loss = loss + (number + 1) * F.mse_loss(state, y)
    loss.backward()  # type: ignore[no-untyped-call]


def distilled(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    caught = Caught(inner(run.model).middle)
    x, y = run.cut(run.model, x, y)
    (mse(run.model, x, y) + caught.values.square().mean()).backward()  # type: ignore[no-untyped-call]
    caught.handle.remove()


def activations_alone(run: Run, x: torch.Tensor, _y: torch.Tensor) -> None:
    caught = Caught(inner(run.model).middle)
    run.model(run.cut(run.model, x))
    caught.values.sin().mean().backward()  # type: ignore[no-untyped-call]
    caught.handle.remove()


def squares(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = sum(parameter.square().sum() for parameter in run.model.parameters())
    (mse(run.model, *run.cut(run.model, x, y)) + 0.1 * penalty).backward()


def norms(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    penalty = torch.stack([parameter.norm() for parameter in run.model.parameters()]).sum()
    (mse(run.model, *run.cut(run.model, x, y)) + 0.1 * penalty).backward()  # type: ignore[no-untyped-call]


def slopes(run: Run, x: torch.Tensor, _y: torch.Tensor) -> None:
    x = run.cut(run.model, x).clone().requires_grad_()
    output = run.model(x)
    (slope,) = torch.autograd.grad(output.sum(), x, create_graph=True)
    (output.square().mean() + (slope.norm(dim=1) - 1).square().mean()).backward()


def wgan(run: Run, x: torch.Tensor, z: torch.Tensor) -> None:
    """With gradient penalty (Gulrajani et al. 2017)."""
    generator, critic = run.models
    z, x = run.cut(generator, z), run.cut(critic, x)
    fake = generator(z)
    mix = (0.3 * x + 0.7 * fake.detach()).requires_grad_()
    (slope,) = torch.autograd.grad(critic(mix).sum(), mix, create_graph=True)
    penalty = (slope.norm(dim=1) - 1).square().mean()
    (critic(fake.detach()).mean() - critic(x).mean() + 10 * penalty).backward()
    run.optimizers[1].step()
    run.optimizers[0].zero_grad()
    (-critic(fake).mean()).backward()
    run.optimizers[0].step()


def read_outside(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    x, y = run.cut(run.model, x, y)
    F.mse_loss(inner(run.model).scale * run.model(x), y).backward()  # type: ignore[no-untyped-call]


def many_passes(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    """Accumulating onto gradients of 0, two losses of one pass, some inputs, and two passes of different sizes at once."""
    model = run.model
    run.optimizers[0].zero_grad(set_to_none=False)
    here_x, here_y = run.cut(model, x, y)
    output = model(here_x)
    output.square().mean().backward(retain_graph=True)
    F.mse_loss(output, here_y).backward()  # type: ignore[no-untyped-call]
    mse(model, *run.cut(model, x[:2], y[:2])).backward(inputs=list(inner(model).second.parameters()))  # type: ignore[no-untyped-call]
    one = mse(model, *run.cut(model, x, y))
    (one + mse(model, *run.cut(model, x[:2], y[:2]))).backward()  # type: ignore[no-untyped-call]
    model(run.cut(model, x[:1]))  # without a backward pass


def hooked(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    """Hooks of parameters see the gradient of the global batch: one that is not linear, and one that steps."""
    first, last = inner(run.model).middle.weight, inner(run.model).middle.bias
    handles = [first.register_hook(lambda grad: grad.sign() * grad.abs().clamp(max=0.01))]

    def step(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        with torch.no_grad():
            parameter.sub_(parameter.grad.sign() * 0.01)
        parameter.grad = None

    handles.append(last.register_post_accumulate_grad_hook(step))
    mse(run.model, *run.cut(run.model, x, y)).backward()  # type: ignore[no-untyped-call]
    for handle in handles:
        handle.remove()


def frozen_now_and_then(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    mse(run.model, *run.cut(run.model, x, y)).backward()  # type: ignore[no-untyped-call]
    for parameter in inner(run.model).second.parameters():
        parameter.requires_grad_(not parameter.requires_grad)
    mse(run.model, *run.cut(run.model, x, y)).backward()  # type: ignore[no-untyped-call]


def frozen_in_turn(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    """Of two pairs of equal sizes, the gradient of one travels, and then that of the other."""
    for trained in range(2):
        for place, pair in enumerate(inner(run.model)):
            pair.requires_grad_(place == trained)
        mse(run.model, *run.cut(run.model, x, y)).backward()  # type: ignore[no-untyped-call]


def plainly(run: Run, x: torch.Tensor, y: torch.Tensor) -> None:
    x, y = run.cut(run.model, x, y)
    mse(run.model, x.clone().requires_grad_(), y).backward()  # type: ignore[no-untyped-call]


@dataclass(frozen=True, kw_only=True)
class Case:
    """An iteration of these networks.

    Attributes:
        refused: the words with which it is refused where ranks share units.
        steps: whether it steps the optimizers itself.
        build_apart: networks without draws or statistics of the whole batch, for ranks that have these by themselves.
    """

    iterate: Callable[..., None]
    build: Callable[[], list[nn.Module]] = lambda: [Net()]
    refused: str | None = None
    steps: bool = False
    build_apart: Callable[[], list[nn.Module]] | None = None


class Forces(nn.Module):
    """What it gives has the slopes of what a part of it gives."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            energy: torch.Tensor = self.energy(x)
            (force,) = torch.autograd.grad(energy.square().sum(), x, create_graph=True)
        return energy + force.mean(1, keepdim=True)


CASES = {
    "forces": Case(iterate=plainly, build=lambda: [Forces()], refused="create_graph=True: gradients of gradients"),
    "gan": Case(iterate=gan, build=lambda: [Net(), nn.Sequential(Net(), nn.Linear(4, 1))], steps=True),
    "wgan": Case(
        iterate=wgan,
        build=lambda: [Net(), nn.Sequential(Net(), nn.Linear(4, 1))],
        refused="create_graph=True: gradients of gradients",
        steps=True,
    ),
    "chained": Case(iterate=chained, build=lambda: [Net(), Net()]),
    "twice": Case(iterate=twice),
    "stepped": Case(iterate=stepped, build=lambda: [Cell()]),
    "distilled": Case(iterate=distilled),
    "activations alone": Case(iterate=activations_alone),
    "squares of weights": Case(iterate=squares),
    "norms of weights": Case(iterate=norms, refused="the gradient of a norm"),
    "slopes": Case(iterate=slopes, refused="create_graph=True: gradients of gradients"),
    "read outside": Case(iterate=read_outside),
    "many passes": Case(iterate=many_passes),
    "hooks of parameters": Case(iterate=hooked),
    "frozen now and then": Case(iterate=frozen_now_and_then),
    "frozen in turn": Case(iterate=frozen_in_turn, build=lambda: [nn.Sequential(*(Forces().energy for _ in range(2)))]),
    "tied": Case(iterate=plainly, build=lambda: [Tied()]),
    "checkpoint": Case(
        iterate=plainly,
        build=lambda: [Checkpointed(reentrant=False)],
        build_apart=lambda: [Checkpointed(reentrant=False, draws=False)],
    ),
    "checkpoint, reentrant": Case(
        iterate=plainly,
        build=lambda: [Checkpointed(reentrant=True)],
        build_apart=lambda: [Checkpointed(reentrant=True, draws=False)],
    ),
    "checkpoint and an activation": Case(
        iterate=distilled,
        build=lambda: [Checkpointed(reentrant=False)],
        build_apart=lambda: [Checkpointed(reentrant=False, draws=False)],
    ),
}


@one_at_a_time
def build(case: Case, *, apart: bool = False) -> list[nn.Module]:
    torch.manual_seed(1)
    return [network.double() for network in (case.build_apart if apart and case.build_apart else case.build)()]


def whole(_: Any, *tensors: torch.Tensor) -> Any:
    return tensors[0] if len(tensors) == 1 else tensors


def local(model: Any, *tensors: torch.Tensor) -> Any:
    return model.local(*tensors)


def train(
    case: Case,
    models: Sequence[Any],
    cut: Cut,
    *,
    wrap: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer,
    sizes: Sequence[int] = SIZES,
) -> None:
    optimizers = [wrap(torch.optim.SGD(model.parameters(), lr=0.1)) for model in models]
    generator = torch.Generator().manual_seed(5)
    for size in sizes:
        for optimizer in optimizers:
            optimizer.zero_grad()
        x, y = (torch.randn(size, 4, generator=generator, dtype=torch.float64) for _ in range(2))
        case.iterate(Run(models, cut, optimizers), x, y)
        if not case.steps:
            for optimizer in optimizers:
                optimizer.step()


@one_at_a_time
def expected_of(case: Case, *, apart: bool = False, sizes: Sequence[int] = SIZES) -> list[dict[str, torch.Tensor]]:
    plain = build(case, apart=apart)
    torch.manual_seed(9)
    train(case, plain, whole, sizes=sizes)
    return [model.state_dict() for model in plain]


@pytest.mark.threads_only
@pytest.mark.parametrize("name", CASES)
def test_weights_are_those_of_one_machine(world: World, name: str) -> None:
    case = CASES[name]
    expected, built = expected_of(case), build(case)
    torch.manual_seed(9)

    def body(comm: AbstractCommunicator) -> None:
        for layout in some_layouts(comm.size):
            models = [tiled(network, comm, layout=layout, batch_size=SIZES[0]) for network in built]
            if case.refused is not None and any(len(replica.processors) > 1 for replica in layout.replicas):
                with pytest.raises(InputError, match=case.refused):
                    train(case, models, local)
                comm.barrier()  # the ranks are still in step
                continue
            train(case, models, local)
            for model, state in zip(models, expected, strict=True):
                assert_equal(comm.bcast_object(whole_state_dict(model)), state, f"{layout}")

    world(body)


@pytest.mark.threads_only
@pytest.mark.parametrize("name", ["twice", "distilled", "norms of weights", "checkpoint"])
def test_so_they_are_in_a_training_step(world: World, name: str) -> None:
    case = CASES[name]
    (plain,), (built,) = build(case), build(case)
    generator = torch.Generator().manual_seed(5)
    x, y = (torch.randn(17, 4, generator=generator, dtype=torch.float64) for _ in range(2))

    def step(model: Any, batch: Any) -> torch.Tensor:
        if name == "twice":
            return F.mse_loss(model(model(batch[0])), batch[1])
        caught = Caught(inner(model).middle)
        loss = mse(model, *batch) + caught.values.square().mean()
        caught.handle.remove()
        return loss + (inner(model).middle.weight.norm() if name == "norms of weights" else 0.0)

    torch.manual_seed(9)
    batches = in_batches(7, x, y)
    expected = plain_fit(plain, batches, loss=step, optimizer=partial(torch.optim.SGD, lr=0.1))
    torch.manual_seed(9)

    def fit(model: TiledModel, _: AbstractCommunicator) -> History:
        trainer = Trainer(model, optimizer=partial(torch.optim.SGD, lr=0.1), training_step=step, reduction="mean")
        return trainer.fit((x, y), batch_size=7, epochs=1, shuffle=False)

    check_fit(world, built, expected, fit)


MANY = (7, 7, 3, 9, 7)
"""Long enough that the order of gradients has been learnt, and buckets leave before the end of the backward pass."""


def uneven(comm: AbstractCommunicator, samples: int) -> slice:
    """This rank's samples of a batch; of a small one some have none."""
    return spans(whole_shares((3.0, 5.0, 2.0, 7.0)[: comm.size], total=samples))[comm.rank].slice()


@pytest.mark.parametrize("bucket_bytes", [64, 1 << 20])
@pytest.mark.parametrize("name", CASES)
def test_so_they_are_in_data_parallel(comm: AbstractCommunicator, name: str, bucket_bytes: int) -> None:
    case = CASES[name]
    expected, built = expected_of(case, apart=True, sizes=MANY), build(case, apart=True)
    models = [DataParallel(deepcopy(network), comm, bucket_bytes=bucket_bytes) for network in built]

    def cut(_: Any, *tensors: torch.Tensor) -> Any:
        parts = [tensor[uneven(comm, len(tensor))] for tensor in tensors]
        return parts[0] if len(parts) == 1 else parts

    train(case, models, cut, sizes=MANY)
    for model, state in zip(models, expected, strict=True):
        assert_equal(model.module.state_dict(), state, name)
        model.close()


class Weighted:
    """A MultiNodeOptimizer that is told how many samples its rank had."""

    def __init__(self, optimizer: torch.optim.Optimizer, comm: AbstractCommunicator, samples: Callable[[], int]) -> None:
        self.inner, self.samples = MultiNodeOptimizer(optimizer, comm, weighted=True, bucket_bytes=64), samples
        self.zero_grad = self.inner.zero_grad

    def step(self) -> None:
        self.inner.step(num_samples=self.samples())


STEPPED = ["gan", "wgan", "chained", "twice", "stepped", "distilled", "squares of weights", "norms of weights", "tied"]


@pytest.mark.parametrize("name", STEPPED)
def test_so_they_are_with_a_multi_node_optimizer(comm: AbstractCommunicator, name: str) -> None:
    case = CASES[name]
    expected, built = expected_of(case), build(case)
    models, here = [deepcopy(network) for network in built], [0]

    def cut(_: Any, *tensors: torch.Tensor) -> Any:
        parts = [tensor[uneven(comm, len(tensor))] for tensor in tensors]
        here[0] = len(parts[0])
        return parts[0] if len(parts) == 1 else parts

    train(case, models, cut, wrap=lambda optimizer: Weighted(optimizer, comm, lambda: here[0]))
    for model, state in zip(models, expected, strict=True):
        assert_equal(model.state_dict(), state, name)
