"""Stages compute the loss and the gradients of the plain network, to the last bits, wherever it is cut."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from stages_rig import (
    CASES,
    Case,
    allowed_cuts,
    class_loss,
    even_cuts,
    floats,
    made,
    numbers,
    plain,
    played,
    program_of,
    tokens_loss,
)
from torch import nn

from tatami.errors import ModelError
from tatami.partition.pieces import record_network
from tatami.partition.tracing.sample import Sample
from tatami.stages.channel import AbstractChannel, Parcel
from tatami.stages.handing_over import ReceivedParcel
from tatami.stages.program import ForwardProgram, Reach, Staging
from tatami.stages.recording import record
from tatami.stages.running import StageRunner
from tatami.stages.stand_in import StandIn, stand_in_of


def _compare(case: Case, program: ForwardProgram, cuts: tuple[int, ...], *, micro_batches: int = 1) -> list[nn.Module]:
    loss, grads = plain(case)
    found_loss, found, networks = played(case, Staging(program=program, cuts=cuts), micro_batches=micro_batches)
    torch.testing.assert_close(found_loss, loss, rtol=1e-13, atol=1e-14)
    assert found.keys() == grads.keys()
    for name, grad in grads.items():
        own = found[name]
        assert (own is None) == (grad is None), name
        if grad is not None and own is not None:
            torch.testing.assert_close(own, grad, rtol=1e-11, atol=1e-14)
    return networks


@pytest.mark.parametrize("name", CASES)
def test_a_network_can_be_cut_anywhere(name: str) -> None:
    """In front of every operation, or of every third one of many."""
    case = CASES[name]()
    program = program_of(case)
    allowed = allowed_cuts(program)
    # In front of an addition in place, and between it and the tensor it changes.
    assert len(program.operations) - 1 - len(allowed) == (2 if name == "called-twice" else 0)
    for cut in allowed[:: 1 if len(allowed) < 30 else 3]:
        _compare(case, program, (cut,))


@pytest.mark.parametrize(("stages", "micro_batches"), [(2, 2), (3, 1), (4, 4)])
@pytest.mark.parametrize("name", CASES)
def test_several_stages_and_micro_batches(name: str, stages: int, micro_batches: int) -> None:
    """Six samples in four micro-batches are 2, 2, 1 and 1."""
    case = CASES[name]()
    program = program_of(case)
    cuts = even_cuts(program, stages)
    networks = _compare(case, program, cuts, micro_batches=micro_batches)
    sizes = [sum(p.numel() for p in net.parameters() if not isinstance(p, StandIn)) for net in networks]
    whole = sum(p.numel() for p in case.make().parameters())
    assert max(sizes) < whole
    assert sum(sizes) >= whole


def _huggingface(name: str) -> Case:
    transformers = pytest.importorskip("transformers")
    ids, labels = numbers(4, 10, below=40), numbers(4, 10, below=40, seed=8)
    config: dict[str, object] = {"vocab_size": 40}
    small = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 32}
    undropped = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    if name == "gpt2":
        drops = {"attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0}
        ends = {"bos_token_id": 0, "eos_token_id": 0}
        own = transformers.GPT2Config(**config, **drops, **ends, n_positions=16, n_embd=16, n_layer=3, n_head=2)
        return Case(make=made(lambda: transformers.GPT2LMHeadModel(own)), x={"input_ids": ids}, y=labels, loss=tokens_loss)
    if name == "llama":
        own = transformers.LlamaConfig(**config, **small, num_key_value_heads=2, max_position_embeddings=32)
        return Case(make=made(lambda: transformers.LlamaForCausalLM(own)), x={"input_ids": ids}, y=labels, loss=tokens_loss)
    if name == "bert":
        own = transformers.BertConfig(**config, **small, **undropped)
        x = {"input_ids": ids, "attention_mask": torch.ones(4, 10, dtype=torch.long)}
        return Case(
            make=made(lambda: transformers.BertForSequenceClassification(own)), x=x, y=numbers(4, below=2), loss=class_loss
        )
    if name == "t5":
        sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_layers": 2, "num_heads": 2}
        own = transformers.T5Config(**config, **sizes, dropout_rate=0.0, decoder_start_token_id=0)
        x = {"input_ids": ids, "decoder_input_ids": numbers(4, 10, below=40, seed=9)}
        return Case(make=made(lambda: transformers.T5ForConditionalGeneration(own)), x=x, y=labels, loss=tokens_loss)
    own = transformers.ViTConfig(**small, **undropped, image_size=16, patch_size=4, num_labels=3)
    return Case(
        make=made(lambda: transformers.ViTForImageClassification(own)),
        x={"pixel_values": floats(4, 3, 16, 16)},
        y=numbers(4, below=3),
        loss=class_loss,
    )


@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5", "vit"])
def test_networks_of_transformers(name: str) -> None:
    case = _huggingface(name)
    program = program_of(case)
    crossing = program.crossing_bytes()
    thinnest = min(range(len(crossing) // 4, 3 * len(crossing) // 4), key=crossing.__getitem__)
    for cuts in ((1,), (thinnest,), *(even_cuts(program, stages) for stages in (2, 3, 4))):
        _compare(case, program, cuts)


def test_the_thinnest_cuts_of_a_gpt_are_between_its_layers() -> None:
    case = CASES["gpt"]()
    program = program_of(case)
    crossing = program.crossing_bytes()
    hidden = 6 * 12 * 16 * 8
    assert min(crossing[4:-3]) == hidden
    for call in program.calls:
        if call.module.startswith("blocks.") and call.module.count(".") == 1:
            assert crossing[call.first] == hidden
    assert {o.name for o in program.operations if o.reach is Reach.EVERYWHERE} == {"ones", "tril"}


class _Looks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x)
        if hidden.sum().item() > 0:
            hidden = hidden * 2
        return self.b(hidden)


class _Sets(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.a(x) * 1
        hidden[:, 0] = 0.0
        return self.b(hidden)


class _Hides(nn.Module):
    """A module that leaves a tensor behind in place of returning it."""

    class Inner(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> Any:
            self.kept = self.a(x)
            return self.b(x)

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.out = self.Inner(), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor) -> Any:
        hidden = self.inner(x)
        return self.out(hidden + self.inner.kept)


@pytest.mark.parametrize(
    ("make", "cut", "says"),
    [
        (_Looks, 1, r"test_stages_exact\.py:\d+ looks at a value that sum computes"),
        (_Sets, 3, r"test_stages_exact\.py:\d+ changes a tensor in place \(__setitem__\)"),
        (_Hides, 2, r"inner\.a computes a tensor that stage 1 reads, but inner does not return it"),
    ],
)
def test_what_cannot_be_cut_is_refused_by_its_line(make: type[nn.Module], cut: int, says: str) -> None:
    case = Case(make=made(make), x={"x": floats(6, 4)}, y=numbers(6, below=2), loss=class_loss)
    program = program_of(case)
    with pytest.raises(ModelError, match=says):
        Staging(program=program, cuts=(cut,))
    assert Staging(program=program, cuts=()).num_stages == 1


def test_a_pass_that_differs_from_the_recorded_one_is_refused() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 2)

        def forward(self, x: torch.Tensor) -> Any:
            hidden = torch.sigmoid(x) if len(x) > 8 else torch.tanh(x)
            return self.b(F.relu(self.a(hidden)))

    small = Case(make=made(Branches), x={"x": floats(6, 4)}, y=numbers(6, below=2), loss=class_loss)
    large = Case(make=small.make, x={"x": floats(12, 4)}, y=numbers(12, below=2), loss=class_loss)
    staging = Staging(program=program_of(small), cuts=(2,))
    with pytest.raises(ModelError, match=r"calls sigmoid where tanh .* was recorded"):
        played(large, staging)


def test_a_stand_in_says_where_its_value_is() -> None:
    shown = stand_in_of(torch.empty(3))
    assert (shown * 2).shape == (3,)
    with pytest.raises(ModelError, match="another stage"):
        shown.sum().item()
    with pytest.raises(ModelError, match="for others, such as CTCLoss, use one stage"):
        F.ctc_loss(stand_in_of(torch.empty(5, 2, 3)), torch.ones(2, 1).long(), torch.tensor([5, 5]), torch.tensor([1, 1]))
    channel: Any = None
    with pytest.raises(ModelError, match="the loss reads weights or values of other pipeline stages"):
        ReceivedParcel(channel, Parcel(value=0, micro_batch=0, source=0, target=1)).give(shown)


def test_a_stand_in_that_changes_its_form_does_not_change_others() -> None:
    """torch's LSTM exchanges the axes of its result in place."""
    shown = StandIn(torch.empty(3, 5, 4, device="meta"), device=torch.device("cpu"))
    (shown * 2).transpose_(0, 1)
    again: Any = shown * 2
    assert again.shape == again.meta.shape == (3, 5, 4)
    for kind in (nn.GRU, nn.LSTM, nn.GRU):
        layer = kind(4, 2, batch_first=True)
        weights: dict[str, torch.Tensor] = {name: stand_in_of(weight) for name, weight in layer.named_parameters()}
        with torch.no_grad():
            result = torch.func.functional_call(layer, weights, (shown,))[0]
        assert result.shape == result.meta.shape == (3, 5, 2)


def test_a_mean_over_no_sample_of_another_stage_has_a_gradient() -> None:
    shown = StandIn(torch.empty(0, 3, device="meta"), device=torch.device("cpu"), requires_grad=True)
    torch.autograd.backward(F.mse_loss(shown, torch.zeros(0, 3)))
    assert shown.grad is not None
    assert shown.grad.shape == (0, 3)


def test_the_gradient_of_the_input_leaves_before_weights_have_theirs() -> None:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 2)).double()
    x = torch.randn(3, 4, dtype=torch.float64)
    other = copy.deepcopy(network)
    other(x).square().sum().backward()
    program = record(network, (x,), {})
    events: list[str] = []

    class Channel(AbstractChannel):
        def send(self, parcel: Parcel, tensor: torch.Tensor | None) -> None:  # noqa: ARG002
            assert tensor is not None
            events.append("the gradient of the input")
            sent.append(tensor)

        def receive(self, parcel: Parcel) -> torch.Tensor:  # noqa: ARG002
            return other[:2](x).detach().requires_grad_()  # type: ignore[no-any-return]

        def flush(self) -> None:
            pass

    sent: list[torch.Tensor] = []
    runner = StageRunner(network, staging=Staging(program=program, cuts=(2,)), stage=1, channel=Channel())
    for name, parameter in network.named_parameters():
        parameter.register_hook(lambda _, name=name: events.append(name))  # type: ignore[no-untyped-call]
    runner.run((x,), {}).square().sum().backward()
    assert events[0] == "the gradient of the input"
    assert sorted(events[1:]) == ["2.bias", "2.weight", "4.bias", "4.weight"]
    for name, parameter in other.named_parameters():
        own = dict(network.named_parameters())[name].grad
        assert (own is None) == name.startswith("0.")
        if own is not None:
            torch.testing.assert_close(own, parameter.grad, rtol=1e-12, atol=0)


def test_few_numbers_at_the_end_do_not_hide_where_to_cut() -> None:
    network = nn.Sequential(nn.Linear(4, 10), nn.Tanh(), nn.Linear(10, 8), nn.Tanh(), nn.Linear(8, 1), nn.Flatten(0))
    pieces = record_network(network, Sample.of(torch.ones(4, 4))).pieces
    assert [each.name for each in pieces] == ["0", "1", "2", "3", "4"]


def test_planners_know_which_products_come_late() -> None:
    """Of every linear layer the gradient of its weight: 2 flop for each element of it and each token."""
    network = CASES["gpt"]().make()
    found = record_network(network, Sample.of(numbers(2, 12, below=33)))
    layers = [each for each in network.modules() if isinstance(each, nn.Linear)]
    late = sum(piece.late_flop_per_sample for piece in found.pieces)
    assert late == pytest.approx(sum(2 * 12 * each.weight.numel() for each in layers))
