"""Which all-reduce is fastest here: a table measured once per cluster, read by message size. The choice is a pure function."""

from __future__ import annotations

import hashlib
import json
import math
from bisect import bisect_left
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from tatami.errors import InputError

FORMAT = 1


@dataclass(frozen=True, kw_only=True)
class Fingerprint:
    """What a table was measured on; times hold for nothing else.

    Attributes:
        hosts: names, in the order of their first rank.
        ranks_per_host: how many each has.
        cores: that a rank of each may use.
        cpus: the processor model of each.
        library: what moves the bytes, with its version.
        tatami: the version.
    """

    hosts: tuple[str, ...]
    ranks_per_host: tuple[int, ...]
    cores: tuple[int, ...]
    cpus: tuple[str, ...]
    library: str
    tatami: str

    @property
    def key(self) -> str:
        """Key of the table's file: clusters that differ in hosts or ranks have tables of their own."""
        return hashlib.sha256(repr((self.hosts, self.ranks_per_host)).encode()).hexdigest()[:16]

    def differences(self, other: Fingerprint) -> list[str]:
        """What is not as in `other`, in words: `library: MPICH 4.3, now MPICH 5.0`."""
        names = [field.name for field in fields(self)]
        return [
            f"{name}: {_told(getattr(self, name))}, now {_told(getattr(other, name))}"
            for name in names
            if getattr(self, name) != getattr(other, name)
        ]


@dataclass(frozen=True, kw_only=True)
class SizeTimings:
    """Medians at one size of message: seconds by algorithm (`hierarchical+native` is one across hosts by another)."""

    size_bytes: int
    seconds: Mapping[str, float]


@dataclass(frozen=True, kw_only=True)
class TuningTable:
    """Timings by rising size, and what they were measured on."""

    fingerprint: Fingerprint
    timings: tuple[SizeTimings, ...]

    def choose(self, size_bytes: int, *, among: Collection[str]) -> str | None:
        """The fastest of `among` for a message of this size; None where none of them was measured.

        Between two measured sizes each algorithm's time is interpolated on logarithms of both; beyond the ends it is taken from
        the nearest one.
        """
        predicted = {
            name: self._predicted_s(name, size_bytes)
            for name in among
            if any(name in timing.seconds for timing in self.timings)
        }
        return min(predicted, key=lambda name: predicted[name]) if predicted else None

    def efficient_bytes(self, *, share: float = 0.8) -> int | None:
        """The smallest measured message at which the fastest algorithm moves `share` of the bytes per second of its best size.

        None where nothing was measured.
        """
        bandwidths = {
            timing.size_bytes: timing.size_bytes / min(timing.seconds.values()) for timing in self.timings if timing.seconds
        }
        best = max(bandwidths.values(), default=0.0)
        return next((size_bytes for size_bytes, bandwidth in bandwidths.items() if bandwidth >= share * best), None)

    def _predicted_s(self, name: str, size_bytes: int) -> float:
        points = [(timing.size_bytes, timing.seconds[name]) for timing in self.timings if name in timing.seconds]
        index = bisect_left(points, (size_bytes, -math.inf))
        if index == 0 or index == len(points):
            nearest_bytes, nearest_s = points[min(index, len(points) - 1)]
            # Beyond the largest a time grows with the bytes; below the smallest it is all latency.
            return nearest_s * max(1.0, size_bytes / nearest_bytes)
        (low_bytes, low_s), (high_bytes, high_s) = points[index - 1], points[index]
        share = math.log(size_bytes / low_bytes) / math.log(high_bytes / low_bytes)
        return math.exp((1 - share) * math.log(low_s) + share * math.log(high_s))

    def to_json(self) -> str:
        """Lines of JSON, for a file."""
        timings = [{"size_bytes": timing.size_bytes, "seconds": dict(timing.seconds)} for timing in self.timings]
        record = {"format": FORMAT, "fingerprint": asdict(self.fingerprint), "timings": timings}
        return json.dumps(record, indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> TuningTable:
        """What `to_json` wrote.

        Raises:
            InputError: it is not a tuning table; says what is wrong.
        """
        try:
            record = json.loads(text)
            if record["format"] != FORMAT:
                raise InputError(f"a tuning table of format {record['format']}; this version reads {FORMAT}")
            table = cls(
                fingerprint=_fingerprint(record["fingerprint"]),
                timings=tuple(
                    SizeTimings(
                        size_bytes=int(timing["size_bytes"]),
                        seconds={str(name): _positive(value) for name, value in timing["seconds"].items()},
                    )
                    for timing in record["timings"]
                ),
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            if isinstance(error, InputError):
                raise
            raise InputError(f"not a tuning table: {type(error).__name__}: {error}") from error
        sizes = [timing.size_bytes for timing in table.timings]
        if sizes != sorted(set(sizes)) or (sizes and sizes[0] < 1):
            raise InputError(f"not a tuning table: sizes must be positive and rise, not {sizes}")
        return table


def _fingerprint(record: Mapping[str, Any]) -> Fingerprint:
    return Fingerprint(
        hosts=tuple(map(str, record["hosts"])),
        ranks_per_host=tuple(map(int, record["ranks_per_host"])),
        cores=tuple(map(int, record["cores"])),
        cpus=tuple(map(str, record["cpus"])),
        library=str(record["library"]),
        tatami=str(record["tatami"]),
    )


def _positive(value: object) -> float:
    seconds = float(value) if isinstance(value, int | float) else math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        raise InputError(f"not a tuning table: a time must be a finite number > 0, not {value!r}")
    return seconds


def _told(value: object) -> str:
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)
