"""Networks that people train: which blocks are found, and that tiled runs equal plain ones, recomputing activations or not."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from equal_runs import SAMPLES, STEPS, check_case, check_equal, loss_of, random_layout
from networks import CASES, GPT, build
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from tatami.cluster import Cluster, Processor
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import InputError, PlanError
from tatami.stages.stand_in import StandIn
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica
from tatami.tiling.memory import memory_bytes
from tatami.train import TiledModel, find_blocks, move, tile, workload_of
from tiled_rig import staged


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_blocks_of_a_network_are_found(name: str) -> None:
    case = CASES[name]
    model = build(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = find_blocks(model, sample=case.draw(3, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_code_that_asks_for_the_dtype_of_its_input_is_followed_in_single_precision() -> None:
    case = CASES["llama"]  # its rotary embeddings have the dtype of their input
    found = find_blocks(build(case).float(), sample=case.draw(3, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "resnet"])
def test_a_tiled_network_equals_the_plain_one(world: World, name: str) -> None:
    check_case(world, CASES[name])


@pytest.mark.threads_only  # each process would follow all of them again
@pytest.mark.parametrize("name", sorted(set(CASES) - {"gpt-dropout", "llama", "resnet"}))
def test_more_tiled_networks_equal_the_plain_ones(world: World, name: str) -> None:
    check_case(world, CASES[name])


@pytest.mark.threads_only
@pytest.mark.ranks(5, 6, 7, 8)  # on 1 to 4 ranks like all other networks
def test_six_heads_on_any_number_of_ranks(world: World) -> None:
    check_case(world, CASES["gpt"])


class Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def recomputed(build: Callable[[], nn.Module], layers: str, *, reentrant: bool) -> nn.Module:
    network = build()
    owner: Any = network.get_submodule(layers)
    for number, layer in enumerate(owner):
        owner[number] = Recomputed(layer, reentrant=reentrant)
    return network


@pytest.mark.threads_only
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "layers"), [("gpt-dropout", "h"), ("resnet", "layers"), ("experts-in-one-tensor", "h")])
def test_recomputed_layers_train_as_those_of_one_machine(world: World, name: str, layers: str, reentrant: bool) -> None:
    case = CASES[name]
    check_case(world, replace(case, build=partial(recomputed, case.build, layers, reentrant=reentrant)))


NETWORKS = {
    "gpt": replace(CASES["gpt-dropout"], build=lambda: GPT(dropout=0.2, layers=3, flash=False)),
    "flash": replace(CASES["gpt-dropout"], build=lambda: GPT(dropout=0.1, layers=2, vocabulary=512)),
    "llama": CASES["llama"],
    "resnet": CASES["resnet"],
}


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], lr=0.01, eps=1e-5)


def plans(size: int, *, all_alike: bool) -> Sequence[Mapping[int, Layout]]:
    """All ranks recompute, and do no more after a re-tiling; then those of one replica, and then those of another."""
    first, other = random_layout(size, 0), random_layout(size, 1)
    found: list[Mapping[int, Layout]] = [{0: first.recomputing(), 3: other}]
    if len(other.replicas) > 1 and not all_alike:
        found.append({0: other.recomputing(other.processors[:1]), 2: other.recomputing(other.processors[-1:])})
    return found


@pytest.mark.parametrize("name", ["gpt", "resnet"])
def test_it_trains_as_the_plain_network(world: World, name: str) -> None:
    """Uneven shares of samples and units; dropout draws what it drew, and running statistics take in each batch once."""
    check(world, name)


@pytest.mark.threads_only
@pytest.mark.parametrize("name", ["flash", "llama"])
def test_more_networks_train_as_the_plain_ones(world: World, name: str) -> None:
    check(world, name)


def check(world: World, name: str) -> None:
    case, generator = NETWORKS[name], torch.Generator().manual_seed(5)
    batches = [case.draw(SAMPLES, generator) for _ in range(STEPS)]
    check_equal(
        world,
        partial(build, case),
        batches,
        plans=partial(plans, all_alike=name == "resnet"),
        optimizer=adamw,
        options=lambda _: {"sample": batches[0]},
    )


def test_micro_batches_are_recomputed_each_for_itself() -> None:
    case = NETWORKS["gpt"]
    (x,) = case.draw(SAMPLES, torch.Generator().manual_seed(5))
    assert isinstance(x, torch.Tensor)
    found: list[list[dict[str, torch.Tensor]]] = []
    for layout in (random_layout(2, 1), random_layout(2, 1).recomputing()):

        def body(comm: AbstractCommunicator, layout: Layout = layout) -> dict[str, torch.Tensor]:
            model = tiled(build(case), comm, x, layout=layout.in_micro_batches(2))
            model.generator.manual_seed(4)
            for part in model.micro_batches(x):
                loss_of(model(part)).backward()  # type: ignore[no-untyped-call]
            return {name: each.grad.clone() for name, each in model.named_parameters() if each.grad is not None}

        found.append(run_threads(body, size=2))
    for kept, again in zip(*found, strict=True):
        assert kept.keys() == again.keys()
        assert all(torch.equal(kept[name], again[name]) for name in kept)


class Living(TorchDispatchMode):
    """The most bytes, at any moment, of what operations have made and is still there."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.most = 0
        self._found: dict[int, tuple[Any, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for leaf in pytree.tree_leaves(result):
            if isinstance(leaf, torch.Tensor) and not isinstance(leaf, StandIn) and not leaf.is_meta:
                memory = leaf.untyped_storage()
                self._found[memory.data_ptr()] = StorageWeakRef(memory), memory.nbytes()  # type: ignore[no-untyped-call]
        self.most = max(self.most, sum(size for memory, size in self._found.values() if not memory.expired()))
        return result


@pytest.mark.parametrize("heights", [(1.0,), (0.75, 0.25)])
def test_recomputing_saves_the_memory_that_the_plan_says(heights: tuple[float, ...]) -> None:
    """The most that a step of training needs at any moment, with what operations need while they run; weights are not in it."""
    torch.manual_seed(3)
    network = GPT(width=24, layers=6, dropout=0.1)
    x = torch.randint(11, (24, 8), generator=torch.Generator().manual_seed(1))
    names = tuple(f"p{rank}" for rank in range(len(heights)))
    layout = Layout(replicas=(Replica(width=1.0, processors=names, heights=heights),))
    workload = workload_of(network, find_blocks(network, sample=x[:4]), samples=24)
    kept_bytes, again_bytes = (memory_bytes(each, workload=workload) for each in (layout, layout.recomputing()))

    def body(comm: AbstractCommunicator) -> list[int]:
        found = []
        for each in (layout, layout.recomputing()):
            model = tiled(network, comm, x, layout=each)
            here, living = model.local(x), Living()
            with living:
                loss_of(model(here)).backward()  # type: ignore[no-untyped-call]
            found.append(living.most)
        return found

    for name, (kept, again) in zip(names, run_threads(body, size=len(heights)), strict=True):
        planned = kept_bytes[name] - again_bytes[name]
        assert again < 0.4 * kept
        assert planned <= kept - again <= 1.3 * planned


def test_stages_that_recompute_save_the_memory_that_the_plan_says() -> None:
    """The first stage keeps two micro-batches, and the second one."""
    torch.manual_seed(3)
    network = GPT(width=24, layers=6, dropout=0.1, flash=False)
    x = torch.randint(11, (12, 8), generator=torch.Generator().manual_seed(1))
    layout = staged(2, stages=2, cuts=(7,), micro_batches=6)

    def body(comm: AbstractCommunicator) -> list[tuple[int, float]]:
        found = []
        for each in (layout, layout.recomputing((0, 1))):
            model, living = tiled(network, comm, x, layout=each), Living()
            assert model.stage is not None
            assert model.stage.plan is not None
            with living:
                for part in model.micro_batches(x):
                    torch.autograd.backward(loss_of(model(part)))
            found.append((living.most, model.stage.plan.memory_bytes[model.name]))
        return found

    for (kept, kept_bytes), (again, again_bytes) in run_threads(body, size=2):
        planned = kept_bytes - again_bytes
        assert 0.1 * kept < planned <= kept - again <= 1.3 * planned


def tiled(network: nn.Module, comm: AbstractCommunicator, x: torch.Tensor, **options: Any) -> TiledModel:
    given = {"sample": x[:4], "speeds": "equal", "reduction": "mean", "quiet": True}
    return tile(network, comm, batch_size=len(x), **{**given, **options})


def test_the_rank_that_lacks_memory_recomputes(capsys: pytest.CaptureFixture[str]) -> None:
    """And all or none where that is asked for, also after a re-tiling."""
    torch.manual_seed(3)
    network = GPT(width=24, layers=6)
    x = torch.randint(11, (24, 8), generator=torch.Generator().manual_seed(1))
    workload = workload_of(network, find_blocks(network, sample=x[:4]), samples=24)
    one = random_layout(1, 0)
    most = memory_bytes(one.in_micro_batches(24), workload=workload)["p0"]
    least = memory_bytes(one.recomputing().in_micro_batches(24), workload=workload)["p0"]
    machine = Cluster(processors=(Processor(name="p0", speed=1.0, memory_bytes=round((most + least) / 2)),))

    def body(comm: AbstractCommunicator) -> list[tuple[tuple[str, ...], bool | None]]:
        model = tiled(network, comm, x, speeds=machine, quiet=False)
        asked = tiled(network, comm, x, recompute=True)
        move(asked, random_layout(1, 0), optimizer=None)
        return [(each.layout.recomputes, each.workload.recompute) for each in (model, asked)]

    assert run_threads(body, size=1) == [[(("p0",), None), ((), True)]]
    assert "; recomputing activations: p0" in capsys.readouterr().out


STAGED = staged(2, stages=2, cuts=(1,))
"""The first stage has no layer of the network below, and the second has both."""


@pytest.mark.threads_only
@pytest.mark.ranks(2)
@pytest.mark.parametrize(
    ("options", "error", "told"),
    [
        ({"recompute": False, "layout": STAGED.recomputing((0,))}, InputError, "the layout has p0 recompute: leave"),
        ({"layout": STAGED.recomputing((0,))}, PlanError, "p0 is to recompute activations, and no repeated layer"),
        ({"recompute": False, "layout": random_layout(2, 0).recomputing()}, InputError, "the layout has p1 recompute: leave"),
        (
            {"recompute": True, "sample": None},
            InputError,
            "needs a network with repeated layers that can be computed once more",
        ),
        ({"layout": random_layout(2, 1).recomputing(["p0"])}, PlanError, "p0 is to recompute activations and others are not"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_starts(
    comm: AbstractCommunicator, options: dict[str, Any], error: type[Exception], told: str
) -> None:
    case = NETWORKS["resnet"]
    (x,) = case.draw(SAMPLES, torch.Generator().manual_seed(5))
    assert isinstance(x, torch.Tensor)
    with pytest.raises(error, match=told):
        tiled(build(case), comm, x, **options)


class Caching(nn.Module):
    """A layer that is called with an object beside its tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor, cache: object) -> Any:  # noqa: ARG002
        return self.inner(x).relu()


class Stacked(nn.Module):
    def __init__(self, *, cache: object) -> None:
        super().__init__()
        self.layers, self.cache = nn.ModuleList(Caching() for _ in range(3)), cache

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x, self.cache)
        return x


@pytest.mark.parametrize(("cache", "layers"), [(None, ("layers.0", "layers.1", "layers.2")), (object(), ())])
def test_layers_that_are_called_with_objects_are_not_computed_twice(cache: object, layers: tuple[str, ...]) -> None:
    """A cache of keys and values would take them in twice."""
    assert find_blocks(Stacked(cache=cache), sample=torch.randn(4, 8)).layers == layers
