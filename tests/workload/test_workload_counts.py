"""Workloads: what is counted, of networks by sizes and of GPTs."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.workload import (
    ELEMENT_FLOP,
    Activation,
    Block,
    Counts,
    Dense,
    PairSizes,
    Workload,
    as_probed,
    backward_counts,
    corners,
    forward_counts,
    gpt_workload,
    has_blocks_of,
    iteration_counts,
    linear_pair,
    net_layers,
    net_workload,
    network_workload,
    parse_net,
    partners,
)

NETTALK = PairSizes(inputs=203, outputs=26)


@pytest.mark.parametrize(("units", "samples"), [(80, 1024), (12, 300), (1, 1)])
def test_table_1_exactly(units: int, samples: int) -> None:
    n, l, area = 203, 26, units * samples  # noqa: E741 - the paper's letters
    assert forward_counts(NETTALK, units=units, samples=samples) == Counts(
        add=(n + l - 1) * area - l * samples, multiply=(n + l) * area, sigmoid=area + l * samples
    )
    assert backward_counts(NETTALK, units=units, samples=samples) == Counts(
        add=(n + l) * area + 2 * l * samples, multiply=(n + 2 * l + 1) * area + 2 * l * samples
    )


def test_the_numbers_of_one_small_tile() -> None:
    pair = PairSizes(inputs=3, outputs=2)
    assert forward_counts(pair, units=2, samples=5) == Counts(add=30, multiply=50, sigmoid=20)
    assert backward_counts(pair, units=2, samples=5) == Counts(add=70, multiply=100)
    assert iteration_counts(pair, units=2, samples=5).flop == 30 + 50 + 70 + 100 + 10 * 20


def test_a_bias_and_an_input_gradient_add_their_operations() -> None:
    plain = iteration_counts(PairSizes(inputs=3, outputs=2), units=2, samples=5)
    bias = iteration_counts(PairSizes(inputs=3, outputs=2, unit_bias=True), units=2, samples=5)
    below = iteration_counts(PairSizes(inputs=3, outputs=2, input_gradient=True), units=2, samples=5)
    assert bias == plain + Counts(add=2 * 10, multiply=0)
    assert below == plain + Counts(add=30, multiply=30)


def test_elements_and_bytes_of_the_paper() -> None:
    workload = Workload.mlp(203, 80, 26, samples=1024)
    assert workload.tensor_parallel_elements == 26 * 1024
    assert workload.gradient_elements == 229 * 80
    assert workload.tensor_parallel_bytes == 4 * 26 * 1024
    assert workload.gradient_bytes == 4 * 229 * 80
    assert workload.tensor_parallel_exchanges == 1
    assert workload.flop(width=1.0, height=1.0) == iteration_counts(NETTALK, units=80, samples=1024).flop


@pytest.mark.parametrize(("bias", "below"), [(False, False), (True, False), (False, True), (True, True)])
def test_a_linear_pair_is_a_block_of_table_1(bias: bool, below: bool) -> None:
    block = linear_pair(7, 40, 3, unit_bias=bias, input_gradient=below, name="mlp")
    sizes = PairSizes(inputs=7, outputs=3, unit_bias=bias, input_gradient=below)
    assert (block.units, block.unit_parameters, block.parameters) == (40, 10 + bias, 40 * (10 + bias))
    assert (block.forward_elements, block.backward_elements) == (3, 7 * below)
    assert (block.summed_elements, block.sums) == (3 + 7 * below, 1 + below)
    for units, samples in ((40, 64), (13, 5)):
        assert block.flop(units=units, samples=samples) == iteration_counts(sizes, units=units, samples=samples).flop
    assert block.flop(units=0, samples=2) == 0, "a rank without units takes no part"
    forward = forward_counts(sizes, units=40, samples=64).flop
    assert block.forward_fraction * block.flop(units=40, samples=64) == pytest.approx(forward, rel=1e-12)
    assert (block.name, block.kind, block.unit) == ("mlp", "linear pair", "hidden unit")


def test_blocks_add_up() -> None:
    first = linear_pair(10, 8, 6, unit_bias=True)
    second = linear_pair(6, 4, 3, input_gradient=True)
    workload = Workload(samples=100, blocks=(first, second), replicated_parameters=50, element_bytes=8)
    assert workload.tensor_parallel_elements == 100 * (6 + 3 + 6)
    assert workload.tensor_parallel_exchanges == 3
    assert workload.gradient_elements == 17 * 8 + 9 * 4
    assert workload.gradient_bytes == 8 * (17 * 8 + 9 * 4)
    assert workload.replicated_bytes == 400
    assert workload.units == 8
    assert workload.with_samples(7).samples == 7


@given(width=st.floats(0, 1), height=st.floats(0, 1, exclude_min=True), bias=st.booleans(), below=st.booleans())
def test_flop_are_linear_in_area_and_width(width: float, height: float, bias: bool, below: bool) -> None:
    blocks = (linear_pair(203, 80, 26), linear_pair(26, 5, 2, unit_bias=bias, input_gradient=below))
    workload = Workload(samples=64, blocks=blocks, replicated_flop_per_sample=11)
    linear = width * (workload.flop_per_area * height + workload.flop_per_width)
    assert workload.flop(width=width, height=height) == pytest.approx(linear, abs=1e-3)
    assert workload.flop_per_width > 0


def test_the_work_of_a_tile_is_its_area_where_there_is_one_block() -> None:
    workload = Workload.mlp(203, 80, 26, samples=1024)
    assert workload.tile_work([17], samples=382) == 17 * 382
    assert workload.tile_work([0], samples=382) == 0
    heads = Block(units=6, unit_parameters=1, forward_elements=1, flop_per_unit=20.0)
    hidden = Block(units=60, unit_parameters=1, forward_elements=1, flop_per_unit=3.0)
    both = Workload(samples=10, blocks=(heads, hidden), replicated_flop_per_sample=30)
    # 300 flop of all units of both are 60 units of the block that has most: 5 flop each.
    assert both.tile_work([6, 60], samples=10) == pytest.approx(10 * (300 + 30) / 5)
    assert both.tile_work([0, 10], samples=4) == pytest.approx(4 * (30 + 30) / 5)
    assert Workload(samples=10, replicated_flop_per_sample=30).tile_work([], samples=4) == 4
    assert Workload(samples=10).tile_work([], samples=4) == 4


def test_alike_blocks_are_one_kind_whatever_their_names() -> None:
    one = linear_pair(8, 4, 8, name="h.0.mlp")
    other = replace(one, name="h.1.mlp", kind="something")
    different = replace(one, flop_per_unit=1.0)
    workload = Workload(samples=3, blocks=(one, other, different))
    assert workload.kinds == ((one, 2), (different, 1))
    assert [section.units for section in workload.sections] == [4, 4]
    whole = sum(section.flop(section.units) for section in workload.sections)
    assert 3 * whole == pytest.approx(workload.flop(width=1.0, height=1.0))


def test_sizes_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="units of a linear pair must be at least 1, not 0"):
        linear_pair(3, 0, 2)
    with pytest.raises(PlanError, match="at least 1 sample, not 0"):
        Workload.mlp(3, 4, 2, samples=0)
    heads = Block(units=6, unit_parameters=8, forward_elements=4, flop_per_unit=100.0, name="attention")
    with pytest.raises(PlanError, match="block 'attention' must have at least 1 unit, not 0"):
        replace(heads, units=0)
    for name in ("flop_per_unit", "flop_per_sample", "forward_elements", "unit_activation_bytes"):
        for value in (-1, float("nan"), float("inf")):
            with pytest.raises(PlanError, match=f"{name} of block 'attention' must be a finite number >= 0, not {value}"):
                replace(heads, **{name: value})  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"forward_fraction of block 'attention' must be a share from 0 to 1, not 1\.5"):
        replace(heads, forward_fraction=1.5)


SIGMOID = Activation(name="sigmoid")
SOFTMAX = Activation(name="softmax", elementwise=False)


@pytest.mark.parametrize(("text", "sizes"), [("203-80-26", (203, 80, 26)), (" 1-2-3-4-5 ", (1, 2, 3, 4, 5))])
def test_nets_are_read(text: str, sizes: tuple[int, ...]) -> None:
    assert parse_net(text) == sizes


@pytest.mark.parametrize("text", ["", "203", "203-26", "203-0-26", "203--26", "203-x-26", "203-8.5-26", "-203-80-26", "2-²-3"])
def test_what_is_no_net_is_refused_with_an_example(text: str) -> None:
    with pytest.raises(PlanError, match=r"such as 203-80-26") as error:
        parse_net(text)
    assert repr(text) in str(error.value)


def test_three_layers_are_the_papers_perceptron() -> None:
    assert net_workload("203-80-26", samples=1024) == Workload.mlp(203, 80, 26, samples=1024)


def test_linear_layers_pair_from_the_front_and_an_odd_one_is_replicated() -> None:
    layers = net_layers((10, 8, 6, 4))
    assert partners(layers) == ((0, 2),)
    workload = network_workload(layers, samples=5)
    assert workload.blocks == (linear_pair(10, 8, 6),)
    assert workload.replicated_parameters == 24
    assert workload.replicated_flop_per_sample == 6 * 24


def test_the_second_block_needs_a_gradient_of_its_input() -> None:
    workload = network_workload(net_layers((10, 8, 6, 4, 2), bias=True), samples=5, element_bytes=8)
    assert workload.blocks == (linear_pair(10, 8, 6, unit_bias=True), linear_pair(6, 4, 2, unit_bias=True, input_gradient=True))
    assert workload.replicated_parameters == 6 + 2
    assert workload.element_bytes == 8


def test_only_elementwise_activations_lie_inside_a_block() -> None:
    one, two, three = (Dense(inputs=4, outputs=4, bias=False) for _ in range(3))
    layers = (one, SOFTMAX, two, SIGMOID, SIGMOID, three)
    assert partners(layers) == ((2, 5),)
    workload = network_workload(layers, samples=5)
    assert workload.blocks == (linear_pair(4, 4, 4, input_gradient=True),)
    assert workload.replicated_parameters == 16
    assert workload.replicated_flop_per_sample == 4 * 16


def test_a_network_of_layers_that_do_not_split_has_no_blocks() -> None:
    workload = network_workload((Dense(inputs=4, outputs=4), SOFTMAX, Dense(inputs=4, outputs=2)), samples=5)
    assert (workload.blocks, workload.units) == ((), 1)
    assert workload.replicated_parameters == 20 + 10
    assert workload.replicated_flop_per_sample == 4 * 16 + 6 * 8


def test_networks_that_cannot_be_are_refused() -> None:
    with pytest.raises(PlanError, match="layer 0 has 4 outputs, but layer 1 takes 5 inputs"):
        network_workload((Dense(inputs=4, outputs=4), Dense(inputs=5, outputs=2)), samples=5)


@pytest.mark.parametrize("bias", [False, True])
def test_what_was_probed_of_a_network_counts_for_the_same_blocks_only(bias: bool) -> None:
    cluster = replace(Cluster.from_speeds([1.0]), sample_flop={"10-8-6": 7.0, "10-8-6-4-2": 9.0})
    for net, sample_flop in (("10-8-6", 7.0), ("10-8-6-4-2", 9.0), ("10-9-6", 0.0), ("10-8-6-4-3", 0.0)):
        workload = net_workload(net, samples=5, bias=bias)
        assert as_probed(workload, cluster) == replace(workload, sample_flop=sample_flop)
    known = replace(net_workload("10-8-6", samples=5), sample_flop=3.0)
    assert as_probed(known, cluster) == known
    assert as_probed(Workload(samples=5), cluster) == Workload(samples=5)


def test_a_network_with_a_layer_more_or_another_position_for_its_gradient_has_other_blocks() -> None:
    assert has_blocks_of(net_workload("10-8-6", samples=5), "10-8-6")
    assert not has_blocks_of(net_workload("10-8-6-4-2", samples=5), "10-8-6")
    trained = Workload(samples=5, blocks=(linear_pair(10, 8, 6, input_gradient=True),))
    assert not has_blocks_of(trained, "10-8-6")
    # Rows of a sequence: two of 5 outputs are summed like one of 10, of a layer with 5 inputs fewer.
    rows = Workload(samples=5, blocks=(linear_pair(10, 8, 5, rows=2),))
    assert not has_blocks_of(rows, "5-8-10")


def gpt(**changed: Any) -> Workload:
    sizes: dict[str, Any] = {"layers": 2, "width": 12, "heads": 3, "tokens": 5, "samples": 7, "vocabulary": 11}
    return gpt_workload(**(sizes | changed))


def test_the_weights_are_those_of_gpt_2() -> None:
    """124,439,808 parameters, as everybody counts them: tied embeddings, biases everywhere but at the head."""
    workload = gpt_workload(layers=12, width=768, heads=12, tokens=1024, samples=1)
    assert workload.gradient_elements + workload.replicated_parameters == 124_439_808
    assert len(workload.blocks) == 25
    assert [count for _, count in workload.kinds] == [12, 12, 1]


def test_the_flop_are_six_for_each_weight_and_token_and_twelve_for_scores() -> None:
    """6 N T + 12 L H d T^2 of the literature (Chowdhery et al., appendix B), with the embedding counted once, as the head."""
    layers, width, heads, tokens = 12, 768, 12, 1024
    workload = gpt_workload(layers=layers, width=width, heads=heads, tokens=tokens, samples=1)
    weights = 12 * layers * width**2 + 50_257 * width
    elements = (4 * layers + 2 + 4 * layers) * width * tokens  # norms and sums, and activations
    expected = 6 * weights * tokens + 12 * layers * width * tokens**2 + 3 * ELEMENT_FLOP * elements
    assert workload.flop(width=1.0, height=1.0) == pytest.approx(expected, rel=0.005)


def test_blocks_by_hand() -> None:
    attention, mlp, *_ = gpt().blocks
    assert (attention.units, attention.unit, attention.kind, attention.name) == (3, "head", "attention", "h.0.attn")
    assert attention.unit_parameters == 3 * (12 * 4 + 4) + 4 * 12
    assert (mlp.units, mlp.unit_parameters, mlp.name) == (48, 12 + 1 + 12, "h.0.mlp")
    for block in (attention, mlp):
        assert (block.forward_elements, block.backward_elements, block.sums) == (60, 60, 2)
    assert attention.flop_per_unit == 3 * (2 * 5 * 12 * 4 * 4 + 4 * 5 * 5 * 4)
    assert mlp.flop_per_unit == 3 * 5 * (2 * 24 + ELEMENT_FLOP)
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


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("vocabulary", [11, 512, 50_257])
@pytest.mark.parametrize("tokens", [5, 5000])
def test_pieces_are_the_whole_network_in_order(*, tied: bool, vocabulary: int, tokens: int) -> None:
    workload = gpt(tied=tied, vocabulary=vocabulary, tokens=tokens)
    pieces = workload.pieces
    assert [piece.name for piece in pieces] == ["wte", "h.0.attn", "h.0.mlp", "h.1.attn", "h.1.mlp", "ln_f"]
    flop = workload.flop(width=1.0, height=1.0) / workload.samples
    assert sum(piece.flop_per_sample for piece in pieces) == pytest.approx(flop, rel=1e-12)
    twice = 12 * vocabulary if tied else 0
    parameters = workload.gradient_elements + workload.replicated_parameters
    assert sum(piece.parameters for piece in pieces) == parameters + twice
    assert {piece.shared for piece in (pieces[0], pieces[-1])} == {(("wte", twice),) if tied else ()}
    kept = workload.replicated_activation_bytes + sum(
        block.units * block.unit_activation_bytes + block.sample_activation_bytes for block in workload.blocks
    )
    assert sum(piece.activation_bytes_per_sample for piece in pieces) == pytest.approx(kept, rel=1e-12)
    assert [piece.crossing_bytes_per_sample for piece in pieces] == [0, *[4 * 12 * tokens] * 5]


def test_memory_is_fullest_at_the_corners_of_what_is_kept_and_what_is_there() -> None:
    hull = (1.0, 0.0), (0.9, 0.5), (0.4, 0.9), (0.0, 1.0)
    assert corners([(0.5, 0.6), *reversed(hull)]) == hull
    assert corners([(0.0, 1.0), (1.0, 1.0), (1.0, 0.0)]) == ((1.0, 1.0),)


@given(st.lists(st.tuples(st.floats(0, 2), st.floats(0, 1)), min_size=1, max_size=12), st.floats(0, 10), st.floats(0, 10))
def test_no_moment_is_fuller_than_the_corners(moments: list[tuple[float, float]], kept: float, there: float) -> None:
    fullest = max(a * kept + b * there for a, b in moments)
    assert max(a * kept + b * there for a, b in corners(moments)) == pytest.approx(fullest)
