"""Networks that people train, as they come: which blocks are found, and that tiled runs equal plain ones."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from equal_runs import check_case
from networks import CASES, build
from torch import nn
from torch.utils.checkpoint import checkpoint

from tatami.testing.worlds import World
from tatami.train import find_blocks


@pytest.mark.parametrize("name", sorted(CASES))
def test_the_blocks_of_a_network_are_found(name: str) -> None:
    case = CASES[name]
    model = build(case)
    before = {key: value.clone() for key, value in model.state_dict().items()}
    found = find_blocks(model, sample=case.draw(3, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert model.training


def test_code_that_asks_for_the_dtype_of_its_input_is_followed_in_single_precision() -> None:
    case = CASES["llama"]  # its rotary embeddings have the dtype of their input
    found = find_blocks(build(case).float(), sample=case.draw(3, torch.Generator().manual_seed(1)))
    assert tuple(block.facts.kind for block in found.blocks) == case.blocks


@pytest.mark.parametrize("name", ["gpt-dropout", "llama", "resnet"])
def test_a_tiled_network_equals_the_plain_one(world: World, name: str) -> None:
    check_case(world, CASES[name])


@pytest.mark.threads_only  # each process would follow all of them again
@pytest.mark.parametrize("name", sorted(set(CASES) - {"gpt-dropout", "llama", "resnet"}))
def test_more_tiled_networks_equal_the_plain_ones(world: World, name: str) -> None:
    check_case(world, CASES[name])


@pytest.mark.threads_only
@pytest.mark.ranks(5, 6, 7, 8)  # on 1 to 4 ranks like all other networks
def test_six_heads_on_any_number_of_ranks(world: World) -> None:
    check_case(world, CASES["gpt"])


class Recomputed(nn.Module):
    """A layer whose activations are computed again in the backward pass."""

    def __init__(self, layer: nn.Module, *, reentrant: bool) -> None:
        super().__init__()
        self.layer, self.reentrant = layer, reentrant

    def forward(self, x: torch.Tensor) -> Any:
        return checkpoint(self.layer, x, use_reentrant=self.reentrant)


def recomputed(build: Callable[[], nn.Module], layers: str, *, reentrant: bool) -> nn.Module:
    network = build()
    owner: Any = network.get_submodule(layers)
    for number, layer in enumerate(owner):
        owner[number] = Recomputed(layer, reentrant=reentrant)
    return network


@pytest.mark.threads_only
@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize(("name", "layers"), [("gpt-dropout", "h"), ("resnet", "layers"), ("experts-in-one-tensor", "h")])
def test_recomputed_layers_train_as_those_of_one_machine(world: World, name: str, layers: str, reentrant: bool) -> None:
    case = CASES[name]
    check_case(world, replace(case, build=partial(recomputed, case.build, layers, reentrant=reentrant)))
