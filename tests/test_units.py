"""Texts with units, and the tree of errors."""

import pickle
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tatami import errors, units
from tatami.errors import InputError

POSITIVE = st.floats(min_value=1e-300, max_value=1e12) | st.integers(0, 10**12).map(float) | st.just(0.0)


@pytest.mark.parametrize(
    ("parse", "text", "value"),
    [
        (units.parse_bandwidth, "1 Gbit/s", 125e6),
        (units.parse_bandwidth, "1Gbps", 125e6),
        (units.parse_bandwidth, "1 Gb/s", 125e6),
        (units.parse_bandwidth, "125 MB/s", 125e6),
        (units.parse_bandwidth, "2 GiB/s", 2.0**31),
        (units.parse_bandwidth, "1e3", 1000.0),
        (units.parse_bandwidth, 7, 7.0),
        (units.parse_size, "24 GiB", 24 * 2**30),
        (units.parse_size, "64 MB", 64_000_000),
        (units.parse_size, "8 kbit", 1000),
        (units.parse_size, "12", 12),
        (units.parse_size, "1.5 B", 2),
        (units.parse_size, 2**63 - 1, 2**63 - 1),
        (units.parse_duration, "50 us", 50e-6),
        (units.parse_duration, "50 µs", 50e-6),
        (units.parse_duration, "3 ns", 3e-9),
        (units.parse_duration, "1.5 ms", 1.5e-3),
        (units.parse_duration, "20 s", 20.0),
        (units.parse_duration, "5 min", 300.0),
        (units.parse_duration, "2h", 7200.0),
        (units.parse_duration, "30d", 30 * 86400.0),
        (units.parse_duration, "1 w", 7 * 86400.0),
        (units.parse_duration, "3y", 3 * 365 * 86400.0),
        (units.parse_speed, "10 Gflop/s", 1e10),
        (units.parse_speed, "1.5 Tflops", 1.5e12),
        (units.parse_speed, "0.25", 0.25),
        (units.parse_speed, 3, 3.0),
    ],
)
def test_texts_are_si_to_the_last_bit(parse: Callable[[object], float], text: object, value: float) -> None:
    assert parse(text) == value


@pytest.mark.parametrize(
    ("printed", "text"),
    [
        (units.format_bandwidth(125e6), "1 Gbit/s"),
        (units.format_bandwidth(5e9), "40 Gbit/s"),
        (units.format_bandwidth(123456789.0, digits=3), "988 Mbit/s"),
        (units.format_size(24 * 2**30), "24 GiB"),
        (units.format_size(10**9), "1 GB"),
        (units.format_size(1001), "1001 B"),
        (units.format_size(0), "0 B"),
        (units.format_size(1_500_000_000, digits=2), "1.4 GiB"),
        (units.format_duration(50e-6), "50 us"),
        (units.format_duration(3 * 365 * 86400.0), "3 y"),
        (units.format_duration(90.0), "90 s"),
        (units.format_duration(21.6e-6), "21.6 us"),
        (units.format_duration(0.0123456, digits=3), "12.3 ms"),
        (units.format_duration(0.9996, digits=3), "1 s"),
        (units.format_duration(0.0, digits=3), "0 s"),
        (units.format_speed(1.2345e10, digits=3), "12.3 Gflop/s"),
        (units.format_speed(1e18, digits=3), "1,000 Pflop/s"),
    ],
)
def test_printed(printed: str, text: str) -> None:
    assert printed == text


@given(POSITIVE)
def test_what_is_printed_exactly_is_read_as_the_same_number(value: float) -> None:
    assert units.parse_bandwidth(units.format_bandwidth(value)) == value
    assert units.parse_duration(units.format_duration(value)) == value
    assert units.parse_speed(units.format_speed(value)) == value


@given(st.integers(0, 2**63 - 1))
def test_a_size_comes_back_whole(size_bytes: int) -> None:
    assert units.parse_size(units.format_size(size_bytes)) == size_bytes


@given(st.floats(min_value=1e-9, max_value=1e9), st.integers(2, 6))
def test_what_is_rounded_is_near(value: float, digits: int) -> None:
    text = units.format_duration(value, digits=digits).replace(",", "")
    assert units.parse_duration(text) == pytest.approx(value, rel=10.0 ** (1 - digits))


@pytest.mark.parametrize(
    ("parse", "value", "message"),
    [
        (units.parse_size, "3 KB", r"unknown unit 'KB' \(did you mean kB\?\); write '24 GiB', '64 MB'"),
        (units.parse_bandwidth, "1 gbit/s", r"unknown unit 'gbit/s' \(did you mean Gbit/s\?\); write '1 Gbit/s'"),
        (units.parse_bandwidth, "1 Gbit", "unknown unit 'Gbit'"),
        (units.parse_duration, "5 m", "did you mean ms or min"),
        (units.parse_duration, "", "'' is not a duration; write '50 us'"),
        (units.parse_duration, "soon", "'soon' is not a duration"),
        (units.parse_duration, "-5 s", "must be >= 0, not -5 s"),
        (units.parse_size, "1e30 GB", "must be at most 8,192 PiB, not '1e30 GB'"),
        (units.parse_size, 2**63, "must be at most 8,192 PiB, not 9223372036854775808"),
        (units.parse_bandwidth, 1e308, r"must be at most 8,000,000 Tbit/s, not 1e\+308"),
        (units.parse_duration, "1e13 s", "must be at most 31,710 y, not '1e13 s'"),
        (units.parse_speed, "1e25", "must be at most 1,000,000,000 Pflop/s, not '1e25'"),
        (units.parse_size, "9" * 1000, r"'9+\.\.\.9+' is not a size in bytes; write"),
        (units.parse_speed, "1e999", "must be a finite number, not '1e999'"),
        (units.parse_speed, float("nan"), "must be a finite number, not nan"),
        (units.parse_size, float("inf"), "must be a finite number, not inf"),
        (units.parse_speed, True, "must be a computing speed, not True; write '10 Gflop/s'"),
        (units.parse_size, None, "must be a size in bytes, not None"),
    ],
)
def test_what_is_refused(parse: Callable[[object], float], value: object, message: str) -> None:
    with pytest.raises(InputError, match=message):
        parse(value)


def test_numbers_of_thousands_of_digits_are_refused_in_short() -> None:
    for number in (10**5000, -(10**5000)):
        with pytest.raises(InputError, match=r"must be a finite number, not a number of thousands of digits$"):
            units.parse_size(number)
    with pytest.raises(InputError) as caught:
        units.parse_size("9" * 10_000_000)
    assert len(str(caught.value)) < 500


@pytest.mark.parametrize(
    "error",
    [
        errors.RankDiedError("gone", rank=3),
        errors.NotFiniteError("nan", rank=1, iteration=None),
        errors.MemoryLackError("too much", lacking_bytes={"p0": 8.0}),
        errors.MissingExtraError("ray", extra="server"),
        errors.ClusterError("wrong", problems=["speed", "memory"]),
        errors.InputError("bad"),
        errors.OutputExistsError("there"),
    ],
)
def test_an_error_is_the_same_after_pickle(error: errors.TatamiError) -> None:
    there = pickle.loads(pickle.dumps(error))
    assert type(there) is type(error)
    assert str(there) == str(error)
    assert vars(there) == vars(error)


def test_no_error_is_left_out() -> None:
    """Whoever adds one with arguments of its own finds this."""
    own = {kind.__name__ for kind in vars(errors).values() if isinstance(kind, type) and "__init__" in vars(kind)}
    assert own == {"ClusterError", "MemoryLackError", "MissingExtraError", "NotFiniteError", "RankDiedError"}
