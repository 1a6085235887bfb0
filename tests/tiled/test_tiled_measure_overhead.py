"""What a rank spends on each sample beside its units: found again from clocks that know it."""

from dataclasses import replace
from unittest.mock import patch

import pytest
from torch import nn

from hand_clock import HandClock
from tatami.cluster import Cluster
from tatami.comm import AbstractCommunicator
from tatami.errors import PlanError
from tatami.measure import speeds
from tatami.testing.worlds import World
from tatami.train import measure_sample_flop, measure_speeds, tile
from tatami.workload import Block, Workload

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
def test_finds_what_each_sample_costs(world: World) -> None:
    clock = HandClock()

    def body(comm: AbstractCommunicator) -> None:
        with patch.object(speeds, "BlockPass", fake_pass(clock)):
            found = measure_sample_flop(WORKLOAD, comm, clock=clock)
            assert found == pytest.approx(SAMPLE_FLOP, rel=1e-9)
            told = measure_speeds(replace(WORKLOAD, sample_flop=found), comm, clock=clock)
            assert told[0].flop_per_s == pytest.approx(FLOP_PER_S, rel=0.01), "Table 1's own few flop for each sample aside"

    world(body)


@pytest.mark.threads_only
@pytest.mark.ranks(1)
@pytest.mark.parametrize("slower", [-0.1, 0.0, 0.05])
def test_units_whose_time_drowns_in_noise_are_not_taken_for_free(world: World, slower: float) -> None:
    """All units take no longer than an eighth of them, or hardly: a tenth of the time is theirs all the same."""
    clock = HandClock()
    most_flop = WORKLOAD.flop(width=1.0, height=1.0)

    class Fake:
        def __init__(self, block: Block, *, samples: int, dtype: object, device: object) -> None:  # noqa: ARG002
            self.seconds = 1e-3 * (1 + slower * (block.units == WORKLOAD.blocks[0].units))

        def run(self) -> None:
            clock.sleep(self.seconds)

    def body(comm: AbstractCommunicator) -> None:
        with patch.object(speeds, "BlockPass", Fake):
            found = measure_sample_flop(WORKLOAD, comm, clock=clock)
            assert found == pytest.approx((9 * 7 / 8 - 1 / 8) * most_flop / WORKLOAD.samples, rel=0.01)
            told = measure_speeds(replace(WORKLOAD, sample_flop=found), comm, clock=clock)
            assert told[0].flop_per_s == pytest.approx(8.75 * most_flop / (1e-3 * (1 + slower)), rel=0.01)

    world(body)


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
def test_a_model_knows_what_was_probed_of_its_blocks(world: World) -> None:
    cluster = replace(Cluster.from_speeds([1.0, 1.0]), sample_flop={"20-64-5": SAMPLE_FLOP, "20-32-5": 1.0})

    def body(comm: AbstractCommunicator) -> None:
        for units, sample_flop in ((64, SAMPLE_FLOP), (32, 1.0), (16, 0.0)):
            network = nn.Sequential(nn.Linear(20, units), nn.Sigmoid(), nn.Linear(units, 5))
            model = tile(network, comm, speeds=cluster, batch_size=8, quiet=True)
            assert model.workload.sample_flop == sample_flop
            model.close()

    world(body)
