"""What is to happen to a lab while a command runs in it: `20s kill h3`."""

from __future__ import annotations

from dataclasses import dataclass

from tatami.cluster.speed_table import check_speeds
from tatami.errors import InputError
from tatami.units import parse_bandwidth, parse_duration, parse_speed

VALUES = {"kill": None, "cut": None, "mend": None, "speed": "a speed, as 0.25", "rate": "a bandwidth, as 100Mbit/s"}
"""Every verb, and the value that comes after the host, if any."""


@dataclass(frozen=True, kw_only=True)
class LabEvent:
    """One change of a lab.

    Attributes:
        at_s: seconds after the command was started.
        verb: a key of `VALUES`.
        host: whom it happens to (for `speed` also a processor).
        value: the new speed, or the new rate in bytes/s; 0 where the verb has none.
    """

    at_s: float
    verb: str
    host: str
    value: float = 0.0


def parse_event(text: str) -> LabEvent:
    """The event in "20s kill h3", "1min speed h3 0.25" or "5s rate h1 100Mbit/s".

    Raises:
        InputError: a word is missing, unknown, or no value of its kind; shows the form.
    """
    forms = "; ".join(f"TIME {verb} HOST{'' if value is None else f' ({value})'}" for verb, value in VALUES.items())
    words = text.split()
    if len(words) < 3 or words[1] not in VALUES or len(words) != num_words(words[1]):
        raise InputError(f"{text!r} is not an event; write one of: {forms}")
    at, verb, host, *values = words
    try:
        at_s = parse_duration(at)
        value = parse_bandwidth(values[0]) if verb == "rate" else parse_speed(values[0]) if values else 0.0
        if verb == "speed":
            check_speeds([value])
        if verb == "rate" and value <= 0:
            raise InputError("a rate must be > 0; to have none, cut the host")
    except InputError as error:
        raise InputError(f"the event {text!r} cannot be used: {error}") from None
    return LabEvent(at_s=at_s, verb=verb, host=host, value=value)


def num_words(verb: str) -> int:
    """Words of an event with this verb."""
    return 3 if VALUES.get(verb) is None else 4
