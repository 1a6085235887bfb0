"""Random networks, layouts and batches, and the plain single-process run that tests of exactness compare with."""

import copy
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch import nn

from drawing import one_at_a_time
from tatami.cluster import Cluster, Processor
from tatami.comm import AbstractCommunicator, Recording
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.train import TiledModel, tile, whole_state_dict

TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.bfloat16: 0.1}
"""Relative. For bfloat16, whose unit in the last place is 0.008, a check of sanity only."""

FLOOR = {torch.float64: 1e-5, torch.float32: 5e-2, torch.bfloat16: 1.0}
"""What cancels exactly on paper leaves nothing to be relative to: a tensor far smaller than the largest of all is measured
against this part of that one, so that four roundings of the largest are within the tolerance. The order in which a sum of a few
elements is taken depends on where they lie in memory, also on one rank."""

IS_PROCESS = any(name in os.environ for name in ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "LOCAL_RANK"))
EXAMPLES = 6 if IS_PROCESS else 20
"""Ranks that are threads have gone through all of them; what is left to show is that ranks that are processes do the same."""
property_test = settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
MakeOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]


def optimizers(dtype: torch.dtype) -> dict[str, MakeOptimizer]:
    """Steps small enough that no run diverges, which would magnify rounding without bound.

    Adam's update is g / (|g| + eps) at first: with an eps below the rounding of g it would turn noise into whole steps.
    """
    eps = 1e-8 if dtype is torch.float64 else 1e-2
    return {
        "sgd": lambda p: torch.optim.SGD(p, lr=0.01),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.005, momentum=0.9, weight_decay=0.01),
        "adam": lambda p: torch.optim.Adam(p, lr=0.02, eps=eps),
        "adamw": lambda p: torch.optim.AdamW(p, lr=0.02, eps=eps, weight_decay=0.1),
    }


class Functional(nn.Module):
    """A pair with a functional activation in a forward pass of its own, and a residual connection around it."""

    def __init__(self, features: int, units: int, *, bias: bool) -> None:
        super().__init__()
        self.up = nn.Linear(features, units, bias=bias)
        self.down = nn.Linear(units, features, bias=bias)

    def forward(self, x: torch.Tensor) -> Any:
        hidden: torch.Tensor = 0.5 * torch.tanh(self.up(x)) + 0.1
        return x + self.down(hidden)


@dataclass(frozen=True, kw_only=True)
class Network:
    """What a random network is built from; `build` gives the same one every time.

    Attributes:
        sizes: inputs, and the outputs of every linear layer of the main chain.
        biases: of every linear layer of the main chain.
        activations: after each linear layer but the last.
        nested: put the first three modules into an inner Sequential.
        functional: append a `Functional` with so many units, 0 for none.
        norm: a LayerNorm after the chain (where that is wide enough to have a gradient below it).
        dropout: probabilities inside of the first pair, and outside at the end.
        frozen: freeze the first linear layer of the chain.
        unused: a layer that takes no part.
    """

    sizes: tuple[int, ...]
    biases: tuple[bool, ...]
    activations: tuple[str, ...]
    nested: bool = False
    functional: int = 0
    norm: bool = False
    dropout: tuple[float, float] = (0.0, 0.0)
    frozen: bool = False
    unused: bool = False

    @one_at_a_time
    def build(self, dtype: torch.dtype) -> nn.Module:
        torch.manual_seed(3)
        modules: list[nn.Module] = []
        for index, (inputs, outputs) in enumerate(zip(self.sizes, self.sizes[1:], strict=False)):
            modules.append(nn.Linear(inputs, outputs, bias=self.biases[index]))
            if index < len(self.sizes) - 2:
                modules.append(ACTIVATIONS[self.activations[index]]())
                if index == 0 and self.dropout[0]:
                    modules.append(nn.Dropout(self.dropout[0]))
        if self.frozen:
            modules[0].requires_grad_(False)
        if self.nested:
            modules = [nn.Sequential(*modules[:3]), *modules[3:]]
        width = self.sizes[-1]
        if self.norm and width >= 3:
            modules.append(nn.LayerNorm(width))
        if self.functional:
            modules.append(Functional(width, self.functional, bias=self.biases[0]))
        if self.dropout[1]:
            modules.append(nn.Dropout(self.dropout[1]))
        network = nn.Sequential(*modules)
        return (WithUnused(network) if self.unused else network).to(dtype)


class WithUnused(nn.Module):
    """`network`, beside a layer that takes no part in the forward pass."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network
        self.spare = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.network(x)


ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "sigmoid": nn.Sigmoid,
    "tanh": nn.Tanh,
    "relu": lambda: nn.ReLU(inplace=True),
    "gelu": nn.GELU,
    "softplus": nn.Softplus,
}


@st.composite
def networks(draw: st.DrawFn) -> Network:
    """Two to five linear layers (an odd last one is replicated), with all that may lie around them."""
    sizes = tuple(draw(st.lists(st.integers(1, 7), min_size=3, max_size=6)))
    layers = len(sizes) - 1
    return Network(
        sizes=sizes,
        biases=tuple(draw(st.lists(st.booleans(), min_size=layers, max_size=layers))),
        activations=tuple(draw(st.lists(st.sampled_from(sorted(ACTIVATIONS)), min_size=layers - 1, max_size=layers - 1))),
        nested=draw(st.booleans()),
        functional=draw(st.integers(0, 5)),
        norm=draw(st.booleans()),
        dropout=(draw(st.sampled_from([0.0, 0.0, 0.4])), draw(st.sampled_from([0.0, 0.0, 0.25]))),
        frozen=draw(st.booleans()),
        unused=draw(st.booleans()),
    )


@st.composite
def layouts(draw: st.DrawFn, size: int) -> Layout:
    """Any replicas of any of the ranks, in any order; shares of 0 (a tile without samples, or without units) among them."""
    ranks = draw(st.permutations(range(size)))
    kind = draw(st.sampled_from(["any", "any", "one replica", "one row"]))
    if kind == "any":
        left_out = draw(st.integers(0, size - 1)) if draw(st.booleans()) else 0
        ranks = ranks[left_out:]
        breaks = [draw(st.booleans()) for _ in ranks[1:]]
    else:
        breaks = [kind == "one row"] * (size - 1)
    replicas: list[list[int]] = [[ranks[0]]]
    for rank, fresh in zip(ranks[1:], breaks, strict=True):
        if fresh:
            replicas.append([rank])
        else:
            replicas[-1].append(rank)
    widths = shares(draw, len(replicas))
    return Layout(
        replicas=tuple(
            Replica(width=width, processors=tuple(f"p{rank}" for rank in members), heights=shares(draw, len(members)))
            for width, members in zip(widths, replicas, strict=True)
        )
    )


def shares(draw: st.DrawFn, count: int) -> tuple[float, ...]:
    """Fractions of 1, some of which may be 0."""
    weights = draw(st.lists(st.integers(0, 6), min_size=count, max_size=count).filter(any))
    return tuple(weight / sum(weights) for weight in weights)


def simple_layout(*replicas: Sequence[int], widths: Sequence[float] | None = None) -> Layout:
    """Replicas of ranks, each of equal heights."""
    return Layout(
        replicas=tuple(
            Replica(
                width=1 / len(replicas) if widths is None else widths[index],
                processors=tuple(f"p{rank}" for rank in members),
                heights=(1 / len(members),) * len(members),
            )
            for index, members in enumerate(replicas)
        )
    )


class Placed(Recording):
    """Notes what is sent, between ranks that think they are on these hosts; each part notes its own."""

    def __init__(self, inner: AbstractCommunicator, *, hosts: tuple[str, ...]) -> None:
        super().__init__(inner)
        self._placed = hosts

    @property
    def hosts(self) -> tuple[str, ...]:
        return self._placed

    def split(self, color: int | None, *, key: int = 0) -> Self | None:
        part = self.inner.split(color, key=key)
        if part is None:
            return None
        return type(self)(part, hosts=tuple(part.allgather_object(self._placed[self.rank])))


def hosts_of(size: int, kind: str) -> tuple[str, ...]:
    return {"one": ("h",) * size, "apart": tuple(f"h{i}" for i in range(size)), "two": tuple(f"h{i % 2}" for i in range(size))}[
        kind
    ]


def tiled(
    model: nn.Module,
    comm: AbstractCommunicator,
    *,
    layout: Layout,
    batch_size: int,
    reduction: str | None = "mean",
    wire: str | None = None,
    uneven: bool = False,
    sharded_optimizer: bool = False,
) -> TiledModel:
    """`tatami.tile` as the tests call it; `uneven`: bytes cost some ranks more than others."""
    assert reduction in ("mean", "sum", None)
    return tile(
        model,
        comm,
        batch_size=batch_size,
        speeds=uneven_cluster(comm.hosts) if uneven else "equal",
        layout=layout,
        reduction="mean" if reduction == "mean" else "sum" if reduction == "sum" else None,
        wire=wire,
        sharded_optimizer=sharded_optimizer,
    )


def uneven_cluster(hosts: Sequence[str]) -> Cluster:
    """Processors p0, p1, ... of one speed, of which the first of each three can hardly copy, and the last copies best."""
    processors = (
        Processor(name=f"p{rank}", speed=1.0, host=host, copy_bytes_per_s=(1e5, 1e6, 3e6)[rank % 3])
        for rank, host in enumerate(hosts)
    )
    return Cluster(processors=tuple(processors))


def plain_loss(output: torch.Tensor, target: torch.Tensor, reduction: str) -> torch.Tensor:
    """A smooth loss over samples."""
    return F.mse_loss(output, target, reduction=reduction)


def whole_gradients(model: TiledModel) -> dict[str, torch.Tensor | None]:
    """The gradients of all ranks put together as those of the plain model, on every rank. Collective."""
    had = {name: parameter.grad is not None for name, parameter in model.module.named_parameters()}
    values = {name: parameter.detach().clone() for name, parameter in model.module.named_parameters()}
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.copy_(torch.zeros_like(parameter) if parameter.grad is None else parameter.grad)
        if model.sharding is not None:  # each rank has the sums of its shard
            model.sharding.gather([each for each in model.module.parameters() if each.grad is not None])
        state = model.comm.bcast_object(whole_state_dict(model))
        for name, parameter in model.module.named_parameters():
            parameter.copy_(values[name])
    return {name: state[name] if had[name] else None for name in had}


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    return {name: None if parameter.grad is None else parameter.grad.clone() for name, parameter in model.named_parameters()}


Tensors = Mapping[str, torch.Tensor | None]


def assert_equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor], what: str) -> None:
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=lambda m, n=name: f"{what}: {n}: {m}")  # type: ignore[misc]


def assert_close(actual: Tensors, expected: Tensors, *, what: str, rounding: Mapping[str, float] | None = None) -> None:
    """Equal up to the relative tolerance of the dtype, tensor by tensor.

    The error of a tensor is its largest difference over its largest element (see `FLOOR`). `rounding` says by how much the
    expected values are off themselves, as float32 is after some steps: it adds at most the tolerance once more.
    """
    assert actual.keys() == expected.keys(), what
    largest = max(
        (float(e.abs().max()) for e in expected.values() if e is not None and e.numel() and e.is_floating_point()), default=0.0
    )
    for name, reference in expected.items():
        value = actual[name]
        if reference is None or value is None:
            assert reference is None, f"{what}: {name} is None where the plain run has a tensor"
            assert value is None, f"{what}: {name} is a tensor where the plain run has None"
            continue
        assert value.shape == reference.shape, f"{what}: {name} {value.shape} {reference.shape}"
        assert value.dtype == reference.dtype, f"{what}: {name} {value.dtype} {reference.dtype}"
        if not reference.numel():
            continue
        if not reference.is_floating_point():
            assert torch.equal(value, reference), f"{what}: {name}"
            continue
        floor = largest * FLOOR[reference.dtype]
        scale = max(float(reference.abs().max()), floor, 1e-30)
        error = float((value.double() - reference.double()).abs().max()) / scale
        own, tolerance = (rounding or {}).get(name, 0.0) / scale, TOLERANCE[reference.dtype]
        assert error <= tolerance + min(own, tolerance), f"{what}: {name} is off by {error:.2e} of {scale:.2e}"


def draw_batches(
    count: int, *, size: int, shape: Sequence[int], outputs: int, dtype: torch.dtype
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Inputs (size, *shape) and targets (size, *shape[:-1], outputs)."""
    generator = torch.Generator().manual_seed(5)
    result = []
    for _ in range(count):
        x = torch.rand(size, *shape, generator=generator, dtype=torch.float64).to(dtype)
        y = torch.rand(size, *shape[:-1], outputs, generator=generator, dtype=torch.float64).to(dtype)
        result.append((x, y))
    return result


def copy_of(model: nn.Module) -> nn.Module:
    return copy.deepcopy(model)


def staged(size: int, *, stages: int, cuts: tuple[int, ...], micro_batches: int = 1) -> StagedLayout:
    """Replicas of `stages` ranks each, with shares of the samples that differ; what is left over of the ranks is left out."""
    widths = [float(2 + replica) for replica in range(size // stages)]

    def one(replica: int, stage: int) -> Replica:
        width, processors = widths[replica] / sum(widths), (f"p{replica * stages + stage}",)
        return Replica(width=width, processors=processors, heights=(1.0,), micro_batches=micro_batches)

    laid = (Layout(replicas=tuple(one(replica, stage) for replica in range(len(widths)))) for stage in range(stages))
    return StagedLayout(stages=tuple(laid), cuts=cuts)


def some_layouts(size: int) -> list[Layout]:
    """One replica; one row of unequal widths; two uneven replicas; and one in which the first rank is left out."""
    ranks = list(range(size))
    result = [simple_layout(ranks)]
    if size > 1:
        result.append(
            simple_layout(*([rank] for rank in ranks), widths=[2 * (1 + rank) / (size * (size + 1)) for rank in ranks])
        )
        result.append(simple_layout(ranks[1:]))
    if size > 2:
        result.append(simple_layout(ranks[:1], ranks[1:], widths=[0.3, 0.7]))
    return result
