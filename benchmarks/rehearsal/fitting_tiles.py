"""Speeds and startups from tiles that were timed alone: t(w, h) = t0 + b w + a w h, fitted to all machines together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tatami.errors import InputError
from tatami.sim.tiling.work import Startup, work_of
from tatami.tiling import Span, Tile
from tatami.workload import Workload


@dataclass(frozen=True, kw_only=True)
class TimedTile:
    """One iteration of one tile by itself: `units` of the workload's first block for `samples`, in `seconds`."""

    units: int
    samples: int
    seconds: float


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was fitted.

    Attributes:
        flop_per_s: of each machine, at Table 1's work.
        startup: of every tile, in flop at that rate: the same on all machines.
    """

    flop_per_s: tuple[float, ...]
    startup: Startup


def calibrate(timings: Sequence[Sequence[TimedTile]], *, workload: Workload) -> Calibration:
    """Fit, by least squares of relative errors.

    Args:
        timings: of each machine, tiles of different heights and widths.
        workload: of one block.

    Raises:
        InputError: fewer than 3 tiles of a machine, or speeds that come out as none.
    """
    for machine, tiles in enumerate(timings):
        if len({(tile.units, tile.samples) for tile in tiles}) < 3:
            raise InputError(f"machine {machine} needs timings of at least 3 different tiles, not {len(tiles)}")
    # seconds x flop_per_s - startup = flop, divided by flop.
    rows, wants = [], []
    for machine, tiles in enumerate(timings):
        for tile in tiles:
            flop = flop_of(tile, workload=workload)
            row = np.zeros(len(timings) + 2)
            row[machine] = tile.seconds / flop
            row[-2:] = -1.0 / flop, -tile.samples / flop
            rows.append(row)
            wants.append(1.0)
    matrix, want = np.array(rows), np.array(wants)
    fitted = _fit(matrix, want)
    if not (fitted[:-2] > 0).all():
        raise InputError(f"these timings fit no speeds, but {fitted[:-2].tolist()} flop/s; time tiles of more different shapes")
    return Calibration(
        flop_per_s=tuple(float(value) for value in fitted[:-2]),
        startup=Startup(tile_flop=float(fitted[-2]), sample_flop=float(fitted[-1])),
    )


def _fit(matrix: np.ndarray, want: np.ndarray) -> np.ndarray:
    """Least squares in which the startups, the last two, are not negative: those that would be are left out."""
    used = list(range(matrix.shape[1]))
    while True:
        # Flop and seconds are of very different sizes; lstsq would take the smaller for nothing.
        scale = np.linalg.norm(matrix[:, used], axis=0)
        found = np.linalg.lstsq(matrix[:, used] / scale, want, rcond=None)[0] / scale
        negative = [column for column, value in zip(used, found, strict=True) if value < 0 and column >= matrix.shape[1] - 2]
        if not negative:
            break
        used.remove(negative[0])
    fitted = np.zeros(matrix.shape[1])
    fitted[used] = found
    return fitted


def flop_of(tile: TimedTile, *, workload: Workload) -> float:
    """Flop of an iteration of this tile, by Table 1."""
    alone = Tile(processor="", replica=0, samples=Span(0, tile.samples), units=Span(0, tile.units))
    return work_of([alone], samples=tile.samples, workload=workload).total_flop
