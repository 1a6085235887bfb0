"""Networks that people train, divided into pipeline stages: weights, buffers and evaluation are those of one machine."""

import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

sys.path.insert(0, str(Path(__file__).parent.parent / "tiled"))
import stages_rig
from equal_runs import logits_of, loss_of
from networks import CASES, GPT, VOCABULARY, Batch, Case, Residual, build, reals
from stages_rig import AdamW, allowed_cuts

import tatami
from drawing import one_at_a_time
from tatami.comm import run_threads
from tatami.comm.base import AbstractCommunicator
from tatami.errors import ModelError
from tatami.partition.pieces import record_network
from tatami.partition.tracing.sample import Sample
from tatami.stages.program import ForwardProgram, Staging, obstacle_of
from tatami.stages.recording import record
from tatami.testing.worlds import World
from tatami.tiling import Layout, Replica, StagedLayout
from tatami.tiling.staged_price import recomputable, stage_workload
from tatami.train import TiledModel, find_blocks, whole_state_dict, workload_of
from tiled_rig import assert_close, staged

pytestmark = pytest.mark.ranks(2)

STEPS, SAMPLES = 5, 7
# The gradient of a key's bias is 0 but for rounding, which Adam with its own eps would blow up to a step.


# -- more networks ----------------------------------------------------------------------------------------------------------


def resnet18() -> nn.Module:
    """ResNet-18 with 2 to 8 channels in place of 64 to 512."""
    widths = ((2, 2, 1), (2, 2, 1), (2, 4, 2), (4, 4, 1), (4, 6, 2), (6, 6, 1), (6, 8, 2), (8, 8, 1))
    stem = (nn.Conv2d(1, 2, 3, padding=1, bias=False), nn.BatchNorm2d(2), nn.ReLU())
    blocks = (Residual(inputs, outputs, stride) for inputs, outputs, stride in widths)
    return nn.Sequential(*stem, *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 3))


class DenseBlock(nn.Module):
    """DenseNet's: every layer reads the results of all before it."""

    def __init__(self, *, batch_norm: bool) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, 4, 3, padding=1)
        norms = (nn.BatchNorm2d(4 + 2 * n) if batch_norm else nn.GroupNorm(2, 4 + 2 * n) for n in range(4))
        self.layers = nn.ModuleList(
            nn.Sequential(norm, nn.ReLU(), nn.Conv2d(4 + 2 * n, 2, 3, padding=1)) for n, norm in enumerate(norms)
        )
        self.head = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor) -> Any:
        features = [self.stem(x)]
        for layer in self.layers:
            features.append(layer(torch.cat(features, 1)))
        return self.head(torch.cat(features, 1).mean((2, 3)))


class ByFunctions(nn.Module):
    """Weights outside of modules, read by functions of the input, and an activation of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(5, 3))
        self.shift, self.bend, self.middle = nn.Parameter(torch.randn(5)), nn.Tanh(), nn.Linear(5, 5)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(F.linear(x, self.first) + self.bend(self.shift))
        return self.middle(hidden) @ self.last


class Looking(nn.Module):
    """A module that looks at values, and counts what it was asked for, between others."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            hidden = self.layer(x)
            scale = 2.0 if hidden.sum().item() > 0 else 0.5
            rows = (hidden[:, 0] > 0).nonzero().flatten()
            hidden = hidden.index_add(0, rows, hidden[rows] * scale)
            return hidden, hidden[hidden > 0].sum()

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), self.Inner(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden, _ = self.inner(torch.tanh(self.first(x)))
        return self.last(torch.tanh(hidden))


class Scaled(torch.autograd.Function):
    """A function of values and a weight, of which autograd alone would not know the gradient that it has here."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return torch.exp(-x.square()) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, scale = ctx.saved_tensors
        return x * scale * grad, (torch.exp(-x.square()) * grad).sum(0)


class Rounded(torch.autograd.Function):
    """The gradient goes straight through, turned round."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return torch.round(x * 8) / 8

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # noqa: ARG004
        return grad * -0.5


rounded = Rounded.apply
"""Bound before any network is recorded, as torch's documentation has it."""


class OwnGradients(nn.Module):
    """Functions with gradients of their own, of values, of values and a weight, and of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.scale = nn.Parameter(torch.rand(5))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = rounded(torch.tanh(self.first(x)))  # type: ignore[no-untyped-call]
        hidden = Scaled.apply(self.middle(hidden), self.scale) + hidden  # type: ignore[no-untyped-call]
        return F.linear(torch.tanh(hidden), Rounded.apply(self.last.weight), self.last.bias)  # type: ignore[no-untyped-call]


class OwnBuffers(nn.Module):
    """Buffers that only some stages see change: of spectral norms, a running mean of a weight, and counters."""

    mean: torch.Tensor

    class Counting(nn.Module):
        steps: torch.Tensor
        replaced: torch.Tensor

        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(6, 6)
            self.register_buffer("steps", torch.zeros(1))
            self.register_buffer("replaced", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> Any:
            if self.training:
                self.steps += 1
                self.replaced = self.replaced + 2
            return self.layer(x) / (1 + self.steps)

    def __init__(self) -> None:
        super().__init__()
        self.first: nn.Module = nn.utils.spectral_norm(nn.Linear(6, 6))
        self.last: nn.Module = nn.utils.spectral_norm(nn.Linear(6, 3))
        self.middle = self.Counting()
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.middle(torch.tanh(self.first(x)))
        if self.training:
            self.mean.mul_(0.9)
            self.mean.add_(self.middle.layer.bias.detach() * 0.1)
        return self.last(torch.tanh(hidden) - self.mean)


class OldNames(nn.Module):
    """Goes on with the old name of what it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 5), nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        changed = torch.tanh(hidden) * 2
        changed.mul_(0.5)
        changed.masked_fill_(hidden < 0, 0.1)
        return self.last(self.middle(changed) + hidden)


MORE: dict[str, Case] = {
    "own-gradients": Case(build=OwnGradients, draw=reals(6), blocks=()),
    "own-buffers": Case(build=OwnBuffers, draw=reals(6), blocks=()),
    "old-names": Case(build=OldNames, draw=reals(6), blocks=()),
    "resnet-18": Case(build=resnet18, draw=reals(1, 8, 8), blocks=()),
    "densenet": Case(build=lambda: DenseBlock(batch_norm=True), draw=reals(1, 6, 6), blocks=()),
    "densenet-group-norm": Case(build=lambda: DenseBlock(batch_norm=False), draw=reals(1, 6, 6), blocks=()),
    "by-functions": Case(build=ByFunctions, draw=reals(6), blocks=()),
    "looking": Case(build=Looking, draw=reals(6), blocks=()),
}


def huggingface(name: str) -> Case:
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    small = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 10}
    undropped = {"hidden_dropout_prob": 0.1, "attention_probs_dropout_prob": 0.0}
    words: dict[str, Any] = {"vocab_size": VOCABULARY, "use_cache": False}

    def tokens(samples: int, generator: torch.Generator) -> Batch:
        text = torch.randint(1, VOCABULARY, (samples, 6), generator=generator)
        return {"input_ids": text, "decoder_input_ids": text.flip(1)} if name == "t5" else {"input_ids": text}

    def make() -> Any:
        if name == "gpt2":
            ends = {"bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0}
            return transformers.GPT2LMHeadModel(transformers.GPT2Config(**words, **ends, n_embd=12, n_layer=2, n_head=3))
        if name == "llama":
            return transformers.LlamaForCausalLM(transformers.LlamaConfig(**words, **small, num_key_value_heads=3))
        if name == "mixtral":
            own = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": "eager"}
            return transformers.MixtralForCausalLM(transformers.MixtralConfig(**words, **small, **own, num_key_value_heads=3))
        if name == "bert":
            return transformers.BertForSequenceClassification(transformers.BertConfig(**words, **small, **undropped))
        if name == "t5":
            sizes = {"d_model": 12, "d_kv": 4, "d_ff": 10, "num_layers": 2, "num_heads": 3, "dropout_rate": 0.0}
            return transformers.T5ForConditionalGeneration(
                transformers.T5Config(**words, **sizes, decoder_start_token_id=0, pad_token_id=0)
            )
        sides = {"image_size": 8, "patch_size": 4, "num_channels": 1}
        return transformers.ViTForImageClassification(transformers.ViTConfig(**small, **undropped, **sides, num_labels=3))

    return Case(build=make, draw=reals(1, 8, 8) if name == "vit" else tokens, blocks=())


# -- training them ----------------------------------------------------------------------------------------------------------


def called(model: Any, batch: Batch, take: Callable[..., Any] | None = None) -> torch.Tensor:
    """The logits over a batch, or over this rank's samples of it."""
    values = tuple(batch.values()) if isinstance(batch, dict) else batch
    if take is not None:
        taken = take(*values)
        values = taken if isinstance(taken, tuple) else (taken,)
    return logits_of(model(**dict(zip(batch, values, strict=True))) if isinstance(batch, dict) else model(*values))


def train(model: nn.Module, batches: list[Batch]) -> None:
    """All forward passes first, and one forward and one backward pass in turn, by turns."""
    optimizer = AdamW([each for each in model.parameters() if each.requires_grad])
    for step, batch in enumerate(batches):
        optimizer.zero_grad()
        if isinstance(model, TiledModel) and step % 2:
            values = tuple(batch.values()) if isinstance(batch, dict) else batch
            for part in model.micro_batches(*values):
                torch.autograd.backward(loss_of(called(model, batch, lambda *_, part=part: part)))
        else:
            torch.autograd.backward(loss_of(called(model, batch, model.local if isinstance(model, TiledModel) else None)))
        optimizer.step()


def check(world: World, case: Case, *, stages: int | None = None, micro_batches: int = 3, samples: int = SAMPLES) -> None:
    """Trained, evaluated and loaded again as on one machine; with batch normalization in one micro-batch."""
    network, batch = build(case), case.draw(samples, torch.Generator().manual_seed(5))
    pieces = len(record_network(network, Sample.of(batch)).pieces)
    number = min(stages or world.size, pieces)
    assert number > 1
    layout = staged(
        world.size, stages=number, cuts=even(pieces, number), micro_batches=1 if normalizes(network) else micro_batches
    )
    check_layout(world, case, layout, samples=samples)


def normalizes(network: nn.Module) -> bool:
    """Whether all of its samples must be in one micro-batch."""
    return any(isinstance(each, (nn.modules.batchnorm._BatchNorm, OwnBuffers)) for each in network.modules())


def even(pieces: int, stages: int) -> tuple[int, ...]:
    return tuple(max(1, round(part * pieces / stages)) for part in range(1, stages))


def check_layout(
    world: Callable[[Callable[[AbstractCommunicator], Any]], list[Any]], case: Case, layout: StagedLayout, *, samples: int
) -> None:
    generator = torch.Generator().manual_seed(5)
    batches = [case.draw(samples, generator) for _ in range(STEPS)]
    network, plain = build(case), build(case)
    expected = trained_alone(plain, batches)

    def body(comm: AbstractCommunicator) -> dict[str, torch.Tensor] | None:
        given: dict[str, Any] = {"batch_size": samples, "speeds": "equal", "reduction": "mean", "quiet": True}
        model = tatami.tile(network, comm, sample=batches[0], layout=layout, **given)
        train(model, batches)
        weights = whole_state_dict(model)
        model.eval()
        with torch.no_grad():
            output = called(model, batches[0], model.local)
        if model.has_results:
            here = model.local_span(samples)
            assert_close({"output": output}, {"output": expected[here.start : here.stop]}, what=f"evaluation on {layout}")
        model.close()
        return weights

    weights = world(body)[0]
    assert weights is not None
    assert_close(weights, plain.state_dict(), what=f"weights on {layout}")
    fresh = build(case)
    fresh.load_state_dict(weights)
    with torch.no_grad():
        assert_close({"output": called(fresh.eval(), batches[0])}, {"output": expected}, what="loaded again")


@one_at_a_time
def trained_alone(plain: nn.Module, batches: list[Batch]) -> torch.Tensor:
    """What the network gives in evaluation when it has been trained; what tiled models draw begins with the same state."""
    torch.manual_seed(9)
    train(plain, batches)
    with torch.no_grad():
        output = called(plain.eval(), batches[0])
    torch.manual_seed(9)
    return output


LOOKED_AT = sorted({*CASES, *MORE} - {"gpt-dropout"})


@pytest.mark.threads_only  # each process would follow all of them again
@pytest.mark.parametrize("name", LOOKED_AT)
def test_two_stages(world: World, name: str) -> None:
    check(world, {**CASES, **MORE}[name], micro_batches=1 + len(name) % 3)


@pytest.mark.threads_only
@pytest.mark.ranks(3)
@pytest.mark.parametrize(
    "name", ["gpt-dropout-by-hand", "experts", "fused", "looking", "resnet-18", "densenet", "own-gradients"]
)
def test_three_stages(world: World, name: str) -> None:
    check(world, {**CASES, **MORE}[name])


@pytest.mark.ranks(4)
@pytest.mark.parametrize("name", ["gpt-dropout-by-hand", "experts-in-one-tensor", "resnet", "looking", "own-gradients"])
def test_two_replicas_of_two_stages(world: World, name: str) -> None:
    check(world, {**CASES, **MORE}[name], stages=2)


@pytest.mark.threads_only
@pytest.mark.parametrize("name", ["own-gradients", "own-buffers", "old-names"])
def test_two_stages_cut_anywhere(world: World, name: str) -> None:
    case = MORE[name]
    pieces = len(record_network(build(case), Sample.of(case.draw(SAMPLES, torch.Generator().manual_seed(5)))).pieces)
    assert pieces >= 3
    parts = 1 if normalizes(build(case)) else 2
    for cut in range(1, pieces):
        check_layout(world, case, staged(2, stages=2, cuts=(cut,), micro_batches=parts), samples=SAMPLES)


@pytest.mark.threads_only
@pytest.mark.parametrize("name", ["gpt2", "llama", "mixtral", "bert", "t5", "vit"])
def test_two_stages_of_huggingface(world: World, name: str) -> None:
    """Those that round to single precision inside do so alike where micro-batches weigh a power of two."""
    check(world, huggingface(name), samples=8, micro_batches=4)


def _rig(name: str) -> Case:
    """A network of the rig, which has its inputs."""
    known = stages_rig.CASES[name]()
    kind = reals(*known.x["x"].shape[1:]) if known.x["x"].is_floating_point() else None
    shape = known.x["x"].shape[1:]

    def draw(samples: int, generator: torch.Generator) -> Batch:
        return kind(samples, generator) if kind else (torch.randint(20, (samples, *shape), generator=generator),)

    return Case(build=known.make, draw=draw, blocks=())


ZOO: dict[str, Callable[[], Case]] = {
    "gpt": lambda: replace(CASES["gpt"], build=lambda: GPT(dropout=0.2, layers=3, flash=False, tied=False)),
    "gpt-tied": lambda: replace(CASES["gpt"], build=lambda: GPT(dropout=0.2, layers=3, flash=False)),
    **{f"hf-{name}": partial(huggingface, name) for name in ("gpt2", "llama", "bert", "t5", "vit", "mixtral")},
    **{name: partial(MORE.__getitem__, name) for name in ("resnet-18", "densenet", "densenet-group-norm")},
    **{name: partial(_rig, name) for name in ("u-net", "encoder-decoder", "lstm")},
    **{name: partial(CASES.__getitem__, name) for name in ("experts", "lora")},
}
KINDS = {"two": (2, 1, 1), "three": (3, 1, 2), "four": (4, 1, 4), "replicas": (2, 3, 2), "mixed": (2, 1, 2)}
"""Stages, replicas and micro-batches: seven samples are uneven parts."""


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ZOO)
def test_the_zoo_trains_as_on_one_machine(name: str, kind: str) -> None:
    """Mixed: two ranks share the units of each stage that has any, and recompute it where it has whole layers. Of several
    replicas the first stage that has them recomputes.

    Those of Hugging Face that round to single precision inside do so alike where micro-batches weigh a power of two.
    """
    case, (stages, replicas, parts) = ZOO[name](), KINDS[kind]
    is_rounded = name.startswith("hf-")
    samples, replicas = (8, min(replicas, 2)) if is_rounded else (SAMPLES, replicas)
    network, sample = build(case), case.draw(samples, torch.Generator().manual_seed(5))
    found, recorded = find_blocks(network, sample=sample), record_network(network, Sample.of(sample))
    workload = workload_of(network, found, samples=samples)
    workload = replace(workload, pieces=recorded.pieces_with(found, workload.blocks))
    stages, parts = min(stages, len(recorded.pieces)), 1 if normalizes(network) else parts
    assert stages > 1
    cuts = even(len(recorded.pieces), stages)
    widths = [1.0 if is_rounded else 2.0 + replica for replica in range(replicas)]
    laid, names = [], (f"p{rank}" for rank in count())
    for first, stop in pairwise((0, *cuts, len(recorded.pieces))):
        is_wide = kind == "mixed" and stage_workload(workload, workload.pieces[first:stop], is_wide=True).blocks
        heights = (0.6, 0.4) if is_wide else (1.0,)
        own = (
            Replica(
                width=width / sum(widths), processors=tuple(islice(names, len(heights))), heights=heights, micro_batches=parts
            )
            for width in widths
        )
        laid.append(Layout(replicas=tuple(own)))
    layout = StagedLayout(stages=tuple(laid), cuts=cuts)
    again = {"mixed": recomputable(layout, workload), "replicas": recomputable(layout, workload)[:1]}
    layout = layout.recomputing(again.get(kind, ()))
    check_layout(partial(run_threads, size=len(layout.processors)), case, layout, samples=samples)


class Shared(nn.Module):
    """One normalization in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> Any:
        return self.norm(self.last(self.norm(self.first(x))))


@pytest.mark.ranks(1)
def test_buffers_that_two_stages_would_change_are_not_cut_apart() -> None:
    program = record(Shared().double(), (torch.rand(5, 6, dtype=torch.float64),), {})
    assert [operation.name for operation in program.operations] == ["first", "norm", "last", "norm"]
    found = [obstacle_of(program, cut) for cut in (1, 2, 3)]
    assert found[0] is None
    assert all("norm changes the buffer norm.num_batches_tracked, which another stage reads" in str(each) for each in found[1:])


class Changing(nn.Module):
    """Other operations in evaluation than in training, on both sides of a cut."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        if self.training:
            hidden = hidden * 1.5 + 0.1
        hidden = torch.tanh(self.middle(hidden))
        if not self.training:
            hidden = torch.sigmoid(hidden).clamp(max=0.6)
        return self.last(hidden)


class Crossing(nn.Module):
    """A tensor, and what dropout makes of it, are both read by the next stage: in evaluation they are the same."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.dropout = nn.Linear(6, 6), nn.Dropout(0.3)
        self.a, self.b, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.first(x)
        dropped = self.dropout(hidden)
        return self.last(torch.tanh(self.a(dropped)) + torch.tanh(self.b(hidden)))


class Crossed(nn.Module):
    """In evaluation the layers come in the opposite order, which no stages can follow."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (self.first, self.last) if self.training else (self.last, self.first):
            x = torch.tanh(layer(x))
        return x


@pytest.mark.threads_only
@pytest.mark.ranks(2, 3)
@pytest.mark.parametrize("kind", [Changing, Crossing])
def test_evaluation_may_do_other_operations(world: World, kind: type[nn.Module]) -> None:
    check(world, Case(build=kind, draw=reals(6), blocks=()))


@pytest.mark.parametrize("kind", [Changing, Crossing])
def test_evaluation_is_cut_where_the_weights_are(kind: type[nn.Module]) -> None:
    """Wherever training is; in evaluation mode and with gradients."""
    x = torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6)
    network = kind().double()
    recorded = record_network(network, Sample.of(x))
    assert isinstance(recorded.evaluated, ForwardProgram)
    for cut in allowed_cuts(recorded.program):
        staging = Staging(program=recorded.program, cuts=(cut,))
        found = recorded.evaluation(staging)
        assert isinstance(found, Staging)
        assert [set(each) for each in found.parameters] == [set(each) for each in staging.parameters]


@pytest.mark.threads_only
@pytest.mark.parametrize("in_training", [False, True])
def test_dropout_that_is_switched_off_later_hands_both_over(world: World, in_training: bool) -> None:
    case = Case(build=Crossing, draw=reals(6), blocks=())
    (x,) = case.draw(SAMPLES, torch.Generator().manual_seed(5))
    network, plain = build(case), build(case)

    def body(comm: AbstractCommunicator) -> None:
        layout = staged(2, stages=2, cuts=(1,), micro_batches=2)
        given: dict[str, Any] = {"speeds": "equal", "reduction": "mean", "quiet": True, "layout": layout}
        model = tatami.tile(network, comm, batch_size=SAMPLES, sample=x, **given).train(in_training)
        for layer in model.modules():
            if isinstance(layer, nn.Dropout):
                layer.p = 0.0
        torch.autograd.backward(loss_of(model(model.local(x))))
        torch.autograd.backward(loss_of(plain.eval()(x))) if comm.rank == 0 else None
        comm.barrier()
        expected = {name: each.grad for name, each in plain.named_parameters()}
        own = {name.removeprefix("module."): each.grad for name, each in model.named_parameters() if each.grad is not None}
        assert own
        assert_close(own, {name: expected[name] for name in own}, what="gradients")

    world(body)


@pytest.mark.threads_only
def test_evaluation_that_no_stages_can_follow_is_refused_by_name(comm: AbstractCommunicator) -> None:
    network = Crossed().double()
    x = torch.ones(SAMPLES, 6, dtype=torch.float64)
    layout = staged(2, stages=2, cuts=(1,))
    model = tatami.tile(network, comm, batch_size=SAMPLES, sample=x, layout=layout, speeds="equal", quiet=True)
    with torch.no_grad(), pytest.raises(ModelError, match=r"no stages: it reads weights of later stages before"):
        model.eval()(model.local(x))


class Draws(nn.Module):
    """Draws random numbers by a function, outside of a module, or inside."""

    class Inner(nn.Module):
        def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor]) -> None:
            super().__init__()
            self.draw, self.layer = draw, nn.Linear(6, 6)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.draw(self.layer(x))

    def __init__(self, draw: Callable[[torch.Tensor], torch.Tensor], *, inside: bool) -> None:
        super().__init__()
        self.draw = None if inside else draw
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 3)
        self.middle = self.Inner(draw if inside else torch.tanh)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = torch.tanh(self.first(x))
        hidden = hidden if self.draw is None else self.draw(hidden)
        return self.last(torch.tanh(self.middle(hidden)))


DRAWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4, training=True),
    "bernoulli": lambda x: x * torch.bernoulli(torch.full_like(x, 0.6)),
    "rand": lambda x: x * torch.rand(x.shape[0], 1, dtype=x.dtype),
    "randn-like": lambda x: x + torch.randn_like(x),
    "once": lambda x: x * torch.rand((), dtype=x.dtype),
    "uniform": lambda x: x * torch.empty_like(x).uniform_(),
    "permutation": lambda x: x[:, torch.randperm(6)],
    "rrelu": lambda x: F.rrelu(x, training=True),
}


@pytest.mark.threads_only
@pytest.mark.parametrize("inside", [False, True])
@pytest.mark.parametrize("name", DRAWS)
def test_functions_that_draw_are_refused_by_name(comm: AbstractCommunicator, name: str, inside: bool) -> None:
    layer = r"layer middle \(Inner\)" if inside else r"layer \(the model itself\) \(Draws\)"
    network = Draws(DRAWS[name], inside=inside).double()
    nn.init.constant_(network.first.bias, -9.0)  # rrelu draws for negative numbers alone
    x = torch.ones(SAMPLES, 6, dtype=torch.float64)
    with pytest.raises(ModelError, match=rf"{layer} draws random numbers in training"):
        tatami.tile(network, comm, batch_size=SAMPLES, sample=x, layout=staged(2, stages=2, cuts=(1,)), speeds="equal")


class Looked(nn.Module):
    """A module that looks at values, and returns what other stages cannot know, or draws what they have to draw."""

    class Inner(nn.Module):
        def __init__(self, kind: str) -> None:
            super().__init__()
            self.kind, self.layer, self.dropout = kind, nn.Linear(6, 6), nn.Dropout(0.5)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden: torch.Tensor = self.layer(x)
            if self.kind == "draws":
                hidden = self.dropout(hidden)
            rows = (hidden[:, 0] > hidden[:, 0].mean()).nonzero().flatten()
            return hidden[rows] if self.kind == "rows" else hidden.index_add(0, rows, hidden[rows])

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(6, 6), self.Inner(kind), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> Any:
        return self.last(self.inner(torch.tanh(self.first(x))))


@pytest.mark.parametrize("kind", ["draws", "rows"])
def test_looks_whose_result_other_stages_cannot_know_are_refused_with_their_line(kind: str) -> None:
    network = Looked(kind).double()
    program = record(network, (torch.linspace(-1, 1, 30, dtype=torch.float64).view(5, 6),), {})
    with pytest.raises(ModelError, match=r"test_stages_zoo\.py:\d+ looks at a value that (nonzero|item) computes"):
        Staging(program=program, cuts=(2,))
