"""How soon a slow machine is noticed, how often nothing is taken for something, and what it costs: on drawn traces.

    python benchmarks/detection.py --out benchmarks/results/detection.json

A trace is a run of 2,000 iterations of one second on 8 equal ranks, whose times have normal noise and, one in a hundred, three
times the length. One thing happens in each: a rank takes 10, 25 or 50 % longer, is stopped for half a second in one iteration
of twenty, drifts to 25 % longer within 300 iterations, or a link takes twice as long. It lasts as in the jobs that Greyhound
(USENIX ATC 2025) observed: 10 minutes in the mean for ranks and 24 for links, exponentially distributed. Pure arithmetic from a
seed: the figures do not depend on the machine.

The rule's constants were tuned on these. What they are worth elsewhere is judged on times that they were not tuned on, with
seeds of their own: "stalls" of 1.3 to 2 times instead of three, "heavy tails" (Student's t with 4 degrees of freedom, as
wide) instead of normal noise, "remembering" noise, each sample half the one before (first order, 0.5), and "bursts", a
quarter of the time in the mean, 50 iterations long, in which a rank's noise is twice as wide. That noise which remembers
itself counts as wider was added when the first figures for "remembering" were seen; "bursts" were drawn only after that,
and nothing was changed since.

What is paid: with the slow rank an iteration takes s instead of 1, after a move 8 / (7 + 1 / s), until the end; a move costs
its price, drawn from 0.1 to 60 s. The oracle knows when the change ends, and stays or moves at once, and back at once or not.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from tatami.retiling.noticing import Detector
from tatami.retiling.ski_rental import Rental
from tatami.retiling.thresholds import FALSE_ALARMS

RANKS, ITERATIONS = 8, 2000
NOISES = (0.02, 0.05, 0.10)
KINDS = {"10 %": 1.10, "25 %": 1.25, "50 %": 1.50, "stops": 1.0, "drift": 1.25, "link x 2": 2.0}
RULES = ("notice", "settling", "published", "300 s")
OUTLIER_SHARE, OUTLIER = 0.01, 3.0
EVERY, WINDOW, T_LINE, CERTAINTY, MIN_GAIN = 20, 6, 0.8, 3.0, 0.05
LOOK_S, LOOK_BELOW = 300, 0.7
GRACE = 150
"""Iterations after the beginning, the end, or during a drift, in which an alarm of the rank concerned is no false one."""

TUNED, HELD_OUT = "as tuned", ("stalls", "heavy tails", "remembering", "bursts")
MEMORY = 0.5

HEAD = """# Noticing slow machines, on drawn traces

Written by `python benchmarks/detection.py --out benchmarks/results/detection.json`: at least 1,000 traces of each source
of times (1,008: 56 in each cell), seed {seed}; how they are drawn is told at the head of that file. Arithmetic from a
seed: the figures do not depend on the machine. Missed are changes that ended unnoticed. False alarms are counted in
10,000 iterations of a run of 8 ranks; a cell has 112,000 iterations, so that one false alarm is 0.09. "No rule before" is
what no rule with as few false alarms can do without in the mean. "Time lost" is loss and moves over the time of a run
without any change; "lost / oracle" is of whole traces, what was lost before the alarm included.

"""

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class Traces:
    """All runs of one noise and kind; rank 0 is the one concerned.

    Attributes:
        factor: what the time of rank 0 is multiplied by, (iterations, runs).
        begin, end: of the change, in iterations from 0.
        price_s: of moving.
    """

    noise: float
    kind: str
    factor: Array
    begin: NDArray[np.int64]
    end: NDArray[np.int64]
    price_s: Array


def draw(noise: float, kind: str, *, runs: int, rng: np.random.Generator) -> Traces:
    begin = rng.integers(300, 900, runs)
    length = np.ceil(rng.exponential(1440.0 if kind.startswith("link") else 600.0, runs)).astype(np.int64)
    end = np.minimum(begin + length, ITERATIONS)
    at = np.arange(ITERATIONS)[:, None]
    inside = (at >= begin) & (at < end)
    factor = np.where(inside, KINDS[kind], 1.0)
    if kind == "drift":
        factor = np.where(inside, 1.0 + 0.25 * np.minimum((at - begin) / 300.0, 1.0), 1.0)
    elif kind == "stops":
        factor = np.where(inside & (rng.random((ITERATIONS, runs)) < 0.05), 1.5, 1.0)
    return Traces(
        noise=noise, kind=kind, factor=factor, begin=begin, end=end, price_s=np.exp(rng.uniform(np.log(0.1), np.log(60), runs))
    )


def times_of(traces: Traces, rng: np.random.Generator, *, source: str = TUNED) -> Array:
    """(iterations, runs, ranks)."""
    shape = (*traces.factor.shape, RANKS)
    if source == "heavy tails":
        noise = (rng.standard_t(4, shape) / np.sqrt(2.0)).astype(np.float32)
    else:
        noise = rng.standard_normal(shape, dtype=np.float32)
    if source == "remembering":
        for at in range(1, len(noise)):
            noise[at] = MEMORY * noise[at - 1] + np.sqrt(1 - MEMORY * MEMORY) * noise[at]
    if source == "bursts":
        wide = np.zeros(shape[1:], dtype=bool)
        for at in range(len(noise)):
            wide ^= rng.random(shape[1:]) < np.where(wide, 1 / 50, 1 / 150)
            noise[at] *= np.where(wide, 2.0, 1.0)
    times = np.exp(traces.noise * noise).astype(np.float64)
    stalled = rng.random(shape, dtype=np.float32) < OUTLIER_SHARE
    times *= np.where(stalled, rng.uniform(1.3, 2.0, shape) if source == "stalls" else OUTLIER, 1.0)
    times[:, :, 0] *= traces.factor
    drawn: Array = times
    return drawn


def alarms_of(rule: str, times: Array) -> NDArray[np.bool_]:
    """Where the rule says that a rank has changed, (iterations, runs, ranks)."""
    found = np.zeros(times.shape, dtype=bool)
    if rule == "notice":
        detector = Detector(times.shape[1:])
        for iteration, values in enumerate(times):
            found[iteration] = detector.step(values)
        return found
    # A rule with thresholds sees a state and no change: what it last said counts as known.
    known = np.zeros(times.shape[1:], dtype=bool)
    every = LOOK_S if rule == "300 s" else EVERY
    for last in range(every, len(times) + 1, every):
        slow = _slow(rule, times[:last])
        found[last - 1] = slow != known
        known = slow
    return found


def _slow(rule: str, times: Array) -> NDArray[np.bool_]:
    """Which rank a threshold takes for too slow."""
    if rule == "300 s":
        mean = times[-LOOK_S:].mean(axis=0)
        slow: NDArray[np.bool_] = np.sort(mean, axis=-1)[:, [RANKS // 2]] < LOOK_BELOW * mean
        return slow
    recent = times[-WINDOW:]
    if rule == "published":
        # t1 of two replicas of four: forward, the wait for the slowest of the replica, backward.
        replicas = recent.reshape(*recent.shape[:-1], 2, RANKS // 2)
        waits = 0.4 * replicas.max(axis=-1, keepdims=True)
        mean = (waits + 0.5 * replicas).reshape(recent.shape).mean(axis=0)
        low: NDArray[np.bool_] = np.less(mean.min(axis=-1), T_LINE * mean.max(axis=-1))
    else:
        mean = recent.mean(axis=0)
        low = np.zeros(len(mean), dtype=bool)
        for window in (recent, times[-8 * EVERY :].reshape(-1, EVERY, *times.shape[1:])[:, -WINDOW:].reshape(-1, *mean.shape)):
            own = window.mean(axis=0)
            variance = (window.std(axis=0, ddof=1) / own) ** 2
            error = np.sqrt(2 * variance.mean(axis=-1) / len(window))
            low |= (own.min(axis=-1) / own.max(axis=-1)) * (1 + CERTAINTY * error) < T_LINE
    slowest = mean == mean.max(axis=-1, keepdims=True)
    low_ranks: NDArray[np.bool_] = np.logical_and(slowest, low[:, None])
    return low_ranks


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One rule on all runs of one noise and kind.

    Attributes:
        delay: iterations until it was noticed, of those that were: the median.
        delay_95: the same, of 95 % of them.
        missed: fraction of changes that ended unnoticed.
        false: alarms for nothing, in 10,000 iterations of a run.
        lost: the mean of what was paid over what the run takes without any change: loss and moves.
        oracle: the same of the oracle.
        ratio: the sum of what was paid in all runs, over the oracle's.
        bound: iterations that no rule with as few false alarms can do without in the mean; None where it is not known.
        worst: the most that was paid, over the oracle's, counted from the alarm; only for the rule that weighs prices.
    """

    rule: str
    source: str
    noise: float
    kind: str
    runs: int
    delay: float | None
    delay_95: float | None
    missed: float
    false: float
    lost: float
    oracle: float
    ratio: float
    bound: float | None
    worst: float | None


def least_delay(noise: float, kind: str) -> float | None:
    """Of any rule for changes that stay, log(1 / rate of false alarms) / KL (Lorden 1971), for times as tuned.

    KL is the divergence of the times of a slower rank from those of the same rank before, normal with stalls in both. Which
    rank it is and how much slower is taken as known: the rule knows neither, so this is less than it could reach.
    """
    if kind in ("stops", "drift"):
        return None
    shift, stall = np.log(KINDS[kind]) / noise, np.log(OUTLIER) / noise
    x = np.arange(-12.0, shift + stall + 12.0, 0.01)

    def log_density(at: Array) -> Array:
        calm, stalled = np.log(1 - OUTLIER_SHARE) - at**2 / 2, np.log(OUTLIER_SHARE) - (at - stall) ** 2 / 2
        found: Array = np.logaddexp(calm, stalled) - 0.5 * np.log(2 * np.pi)
        return found

    after, before = log_density(x - shift), log_density(x)
    divergence = float((np.exp(after) * (after - before)).sum() * 0.01)
    return float(np.log(1 / FALSE_ALARMS) / divergence)


def measure(rule: str, traces: Traces, alarms: NDArray[np.bool_], *, source: str = TUNED) -> Cell:
    runs = alarms.shape[1]
    at = np.arange(ITERATIONS)[:, None]
    own: NDArray[np.bool_] = alarms[:, :, 0]
    drifting = traces.kind in ("drift", "stops")
    near_begin = (at >= traces.begin) & (at < (traces.end if drifting else traces.begin + GRACE) + (GRACE if drifting else 0))
    near = near_begin | ((at >= traces.end) & (at < traces.end + (GRACE if rule == "notice" else LOOK_S)))
    if rule != "notice":
        near |= (at >= traces.begin) & (at < traces.end)
    num_false = int((own & ~near).sum() + alarms[:, :, 1:].sum())
    if rule != "notice":
        # A threshold says when it takes a rank for slow, and when it no longer does: one false alarm, not two.
        num_false = -(-num_false // 2)
    inside = own & (at >= traces.begin) & (at < traces.end)
    noticed = np.asarray(inside.any(axis=0))
    first = inside.argmax(axis=0)
    delays = (first - traces.begin + 1)[noticed]
    paid, oracle, worst = [], [], []
    for run in range(runs):
        back = np.flatnonzero(alarms[int(traces.end[run]) :, run, 0])
        one = _pay(
            rule,
            slow=traces.factor[:, run],
            begin=int(traces.begin[run]),
            end=int(traces.end[run]),
            noticed=int(first[run]) if noticed[run] else None,
            recovered=int(traces.end[run] + back[0]) if len(back) else None,
            price_s=float(traces.price_s[run]),
        )
        paid.append(one[0])
        oracle.append(one[1])
        worst.append(one[2])
    return Cell(
        rule=rule,
        source=source,
        noise=traces.noise,
        kind=traces.kind,
        runs=runs,
        delay=float(np.median(delays)) if len(delays) else None,
        delay_95=float(np.percentile(delays, 95)) if len(delays) else None,
        missed=float(1 - noticed.mean()),
        false=1e4 * num_false / (runs * ITERATIONS),
        lost=float(np.mean(paid)) / ITERATIONS,
        oracle=float(np.mean(oracle)) / ITERATIONS,
        ratio=float(np.sum(paid) / np.sum(oracle)),
        bound=least_delay(traces.noise, traces.kind) if source == TUNED else None,
        worst=max(worst) if rule == "notice" else None,
    )


def _pay(
    rule: str, *, slow: Array, begin: int, end: int, noticed: int | None, recovered: int | None, price_s: float
) -> tuple[float, float, float]:
    """What the rule pays, what the oracle pays, and the largest ratio of the two for one change, from its alarm on."""
    moved = RANKS / (RANKS - 1 + 1 / slow)
    loss = slow - moved
    beyond = float(slow[begin:end].max(initial=1.0))
    # After a move for a rank that is no longer slow, the others have too much.
    after = RANKS / (RANKS - 1 + 1 / beyond) - 1.0
    stay_s = float(loss[begin:end].sum())
    rest_s = after * (ITERATIONS - end)
    oracle_s = min(stay_s, price_s + min(price_s, rest_s))
    paid_s, worst = 0.0, 0.0
    gone = _moves_at(rule, loss[begin:end], noticed=None if noticed is None else noticed - begin + 1, price_s=price_s)
    if gone is None:
        return stay_s, oracle_s, 0.0 if noticed is None else 1.0
    before_s = float(loss[begin : begin + gone].sum())
    paid_s += before_s + price_s
    known_s = float(loss[begin : (noticed or begin) + 1].sum())
    whole_s = float(loss[begin:end].sum())
    worst = max(worst, (before_s + price_s) / max(known_s, min(whole_s, price_s)) if known_s < price_s else 0.0)
    back = _moves_at(
        rule, np.full(ITERATIONS - end, after), noticed=None if recovered is None else recovered - end + 1, price_s=price_s
    )
    paid_s += rest_s if back is None else after * back + price_s
    return paid_s, oracle_s, worst


def _moves_at(rule: str, loss: Array, *, noticed: int | None, price_s: float) -> int | None:
    """After how many iterations of the change the rule moves; None: it does not."""
    if noticed is None or noticed >= len(loss):
        return None
    if rule != "notice":
        return noticed
    account = Rental()
    account.lose(float(loss[:noticed].sum()))
    for iteration in range(noticed, len(loss)):
        if account.due(price_s, rate_s=float(loss[iteration])):
            return iteration
        account.lose(float(loss[iteration]))
    return None


def run(*, traces: int, seed: int) -> list[Cell]:
    """All cells; at least `traces` from each source: as many in each cell. Rules to compare with only where tuned."""
    runs = -(-traces // (len(NOISES) * len(KINDS)))
    cells = []
    for of, source in enumerate((TUNED, *HELD_OUT)):
        for index, (noise, kind) in enumerate((noise, kind) for noise in NOISES for kind in KINDS):
            rng = np.random.default_rng([seed, index] if source == TUNED else [seed, index, of])
            drawn = draw(noise, kind, runs=runs, rng=rng)
            times = times_of(drawn, rng, source=source)
            rules = RULES if source == TUNED else RULES[:1]
            cells += [measure(rule, drawn, alarms_of(rule, times), source=source) for rule in rules]
    return cells


def table(cells: list[Cell], *, source: str) -> str:
    lines = [
        "| what happens | noise | rule | noticed after (median) | (95 %) | no rule before | missed | false in 10,000 "
        "| time lost | oracle | lost / oracle |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    own = [cell for cell in cells if cell.source == source]
    for cell in sorted(own, key=lambda each: (list(KINDS).index(each.kind), each.noise, RULES.index(each.rule))):
        median, most = ("-" if each is None else f"{each:.0f}" for each in (cell.delay, cell.delay_95))
        lines.append(
            f"| {cell.kind} | {cell.noise:.0%} | {cell.rule} | {median} | {most} "
            f"| {'-' if cell.bound is None else f'{cell.bound:.1f}'} | {cell.missed:.0%} | {cell.false:.2f} "
            f"| {cell.lost:.2%} | {cell.oracle:.2%} | {cell.ratio:.2f} |"
        )
    return "\n".join(lines)


def summary(cells: list[Cell], *, source: str) -> str:
    """What the rule did over all cells of a source, the worst ones named."""
    own = [cell for cell in cells if cell.source == source and cell.rule == "notice"]
    false, ratio = max(own, key=lambda cell: cell.false), max(own, key=lambda cell: cell.ratio)
    num_traces = sum(cell.runs for cell in own)
    mean_false, mean_ratio = np.mean([cell.false for cell in own]), np.mean([cell.ratio for cell in own])
    worst = max(cell.worst or 0.0 for cell in own)
    return (
        f"notice, {source}, {num_traces:,} traces: {mean_false:.3f} false alarms in "
        f"10,000 iterations (most: {false.false:.2f}, {false.kind} at {false.noise:.0%}); whole traces cost "
        f"{mean_ratio:.2f} times the oracle's in the mean of the cells (most: {ratio.ratio:.2f}, "
        f"{ratio.kind} at {ratio.noise:.0%}); from its alarm on, a change at most {worst:.2f} times"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="a .json file; the tables go beside it, as .md")
    options = parser.parse_args()
    cells = run(traces=options.traces, seed=options.seed)
    parts = [
        f"## {source}\n\n{table(cells, source=source)}\n\n{summary(cells, source=source)}\n" for source in (TUNED, *HELD_OUT)
    ]
    print("\n".join(parts))
    if options.out:
        options.out.write_text(json.dumps({"seed": options.seed, "cells": [asdict(cell) for cell in cells]}, indent=1) + "\n")
        options.out.with_suffix(".md").write_text(HEAD.format(seed=options.seed) + "\n".join(parts))


if __name__ == "__main__":
    main()
