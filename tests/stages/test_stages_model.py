"""`tatami.tile` with pipeline stages: a loop by hand, and the Trainer, train as one machine does."""

import copy
import math
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stages_rig import CASES, AdamW, Gpt, Noisy, assert_same, floats, made, numbers, plain_run, tiled
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint
from torch.utils.data import TensorDataset
from typer.testing import CliRunner

import tatami
from tatami.cli.app import app
from tatami.cluster import Cluster, Link, Processor
from tatami.comm import AbstractCommunicator, run_threads
from tatami.errors import CommTimeoutError, InputError, ModelError, NotFiniteError, PlanError, RankDiedError
from tatami.model.model_stage import ModelStage
from tatami.records import Records
from tatami.report.page import facts_of, read_run
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.train import ModelCheckpoint, Trainer, whole_state_dict
from tiled_rig import staged

pytestmark = pytest.mark.ranks(2)

STEPS = 5
# The gradient of a key's bias is 0 but for rounding, which Adam with its own eps would blow up to a step.


def shared(*sizes: int, cut: int, micro_batches: int = 1) -> StagedLayout:
    """One replica of two stages of so many ranks, which share the units of their stage at unequal heights."""
    stages, taken = [], 0
    for size in sizes:
        names = tuple(f"p{rank}" for rank in range(taken, taken + size))
        heights = tuple((2 + place) / sum(range(2, 2 + size)) for place in range(size))
        stages.append(Layout(replicas=(Replica(width=1.0, processors=names, heights=heights, micro_batches=micro_batches),)))
        taken += size
    return StagedLayout(stages=tuple(stages), cuts=(cut,))


SHARED = {"gpt": 3, "gpt-tied": 3, "perceptron": 1}  # in front of which piece they are cut


def wide_layouts(size: int, *, cut: int | None) -> Iterator[StagedLayout]:
    if size > 2 and cut is not None:
        yield from (shared(2, 1, cut=cut), shared(1, size - 1, cut=cut, micro_batches=4))
        if size == 4:
            yield shared(2, 2, cut=cut, micro_batches=2)


def layouts(size: int, *, pieces: int) -> Iterator[StagedLayout]:
    """Some layouts for so many ranks of a network of so many pieces."""
    for stages in range(2, min(size, pieces) + 1):
        even = tuple(round(part * pieces / stages) for part in range(1, stages))
        yield staged(size, stages=stages, cuts=even)
        yield staged(size, stages=stages, cuts=tuple(range(1, stages)), micro_batches=2)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("name", CASES)
def test_a_loop_by_hand_trains_as_one_machine(world: World, name: str) -> None:
    case = CASES[name]()

    def body(comm: AbstractCommunicator) -> list[tuple[int, StagedLayout, dict[str, torch.Tensor]]]:
        found = []
        for layout in (*layouts(comm.size, pieces=2 if name == "lstm" else 4), *wide_layouts(comm.size, cut=SHARED.get(name))):
            model = tiled(case, comm, layout)
            optimizer = AdamW(model.parameters())
            for step in range(STEPS):
                optimizer.zero_grad()
                x, y = model.local(case.x, case.y)
                if step % 2:  # all forward passes first
                    torch.autograd.backward(case.loss(model(**x), y))
                else:  # one forward and one backward pass in turn
                    for x_part, y_part in model.micro_batches(case.x, case.y):
                        torch.autograd.backward(case.loss(model(**x_part), y_part))
                torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
            found.append((sum(each.numel() for each in model.own_parameters()), layout, whole_state_dict(model)))
            model.close()
        return found

    results = world(body)
    expected = plain_run(case, steps=STEPS)
    for number, (_, layout, weights) in enumerate(results[0]):
        assert_same(weights, expected)
        for replica in (replica for stage in layout.stages for replica in stage.replicas if len(replica.processors) > 1):
            held = [results[int(processor[1:])][number][0] for processor in replica.processors]
            assert sorted(set(held)) == held, "each rank has as many units as its height says"


SAMPLES = 23
noisy = made(Noisy)  # once: ranks as threads share torch's generator


def data() -> TensorDataset:
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(SAMPLES, 6, generator=generator, dtype=torch.float64)
    return TensorDataset(x, torch.randint(0, 3, (SAMPLES,), generator=generator))


def trainer(comm: AbstractCommunicator, layout: StagedLayout | None, **settings: Any) -> Trainer:
    model = tatami.tile(noisy(), comm, batch_size=8, sample=data()[:4][0], layout=layout, speeds="equal", quiet=True)
    model.generator.manual_seed(11)
    return Trainer(model, optimizer=AdamW, loss=F.cross_entropy, seed=3, **settings)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("clip", [None, 0.05])
def test_the_trainer_trains_evaluates_and_predicts_as_on_one_machine(world: World, clip: float | None) -> None:
    def run(comm: AbstractCommunicator, layout: StagedLayout | None) -> Any:
        own = trainer(comm, layout, gradient_clip_val=clip, accumulate_grad_batches=2)
        history = own.fit(data(), batch_size=8, epochs=2, validation=data(), metrics=["accuracy"])
        return history.losses, history.validation, own.predict(data(), batch_size=8), whole_state_dict(own.model)

    def body(comm: AbstractCommunicator) -> list[Any]:
        return [run(comm, layout) for layout in (*layouts(comm.size, pieces=4), *wide_layouts(comm.size, cut=4))]

    results = world(body)
    (expected,) = run_threads(lambda comm: run(comm, None), size=1)
    for rank, found in enumerate(results):
        for losses, validation, predicted, weights in found:
            assert losses == pytest.approx(expected[0], rel=1e-10)
            assert validation == [pytest.approx(each, rel=1e-10) for each in expected[1]]
            torch.testing.assert_close(predicted, expected[2], rtol=1e-10, atol=1e-12)
            if rank == 0:
                assert_same(weights, expected[3])


@pytest.mark.ranks(2, 3, 4)
def test_training_is_saved_and_goes_on_with_other_stages(world: World, tmp_path: Path) -> None:
    """Saved after three updates in one layout, and gone on with in each other one, and without stages."""

    def some(comm: AbstractCommunicator) -> list[StagedLayout | None]:
        return [None, *layouts(comm.size, pieces=4), *wide_layouts(comm.size, cut=4)]

    def run(comm: AbstractCommunicator, layout: StagedLayout | None, number: int, *, resume: int | None) -> Any:
        own = trainer(comm, layout)
        folder = tmp_path / f"{number}"
        objects = {"schedule": torch.optim.lr_scheduler.StepLR(own.optimizer, 2)}
        begun = 0
        if resume is not None:
            found = tatami.load_training(tmp_path / f"{resume}", own.model, own.optimizer, objects=objects)
            assert found is not None
            begun = found.step
        x, y = data()[:8]
        for step in range(begun, 5):
            own.optimizer.zero_grad()
            x_here, y_here = own.model.local(x, y)
            torch.autograd.backward(F.cross_entropy(own.model(x_here), y_here))
            own.optimizer.step()
            objects["schedule"].step()
            if step == 2 and resume is None:
                tatami.save_training(folder, own.model, own.optimizer, step=step + 1, objects=objects)
        return whole_state_dict(own.model)

    def body(comm: AbstractCommunicator) -> list[dict[str, torch.Tensor]]:
        saved = [run(comm, layout, number, resume=None) for number, layout in enumerate(some(comm))]
        numbers = range(len(saved))
        return saved + [run(comm, some(comm)[n], n, resume=other) for n in numbers for other in numbers if (n + other) % 2]

    results = world(body)
    for weights in results[0][1:]:
        assert_same(weights, results[0][0])


def thin(comm: AbstractCommunicator) -> Cluster:
    """Hosts of one rank each, of unequal speed, on a slow link."""
    processors = [Processor(name=f"p{i}", speed=1e6 / (1 + i % 2), host=f"h{i}") for i in range(comm.size)]
    return Cluster(processors=tuple(processors), network=Link(bandwidth_bytes_per_s=1e4, latency_s=1e-4))


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("asked", [{}, {"stages": 2}, {"stages": 2, "micro_batches": 3}])
def test_stages_are_planned(world: World, asked: dict[str, Any]) -> None:
    """On slow links by itself, or as many as were asked for."""
    case = CASES["gpt"]()

    def body(comm: AbstractCommunicator) -> Any:
        network = case.make()
        model = tatami.tile(
            network, comm, batch_size=len(case.y), sample=case.x, speeds=thin(comm), reduction="mean", quiet=True, **asked
        )
        assert model.stage is not None
        x, y = model.local(case.x, case.y)
        loss = case.loss(model(**x), y)
        torch.autograd.backward(loss)
        value = model.global_loss(loss)
        if not model.has_results:
            with pytest.raises(ModelError, match=r"on the last stage\. model\.global_loss\(loss\)"):
                loss.item()
        plain = model.whole()
        number = len(model.stage.layout.stages), model.stage.layout.stages[0].replicas[0].micro_batches
        return number, value, None if plain is None else plain(**case.x).detach()

    results = world(body)
    network = case.make()
    for number, value, _ in results:
        assert number[0] == asked.get("stages", number[0]) >= 2
        assert number[1] == asked.get("micro_batches", number[1])
        assert value == pytest.approx(case.loss(network(**case.x), case.y).item(), rel=1e-12)
    torch.testing.assert_close(results[0][2], network(**case.x).detach(), rtol=1e-10, atol=1e-12)


@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    ("asked", "told"),
    [
        ({"stages": 9}, "9 stages are more than the"),
        (
            {"layout": staged(3, stages=3, cuts=(1, 99))},
            "cut in front of piece 99, and the network's pieces are 0 tokens, 1 blocks",
        ),
        ({"stages": 2, "sample": None}, "need a sample"),
        ({"stages": 2, "random": "local"}, "leave random='local' out"),
        ({"stages": 2, "micro_batches": 99}, "99 micro-batches are more than the 6 samples"),
        (
            {"layout": shared(2, 1, cut=1)},
            "p0 and p1 are to share the units of stage 0, and no layer that is wholly inside of it",
        ),
    ],
)
def test_what_stages_cannot_do_is_refused_by_name(comm: AbstractCommunicator, asked: dict[str, Any], told: str) -> None:
    case = CASES["gpt"]()
    settings = {"sample": case.x, "speeds": thin(comm), "quiet": True, **asked}
    with pytest.raises((InputError, PlanError), match=told):
        tatami.tile(case.make(), comm, batch_size=len(case.y), **settings)


class Branches(nn.Module):
    """Python looks at a value of the first stage."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        if hidden.sum() > 1e9:
            hidden = hidden * 0
        return self.last(hidden)


def test_a_branch_on_a_value_of_another_stage_is_refused_with_its_line(comm: AbstractCommunicator) -> None:
    with pytest.raises(ModelError, match=r"test_stages_model.py:\d+ looks at a value that gt computes"):
        tatami.tile(
            Branches(), comm, batch_size=4, sample=torch.ones(2, 6), layout=staged(2, stages=2, cuts=(1,)), speeds="equal"
        )


def trained(
    comm: AbstractCommunicator,
    make: Callable[[], nn.Module],
    layout: StagedLayout | None,
    *,
    x: torch.Tensor,
    y: torch.Tensor,
    settings: Mapping[str, Any] | None = None,
    backward: Callable[[torch.Tensor], None] = torch.autograd.backward,
) -> dict[str, torch.Tensor]:
    """Whole weights after three steps of a loop over micro-batches."""
    own = {"speeds": "equal", "reduction": "mean", "quiet": True, **(settings or {})}
    model = tatami.tile(make(), comm, batch_size=len(y), sample=x, layout=layout, **own)
    optimizer = AdamW(model.parameters())
    for _ in range(3):
        optimizer.zero_grad()
        for x_part, y_part in model.micro_batches(x, y):
            output = model(x_part)
            backward(F.cross_entropy(output if isinstance(output, torch.Tensor) else output.logits[:, -1], y_part))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
    return whole_state_dict(model)


def assert_trains_alike(world: World, make: Callable[[], nn.Module], layout: StagedLayout, **given: Any) -> None:
    def run(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        return trained(comm, make, layout if comm.size > 1 else None, **given)

    # The model draws what rank 0's generator would; each rank compares with what its own draws.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        results = world(run)
        torch.manual_seed(3)
        (expected,) = run_threads(run, size=1)
    assert_same(results[0], expected)


def frozen_tied() -> nn.Module:
    """A GPT whose tied embedding and head are not trained, as under LoRA."""
    network = Gpt(tied=True)
    network.tokens.weight.requires_grad_(False)
    return Last(network)


class Last(nn.Module):
    """The logits of the last token."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> Any:
        return self.inner(x)[:, -1]


@pytest.mark.ranks(2, 3)
def test_tied_weights_may_be_frozen(world: World) -> None:
    x, y = numbers(6, 12, below=33), numbers(6, below=33, seed=7)
    layout = staged(world.size, stages=world.size, cuts=tuple(range(2, world.size + 1)), micro_batches=2)
    assert_trains_alike(world, made(frozen_tied), layout, x=x, y=y)


class Normed(nn.Module):
    """Two convolutions with batch normalization in each of two stages."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(4, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 3))

    def forward(self, x: torch.Tensor) -> Any:
        return self.second(self.first(x))


@pytest.mark.ranks(2, 4)
def test_batch_normalization_takes_the_whole_batch_in_each_stage(world: World) -> None:
    x, y = floats(10, 1, 8, 8), numbers(10, below=3)
    assert_trains_alike(world, made(Normed), staged(world.size, stages=2, cuts=(1,)), x=x, y=y)


@pytest.mark.ranks(4)
@pytest.mark.parametrize("cut", [1, 2])
def test_a_replica_of_a_single_sample_is_normalized_in_each_stage(world: World, cut: int) -> None:
    """A single row has no variance, and is no error where another replica has more."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 4))

    assert_trains_alike(world, made(make), staged(4, stages=2, cuts=(cut,)), x=floats(3, 6), y=numbers(3, below=4))


def test_gradients_by_an_input_are_refused_where_there_are_stages(comm: AbstractCommunicator) -> None:
    """As of a discriminator with stages, by what a generator has made; without gradients it is fine."""
    model, x = two_stages(comm), floats(4, 6)
    with pytest.raises(ModelError, match="an input of a network with pipeline stages requires a gradient"):
        model(model.local(x).requires_grad_())
    with torch.no_grad():
        model(model.local(x).requires_grad_())


@pytest.mark.threads_only  # the rank that has the result hears it while it waits for the others, and gives that up
def test_results_of_stages_are_refused_as_inputs_of_others(comm: AbstractCommunicator) -> None:
    model, x, back = two_stages(comm), floats(4, 6), nn.Linear(6, 1).double()
    flat = tatami.tile(back, comm, batch_size=4, sample=x, speeds="equal", reduction="mean", quiet=True)
    result = model(model.local(x))
    flat.local(x)
    with pytest.raises(ModelError, match="an input is the result of a network with pipeline stages"):
        flat(result[:2]).sum().backward()


@pytest.mark.parametrize("micro_batches", [1, 2])
def test_weights_that_are_replaced_after_tiling_are_refused(comm: AbstractCommunicator, micro_batches: int) -> None:
    model, x = two_stages(comm, micro_batches=micro_batches), floats(4, 6)
    for each in [each for each in model.modules() if isinstance(each, nn.Linear)]:
        parametrizations.weight_norm(each)
    with pytest.raises(ModelError, match=r"by pipeline stages, was replaced .* as weight norm"):
        whole_state_dict(model) if micro_batches == 1 else [model(part) for part in model.micro_batches(x)]


def test_what_would_be_of_one_stage_only_is_refused(comm: AbstractCommunicator) -> None:
    model, x = two_stages(comm), floats(4, 6)
    loss = model(model.local(x)).square().mean()
    if comm.rank == 1:
        with pytest.raises(InputError, match=r"gradients of some tensors only .* end at this rank's pipeline stage"):
            torch.autograd.grad(loss, [*model.parameters()], retain_graph=True)
        with pytest.raises(InputError, match=r"backward\(inputs=\.\.\.\)"):
            loss.backward(inputs=[each for each in model.parameters() if each.device.type != "meta"][-1:])
    model(model.local(x)).square().mean().backward()
    own = [parameter for parameter in model.parameters() if parameter.grad is not None]
    with pytest.raises(ModelError, match="some of the parameters was asked for on several pipeline stages"):
        torch.nn.utils.clip_grad_norm_(own[0], 1.0)
    assert torch.nn.utils.clip_grad_norm_(own[comm.rank :], 1.0) > 0, "of a part on one stage only"
    with pytest.raises(ModelError, match="on several pipeline stages, or in several calls"):
        [torch.nn.utils.clip_grad_norm_(layer.parameters(), 1.0) for layer in model.modules() if isinstance(layer, nn.Linear)]
    assert torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) > 0


@pytest.mark.threads_only
def test_a_norm_that_one_stage_asks_for_says_so_when_it_has_waited() -> None:
    has_waited = threading.Event()

    def body(comm: AbstractCommunicator) -> None:
        model, x = two_stages(comm), floats(4, 6)
        model(model.local(x)).square().mean().backward()
        of_first = [each for name, each in model.named_parameters() if name.startswith("module.0") and each.grad is not None]
        if comm.rank == 0:
            with pytest.raises(CommTimeoutError) as caught:
                torch.nn.utils.clip_grad_norm_(of_first, 1.0)
            assert any("the ranks of every stage must ask for it" in note for note in caught.value.__notes__)
            has_waited.set()
        else:
            assert torch.nn.utils.clip_grad_norm_(of_first, 1.0) == 0.0
            assert has_waited.wait(30)

    run_threads(body, size=2, timeout_s=2.0)


def two_stages(comm: AbstractCommunicator, *, micro_batches: int = 1) -> tatami.TiledModel:
    front = made(lambda: nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)))()
    given: dict[str, Any] = {"batch_size": 4, "speeds": "equal", "reduction": "mean", "quiet": True}
    layout = staged(2, stages=2, cuts=(1,), micro_batches=micro_batches)
    return tatami.tile(front, comm, sample=floats(4, 6), layout=layout, **given)


@pytest.mark.ranks(2, 3)
def test_stages_never_wait_for_each_other_whatever_is_in_flight(world: World) -> None:
    """Also where a later stage is to have more micro-batches in flight than the one in front of it lets through."""
    case = CASES["called-twice"]()
    layout = staged(world.size, stages=world.size, cuts=tuple(range(1, world.size)), micro_batches=4)

    make = ModelStage.__init__
    found: list[tuple[int, ...]] = []

    def with_more(self: ModelStage, *given: Any, **named: Any) -> None:
        make(self, *given, **{**named, "in_flight": range(1, world.size + 1)})
        found.append(self.in_flight)

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        return trained(comm, case.make, layout, x=case.x["x"], y=case.y)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ModelStage, "__init__", with_more)
        results = world(body)
    assert set(found) == {(1,) * world.size}, "no more than the stage in front of it"
    (expected,) = run_threads(lambda comm: trained(comm, case.make, None, x=case.x["x"], y=case.y), size=1)
    assert_same(results[0], expected)


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_several_losses_of_one_pass(world: World, micro_batches: int) -> None:
    """As two terms of a loss that each go backward; the deferred passes keep their order."""
    case = CASES["called-twice"]()

    def twice(loss: torch.Tensor) -> None:
        torch.autograd.backward(loss * 0.25, retain_graph=True)
        torch.autograd.backward(loss * 0.75)

    layout = staged(2, stages=2, cuts=(2,), micro_batches=micro_batches)
    assert_trains_alike(world, case.make, layout, x=case.x["x"], y=case.y, backward=twice)


@pytest.mark.ranks(2, 3)
def test_ranks_of_other_stages_with_other_batches_are_found(comm: AbstractCommunicator) -> None:
    case = CASES["called-twice"]()
    layout = staged(comm.size, stages=comm.size, cuts=tuple(range(1, comm.size)))
    with pytest.raises(InputError, match="the ranks were given different batches: rank 1 has other samples than rank 0"):
        trained(comm, case.make, layout, x=case.x["x"] + comm.rank, y=case.y)


class Recomputed(nn.Module):
    """Both stages within one part that is computed again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        result: Any = checkpoint(lambda each: self.last(torch.tanh(self.first(each))), x, use_reentrant=False)
        assert isinstance(result, torch.Tensor)
        return result


@pytest.mark.threads_only  # where ranks are processes, the other one waits for its timeout
def test_a_cut_inside_of_what_is_computed_again_is_refused(comm: AbstractCommunicator) -> None:
    # The last stage finds it first; the other one waits for the gradient then.
    error, told = (RankDiedError, "rank 1") if comm.rank == 0 else (ModelError, "outside of the forward pass, as torch")
    with pytest.raises(error, match=told):
        trained(comm, made(Recomputed), staged(2, stages=2, cuts=(1,)), x=floats(4, 6), y=numbers(4, below=3))


class Checkpointed(nn.Module):
    """Layers that their author has computed again; square weights, which can be taken for their transposes."""

    def __init__(self, *, use_reentrant: bool) -> None:
        super().__init__()
        self.first, self.last, self.use_reentrant = nn.Linear(6, 6), nn.Linear(6, 3), use_reentrant
        layers = (nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Dropout(0.3), nn.Linear(6, 6)) for _ in range(4))
        self.layers = nn.ModuleList(layers)

    def forward(self, x: torch.Tensor) -> Any:
        hidden: Any = self.first(x)
        for layer in self.layers:
            hidden = hidden + checkpoint(
                lambda each, layer=layer: torch.tanh(layer(each)), hidden, use_reentrant=self.use_reentrant
            )
        return self.last(hidden)


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("recompute", [None, True])
def test_what_the_author_has_computed_again_is_what_was_computed(world: World, recompute: bool | None) -> None:
    """Also where the plan has the same layers computed again."""
    x, y = floats(8, 6), numbers(8, below=3)
    layout = staged(world.size, stages=world.size, cuts=(2, 3)[: world.size - 1], micro_batches=4)
    make = made(lambda: Checkpointed(use_reentrant=False))
    assert_trains_alike(world, make, layout, x=x, y=y, settings={"recompute": recompute})


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_reentrant_checkpoints_are_refused_by_name(comm: AbstractCommunicator) -> None:
    """Autograd would not see what stages send from inside of them."""
    make, layout = made(lambda: Checkpointed(use_reentrant=True)), staged(2, stages=2, cuts=(2,))
    with pytest.raises(ModelError, match=r"use_reentrant=True\) does not work with pipeline stages: give use_reentrant=False"):
        trained(comm, make, layout, x=floats(4, 6), y=numbers(4, below=3))


def test_hand_overs_are_rounded_where_a_wire_is_named(world: World) -> None:
    case = CASES["called-twice"]()

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        layout, x = staged(2, stages=2, cuts=(2,)), case.x["x"].float()
        return trained(comm, lambda: case.make().float(), layout, x=x, y=case.y, settings={"wire": "bfloat16"})

    results = world(body)
    (exact,) = run_threads(lambda comm: trained(comm, case.make, None, x=case.x["x"], y=case.y), size=1)
    errors = [float((results[0][name] - tensor).abs().max()) for name, tensor in exact.items()]
    assert 1e-6 < max(errors) < 0.02


@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_networks_of_transformers_are_tiled_in_stages(world: World, kind: str) -> None:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes = {"vocab_size": 33, "use_cache": False}
    if kind == "gpt2":
        config = transformers.GPT2Config(n_positions=12, n_embd=16, n_layer=2, n_head=2, attn_pdrop=0.0, **sizes)
        make = made(lambda: transformers.GPT2LMHeadModel(config))
    else:
        config = transformers.LlamaConfig(
            hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1, **sizes
        )
        make = made(lambda: transformers.LlamaForCausalLM(config))
    x, y = numbers(6, 12, below=33), numbers(6, below=33, seed=7)
    assert_trains_alike(world, make, staged(2, stages=2, cuts=(2,)), x=x, y=y)


@pytest.mark.ranks(2, 3)
def test_the_trainer_goes_on_from_a_checkpoint_with_other_stages(world: World, tmp_path: Path) -> None:
    """In mid-epoch, with targets that are left out."""
    x, y = data()[:]
    kept = TensorDataset(x, torch.where(torch.arange(SAMPLES) % 5 == 2, -100, y))

    def run(comm: AbstractCommunicator, layout: StagedLayout | None, folder: Path, **limits: Any) -> Trainer:
        own = trainer(comm, layout, checkpoint=ModelCheckpoint(dirpath=folder))
        own.fit(kept, batch_size=8, resume=True, **limits)
        return own

    def body(comm: AbstractCommunicator) -> list[dict[str, torch.Tensor]]:
        some = [None, *layouts(comm.size, pieces=4)]
        found = []
        for number, layout in enumerate(some):
            run(comm, layout, tmp_path / f"{number}", iterations=4)
            found.append(whole_state_dict(run(comm, some[number - 1], tmp_path / f"{number}", iterations=7).model))
        return found

    results = world(body)
    (expected,) = run_threads(lambda comm: whole_state_dict(run(comm, None, tmp_path / "one", iterations=7).model), size=1)
    for weights in results[0]:
        assert_same(weights, expected)


def test_a_loss_that_is_not_finite_ends_all_stages(comm: AbstractCommunicator, tmp_path: Path) -> None:
    x, y = data()[:]
    own = trainer(comm, staged(2, stages=2, cuts=(2,), micro_batches=2), rescue_dir=tmp_path)
    own.fit((x, y), batch_size=8, iterations=3)
    with pytest.raises(NotFiniteError, match=r"the loss is nan on rank 1 of 2.*is in .*last-good"):
        own.fit((x * math.nan, y), batch_size=8, iterations=1)
    assert len(list(tmp_path.glob("last-good-*.safetensors"))) == 1


@pytest.mark.ranks(2, 4)
def test_a_run_is_described_recorded_and_shown(world: World, tmp_path_factory: pytest.TempPathFactory) -> None:
    """Rank 0, which records, is not on the last stage, where the loss is."""
    folder = tmp_path_factory.mktemp("seen")

    def body(comm: AbstractCommunicator) -> Any:
        where = comm.bcast_object(folder)
        layout = staged(comm.size, stages=2, cuts=(2,), micro_batches=2)
        with Records(where / "run.jsonl" if comm.rank == 0 else None) as records:
            train = trainer(comm, layout, records=records, record_every=3, report=where / "run.html")
            losses = train.fit(data(), batch_size=8, iterations=6).losses
        described = train.model.describe()
        assert described.stages is not None
        return losses, described.stages.to_dict(), described.text(width=80), train.model.phases.last, where

    (losses, described, text, last, where), *others = world(body)
    assert all(each[:3] == (losses, described, text) for each in others), "the loss and the stages are known everywhere"
    assert last.total_s == pytest.approx(sum(vars(last).values()))
    run = read_run(where / "run.jsonl")
    assert [each["loss"] for each in run.of("train")] == losses[2::3]
    facts = facts_of(run)
    assert facts.stages == described
    assert {(each["rank"], each["stage"], each["in_flight"]) for each in described["ranks"]} >= {("p0", 1, 2), ("p1", 2, 1)}
    samples = next(each["samples"] for each in described["ranks"] if each["rank"] == "p0")
    sent = {(row["source"], row["target"]): row["size_bytes"] for row in facts.links}
    assert sent["p0", "p1"] == sent["p1", "p0"] == samples * 9 * 8
    assert {(row["rank"], row["y1"], row["y2"]) for row in facts.tiles} >= {("p0", 0, 1), ("p1", 1, 2)}
    for rank in {each["rank"] for each in described["ranks"]}:
        spans = [row for row in facts.timeline if row["rank"] == rank]
        assert all(one["ended"] <= other["began"] + 1e-9 for one, other in pairwise(spans))
        assert {row["number"] for row in spans if row["phase"] == "backward"} == {1, 2}
    assert {row["phase"] for row in facts.phases} >= {"forward", "backward", "gradients", "bubble"}
    assert "<h2>Pipeline stages</h2>" in (where / "run.html").read_text(encoding="utf-8")
    shown = CliRunner().invoke(app, ["watch", str(where / "run.jsonl")]).stdout
    for words in ("8 samples x 2 stages in", "hand-over" if "handover" in str(facts.phases) else "bubble", "memory"):
        assert words in shown
    assert "Stage 1 hands 72 B a sample to stage 2, and gets 72 B back." in " ".join(text.split())


def assert_loop_trains_alike(
    world: World,
    network: nn.Module,
    loop: Callable[[Any, Callable[..., Any]], None],
    *,
    x: torch.Tensor,
    micro_batches: int,
    reduction: Any = "mean",
    frozen: int = 0,
) -> None:
    """As many stages as ranks, cut in front of each of the first pieces; so many weights are frozen when it is tiled."""

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor]:
        own = copy.deepcopy(network)
        for weight in list(own.parameters())[:frozen]:
            weight.requires_grad_(False)
        layout = staged(comm.size, stages=comm.size, cuts=tuple(range(1, comm.size)), micro_batches=micro_batches)
        given: Any = {"layout": layout} if comm.size > 1 else {}
        model = tatami.tile(own, comm, batch_size=12, sample=x[:4], reduction=reduction, quiet=True, **given)
        loop(model, model.micro_batches)
        return whole_state_dict(model)

    found = world(body)[0]
    loop(network, lambda *batch: [batch])
    assert_same(found, network.state_dict())


class TwoHeads(nn.Module):
    """Two results, each of which has a branch of its own from the first stage on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.left, self.right = nn.Linear(6, 3), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        first, second = torch.tanh(self.first(x)), torch.tanh(self.second(x))
        return self.left(first), self.right(second)


@pytest.mark.ranks(1, 2, 3)
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_what_has_no_part_in_the_loss_has_no_gradient_in_any_stage(world: World, micro_batches: int) -> None:
    """Adam, momentum and weight decay would go on with a gradient of 0, and leave alone what has none."""
    x, y, network = floats(12, 6), floats(12, 3), made(TwoHeads)()

    def loop(model: Any, parts: Callable[..., Any]) -> None:
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.5)
        for step in range(4):
            optimizer.zero_grad()
            for own_x, own_y in parts(x, y):
                torch.autograd.backward(F.mse_loss(model(own_x)[step > 1], own_y))
            optimizer.step()

    assert_loop_trains_alike(world, network, loop, x=x, micro_batches=micro_batches)


class Annealed(nn.Module):
    """Has a number that each pass in training changes, and one that no result depends on."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.temperature, self.num_passes, self.seen = 1.0, 0, torch.zeros(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.temperature *= 0.9
            self.num_passes += 1
        self.seen = self.first(x).detach()
        out: torch.Tensor = self.last(self.first(x).tanh()) / self.temperature
        return out


@pytest.mark.parametrize("sampled", [True, False])
def test_a_number_that_a_pass_changes_is_changed_once_for_a_batch(comm: AbstractCommunicator, sampled: bool) -> None:
    x, y, network = floats(12, 6), floats(12, 3), Annealed().double()
    given: Any = {"batch_size": 12, "reduction": "mean", "quiet": True, "speeds": "equal"}
    given |= {"sample": x[:4]} if sampled else {}

    def step(model: Any) -> None:
        for own_x, own_y in model.micro_batches(x, y):
            F.mse_loss(model(own_x), own_y).backward()  # type: ignore[no-untyped-call]

    with pytest.raises(PlanError, match=r"the forward pass changes (num_passes, )?temperature"):
        step(tatami.tile(copy.deepcopy(network), comm, **given, micro_batches=2))
    model: Any = tatami.tile(copy.deepcopy(network), comm, **given)
    step(model)
    assert (model.module.temperature, model.module.num_passes) == (0.9, 1)


def test_what_a_pass_changes_is_changed_once_for_a_batch(comm: AbstractCommunicator) -> None:
    x, y, network = floats(12, 6), floats(12, 3), nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3)).double()
    parametrizations.spectral_norm(network[2])
    given: Any = {"batch_size": 12, "reduction": "mean", "quiet": True, "speeds": "equal"}
    told = r"the forward pass changes 2\.parametrizations.* once for each micro-batch"
    with pytest.raises(PlanError, match=told):
        tatami.tile(copy.deepcopy(network), comm, **given, sample=x[:4], micro_batches=2)
    model = tatami.tile(copy.deepcopy(network), comm, **given, sample=x[:4], stages=2)
    own_x, own_y = model.local(x, y)
    loss = F.mse_loss(model(own_x), own_y)
    torch.autograd.backward(loss)
    assert model.global_loss([loss]) == model.global_loss(loss) > 0
    unseen = tatami.tile(copy.deepcopy(network), comm, **given, micro_batches=2)  # found as it runs
    with pytest.raises(PlanError, match=told):
        _ = [F.mse_loss(unseen(x), y).backward() for x, y in unseen.micro_batches(x, y)]  # type: ignore[no-untyped-call]
    state = whole_state_dict(model)
    network(x)
    assert all(torch.equal(state[name], own) for name, own in network.named_buffers() if comm.rank == 0)


@pytest.mark.parametrize("micro_batches", [1, 2])
@pytest.mark.parametrize("frozen_at", [(0,), (2, 3), (0, 1, 4)])
def test_stages_are_frozen_and_trained_again(world: World, frozen_at: tuple[int, ...], micro_batches: int) -> None:
    """All weights of the stages in front: no gradient goes back to them in these steps, and that of the next is its own."""
    pairs = list(pairwise((6, 7, 7, 5, 3)))
    x, y = floats(12, 6), floats(12, 3)
    network = made(lambda: nn.Sequential(*[each for pair in pairs for each in (nn.Linear(*pair), nn.Tanh())][:-1]))()

    def loop(model: Any, parts: Callable[..., Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
        for step in range(6):
            for weight in list(model.parameters())[:-2]:
                weight.requires_grad_(step not in frozen_at)
            optimizer.zero_grad()
            for own_x, own_y in parts(x, y):
                torch.autograd.backward(F.mse_loss(model(own_x), own_y))
            optimizer.step()

    frozen = len(list(network.parameters())) - 2 if 0 in frozen_at else 0
    assert_loop_trains_alike(world, network, loop, x=x, micro_batches=micro_batches, frozen=frozen)


class Deep(nn.Module):
    """The results of the last layer and of the first one."""

    def __init__(self, gives: Callable[[torch.Tensor, torch.Tensor], Any] = lambda *given: given) -> None:
        super().__init__()
        self.layers, self.gives = nn.ModuleList(nn.Linear(3, 3) for _ in range(3)), gives

    def forward(self, x: torch.Tensor) -> Any:
        found = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            found.append(x)
        return self.gives(found[-1], found[0])


def by_mask(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    chosen = y[:, 0] > 0.5
    return F.mse_loss(x[chosen], y[chosen], reduction="sum")


@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize(("of", "reduction"), [(F.mse_loss, "mean"), (by_mask, "sum")])
def test_a_loss_reads_results_of_several_stages(world: World, of: Callable[..., torch.Tensor], reduction: Any) -> None:
    """The stage in the middle has received one of them, and computes neither."""
    x, y, network = floats(12, 3), floats(12, 3), made(Deep)()

    def loop(model: Any, parts: Callable[..., Any]) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            for own_x, own_y in parts(x, y):
                last, first = model(own_x)
                torch.autograd.backward(of(last, own_y) + 2 * of(first, own_y))
            optimizer.step()

    assert_loop_trains_alike(world, network, loop, x=x, micro_batches=2, reduction=reduction)


@dataclass
class Given:
    last: torch.Tensor
    first: torch.Tensor


@pytest.mark.ranks(2)
def test_results_in_which_no_tensor_is_found_are_refused(comm: AbstractCommunicator) -> None:
    x, layout = floats(12, 3), staged(2, stages=2, cuts=(1,))
    with pytest.raises(ModelError, match="returns a Given, in which results of other pipeline stages are not found"):
        tatami.tile(Deep(Given).double(), comm, batch_size=12, sample=x, reduction="mean", quiet=True, layout=layout)


@pytest.mark.ranks(2)
@pytest.mark.parametrize("way", ["rate", "steps"])
def test_a_stage_that_steps_otherwise_is_found(comm: AbstractCommunicator, way: str) -> None:
    """No other rank has its weights."""
    x, y, layout = floats(12, 3), floats(12, 3), staged(2, stages=2, cuts=(1,))
    model = tatami.tile(Deep().double(), comm, batch_size=12, sample=x, reduction="mean", quiet=True, layout=layout)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1 if way == "steps" else 0.1 + comm.rank)
    told = "SGD has made 2 steps on rank 1" if way == "steps" else "lr of SGD is 1.1 on rank 1"

    def train() -> None:
        for step in range(8):
            optimizer.zero_grad()
            inputs, targets = model.local(x, y)
            torch.autograd.backward(F.mse_loss(model(inputs)[0], targets))
            if way == "rate" or comm.rank == 0 or step < 2:
                optimizer.step()

    with pytest.raises(InputError, match=told):
        train()


def test_a_rank_without_a_stage_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Dropout(0.1), nn.Linear(64, 10))
    given: dict[str, Any] = {"sample": torch.zeros(4, 64), "speeds": [1.0, 0.02, 0.9], "reduction": "mean", "stages": 2}
    run_threads(lambda comm: tatami.tile(network, comm, batch_size=256, **given), size=3)
    said = capsys.readouterr().out
    assert "2 pipeline stages of 1 replica lie as [p0 > p2]" in said
    assert "micro-batches; left out: p1" in said
