"""What iterations cost beside flop and bytes: the networks that tell it, and what is made of their times."""

from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from hand_clock import HandClock
from tatami.cluster import Cluster
from tatami.comm import AbstractCommunicator
from tatami.comm.link_probe import measure_message_costs
from tatami.errors import PlanError
from tatami.measure import speeds
from tatami.model import overheads
from tatami.model.overheads import measure_overheads, messages_of, overheads_of, small_model
from tatami.train import measure_sample_flop, measure_speeds, tile
from tatami.workload import Block, Workload
from tiled_rig import Placed, simple_layout

mse: Any = F.mse_loss  # as torch has no type for `backward`
seconds = st.floats(0.0, 1e-2)


@given(call_s=seconds, step_s=seconds, message_s=seconds, few=st.integers(2, 50), more=st.integers(1, 500))
def test_three_times_tell_three_costs(call_s: float, step_s: float, message_s: float, few: int, more: int) -> None:
    messages = [few, few, few + more]
    spent_s = [step_s + blocks * call_s + count * message_s for blocks, count in zip((1, 4, 4), messages, strict=True)]
    found = overheads_of(spent_s, messages=messages)
    assert found.call_s == pytest.approx(call_s, abs=1e-9)
    assert found.message_s == pytest.approx(message_s, abs=1e-9)
    assert found.step_s == pytest.approx(step_s, abs=1e-6)


def test_what_noise_makes_negative_is_nothing() -> None:
    found = overheads_of([3e-3, 2e-3, 1e-3], messages=[8, 8, 20])
    assert (found.call_s, found.message_s, found.step_s) == (0.0, 0.0, 3e-3)
    assert overheads_of([3e-3, 6e-3, 6e-3], messages=[0, 0, 0]).message_s == 0.0


@pytest.mark.parametrize("messages", [[8, 8, 20], [0, 0, 0]])
def test_a_message_takes_no_less_than_one_of_a_burst(messages: list[int]) -> None:
    found = overheads_of([3e-3, 3e-3, 1e-3], messages=messages, least_message_s=1e-4)
    assert found.message_s == 1e-4
    assert found.step_s == pytest.approx(3e-3 - messages[0] * 1e-4)
    assert overheads_of([3e-3, 3e-3, 9e-3], messages=[8, 8, 20], least_message_s=1e-4).message_s == pytest.approx(5e-4)


@pytest.mark.ranks(2, 3, 4)
@pytest.mark.parametrize("blocks", [1, 4])
@pytest.mark.parametrize("is_row", [True, False])
def test_an_iteration_has_the_messages_that_it_is_divided_by(comm: AbstractCommunicator, is_row: bool, blocks: int) -> None:
    size = comm.size
    layout = simple_layout(*([rank] for rank in range(size))) if is_row else simple_layout(list(range(size)))
    apart = Placed(comm, hosts=tuple(f"host-{rank}" for rank in range(size)))
    model = small_model(apart, layout, blocks=blocks)
    x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
    mse(model(x), y).backward()  # the ranks compare their batches in the first pass
    x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
    mse(model(x), y).backward()
    x, y = model.local(torch.zeros(2 * size, 2 * size), torch.zeros(2 * size, 2 * size))
    parts = [each for each in (model.comm, model._replica.comm) if isinstance(each, Placed)]

    def num_messages() -> int:
        return sum(each.num_messages(name) for each in parts for name in ("isend", "irecv"))

    before = num_messages()
    mse(model(x), y).backward()
    counted, sent = messages_of(model), num_messages() - before
    assert counted == sent


@pytest.mark.ranks(1, 2, 3)
def test_it_is_measured_and_all_ranks_are_told(comm: AbstractCommunicator, monkeypatch: pytest.MonkeyPatch) -> None:
    """In groups of two, where there are more."""
    monkeypatch.setattr(overheads, "_TOGETHER", 2)
    before = torch.get_rng_state()
    found = measure_overheads(comm, measure_message_costs(comm, repeats=2), repeats=2)
    assert torch.equal(torch.get_rng_state(), before)
    assert comm.allgather_object(found) == [found] * comm.size
    for each in found:
        # A message is never for nothing, however noisy the machine; of the others, one may look so.
        assert each.message_s > 0 or comm.size == 1
        assert min(each.call_s, each.step_s) >= 0
        assert 0 < each.call_s + each.step_s + each.message_s < 100


WORKLOAD = Workload.mlp(20, 64, 5, samples=32)
FLOP_PER_S, SAMPLE_FLOP = 1e6, 700.0


def fake_pass(clock: HandClock) -> type:
    class Fake:
        def __init__(self, block: Block, *, samples: int, dtype: object, device: object) -> None:  # noqa: ARG002
            alone = Workload(samples=samples, blocks=(block,))
            self.seconds = (alone.flop(width=1.0, height=1.0) + SAMPLE_FLOP * samples) / FLOP_PER_S

        def run(self) -> None:
            clock.sleep(self.seconds)

    return Fake


@pytest.mark.threads_only
@pytest.mark.ranks(1)
def test_finds_what_each_sample_costs(comm: AbstractCommunicator) -> None:
    clock = HandClock()
    with patch.object(speeds, "BlockPass", fake_pass(clock)):
        found = measure_sample_flop(WORKLOAD, comm, clock=clock)
        assert found == pytest.approx(SAMPLE_FLOP, rel=1e-9)
        told = measure_speeds(replace(WORKLOAD, sample_flop=found), comm, clock=clock)
        assert told[0].flop_per_s == pytest.approx(FLOP_PER_S, rel=0.01), "Table 1's own few flop for each sample aside"


@pytest.mark.threads_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("slower", [-0.1, 0.0, 0.05])
def test_units_whose_time_drowns_in_noise_are_not_taken_for_free(comm: AbstractCommunicator, slower: float) -> None:
    """All units take no longer than an eighth of them, or hardly: a tenth of the time is theirs all the same."""
    clock = HandClock()
    most_flop = WORKLOAD.flop(width=1.0, height=1.0)

    class Fake:
        def __init__(self, block: Block, *, samples: int, dtype: object, device: object) -> None:  # noqa: ARG002
            self.seconds = 1e-3 * (1 + slower * (block.units == WORKLOAD.blocks[0].units))

        def run(self) -> None:
            clock.sleep(self.seconds)

    with patch.object(speeds, "BlockPass", Fake):
        found = measure_sample_flop(WORKLOAD, comm, clock=clock)
        assert found == pytest.approx((9 * 7 / 8 - 1 / 8) * most_flop / WORKLOAD.samples, rel=0.01)
        told = measure_speeds(replace(WORKLOAD, sample_flop=found), comm, clock=clock)
        assert told[0].flop_per_s == pytest.approx(8.75 * most_flop / (1e-3 * (1 + slower)), rel=0.01)


def test_is_the_same_on_all_ranks_and_never_negative(comm: AbstractCommunicator) -> None:
    found = measure_sample_flop(WORKLOAD, comm, repeats=1, repeat_s=1e-4)
    assert found >= 0.0
    assert set(comm.allgather_object(found)) == {found}


def test_plans_reckon_with_it() -> None:
    dear = Workload(samples=100, blocks=WORKLOAD.blocks, sample_flop=SAMPLE_FLOP)
    plain = Workload(samples=100, blocks=WORKLOAD.blocks)
    for width, height in ((1.0, 1.0), (0.25, 0.5), (0.5, 0.0)):
        more = dear.flop(width=width, height=height) - plain.flop(width=width, height=height)
        assert more == pytest.approx(100 * width * SAMPLE_FLOP)
    assert dear.flop_per_width - plain.flop_per_width == pytest.approx(100 * SAMPLE_FLOP)
    with pytest.raises(PlanError, match="sample_flop of a workload must be a finite number >= 0, not -1"):
        Workload(samples=1, blocks=WORKLOAD.blocks, sample_flop=-1)


@pytest.mark.ranks(2)
def test_a_model_knows_what_was_probed_of_its_blocks(comm: AbstractCommunicator) -> None:
    cluster = replace(Cluster.from_speeds([1.0, 1.0]), sample_flop={"20-64-5": SAMPLE_FLOP, "20-32-5": 1.0})
    for units, sample_flop in ((64, SAMPLE_FLOP), (32, 1.0), (16, 0.0)):
        network = nn.Sequential(nn.Linear(20, units), nn.Sigmoid(), nn.Linear(units, 5))
        model = tile(network, comm, speeds=cluster, batch_size=8, quiet=True)
        assert model.workload.sample_flop == sample_flop
        model.close()
