"""A network as plain facts: which layers are tiled together, and what a workload they make."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tatami.cluster import Cluster
from tatami.errors import PlanError
from tatami.workload import (
    Activation,
    Dense,
    Workload,
    as_probed,
    has_blocks_of,
    linear_pair,
    net_layers,
    net_workload,
    network_workload,
    parse_net,
    partners,
)

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
    assert workload.blocks == (
        linear_pair(10, 8, 6, unit_bias=True),
        linear_pair(6, 4, 2, unit_bias=True, input_gradient=True),
    )
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
