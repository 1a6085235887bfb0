"""Quantities as text: the one place where "1 Gbit/s", "24 GiB" or "50 us" become SI numbers, and numbers become such text.

A number, or a text without a unit, is taken as the SI unit itself: bytes, bytes/s, seconds, flop/s. `b` and `bit` are bits, `B`
is a byte; `k M G T P` are powers of 1000, `Ki Mi Gi Ti Pi` powers of 1024. A `format_` function without `digits` prints a text
that its `parse_` function turns into exactly the same number again; with `digits` it rounds, for people.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction

from tatami.errors import InputError, shortened

LARGEST_SIZE_BYTES = 2**63 - 1
LARGEST_BANDWIDTH_BYTES_PER_S = 1e18
LARGEST_DURATION_S = 1e12
LARGEST_SPEED = 1e24
"""A larger value is a typing error, and sums and products of it would overflow."""
_LARGEST = sys.float_info.max
_LONGEST_TEXT = 100
_SI = {
    "": Fraction(1),
    "k": Fraction(10**3),
    "M": Fraction(10**6),
    "G": Fraction(10**9),
    "T": Fraction(10**12),
    "P": Fraction(10**15),
}
_BINARY = {f"{prefix}i": Fraction(1024**power) for power, prefix in enumerate("KMGTP", start=1)}
_NUMBER_THEN_UNIT = re.compile(
    r"\s*(?P<number>[+-]?(?:\d+\.?\d*|\.\d+)(?:[eE][+-]?\d{1,3})?)\s*(?P<unit>[^\d\s].*?)?\s*", re.ASCII
)


@dataclass(frozen=True, kw_only=True, eq=False)
class _Quantity:
    """One kind of quantity: how its units are called, and what each is in SI units.

    Attributes:
        name: as it is called in an error, with its article.
        si: the unit of a number without one.
        units: every symbol that is understood, with its factor: a fraction, since 50 * 1e-6 is not 50e-6 in floating point.
        printed: the symbols that `format` chooses from, largest first.
        examples: shown in errors.
    """

    name: str
    si: str
    units: Mapping[str, Fraction]
    printed: tuple[str, ...]
    examples: str

    def parse(self, value: object, *, largest: float) -> float:
        return _parsed(self, value, largest) if isinstance(value, str) else self.parse_exactly(value, largest=largest)

    def parse_exactly(self, value: object, *, largest: float) -> float:
        return float(self.at_most(largest, self.exact(value), seen=value))

    def at_most(self, largest: float, number: Fraction, *, seen: object) -> Fraction:
        if number > largest:
            raise InputError(f"must be at most {self.format(largest, digits=4)}, not {_shown(seen)}")
        return number

    def exact(self, value: object) -> Fraction:
        if isinstance(value, str):
            number = self.read(value)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            if not -_LARGEST <= value <= _LARGEST:  # nan too: it compares false
                raise InputError(f"must be a finite number, not {_shown(value)}")
            number = Fraction(value)
        else:
            raise InputError(f"must be {self.name}, not {_shown(value)}; {self._forms()}")
        if number > _LARGEST:
            raise InputError(f"must be a finite number, not {_shown(value)}")
        if number < 0:
            raise InputError(f"must be >= 0, not {shortened(str(value))}")
        return number

    def format(self, value: float, *, digits: int | None) -> str:
        number = self.exact(value)
        if not number:
            return f"0 {self.si}"
        scaled = {symbol: number / self.units[symbol] for symbol in (*self.printed, self.si)}
        if digits is not None:
            # 0.9996 s is "1 s", not "1,000 ms": what counts is what would be read.
            for symbol in self.printed[:-1]:
                if float((text := _rounded(float(scaled[symbol]), digits=digits)).replace(",", "")) >= 1:
                    return f"{text} {symbol}"
            return f"{_rounded(float(scaled[self.printed[-1]]), digits=digits)} {self.printed[-1]}"
        # The shortest text that is the float nearest to each count, without a trailing `.0`; "21.6 us" before "6e-09 h".
        texts = [f"{repr(float(each)).removesuffix('.0')} {symbol}" for symbol, each in scaled.items() if each <= _LARGEST]
        return min(
            (text for text in texts if float(self.exact(text)) == value), key=lambda text: ("e" in text.split()[0], len(text))
        )

    def read(self, text: str) -> Fraction:
        match = _NUMBER_THEN_UNIT.fullmatch(text) if len(text) <= _LONGEST_TEXT else None
        if match is None:
            raise InputError(f"{_shown(text)} is not {self.name}; {self._forms()}")
        unit = (match["unit"] or self.si).replace("\u00b5", "u").replace("\u03bc", "u")  # the micro sign and the Greek letter
        if unit not in self.units:
            otherwise_cased = [symbol for symbol in self.units if symbol.lower() == unit.lower()]
            near = otherwise_cased or difflib.get_close_matches(unit, self.units, n=2, cutoff=0.5)
            hint = f" (did you mean {' or '.join(near)}?)" if near else ""
            raise InputError(f"{text!r} is not {self.name}: unknown unit {unit!r}{hint}; {self._forms()}")
        return Fraction(match["number"]) * self.units[unit]

    def _forms(self) -> str:
        return f"write {self.examples}, or a plain number of {self.si}"


@functools.lru_cache(maxsize=1024)
def _parsed(quantity: _Quantity, text: str, largest: float) -> float:
    """A file of 60,000 links has few different texts, and each is parsed once."""
    return quantity.parse_exactly(text, largest=largest)


def _prefixed(prefixes: Mapping[str, Fraction], *symbols: str, factor: Fraction = _SI[""]) -> dict[str, Fraction]:
    return {prefix + symbol: scale * factor for symbol in symbols for prefix, scale in prefixes.items()}


_SIZE = _Quantity(
    name="a size in bytes",
    si="B",
    units={
        **_prefixed(_SI | _BINARY, "B"),
        **_prefixed(_SI | _BINARY, "bit", factor=Fraction(1, 8)),
        "bytes": Fraction(1),
        "byte": Fraction(1),
    },
    printed=("PiB", "TiB", "GiB", "MiB", "KiB", "B"),
    examples="'24 GiB', '64 MB' or '512 kB'",
)
_BANDWIDTH = _Quantity(
    name="a bandwidth",
    si="B/s",
    units={
        **_prefixed(_SI | _BINARY, "B/s"),
        **_prefixed(_SI | _BINARY, "bit/s", "b/s", "bps", factor=Fraction(1, 8)),
        "bytes/s": Fraction(1),
    },
    printed=("Tbit/s", "Gbit/s", "Mbit/s", "kbit/s", "bit/s"),
    examples="'1 Gbit/s', '125 MB/s' or '12 GiB/s'",
)
_DURATION = _Quantity(
    name="a duration",
    si="s",
    units={
        "y": Fraction(365 * 86400),
        "w": Fraction(7 * 86400),
        "d": Fraction(86400),
        "h": Fraction(3600),
        "min": Fraction(60),
        "s": Fraction(1),
        "ms": Fraction(1, 10**3),
        "us": Fraction(1, 10**6),
        "ns": Fraction(1, 10**9),
    },
    printed=("y", "d", "h", "min", "s", "ms", "us", "ns"),
    examples="'50 us', '1.5 ms', '20 s', '5 min', '2 h', '30d' or '3y' (of 365 days)",
)
_SPEED = _Quantity(
    name="a computing speed",
    si="flop/s",
    units=_prefixed(_SI, "flop/s", "flops", "FLOP/s", "FLOPS"),
    printed=("Pflop/s", "Tflop/s", "Gflop/s", "Mflop/s", "kflop/s", "flop/s"),
    examples="'10 Gflop/s' or '1.5 Tflop/s'",
)
_FLOP = _Quantity(
    name="an amount of computing",
    si="flop",
    units=_prefixed(_SI, "flop", "FLOP"),
    printed=("Pflop", "Tflop", "Gflop", "Mflop", "kflop", "flop"),
    examples="'10 Mflop' or '2.5 Gflop'",
)


def parse_size(value: object) -> int:
    """Bytes of "24 GiB", "64 MB", "512 kbit" or a plain number; a part of a byte is rounded up.

    Raises:
        InputError: not a size, negative, not finite, or more than 8 EiB; shows the accepted forms.
    """
    return math.ceil(_SIZE.at_most(LARGEST_SIZE_BYTES, _SIZE.exact(value), seen=value))


def format_size(size_bytes: int, *, digits: int | None = None) -> str:
    """ "24 GiB"; exact where `digits` is None."""
    return _SIZE.format(size_bytes, digits=digits) if digits is not None else _exact_size(size_bytes)


def has_unit(value: object) -> bool:
    """Whether `value` is a text with a unit, as "24 GiB"; a number is not."""
    match = _NUMBER_THEN_UNIT.fullmatch(value) if isinstance(value, str) else None
    return match is not None and match["unit"] is not None


def parse_bandwidth(value: object) -> float:
    """Bytes per second of "1 Gbit/s", "125 MB/s", "10 Gbps" or a plain number.

    Raises:
        InputError: not a bandwidth, negative, not finite, or more than 1e18 bytes/s; shows the accepted forms.
    """
    return _BANDWIDTH.parse(value, largest=LARGEST_BANDWIDTH_BYTES_PER_S)


def format_bandwidth(bandwidth_bytes_per_s: float, *, digits: int | None = None) -> str:
    """ "1 Gbit/s": in bits, as links are sold; exact where `digits` is None."""
    return _BANDWIDTH.format(bandwidth_bytes_per_s, digits=digits)


def parse_duration(value: object) -> float:
    """Seconds of "50 us", "20 s", "30d", "3y" (years of 365 days) or a plain number.

    Raises:
        InputError: not a duration, negative, not finite, or more than 1e12 s; shows the accepted forms.
    """
    return _DURATION.parse(value, largest=LARGEST_DURATION_S)


def format_duration(duration_s: float, *, digits: int | None = None) -> str:
    """ "50 us"; exact where `digits` is None."""
    return _DURATION.format(duration_s, digits=digits)


def parse_speed(value: object) -> float:
    """Flop/s of "10 Gflop/s", or a plain number: a relative speed stays what it is.

    Raises:
        InputError: not a speed, negative, not finite, or more than 1e24 flop/s; shows the accepted forms.
    """
    return _SPEED.parse(value, largest=LARGEST_SPEED)


def format_speed(speed_flop_per_s: float, *, digits: int | None = None) -> str:
    """ "10 Gflop/s"; exact where `digits` is None. For measured speeds; a relative one is printed as the number it is."""
    return _SPEED.format(speed_flop_per_s, digits=digits)


def parse_flop(value: object) -> float:
    """Flop of "10 Mflop", or a plain number.

    Raises:
        InputError: no such amount, negative, or not finite; shows the accepted forms.
    """
    return _FLOP.parse(value, largest=_LARGEST)


def format_flop(work_flop: float, *, digits: int | None = None) -> str:
    """ "10 Mflop"; exact where `digits` is None."""
    return _FLOP.format(work_flop, digits=digits)


def _exact_size(size_bytes: int) -> str:
    """In the largest unit that divides it."""
    size_bytes = math.ceil(_SIZE.exact(size_bytes))
    for prefix, scale in sorted((_SI | _BINARY).items(), key=lambda item: -item[1]):
        if size_bytes and size_bytes % scale == 0:
            return f"{size_bytes // scale} {prefix}B"
    return "0 B"


def _shown(value: object) -> str:
    """As an error repeats it; digits of a number beyond what Python prints are not worth the trouble."""
    try:
        return shortened(repr(value))
    except ValueError:
        return "a number of thousands of digits"


def _rounded(value: float, *, digits: int) -> str:
    """`digits` significant digits without an exponent, thousands apart: 1,234 or 0.0123."""
    if value == 0:
        return "0"
    decimals = min(12, max(0, digits - 1 - math.floor(math.log10(value))))
    text = f"{float(f'{value:.{digits}g}'):,.{decimals}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
