"""Ranks that are threads share torch's random state: what seeds it and draws from it is done by one of them at a time."""

import functools
import itertools
import threading
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch
from torch import nn

_Arguments = ParamSpec("_Arguments")
_Result = TypeVar("_Result")
_LOCK = threading.RLock()


def one_at_a_time(draw: Callable[_Arguments, _Result]) -> Callable[_Arguments, _Result]:
    """A function that seeds torch's random state first, and is called by several ranks."""

    @functools.wraps(draw)
    def alone(*arguments: _Arguments.args, **options: _Arguments.kwargs) -> _Result:
        with _LOCK:
            return draw(*arguments, **options)

    return alone


@one_at_a_time
def mlp(*widths: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> nn.Sequential:
    """Linear layers of these widths, with tanh between them; the same ones in every call."""
    torch.manual_seed(seed)
    layers = [each for pair in itertools.pairwise(widths) for each in (nn.Linear(*pair), nn.Tanh())]
    return nn.Sequential(*layers[:-1]).to(dtype)
