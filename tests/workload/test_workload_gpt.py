"""A GPT's facts, against counts by hand and against each other."""

from __future__ import annotations

from typing import Any

import pytest

from tatami.errors import PlanError
from tatami.workload import Workload, gpt_workload


def gpt(**changed: Any) -> Workload:
    sizes: dict[str, Any] = {"layers": 2, "width": 12, "heads": 3, "tokens": 5, "samples": 7, "vocabulary": 11}
    return gpt_workload(**(sizes | changed))


def test_the_weights_are_those_of_gpt_2() -> None:
    """124,439,808 parameters, as everybody counts them: tied embeddings, biases everywhere but at the head."""
    workload = gpt_workload(layers=12, width=768, heads=12, tokens=1024, samples=1)
    assert workload.horizontal_elements + workload.replicated_parameters == 124_439_808
    assert len(workload.blocks) == 25
    assert [count for _, count in workload.kinds] == [12, 12, 1]


def test_the_flop_are_six_for_each_weight_and_token_and_twelve_for_scores() -> None:
    """6 N T + 12 L H d T^2 of the literature (Chowdhery et al., appendix B), with the embedding counted once, as the head."""
    layers, width, heads, tokens = 12, 768, 12, 1024
    workload = gpt_workload(layers=layers, width=width, heads=heads, tokens=tokens, samples=1)
    weights = 12 * layers * width**2 + 50_257 * width
    expected = 6 * weights * tokens + 12 * layers * width * tokens**2
    assert workload.flop(width=1.0, height=1.0) == pytest.approx(expected, rel=0.02)


def test_blocks_by_hand() -> None:
    attention, mlp, *_ = gpt().blocks
    assert (attention.units, attention.unit, attention.kind, attention.name) == (3, "head", "attention", "h.0.attn")
    assert attention.unit_parameters == 3 * (12 * 4 + 4) + 4 * 12
    assert (mlp.units, mlp.unit_parameters, mlp.name) == (48, 12 + 1 + 12, "h.0.mlp")
    for block in (attention, mlp):
        assert (block.forward_elements, block.backward_elements, block.sums) == (60, 60, 2)
    assert attention.flop_per_unit == 3 * (2 * 5 * 12 * 4 * 4 + 4 * 5 * 5 * 4)
    assert mlp.flop_per_unit == 3 * 5 * (2 * 24 + 1)
    assert mlp.unit_activation_bytes == 2 * 5 * 4


@pytest.mark.parametrize("tied", [False, True])
def test_the_vocabulary_is_split_where_it_is_large(tied: bool) -> None:
    small, large = gpt(vocabulary=511, tied=tied), gpt(vocabulary=512, tied=tied)
    assert len(small.blocks) == 4
    rows = large.blocks[4]
    assert (rows.units, rows.unit_parameters) == (512, 12 if tied else 25)
    assert small.replicated_parameters - large.replicated_parameters == 511 * rows.unit_parameters
    ratio = small.flop(width=1.0, height=1.0) / large.flop(width=1.0, height=1.0)
    assert ratio == pytest.approx(511 / 512, abs=0.002), "the same products, whoever computes them"


def test_attention_grows_with_the_square_of_the_tokens() -> None:
    few, many = gpt(tokens=1000).blocks[0], gpt(tokens=4000).blocks[0]
    assert 12 < many.flop_per_unit / few.flop_per_unit < 16
    assert many.unit_activation_bytes == 4 * few.unit_activation_bytes


def test_grouped_queries() -> None:
    """Two groups of three query heads each share one head of keys and values."""
    plain, grouped = gpt(heads=6).blocks[0], gpt(heads=6, kv_heads=2).blocks[0]
    assert (grouped.units, grouped.unit) == (2, "group of heads")
    assert grouped.unit_parameters == 3 * (12 * 2 + 2) + 2 * (12 * 2 + 2) + 3 * 2 * 12
    assert grouped.parameters < plain.parameters
    scores = grouped.units * grouped.flop_per_unit - plain.units * plain.flop_per_unit
    assert scores == -3 * 4 * 2 * (2 * 5 * 12 * 2), "four heads of keys and values less"


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"heads": 5}, "a width of 12 does not divide by 5 heads"),
        ({"kv_heads": 2}, "3 heads of queries do not divide by 2 heads of keys and values"),
        ({"layers": 0}, "layers of a GPT must be at least 1, not 0"),
        ({"vocabulary": 0}, "vocabulary of a GPT must be at least 1, not 0"),
        ({"samples": 0}, "at least 1 sample"),
    ],
)
def test_what_cannot_be_is_refused(changed: dict[str, int], told: str) -> None:
    with pytest.raises(PlanError, match=told):
        gpt(**changed)
