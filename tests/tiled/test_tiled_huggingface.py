"""Networks of Hugging Face as they come, in tiny configurations: GPT-2, Llama, Mixtral, BERT and T5."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from equal_runs import check_equal
from networks import VOCABULARY, Batch, Case

from tatami.testing.worlds import World
from tatami.tiled import find_blocks

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


def tokens(samples: int, generator: torch.Generator) -> Batch:
    text = torch.randint(1, VOCABULARY, (samples, 6), generator=generator)
    return {"input_ids": text, "labels": text}


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


@pytest.mark.threads_only  # each process would follow all of them again
@pytest.mark.parametrize("name", sorted(CASES))
def test_networks_of_hugging_face_equal_the_plain_ones(world: World, name: str) -> None:
    check_equal(world, CASES[name])


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_blocks_of_networks_of_hugging_face_are_found(name: str) -> None:
    case = CASES[name]
    found = find_blocks(case.build().double(), sample=case.draw(4, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks
