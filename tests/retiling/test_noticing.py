"""Detection: its constants, its alarms and its calm, on drawn samples of known changes."""

import math

import numpy as np
import pytest

from tatami.retiling.noticing import Detector, Vector, log
from tatami.retiling.thresholds import FALSE_ALARMS, sums_for


def markov_time_between(k: float, h: float, *, cells: int = 400) -> float:
    """The mean time between false alarms of a one-sided CUSUM by a chain of `cells` states (Brook and Evans 1972)."""
    width = 2 * h / (2 * cells - 1)

    def below(value: float) -> float:
        return 0.5 * math.erfc(-value / math.sqrt(2))

    moves = np.zeros((cells, cells))
    for row in range(cells):
        for replica in range(cells):
            high = below((replica - row + 0.5) * width + k)
            moves[row, replica] = high - (below((replica - row - 0.5) * width + k) if replica else 0.0)
    return float(np.linalg.solve(np.eye(cells) - moves, np.ones(cells))[0])


def samples(rng: np.random.Generator, shape: tuple[int, ...], *, noise: float, outliers: float = 0.01) -> Vector:
    return np.exp(noise * rng.standard_normal(shape)) * np.where(rng.random(shape) < outliers, 3.0, 1.0)


def mean_time_between(k: float, h: float) -> float:
    """Samples from one false alarm of a one-sided CUSUM to the next in normal noise: Siegmund's approximation."""
    b = h + 1.166
    return (math.exp(2 * k * b) - 2 * k * b - 1) / (2 * k * k)


@pytest.mark.parametrize(("k", "h"), [(0.5, 4.0), (1.0, 2.5), (1.5, 2.0)])
def test_siegmunds_approximation_is_within_a_third_of_the_chain(k: float, h: float) -> None:
    assert mean_time_between(k, h) == pytest.approx(markov_time_between(k, h, cells=150), rel=0.33)


def test_an_alarm_takes_as_many_samples_as_stalls_demand() -> None:
    for ranks, in_a_row in ((2, 3), (8, 3), (1000, 4)):
        fast, _ = sums_for(ranks)
        assert (in_a_row - 1) * (fast.clip - fast.k) < fast.h < in_a_row * (fast.clip - fast.k)
        assert in_a_row * (fast.far_clip - fast.k) < fast.h < (in_a_row + 1) * (fast.far_clip - fast.k)
        # Normal noise has a tenth of the false alarms.
        assert 2 * ranks / mean_time_between(fast.k, fast.h) == pytest.approx(0.1 * FALSE_ALARMS, rel=0.01)


def test_the_logarithm_needs_no_library() -> None:
    values = np.exp(np.linspace(-20, 20, 1001))
    assert np.abs(log(values) - np.log(values)).max() < 1e-9


@pytest.mark.parametrize(
    ("noise", "slower", "median", "most"),
    [(0.02, 1.1, 3, 5), (0.05, 1.25, 3, 5), (0.05, 0.75, 3, 5), (0.1, 1.5, 4, 6), (0.05, 5.0, 4, 4)],
)
def test_a_change_is_noticed_within_few_samples_and_its_size_told(noise: float, slower: float, median: int, most: int) -> None:
    rng = np.random.default_rng(1)
    runs = 150
    detector = Detector((runs, 8))
    for _ in range(120):
        detector.step(samples(rng, (runs, 8), noise=noise))
    delays = np.full(runs, 99)
    began = np.zeros(runs)
    for after in range(1, 20):
        values = samples(rng, (runs, 8), noise=noise)
        values[:, 5] *= slower
        fresh = detector.step(values)[:, 5] & (delays == 99)
        delays[fresh] = after
        began[fresh] = after - detector.count[fresh, 5] + 1
    assert np.median(delays) <= median
    assert np.percentile(delays, 95) <= most
    assert np.median(began) == 1
    # Nothing else changed, and the level is known as well as is said.
    assert not (np.abs(np.log(detector.level[:, :5])) > 0.1 + noise).any()
    off = np.abs(np.log(detector.level[:, 5] / slower)) / detector.error[:, 5]
    assert np.median(off) < 1.0
    assert np.percentile(off, 95) < 4.0


def test_what_noise_did_before_a_change_is_no_part_of_it() -> None:
    detector = Detector((1,))
    for number in range(100):
        detector.step(np.array([1.02 if number % 2 else 0.98]))
    # Four samples at the upper end of the noise, so that the sums are above 0 when the change comes.
    for _ in range(3):
        assert not detector.step(np.array([1.06])).any()
    found = 0
    for after in range(1, 6):
        if detector.step(np.array([3.0])).any():
            found = after
            break
    assert found
    assert detector.count[0] == found
    assert detector.level[0] == 3.0


@pytest.mark.parametrize("noise", [0.02, 0.05, 0.1])
def test_noise_and_stalls_alone_make_at_most_a_few_alarms_in_a_hundred_thousand(noise: float) -> None:
    rng = np.random.default_rng(2)
    runs, iterations = 200, 500
    detector = Detector((runs, 8))
    alarms = sum(int(detector.step(samples(rng, (runs, 8), noise=noise)).any(axis=1).sum()) for _ in range(iterations))
    assert alarms <= 4  # 1 is expected at the stated rate


def test_a_slow_drift_carries_the_level_along() -> None:
    rng = np.random.default_rng(3)
    detector = Detector((4,))
    for iteration in range(1200):
        drift = 1 + 0.3 * min(1.0, iteration / 900)
        detector.step(samples(rng, (4,), noise=0.03) * np.array([drift, 1, 1, 1]))
    assert detector.level[0] == pytest.approx(1.3, rel=0.02)
    assert detector.level[1] == pytest.approx(1.0, rel=0.02)


def test_one_run_among_many_and_alone_give_the_same_bits() -> None:
    rng = np.random.default_rng(4)
    values = samples(rng, (300, 3, 4), noise=0.05)
    values[150:, 1, 2] *= 1.4
    together, alone = Detector((3, 4)), Detector((4,))
    for row in values:
        assert (together.step(row)[1] == alone.step(row[1])).all()
        assert np.array_equal(together.level[1], alone.level, equal_nan=True)
        assert np.array_equal(together.noise[1], alone.noise, equal_nan=True)


def test_ranks_and_links_side_by_side_give_the_bits_of_each_alone() -> None:
    rng = np.random.default_rng(6)
    values = samples(rng, (200, 7), noise=0.05)
    values[100:, 2] *= 1.4
    values[120:, 5] *= 3.0
    values[rng.random((200, 7)) < 0.1] = np.nan
    both, ranks, links = Detector((7,), kinds=(4, 3)), Detector((4,)), Detector((3,))
    changes = 0
    for row in values:
        changed = both.step(row)
        changes += int(changed.sum())
        assert list(changed) == [*ranks.step(row[:4]), *links.step(row[4:])]
        assert np.array_equal(both.level, np.concatenate((ranks.level, links.level)), equal_nan=True)
        assert np.array_equal(both.error, np.concatenate((ranks.error, links.error)), equal_nan=True)
    assert changes == 2


def test_after_a_re_tiling_levels_are_forgotten_and_the_noise_of_ranks_is_not() -> None:
    rng = np.random.default_rng(7)
    before = Detector((5,), kinds=(3, 2))
    for values in samples(rng, (100, 5), noise=0.05):
        before.step(values)
    after = before.renewed((3, 4))
    assert after.level.shape == (7,)
    assert np.isnan(after.level).all()
    assert list(after.noise[:3]) == list(before.noise[:3])
    assert np.isnan(after.noise[3:]).all()


def test_series_without_samples_wait() -> None:
    rng = np.random.default_rng(5)
    detector = Detector((3,))
    for iteration in range(200):
        values = samples(rng, (3,), noise=0.05)
        values[2] = 0.0 if iteration % 2 else values[2]
        values[0] = np.nan if iteration < 100 else values[0] * 2
        assert not detector.step(values).any()
    assert detector.level[0] == pytest.approx(2.0, rel=0.05)
    assert list(detector.count) == [100, 200, 100]


def remembering(rng: np.random.Generator, shape: tuple[int, ...], *, memory: float) -> Vector:
    """Times over the first axis whose noise, of 5 %, is so much of that before, and new for the rest."""
    noise = rng.standard_normal(shape)
    for at in range(1, len(noise)):
        noise[at] = memory * noise[at - 1] + np.sqrt(1 - memory * memory) * noise[at]
    return np.exp(0.05 * noise)


def test_noise_that_remembers_itself_counts_as_wider_and_other_noise_does_not() -> None:
    rng = np.random.default_rng(3)
    found = {}
    for memory in (0.0, 0.5):
        detector = Detector((20, 8))
        alarms = 0
        for values in remembering(rng, (600, 20, 8), memory=memory):
            alarms += int(detector.step(values).sum())
        found[memory] = alarms, float(np.median(detector.noise))
    assert found[0.0][0] == 0
    assert found[0.0][1] == pytest.approx(0.05, rel=0.1)
    # sqrt((1 + 1/2) / (1 - 1/2)) = 1.73, less a standard error; without it there are some 40 alarms.
    assert 1.4 * 0.05 < found[0.5][1] < 1.75 * 0.05
    assert found[0.5][0] <= 12
