"""The old name of what is in `tatami.tiled`, `tatami.parallel` and `tatami.checkpoints` now; see `tatami.nn`."""

from __future__ import annotations

from tatami.nn import moved_from

__getattr__ = moved_from("tatami.train")
