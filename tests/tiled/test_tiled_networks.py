"""Networks that people train, as they come: which blocks are found, and that tiled runs equal plain ones."""

from __future__ import annotations

import pytest
import torch
from equal_runs import check_equal
from networks import CASES, build

from tatami.testing.worlds import World
from tatami.tiled import find_blocks


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
    check_equal(world, CASES[name])


@pytest.mark.threads_only  # each process would follow all of them again
@pytest.mark.parametrize("name", sorted(set(CASES) - {"gpt-dropout", "llama", "resnet"}))
def test_more_tiled_networks_equal_the_plain_ones(world: World, name: str) -> None:
    check_equal(world, CASES[name])


@pytest.mark.threads_only
@pytest.mark.ranks(5, 6, 7, 8)  # on 1 to 4 ranks like all other networks
def test_six_heads_on_any_number_of_ranks(world: World) -> None:
    check_equal(world, CASES["gpt"])
