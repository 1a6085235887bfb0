"""DRPM settles, does not oscillate, and what the published rule does in the same runs."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from retiling_rig import run, start

from tatami.cluster import Cluster, Processor
from tatami.retiling import DecisionKind, Retiler
from tatami.tiling import Layout, Replica, plan
from tatami.tiling.memory import memory_bytes
from tatami.workload import Block, Workload

BALANCED = 1.25
FINE = Workload.mlp(203, 400, 26, samples=1024)
"""So many units that rounding to whole ones is no part of the question."""
SPEED = st.floats(0.2, 1.0)


@pytest.mark.parametrize("rule", ["settling", "published"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_from_no_knowledge_it_settles_by_the_third_check(rule: str, noise: float) -> None:
    trial = run(
        [1, 1, 0.5, 0.25], retiler=Retiler.published() if rule == "published" else Retiler(rule="settling"), noise=noise
    )
    assert trial.imbalance == 4.0
    first, *_ = trial.checks(3)
    assert first.kind is DecisionKind.WHOLE
    assert trial.imbalance < BALANCED
    assert [decision.kind for decision in trial.checks(8)] == [DecisionKind.KEEP] * 8


def test_a_network_without_blocks_gets_its_samples_by_speed() -> None:
    workload = Workload(samples=700, replicated_parameters=100, replicated_flop_per_sample=1000)
    trial = run([1, 1, 0.5, 0.25], workload=workload)
    assert trial.imbalance == 4.0
    trial.checks(3)
    assert trial.imbalance < 1.05
    assert not any(decision.remaps for decision in trial.checks(8))
    sizes = [trial.controller.tiling.by_processor[f"p{rank}"].samples.size for rank in range(4)]
    assert sizes == pytest.approx([254.5, 254.5, 127.3, 63.6], abs=1)


@pytest.mark.parametrize("noise", [0.0, 0.03])
def test_blocks_that_do_not_divide_do_not_keep_it_busy(noise: float) -> None:
    """Six heads over four unequal ranks are never quite even."""
    heads = Block(units=6, unit_parameters=900, forward_elements=64, backward_elements=64, flop_per_unit=3e5)
    hidden = Block(units=768, unit_parameters=128, forward_elements=64, backward_elements=64, flop_per_unit=5e3)
    workload = Workload(samples=64, blocks=(heads, hidden) * 4, replicated_flop_per_sample=10**5)
    trial = run([1, 0.9, 0.5, 0.25], workload=workload, noise=noise)
    before = trial.imbalance
    trial.checks(4)
    assert trial.imbalance < before / 2
    assert not any(decision.remaps for decision in trial.checks(8))


@pytest.mark.parametrize("planner", ["timed", "srpm", "weighted"])
@pytest.mark.parametrize("slow", ["p0", "p3"])
def test_no_re_tiling_lays_more_on_a_processor_than_it_holds(planner: str, slow: str) -> None:
    """What a processor holds is 1.2 times an even share of the weights, and of the samples."""
    workload = Workload.mlp(203, 400, 26, samples=1024)
    share = memory_bytes(
        plan("even", cluster=Cluster.from_speeds([1.0] * 4), workload=workload).layout, workload=workload
    ).values()
    limit = round(1.2 * max(share))
    processors = tuple(Processor(name=f"p{rank}", speed=1.0, memory_bytes=limit) for rank in range(4))
    cluster = Cluster(processors=processors)
    layout = plan(planner, cluster=cluster, workload=workload).layout
    trial = start(
        layout, cluster=cluster, speeds=[1, 1, 0.9, 0.9], workload=workload, retiler=Retiler(planner=planner, rule="settling")
    )
    trial.checks(2)
    trial.speeds[slow] /= 3
    before = trial.imbalance
    for decision in trial.checks(6):
        assert isinstance(decision.layout, Layout)
        assert max(memory_bytes(decision.layout, workload=workload).values()) <= limit
    assert trial.imbalance < before, "within its memory it is relieved"


@pytest.mark.parametrize("slow", ["p0", "p1", "p2", "p3"])
@pytest.mark.parametrize("noise", [0.0, 0.03])
@pytest.mark.parametrize("offset", [0, 7, 16, 19])
def test_after_a_rank_became_slower_by_3_it_settles_by_the_third_check(slow: str, noise: float, offset: int) -> None:
    trial = run([1, 1, 0.5, 0.25], noise=noise)
    trial.checks(3)
    trial.iterations(offset)
    trial.speeds[slow] /= 3
    assert trial.imbalance > 2.5
    trial.checks(3)
    assert trial.imbalance < BALANCED
    assert not any(decision.remaps for decision in trial.checks(8))


@settings(max_examples=60, deadline=None)
@given(speeds=st.lists(SPEED, min_size=2, max_size=6), data=st.data(), offset=st.integers(0, 19), known=st.booleans())
def test_it_settles_whoever_becomes_slower_whenever(speeds: list[float], data: st.DataObject, offset: int, known: bool) -> None:
    trial = run(speeds, workload=FINE, known=known)
    trial.checks(3)
    assert trial.imbalance < BALANCED
    trial.iterations(offset)
    trial.speeds[data.draw(st.sampled_from(list(trial.speeds)))] *= data.draw(st.sampled_from([1 / 3, 1 / 2, 2 / 3]))
    trial.checks(3)
    assert trial.imbalance < BALANCED
    assert not any(decision.remaps for decision in trial.checks(4))


@settings(max_examples=60, deadline=None)
@given(speeds=st.lists(SPEED, min_size=2, max_size=6), data=st.data(), factor=st.sampled_from([2.0, 3.0]))
def test_who_becomes_faster_gets_more_unless_hardly_anybody_would_notice(
    speeds: list[float], data: st.DataObject, factor: float
) -> None:
    trial = run(speeds, workload=FINE, known=True)
    trial.checks(3)
    trial.speeds[data.draw(st.sampled_from(list(trial.speeds)))] *= factor
    trial.checks(3)
    slowest = max(tile.area / trial.speeds[tile.processor] for tile in trial.controller.tiling.tiles)
    ideal = FINE.samples * FINE.units / sum(trial.speeds.values())
    assert trial.imbalance < BALANCED or slowest * 0.94 < ideal
    assert not any(decision.remaps for decision in trial.checks(4))


@settings(max_examples=60, deadline=None)
@given(speeds=st.lists(SPEED, min_size=1, max_size=8), seed=st.integers(0, 10**6))
def test_a_balanced_run_with_noise_is_left_alone(speeds: list[float], seed: int) -> None:
    trial = run(speeds, known=True, noise=0.1, seed=seed)
    assert trial.imbalance < BALANCED
    assert not any(decision.remaps for decision in trial.checks(10))


@settings(max_examples=60, deadline=None)
@given(speeds=st.lists(SPEED, min_size=2, max_size=8), seed=st.integers(0, 10**6))
def test_once_balanced_from_no_knowledge_noise_moves_nothing_any_more(speeds: list[float], seed: int) -> None:
    trial = run(speeds, noise=0.1, seed=seed)
    for check in range(10):
        balanced = trial.imbalance < BALANCED
        (decision,) = trial.checks(1)
        # The first check may improve on what is balanced already; it knows nothing yet.
        assert not (balanced and decision.remaps and check), decision


def test_equal_processors_start_even_and_stay_so() -> None:
    trial = run([1, 1, 1, 1])
    (decision,) = trial.checks(1)
    assert str(decision) == "check 1 (iteration 20): compute min/max 1.00 >= 0.95: keep"


def between_replicas(rule: Retiler, *, slow: float) -> list[DecisionKind]:
    """Two replicas of two equal processors each; the second replica has become slower by the same factor throughout."""
    half = Replica(width=0.5, processors=("p0", "p1"), heights=(0.5, 0.5))
    other = Replica(width=0.5, processors=("p2", "p3"), heights=(0.5, 0.5))
    trial = start(Layout(replicas=(half, other)), cluster=Cluster.from_speeds([1] * 4), speeds=[1, 1, slow, slow], retiler=rule)
    return [decision.kind for decision in trial.checks(10)]


@pytest.mark.parametrize("slow", [0.45, 0.5, 0.6, 0.7])
def test_an_imbalance_between_replicas_is_mended_at_once_and_by_the_published_rule_never(slow: float) -> None:
    assert between_replicas(Retiler(rule="settling"), slow=slow) == [DecisionKind.WHOLE] + [DecisionKind.KEEP] * 9
    assert between_replicas(Retiler.published(), slow=slow) == [DecisionKind.REPLICAS] * 10


def test_a_slow_member_is_seen_through_the_wait_that_hides_it_from_the_published_rule() -> None:
    pair = Layout(replicas=(Replica(width=1.0, processors=("p0", "p1"), heights=(0.5, 0.5)),))
    found = {}
    for rule in (Retiler(rule="settling"), Retiler.published()):
        trial = start(pair, cluster=Cluster.from_speeds([1, 1]), speeds=[1, 0.68], retiler=rule)
        found[rule.rule] = ([decision.kind for decision in trial.checks(5)], trial.imbalance)
    kinds, imbalance = found["settling"]
    assert kinds == [DecisionKind.REPLICAS] + [DecisionKind.KEEP] * 4
    assert imbalance < 1.05
    kinds, imbalance = found["published"]
    assert kinds == [DecisionKind.KEEP] * 5
    assert imbalance == pytest.approx(1 / 0.68)


@pytest.mark.parametrize("overhead_s", [0.0005, 0.002, 0.005])
def test_times_that_do_not_grow_with_the_area_settle_too(overhead_s: float) -> None:
    trial = run([1, 1, 0.5, 0.25], overhead_s=overhead_s)
    trial.checks(4)
    assert trial.imbalance < BALANCED
    assert not any(decision.remaps for decision in trial.checks(6))


def test_whole_units_and_samples_end_the_search() -> None:
    coarse = Workload.mlp(3, 5, 2, samples=6)
    trial = run([1, 0.9, 0.8, 0.35], workload=coarse)
    trial.checks(3)
    assert not any(decision.remaps for decision in trial.checks(10))


def test_forecasts_that_are_always_wrong_do_not_move_rows_for_ever() -> None:
    """Speeds that turn against every tiling: whoever gets more work becomes slower than it was."""

    def perverse(rule: Retiler) -> int:
        trial = start(
            Layout(replicas=(Replica(width=1.0, processors=("p0", "p1"), heights=(0.5, 0.5)),)),
            cluster=Cluster.from_speeds([1, 1]),
            speeds=[1, 0.6],
            retiler=rule,
        )
        moved = 0
        for _ in range(30):
            (decision,) = trial.checks(1)
            if decision.remaps:
                moved += 1
                more = max(trial.controller.tiling.tiles, key=lambda tile: tile.area).processor
                trial.speeds = {name: 0.6 if name == more else 1.0 for name in trial.speeds}
        return moved

    assert perverse(Retiler(rule="settling")) <= 4
    assert perverse(Retiler(rule="published", t_line=0.9)) >= 10
