"""Whether a tiled network trains as the plain one: one body over networks, batches, layouts and optimizers; one over loops."""

import random
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from networks import Batch, Case, build
from torch import nn
from torch.utils import _pytree as pytree

from tatami.batch import on_device, samples_of
from tatami.comm.base import AbstractCommunicator
from tatami.runtime.losses import LossReduction
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.train import History, TiledModel, move, tile, whole_state_dict
from tiled_rig import Tensors, assert_close, gradients, some_layouts, whole_gradients

STEPS = 5
SAMPLES = 7
Plans = Callable[[int], Sequence[Mapping[int, Layout]]]
"""Number of ranks -> runs; of each, the layouts by the step that they begin with."""


def loss_of(output: Any, reduction: LossReduction = "mean") -> torch.Tensor:
    """A mean, or a sum, over samples with no symmetry that would hide a wrong gradient.

    Of Hugging Face's outputs the logits are taken: their losses are computed in single precision.
    """
    flat = logits_of(output).flatten(1)
    weights = torch.linspace(-1.0, 1.0, flat.shape[1], dtype=flat.dtype, device=flat.device)
    losses = (flat * weights).sum(1) + flat.square().mean(1)
    return losses.sum() if reduction == "sum" else losses.mean()


def random_layout(size: int, seed: int, *, halving: bool = False) -> Layout:
    """Any replicas of all ranks, of any heights, and of any width or each half as wide as the one before."""
    draw = random.Random(seed)
    ranks = draw.sample(range(size), size)
    replicas: list[list[int]] = [[ranks[0]]]
    for rank in ranks[1:]:
        if draw.random() < 0.4:
            replicas.append([rank])
        else:
            replicas[-1].append(rank)
    widths: list[float] = [draw.randint(1, 6) for _ in replicas]
    if halving:
        widths = [0.5**number for number in range(1, len(replicas))]
        widths.append(1 - sum(widths))
    heights = [[draw.randint(1, 6) for _ in replica] for replica in replicas]
    return Layout(
        replicas=tuple(
            Replica(
                width=width / sum(widths),
                processors=tuple(f"p{rank}" for rank in replica),
                heights=tuple(height / sum(each) for height in each),
            )
            for replica, width, each in zip(replicas, widths, heights, strict=True)
        )
    )


def run(model: nn.Module, batch: Batch) -> Any:
    return model(**batch) if isinstance(batch, dict) else model(*batch)


def logits_of(output: Any) -> torch.Tensor:
    result: torch.Tensor = output if isinstance(output, torch.Tensor) else output.logits
    return result


def local(model: Any, batch: Batch) -> Batch:
    """This rank's samples of it; of a plain model all."""
    if not isinstance(model, TiledModel):
        return batch
    tensors = list(batch.values()) if isinstance(batch, dict) else list(batch)
    mine = model.local(*tensors)
    parts = mine if isinstance(mine, tuple) else (mine,)
    return dict(zip(batch, parts, strict=True)) if isinstance(batch, dict) else parts


def adam(model: nn.Module) -> torch.optim.Adam:
    """With an eps above rounding: the bias of keys has no gradient but rounding, which Adam would otherwise blow up."""
    return torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=0.01, eps=1e-5)


def plain_loss_of(model: Any, batch: Batch, *, reduction: LossReduction = "mean") -> torch.Tensor:
    return loss_of(run(model, batch), reduction)


def steps(
    model: Any,
    batches: Iterable[Batch],
    *,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer],
    loss: Callable[[Any, Batch], torch.Tensor],
    before: Callable[[int, torch.optim.Optimizer], object],
) -> Iterator[int]:
    """A loop over batches, of a plain model or a tiled one; stops after each backward pass."""
    made = optimizer(model)
    for step, batch in enumerate(batches):
        before(step, made)
        made.zero_grad()
        loss(model, local(model, batch)).backward()  # type: ignore[no-untyped-call]
        yield step
        made.step()


def fixed(layouts: Callable[[int], Sequence[Layout]] = some_layouts) -> Plans:
    """A run on each of these layouts."""
    return lambda size: [{0: layout} for layout in layouts(size)]


def with_shards(layouts: Sequence[Layout]) -> Iterator[tuple[Layout, dict[str, Any]]]:
    """Each layout, and options of `tile`; replicas of one rank come once more with a sharded optimizer, in uneven shares."""
    for layout in layouts:
        yield layout, {}
        size = len(layout.processors)
        if size > 1 and all(len(replica.processors) == 1 for replica in layout.replicas):
            yield layout, {"sharded_optimizer": True, "speeds": [1.0 + rank for rank in range(size)]}


def _differences(own: Tensors, exact: Tensors) -> dict[str, float]:
    """By how much the gradients of a plain run in single precision are off by themselves."""
    both = [(name, own[name], other) for name, other in exact.items()]
    return {name: float((a - b).abs().max()) for name, a, b in both if a is not None and b is not None and a.numel()}


def check_equal(
    world: World,
    make: Callable[[], nn.Module],
    batches: Sequence[Batch],
    *,
    plans: Plans = fixed(),  # noqa: B008
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adam,
    loss: Callable[[Any, Batch], torch.Tensor] = plain_loss_of,
    change: Callable[[nn.Module, int], object] = lambda _, __: None,
    then: Callable[[TiledModel, nn.Module], object] = lambda _, __: None,
    options: Callable[[AbstractCommunicator], dict[str, Any]] = lambda _: {},
) -> None:
    """Gradients of every step, and parameters and buffers after the last, are those of the plain network.

    Args:
        world: of ranks.
        make: the network, the same in every call. Dropout draws from seed 9.
        batches: global ones.
        plans: on which layouts, and when they change.
        optimizer: of a model.
        loss: of a model and a batch.
        change: called with the network and the number of every step before it.
        then: called with the trained models, tiled and plain.
        options: of `tile`, for a rank.
    """
    plain, network = make(), make()
    torch.manual_seed(9)
    training = steps(plain, batches, optimizer=optimizer, loss=loss, before=lambda step, _: change(plain, step))
    expected = [gradients(plain) for _ in training]
    roundings: list[dict[str, float]] = [{} for _ in expected]
    if any(parameter.dtype is torch.float32 for parameter in plain.parameters()):
        exact = make().double()
        doubled = [pytree.tree_map_only(torch.Tensor, lambda x: x.double() if x.is_floating_point() else x, b) for b in batches]
        torch.manual_seed(9)
        training = steps(exact, doubled, optimizer=optimizer, loss=loss, before=lambda step, _: change(exact, step))
        roundings = [_differences(own, gradients(exact)) for own, _ in zip(expected, training, strict=True)]
    torch.manual_seed(9)  # the state that tile() takes over for dropout

    def body(comm: AbstractCommunicator) -> None:
        for plan in plans(comm.size):
            given = {"batch_size": samples_of(batches[0]), "speeds": "equal", "reduction": "mean", "quiet": True}
            model: TiledModel = tile(network, comm, layout=plan[0], **{**given, **options(comm)})

            def before(step: int, made: torch.optim.Optimizer) -> None:
                if step and step in plan:  # noqa: B023
                    move(model, plan[step], optimizer=made)  # noqa: B023
                change(model.module, step)  # noqa: B023

            for step in steps(model, batches, optimizer=optimizer, loss=loss, before=before):
                assert_close(
                    whole_gradients(model),
                    expected[step],
                    what=f"gradients of step {step} on {model.layout}",
                    rounding=roundings[step],
                )
            assert_close(comm.bcast_object(whole_state_dict(model)), plain.state_dict(), what=f"after {plan}")
            then(model, plain)
            model.close()

    world(body)


def check_case(
    world: World,
    case: Case,
    *,
    device_of: Callable[[int], Any] = lambda rank: None,  # noqa: ARG005
    reduction: LossReduction = "mean",
    halving: bool = False,
) -> None:
    """Five steps over two re-tilings, and evaluation.

    Args:
        world: of ranks.
        case: the network.
        device_of: rank -> the device that it computes on; None: the CPU.
        reduction: of the loss.
        halving: shares of samples are powers of two. A network that rounds to single precision inside (a norm, a softmax)
            rounds gradients as well. Those of a replica's mean are larger than those of the global mean, and are rounded to the
            same digits only where they are so by a power of two.
    """
    generator = torch.Generator().manual_seed(5)
    sizes = [8, 8, 8, 8, 4] if halving else [SAMPLES] * (STEPS - 1) + [SAMPLES - 3]
    batches = [case.draw(size, generator) for size in sizes]

    def evaluated(model: TiledModel, plain: nn.Module) -> None:
        device = device_of(model.comm.rank)
        assert device is None or model.device == torch.device(device)
        assert all(parameter.device == model.device for parameter in model.parameters())
        model.eval()
        plain.eval()
        with torch.no_grad():
            output = logits_of(run(model, on_device(batches[0], model.device))).to("cpu")
            assert_close({"output": output}, {"output": logits_of(run(plain, batches[0]))}, what="evaluation")

    check_equal(
        world,
        partial(build, case),
        batches,
        plans=lambda size: [{2 * seed: random_layout(size, seed, halving=halving) for seed in range(3)}],
        loss=partial(plain_loss_of, reduction=reduction),
        then=evaluated,
        options=lambda comm: {"sample": batches[0], "reduction": reduction, "device": device_of(comm.rank)},
    )


def check_loop(
    world: World,
    make: Callable[[], nn.Module],
    loop: Callable[[Any, Callable[..., Any]], Any],
    *,
    layouts: Callable[[int], Sequence[Layout]] = some_layouts,
    seed: int | None = None,
    **options: Any,
) -> None:
    """What a loop written by hand returns, and the gradients that it leaves, are those of the plain network.

    Args:
        world: of ranks.
        make: the network, the same in every call.
        loop: called with a model and what cuts this rank's samples out of global tensors, or leaves the plain model's whole;
            returns numbers, or None.
        layouts: to do so on.
        seed: of what both draw, where they do.
        **options: of `tile`.
    """
    plain, network = make(), make()
    if seed is not None:
        torch.manual_seed(seed)
    expected = loop(plain, lambda *tensors: tensors[0] if len(tensors) == 1 else tensors)
    if seed is not None:
        torch.manual_seed(seed)

    def body(comm: AbstractCommunicator) -> None:
        for layout, sharded in with_shards(layouts(comm.size)):
            given = {"batch_size": SAMPLES, "speeds": "equal", "reduction": "mean", "quiet": True, **sharded}
            model = tile(network, comm, layout=layout, **{**given, **options})
            found = loop(model, model.local)
            assert found is expected is None or found == pytest.approx(expected, rel=1e-12, abs=0), f"{layout}"
            assert_close(whole_gradients(model), gradients(plain), what=f"gradients on {layout}")

    world(body)


def in_batches(size: int, *tensors: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Of so many samples each, in their order; the last one may be smaller."""
    return list(zip(*(torch.split(tensor, size) for tensor in tensors), strict=True))


Fitted = tuple[list[float], dict[str, torch.Tensor]]
"""Losses, and the weights after the last update."""


def plain_fit(
    model: nn.Module,
    batches: Iterable[Any],
    *,
    loss: Callable[[nn.Module, Any], torch.Tensor],
    optimizer: Callable[[Any], torch.optim.Optimizer],
    clip_norm: float | None = None,
    after: Callable[[torch.optim.Optimizer, int], object] = lambda _, __: None,
) -> Fitted:
    """The loop that a Trainer stands for; `after` is called with the optimizer and the number of updates."""
    made, losses = optimizer([each for each in model.parameters() if each.requires_grad]), []
    for batch in batches:
        made.zero_grad()
        value = loss(model, batch)
        value.backward()  # type: ignore[no-untyped-call]
        if clip_norm is not None:
            torch.nn.utils.clip_grad_norm_(model.parameters(), clip_norm)
        made.step()
        losses.append(value.item())
        after(made, len(losses))
    return losses, model.state_dict()


def check_fit(
    world: World,
    network: nn.Module,
    expected: Fitted,
    fit: Callable[[TiledModel, AbstractCommunicator], History],
    *,
    layouts: Callable[[int], Sequence[Layout]] = some_layouts,
    rel: float = 1e-10,
    **options: Any,
) -> None:
    """On every layout, `fit(model, comm)` gives the losses and the weights of the plain run."""

    def body(comm: AbstractCommunicator) -> None:
        for layout, sharded in with_shards(layouts(comm.size)):
            given = {"batch_size": SAMPLES, "speeds": "equal", "reduction": "mean", "quiet": True, **sharded}
            model = tile(network, comm, layout=layout, **{**given, **options})
            assert fit(model, comm).losses == pytest.approx(expected[0], rel=rel)
            assert_close(comm.bcast_object(whole_state_dict(model)), expected[1], what=f"weights on {layout}")

    world(body)
