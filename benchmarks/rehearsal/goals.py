"""What is asked of predictions, and how far errors are from it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

ASKED = {"median": 0.05, "95th percentile": 0.15}
_ASKED_INSIDE = 0.9


def errors_against_goals(errors: Sequence[float]) -> dict[str, Any]:
    """Of errors as shares of what was measured, of either sign: their size, and whether it is within what is asked."""
    sizes = np.abs(errors)
    got = {"median": float(np.median(sizes)), "95th percentile": float(np.percentile(sizes, 95)), "largest": float(max(sizes))}
    return {"got": got, "asked": ASKED, "holds": all(got[name] <= ASKED[name] for name in ASKED)}


def inside_expected_range(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of records with `measured_s` and `range_s`: how many were measured in the range that their plan expects."""
    inside = [each["range_s"][0] <= each["measured_s"] <= each["range_s"][1] for each in records]
    share = sum(inside) / len(inside)
    return {"what": "measured in the expected range", "got": share, "asked": _ASKED_INSIDE, "holds": share >= _ASKED_INSIDE}
