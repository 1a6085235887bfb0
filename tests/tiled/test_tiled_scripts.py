"""Random training scripts: each does what one machine does, or is refused by name. No script ends with other numbers.

A script is a network, a layout and some steps, with something that users do between them. `make scripts` runs 500.
"""

import os
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from test_tiled_trust import Gate
from torch import nn
from torch.nn.utils import clip_grad_norm_, parametrizations, prune

from drawing import Written, one_at_a_time
from tatami.comm.base import AbstractCommunicator
from tatami.errors import TatamiError
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.train import TiledModel, WeightAverage, load_whole_state_dict, move, tile, whole_state_dict
from tiled_rig import assert_close

SCRIPTS = int(os.environ.get("TATAMI_SCRIPTS", "16"))
SAMPLES, WIDTH, STEPS = 12, 6, 9
prune_by_size: Any = prune.l1_unstructured


def attention_forward(net: Any, x: torch.Tensor) -> Any:
    """Causal attention of two heads over three tokens of two numbers."""
    q, k, v = (each.view(-1, 3, 2, 4).transpose(1, 2) for each in net.inner(x.view(-1, 3, 2)).split(8, -1))
    found = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(-1, 3, 8)
    return x + net.outer(found).reshape(-1, WIDTH)


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "gate": Gate,
    "attention": lambda: Written(attention_forward, inner=nn.Linear(2, 24), outer=nn.Linear(8, 2)),
    "pair": lambda: nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH)),
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "batch norm": lambda: nn.BatchNorm1d(WIDTH),
}


@dataclass(kw_only=True)
class Run:
    """A script at work, on one machine or on a rank.

    Attributes:
        model: in whose place the plain network stands.
        rank, size: 0 and 1 on one machine.
        chance: the same everywhere.
        optimizers: that step.
        loss: of an output and its target.
        samples: of a batch.
        seed_step: from which the batches are counted.
        accumulates: whether gradients of the next step are added to those of this one.
    """

    model: nn.Module
    rank: int
    size: int
    chance: random.Random
    optimizers: list[torch.optim.Optimizer] = field(default_factory=list)
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = F.mse_loss
    samples: int = SAMPLES
    seed_step: int = 0
    accumulates: bool = False

    @property
    def network(self) -> nn.Module:
        return self.model.module if isinstance(self.model, TiledModel) else self.model

    def some(self, kind: Any) -> Any:
        """A module of the network, by chance; None where there is none."""
        found = [each for each in self.network.modules() if isinstance(each, kind)]
        return self.chance.choice(found) if found else None

    def batch(self, step: int) -> tuple[torch.Tensor, torch.Tensor]:
        generator = torch.Generator().manual_seed(step + self.seed_step)
        x, y = (torch.randn(self.samples, WIDTH, generator=generator, dtype=torch.float64) for _ in range(2))
        return x, y

    def step(self, step: int) -> None:
        x, y = self.batch(step)
        if isinstance(self.model, TiledModel):
            x, y = self.model.local(x, y)
        if not self.accumulates:
            self.model.zero_grad()
        loss: Any = self.loss(self.model(x), y)
        loss.backward()


def set_(run: Run, kind: Any, **values: Any) -> None:
    if (module := run.some(kind)) is not None:
        for name, value in values.items():
            setattr(module, name, value)


def swap(run: Run, activation: Callable[[], nn.Module]) -> None:
    if (pair := run.some(nn.Sequential)) is not None and isinstance(pair[1], (nn.Tanh, nn.ReLU)):
        pair[1] = activation()


def noise(run: Run) -> None:
    """By numbers of a rank's own."""
    generator = torch.Generator().manual_seed(run.rank)
    with torch.no_grad():
        for each in run.network.parameters():
            each.add_(0.1 * torch.randn(each.shape, generator=generator, dtype=each.dtype))


def by_hand(run: Run) -> None:
    """Gradients over the largest of them."""

    def clip(*_: Any) -> None:
        grads = [each.grad for each in run.model.parameters() if each.grad is not None]
        if grads:
            torch._foreach_div_(grads, max(float(grad.abs().max()) for grad in grads if grad.numel()))

    run.optimizers[0].register_step_pre_hook(clip)


def retile(run: Run) -> None:
    layout = layout_of(run.chance, int(os.environ.get("TATAMI_SCRIPT_RANKS", run.size)) if run.size == 1 else run.size)
    if isinstance(run.model, TiledModel) and run.size > 1:
        move(run.model, layout, optimizer=run.optimizers[0])


def reload(run: Run) -> None:
    if isinstance(run.model, TiledModel):
        state = whole_state_dict(run.model)
        load_whole_state_dict(run.model, state if run.rank == 0 else None)


def evaluate(run: Run) -> None:
    run.model.eval()
    with torch.no_grad():
        run.model(run.model.local(run.batch(99)[0]) if isinstance(run.model, TiledModel) else run.batch(99)[0])
    run.model.train()


def set_loss(run: Run, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
    run.loss = loss


def by_type(run: Run) -> None:
    decayed = [each.weight for each in run.model.modules() if isinstance(each, nn.Linear) and "weight" in each._parameters]
    run.optimizers.append(torch.optim.SGD(decayed, lr=0.01, momentum=0.9))


def clipped(run: Run) -> None:
    def clip(*_: Any) -> None:
        clip_grad_norm_(run.model.parameters(), 0.1)

    run.optimizers[0].register_step_pre_hook(clip)


def add_layer(run: Run) -> None:
    layer = nn.Linear(WIDTH, WIDTH).double()
    with torch.no_grad():
        for each in layer.parameters():
            each.fill_(0.1)
    run.network.append(layer)  # type: ignore[operator]
    run.optimizers[0].add_param_group({"params": list(layer.parameters())})


ACTIONS: dict[str, Callable[[Run], Any]] = {
    "nothing": id,
    "temperature": lambda run: set_(run, Gate, temperature=0.5),
    "flag": lambda run: set_(run, Gate, is_squared=True),
    "slope": lambda run: set_(run, nn.LeakyReLU, negative_slope=0.7),
    "momentum": lambda run: set_(run, nn.BatchNorm1d, momentum=0.5),
    "eps of a norm": lambda run: set_(run, (nn.LayerNorm, nn.BatchNorm1d), eps=0.1),
    "buffer": lambda run: (gate := run.some(Gate)) and gate.warmth.mul_(0.5),
    "softmax": lambda run: swap(run, lambda: nn.Softmax(-1)),
    "other activation": lambda run: swap(run, nn.ReLU),
    "hook": lambda run: run.some(nn.Linear).register_forward_hook(lambda *given: given[2] - given[2].mean(-1, keepdim=True)),
    "hook that looks": lambda run: run.some(nn.Linear).register_forward_hook(lambda *_: None),
    "hook of a parameter": lambda run: run.some(nn.Linear).bias.register_hook(lambda grad: 0.5 * grad),
    "prune": lambda run: prune_by_size(run.some(nn.Linear), "weight", 0.3),
    "weight norm": lambda run: parametrizations.weight_norm(run.some(nn.Linear)),
    "freeze": lambda run: run.some(nn.Linear).requires_grad_(False),
    "unfreeze": lambda run: run.network.requires_grad_(True),
    "learning rate": lambda run: run.optimizers[0].param_groups[0].update(lr=0.02),
    "learning rate of a rank": lambda run: run.optimizers[0].param_groups[0].update(lr=0.02 * (1 + run.rank)),
    "noise": noise,
    "by hand": by_hand,
    "clip": clipped,
    "average": lambda run: run.optimizers.append(WeightAverage(run.model.parameters(), decay=0.5)),
    "optimizer by type": by_type,
    "re-tile": retile,
    "reload": reload,
    "evaluate": evaluate,
    "root": lambda run: set_loss(run, lambda output, y: F.mse_loss(output, y).sqrt()),
    "norm": lambda run: set_loss(run, lambda output, y: (output - y).norm()),
    "half": lambda run: set_loss(run, lambda output, y: 0.5 * F.l1_loss(output, y)),
    "other size": lambda run: setattr(run, "samples", 7),
    "other order": lambda run: setattr(run, "seed_step", 50 * run.rank),
    "accumulate": lambda run: setattr(run, "accumulates", not run.accumulates),
    "new layer": add_layer,
}


FINE = frozenset(
    {"nothing", "buffer", "momentum", "learning rate", "clip", "average", "optimizer by type", "re-tile", "reload"}
)
FINE |= {"evaluate", "half", "other size", "accumulate", "freeze", "unfreeze"}
"""What is never refused."""


def layout_of(chance: random.Random, size: int) -> Layout:
    """Any replicas, each of some ranks, with any shares."""
    cuts = sorted(chance.sample(range(1, size), chance.randrange(size))) if size > 1 else []
    groups = [list(range(size))[start:stop] for start, stop in zip([0, *cuts], [*cuts, size], strict=True)]
    widths = [chance.choice((1, 2, 3)) for _ in groups]

    def replica(ranks: list[int], width: int) -> Replica:
        parts = [chance.choice((1, 2)) for _ in ranks]
        heights = tuple(part / sum(parts) for part in parts)
        return Replica(width=width / sum(widths), processors=tuple(f"p{rank}" for rank in ranks), heights=heights)

    return Layout(replicas=tuple(replica(ranks, width) for ranks, width in zip(groups, widths, strict=True)))


@dataclass(frozen=True, kw_only=True)
class Script:
    """What is run.

    Attributes:
        blocks: of the network.
        actions: before which step, in their order.
    """

    seed: int
    blocks: tuple[str, ...]
    actions: tuple[tuple[int, str], ...]

    @one_at_a_time
    def build(self) -> nn.Module:
        torch.manual_seed(self.seed)
        return nn.Sequential(*(BLOCKS[name]() for name in self.blocks), nn.Linear(WIDTH, WIDTH)).double()

    def run(self, run: Run) -> None:
        run.optimizers.append(torch.optim.SGD(run.model.parameters(), lr=0.05, momentum=0.5))
        for step in range(STEPS):
            for when, name in self.actions:
                if when == step:
                    ACTIONS[name](run)
            run.step(step)
            for optimizer in run.optimizers:
                optimizer.step()


def script_of(seed: int) -> Script:
    chance = random.Random(seed)
    blocks = tuple(chance.choice(sorted(BLOCKS)) for _ in range(chance.randint(1, 3)))
    actions = tuple(sorted((chance.randrange(1, 6), chance.choice(sorted(ACTIONS))) for _ in range(chance.randint(1, 3))))
    return Script(seed=seed, blocks=blocks, actions=actions)


FOUND = [
    Script(seed=54, blocks=("linear",), actions=((4, "prune"),)),
    Script(seed=226, blocks=("attention", "pair"), actions=((3, "prune"), (5, "by hand"))),
    Script(seed=322, blocks=("linear", "batch norm", "attention"), actions=((3, "optimizer by type"),)),
]
"""What once ended with other numbers: pruning in a pair, and channels of a batch normalization that units share out."""


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("script", [*map(script_of, range(SCRIPTS)), *FOUND], ids=lambda script: str(script.seed))
def test_a_script_is_as_on_one_machine_or_refused(world: World, script: Script, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TATAMI_SCRIPT_RANKS", str(world.size))  # draws of the plain run are those of the ranks
    seed, plain, built = script.seed, script.build(), script.build()
    try:
        script.run(Run(model=plain, rank=0, size=1, chance=random.Random(seed)))
    except Exception as error:  # what torch refuses on one machine needs nothing of Tatami's
        pytest.skip(f"fails on one machine: {error}")

    def body(comm: AbstractCommunicator) -> None:
        layout = layout_of(random.Random(seed + 1000), comm.size)
        options: dict[str, Any] = {"speeds": "equal", "reduction": "mean", "quiet": True}
        sample = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
        model = tile(built, comm, batch_size=SAMPLES, sample=sample, layout=layout, **options)
        script.run(Run(model=model, rank=comm.rank, size=comm.size, chance=random.Random(seed)))
        model.check_same_weights()
        assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what=f"weights after {script}")

    try:
        world(body)
    except TatamiError:
        if not {name for _, name in script.actions} - FINE:
            raise
