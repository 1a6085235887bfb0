"""What a record of each event must have for the page and `tatami watch` to show it; more it may have."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tatami.errors import TatamiError, shortened
from tatami.report import palette
from tatami.tiling import StagedLayout

PHASES = tuple(palette.PHASES)
"""By the names that records have."""
STAGE_PHASES = ("handover", "bubble")
"""Phases that only pipeline stages have."""

_LARGEST = 1 << 63
_COUNT = "a whole number of at least 0"
_POSITIVE = "a whole number of at least 1"
_NUMBER = "a number"
_LOSS = "a number or null"
_TEXT = "a text"
_ANY_NAME = "*"

_SPAN = (_COUNT, _COUNT)
_TILING = {
    "samples": _POSITIVE,
    "units": _POSITIVE,
    "tiles": [{"processor": _TEXT, "replica": _COUNT, "samples": _SPAN, "units": _SPAN}],
}
_SPEEDS = {_ANY_NAME: _NUMBER}
_ALARM = {"what": _TEXT, "at": _COUNT, "began": _COUNT, "slower": _NUMBER, "error": _NUMBER}
_STAGE_RANK = {
    **dict.fromkeys(("rank", "pieces"), _TEXT),
    **dict.fromkeys(("stage", "replica", "samples", "micro_batches", "in_flight", "memory_bytes"), _COUNT),
    "memory_given_bytes?": _LOSS,
}
_SHAPES: Mapping[str, Mapping[str, Any]] = {
    "tiling": {
        "tiling": _TILING,
        "why?": _TEXT,
        "speeds?": _SPEEDS,
        "sent_bytes?": {"*": {"*": _COUNT}},
        "native_bytes?": _COUNT,
        "described?": {"ranks": [_STAGE_RANK], "sentences": [_TEXT]},
    },
    "phases": {
        "iterations": _POSITIVE,
        "ranks": {_ANY_NAME: {f"{phase}_s{'?' * (phase in STAGE_PHASES)}": _NUMBER for phase in PHASES}},
    },
    "timeline": {"ranks": {_ANY_NAME: [(_TEXT, _COUNT, _NUMBER, _NUMBER)]}},
    "train": {"loss": _LOSS, "samples_per_s?": _LOSS, "epoch?": _COUNT},
    "round": {"loss": _LOSS, "samples_per_s?": _LOSS},
    "validation": {"loss?": _LOSS},
    "check": {"decision": _TEXT, "reason": _TEXT, "imbalance": _NUMBER, "moved_units": _COUNT, "speeds?": _SPEEDS},
    "watch": {"alarms": [_ALARM], "price_s": {"*": _NUMBER}, "lost_s": {"*": _NUMBER}, "speeds?": _SPEEDS},
    "failure": {"who": _TEXT, "process": _TEXT, "how": _TEXT, "silent_s?": _LOSS},
    "processes": {"ranks": {_ANY_NAME: _TEXT}},
    "members": {"reason": _TEXT, "settled": _TEXT, "members": [_TEXT], "moved_units": _COUNT, "lost_s": _NUMBER},
    "error": {"kind": _TEXT, "message": _TEXT},
    "warning": {"message": _TEXT},
    "end": {"stopped?": _TEXT},
}
"""By event. `name?` may be absent, `*` is any name, `[shape]` a list, `(shape, ...)` a list of so many."""
_OF_ANY_EVENT = {"at_s?": _NUMBER, "iteration?": _COUNT}


def lack_of(record: Mapping[str, Any]) -> str | None:
    """What is wrong with a record, in words that follow its name; None where it can be shown."""
    event = record["event"]
    lack = _lack(record, {**_OF_ANY_EVENT, **({"iteration": _COUNT, **_SHAPES[event]} if event in _SHAPES else {})}, "")
    if lack is None and event == "tiling" and record.get("stages") is not None:
        try:
            StagedLayout.from_dict(record["stages"])
        except TatamiError as error:
            return f"has 'stages' that are {error}"
    if lack is None and event == "watch" and (unpriced := record["price_s"].keys() - record["lost_s"].keys()):
        return f"has no 'lost_s.{min(unpriced)}'"
    return lack


def _lack(value: Any, shape: Any, where: str) -> str | None:
    """As `lack_of`, of a part of it that is called `where`."""
    if isinstance(shape, str):
        return None if _is(value, shape) else f"has {shortened(repr(value))} as '{where}', which must be {shape}"
    if isinstance(shape, Mapping):
        if not isinstance(value, Mapping):
            return f"has {shortened(repr(value))} as '{where}', which must be an object"
        prefix = f"{where}." if where else ""
        for key, each in shape.items():
            name = key.removesuffix("?")
            if name == _ANY_NAME:
                lacks = (_lack(part, each, f"{prefix}{part_name}") for part_name, part in value.items())
                return next(filter(None, lacks), None)
            if name in value:
                if (lack := _lack(value[name], each, f"{prefix}{name}")) is not None:
                    return lack
            elif name == key:
                return f"has no '{prefix}{name}'"
        return None
    if not isinstance(value, list) or (isinstance(shape, tuple) and len(value) != len(shape)):
        many = "a list" if isinstance(shape, list) else f"a list of {len(shape)}"
        return f"has {shortened(repr(value))} as '{where}', which must be {many}"
    shapes = shape * len(value) if isinstance(shape, list) else shape
    parts = enumerate(zip(value, shapes, strict=True))
    return next(filter(None, (_lack(part, each, f"{where}[{index}]") for index, (part, each) in parts)), None)


def _is(value: Any, what: str) -> bool:
    if what == _TEXT:
        return isinstance(value, str)
    if value is None:
        return what == _LOSS
    if isinstance(value, bool) or not isinstance(value, int | float) or (isinstance(value, int) and abs(value) >= _LARGEST):
        return False
    return what in (_NUMBER, _LOSS) or (isinstance(value, int) and value >= (what == _POSITIVE))
