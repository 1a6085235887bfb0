"""A layered network as plain facts, and the workload it makes: which linear layers are tiled together, which are replicated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from tatami.cluster import Cluster
from tatami.errors import PlanError, shortened
from tatami.workload.block import Block
from tatami.workload.linear_pair import linear_pair
from tatami.workload.workload import Workload

_MOST_DIGITS, _MOST_SIZES = 9, 1000


@dataclass(frozen=True, kw_only=True)
class Dense:
    """A linear layer: weight (outputs, inputs), and bias (outputs,) where it has one."""

    inputs: int
    outputs: int
    bias: bool = True

    @property
    def parameters(self) -> int:
        return self.outputs * (self.inputs + self.bias)


@dataclass(frozen=True, kw_only=True)
class Activation:
    """What lies between linear layers. Only an elementwise one can lie inside a block: it needs no other unit."""

    name: str
    elementwise: bool = True


Layer = Dense | Activation


def parse_net(text: str) -> tuple[int, ...]:
    """The sizes of a network written "203-80-26": inputs, hidden layers, outputs.

    Raises:
        PlanError: not at least three whole numbers from 1 to 10**9, joined by "-"; or more than 1,000 of them.
    """
    words = [word.strip() for word in text.split("-")]
    shown = shortened(text)
    if any(not (word.isascii() and word.isdigit()) or len(word) > _MOST_DIGITS or int(word) < 1 for word in words):
        raise PlanError(
            f"network {shown!r} must be whole numbers >= 1 of at most {_MOST_DIGITS} digits, joined by '-': "
            "inputs-hidden-outputs, such as 203-80-26"
        )
    if len(words) > _MOST_SIZES:
        raise PlanError(f"network {shown!r} has {len(words)} sizes; at most {_MOST_SIZES}")
    if len(words) < 3:
        raise PlanError(f"network {shown!r} has no hidden layer; write at least inputs-hidden-outputs, such as 203-80-26")
    return tuple(int(word) for word in words)


def net_layers(sizes: Sequence[int], *, bias: bool = False) -> tuple[Layer, ...]:
    """Linear layers between consecutive `sizes`, a sigmoid after each, as in the paper (which has no biases)."""
    layers: list[Layer] = []
    for inputs, outputs in pairwise(sizes):
        layers += [Dense(inputs=inputs, outputs=outputs, bias=bias), Activation(name="sigmoid")]
    return tuple(layers)


def partners(layers: Sequence[Layer]) -> tuple[tuple[int, int], ...]:
    """Which linear layers are tiled together: the indices in `layers` of the first and the second layer of each block.

    From the front, a linear layer pairs with the next one, if nothing but elementwise activations lies between; one that
    finds no partner is replicated.
    """
    found = []
    first: int | None = None
    for index, layer in enumerate(layers):
        if isinstance(layer, Dense):
            if first is None:
                first = index
            else:
                found.append((first, index))
                first = None
        elif not layer.elementwise:
            first = None
    return tuple(found)


def network_workload(layers: Sequence[Layer], *, samples: int, element_bytes: int = 4) -> Workload:
    """The workload of a network of any depth.

    The second bias of a block and every linear layer outside of blocks count as replicated. A replicated layer costs each
    sample 2 flop per weight forward, 2 for the weight's gradient, and 2 for the input's where layers lie below.

    Raises:
        PlanError: sizes that do not fit each other.
    """
    dense = [(index, layer) for index, layer in enumerate(layers) if isinstance(layer, Dense)]
    for (before, one), (after, other) in pairwise(dense):
        if one.outputs != other.inputs:
            raise PlanError(f"layer {before} has {one.outputs} outputs, but layer {after} takes {other.inputs} inputs")
    blocks: list[Block] = []
    tiled, parameters, flop = set(), 0, 0
    linear = dict(dense)
    for index, partner in partners(layers):
        first, second = linear[index], linear[partner]
        tiled |= {index, partner}
        parameters += second.outputs if second.bias else 0
        blocks.append(
            linear_pair(first.inputs, first.outputs, second.outputs, unit_bias=first.bias, input_gradient=index != dense[0][0])
        )
    for index, layer in dense:
        if index not in tiled:
            parameters += layer.parameters
            flop += layer.inputs * layer.outputs * (4 if index == dense[0][0] else 6)
    return Workload(
        samples=samples,
        blocks=tuple(blocks),
        replicated_parameters=parameters,
        replicated_flop_per_sample=flop,
        trained_tensors=sum(1 + layer.bias for _, layer in dense),
        element_bytes=element_bytes,
    )


def net_workload(text: str, *, samples: int, bias: bool = False, element_bytes: int = 4) -> Workload:
    """The workload of "203-80-26": `parse_net`, `net_layers` and `network_workload` in one."""
    return network_workload(net_layers(parse_net(text), bias=bias), samples=samples, element_bytes=element_bytes)


def as_probed(workload: Workload, cluster: Cluster) -> Workload:
    """`workload` with what a sample costs beside its units, where `tatami probe` has timed a network of these blocks there."""
    if workload.sample_flop or not workload.blocks:
        return workload
    found = (flop for net, flop in cluster.sample_flop.items() if has_blocks_of(workload, net))
    sample_flop = next(found, 0.0)
    return replace(workload, sample_flop=sample_flop) if sample_flop else workload


def has_blocks_of(workload: Workload, net: str) -> bool:
    """Whether its blocks compute what those of the network "203-80-26" do, with biases or without."""
    # First what is quickly compared: a cluster's file may hold thousands of networks.
    units = parse_net(net)[1::2][: net.count("-") // 2]
    if units != tuple(block.units for block in workload.blocks):
        return False
    return any(_sums(net_workload(net, samples=1, bias=bias)) == _sums(workload) for bias in (False, True))


def _sums(workload: Workload) -> list[tuple[float, ...]]:
    return [
        (block.unit_parameters, block.forward_elements, block.backward_elements, block.flop_per_unit)
        for block in workload.blocks
    ]
