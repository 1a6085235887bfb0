"""Programs of the system, called without a shell; and what also works on a machine on which no lab can be built."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence

from tatami.errors import LabError

INSTEAD = (
    "Without a lab, tatami.testing.Slowdown plays unequal speeds on any machine, though not links and deaths: "
    "tatami train --speeds 1,1,0.5,0.25 --emulate"
)
_TIMEOUT_S = 20.0


def call(*words: str) -> str:
    """Run a program of the system, without a shell, and return what it printed.

    Raises:
        LabError: it failed; shows the command and what it said.
    """
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=_TIMEOUT_S, check=False)
    except subprocess.TimeoutExpired:
        raise LabError(f"`{' '.join(words)}` did not end within {_TIMEOUT_S:g} s. {INSTEAD}") from None
    if done.returncode != 0:
        said = done.stderr.strip() or f"exit code {done.returncode}"
        raise LabError(f"the lab could not be built: `{' '.join(words)}` said: {said}. {INSTEAD}")
    return done.stdout


def succeeds(words: Sequence[str]) -> bool:
    """Whether a program of the system does what it is asked; for probing, and for taking away what may be gone."""
    return subprocess.run(words, capture_output=True, timeout=_TIMEOUT_S, check=False).returncode == 0
