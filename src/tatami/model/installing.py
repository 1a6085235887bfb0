"""Puts forward functions that compute with the units and samples of a rank in place of those of the plain network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Protocol

import torch
from torch import nn

from tatami.partition.blocks import Blocks
from tatami.partition.exactness import BATCH_NORMS
from tatami.partition.linear_pairs import TiledFirst, TiledSecond, works_elementwise
from tatami.partition.tracing.settings import ModuleSettings
from tatami.partition.tracing.traced_module import LocalForward
from tatami.runtime.batch_layers import WholeBatchNorm, WholeDropout
from tatami.runtime.batch_operations import UnitFactor
from tatami.runtime.context import ModuleContext
from tatami.runtime.recomputed_layers import RecomputedForward
from tatami.runtime.rows import ONE_EACH
from tatami.runtime.tensor_parallel import ReplicaComm
from tatami.tiling import Span


class MakeContext(Protocol):
    """Makes what a module needs to know of its rank, from the numbers of its blocks."""

    def __call__(
        self, blocks: Iterable[int], *, name: str = "", layer: Callable[[str], nn.Module] | None = None
    ) -> ModuleContext: ...


def install_forwards(
    network: nn.Module,
    found: Blocks,
    *,
    context: MakeContext,
    units: Callable[[int], tuple[Span, int]],
    replica: ReplicaComm,
    device: torch.device,
    sums_statistics: bool,
    recomputes: Callable[[], bool],
) -> None:
    """Install them; an attribute of the instance is found before the class's method, and names, hooks and parameters stay.

    Args:
        network: whose tensors have the units of this rank.
        found: its blocks, and how they are divided.
        context: makes what the forward functions know of the rank.
        units: those of a block that are here, and how many it has.
        replica: the ranks of this replica.
        device: where this rank computes.
        sums_statistics: whether batch normalization takes the statistics of several ranks.
        recomputes: whether a layer that runs now is recomputed in the backward pass.
    """
    captured = found.captured
    for index, names in enumerate(found.pairs):
        first, second = network.get_submodule(names.first), network.get_submodule(names.second)
        assert isinstance(first, nn.Linear)
        assert isinstance(second, nn.Linear)
        first.__dict__["forward"] = TiledFirst(first, replica=replica)
        second.__dict__["forward"] = TiledSecond(second, replica=replica)
        factor = UnitFactor(block=0, total=units(index)[1], runs=ONE_EACH.runs)
        for name in names.dropouts:
            layer = network.get_submodule(name)
            assert isinstance(layer, nn.Dropout)
            orders = () if captured is None else captured.dropout_orders.get(name, ())
            layer.__dict__["forward"] = WholeDropout(layer, context=context([index]), units=factor, orders=orders)
    for name, followed in found.followed.items():
        module, blocks = network.get_submodule(name), found.of_followed(name)
        module.__dict__["forward"] = LocalForward(
            module,
            name=name,
            followed=followed,
            context=context(blocks, name=name, layer=module.get_submodule),
            units=tuple(functools.partial(units, index) for index in blocks),
            plainly=found.runs_plainly(network, name),
            device=device,
        )
    for number, part in enumerate(found.parts):
        part.install(network, context(found.of_part(number)))
    of_all = context(())
    for name, layer in network.named_modules():
        if "forward" in vars(layer):
            continue
        if isinstance(layer, nn.Dropout):
            axis = None if captured is None else captured.samples_axis(name)
            orders = () if captured is None else captured.dropout_orders.get(name, ())
            layer.__dict__["forward"] = WholeDropout(layer, context=of_all, samples_axis=axis or 0, orders=orders)
        elif isinstance(layer, BATCH_NORMS) and sums_statistics:
            layer.__dict__["forward"] = WholeBatchNorm(layer, name=name, context=of_all)
    for name in found.layers:
        layer = network.get_submodule(name)
        layer.__dict__["forward"] = RecomputedForward(layer, is_on=recomputes)


def settings_of(network: nn.Module, found: Blocks) -> ModuleSettings:
    """The facts of modules that must stay as they are, since it was read when they were divided."""
    partial: dict[str, frozenset[str]] = {}
    for pair in found.pairs:
        partial |= dict.fromkeys(pair.between, frozenset[str]())
        partial |= {pair.first: frozenset({"_forward_pre_hooks"}), pair.second: frozenset({"_forward_hooks"})}
    return ModuleSettings(network, followed=found.followed, partial=partial, replaceable=works_elementwise)
