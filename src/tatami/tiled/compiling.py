"""`torch.compile` of a tiled model is refused: what it makes of a forward pass that sends and receives is not that pass."""

from __future__ import annotations

import sys
from typing import Any

import torch

from tatami.errors import ModelError


def refuse_compiling() -> None:
    """
    Raises:
        ModelError: this runs under `torch.compile`.
    """
    if "torch._dynamo" not in sys.modules:  # nothing was ever compiled, and to import it takes seconds
        return
    frames: Any = torch._C._dynamo.eval_frame
    if frames.get_eval_frame_callback() is not None:
        raise ModelError(
            "torch.compile follows a tiled model into the sums over its ranks, which it cannot compile. Call the tiled model "
            "outside of torch.compile; on one rank alone it may be compiled"
        )
