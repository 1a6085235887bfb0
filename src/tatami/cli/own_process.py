"""Whether this process is the command `tatami`, or a program that calls functions of the command."""

from __future__ import annotations

from types import SimpleNamespace

own_process = SimpleNamespace(claimed=False)
"""`claimed` where this process runs the command and nothing else, so that ranks may be copies of it."""
